"""Delivers evicted rows: to the `on_evict` hook on its own thread, or to a queue for `drain_evicted()`.

The native table stores a copy of each evicted row in a queue. The thread takes chunks from the queue, and holds no lock while the
hook runs, so that the hook may use the table. While it waits it has no reference to the table or to the hook. A table without
references is therefore freed, once all queued rows are delivered.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from torchrec_embcache import _native
from torchrec_embcache.exceptions import (
    ConfigError,
    EmbCacheError,
    EmbCacheWarning,
    EvictionHookError,
    HostMemoryError,
    StateError,
)
from torchrec_embcache.optimizers import OptimizerSpec

from .rows import EvictedRows, RowMetadata, row_parts

__all__ = ["EvictionNotifier", "OnEvict", "check_on_evict"]

_log = logging.getLogger(__name__)

#: Receiver of evicted rows: a callable is called with each chunk of rows; "keep" queues them for `drain_evicted`.
OnEvict = Callable[[EvictedRows], object] | Literal["keep"]


def check_on_evict(owner: str, on_evict: object) -> OnEvict | None:
    """Validates `on_evict`, which may be None. Raises `ConfigError`, whose message starts with `owner`."""
    if on_evict is None:
        return None
    if isinstance(on_evict, str) and on_evict == "keep":
        return "keep"
    if not callable(on_evict):
        raise ConfigError(
            f"{owner}on_evict={on_evict!r} is not known: give a function of one argument, which is called with EvictedRows, or "
            '"keep", for drain_evicted()'
        )
    hook: Callable[[EvictedRows], object] = on_evict
    return hook


@dataclass(frozen=True)
class _EvictedSource:
    """The queue of a native table, and the format of its rows."""

    queue: _native.EvictedQueue
    table: str
    dim: int
    spec: OptimizerSpec

    def rows(self, block: _native.EvictedBlock) -> EvictedRows:
        weights, slots = row_parts(self.spec, self.dim, block.rows.vectors, block.rows.scalars)
        ids, metadata = block.rows.ids, RowMetadata.from_native(block.rows.metadata)
        return EvictedRows(
            torch.from_numpy(ids), weights, slots, metadata, table=self.table, step=block.step, reason=block.reason
        )


class _NotifierRef:
    """The reference of notifier threads to their `EvictionNotifier`: weak while the table exists, strong after it was dropped."""

    def __init__(self, notifier: EvictionNotifier) -> None:
        # Threads with rows to deliver, or that wait for rows. One at a time does so, and the others wait for it.
        self.threads: set[threading.Thread] = set()
        self._notifier = weakref.ref(notifier)
        self._kept_alive: EvictionNotifier | None = None
        self._table_dropped = threading.Event()

    def on_table_dropped(self, notifier: EvictionNotifier) -> None:
        """Keeps the notifier alive until its rows are delivered."""
        self._kept_alive = notifier
        self._table_dropped.set()
        if not self.threads:  # the last thread may have finished concurrently
            self._kept_alive = None

    def notifier(self) -> EvictionNotifier | None:
        """Returns the notifier."""
        teller = self._notifier()
        if teller is None:
            # The garbage collector clears weak references shortly before it calls `on_table_dropped`.
            self._table_dropped.wait()
            teller = self._kept_alive
        return teller

    def release(self, thread: threading.Thread) -> None:
        """Unregisters a thread that has delivered all its rows."""
        self.threads.discard(thread)
        if not self.threads:
            self._kept_alive = None


class EvictionNotifier:
    """Delivers the evicted rows of one shard of a table. Without `on_evict` no rows are queued."""

    def __init__(self, table: str, dim: int, on_evict: OnEvict | None) -> None:
        self._table, self._dim = table, dim
        self._is_queueing = on_evict is not None
        self._callback: Callable[[EvictedRows], object] | None = None if isinstance(on_evict, str) else on_evict
        # A load may replace the native table: the queues of previous tables come first.
        self._sources: deque[_EvictedSource] = deque()
        self._errors: deque[EvictionHookError] = deque()
        self._thread: threading.Thread | None = None
        self._ref = _NotifierRef(self)
        self._pid = os.getpid()

    def attach(self, native: _native.Table, spec: OptimizerSpec) -> None:
        """Starts delivering the rows that are evicted from a native table."""
        if not self._is_queueing:
            return
        self._pid = os.getpid()
        if self._callback is not None:
            # Remove the fully delivered queues of native tables that loads have replaced.
            left = [source for source in self._sources if len(source.queue) or not source.queue.is_ended()]
            self._sources = deque(left)
        source = _EvictedSource(native.start_evicted_queue(), self._table, self._dim, spec)
        if self._callback is None:
            self._sources.append(source)
            return
        self._start_thread(source, native)
        self._sources.append(source)

    def _start_thread(self, source: _EvictedSource, native: _native.Table) -> None:
        """Starts delivering the rows of `source`, after those of the previous source."""
        thread = threading.Thread(
            target=_run_notifier,
            args=(source, self._ref, self._thread),
            name=f"embcache-evicted-{self._table}",
            daemon=True,
        )
        self._ref.threads.add(thread)
        try:
            if not _native.has_memory_for_threads():
                raise RuntimeError("there is no memory for it")
            thread.start()
        except RuntimeError as cause:
            self._ref.threads.discard(thread)
            raise HostMemoryError(f"table {self._table!r}: no thread can be started for on_evict: {cause}") from cause
        self._thread = thread
        _register(self, native, thread)

    def notify(self, source: _EvictedSource, block: _native.EvictedBlock) -> None:
        """Calls the hook with a chunk. If it raises, sweeps and the hook pause until the error is raised in a training forward."""
        assert self._callback is not None, "there is no thread without a hook"
        rows = source.rows(block)
        try:
            self._callback(rows)
        except BaseException as cause:  # also SystemExit, which would end the thread
            if isinstance(cause, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # it interrupts a wait for the remaining rows
            error = EvictionHookError(
                f"on_evict of table {self._table!r} raised {type(cause).__name__}: {cause} (it was given {len(rows)} rows of step "
                f"{rows.step} that left for {rows.reason!r}, and is not given these again)"
            )
            error.__cause__ = cause
            source.queue.pause()
            self._errors.append(error)
            said = str(error)
            del error  # breaks the cycle of this frame and the traceback of its cause
            if not source.queue.is_ended():
                # Only the text, because the log may keep a reference to its arguments.
                _log.warning("%s; it is raised by the next training forward, and sweeps wait until then", said)

    @property
    def has_callback(self) -> bool:
        """True if `on_evict` is a callable."""
        return self._callback is not None

    def raise_error(self) -> None:
        """Raises an error of the hook, once. Afterwards sweeps and the hook resume."""
        if self._errors and self._pid == os.getpid():
            error = self._errors.popleft()
            for source in self._sources:
                source.queue.resume()
            try:
                raise error
            finally:
                del error  # breaks a cycle with this frame, which would keep the table alive

    def drain(self, native: _native.Table | None) -> Iterator[EvictedRows]:
        """Yields the queued rows, chunk by chunk. `native` is the native table, if open: its sweep is completed incrementally."""
        if not self._is_queueing:
            raise StateError(f'table {self._table!r} keeps no evicted rows: make it with on_evict="keep"')
        if self._callback is not None:
            raise StateError(
                f'the evicted rows of table {self._table!r} go to its on_evict: make it with on_evict="keep" to drain them'
            )
        return self._drain_chunks(native)

    def _drain_chunks(self, native: _native.Table | None) -> Iterator[EvictedRows]:
        if self._pid != os.getpid():
            raise StateError(f"the evicted rows of table {self._table!r} are those of the process that opened it")
        while self._sources:
            source = self._sources[0]
            is_last = len(self._sources) == 1
            goes_on = is_last and native is not None and not native.is_closed()
            block = native.next_evicted() if goes_on and native is not None else source.queue.take()
            if block is not None:
                yield source.rows(block)
            elif is_last:
                return
            else:
                self._sources.popleft()

    def check_not_own_thread(self, action: str) -> None:
        """Raises `StateError` if the caller is the hook itself, which would wait for itself indefinitely."""
        if threading.current_thread() in self._ref.threads:
            raise StateError(
                f"on_evict of table {self._table!r} runs, and this waits for it: {action} after it has returned"
            )

    @contextlib.contextmanager
    def closing(self, native: _native.Table) -> Iterator[None]:
        """Waits until the hook has received every row evicted so far, and then runs the block, which closes the table.

        Ctrl-C interrupts the wait. If the table is still open then, delivery to the hook resumes.
        """
        if self._thread is None or self._pid != os.getpid():
            yield
            return
        try:
            native.end_evicted_queue()
            self._thread.join()
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and not native.is_closed():
                self._resume(native)
            raise

    def _resume(self, native: _native.Table) -> None:
        """Resumes delivery of evicted rows, because the table stays open."""
        source = self._sources[-1]
        if source.queue.reopen():
            try:
                self._start_thread(source, native)
            except HostMemoryError as error:
                _log.warning("%s; evicted rows of it wait until it is closed", error)
        if self._errors:
            source.queue.pause()

    def notify_remaining(self) -> None:
        """Waits until all rows of the closed native table are delivered. Ctrl-C interrupts the wait; a later call resumes it."""
        if self._thread is not None and self._pid == os.getpid():
            self.check_not_own_thread("close")
            self._thread.join()
            for source in self._sources:
                while (block := source.queue.take()) is not None:  # evicted after the queue was ended
                    self.notify(source, block)

    def take_errors(self) -> list[EvictionHookError]:
        """Returns the errors of the hook that were not raised, oldest first. Each is returned once."""
        return [self._errors.popleft() for _ in range(len(self._errors))] if self._pid == os.getpid() else []

    def finish(self, error: Exception | None = None) -> None:
        """Like `notify_remaining`. Then raises the errors of the hook, or adds them to `error` as notes."""
        self.notify_remaining()
        errors = self.take_errors()
        if error is None and errors:
            first, *errors = errors
            for other in errors:
                first.add_note(str(other))
            try:
                raise first
            finally:
                del first, errors  # as in `raise_error`
        for other in errors:
            if error is not None:
                error.add_note(str(other))

    def on_table_dropped(self, native: _native.Table | None) -> None:
        """Called when the table is freed. Its thread delivers the queued rows; rows that were not drained are lost, and logged."""
        if not self._is_queueing or self._pid != os.getpid() or sys.is_finalizing():
            return
        self._ref.on_table_dropped(self)
        try:
            if native is not None:
                native.end_evicted_queue()
        except EmbCacheError as error:
            _log.warning(
                "table %r was dropped, and the rows of its unfinished sweep are not delivered: %s", self._table, error
            )
        # The thread needs only the queue. The native table is freed with its RAM and its directory.
        _notified_tables.pop(self, None)
        lost = sum(len(source.queue) for source in self._sources) if self._callback is None else 0
        if lost:
            _log.warning("table %r was dropped with %d evicted rows that were not drained", self._table, lost)

    def __del__(self) -> None:
        for error in getattr(self, "_errors", ()) if getattr(self, "_pid", None) == os.getpid() else ():
            _log.warning("table %r was freed with an unreported error: %s", self._table, error)


def _run_notifier(source: _EvictedSource, ref: _NotifierRef, previous: threading.Thread | None) -> None:
    """Passes the rows of a queue to the hook until the queue ends, after those of the previous queue."""
    if previous is not None:
        previous.join()
    while (block := source.queue.wait()) is not None:
        teller = ref.notifier()
        if teller is None:
            break
        teller.notify(source, block)
        del teller, block
    ref.release(threading.current_thread())
    _notifier_threads.discard(threading.current_thread())


# ---- process exit

# Notifier threads, and their native tables, until these tables are dropped.
_notifier_threads: set[threading.Thread] = set()
_notified_tables: weakref.WeakKeyDictionary[EvictionNotifier, _native.Table] = weakref.WeakKeyDictionary()
# The process that registered them. A forked child has its own.
_registered_pid: int | None = None


def _register(notifier: EvictionNotifier, native: _native.Table, thread: threading.Thread) -> None:
    global _registered_pid
    if _registered_pid != os.getpid():
        _notifier_threads.clear()
        _notified_tables.clear()
        _registered_pid = os.getpid()
        if multiprocessing.parent_process() is not None:
            # A forked child exits without running its `atexit` functions. Tables are flushed before this.
            multiprocessing.util.Finalize(None, _notify_at_exit, exitpriority=-1)
    _notifier_threads.add(thread)
    _notified_tables[notifier] = native


def _notify_at_exit() -> None:
    """Delivers all rows evicted so far. Warns of rows that cannot be delivered, with the reason."""
    if _registered_pid != os.getpid():
        return
    tellers = list(_notified_tables.items())
    try:
        for _, native in tellers:
            try:
                native.end_evicted_queue()
            except EmbCacheError as error:
                _log.warning("the process ends, and the rows of an unfinished sweep are not delivered: %s", error)
        for thread in list(_notifier_threads):
            thread.join()
        for teller, _ in tellers:
            teller.notify_remaining()
    except KeyboardInterrupt:
        _warn("the process was interrupted at its end, and evicted rows are lost that on_evict was not given")
    for teller, _ in tellers:
        for said in teller.take_errors():
            _warn(f"the process ends with an unreported error: {said}")


def _warn(message: str) -> None:
    warnings.warn(message, EmbCacheWarning, stacklevel=3)


# Registered before any flush at process exit, and so called after it.
atexit.register(_notify_at_exit)
