"""Base of monitors that write samples, periodically on a thread or on request. Monitors never raise into training."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import Protocol

from torch import nn

from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache.exceptions import ConfigError

from ._sampling import Sample, Sampler

__all__ = ["FailureLogger", "SampleMonitor", "close_at_exit"]

_log = logging.getLogger("torchrec_embcache.monitoring")
# `close` waits this long for a thread whose disk does not respond.
_MAX_WAIT_S = 5.0


class FailureLogger:
    """Logs the first failure of a monitor, and further failures only after it has worked again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_logged = False

    def log_failure(self, error: Exception) -> None:
        """Logs a warning, unless the previous call failed too."""
        if not self._is_logged:
            self._is_logged = True
            _log.warning(
                "%s: nothing is written until this works again: %s: %s", self._name, type(error).__name__, error
            )

    def reset(self) -> None:
        """Records a success: the next failure is logged."""
        self._is_logged = False


class SampleMonitor(CloseOnExitMixin, ABC):
    """Samples a model and writes each sample. It keeps neither the model nor its tables alive."""

    def __init__(self, model: nn.Module, interval_s: float | None) -> None:
        if interval_s is not None and (isinstance(interval_s, bool) or not 0.0 < interval_s <= threading.TIMEOUT_MAX):
            raise ConfigError(f"interval_s={interval_s!r}: give seconds above 0, or None to call sample(step) yourself")
        self._sampler = Sampler(model)
        self._write_lock = threading.Lock()
        self._failure_logger = FailureLogger(repr(self))
        self._stop_event = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        if interval_s is not None:
            # While it waits, the thread holds no reference to the monitor, so that a dropped monitor stops it.
            self._thread = threading.Thread(
                target=_run_periodically,
                args=(weakref.ref(self), self._stop_event, interval_s),
                name="embcache-monitor",
                daemon=True,
            )
            self._thread.start()
        weakref.finalize(self, self._stop_event.set).atexit = False
        close_at_exit(self)

    @abstractmethod
    def _write(self, sample: Sample) -> None:
        """Writes a sample. Errors are logged once as a warning."""

    def sample(self, step: int | None = None) -> None:
        """Writes the current counters.

        Args:
            step: number of the training step that the sample belongs to; by default the largest step of the tables.

        An error of reading or writing is logged once as a warning and not raised. After `close`, nothing is written.
        """
        if self._pid != os.getpid():
            return  # a forked child has its parent's tables and files
        with self._write_lock:
            if self._stop_event.is_set():
                return
            try:
                taken = self._sampler.sample(step)
                if taken.tables:
                    self._write(taken)
            except Exception as error:
                self._failure_logger.log_failure(error)
            else:
                self._failure_logger.reset()

    def close(self) -> None:
        """Stops writing and stops the thread. Idempotent."""
        self._stop_event.set()
        if self._thread is not None and self._pid == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(_MAX_WAIT_S)
            self._thread = None


def _run_periodically(monitor: weakref.ref[SampleMonitor], stop_event: threading.Event, interval_s: float) -> None:
    while not stop_event.wait(interval_s):
        found = monitor()
        if found is None:
            return
        found.sample()
        del found


# ---- the end of the process


class _Closeable(Protocol):
    def close(self) -> None: ...


_open_monitors: weakref.WeakSet[_Closeable] = weakref.WeakSet()


def close_at_exit(monitor: _Closeable) -> None:
    """Closes the monitor at process exit, before tables are flushed and closed."""
    _open_monitors.add(monitor)


def _close_all() -> None:
    for monitor in list(_open_monitors):
        with contextlib.suppress(Exception):
            monitor.close()


# Registered after the handlers of `_ssd/autoflush.py` and `table/_evict_callback.py`, and therefore called before them.
atexit.register(_close_all)
