"""Linked checkpoints of tables with eviction by time: resumed ranks expire rows like uninterrupted ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from cli_cases import run
from processes import World, process_group
from time_cases import BEGIN, TTL, natives, times_of
from torchrec_embcache import TierBudgets, cache_modules
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import Policy, Ttl
from torchrec_embcache.exceptions import MismatchError
from torchrec_models import ROW_WISE, Model, Settings, assert_same_rows, batches, rows_of, sharded, together

pytestmark = pytest.mark.slow

SAVED, FLUSHED, END = 9, 12, 15


def made(place: Path, reopen: Any = None) -> Any:
    """A model whose rows leave ten seconds after their last step. Most of what a step does not train is on SSD."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    tiers = TierBudgets(host_bytes="24KiB", ssd_bytes="64MiB", ssd_dir=place, reopen=reopen)
    model = Model(Settings(tiers=tiers, options={"eviction": Policy([Ttl(seconds=TTL)], every_steps=1)}))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.table_parameters(), {"lr": 0.1})
    return sharded(model, ROW_WISE)


def go_on(model: Any, rank: int, world: int, first: int, last: int) -> list[Any]:
    """Train the tables alone, on ranks whose clocks differ: the rows of this rank after each step.

    The first two ranks have the clocks of all. Ranks have the same number of samples, so that each sample counts the same.
    """
    found, times = [], times_of(rank % 2, last)
    for step, batch in list(enumerate(batches(last, rank, world, size=12)))[first:]:
        for native in natives(model):
            time = max(times[: step + 1])
            # Where it was loaded, its time is the greatest of all ranks, and does not go back.
            native.set_time(max(time, native.now()) if step else time)
        loss, _ = model(batch)
        loss.backward()
        found.append(rows_of(model))
    return found


def saved(rank: int, world: int, root: Path, place: Path) -> Any:
    model = made(place / "saved")
    before = go_on(model, rank, world, 0, SAVED)[-1]
    report = Saver().save(model, root, linked=True)
    assert report.kind == "linked"
    assert report.linked_bytes > 0
    return before, go_on(model, rank, world, SAVED, END)


def restarted(rank: int, world: int, root: Path, place: Path) -> Any:
    """Go on from the linked checkpoint, and after a while from what a flush published."""
    model = made(place / "again")
    go_on(model, rank, world, 0, 2)  # the load replaces what is there
    Saver().load(model, root)
    times, then = {native.now() for native in natives(model)}, rows_of(model)
    after = go_on(model, rank, world, SAVED, FLUSHED)
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table.flush()
            table.close()
    resumed = made(place / "again", "resume")
    assert {native.step() for native in natives(resumed)} == {FLUSHED}
    return times, then, after + go_on(resumed, rank, world, FLUSHED, END)


def refused(rank: int, world: int, root: Path, place: Path) -> None:
    model = made(place / "refused")
    before = go_on(model, rank, world, 0, 2)[-1]
    with pytest.raises(MismatchError, match="embcache compact"):
        Saver().load(model, root)
    assert rows_of(model) == before


def loaded(rank: int, world: int, root: Path, place: Path) -> Any:
    model = made(place / f"{root.name}-{world}")
    Saver().load(model, root)
    times, then = {native.now() for native in natives(model)}, rows_of(model)
    return times, then, go_on(model, rank, world, SAVED, END)


def test_ranks_resumed_from_a_linked_checkpoint_expire_alike(
    two_ranks: World, three_ranks: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, divided = tmp_path / "linked", tmp_path / "divided"
    straight = two_ranks.run(saved, root, tmp_path)
    then = together([before for before, _ in straight])
    steps = [together([after[step] for _, after in straight]) for step in range(END - SAVED)]
    gone = {row for before, after in zip([then, *steps], steps, strict=False) for row in before.keys() - after.keys()}
    assert len(gone & then.keys()) > 5, "rows that the checkpoint has leave after it"
    # The time is that of the last step, by the greatest of all clocks.
    time = max(max(times_of(rank, SAVED)) for rank in range(2))
    assert time > 1000 * BEGIN

    again = two_ranks.run(restarted, root, tmp_path)
    assert [times for times, _, _ in again] == [{time}] * 2
    assert [(rows, after) for _, rows, after in again] == straight

    three_ranks.run(refused, root, tmp_path)
    assert run(capsys, "reshard", root, divided, "--world-size", 3)[0] == 0
    Saver(0).compact(root)
    with process_group(0, 1, str(tmp_path / "store")):
        alone = [loaded(0, 1, root, tmp_path)]
    for found in (alone, three_ranks.run(loaded, root, tmp_path), three_ranks.run(loaded, divided, tmp_path)):
        assert {frozenset(times) for times, _, _ in found} == {frozenset({time})}
        assert together([rows for _, rows, _ in found]) == then
        for step, expected in enumerate(steps):
            assert_same_rows(together([after[step] for _, _, after in found]), expected)
