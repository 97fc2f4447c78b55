"""Checkpoint directories below the user's path."""

import os

from torchrec_embcache._paths import CheckedPath, CheckpointDirectory, check_path
from torchrec_embcache.exceptions import PathError

__all__ = ["CheckpointPathMixin", "rank_path"]


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


def rank_path(directory: CheckpointDirectory, rank: int) -> CheckedPath:
    """Returns the checkpoint directory of a rank that saves on its own."""
    return CheckedPath(os.path.join(directory.path, f"rank-{rank}"))
