"""Work beside training: a thread that saves while training goes on, and the process group that is its own."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

import torch.distributed as dist

from . import _native
from .collective import RankGroup, is_distributed
from .table_shard import TableShard
from .under_way import SaveInFlight, wait_for_saves

__all__ = ["AsyncSaveRunner", "save_group", "wait_for_saves"]

T = TypeVar("T")

# How long a rank waits until the others have written their parts. Ranks that have ended are noticed at once.
_MAX_SAVE_DURATION = timedelta(days=7)


class AsyncSaveRunner:
    """A save of `tables` to the directory `path` beside training.

    It is a block that begins the save and ends with `return save.start(work)`.

    Where the block is left by an error, an interrupt included, before a thread has taken the work over, `cancel` undoes what was
    begun, and nobody waits for the save any more.
    """

    def __init__(self, tables: Iterable[TableShard], path: str, cancel: Callable[[], object]) -> None:
        self._save = SaveInFlight(tables, path)
        self._cancel = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not self._save.try_claim():
            return
        try:
            self._cancel()
        finally:
            self._save.done.set()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Call `work` in a thread that leaves others time; what it returns or raises is the future's. Where it fails it has undone
        what was begun.

        To be called when no save is under way. The thread is no daemon: the process ends when the save has. Where there can be no
        thread (the system gives none, or the interpreter is ending, in an `atexit` function) the work is done before this returns.
        """
        save, future = self._save, _running_future(Future[T]())

        def run() -> None:
            if not save.try_claim():
                return
            save.thread = threading.get_ident()
            try:
                result = work()
            except BaseException as error:
                save.done.set()
                future.set_exception(error)
                if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                    raise  # an interrupt, of the caller
            else:
                save.done.set()
                future.set_result(result)

        def run_in_background() -> None:
            _native.work_in_background()
            run()

        save.begin()
        if not threading.main_thread().is_alive():
            # The interpreter has waited for its threads and would not wait for another.
            run()
            return future
        try:
            if not _native.has_memory_for_threads():
                raise MemoryError("for a thread")
            threading.Thread(target=run_in_background, name="embcache-save-async", daemon=False).start()
        except (RuntimeError, MemoryError):
            # The system gives no thread, and other ranks wait for this one's part.
            run()
        return future


def _running_future(future: Future[T]) -> Future[T]:
    future.set_running_or_notify_cancel()
    return future


# The default process group that `_group` was made for.
_group_world: weakref.ref[dist.ProcessGroup] | None = None
_group: RankGroup | None = None


def save_group() -> RankGroup:
    """A gloo group of all ranks that only saves use, so that training's collectives never wait for theirs. It is made once.
    Collective.
    """
    global _group, _group_world
    if not is_distributed():
        return RankGroup(None)
    world = dist.group.WORLD
    assert world is not None
    if _group is None or _group.is_broken or _group_world is None or _group_world() is not world:
        made = dist.new_group(backend="gloo")
        assert isinstance(made, dist.ProcessGroup)
        made.set_timeout(_MAX_SAVE_DURATION)
        _group, _group_world = RankGroup(made), weakref.ref(world)
    return _group


def _release_group() -> None:
    """Let go of the group, where the default one is destroyed, so that its threads end before the interpreter does.

    A thread of gloo lets go of its last tensor after the collective, and takes the interpreter's lock for that. Where the
    interpreter is ending then, it ends the thread amid a destructor, and that aborts the process ("terminate called without an
    active exception").
    """
    global _group
    if not is_distributed():
        _group = None


atexit.register(_release_group)
