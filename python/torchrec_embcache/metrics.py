"""The counters of a table and of its tiers, as users see them.

The names of the fields are those of the core's counters. CONTRIBUTING.md says where a counter is added.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from . import _native

__all__ = ["AdmissionStats", "EvictionStats", "SsdStats", "TableStats", "TierStats"]


@dataclass(frozen=True)
class TierStats:
    """The counters of one tier of one table since the table was opened.

    - `rows`, `bytes`: what the tier holds now. The bytes include its index.
    - `capacity_bytes`: its budget.
    - `hits`, `misses`: distinct ids of plans that were found in the tier, and that were looked for and not found.
    - `evictions`: rows that left the tier to make room.
    - `read_bytes`, `written_bytes`: bytes read from the tier for plans, and bytes written into it.
    - `time_ns`: nanoseconds that plans spent on the tier, waits included.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
        >>> item = EmbCacheEmbeddingBag(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5)
        ... )
        >>> item(torch.tensor([[7, 8], [7, 9]])).sum().backward()
        >>> host = item.stats().host
        >>> host.rows, host.misses, host.hits, host.capacity_bytes
        (3, 3, 0, 1048576)
    """

    rows: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    read_bytes: int
    written_bytes: int
    time_ns: int

    @classmethod
    def of(cls, native: _native.TierStats) -> Self:
        """From the core's counters."""
        return cls(**_named(TierStats, native))


@dataclass(frozen=True)
class SsdStats(TierStats):
    """The counters of the SSD tier.

    - `io_engine`: "io_uring" or "pread", with "+direct" where files are read past the system's page cache (O_DIRECT).
    - `row_bytes_given`: bytes of the rows that were given to the tier.
    - `compaction_bytes`: bytes that compaction wrote.
    - `live_share`: the bytes of live records, divided by the bytes of sealed segments; 0 to 1.
    - `segments`: files.
    - `index_bytes`: bytes of RAM of the tier's index, which count in `host_bytes`.
    - `dropped_rows`: rows that `on_full="evict"` removed.
    - `published_given_up`: the last flush can no longer be resumed, because the room of its segments was needed.

    Examples:
        >>> import os
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> os.mkdir("cache", mode=0o750)
        >>> tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache")
        >>> with CacheTable(name="item", dim=2, tiers=tiers, initializer=initializers.Constant(0.0), optimizer=None) as table:
        ...     table.open()  # its first use would open it too
        ...     table.import_rows([7, 8], [[1.0, 2.0], [3.0, 4.0]])
        ...     table.flush()
        ...     table.stats().ssd.rows, table.stats().ssd.dropped_rows, len(table.published())
        (2, 0, 1)
    """

    io_engine: str
    row_bytes_given: int
    compaction_bytes: int
    live_share: float
    segments: int
    index_bytes: int
    dropped_rows: int
    published_given_up: bool

    @classmethod
    def of(cls, native: _native.SsdStats) -> Self:  # type: ignore[override]
        """From the core's counters."""
        every_tier = _named(TierStats, native.tier)
        return cls(**every_tier, **_named(cls, native, apart_from=every_tier))

    @property
    def write_amplification(self) -> float:
        """Bytes that the tier wrote, divided by the bytes of the rows that it was given; 0 before the first row."""
        return self.written_bytes / self.row_bytes_given if self.row_bytes_given else 0.0


@dataclass(frozen=True)
class AdmissionStats:
    """What became of ids without a row in training batches since the table was opened. An id counts once a batch.

    - `admitted`: ids that got a row.
    - `refused`: ids that got none.
    - `pending`: ids that have a count now, and no row.
    - `pending_bytes`: bytes of RAM that their counts take.
    - `forgotten`: ids whose counts were forgotten, because the memory for them was full or their window ended.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, admission, optimizers
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5),
        ...     admission=admission.Count(2),
        ... )
        >>> item(torch.tensor([7, 7, 8])).sum().backward()  # 7 occurs twice
        >>> counters = item.stats().admission
        >>> counters.admitted, counters.refused, counters.pending
        (1, 1, 1)
    """

    admitted: int
    refused: int
    pending: int
    pending_bytes: int
    forgotten: int

    @classmethod
    def of(cls, native: _native.AdmissionStats) -> Self:
        """From the core's counters."""
        return cls(**_named(cls, native))


@dataclass(frozen=True)
class EvictionStats:
    """What the sweeps of a table's eviction have done since the table was opened.

    - `evicted`: rows that a rule took. While a sweep is under way those are counted that have left their tier.
    - `evicted_by_rule`: how many of them each kind of rule took: "ttl", "score", "l2_norm", "standing" for `Keep` and `Share`, or
      "all". A row that several rules of a policy take counts for the first of them. Rules that took none are left out.
    - `under_way`: rows that a sweep takes are still to leave their tier. They are unseen all the same.
    - `untold`: rows that left, by a rule or because the table was full, and wait for `on_evict` or `drain_evicted`.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, eviction, optimizers
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5),
        ...     eviction=eviction.Policy([eviction.Ttl(seconds=3600)]),
        ... )
        >>> for seconds, id in ((0, 7), (7200, 8)):
        ...     item.table.set_time(seconds)
        ...     item(torch.tensor([id])).sum().backward()
        >>> item.table.evict()
        >>> len(item), item.stats().eviction.evicted, item.stats().eviction.evicted_by_rule
        (1, 1, {'ttl': 1})
    """

    evicted: int
    evicted_by_rule: dict[str, int]
    under_way: bool
    untold: int

    @classmethod
    def of(cls, native: _native.EvictionStats) -> Self:
        """From the core's counters."""
        return cls(**_named(cls, native))


@dataclass(frozen=True)
class TableStats:
    """The counters of one shard of a table.

    - `rows`: rows in all tiers together.
    - `step`: training steps.
    - `pinned_rows`: cache slots that batches in flight hold.
    - `overflow_plans`: batches whose rows did not fit the tier that kernels run on.
    - `dropped_rows`: rows that `on_full="evict"` removed.
    - `admission`: the counters of admission; None where every id gets a row.
    - `eviction`: the counters of eviction by rule; None where no rule takes rows, and without `on_evict`.
    - `device`, `host`, `ssd`: the counters of each tier; None for a tier that the table does not have.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
        >>> item = EmbCacheEmbeddingBag(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5)
        ... )
        >>> item(torch.tensor([[7, 8], [7, 9]])).sum().backward()
        >>> stats = item.stats()
        >>> stats.rows, stats.step, stats.overflow_plans, stats.ssd
        (3, 1, 0, None)
    """

    rows: int
    step: int
    pinned_rows: int
    overflow_plans: int
    dropped_rows: int
    admission: AdmissionStats | None
    eviction: EvictionStats | None
    device: TierStats | None
    host: TierStats
    ssd: SsdStats | None

    @classmethod
    def of(cls, native: _native.TableStats) -> Self:
        """From the core's counters."""
        tiers: dict[str, Any] = {
            "admission": AdmissionStats.of(native.admission) if native.admission is not None else None,
            "eviction": EvictionStats.of(native.eviction) if native.eviction is not None else None,
            "device": TierStats.of(native.device) if native.device is not None else None,
            "host": TierStats.of(native.host),
            "ssd": SsdStats.of(native.ssd) if native.ssd is not None else None,
        }
        return cls(**tiers, **_named(cls, native, apart_from=tiers))


def _named(kind: type[Any], native: object, apart_from: dict[str, Any] | None = None) -> dict[str, Any]:
    """The values of `native` that are named as the fields of the dataclass `kind`; those in `apart_from` are left out."""
    return {field.name: getattr(native, field.name) for field in fields(kind) if field.name not in (apart_from or {})}
