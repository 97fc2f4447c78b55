"""Automatic flushes of tables with an SSD tier: during training, when a table is garbage collected, and at process exit.

A single-rank process flushes all its tables under one commit id. With several ranks only `flush_every` flushes, because all ranks
have to take part, and an exiting rank does not know whether the others do.
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

import torch

from torchrec_embcache._closing import first_error
from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache.exceptions import EmbCacheWarning, StateError

from .flush import flush_tables
from .table import SsdTable

__all__ = [
    "FlushSchedule",
    "begin_backward",
    "close_all",
    "flush_at_exit",
    "flush_dropped_table",
    "open_tables",
    "register_forward",
    "track_table",
]

_log = logging.getLogger(__name__)


# Weak references, so that unreferenced tables are garbage collected.
_open_tables: weakref.WeakSet[SsdTable] = weakref.WeakSet()
# The id of the process that registered the exit hook. A forked child has its own tables.
_hooked_pid: int | None = None


def track_table(table: SsdTable) -> None:
    """Tracks a table with an SSD tier until it is closed."""
    global _hooked_pid, _open_tables
    if _hooked_pid != os.getpid():
        if _hooked_pid is not None:  # the tables are those of the parent process
            _open_tables = weakref.WeakSet()
            _backwards.clear()
        _hooked_pid = os.getpid()
        atexit.register(flush_at_exit)
        if multiprocessing.parent_process() is not None:
            # A forked child exits without running its `atexit` functions.
            multiprocessing.util.Finalize(None, flush_at_exit, exitpriority=0)
    _open_tables.add(table)


def open_tables() -> list[SsdTable]:
    """Returns the tables with an SSD tier that are open in this process."""
    # A closed table stays in the set while it is referenced.
    tables = list(_open_tables) if _hooked_pid == os.getpid() else []
    return [table for table in tables if table.is_open and not table._is_closed]


def close_all() -> None:
    """Flushes and closes every table with an SSD tier that is open in this process, so that a model can be created again.

    For notebooks: call it before the model is created, in a cell that may run again. Tables without an SSD tier use no directory
    and stay open. The first error, one of those of `CacheTable.close`, is raised after all tables are closed.

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
    first = first_error(table.close for table in sorted(open_tables(), key=lambda table: table.name))
    if first is not None:
        raise first


# ---- started steps


class _BackwardState:
    """A backward that trains tables. `expected` forwards were pending when it started; it has reached those in `begun`."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        # For each lookup, one of its tables, and the table's step before the backward.
        self.begun: list[tuple[weakref.ref[SsdTable], int]] = []

    def is_incomplete(self) -> bool:
        """True if some tables are updated and others are not yet."""
        done = sum(_has_stepped(table(), step) for table, step in self.begun)
        return 0 < done < self.expected


def _has_stepped(table: SsdTable | None, steps_before: int) -> bool:
    try:
        return table is None or table.step() > steps_before
    except StateError:  # closed, with the rows that it had
        return True


# By autograd's id of the backward. A backward that did not finish stays here.
_backwards: dict[int, _BackwardState] = {}
# Forwards whose backward has not started.
_pending_forwards: weakref.WeakSet[object] = weakref.WeakSet()


def register_forward(batch: object) -> None:
    """Records a training forward of tables with an SSD tier, whose backward will follow."""
    _pending_forwards.add(batch)


def begin_backward(batch: object, table: SsdTable) -> None:
    """Records, within autograd, that the backward of `batch` is about to update its tables. `table` is one of them."""
    number = torch._C._current_graph_task_id()  # noqa: SLF001 - there is no public way to tell one backward from another
    backward = _backwards.get(number)
    if backward is None:
        _pending_forwards.add(batch)
        backward = _backwards[number] = _BackwardState(len(_pending_forwards))
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end_backward(number))  # noqa: SLF001
    _pending_forwards.discard(batch)
    backward.begun.append((weakref.ref(table), table.step()))


def _end_backward(number: int) -> None:
    """Removes this backward and earlier interrupted ones: training has continued since."""
    for other in [other for other in _backwards if other <= number]:
        _backwards.pop(other, None)


def _is_step_incomplete() -> bool:
    return any(backward.is_incomplete() for backward in list(_backwards.values()))


# ---- end of a table, and of the process


def flush_dropped_table(table: SsdTable) -> None:
    """Flushes a table that is being garbage collected, if it has rows that a resume would not find. Raises nothing."""
    if sys.is_finalizing() or _hooked_pid != os.getpid():
        return
    try:
        if not table._has_unflushed_rows:
            return
        if _is_multi_rank(table):
            _warn_multi_rank([table])
        elif _is_step_incomplete():
            _log.warning("table %r was dropped amid a step: it is not flushed, its last flush stays", table.name)
        else:
            _log.info("table %r was dropped and not closed: flushing it", table.name)
            flush_tables([table], single_rank=True)
    except BaseException as error:  # also Ctrl-C, which cannot be raised to a caller here
        _log.warning("table %r was dropped and could not be flushed, its last flush stays: %s", table.name, error)


def flush_at_exit() -> None:
    """Flushes the tables that were not closed. Warns about those that cannot be flushed, with the reason."""
    if _hooked_pid != os.getpid():
        return
    try:
        tables = sorted((table for table in open_tables() if table._has_unflushed_rows), key=lambda table: table.name)
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
    _log.info("flushing %s, which were not closed", _names(mine))
    try:
        flush_tables(mine, single_rank=True)
    except Exception as error:
        warnings.warn(
            f"{_names(mine)} could not be flushed at the end of the process, and a resume finds the last flush: {error}",
            EmbCacheWarning,
            stacklevel=2,
        )


def _is_multi_rank(table: SsdTable) -> bool:
    return table._is_multi_rank or all_ranks().world_size > 1


def _warn_multi_rank(tables: Sequence[SsdTable]) -> None:
    message = (
        f"the steps of {_names(tables)} since the last flush are lost: of several ranks no one can flush alone; call "
        "torchrec_embcache.flush(model) on every rank before the processes end, or give TierBudgets(flush_every=...)"
    )
    # Python hides ResourceWarning unless -W default is set, so it is logged, too.
    _log.warning("%s", message)
    warnings.warn(message, ResourceWarning, stacklevel=3)


def _names(tables: Sequence[SsdTable]) -> str:
    return ("table " if len(tables) == 1 else "tables ") + ", ".join(repr(table.name) for table in tables)


# ---- at intervals


class FlushSchedule:
    """The flush schedule of one module's tables. All modules of the process with a schedule are flushed together.

    An interval in steps is counted in training forwards. All ranks run these together, so that they decide alike without
    communication. An interval in time is measured only by the first rank's clock. That rank also announces the number of steps
    until all ranks query it again: at most half of the steps that are likely to remain.
    """

    def __init__(self, intervals: Iterable[int | float | None], *, collective: bool) -> None:
        """`intervals` are the `TierBudgets.flush_interval` of the module's tables. `collective`: its ranks flush together."""
        given = [interval for interval in intervals if interval is not None]
        self._steps = min((interval for interval in given if isinstance(interval, int)), default=None)
        self._seconds = min((interval for interval in given if isinstance(interval, float)), default=None)
        self.collective = collective and all_ranks().world_size > 1
        self._active = bool(given)
        self.restart()
        if self._active:
            _schedules.add(self)

    def restart(self) -> None:
        """Starts a new interval after a flush."""
        self._count = 0
        self._next_check = 1
        self._interval_start = time.monotonic()

    def flush_if_due(self) -> None:
        """Flushes before a training forward, if it is due. Raises the errors of `flush_tables`."""
        if not self._active or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return  # with activation checkpointing a forward is run again during a step
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
        due, self._next_check = all_ranks().all_gather((due, min(ask_at, 2 * self._count + 1)))[0]
        return due

    def _flush(self) -> None:
        # Every schedule restarts before the flush, so that the next try after a failure also waits for an interval.
        for schedule in [schedule for schedule in _schedules if schedule.collective == self.collective]:
            schedule.restart()
        tables = [
            table
            for table in open_tables()
            if table.tiers.flush_every is not None and (table.world_size > 1) == self.collective
            # The state after a failed load is not a state to resume.
            if table._unusable is None
        ]
        flush_tables(sorted(tables, key=lambda table: table.name), single_rank=not self.collective)


_schedules: weakref.WeakSet[FlushSchedule] = weakref.WeakSet()
