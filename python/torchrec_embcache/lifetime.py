"""Flushes of tables with an SSD tier that nobody calls: while training, when a table is dropped, and when the process ends.

A process that is alone flushes all its tables under one token. Of several ranks only `flush_every` flushes, because all of them
have to take part, and a rank that ends does not know whether the others do.
"""

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from .collective import all_gather, world_size
from .disk import SsdTableInfo
from .exceptions import EmbCacheWarning, StateError
from .flushing import FlushableTable, flush_tables

__all__ = [
    "FlushSchedule",
    "TrackedTable",
    "begin_backward",
    "close_all",
    "flush_at_exit",
    "flush_dropped_table",
    "open_tables",
    "register_forward",
    "track_table",
]

_log = logging.getLogger(__name__)


class TrackedTable(FlushableTable, SsdTableInfo, Protocol):
    """What is asked of a table here."""

    @property
    def is_multi_rank(self) -> bool:
        """Whether it was opened in a process that is one of several ranks."""

    @property
    def is_open(self) -> bool:
        """Whether its tiers were opened."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, after which it cannot be used again."""

    @property
    def unusable(self) -> str | None:
        """Why every use is refused, as where a load failed; None where it is not."""

    def close(self) -> None:
        """Flush and close it."""

    @property
    def has_unflushed_rows(self) -> bool:
        """Whether it is open in this process, and its rows changed since the last state that a resume finds."""


# Weak references, so that a table that is dropped goes away.
_open_tables: weakref.WeakSet[TrackedTable] = weakref.WeakSet()
# The id of the process that looks after its tables when it ends. A forked child has tables of its own.
_hooked_pid: int | None = None


def track_table(table: TrackedTable) -> None:
    """Look after a table with an SSD tier until it is closed."""
    global _hooked_pid, _open_tables
    if _hooked_pid != os.getpid():
        if _hooked_pid is not None:  # the tables are those of the parent process
            _open_tables = weakref.WeakSet()
            _backwards.clear()
        _hooked_pid = os.getpid()
        atexit.register(flush_at_exit)
        if multiprocessing.parent_process() is not None:
            # A child that was forked ends without the functions that `atexit` was given.
            multiprocessing.util.Finalize(None, flush_at_exit, exitpriority=0)
    _open_tables.add(table)


def open_tables() -> list[TrackedTable]:
    """The tables with an SSD tier that are open in this process."""
    # A table that was closed stays in the set as long as somebody holds it.
    tables = list(_open_tables) if _hooked_pid == os.getpid() else []
    return [table for table in tables if table.is_open and not table.is_closed]


def close_all() -> None:
    """Flush and close every table with an SSD tier that is open in this process, so that a model can be made again.

    It is for notebooks: put it before the model in a cell that may run again. Tables without an SSD tier hold no directory. The
    first error is raised when all tables are closed; it is one of those of `CacheTable.close`.

    Examples:
        >>> import os, torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, close_all, optimizers
        >>> os.mkdir("cache", mode=0o750)
        >>> tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache", reopen="auto")
        >>> for run in range(2):  # as a cell that is run twice
        ...     close_all()
        ...     item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=optimizers.SGD(lr=0.5))
        ...     item(torch.tensor([7, 8])).sum().backward()
        >>> len(item), item.table.step()
        (2, 2)
    """
    first: Exception | None = None
    for table in sorted(open_tables(), key=lambda table: table.name):
        try:
            table.close()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


# ---- steps that have begun


class _BackwardState:
    """A backward that trains tables. `expected` forwards were waiting for it when it began; it has reached those in `begun`."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        # A table of each lookup, and its step before the backward.
        self.begun: list[tuple[weakref.ref[TrackedTable], int]] = []

    def is_incomplete(self) -> bool:
        """Whether some tables have their update and others still wait for theirs."""
        done = sum(_has_stepped(table(), step) for table, step in self.begun)
        return 0 < done < self.expected


def _has_stepped(table: TrackedTable | None, steps_before: int) -> bool:
    try:
        return table is None or table.step() > steps_before
    except StateError:  # it was closed, with the rows that it had
        return True


# By autograd's number of the backward. A backward that did not come to its end stays here.
_backwards: dict[int, _BackwardState] = {}
# Forwards whose backward has not come yet.
_pending_forwards: weakref.WeakSet[object] = weakref.WeakSet()


def register_forward(batch: object) -> None:
    """Note a training forward of tables with an SSD tier, whose backward will follow."""
    _pending_forwards.add(batch)


def begin_backward(batch: object, table: TrackedTable) -> None:
    """Note, within autograd, that the backward of `batch` is about to update its tables. `table` is one of them."""
    number = torch._C._current_graph_task_id()  # noqa: SLF001 - there is no public way to tell one backward from another
    backward = _backwards.get(number)
    if backward is None:
        _pending_forwards.add(batch)
        backward = _backwards[number] = _BackwardState(len(_pending_forwards))
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end_backward(number))  # noqa: SLF001
    _pending_forwards.discard(batch)
    backward.begun.append((weakref.ref(table), table.step()))


def _end_backward(number: int) -> None:
    """Forget this backward, and those before it that were cut short: training has gone on since."""
    for other in [other for other in _backwards if other <= number]:
        _backwards.pop(other, None)


def _is_step_incomplete() -> bool:
    return any(backward.is_incomplete() for backward in list(_backwards.values()))


# ---- the end of a table, and of the process


def flush_dropped_table(table: TrackedTable) -> None:
    """Flush a table whose last reference goes, if it has rows that no resume would find. Raises nothing."""
    if sys.is_finalizing() or _hooked_pid != os.getpid():
        return
    try:
        if not table.has_unflushed_rows:
            return
        if _is_multi_rank(table):
            _warn_multi_rank([table])
        elif _is_step_incomplete():
            _log.warning("table %r was dropped amid a step: it is not flushed, its last flush stays", table.name)
        else:
            _log.info("table %r was dropped and not closed: flushing it", table.name)
            flush_tables([table], single_rank=True)
    except BaseException as error:  # also Ctrl-C, which has nobody here to come to
        _log.warning("table %r was dropped and could not be flushed, its last flush stays: %s", table.name, error)


def flush_at_exit() -> None:
    """Flush the tables that nobody closed. Say which were not flushed, and why."""
    if _hooked_pid != os.getpid():
        return
    try:
        tables = sorted((table for table in open_tables() if table.has_unflushed_rows), key=lambda table: table.name)
    except StateError as error:
        warnings.warn(
            f"nothing is flushed at the end of the process, and a resume finds the last flush of every table: {error}",
            EmbCacheWarning,
            stacklevel=2,
        )
        return
    if not tables:
        return
    others = [table for table in tables if _is_multi_rank(table)]
    mine = [table for table in tables if not _is_multi_rank(table)]
    if others:
        _warn_multi_rank(others)
    if not mine:
        return
    if _is_step_incomplete():
        warnings.warn(
            f"the process ends amid a step, which some tables have and others have not: nothing is flushed of {_names(mine)}, and "
            "a resume finds their last flush",
            EmbCacheWarning,
            stacklevel=2,
        )
        return
    _log.info("flushing %s, which nobody closed", _names(mine))
    try:
        flush_tables(mine, single_rank=True)
    except Exception as error:
        warnings.warn(
            f"{_names(mine)} could not be flushed at the end of the process, and a resume finds the last flush: {error}",
            EmbCacheWarning,
            stacklevel=2,
        )


def _is_multi_rank(table: TrackedTable) -> bool:
    return table.is_multi_rank or world_size() > 1


def _warn_multi_rank(tables: Sequence[TrackedTable]) -> None:
    message = (
        f"the steps of {_names(tables)} since the last flush are lost: of several ranks no one can flush alone; call "
        "torchrec_embcache.flush(model) on every rank before the processes end, or give TierBudgets(flush_every=...)"
    )
    # Python shows no ResourceWarning unless it is asked to by -W default, so that it is logged, too.
    _log.warning("%s", message)
    warnings.warn(message, ResourceWarning, stacklevel=3)


def _names(tables: Sequence[TrackedTable]) -> str:
    return ("table " if len(tables) == 1 else "tables ") + ", ".join(repr(table.name) for table in tables)


# ---- at intervals


class FlushSchedule:
    """When the tables of one module are flushed while it trains, together with all others of the process that have a schedule.

    An interval of steps is counted by training forwards. All ranks make these together, so that they come to the same answer
    without asking each other. An interval of time is measured by the first rank's clock alone. That rank also says after how
    many steps all ask it again: half of the steps that are likely left, at most.
    """

    def __init__(self, intervals: Iterable[int | float | None], *, collective: bool) -> None:
        """`intervals` are those of the module's tables, as `TierBudgets.flush_interval`. `collective`: its ranks flush together."""
        given = [interval for interval in intervals if interval is not None]
        self._steps = min((interval for interval in given if isinstance(interval, int)), default=None)
        self._seconds = min((interval for interval in given if isinstance(interval, float)), default=None)
        self.collective = collective and world_size() > 1
        self._active = bool(given)
        self.restart()
        if self._active:
            _schedules.add(self)

    def restart(self) -> None:
        """Begin a new interval, because everything was flushed now."""
        self._count = 0
        self._next_check = 1
        self._interval_start = time.monotonic()

    def flush_if_due(self) -> None:
        """Before a training forward, flush if it is time. Raises as `flush_tables`."""
        if not self._active or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return  # with activation checkpointing a forward runs again amid a step
        if self._count and self._is_due():
            self._flush()
        self._count += 1

    def _is_due(self) -> bool:
        if self._steps is not None and self._count >= self._steps:
            return True
        if self._seconds is None or self._count < self._next_check:
            return False
        passed = time.monotonic() - self._interval_start
        due = passed >= self._seconds
        if not self.collective:
            return due
        left = max(self._seconds - passed, 0.0)
        ask_at = self._count + max(1, int(self._count * left / max(passed, 1e-9) / 2))
        due, self._next_check = all_gather((due, min(ask_at, 2 * self._count + 1)))[0]
        return due

    def _flush(self) -> None:
        # All begin a new interval before the flush, so that after a failure the next try comes after an interval, too.
        for schedule in [schedule for schedule in _schedules if schedule.collective == self.collective]:
            schedule.restart()
        tables = [
            table
            for table in open_tables()
            if table.tiers.flush_every is not None and (table.world_size > 1) == self.collective
            # What a failed load left is no state to resume.
            if table.unusable is None
        ]
        flush_tables(sorted(tables, key=lambda table: table.name), single_rank=not self.collective)


_schedules: weakref.WeakSet[FlushSchedule] = weakref.WeakSet()
