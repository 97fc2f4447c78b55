"""What saves and loads of checkpoints did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SaveReport:
    """What a save or a compaction made. Counts are those of all ranks together.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model(torch.tensor([7, 8])).sum().backward()
        >>> Saver(0).save(model, "ckpt", incremental=True)
        SaveReport(checkpoint='0000000001-...', kind='full', parent=None, reason='...', rows=2, tombstones=0, ...)
    """

    checkpoint: str
    """Name of the checkpoint: its directory in the path."""
    kind: Literal["full", "delta", "linked"]
    """The contents: every row; the rows modified since `parent`; or, of a linked checkpoint, every row, with SSD
    tiers as their segments."""
    parent: str | None
    """Name of the checkpoint that a delta builds on."""
    reason: str | None
    """Why a save that was to be incremental is full."""
    rows: int
    """How many rows its files have."""
    tombstones: int
    """How many ids in it left their table since the parent."""
    linked_bytes: int = 0
    """Of a linked checkpoint: how many bytes of segments it shares with SSD tiers."""
    copied_bytes: int = 0
    """Of a linked checkpoint: how many bytes of segments were copied, because the file system of `path` cannot link those of
    `ssd_dir`."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did, the same on every rank. Tables are named `module/table`, as in the model.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model(torch.tensor([7, 8])).sum().backward()
        >>> saved = Saver(0).save(model, "ckpt")
        >>> report = Saver(0).load(model, "ckpt")
        >>> report.checkpoint == saved.checkpoint, report.deltas, report.rows, report.missing
        (True, 0, {'item': 2}, ())
    """

    checkpoint: str
    """Name of the newest checkpoint that was read."""
    deltas: int
    """How many deltas were read on top of the full checkpoint."""
    rows: dict[str, int]
    """How many rows each table that was loaded has, on all ranks together."""
    missing: tuple[str, ...]
    """Tables of the model that the checkpoint does not have. They are as they were."""
    unexpected: tuple[str, ...]
    """Tables of the checkpoint, by its names, that the model does not have."""
    renamed: dict[str, str]
    """The names of tables in the model, by their names in the checkpoint, where these differ."""
    skipped: dict[str, str] = field(default_factory=dict)
    """With `last_intact=True`: the checkpoints that were passed over, newest first, each with the reason why it cannot be
    loaded."""
    hyperparameters: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each table that was loaded with its slots: the numbers that its `param_groups` entry has from the checkpoint, which are
    those of `lr`, `initial_lr` and `max_gradient` that were saved."""
    dropped: dict[str, int] = field(default_factory=dict)
    """How many rows of the checkpoint each full table with `on_full="evict"` dropped while it was loaded. The next save of a model
    with such a table is full."""

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that were loaded."""
        return tuple(self.rows)
