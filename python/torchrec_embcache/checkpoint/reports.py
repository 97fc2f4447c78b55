"""Reports of saves and loads of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SaveReport:
    """The result of a save or a compaction. Counts are sums over all ranks.

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
    """Name of the checkpoint: its directory within the path."""
    kind: Literal["full", "delta", "linked"]
    """The contents: "full": every row; "delta": the rows modified since `parent`; "linked": every row, with SSD tiers as
    hard-linked segments.
    """
    parent: str | None
    """Name of the checkpoint that a delta is based on."""
    reason: str | None
    """The reason why a save that was to be incremental is full."""
    rows: int
    """Number of rows in its files."""
    tombstones: int
    """Number of ids that were removed from their table since the parent."""
    linked_bytes: int = 0
    """Bytes of segments that a linked checkpoint shares with SSD tiers."""
    copied_bytes: int = 0
    """Bytes of segments that were copied into a linked checkpoint, because `path` and `ssd_dir` are on different file systems."""


@dataclass(frozen=True)
class LoadReport:
    """The result of a load, equal on all ranks. Tables are named `module/table`, as in the model.

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
    """Name of the latest checkpoint that was read."""
    deltas: int
    """Number of deltas that were read on top of the full checkpoint."""
    rows: dict[str, int]
    """Number of rows of each loaded table, on all ranks together."""
    missing: tuple[str, ...]
    """Tables of the model that the checkpoint does not have. They are unchanged."""
    unexpected: tuple[str, ...]
    """Tables of the checkpoint, by its names, that the model does not have."""
    renamed: dict[str, str]
    """Names of tables in the model, by their names in the checkpoint, if these differ."""
    skipped: dict[str, str] = field(default_factory=dict)
    """With `last_intact=True`: the checkpoints that were skipped, latest first, each with the reason why it cannot be loaded."""
    hyperparameters: dict[str, dict[str, float]] = field(default_factory=dict)
    """The hyperparameters restored into the `param_groups` entry of each table that was loaded with its slots: the saved ones among
    `lr`, `initial_lr` and `max_gradient`.
    """
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of rows of the checkpoint that each full table with `on_full="evict"` dropped during the load. The next save of a
    model with such a table is full.
    """

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that were loaded."""
        return tuple(self.rows)
