"""Which state of an SSD directory a table goes on from when it is opened."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

from . import disk, publish
from .config import Reopen, TierBudgets
from .exceptions import EmbCacheWarning, StateError

__all__ = ["StateToResume", "state_to_resume", "warn_of_lost_state"]


class ResumedTable(Protocol):
    """What is asked of a table here."""

    name: str
    tiers: TierBudgets

    @property
    def directory(self) -> str | None:
        """The SSD tier's directory of this shard; None without an SSD tier."""

    def published(self) -> list[int]:
        """Tokens of the states in the directory, oldest first."""


@dataclass(frozen=True)
class StateToResume:
    """What an SSD directory is opened with."""

    token: int | None
    """Names the state to resume. None: nothing is resumed."""
    published: tuple[int, ...] = ()
    """Tokens of the states that were there, oldest first."""
    unfinished: int | None = None
    """The newest state there, where nothing is resumed because no flush of several tables completed it."""


def state_to_resume(table: ResumedTable, reopen: Reopen | None, token: int | None) -> StateToResume:
    """The state that `token` names, or by default the newest complete one.

    With "auto" nothing is resumed where there is none; with "resume" that is a `StateError`. So is a token where none is asked for.
    """
    directory = table.directory
    if directory is None or reopen not in ("resume", "auto"):
        if token is not None:
            raise StateError(
                f"resume_token={token} of table {table.name!r}, which resumes nothing: make it with "
                'TierBudgets(ssd_dir=..., reopen="resume")'
            )
        return StateToResume(None)
    root, published = table.tiers.ssd_root, tuple(table.published())
    if token is None and reopen == "resume":
        token = publish.resume_token(root, directory, published)
    elif token is None:
        token = publish.newest_complete(root, published)
        if token is None:
            disk.say_unflushed(directory)
            return StateToResume(None, published, published[-1] if published else None)
    return StateToResume(token, published)


def warn_of_lost_state(table: ResumedTable, state: StateToResume) -> None:
    """Warn where opening a table dropped the state before the one that it resumed, because files of it are damaged or missing."""
    if state.token is not None and state.published[0] < state.token and table.published()[0] == state.token:
        warnings.warn(
            f"table {table.name!r} goes on from its last flush. Files of the flush before in {table.directory} are damaged or "
            "missing, and it was dropped: check the disk",
            EmbCacheWarning,
            stacklevel=4,
        )
