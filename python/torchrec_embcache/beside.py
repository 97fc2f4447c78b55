"""Saves beside training: the rows of one moment, held and written by a thread while training goes on."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

import torch.distributed as dist

from . import _native
from .cache import CacheTable
from .collective import Group, is_distributed
from .paths import Root
from .under_way import SaveUnderWay, finish_saves

__all__ = ["BesideTraining", "HeldTables", "TableToSave", "Written", "finish_saves", "own_group"]

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
            self._held = _native.CheckpointMoment(
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


class BesideTraining:
    """A save of `tables` beside training, as a block that begins it and ends with `return save.start(work)`.

    Where the block is left by an error, an interrupt included, before a thread has taken the work over, `give_up` undoes what was
    begun, and nobody waits for the save any more.
    """

    def __init__(self, tables: Iterable[CacheTable], give_up: Callable[[], object]) -> None:
        self._save = SaveUnderWay(tables)
        self._give_up = give_up

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not self._save.take():
            return
        try:
            self._give_up()
        finally:
            self._save.done.set()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Call `work` in a thread that leaves others time; what it returns or raises is the future's. Where it fails it has undone
        what was begun.

        To be called when no save is under way. The thread is no daemon: the process ends when the save has. Where there can be no
        thread (the system gives none, or the interpreter is ending, in an `atexit` function) the work is done before this returns.
        """
        save, future = self._save, _running(Future[T]())

        def run() -> None:
            if not save.take():
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

        def run_behind() -> None:
            _native.work_behind()
            run()

        save.begin()
        if not threading.main_thread().is_alive():
            # The interpreter has waited for its threads and would not wait for another.
            run()
            return future
        try:
            if not _native.has_room_for_threads():
                raise MemoryError("for a thread")
            threading.Thread(target=run_behind, name="embcache-save-async", daemon=False).start()
        except (RuntimeError, MemoryError):
            # The system gives no thread, and other ranks wait for this one's part.
            run()
        return future


def _running(future: Future[T]) -> Future[T]:
    future.set_running_or_notify_cancel()
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


def _end_group() -> None:
    """Let go of the group, where the default one is destroyed, so that its threads end before the interpreter does.

    A thread of gloo lets go of its last tensor after the collective, and takes the interpreter's lock for that. Where the
    interpreter is ending then, it ends the thread amid a destructor, and that aborts the process ("terminate called without an
    active exception").
    """
    global _group
    if not is_distributed():
        _group = None


atexit.register(_end_group)
