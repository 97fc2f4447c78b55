"""Selects the state of an SSD directory that a table resumes when it is opened."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torchrec_embcache.config import Reopen
from torchrec_embcache.exceptions import EmbCacheWarning, StateError

from . import commit, diagnostics
from .table import SsdTable

__all__ = ["ResumeState", "find_resume_state", "warn_of_lost_state"]


@dataclass(frozen=True)
class ResumeState:
    """The state with which an SSD directory is opened."""

    commit_id: int | None
    """The commit id to resume. None: nothing is resumed."""
    commit_ids: tuple[int, ...] = ()
    """Commit ids of the states found, oldest first."""
    uncommitted: int | None = None
    """The latest state found, if nothing is resumed because its flush of several tables is incomplete."""


def find_resume_state(table: SsdTable, reopen: Reopen | None, commit_id: int | None) -> ResumeState:
    """Returns the state of `commit_id`, or by default the latest complete one.

    If there is none, "auto" resumes nothing and "resume" raises `StateError`. Also raises `StateError` for a commit id with another
    `reopen`.
    """
    directory = table.directory
    if directory is None or reopen not in ("resume", "auto"):
        if commit_id is not None:
            raise StateError(
                f"commit_id={commit_id} of table {table.name!r}, which resumes nothing: make it with "
                'TierBudgets(ssd_dir=..., reopen="resume")'
            )
        return ResumeState(None)
    root, published = table.tiers.ssd_root, tuple(table.commit_ids())
    if commit_id is None and reopen == "resume":
        commit_id = commit.find_resume_commit(root, directory, published)
    elif commit_id is None:
        commit_id = commit.newest_committed(root, published)
        if commit_id is None:
            diagnostics.log_unflushed(directory)
            return ResumeState(None, published, published[-1] if published else None)
    return ResumeState(commit_id, published)


def warn_of_lost_state(table: SsdTable, state: ResumeState) -> None:
    """Warns if opening a table discarded the state before the resumed one, because its files are corrupted or missing."""
    if (
        state.commit_id is not None
        and state.commit_ids[0] < state.commit_id
        and table.commit_ids()[0] == state.commit_id
    ):
        warnings.warn(
            f"table {table.name!r} resumes its last flush. Files of the flush before in {table.directory} are damaged or "
            "missing, and it was dropped: check the disk",
            EmbCacheWarning,
            stacklevel=4,
        )
