"""What saves and loads of checkpoints did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SaveReport:
    """What a save, or a compaction, made. Counts are of all ranks."""

    checkpoint: str
    """Name of the checkpoint: its directory in the path."""
    kind: Literal["full", "delta", "snapshot"]
    """Whether it holds every row, those modified since `parent`, or every row with SSD tiers as their segments."""
    parent: str | None
    """Name of the checkpoint that a delta builds on."""
    reason: str | None
    """Why a save that was to be incremental is full."""
    rows: int
    """Rows in its files."""
    tombstones: int
    """Ids in it that left their table since the parent."""
    linked_bytes: int = 0
    """Of a snapshot: bytes of segments that it shares with SSD tiers."""
    copied_bytes: int = 0
    """Of a snapshot: bytes of segments that were copied, because the file system of `path` cannot link those of `ssd_dir`."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did, the same on every rank. Tables are named `module/table`, as in the model."""

    checkpoint: str
    """Name of the newest checkpoint that was read."""
    deltas: int
    """Deltas that were read on top of the full one."""
    rows: dict[str, int]
    """Rows of each table that was loaded, all ranks together."""
    missing: tuple[str, ...]
    """Tables of the model that the checkpoint does not have: they are as they were."""
    unexpected: tuple[str, ...]
    """Tables of the checkpoint, by its names, that the model does not have."""
    renamed: dict[str, str]
    """Tables whose name in the checkpoint is another, that name first."""

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that were loaded."""
        return tuple(self.rows)
