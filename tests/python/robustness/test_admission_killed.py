"""Training killed in a step, flush or save continues with the counts of a dict, on the same or other ranks."""

import itertools
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from admission_cases import Counted, batch, counting, train
from admission_rank_cases import COUNTING, made, state
from admission_rank_cases import train as train_ranks
from lifecycle_cases import update
from processes import Child, World, process_group
from tables import Contents, ssd_tiers
from torchrec_embcache import TierBudgets, cache_modules, flush
from torchrec_embcache.checkpoint import Saver, SaveReport
from torchrec_models import MIXED, ROW_WISE, Rows, Settings, assert_same_rows, together

STEPS, STEPS_OF_RANKS = 100, 40
KILLS = int(os.environ.get("EMBCACHE_PYTHON_KILLS", "2"))
pytestmark = pytest.mark.filterwarnings("ignore:table '.*' did not fit", "ignore:table .* has no room for both")


def on_ssd(root: str | Path) -> Any:
    """A table that resumes its last flush, if there is one. Most of its rows are on SSD."""
    return counting(tiers=ssd_tiers(Path(root, "ssd"), host_bytes="2KiB", reopen="resume"))


def train_until_killed(say: Callable[[tuple[str, int]], None], root: str) -> None:
    """Train from the last flush on, and flush every other step. Saves are made beside training, every other one a delta.

    The first one of a process is full: `test_a_delta_after_a_resume_has_the_counts_of_the_table` says why.
    """
    warnings.simplefilter("ignore")
    future: Future[SaveReport] | None = None
    saves = itertools.count()
    with on_ssd(root) as table:
        for step in range(table.stats().step, STEPS):
            table.prefetch(torch.tensor(batch(step)))
            table.prefetch(torch.tensor(batch(step + 1)))
            update(table(torch.tensor(batch(step))))
            say(("trained", step + 1))
            if step % 2:
                table.flush()
                say(("flushed", step + 1))
            if step % 4 == 3:
                if future is not None:
                    future.result()
                    say(("saved", step + 1 - 4))
                future = Saver(0).save_async(table, f"{root}/saved", next(saves) % 2 == 1, keep=2)
        say(("ended", STEPS))
        signal.pause()


def check(table: Any, path: Path) -> None:
    """Checks that a table with an SSD tier has the rows and the counts of its step, through a checkpoint and a table in RAM."""
    Saver(0).save(table, path)
    in_ram = counting()
    Saver(0).load(in_ram, path)
    Counted(table.stats().step).check(in_ram)


def test_killed_process_continues_with_counts_of_flush_or_save(tmp_path: Path) -> None:
    draw = random.Random(3)
    last = {"trained": 0, "flushed": 0, "saved": 0, "ended": 0}
    for kill in range(KILLS):
        child = Child(train_until_killed, str(tmp_path))
        for _word in range(draw.randrange(25, 50)):
            what, number = child.hear()
            last[what] = number
            if what == "ended":
                break
        time.sleep(draw.random() * 0.02)
        child.kill()
        said, status = child.ended()
        assert status == -9, "the process ended by itself"
        last.update(said)
        with on_ssd(tmp_path) as table:
            assert table.stats().step >= last["flushed"] > 0
            check(table, tmp_path / f"found{kill}")

    with counting() as straight:
        train(straight, range(STEPS))
        expected = Contents.of(straight)
    with counting() as table:
        Saver(0).load(table, tmp_path / "saved")
        saved = table.stats().step
        assert saved >= last["saved"] > 0
        Counted(saved).check(table)
        train(table, range(saved, STEPS))
        Counted(STEPS).check(table)
        assert Contents.of(table) == expected
    with on_ssd(tmp_path) as table:
        train(table, range(table.stats().step, STEPS))
        assert Contents.of(table) == expected
        check(table, tmp_path / "ended")


# ---- ranks


def model_on_ssd(folder: str) -> Any:
    tiers = TierBudgets(host_bytes="2KiB", ssd_bytes="8MiB", ssd_dir=f"{folder}/ssd", reopen="resume")
    return made(MIXED, Settings(tiers=tiers, options=COUNTING.options))


def steps_done(model: Any) -> int:
    """The step of all tables of this rank, which is the same."""
    (done,) = {table.stats().step for module in cache_modules(model).values() for table in module.tables.values()}
    return int(done)


def train_ranks_until_killed(say: Callable[[tuple[str, int]], None], rank: int, folder: str, store: str) -> None:
    """Train from the last flush on, with a flush every other step and a save every third, every other one a delta."""
    warnings.simplefilter("ignore")
    with process_group(rank, 2, store):
        model, saves = model_on_ssd(folder), itertools.count()
        for step in range(steps_done(model), STEPS_OF_RANKS):
            train_ranks(model, rank, 2, range(step, step + 1))
            say(("trained", step + 1))
            if step % 2:
                flush(model)
                say(("flushed", step + 1))
            if step % 3 == 2:
                Saver().save(model, f"{folder}/saved", next(saves) % 2 == 1, keep=2)
                say(("saved", step + 1))
        say(("ended", STEPS_OF_RANKS))
        signal.pause()


def _resumed(_rank: int, _world: int, folder: str) -> tuple[int, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_on_ssd(folder)
        found = steps_done(model), state(model)
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table._native_table.close()  # without a flush, so that the next process finds what this one did
    return found


def _straight(rank: int, world: int, steps: int) -> Any:
    model = made(MIXED)
    train_ranks(model, rank, world, range(steps))
    return state(model)


def _from_the_flush(rank: int, world: int, folder: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_on_ssd(folder)
        train_ranks(model, rank, world, range(steps_done(model), STEPS_OF_RANKS))
        return state(model)


def _from_the_save(rank: int, world: int, folder: str) -> tuple[int, Rows, list[int]]:
    model = made(ROW_WISE)
    Saver().load(model, f"{folder}/saved")
    saved = steps_done(model)
    train_ranks(model, rank, world, range(saved, STEPS_OF_RANKS))
    return saved, *state(model)


def kill_two_ranks(draw: random.Random, folder: str, store: str) -> dict[str, int]:
    """Start them, and kill both after a while, one shortly after the other. Returns the last step that either flushed and saved."""
    ranks = [Child(train_ranks_until_killed, rank, folder, store) for rank in range(2)]
    said: list[list[tuple[str, int]]] = [[], []]
    first = draw.randrange(2)
    for _word in range(draw.randrange(12, 26)):
        said[first].append(ranks[first].hear())
        if said[first][-1][0] == "ended":
            break
    time.sleep(draw.random() * 0.02)
    for place in (first, 1 - first):
        ranks[place].kill()
        time.sleep(draw.random() * 0.005)
    for place, child in enumerate(ranks):
        rest, status = child.ended()
        said[place].extend(rest)
        # The second rank may have found the first one gone, and be about to end.
        assert status == -9 or place != first, "a rank ended by itself"
    last = {"flushed": 0, "saved": 0}
    for what, step in (word for words in said for word in words):
        last[what] = max(step, last.get(what, 0))
    return last


def test_two_killed_ranks_continue_with_their_counts(two_ranks: World, three_ranks: World, tmp_path: Path) -> None:
    """So do other ranks that load their checkpoint."""
    (tmp_path / "ssd").mkdir(mode=0o700)
    folder, draw = str(tmp_path), random.Random(8)
    flushed, saved = 0, 0
    for kill in range(KILLS):
        last = kill_two_ranks(draw, folder, str(tmp_path / f"store{kill}"))
        flushed, saved = max(flushed, last["flushed"]), max(saved, last["saved"])
        found = two_ranks.run(_resumed, folder)
        (done,) = {steps for steps, _ in found}
        assert done >= flushed > 0
        assert [contents for _, contents in found] == two_ranks.run(_straight, done)
    expected = two_ranks.run(_straight, STEPS_OF_RANKS)
    assert two_ranks.run(_from_the_flush, folder) == expected
    rows = together([rows for rows, _ in expected])
    waiting = sum(count for _, counts in expected for count in counts)
    with process_group(0, 1, str(tmp_path / "store")):
        alone = _from_the_save(0, 1, folder)
    for others in ([alone], three_ranks.run(_from_the_save, folder)):
        assert all(step >= saved > 0 for step, _, _ in others)
        assert sum(count for _, _, counts in others for count in counts) == waiting
        assert_same_rows(together([rows for _, rows, _ in others]), rows)
