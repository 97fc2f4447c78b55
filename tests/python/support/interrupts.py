"""Raises Ctrl-C at each line of the package in turn, and runs each kind of save, load and close under it."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed.checkpoint as dcp

import torchrec_embcache
from processes import Child
from tables import random_batches
from torchrec_embcache import EmbCacheEmbeddingBag
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint.dcp import EmbCacheStorageWriter
from torchrec_embcache.exceptions import EmbCacheError
from torchrec_embcache.serialize import Saver as BlockSaver

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
    """True if the interrupt was raised, directly or in an error of DCP, or was caught after the work was done."""
    return error is None or isinstance(error, KeyboardInterrupt | EmbCacheError) or "KeyboardInterrupt" in repr(error)


def result(child: Child) -> Any:
    """The last line of output of a process that ended well."""
    while (said := child.hear()) is None:
        pass
    assert child.ended() == ([], 0)
    return said


def interrupt_once(_signal: int, _frame: object) -> None:
    """Handler of SIGINT that ignores all signals after the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
