"""Ctrl-C at any line of a save, a load or a close. Everything is as before, or the tables whose rows were changed refuse use.

The interrupt is raised at one line of the package after the other, by the tracing that debuggers use. Its error is kept, as a
notebook keeps it. With `EMBCACHE_EVERY_LINE=1` every line is tried, else a part of them.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn

from interrupts import BATCHES, PACKAGE, SAVES, SECONDS, Lines, Operation, dense, is_interrupt, points, result, stopped
from processes import Child
from tables import Contents, make_bag, ssd_tiers, step, train
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint.dcp import EmbCacheStorageReader
from torchrec_embcache.checkpoint.recis._threads import BoundedExecutor
from torchrec_embcache.exceptions import StateError
from torchrec_embcache.serialize import Loader


def some_slots(info: Any) -> Any:
    """A filter that takes the rows without their optimizer's slots, which stay as they are."""
    return {to: {name: ["id", "embedding"] for name in sources} for to, sources in info.items()}


LOADS: dict[str, tuple[Operation, Operation]] = {
    "load": (SAVES["save"], lambda bag, path: Saver(0).load(bag, path)),
    "load linked": (SAVES["linked"], lambda bag, path: Saver(0).load(bag, path)),
    "blocks": (SAVES["blocks"], lambda bag, path: Loader(path, {"item": bag}).load()),
    "some slots": (
        SAVES["blocks"],
        lambda bag, path: Loader(path, {"item": bag}, filter_func=some_slots, strict=False).load(),
    ),
    "dcp": (
        SAVES["dcp"],
        lambda bag, path: dcp.load(dense(), storage_reader=EmbCacheStorageReader(path, bag), no_dist=True),
    ),
}


def tiers_of(name: str, folder: Path) -> TierBudgets:
    if "linked" in name or name == "close":
        return ssd_tiers(folder / "ssd", ssd_bytes="16MiB", reopen="resume" if (folder / "ssd").exists() else None)
    return TierBudgets(host_bytes="1MiB", device_bytes="16KiB" if name in ("load", "async", "some slots") else 0)


def goes_on(bag: EmbCacheEmbeddingBag, folder: Path, turn: int) -> None:
    """Check that the model trains, is saved beside training and in another way, is loaded from there, and closes."""
    step(bag, BATCHES[5])
    now = Contents.of(bag)
    another = [name for name in SAVES if name not in ("linked", "async")][turn % 6]
    for name in ("async", another, "async"):
        SAVES[name](bag, str(folder / name))
    assert Contents.of(bag) == now
    again = make_bag()
    Saver(0).load(again, folder / "async")
    assert Contents.of(again) == now
    bag.close()


def check_nothing_is_held(bag: EmbCacheEmbeddingBag, name: str, path: Path) -> None:
    """Check that further saves to `path` remove all that an interrupted save or load left there, and all that it read.

    The files that DCP wrote for an unfinished save are held by its writer, which exists as long as the error.
    """
    if name == "delta":
        Saver(0).save(bag, path, incremental=True)
        again = make_bag()
        Saver(0).load(again, path)
        assert Contents.of(again) == Contents.of(bag)
    SAVES["blocks" if name in ("blocks", "some slots") else "save"](bag, str(path))
    left = [entry.name for entry in path.iterdir() if entry.is_dir() and not ("dcp" in name and "part-" in entry.name)]
    assert len(left) == 1, left


def interrupt_saves(say: Callable[[Any], None], name: str, base: str, turn: int) -> None:
    work, kept = SAVES[name], []

    def fresh(folder: Path) -> EmbCacheEmbeddingBag:
        folder.mkdir(mode=0o750)
        bag = make_bag(tiers=tiers_of(name, folder))
        train(bag, BATCHES[:3])
        if name in ("delta", "save", "async", "compact"):
            Saver(0).save(bag, folder / "ck")
        step(bag, BATCHES[3])
        return bag

    bag = fresh(Path(base, "count"))
    with Lines(None) as lines:
        work(bag, str(Path(base, "count", "ck")))
    for stop_at in points(lines.count, turn):
        folder = Path(base, str(stop_at))
        bag = fresh(folder)
        before = Contents.of(bag)
        at, error = stopped(lambda bag=bag, folder=folder: work(bag, str(folder / "ck")), stop_at)  # type: ignore[misc]
        kept.append(error)
        assert is_interrupt(error), (at.stopped_at, error)
        try:
            assert Contents.of(bag) == before
            check_nothing_is_held(bag, name, folder / "ck")
            goes_on(bag, folder, stop_at)
            # The checkpoint is the one before or the new one, and a further save of any kind succeeds.
            if name in ("delta", "save", "async", "compact"):
                other = make_bag()
                Saver(0).load(other, folder / "ck")
        except BaseException as wrong:
            raise AssertionError(f"after an interrupt at {at.stopped_at}, line {stop_at} of {lines.count}") from wrong
        shutil.rmtree(folder)
        say(None)  # it goes on; a listener waits for one line at most
        if stop_at % 3 == 0:
            kept.clear()
    say(len(points(lines.count, turn)))


def interrupt_loads(say: Callable[[Any], None], name: str, base: str, turn: int) -> None:
    (save, load), kept, refused = LOADS[name], [], 0

    def fresh(folder: Path) -> tuple[EmbCacheEmbeddingBag, Contents]:
        folder.mkdir(mode=0o750)
        bag = make_bag(tiers=tiers_of(name, folder))
        train(bag, BATCHES[:3])
        save(bag, str(folder / "ck"))
        saved = Contents.of(bag)
        step(bag, BATCHES[3])
        return bag, saved

    bag, _ = fresh(Path(base, "count"))
    with Lines(None) as lines:
        load(bag, str(Path(base, "count", "ck")))
    loaded = Contents.of(bag)  # for blocks these include the rows that were there
    for stop_at in points(lines.count, turn):
        folder = Path(base, str(stop_at))
        bag, saved = fresh(folder)
        before = Contents.of(bag)
        at, error = stopped(lambda bag=bag, folder=folder: load(bag, str(folder / "ck")), stop_at)  # type: ignore[misc]
        kept.append(error)
        assert is_interrupt(error), (at.stopped_at, error)
        try:
            try:
                now = Contents.of(bag)
            except StateError:
                refused += 1
                reason = bag.table._unusable
                assert reason is not None, "it refuses use for another reason"
                if bag.table._native_or_none is not None and not bag.table._native_table.is_closed():
                    bag.table._set_unusable(None)
                    assert Contents.of(bag) != before, "it refuses use, and nothing was touched"
                    bag.table._set_unusable(reason)
                load(bag, str(folder / "ck"))
                now = Contents.of(bag)
                if name != "some slots":
                    assert now.rows == saved.rows
            else:
                # Slots that are not loaded stay.
                if name != "some slots":
                    assert now.rows in (before.rows, saved.rows, loaded.rows), "rows that are neither"
            if name != "dcp":  # a reader of DCP's holds what it reads for as long as the error keeps it
                check_nothing_is_held(bag, name, folder / "ck")
            goes_on(bag, folder, stop_at)
        except BaseException as wrong:
            raise AssertionError(f"after an interrupt at {at.stopped_at}, line {stop_at} of {lines.count}") from wrong
        shutil.rmtree(folder)
        say(None)  # it goes on; a listener waits for one line at most
        if stop_at % 3 == 0:
            kept.clear()
    say((len(points(lines.count, turn)), refused))


def interrupt_closing(say: Callable[[Any], None], base: str) -> None:
    kept = []

    def fresh(folder: Path) -> EmbCacheEmbeddingBag:
        folder.mkdir(mode=0o750)
        bag = make_bag(tiers=tiers_of("close", folder))
        train(bag, BATCHES[:3])
        return bag

    bag = fresh(Path(base, "count"))
    with Lines(None) as lines:
        bag.close()
    for stop_at in range(lines.count):
        folder = Path(base, str(stop_at))
        bag = fresh(folder)
        before = Contents.of(bag)
        at, error = stopped(bag.close, stop_at)
        kept.append(error)
        try:
            bag.close()
            with make_bag(tiers=tiers_of("close", folder)) as again:
                assert Contents.of(again) == before
        except BaseException as wrong:
            raise AssertionError(f"after an interrupt at {at.stopped_at}, line {stop_at} of {lines.count}") from wrong
    say(lines.count)


@pytest.mark.parametrize("name", SAVES)
def test_interrupted_save_keeps_the_table_and_later_saves(name: str, tmp_path: Path) -> None:
    child = Child(interrupt_saves, name, str(tmp_path), list(SAVES).index(name) * 5, daemon=False)
    assert result(child) > 3


def test_interrupt_of_block_threads_leaves_no_thread_waiting() -> None:
    for stop_at in range(40):
        for _ in range(5):  # which thread is told first to end is not always the same one
            helpers, go_on = BoundedExecutor(3, "helper"), threading.Event()
            lines, _ = stopped(
                lambda helpers=helpers, work=go_on.wait: [helpers.submit(work) for _ in range(4)], stop_at
            )  # type: ignore[misc]
            go_on.set()
            ending = threading.Thread(target=helpers.shutdown, daemon=True)
            ending.start()
            ending.join(SECONDS)
            assert not ending.is_alive(), lines.stopped_at


def test_interrupted_publication_loses_nothing_for_next_delta(tmp_path: Path) -> None:
    within = os.path.join(PACKAGE, "checkpoint", "_save.py")

    def fresh(folder: Path) -> nn.ModuleDict:
        model = nn.ModuleDict({name: make_bag(name=name) for name in ("one", "two")})
        Saver(0).save(model, folder)
        train_all(model, BATCHES[0])
        return model

    def train_all(model: nn.ModuleDict, batch: Any) -> None:
        for bag in model.values():
            step(bag, batch)

    def contents(model: nn.ModuleDict) -> list[Contents]:
        return [Contents.of(bag) for bag in model.values()]

    model, kinds = fresh(tmp_path / "count"), set()
    with Lines(None, within) as lines:
        Saver(0).save(model, tmp_path / "count", incremental=True)
    for stop_at in range(lines.count):
        folder = tmp_path / str(stop_at)
        model = fresh(folder)
        at, _ = stopped(
            lambda model=model, folder=folder: Saver(0).save(model, folder, incremental=True), stop_at, within
        )  # type: ignore[misc]
        train_all(model, BATCHES[1])
        kinds.add(Saver(0).save(model, folder, incremental=True).kind)
        again = nn.ModuleDict({name: make_bag(name=name) for name in model})
        Saver(0).load(again, folder)
        assert contents(again) == contents(model), f"after an interrupt at {at.stopped_at}"
    # An interrupt after the publication leaves tables that do not know the checkpoint. The next save is full then.
    assert kinds == {"full", "delta"}


@pytest.mark.parametrize("name", LOADS)
def test_interrupted_load_keeps_rows_or_poisons_the_table(name: str, tmp_path: Path) -> None:
    child = Child(interrupt_loads, name, str(tmp_path), list(LOADS).index(name) * 5, daemon=False)
    tried, refused = result(child)
    assert tried > 5
    assert refused < tried


def test_a_close_that_is_interrupted_at_any_line_can_be_called_again(tmp_path: Path) -> None:
    child = Child(interrupt_closing, str(tmp_path), daemon=False)
    assert result(child) > 5
