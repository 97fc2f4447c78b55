"""The saves beside training that are under way in this process. Others wait for them; the thread that saves may not."""

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
    """A save of `tables` to the directory `path` that a thread writes while training goes on, in the process that began it.

    It is ended once: by `cancel` or by the thread that took it over, whichever comes first.
    """

    def __init__(self, tables: Iterable[object], path: str) -> None:
        self.tables: weakref.WeakSet[object] = weakref.WeakSet(tables)
        self.path = path
        """The path of the directory, as `Directory` has it."""
        self.done = threading.Event()
        """Set when the save is over."""
        self.thread: int | None = None
        """The identity of the thread that writes, once it has begun."""
        self.pid = os.getpid()
        self._claim_lock = threading.Lock()

    def begin(self) -> None:
        """Make others wait for this save from now on."""
        _saves[:] = [save for save in _saves if not save.done.is_set()]
        _saves.append(self)

    def try_claim(self) -> bool:
        """Become the one who ends this save. False where somebody else is already."""
        return self._claim_lock.acquire(blocking=False)


# At most one for each thread that saves.
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
    """Wait until every save beside training of any of `tables` (by default of any table) is over. Ctrl-C ends the wait.

    `StateError` where one waits for the caller: from a `progress` callable of the save.
    """
    _wait_for(_find_saves(tables))


def wait_for_saves_to(path: str) -> None:
    """Wait until every save beside training to the directory `path` is over. Ctrl-C ends the wait.

    What is saved or loaded there next finds that checkpoint and not the one before. Raises as `wait_for_saves` does.
    """
    _wait_for([save for save in _find_saves(None) if save.path == path])


def _wait_for(saves: Iterable[SaveInFlight]) -> None:
    for save in saves:
        _check_not_own(save, "save or load")
        _log.info("waiting for the save_async under way to end")
        save.done.wait()


def check_not_own_save(table: object, action: str) -> None:
    """Raise `StateError` where the calling thread is saving `table`, because it would wait for itself for ever."""
    for save in _find_saves([table]):
        _check_not_own(save, action)


def _check_not_own(save: SaveInFlight, action: str) -> None:
    if save.thread == threading.get_ident():
        raise StateError(
            f"save_async is under way and waits for this call to return: {action} after its future is done"
        )
