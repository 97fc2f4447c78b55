"""Where checkpoints are below the path that a user gives."""

import os

from torchrec_embcache.exceptions import PathError
from torchrec_embcache.paths import CheckedPath, CheckpointDirectory, check_path, open_to_load, open_to_save

__all__ = ["CheckpointPathMixin", "has_checkpoint", "open_rank_to_load", "open_rank_to_save"]


class CheckpointPathMixin:
    """What DCP asks a reader and a writer about the path that they are for."""

    path: str
    # What was wrong with the path that `reset` was given. It is raised where DCP raises it on every rank.
    _path_error: PathError | None = None

    def _set_path(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Take the path of the next save or load; None leaves it as it is. `_check_path` says what is wrong with it."""
        if checkpoint_id:
            self._path_error = None
            try:
                self.path = check_path("path", checkpoint_id)
            except PathError as error:
                self._path_error = error

    def _check_path(self) -> None:
        """`PathError` where `reset` was given no path."""
        if self._path_error is not None:
            raise self._path_error

    @property
    def checkpoint_id(self) -> str:
        """The checkpoints' directory, as an absolute path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if a reader or a writer takes it: it is a path, and not the address of another storage."""
        try:
            check_path("checkpoint_id", checkpoint_id)
        except PathError:
            return False
        return True


def _rank_path(directory: CheckpointDirectory, rank: int) -> CheckedPath:
    return CheckedPath(os.path.join(directory.path, f"rank-{rank}"))


def open_rank_to_save(directory: CheckpointDirectory, rank: int) -> CheckpointDirectory:
    """Where a rank that saves alone has its checkpoints, made when missing."""
    return open_to_save(_rank_path(directory, rank))


def open_rank_to_load(directory: CheckpointDirectory, rank: int) -> CheckpointDirectory:
    """Where a rank that saved alone has its checkpoints."""
    return open_to_load(_rank_path(directory, rank))


def has_checkpoint(directory: CheckpointDirectory) -> bool:
    """Whether a checkpoint was ever published in the directory. `StorageError` where that cannot be told."""
    return directory.contains("LATEST")
