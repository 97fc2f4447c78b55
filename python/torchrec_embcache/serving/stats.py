"""Counters of a served directory of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from torchrec_embcache import _native

__all__ = ["ServingStats"]


@dataclass(frozen=True)
class ServingStats:
    """Result of `Tables.stats()`: counters of this process since `serving.open`.

    - `version`, `seq`: name and number of the served checkpoint.
    - `staleness_seconds`, `is_stale`: time since it was published, and True if that exceeds the limit of `Follow`.
    - `polls`, `swaps`, `failed_polls`: number of polls of the directory, of switches to a newer version, and of failed polls, after
      which the previous version continues to be served.
    - `last_error`: message of the last failed poll, until a poll succeeds; None if there is none.
    - `versions`: number of versions that are served, kept for a rollback, or pinned.
    - `lookups`, `ids`, `missing`: number of lookups in tables, of ids in them, and of those ids that have no row.
    - `cold_rows`: rows whose pages were not known to be in memory and were requested in one batch before the rows were read.
    - `rows`: rows of all served tables.
    - `overlay_ids`: ids of incremental checkpoints that the indexes do not cover yet; this process holds them in its own memory.
    - `shared_index_bytes`: bytes of the indexes shared by all processes of the machine.
    - `private_bytes`: bytes of indexes and of overlay ids in the private memory of this process.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> with serving.open("ckpt") as tables:
        ...     rows = tables.pin()["item"].lookup([7, 8])
        ...     stats = tables.stats()
        >>> stats.seq, stats.lookups, stats.ids, stats.missing, stats.failed_polls
        (1, 1, 2, 1, 0)
    """

    version: str
    seq: int
    staleness_seconds: float
    polls: int
    swaps: int
    failed_polls: int
    last_error: str | None
    versions: int
    lookups: int
    ids: int
    missing: int
    cold_rows: int
    rows: int
    overlay_ids: int
    shared_index_bytes: int
    private_bytes: int
    is_stale: bool

    @classmethod
    def from_native(cls, native: _native.ServingStats, max_staleness_seconds: float | None) -> Self:
        """Converts the native counters. `max_staleness_seconds` is the limit for `is_stale`; None: no limit."""
        counted = {field.name: getattr(native, field.name) for field in fields(cls) if field.name != "is_stale"}
        return cls(
            **counted, is_stale=max_staleness_seconds is not None and native.staleness_seconds > max_staleness_seconds
        )
