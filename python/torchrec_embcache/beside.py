"""Saves beside training: the rows of one moment, held and written by a thread while training goes on."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from . import _native
from .cache import CacheTable
from .collective import Group, is_distributed
from .exceptions import StateError
from .paths import Root

__all__ = ["HeldTables", "TableToSave", "Written", "finish_saves", "own_group", "start"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# How long a rank waits for the others to have written theirs. Ranks that are gone are noticed at once.
_LONGEST_SAVE = timedelta(days=7)


@dataclass(frozen=True)
class TableToSave:
    """A table of this rank: its module's path in the model, itself, its hyperparameters, and what a delta of it builds on."""

    module: str
    table: CacheTable
    hyperparameters: Mapping[str, float]
    ancestor: _native.Ancestor | None = None


@dataclass(frozen=True)
class Written:
    """What a rank wrote: its digest, for the coordinator to publish, and how many rows and tombstones."""

    digest: tuple[int, int]
    rows: int
    tombstones: int


class HeldTables:
    """This rank's tables as they are when this is made, to be written into a checkpoint while they are trained.

    Held until `write` or `release`. Rows that training changes before they are written are copied first, in 32 MiB of memory
    and past that in a file in the checkpoint's directory.
    """

    def __init__(
        self,
        path: Root,
        name: str,
        place: tuple[int, int],
        tables: Sequence[TableToSave],
        next_epoch: int,
        max_bytes_per_second: int | None = None,
    ) -> None:
        """Hold them for the part of a rank in a checkpoint that was begun.

        `place`: rank and number of ranks. `next_epoch`: of rows trained from now on, the same on all ranks, with which the
        checkpoint is published. `StateError` where one of the tables is held already; then none is.
        """
        self.next_epoch = next_epoch
        self._tables = tuple(tables)
        natives = [(one.module, one.table.native, dict(one.hyperparameters), one.ancestor) for one in tables]
        try:
            self._held = _native.CheckpointSnapshot(
                path.to_save(), name, *place, natives, next_epoch, max_bytes_per_second
            )
        except BaseException:
            self._forget()
            raise

    def write(self, told: Callable[[TableToSave, int | None], object] = lambda _table, _rows: None) -> Written:
        """Write and sync the rows. `told` is called with each table before it is written (None) and after, with its rows."""
        rows = tombstones = 0
        try:
            for table in self._tables:
                told(table, None)
                more, left = self._held.write_table() or (0, 0)
                rows, tombstones = rows + more, tombstones + left
                told(table, more)
            return Written(self._held.finish(), rows, tombstones)
        finally:
            # Not only when all ranks are done: training pays for what is held.
            self.release()

    def release(self) -> None:
        """Hold the tables no more. Harmless twice."""
        self._held.release()

    def published(self, identity: _native.Identity) -> None:
        """The checkpoint is the newest, on all ranks: a delta can build on it."""
        for one in self._tables:
            one.table.native.saved_beside(self.next_epoch, (*identity, self.next_epoch))

    def given_up(self) -> None:
        """The checkpoint is not published, and the tables are held no more."""
        self.release()
        self._forget()

    def _forget(self) -> None:
        """What leaves the tables from now on is kept for no delta on the checkpoint."""
        for one in self._tables:
            one.table.native.saved_beside(self.next_epoch)


@dataclass(frozen=True)
class _Save:
    """A save under way, in the process that began it."""

    tables: weakref.WeakSet[CacheTable]
    done: threading.Event
    thread: threading.Thread
    pid: int


# Of one thread that saves there is one at most.
_saves: list[_Save] = []


def finish_saves(tables: Iterable[CacheTable] | None = None) -> None:
    """Wait until every save beside training of any of `tables` (by default of any table) is over.

    `StateError` where one waits for the caller: from a `progress` callable of the save.
    """
    wanted = None if tables is None else list(tables)
    for save in tuple(_saves):
        if save.pid != os.getpid() or save.done.is_set():
            continue
        if wanted is not None and not any(table in save.tables for table in wanted):
            continue
        if save.thread is threading.current_thread():
            raise StateError(
                "save_async is under way and waits for this call to return: save or load after its future is done"
            )
        _log.info("waiting for the save_async under way to end")
        save.done.wait()


def start(tables: Iterable[CacheTable], work: Callable[[], T]) -> Future[T]:
    """Call `work` in a thread that leaves others time, for a save of `tables`; what it returns or raises is the future's.

    To be called when no save is under way. The thread is no daemon: the process ends when the save has.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    done = threading.Event()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            done.set()
            future.set_exception(error)
        else:
            done.set()
            future.set_result(result)

    def run_behind() -> None:
        _native.work_behind()
        run()

    thread = threading.Thread(target=run_behind, name="embcache-save-async", daemon=False)
    _saves[:] = [save for save in _saves if not save.done.is_set()]
    _saves.append(_Save(weakref.WeakSet(tables), done, thread, os.getpid()))
    try:
        if not _native.has_room_for_threads():
            raise MemoryError("for a thread")
        thread.start()
    except (RuntimeError, MemoryError):
        # The system gives no thread, and other ranks wait for this one's part.
        run()
    return future


# The default process group that `_group` was made for.
_world: weakref.ref[dist.ProcessGroup] | None = None
_group: Group | None = None


def own_group() -> Group:
    """A gloo group of all ranks for saves alone, made once: training's collectives never wait for these. Collective."""
    global _group, _world
    if not is_distributed():
        return Group(None)
    world = dist.group.WORLD
    assert world is not None
    if _group is None or _group.broken or _world is None or _world() is not world:
        made = dist.new_group(backend="gloo")
        assert isinstance(made, dist.ProcessGroup)
        made.set_timeout(_LONGEST_SAVE)
        _group, _world = Group(made), weakref.ref(world)
    return _group
