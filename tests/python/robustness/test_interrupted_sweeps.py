"""Ctrl-C at each line of a sweep: the sweep is complete or has not begun, nothing else is lost, and the next one works."""

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interrupts import BATCHES, SAVES, Lines, Operation, is_interrupt, points, result, stopped
from processes import Child
from tables import Contents, make_bag, ssd_tiers, step, train
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, evict
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import All, Policy, Score, Ttl

# Either rule expires some of the 60 ids of these batches.
RULES = [Ttl(steps=3), All([Ttl(steps=1), Score(below=1.5)])]
OPERATIONS: dict[str, Operation] = {
    "evict": lambda bag, _path: evict(bag),
    "table.evict": lambda bag, _path: bag.table.evict(),
    "step": lambda bag, _path: step(bag, BATCHES[4]),
    **{name: work for name, work in SAVES.items() if name != "linked"},
}


def fresh(name: str, folder: Path) -> EmbCacheEmbeddingBag:
    """A table that is about to be swept, of tiers that differ by what is interrupted."""
    folder.mkdir(mode=0o750)
    tiers = TierBudgets(host_bytes="1MiB", device_bytes="16KiB")
    if list(OPERATIONS).index(name) % 2 == 0:
        tiers = ssd_tiers(folder / "ssd", host_bytes="4KiB", ssd_bytes="16MiB")
    # A step sweeps in the table that does so after every fifth.
    policy = Policy(RULES, every_steps=5 if name == "step" else None)
    bag = make_bag(tiers=tiers, eviction=policy, score_half_life_steps=4)
    train(bag, BATCHES[:2])
    if name in ("delta", "compact", "async"):
        Saver(0).save(bag, folder / "ck")
    train(bag, BATCHES[2:4])
    bag.flush()
    return bag


def interrupt_sweeps(say: Callable[[Any], None], name: str, base: str, turn: int) -> None:
    work, kept = OPERATIONS[name], []
    bag = fresh(name, Path(base, "count"))
    before = Contents.of(bag)
    with Lines(None) as lines:
        work(bag, str(Path(base, "count", "ck")))
    swept = Contents.of(bag)
    assert before.rows.keys() - swept.rows.keys(), "some rows leave"
    assert swept.rows, "and some stay"
    step(bag, BATCHES[5])
    evict(bag)
    expected, found = Contents.of(bag), set()
    for stop_at in points(lines.count, turn):
        folder = Path(base, str(stop_at))
        bag = fresh(name, folder)
        at, error = stopped(lambda bag=bag, folder=folder: work(bag, str(folder / "ck")), stop_at)  # type: ignore[misc]
        assert is_interrupt(error), (at.stopped_at, error)
        if name != "step":  # the frames of a step hold its batch, whose rows a sweep spares
            kept.append(error)
        del error
        gc.collect()
        try:
            now = Contents.of(bag)
            assert now in (before, swept)
            found.add(now == swept)
            if name != "step" or now == before:
                work(bag, str(folder / "ck"))
            assert Contents.of(bag) == swept
            assert not bag.stats().eviction.is_sweeping
            if name in SAVES and name not in ("blocks", "dcp", "dcp async"):
                again = make_bag()
                Saver(0).load(again, folder / "ck")
                assert Contents.of(again) == swept
            step(bag, BATCHES[5])
            evict(bag)
            assert Contents.of(bag) == expected
            assert bag.stats().pinned_rows == 0
            bag.close()
        except BaseException as wrong:
            raise AssertionError(f"after an interrupt at {at.stopped_at}, line {stop_at} of {lines.count}") from wrong
        shutil.rmtree(folder)
        say(None)  # it goes on; a listener waits for one line at most
        if stop_at % 3 == 0:
            kept.clear()
    say((len(points(lines.count, turn)), len(found)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_interrupted_sweep_is_complete_or_left_to_the_next_call(name: str, tmp_path: Path) -> None:
    child = Child(interrupt_sweeps, name, str(tmp_path), list(OPERATIONS).index(name) * 5, daemon=False)
    tried, outcomes = result(child)
    assert tried > 3
    # An operation is stopped before its sweep at some lines, and after it at others. The sweep is the last line of `table.evict`.
    assert outcomes == (1 if name == "table.evict" else 2)
