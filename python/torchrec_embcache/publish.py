"""Tokens: which state of an SSD tier a resume takes.

Each flush of a table publishes one state named by a token; the newest two are kept. A flush of several tables (of all ranks)
publishes in each under one token and is complete only when a mark says so:

1. every rank publishes the token in each of its tables;
2. when all have, each makes `<ssd_dir>/.flushed/<token>`.

A kill before the first mark leaves the state before as the newest complete one of every table; the next flush forgets the one that
did not finish, so that the two states kept are complete ones. A flush of one table needs no mark.
Tokens grow with time, so that no two flushes share one; the lowest bit tells the two kinds apart.
"""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from .exceptions import StateError, StorageError

__all__ = ["forget_marks", "is_complete", "is_shared", "mark_complete", "new_token", "resume_token"]

_MARKS = ".flushed"


def new_token(published: Iterable[int], *, shared: bool) -> int:
    """A token newer than those in `published`; `shared` by several tables."""
    newest = max((time.time_ns(), *(token + 2 for token in published)))
    return (newest & ~1) | shared


def is_shared(token: int) -> bool:
    """Whether the flush of `token` was one of several tables."""
    return bool(token & 1)


def mark_complete(ssd_dir: str, token: int) -> None:
    """Say, durably, that every table has published `token`."""
    marks = Path(ssd_dir, _MARKS)
    try:
        marks.mkdir(mode=0o750, exist_ok=True)
        os.close(os.open(marks / str(token), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640))
        for directory in (marks, Path(ssd_dir)):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as cause:
        error = StorageError(
            f"cannot mark the flush as complete in {marks}: {cause}; the flush before stays the one to resume"
        )
        error.errno, error.filename = cause.errno, str(marks)
        raise error from cause


def forget_marks(ssd_dir: str, tokens: Iterable[int]) -> None:
    """Remove the marks of states that no table keeps; those of others stay."""
    for token in tokens:
        Path(ssd_dir, _MARKS, str(token)).unlink(missing_ok=True)


def is_complete(ssd_dir: str, token: int) -> bool:
    """Whether the state of `token` can be resumed: that of one table, or of several that have all published it."""
    return not is_shared(token) or Path(ssd_dir, _MARKS, str(token)).exists()


def resume_token(ssd_dir: str, table_dir: str, published: Sequence[int]) -> int | None:
    """The newest complete one of a table's `published` tokens (oldest first); None when nothing was ever published."""
    for token in reversed(published):
        if is_complete(ssd_dir, token):
            return token
    if published:
        raise StateError(
            f"{table_dir} holds only a flush of several tables that did not finish: load a checkpoint with Saver, or reopen with "
            'TierBudgets(reopen="discard")'
        )
    return None
