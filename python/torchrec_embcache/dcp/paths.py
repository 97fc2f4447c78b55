"""Where checkpoints are below the path that a user gives."""

import os

from torchrec_embcache.paths import is_there

__all__ = ["AtPath", "holds_checkpoint", "rank_directory"]


class AtPath:
    """What DCP asks a reader and a writer about the path that they are for."""

    path: str

    @property
    def checkpoint_id(self) -> str:
        """The checkpoints' directory, as an absolute path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, and not the address of another storage."""
        return isinstance(checkpoint_id, os.PathLike) or (bool(checkpoint_id) and "://" not in str(checkpoint_id))


def rank_directory(path: str, rank: int) -> str:
    """Where a rank that saves alone has its checkpoints."""
    return os.path.join(path, f"rank-{rank}")


def holds_checkpoint(root: str) -> bool:
    """Whether a checkpoint was ever published in the directory. `StorageError` where that cannot be told."""
    return is_there(os.path.join(root, "LATEST"))
