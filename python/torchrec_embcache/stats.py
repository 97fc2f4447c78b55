"""Counters of a table and of its tiers.

The fields have the names of the native counters. CONTRIBUTING.md explains how to add a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Self

from . import _native
from .exceptions import InputError

__all__ = ["AdmissionStats", "EvictionStats", "Histogram", "SsdStats", "TableStats", "TierStats"]


@dataclass(frozen=True)
class Histogram:
    """A latency histogram since the table was opened.

    - `count`: number of durations.
    - `sum_ns`: their sum in nanoseconds.
    - `buckets`: pairs of a bucket's upper bound in nanoseconds and the number of durations in it, smallest bound first. A bucket
      includes its upper bound and starts at the previous bound. Empty buckets are omitted.

    The buckets are log-linear, like those of HdrHistogram, with 8 per power of two. A bound is therefore at most an eighth above
    each duration in its bucket.

    Examples:
        >>> from torchrec_embcache import Histogram
        >>> waits = Histogram(count=4, sum_ns=5_000, buckets=((1_024, 3), (2_048, 1)))
        >>> waits.quantile(0.5), waits.quantile(0.99), waits.mean_ns
        (1024.0, 2048.0, 1250.0)
        >>> (waits + waits).count, (waits - waits).count
        (8, 0)
    """

    count: int = 0
    sum_ns: int = 0
    buckets: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_native(cls, native: _native.Histogram) -> Self:
        """Converts the native counters."""
        return cls(native.count, native.sum_ns, tuple(zip(native.bounds, native.counts, strict=True)))

    @property
    def mean_ns(self) -> float:
        """The mean duration in nanoseconds; 0.0 if there is none."""
        return self.sum_ns / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Returns the upper bound in nanoseconds of the bucket of the `q`-quantile; 0.0 if there is no duration.

        At least the fraction `q` of all durations, from 0.0 to 1.0, is not longer than this. Raises `InputError` for another `q`.

        For example `table.stats().row_wait.quantile(0.99) / 1e6` is a time in milliseconds.
        """
        if not 0.0 <= q <= 1.0:
            raise InputError(f"q={q!r} is out of range: give a number from 0 to 1")
        seen = 0
        for bound, count in self.buckets:
            seen += count
            if seen >= q * self.count:
                return float(bound)
        return 0.0

    def __add__(self, other: Histogram) -> Histogram:
        """Returns the sum of both, such as of several tables or ranks."""
        return self._combine(other, 1)

    def __sub__(self, earlier: Histogram) -> Histogram:
        """Returns the durations since `earlier`, an earlier state of the same histogram."""
        return self._combine(earlier, -1)

    def _combine(self, other: Histogram, sign: int) -> Histogram:
        counts = dict(self.buckets)
        for bound, count in other.buckets:
            counts[bound] = counts.get(bound, 0) + sign * count
        buckets = tuple((bound, count) for bound, count in sorted(counts.items()) if count)
        return Histogram(self.count + sign * other.count, self.sum_ns + sign * other.sum_ns, buckets)


@dataclass(frozen=True)
class _NativeFields:
    """Counters whose fields have the names of a native class."""

    @classmethod
    def from_native(cls, native: object, more: Mapping[str, object] = MappingProxyType({})) -> Self:
        """Converts the native counters. `more`: the values of fields that `native` does not have."""
        names = [field.name for field in fields(cls) if field.name not in more]
        return cls(**more, **{name: _converted(getattr(native, name)) for name in names})


@dataclass(frozen=True)
class TierStats(_NativeFields):
    """The counters of one tier of one table since the table was opened.

    - `rows`, `bytes`: current contents of the tier. The bytes include its index.
    - `capacity_bytes`: its budget. If tables of a module share it: the table's current bytes, and an equal portion of the free
      bytes.
    - `hits`, `misses`: distinct ids of plans that were found in the tier, and that were looked up and not found. A batch whose rows
      were on the device, and were released when its pipeline was detached, counts again.
    - `evictions`: rows that were demoted or evicted from the tier to free space.
    - `read_bytes`, `written_bytes`: bytes read from the tier for plans, and bytes written into it.
    - `time_ns`: nanoseconds that plans spent on the tier, including waits.

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


@dataclass(frozen=True)
class SsdStats(TierStats):
    """The counters of the SSD tier.

    - `io_engine`: "io_uring" or "pread", with "+direct" if files are read past the page cache (O_DIRECT).
    - `reads`: disk reads for plans. One read loads all rows that are near each other.
    - `read_latency`: latency of disk reads that loaded rows, from the submission of the read until its completion.
    - `logical_written_bytes`: bytes of the rows that were passed to the tier.
    - `compaction_bytes`: bytes that compaction wrote.
    - `live_share`: the bytes of live records, divided by the bytes of sealed segments; 0 to 1.
    - `segments`: number of files.
    - `index_bytes`: bytes of RAM of the tier's index, which are part of `host_bytes`.
    - `dropped_rows`: rows that `on_full="evict"` removed.
    - `has_lost_flush`: the last flush cannot be resumed, because the space of its segments was reclaimed.
    - `space_waits`: number of calls that stalled until compaction had freed space on the SSD.
    - `read_only`: a write or a sync has failed, so that the table can be read and saved elsewhere, but not trained.

    Examples:
        >>> import os
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> os.mkdir("cache", mode=0o750)
        >>> tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache")
        >>> with CacheTable(name="item", dim=2, tiers=tiers, initializer=initializers.Constant(0.0), optimizer=None) as table:
        ...     table.open()  # its first use would open it too
        ...     table.import_rows([7, 8], [[1.0, 2.0], [3.0, 4.0]])
        ...     table.flush()
        ...     table.stats().ssd.rows, table.stats().ssd.dropped_rows, len(table.commit_ids())
        (2, 0, 1)
    """

    io_engine: str
    reads: int
    read_latency: Histogram
    logical_written_bytes: int
    compaction_bytes: int
    live_share: float
    segments: int
    index_bytes: int
    dropped_rows: int
    has_lost_flush: bool
    space_waits: int
    read_only: bool

    @classmethod
    def from_native(cls, native: _native.SsdStats, more: Mapping[str, object] = MappingProxyType({})) -> Self:  # type: ignore[override]
        """Converts the native counters, whose `tier` has those of every tier."""
        return super().from_native(native, {**vars(TierStats.from_native(native.tier)), **more})

    @property
    def write_amplification(self) -> float:
        """Bytes that the tier wrote, divided by the bytes of the rows that were passed to it; 0 before the first row."""
        return self.written_bytes / self.logical_written_bytes if self.logical_written_bytes else 0.0


@dataclass(frozen=True)
class AdmissionStats(_NativeFields):
    """Admission counters since the table was opened: ids without a row in training batches. An id counts once per batch.

    - `admitted`: ids that were admitted.
    - `not_admitted`: ids that were not admitted.
    - `pending`: ids that currently have a count and no row.
    - `pending_bytes`: bytes of RAM of their counts.
    - `forgotten`: ids whose counts were discarded, because their memory was full or their window ended.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, admission, optimizers
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5),
        ...     admission=admission.Count(2),
        ... )
        >>> item(torch.tensor([7, 7, 8])).sum().backward()  # 7 occurs twice
        >>> counters = item.stats().admission
        >>> counters.admitted, counters.not_admitted, counters.pending
        (1, 1, 1)
    """

    admitted: int
    not_admitted: int
    pending: int
    pending_bytes: int
    forgotten: int


@dataclass(frozen=True)
class EvictionStats(_NativeFields):
    """Counters of a table's eviction sweeps since the table was opened.

    - `evicted`: rows that a rule evicted. During a sweep, rows are counted when they leave their tier.
    - `evicted_by_rule`: number of evicted rows by kind of rule: "ttl", "score", "l2_norm", "lowest" for `Keep` and `Share`, or
      "all". A row that matches several rules of a policy counts for the first of them. Rules without evicted rows are omitted.
    - `is_sweeping`: rows that a sweep evicts are still in their tier. Their ids are missing nevertheless.
    - `undelivered`: rows that were evicted, by a rule or because the table was full, and not yet delivered to `on_evict` or
      `drain_evicted`.

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
    is_sweeping: bool
    undelivered: int


@dataclass(frozen=True)
class TableStats(_NativeFields):
    """The counters of one shard of a table.

    - `rows`: rows in all tiers together, including those that a sweep in progress has yet to remove.
    - `step`: number of training steps.
    - `pinned_rows`: cache slots held by batches in flight.
    - `overflow_plans`: batches whose rows did not fit into the tier that kernels run on.
    - `dropped_rows`: rows that `on_full="evict"` removed.
    - `row_wait`: the time that training waited per batch until all of its rows had their slots: for reads from SSD, for free space,
      and for the table's lock. Tables of one forward wait one after the other, so that their waits add up.
    - `lock_held`: hold times of the table's lock.
    - `kernels`: the kernels of the table: "core", "triton" or "torch".
    - `admission`: the admission counters; None if every id is admitted.
    - `eviction`: the counters of eviction by rule; None without eviction rules and `on_evict`.
    - `device`, `host`, `ssd`: the counters of each tier; None for a tier that the table does not have.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
        >>> item = EmbCacheEmbeddingBag(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5)
        ... )
        >>> item(torch.tensor([[7, 8], [7, 9]])).sum().backward()
        >>> stats = item.stats()
        >>> stats.rows, stats.step, stats.overflow_plans, stats.kernels, stats.ssd
        (3, 1, 0, 'core', None)
        >>> stats  # a line for each part
        TableStats(rows=3, step=1, pinned_rows=0, overflow_plans=0, dropped_rows=0, kernels='core')
          row_wait: 1 in ... ms, p50 ... ms, p99 ... ms
          lock_held: ... in ... ms, p50 ... ms, p99 ... ms
          host: rows=3, bytes=..., capacity_bytes=1048576, hits=0, misses=3, evictions=0, ...
    """

    rows: int
    step: int
    pinned_rows: int
    overflow_plans: int
    dropped_rows: int
    row_wait: Histogram
    lock_held: Histogram
    kernels: str
    admission: AdmissionStats | None
    eviction: EvictionStats | None
    device: TierStats | None
    host: TierStats
    ssd: SsdStats | None

    def __repr__(self) -> str:
        """Formats the counters of the table in one line, and adds a line for each histogram and each part."""
        lines = [f"{type(self).__name__}({_format_counters(self)})"]
        for name in ("row_wait", "lock_held", "admission", "eviction", "device", "host", "ssd"):
            part = getattr(self, name)
            if part is not None:
                lines.append(
                    f"  {name}: {_format_histogram(part) if isinstance(part, Histogram) else _format_counters(part)}"
                )
        return "\n".join(lines)


def _format_counters(stats: Any) -> str:
    """Formats the fields of counters, with a summary of a histogram."""
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return ", ".join(
        f"{name}=({_format_histogram(value)})" if isinstance(value, Histogram) else f"{name}={value!r}"
        for name, value in values.items()
        if not isinstance(stats, TableStats) or isinstance(value, int | str)
    )


def _format_histogram(histogram: Histogram) -> str:
    p50, p99 = (histogram.quantile(q) / 1e6 for q in (0.5, 0.99))
    return f"{histogram.count} in {histogram.sum_ns / 1e6:.3f} ms, p50 {p50:.3f} ms, p99 {p99:.3f} ms"


def _converted(value: Any) -> Any:
    """Returns the class of this module for native counters, and other values unchanged."""
    kinds: dict[type[Any], Callable[[Any], object]] = {
        _native.Histogram: Histogram.from_native,
        _native.TierStats: TierStats.from_native,
        _native.SsdStats: SsdStats.from_native,
        _native.AdmissionStats: AdmissionStats.from_native,
        _native.EvictionStats: EvictionStats.from_native,
    }
    convert = kinds.get(type(value))
    return value if convert is None else convert(value)
