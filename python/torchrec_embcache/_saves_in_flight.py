"""Asynchronous saves in progress. Other saves wait for them, except on the saving thread, which would deadlock."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable

from .exceptions import StateError

__all__ = ["SaveInFlight", "check_not_own_save", "wait_for_saves", "wait_for_saves_to"]

_log = logging.getLogger(__name__)


class SaveInFlight:
    """A save of `tables` to the directory `path` that a background thread writes, in the process that started it.

    It is ended once: by `cancel` or by the thread that claimed it, whichever is first.
    """

    def __init__(self, tables: Iterable[object], path: str) -> None:
        self.tables: weakref.WeakSet[object] = weakref.WeakSet(tables)
        self.path = path
        """The path of the directory, in the form of `CheckpointDirectory.path`."""
        self.done = threading.Event()
        """Set when the save has finished."""
        self.thread: int | None = None
        """The identity of the saving thread, once it has started."""
        self.pid = os.getpid()
        self._claim_lock = threading.Lock()

    def begin(self) -> None:
        """Registers this save, so that others wait for it."""
        _saves[:] = [save for save in _saves if not save.done.is_set()]
        _saves.append(self)

    def try_claim(self) -> bool:
        """Claims the right to end this save. Returns False if it was already claimed."""
        return self._claim_lock.acquire(blocking=False)


# At most one per saving thread.
_saves: list[SaveInFlight] = []


def _find_saves(tables: Iterable[object] | None) -> list[SaveInFlight]:
    wanted = None if tables is None else list(tables)
    return [
        save
        for save in tuple(_saves)
        if save.pid == os.getpid()
        and not save.done.is_set()
        and (wanted is None or any(table in save.tables for table in wanted))
    ]


def wait_for_saves(tables: Iterable[object] | None = None) -> None:
    """Waits until every asynchronous save of any of `tables` (by default of any table) has finished. Ctrl-C interrupts the wait.

    Raises `StateError` if a save waits for the caller, a `progress` callable of the save.
    """
    _wait_for(_find_saves(tables))


def wait_for_saves_to(path: str) -> None:
    """Waits until every asynchronous save to the directory `path` has finished. Ctrl-C interrupts the wait.

    A following save or load then finds that checkpoint and not the previous one. Raises the errors of `wait_for_saves`.
    """
    _wait_for([save for save in _find_saves(None) if save.path == path])


def _wait_for(saves: Iterable[SaveInFlight]) -> None:
    for save in saves:
        _check_not_own(save, "save or load")
        _log.info("waiting for the save_async under way to end")
        save.done.wait()


def check_not_own_save(table: object, action: str) -> None:
    """Raises `StateError` if the calling thread is saving `table`, because it would wait for itself indefinitely."""
    for save in _find_saves([table]):
        _check_not_own(save, action)


def _check_not_own(save: SaveInFlight, action: str) -> None:
    if save.thread == threading.get_ident():
        raise StateError(
            f"save_async is under way and waits for this call to return: {action} after its future is done"
        )
