"""Monitors that write samples, on a thread at an interval or where they are told to. They never raise into training."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import Protocol, Self

from torch import nn

from torchrec_embcache.exceptions import ConfigError

from .sampling import Sample, Sampler

__all__ = ["Monitor", "WarnsOnce", "close_at_exit"]

_log = logging.getLogger(__name__)
# A thread that writes to a disk which does not answer is left behind after so many seconds.
_MOST_WAIT_S = 5.0


class WarnsOnce:
    """Says the first failure of a monitor, and none after it until it has worked again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = False

    def failed(self, error: Exception) -> None:
        """Say it as a warning, unless the call before failed too."""
        if not self._said:
            self._said = True
            _log.warning(
                "%s: nothing is written until this works again: %s: %s", self._what, type(error).__name__, error
            )

    def worked(self) -> None:
        """The next failure is news."""
        self._said = False


class Monitor(ABC):
    """Samples a model, and writes each sample. The model and its tables may go at any time."""

    def __init__(self, model: nn.Module, interval_s: float | None) -> None:
        if interval_s is not None and (isinstance(interval_s, bool) or not 0.0 < interval_s <= threading.TIMEOUT_MAX):
            raise ConfigError(f"interval_s={interval_s!r}: give seconds above 0, or None to call sample(step) yourself")
        self._sampler = Sampler(model)
        self._writing = threading.Lock()
        self._warns = WarnsOnce(repr(self))
        self._ends = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        if interval_s is not None:
            # The thread holds no reference to the monitor while it waits, so that one that is dropped ends it.
            self._thread = threading.Thread(
                target=_repeat, args=(weakref.ref(self), self._ends, interval_s), name="embcache-monitor", daemon=True
            )
            self._thread.start()
        weakref.finalize(self, self._ends.set).atexit = False
        close_at_exit(self)

    @abstractmethod
    def _write(self, sample: Sample) -> None:
        """Write a sample. What it raises is said once as a warning."""

    def sample(self, step: int | None = None) -> None:
        """Write the counters as they are now.

        Args:
            step: the number of the training step that the sample belongs to; by default the largest step of the tables.

        An error of reading or writing is logged once as a warning, and not raised. After `close` nothing is written.
        """
        if self._pid != os.getpid():
            return  # a forked child has its parent's tables and files
        with self._writing:
            if self._ends.is_set():
                return
            try:
                taken = self._sampler.sample(step)
                if taken.tables:
                    self._write(taken)
            except Exception as error:
                self._warns.failed(error)
            else:
                self._warns.worked()

    def close(self) -> None:
        """Write nothing from now on, and end the thread; harmless twice."""
        self._ends.set()
        if self._thread is not None and self._pid == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(_MOST_WAIT_S)
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _repeat(monitor: weakref.ref[Monitor], ends: threading.Event, interval_s: float) -> None:
    while not ends.wait(interval_s):
        found = monitor()
        if found is None:
            return
        found.sample()
        del found


# ---- the end of the process


class _Closes(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closes] = weakref.WeakSet()


def close_at_exit(monitor: _Closes) -> None:
    """Close it when the process ends, before tables are flushed and closed."""
    _open.add(monitor)


def _close_all() -> None:
    for monitor in list(_open):
        with contextlib.suppress(Exception):
            monitor.close()


# Registered after what `lifetime` and `telling` were given, and so called before it.
atexit.register(_close_all)
