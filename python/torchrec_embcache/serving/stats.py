"""The counters of a directory of checkpoints that is served, as users see them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from torchrec_embcache import _native

__all__ = ["ServingStats"]


@dataclass(frozen=True)
class ServingStats:
    """What `Tables.stats()` gives: counters of this process since `serving.open`.

    - `version`, `seq`: the name of the checkpoint that is served now, and its number.
    - `staleness_seconds`, `is_stale`: how long ago it was published, and whether that is longer than `Follow` allows.
    - `polls`, `swaps`, `failed_polls`: how often the directory was looked at, how often a newer version came to be served, and how
      often that failed, so that the old version serves on.
    - `last_error`: what the last failure said, until a look succeeds; None where there was none.
    - `versions`: versions that are served, kept for a rollback, or pinned.
    - `lookups`, `ids`, `missing`: lookups in tables, ids in them, and those of the ids that have no row.
    - `cold_rows`: rows whose pages were not seen in memory lately, and were asked for together before rows were taken from them.
    - `rows`: rows of all tables that are served now.
    - `overlay_ids`: ids of deltas that the indexes do not cover yet, which are held in the memory of this process.
    - `shared_index_bytes`: bytes of the indexes that all processes of the machine share.
    - `private_bytes`: bytes of indexes and of ids of deltas in the memory of this process alone.

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
        """From the core's counters. `max_staleness_seconds` is how old what is served may be."""
        counted = {field.name: getattr(native, field.name) for field in fields(cls) if field.name != "is_stale"}
        return cls(
            **counted, is_stale=max_staleness_seconds is not None and native.staleness_seconds > max_staleness_seconds
        )
