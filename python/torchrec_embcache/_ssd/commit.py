"""Commit ids: two-phase commit of an SSD flush over tables and ranks, and the choice of the state to resume.

Each flush of a table commits one state under a commit id; the latest two states are kept. A flush of several tables (of all ranks)
stores a state of each under one commit id. It is complete only when a commit record states so. Tables may be below several roots
(`ssd_dir`):

1. every rank stores the state under the commit id in each of its tables;
2. each root stores which root is the coordinator: the first of all ranks' roots that can be reached from it;
3. the coordinator writes the commit record; this decides for all roots that it coordinates;
4. the other roots write the commit record too, and afterwards do not need the coordinator.

A crash before step 3 leaves the previous state as the latest complete one of every table. The next flush discards the incomplete
state, so that both kept states are complete. Ranks on machines that see no directory of each other have one coordinator per
machine. A flush of one table needs no commit record.

Commit ids increase, independent of the clock: a new one is larger than every commit id known to the tables and their roots. The
commit id of a flush of several tables is larger by a random step, so that two jobs that share a root and flush at the same time do
not use the same one. The lowest bit distinguishes the two kinds of flush.
"""

import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchrec_embcache._native import CommitDirectory, Table
from torchrec_embcache._paths import storage_error
from torchrec_embcache.config import SsdRoot
from torchrec_embcache.exceptions import PathError, StateError, StorageError, StoragePermissionError

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

# A root and its id.
CommitRoot = tuple[SsdRoot, int]


# Bits of the random step.
_STEP_BITS = 32


def new_commit_id(known_ids: Iterable[int]) -> int:
    """Returns a commit id for a flush of several tables, larger than all `known_ids`. Raises `StateError` if ids are exhausted.

    (The native table assigns the commit id of a flush of one table: the next even number.)
    """
    newest = max(known_ids, default=0)
    commit_id = (newest + 2 + secrets.randbits(_STEP_BITS)) | 1
    if commit_id >= 1 << 64:
        raise StateError(
            f"no flush can follow one with the commit id {newest}: save the model with Saver and load it into an empty ssd_dir"
        )
    return commit_id


def commit_ids_of_roots(roots: Iterable[CommitRoot]) -> list[int]:
    """Returns the commit ids of the commit records in these roots, even if no table has their states. Raises `StorageError`."""
    return [commit_id for root, _ in roots for commit_id in CommitDirectory(*root).commit_ids()]


def is_multi_table(commit_id: int) -> bool:
    """True if `commit_id` belongs to a flush of several tables."""
    return bool(commit_id & 1)


def identify_roots(roots: Iterable[SsdRoot]) -> list[CommitRoot]:
    """Returns the roots of a rank's tables with their ids, ordered by path. Raises `StorageError`."""
    # If tables use a path with different checks, one of them is enough: each table was checked when it was created.
    checks = {os.path.abspath(root.path): root.checks for root in roots}
    found = [SsdRoot(path, checks[path]) for path in sorted(checks)]
    return [(root, CommitDirectory(*root).identify(secrets.randbits(64))) for root in found]


@dataclass(frozen=True)
class CommitParticipant:
    """The two-phase commit of one root, run by the first rank that has it."""

    root: SsdRoot
    name: int
    coordinator: CommitRoot

    @property
    def is_coordinator(self) -> bool:
        """True if this root is its own coordinator."""
        return self.coordinator[1] == self.name

    def prepare(self, commit_id: int) -> None:
        """Stores the coordinator. Raises `StorageError`."""
        if not self.is_coordinator:
            (path, _), name = self.coordinator
            CommitDirectory(*self.root).prepare(commit_id, path, name)

    def commit_as_coordinator(self, commit_id: int) -> None:
        """Writes the coordinator's commit record. After a `StorageError` a resume finds either this flush or the previous one."""
        if self.is_coordinator:
            try:
                CommitDirectory(*self.root).commit(commit_id)
            except StorageError as error:
                error.message = f"cannot mark the flush as complete: {error.message}"
                raise

    def commit_as_participant(self, commit_id: int) -> None:
        """Writes the commit record in another root than the coordinator. If this fails, a resume reads the coordinator's record."""
        if not self.is_coordinator:
            try:
                CommitDirectory(*self.root).commit(commit_id)
            except StorageError as error:
                _log.warning("a flush is complete, but %s cannot say so itself: %s", self.root.path, error)

    def forget_commits(self, commit_ids: Iterable[int]) -> None:
        """Removes the commit records of `commit_ids`, except those that a table below this root needs. Raises `StorageError`."""
        unwanted = set(commit_ids)
        if unwanted:
            # Tables outside this flush may have been part of an earlier one.
            unwanted -= _commit_ids_below(self.root)
        for commit_id in unwanted:
            CommitDirectory(*self.root).forget(commit_id)


def _commit_ids_below(root: SsdRoot) -> set[int]:
    """Returns the commit ids of all tables below a root. Raises `StorageError`, `StoragePermissionError` if they cannot be read."""
    shards = [
        shard
        for module in _list_directory(root.path)
        for table in _list_directory(module)
        for shard in _list_directory(table)
        if "-of-" in os.path.basename(shard)
    ]
    return {commit_id for shard in shards for commit_id in Table.commit_ids(shard, *root)}


def _list_directory(directory: str) -> list[str]:
    """Returns the paths of a directory's visible entries.

    The list is empty if it is not a directory, does not exist, or is another user's and unreadable.

    Other errors are raised (`glob` would hide them), so that an unreadable table is not treated as absent.
    """
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as cause:
        if isinstance(cause, PermissionError) and _has_other_owner(directory):
            return []
        remedy = "; what was flushed is complete, and the next flush is too, when the directory can be read"
        raise storage_error("look for tables in", directory, cause, remedy) from cause


def _has_other_owner(directory: str) -> bool:
    """True if a directory belongs to another user (such as `lost+found`), so that it contains none of our tables."""
    try:
        return os.stat(directory, follow_symlinks=False).st_uid != os.geteuid()
    except OSError:
        return False


def _is_reachable(root: CommitRoot) -> bool:
    """True if this rank can reach the root. Raises `StorageError` if this cannot be determined, so that no rank decides alone."""
    ssd_root, name = root
    try:
        found = CommitDirectory(*ssd_root)
    except (PathError, StoragePermissionError):
        return False  # this machine has none of our directories at this path
    return found.has_id(name)


def commit_participants(rank: int, roots: Sequence[Sequence[CommitRoot]]) -> list[CommitParticipant]:
    """Returns the roots that `rank` commits: those that no rank before it has. `roots` are the roots by rank."""
    before = {name for others in roots[:rank] for _, name in others}
    reached = [root for others in roots for root in others if _is_reachable(root)]
    return [
        CommitParticipant(root, name, coordinator=reached[0] if reached else (root, name))
        for root, name in roots[rank]
        if name not in before
    ]


def is_committed(root: SsdRoot, commit_id: int) -> bool:
    """True if the state of `commit_id` can be resumed: a state of one table, or a complete flush of several tables.

    Raises `StateError` if another root, which is not available, decides that.
    """
    return not is_multi_table(commit_id) or CommitDirectory(*root).is_committed(commit_id)


def newest_committed(root: SsdRoot, commit_ids: Sequence[int]) -> int | None:
    """Returns the latest complete one of a table's `commit_ids` (oldest first); None if there is none.

    Raises the errors of `is_committed`.
    """
    return next((commit_id for commit_id in reversed(commit_ids) if is_committed(root, commit_id)), None)


def find_resume_commit(root: SsdRoot, table_dir: str, commit_ids: Sequence[int]) -> int | None:
    """Like `newest_committed`, but raises `StateError` if there are states and none is complete."""
    commit_id = newest_committed(root, commit_ids)
    if commit_id is None and commit_ids:
        raise StateError(
            f"{table_dir} holds only a flush of several tables that did not finish: load a checkpoint with Saver, or reopen with "
            'TierBudgets(reopen="discard"), or with "auto", which starts with empty tables if nothing can be resumed'
        )
    return commit_id
