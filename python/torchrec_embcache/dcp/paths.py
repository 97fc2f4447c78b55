"""Where checkpoints are below the path that a user gives."""

import os

__all__ = ["AtPath", "holds_checkpoint", "rank_directory"]


class AtPath:
    """What DCP asks a reader and a writer about the path that they are for."""

    path: str | os.PathLike[str]

    @property
    def checkpoint_id(self) -> str:
        """The checkpoints' directory."""
        return os.fspath(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, and not the address of another storage."""
        return isinstance(checkpoint_id, os.PathLike) or (bool(checkpoint_id) and "://" not in str(checkpoint_id))


def rank_directory(path: str, rank: int) -> str:
    """Where a rank that saves alone has its checkpoints."""
    return os.path.join(path, f"rank-{rank}")


def holds_checkpoint(root: str) -> bool:
    """Whether a checkpoint was ever published in the directory."""
    return os.path.lexists(os.path.join(root, "LATEST"))
