"""Asynchronous saves: the saving thread and its process group."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from torchrec_embcache import _native
from torchrec_embcache._dist.collective import gloo_group, is_distributed
from torchrec_embcache._dist.ranks import BackgroundRanks, Ranks, all_ranks
from torchrec_embcache._saves_in_flight import SaveInFlight, wait_for_saves
from torchrec_embcache.table.cache_table import CacheTable

__all__ = ["AsyncSaveRunner", "save_ranks", "wait_for_saves"]

T = TypeVar("T")

# Timeout of a rank that waits for the other ranks' parts. Ranks that exited are detected immediately.
_MAX_SAVE_DURATION = timedelta(days=7)


class AsyncSaveRunner:
    """An asynchronous save of `tables` to the directory `path`.

    Used as a context manager whose block starts the save and ends with `return save.start(work)`.

    If an error (including an interrupt) leaves the block before a thread has claimed the work, `cancel` undoes the started save,
    and the save counts as finished.
    """

    def __init__(self, tables: Iterable[CacheTable], path: str, cancel: Callable[[], object]) -> None:
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
        """Calls `work` in a low-priority thread. The future gets its result or exception. On failure `work` undoes the started
        save.

        Call it only while no save is in progress. The thread is not a daemon: the process exits after the save is done. If no
        thread can be started (the OS cannot start one, or the interpreter is shutting down, in an `atexit` function), the work is
        done before this call returns.
        """
        save, future = self._save, Future[T]()
        future.set_running_or_notify_cancel()

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
                    raise  # an interrupt of the caller
            else:
                save.done.set()
                future.set_result(result)

        def run_in_background() -> None:
            _native.work_in_background()
            run()

        save.begin()
        if not threading.main_thread().is_alive():
            # The interpreter has already joined its threads and would not join another.
            run()
            return future
        try:
            if not _native.has_memory_for_threads():
                raise MemoryError("for a thread")
            threading.Thread(target=run_in_background, name="embcache-save-async", daemon=False).start()
        except (RuntimeError, MemoryError):
            # No thread can be started, and other ranks wait for this rank's part.
            run()
        return future


# The default process group for which `_group` was created.
_group_world: weakref.ref[dist.ProcessGroup] | None = None
_group: BackgroundRanks | None = None
_groups_created = 0  # the same on all ranks


def save_ranks() -> Ranks:
    """Returns all ranks, in a gloo group for saves only; training collectives never wait for it. Created once. Collective."""
    global _group, _group_world, _groups_created
    ranks = all_ranks()
    if ranks.world_size == 1:
        return ranks
    world = dist.group.WORLD
    assert world is not None
    is_missing = _group is None or _group.is_broken or _group_world is None or _group_world() is not world
    # A group can break on some ranks only. All of them create the next one, or none.
    number = torch.tensor([_groups_created + 1 if is_missing else 0], dtype=torch.int64, device="cpu")
    ranks.all_reduce(number, dist.ReduceOp.MAX)
    if number.item():
        _groups_created = int(number.item())
        made = gloo_group(world, f"saves/{_groups_created}")
        made.set_timeout(_MAX_SAVE_DURATION)
        _group, _group_world = BackgroundRanks(made), weakref.ref(world)
    assert _group is not None, "it exists, or is missing here"
    return _group


def _release_group() -> None:
    """Releases the group after the default group is destroyed, so that its threads stop before the interpreter does.

    A gloo thread frees its last tensor after the collective and acquires the GIL for that. During interpreter shutdown this would
    terminate the thread in a destructor, which aborts the process ("terminate called without an active exception").
    """
    global _group
    if not is_distributed():
        _group = None


atexit.register(_release_group)
