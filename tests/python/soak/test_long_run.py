"""Two ranks are killed in a sweep, and three continue from their newest checkpoint. Their rows equal those of a dict."""

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim import SGD
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from long_run import IMPORTED, KILLED_AT, STEPS, Expected, Model, Run, counts_of, rows_of
from processes import Child, World, process_group
from torchrec_embcache import cache_modules
from torchrec_embcache.checkpoint import Saver

pytestmark = pytest.mark.filterwarnings("ignore:table .* did not fit", "ignore:table .* has no room for both")


def train_until_killed(say: Callable[[Any], None], rank: int, folder: str, store: str) -> None:
    """Train up to one step after the sweep that takes the imported rows, and die."""
    warnings.simplefilter("ignore")
    with process_group(rank, 2, store):
        run = Run(rank, 2, Path(folder), "two")
        while run.expected.step < KILLED_AT:
            run.train()
            if run.expected.step < KILLED_AT:
                run.after()
        stats = {name: table.stats() for name, table in run.tables.items()}
        under_way = stats["old"].eviction.is_sweeping
        say((run.saves, under_way, stats["old"].eviction.evicted, {name: one.ssd.rows for name, one in stats.items()}))
        try:
            dist.barrier()
        finally:
            # The other one may have gone before this one has left the barrier.
            os.kill(os.getpid(), signal.SIGKILL)


def went_on(rank: int, world: int, folder: str) -> Any:
    """Go on from the newest checkpoint to the end, and save all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(rank, world, Path(folder), "three")
        run.load()
        began = run.expected.step
        while run.expected.step < STEPS:
            run.train()
            run.after()
        run.wait()
        stats = {name: table.stats() for name, table in run.tables.items()}
        pending = {name: one.admission.pending for name, one in stats.items()}
        rows = rows_of(run.tables)
        assert {name: len(table) for name, table in run.tables.items()} == {
            name: sum(table == name for table, _ in rows) for name in run.tables
        }
        # The rows of the last save are swept first, where the policy says so.
        Saver().save(run.model, Path(folder, "end"))
        return began, rows, pending, run.saves, rows_of(run.tables)


def test_two_ranks_killed_in_a_sweep_continue_as_three(three_ranks: World, tmp_path: Path) -> None:
    """At the end the rows are those of a dict that was not interrupted."""
    ranks = [Child(train_until_killed, rank, str(tmp_path), str(tmp_path / "store")) for rank in range(2)]
    killed = [child.ended() for child in ranks]
    assert [status for _, status in killed] == [-signal.SIGKILL] * 2
    buried = 0
    for said, _ in killed:
        ((saves, under_way, evicted, on_ssd),) = said
        assert saves == ["full", "delta beside", "delta", "delta beside", "delta", "full", "delta", "delta beside"]
        assert under_way
        buried += evicted
        assert on_ssd["seldom"] > 20
    at_the_kill = Expected(KILLED_AT).tables["old"].evicted
    assert at_the_kill - len(IMPORTED) < buried < at_the_kill, "some of the dead rows are buried, and some not"

    found = three_ranks.run(went_on, str(tmp_path))
    assert {began for began, *_ in found} == {1200}
    assert found[0][3] == ["delta", "delta beside", "delta", "delta beside", "delta"]
    expected = Expected(STEPS)
    rows: dict[tuple[str, int], tuple[Any, ...]] = {}
    for _, of_rank, *_ in found:
        assert not rows.keys() & of_rank.keys()
        rows.update(of_rank)
    assert rows == expected.rows()
    for name, table in expected.tables.items():
        assert sum(pending[name] for _, _, pending, *_ in found) == len(table.counts) > 50
        assert len(table.rows) > 50
        assert table.evicted > 100

    expected.tables["seldom"].sweep(STEPS)
    assert {key: row for *_, of_rank in found for key, row in of_rank.items()} == expected.rows()
    model = Model(None)
    apply_optimizer_in_backward(SGD, model.bags.parameters(), {"lr": 0.5})
    Saver(0).load(model, tmp_path / "end")
    (module,) = cache_modules(model).values()
    assert rows_of(module.tables) == expected.rows()
    # Ids whose rows left count from nothing.
    gone = {name: [row_id for row_id in IMPORTED[:50] if (name, row_id) not in rows] for name in expected.tables}
    waiting = {name: sorted(table.counts) + gone[name] for name, table in expected.tables.items()}
    counted = counts_of(model, waiting)
    for name, table in expected.tables.items():
        assert counted[name] == table.counts
