"""Where checkpoints are below the path that a user gives."""

import os

from torchrec_embcache.exceptions import PathError
from torchrec_embcache.paths import Directory, GivenPath, given_path, open_to_load, open_to_save

__all__ = ["AtPath", "holds_checkpoint", "rank_to_load", "rank_to_save"]


class AtPath:
    """What DCP asks a reader and a writer about the path that they are for."""

    path: str
    # What was wrong with the path that `reset` was given. It is raised where DCP raises it on every rank.
    _refused: PathError | None = None

    def _take_path(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Take the path of the next save or load; None leaves it as it is. `_check_path` says what is wrong with it."""
        if checkpoint_id:
            self._refused = None
            try:
                self.path = given_path("path", checkpoint_id)
            except PathError as error:
                self._refused = error

    def _check_path(self) -> None:
        """`PathError` where `reset` was given no path."""
        if self._refused is not None:
            raise self._refused

    @property
    def checkpoint_id(self) -> str:
        """The checkpoints' directory, as an absolute path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if a reader or a writer takes it: it is a path, and not the address of another storage."""
        try:
            given_path("checkpoint_id", checkpoint_id)
        except PathError:
            return False
        return True


def _of_rank(directory: Directory, rank: int) -> GivenPath:
    return GivenPath(os.path.join(directory.path, f"rank-{rank}"))


def rank_to_save(directory: Directory, rank: int) -> Directory:
    """Where a rank that saves alone has its checkpoints, made when missing."""
    return open_to_save(_of_rank(directory, rank))


def rank_to_load(directory: Directory, rank: int) -> Directory:
    """Where a rank that saved alone has its checkpoints."""
    return open_to_load(_of_rank(directory, rank))


def holds_checkpoint(directory: Directory) -> bool:
    """Whether a checkpoint was ever published in the directory. `StorageError` where that cannot be told."""
    return directory.has("LATEST")
