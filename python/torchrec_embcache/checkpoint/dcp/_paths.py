"""Checkpoint directories below the user's path."""

import os

from torchrec_embcache._paths import CheckedPath, CheckpointDirectory, check_path, open_to_load, open_to_save
from torchrec_embcache.exceptions import PathError

__all__ = ["CheckpointPathMixin", "has_checkpoint", "open_rank_to_load", "open_rank_to_save"]


class CheckpointPathMixin:
    """The path methods that DCP requires of a reader and a writer."""

    path: str
    # Error of the path passed to `reset`. It is raised later, at a point at which DCP raises it on every rank.
    _path_error: PathError | None = None

    def _set_path(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Sets the path of the next save or load; None keeps the current one. `_check_path` raises its error."""
        if checkpoint_id:
            self._path_error = None
            try:
                self.path = check_path("path", checkpoint_id)
            except PathError as error:
                self._path_error = error

    def _check_path(self) -> None:
        """Raises `PathError` if `reset` was called with an invalid path."""
        if self._path_error is not None:
            raise self._path_error

    @property
    def checkpoint_id(self) -> str:
        """The checkpoints' directory, as an absolute path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if a reader or a writer accepts it: it is a local path, not the address of another storage."""
        try:
            check_path("checkpoint_id", checkpoint_id)
        except PathError:
            return False
        return True


def _rank_path(directory: CheckpointDirectory, rank: int) -> CheckedPath:
    return CheckedPath(os.path.join(directory.path, f"rank-{rank}"))


def open_rank_to_save(directory: CheckpointDirectory, rank: int) -> CheckpointDirectory:
    """Opens the checkpoint directory of a rank that saves on its own; creates it if missing."""
    return open_to_save(_rank_path(directory, rank))


def open_rank_to_load(directory: CheckpointDirectory, rank: int) -> CheckpointDirectory:
    """Opens the checkpoint directory of a rank that saved on its own."""
    return open_to_load(_rank_path(directory, rank))


def has_checkpoint(directory: CheckpointDirectory) -> bool:
    """True if a checkpoint was ever published in the directory. Raises `StorageError` if that cannot be determined."""
    return directory.contains("LATEST")
