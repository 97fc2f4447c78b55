"""Tokens: which state of an SSD tier a resume takes.

Each flush of a table publishes one state named by a token; the newest two are kept. A flush of several tables (of all ranks)
publishes in each under one token and is complete only when a mark says so. Tables may lie below several roots (`ssd_dir`):

1. every rank publishes the token in each of its tables;
2. each root learns which of them is the coordinator: the first of all ranks' that can be reached from it;
3. the coordinator marks the token as complete; this decides for all roots that it coordinates;
4. the others mark it too, and need the coordinator no longer.

A kill before 3 leaves the state before as the newest complete one of every table; the next flush forgets the one that did not
finish, so that the two states kept are complete ones. Ranks on machines that see no directory of one another have a coordinator a
machine. A flush of one table needs no mark.

Tokens grow, whatever the clock says: a new one is larger than every token that the tables and their roots know of. That of a
flush of several tables is larger by a random step, so that two jobs that share a root and flush at once do not take the same. The
lowest bit tells the two kinds apart.
"""

import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._native import CommitDirectory, Table
from .config import SsdRoot
from .exceptions import PathError, StateError, StorageError, StoragePermissionError

__all__ = [
    "CommitParticipant",
    "commit_ids_of_roots",
    "commit_participants",
    "find_resume_commit",
    "identify_roots",
    "is_committed",
    "is_multi_table",
    "new_commit_id",
    "newest_committed",
]

_log = logging.getLogger(__name__)

# A root and its name.
CommitRoot = tuple[SsdRoot, int]


# Bits of the random step.
_STEP_BITS = 32


def new_commit_id(known_ids: Iterable[int]) -> int:
    """A token for a flush of several tables, newer than all that are `known_ids`; `StateError` where none is left.

    (The token of a flush of one table is the next even number, and made by its core.)
    """
    newest = max(known_ids, default=0)
    token = (newest + 2 + secrets.randbits(_STEP_BITS)) | 1
    if token >= 1 << 64:
        raise StateError(
            f"no flush can follow one with the token {newest}: save the model with Saver and load it into an empty ssd_dir"
        )
    return token


def commit_ids_of_roots(roots: Iterable[CommitRoot]) -> list[int]:
    """The tokens that the marks in these roots name, whether or not a table still has their states. `StorageError`."""
    return [token for root, _ in roots for token in CommitDirectory(*root).commit_ids()]


def is_multi_table(commit_id: int) -> bool:
    """Whether the flush of `commit_id` was one of several tables."""
    return bool(commit_id & 1)


def identify_roots(roots: Iterable[SsdRoot]) -> list[CommitRoot]:
    """The roots of a rank's tables with their names, in the order of their paths. `StorageError`."""
    # Of a path that tables were given with different checks, one is enough: each table was checked when it was made.
    checks = {os.path.abspath(root.path): root.checks for root in roots}
    found = [SsdRoot(path, checks[path]) for path in sorted(checks)]
    return [(root, CommitDirectory(*root).identify(secrets.randbits(64))) for root in found]


@dataclass(frozen=True)
class CommitParticipant:
    """What a rank does to one of its roots, of which it is the first rank."""

    root: SsdRoot
    name: int
    coordinator: CommitRoot

    @property
    def is_coordinator(self) -> bool:
        """Whether this root is its own coordinator."""
        return self.coordinator[1] == self.name

    def prepare(self, commit_id: int) -> None:
        """Name the coordinator. `StorageError`."""
        if not self.is_coordinator:
            (path, _), name = self.coordinator
            CommitDirectory(*self.root).prepare(commit_id, path, name)

    def commit_as_coordinator(self, commit_id: int) -> None:
        """Mark the flush as complete, in the coordinator's root. After a `StorageError` a resume takes this flush or the one
        before.
        """
        if self.is_coordinator:
            try:
                CommitDirectory(*self.root).commit(commit_id)
            except StorageError as error:
                error.message = f"cannot mark the flush as complete: {error.message}"
                raise

    def commit_as_participant(self, commit_id: int) -> None:
        """Mark the flush as complete here too, where another root decided. Where this fails the other root is asked again."""
        if not self.is_coordinator:
            try:
                CommitDirectory(*self.root).commit(commit_id)
            except StorageError as error:
                _log.warning("a flush is complete, but %s cannot say so itself: %s", self.root.path, error)

    def forget_commits(self, commit_ids: Iterable[int]) -> None:
        """Remove the marks of `commit_ids`, except those of states that any table below this root keeps. `StorageError`."""
        unwanted = set(commit_ids)
        if unwanted:
            # Tables that are not in this flush may have been in an earlier one.
            unwanted -= _commit_ids_below(self.root)
        for token in unwanted:
            CommitDirectory(*self.root).forget(token)


def _commit_ids_below(root: SsdRoot) -> set[int]:
    """Tokens of the states of all tables below a root. `StorageError`, `StoragePermissionError` where it cannot be told."""
    shards = [
        shard
        for module in _list_directory(root.path)
        for table in _list_directory(module)
        for shard in _list_directory(table)
        if "-of-" in os.path.basename(shard)
    ]
    return {token for shard in shards for token in Table.commit_ids(shard, *root)}


def _list_directory(directory: str) -> list[str]:
    """Paths of what is in a directory and not hidden. Of what is no directory, gone by now, or closed to us by another user, none.

    Any other error is raised (`glob` would hide it): a table that cannot be looked for is not taken for one that is not there.
    """
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as cause:
        refused = isinstance(cause, PermissionError)
        if refused and _has_other_owner(directory):
            return []
        error = (StoragePermissionError if refused else StorageError)(
            f"cannot look for tables in {directory}: {cause.strerror}; what was flushed is complete, and the next flush is too, "
            "when the directory can be read"
        )
        error.errno, error.filename = cause.errno, directory
        raise error from cause


def _has_other_owner(directory: str) -> bool:
    """Whether a directory belongs to another user (as `lost+found` does), so that no table of ours is in it."""
    try:
        return os.stat(directory, follow_symlinks=False).st_uid != os.geteuid()
    except OSError:
        return False


def _is_reachable(root: CommitRoot) -> bool:
    """Whether this rank reaches a root that any rank has. `StorageError` where that cannot be told: then no rank decides alone."""
    ssd_root, name = root
    try:
        found = CommitDirectory(*ssd_root)
    except (PathError, StoragePermissionError):
        return False  # nothing of ours is at this path of this machine
    return found.has_id(name)


def commit_participants(rank: int, roots: Sequence[Sequence[CommitRoot]]) -> list[CommitParticipant]:
    """The marks that `rank` makes, where `roots` are those of the ranks: those of roots that no rank before it has."""
    before = {name for others in roots[:rank] for _, name in others}
    reached = [root for others in roots for root in others if _is_reachable(root)]
    return [
        CommitParticipant(root, name, coordinator=reached[0] if reached else (root, name))
        for root, name in roots[rank]
        if name not in before
    ]


def is_committed(root: SsdRoot, commit_id: int) -> bool:
    """Whether the state of `commit_id` can be resumed: that of one table, or of several that have all published it.

    `StateError` where another root decides that and is not there.
    """
    return not is_multi_table(commit_id) or CommitDirectory(*root).is_committed(commit_id)


def newest_committed(root: SsdRoot, commit_ids: Sequence[int]) -> int | None:
    """The newest complete one of a table's `commit_ids` tokens (oldest first); None where there is none.

    Raises as `is_complete`.
    """
    return next((token for token in reversed(commit_ids) if is_committed(root, token)), None)


def find_resume_commit(root: SsdRoot, table_dir: str, commit_ids: Sequence[int]) -> int | None:
    """As `newest_committed`; `StateError` where states were published and none is complete."""
    token = newest_committed(root, commit_ids)
    if token is None and commit_ids:
        raise StateError(
            f"{table_dir} holds only a flush of several tables that did not finish: load a checkpoint with Saver, or reopen with "
            'TierBudgets(reopen="discard"), or with "auto", which starts anew where nothing can be resumed'
        )
    return token
