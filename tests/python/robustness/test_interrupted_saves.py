"""Ctrl-C at any line of a save, a load or a close. Everything is as before, or the tables whose rows were changed refuse use.

The interrupt is raised at one line of the package after the other, by the tracing that debuggers use. Its error is kept, as a
notebook keeps it. With `EMBCACHE_EVERY_LINE=1` every line is tried, else a part of them.
"""

import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torchrec_embcache
from tables import Contents, make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets
from torchrec_embcache.blocks.helpers import BoundedExecutor
from torchrec_embcache.cache import shard_of
from torchrec_embcache.dcp import EmbCacheStorageReader, EmbCacheStorageWriter
from torchrec_embcache.exceptions import EmbCacheError, StateError
from torchrec_embcache.saver import Saver
from torchrec_embcache.serialize import Loader
from torchrec_embcache.serialize import Saver as BlockSaver
from world import Child

PACKAGE = os.path.dirname(torchrec_embcache.__file__)
BATCHES = random_batches(6, bags=8, ids=60, seed=9)
SECONDS = 600.0


class Lines:
    """Count the lines of the package that this thread runs in a block, and raise `KeyboardInterrupt` at the line of a given
    number. `within`: only the lines of this file or folder count.
    """

    def __init__(self, stop_at: int | None, within: str = PACKAGE) -> None:
        self.count, self.stopped_at = 0, ""
        self._stop_at, self._within = stop_at, within

    def __enter__(self) -> Self:
        # The tables of earlier operations are not collected meanwhile: the lines of their finalizers belong to none.
        gc.disable()
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        del event, arg
        return self._line if frame.f_code.co_filename.startswith(self._within) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        if event == "line":
            if self.count == self._stop_at:
                sys.settrace(None)
                self.stopped_at = (
                    f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
                )
                raise KeyboardInterrupt
            self.count += 1
        return self._line


def some_slots(info: Any) -> Any:
    """A filter that takes the rows without their optimizer's slots, which stay as they are."""
    return {to: {name: ["id", "embedding"] for name in sources} for to, sources in info.items()}


def dense() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(3)}


Operation = Callable[[EmbCacheEmbeddingBag, str], object]


def chain_merged(bag: EmbCacheEmbeddingBag, path: str) -> None:
    Saver(0).save(bag, path, incremental=True)
    Saver(0).compact(path)


SAVES: dict[str, Operation] = {
    "save": lambda bag, path: Saver(0).save(bag, path),
    "delta": lambda bag, path: Saver(0).save(bag, path, incremental=True),
    "linked": lambda bag, path: Saver(0).save(bag, path, linked=True),
    "async": lambda bag, path: Saver(0).save_async(bag, path).result(SECONDS),
    "compact": chain_merged,
    "blocks": lambda bag, path: BlockSaver(0, 1, 2, path, {"item": bag}).save(),
    "dcp": lambda bag, path: dcp.save(dense(), storage_writer=EmbCacheStorageWriter(path, bag), no_dist=True),
    "dcp async": lambda bag, path: dcp.async_save(
        dense(), storage_writer=EmbCacheStorageWriter(path, bag), no_dist=True
    ).result(),
}
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


def points(lines: int, turn: int) -> range:
    """The lines to try: all, or some 25 of them that begin at another line for each operation."""
    if os.environ.get("EMBCACHE_EVERY_LINE"):
        return range(lines)
    apart = max(lines // 25, 1)
    return range(turn % apart, lines, apart)


def stopped(work: Callable[[], object], stop_at: int, within: str = PACKAGE) -> tuple[Lines, BaseException | None]:
    """Do `work` with an interrupt at a line. Returns the error, kept with all that it holds."""
    with Lines(stop_at, within) as lines:
        try:
            work()
        except BaseException as error:
            return lines, error
    return lines, None


def is_interrupt(error: BaseException | None) -> bool:
    """Whether the interrupt came through, by itself or in what DCP makes of errors, or was caught after the work was done."""
    return error is None or isinstance(error, KeyboardInterrupt | EmbCacheError) or "KeyboardInterrupt" in repr(error)


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

    What DCP wrote for a save that did not end is held by its writer, which lives as long as the error.
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
                reason = shard_of(bag.table).unusable
                assert reason is not None, "it refuses use for another reason"
                if shard_of(bag.table).native_or_none is not None and not shard_of(bag.table).native.is_closed():
                    shard_of(bag.table).set_unusable(None)
                    assert Contents.of(bag) != before, "it refuses use, and nothing was touched"
                    shard_of(bag.table).set_unusable(reason)
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


def result(child: Child) -> Any:
    """The last line of output of a process that ended well."""
    while (said := child.hear()) is None:
        pass
    assert child.ended() == ([], 0)
    return said


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
    within = os.path.join(PACKAGE, "sessions", "save.py")

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
