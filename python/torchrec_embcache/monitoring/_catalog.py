"""Every metric of `stats()`: its path, its name in Prometheus, and its description.

A test fails if a field of the classes in `stats.py` has no entry here. JSON lines contain such a field too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "Metric", "MetricKind"]

#: Kind of a metric: a counter only increases while its table is open; a gauge goes up and down; a flag is 0 or 1; a text is an info
#: metric.
MetricKind = Literal["counter", "gauge", "flag", "text", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One metric of `TableStats`.

    - `path`: its path in `TableStats`, as "host.hits".
    - `name`: its name in Prometheus, as "embcache_host_hits_total".
    - `kind`: a counter only increases while its table is open; a gauge goes up and down; a flag is 0 or 1; a text is an info
      metric, whose value is a label; a histogram has durations in seconds.
    - `about`: its description.
    - `label`: the additional label of a metric that is a mapping in `TableStats`; the keys of the mapping are the label's values.

    Examples:
        >>> from torchrec_embcache.monitoring import METRICS
        >>> [metric.name for metric in METRICS if metric.path == "host.hits"]
        ['embcache_host_hits_total']
    """

    path: str
    name: str
    kind: MetricKind
    about: str
    label: str | None = None


def _tier(tier: str, location: str) -> list[Metric]:
    """Returns the counters that every tier has."""

    def metric(path: str, name: str, kind: MetricKind, about: str) -> Metric:
        return Metric(f"{tier}.{path}", f"embcache_{tier}_{name}", kind, about)

    return [
        metric("rows", "rows", "gauge", f"Rows {location}."),
        metric("bytes", "bytes", "gauge", f"Bytes of the rows and of the tier's index {location}."),
        metric("capacity_bytes", "capacity_bytes", "gauge", "The tier's budget in bytes."),
        metric("hits", "hits_total", "counter", f"Distinct ids of batches whose rows were found {location}."),
        metric(
            "misses",
            "misses_total",
            "counter",
            f"Distinct ids of batches whose rows were not found {location}.",
        ),
        metric("evictions", "evictions_total", "counter", "Rows that left the tier to free space."),
        metric("read_bytes", "read_bytes_total", "counter", "Bytes read from the tier for batches."),
        metric("written_bytes", "written_bytes_total", "counter", "Bytes written to the tier."),
        metric("time_ns", "time_seconds_total", "counter", "Time that batches spent on the tier, including waits."),
    ]


#: Every metric of `TableStats`, in the order of the documentation.
METRICS: tuple[Metric, ...] = (
    Metric(
        "rows",
        "embcache_table_rows",
        "gauge",
        "Rows in all tiers, including rows that a running sweep has yet to remove.",
    ),
    Metric("step", "embcache_table_step", "gauge", "Training steps. A load sets it back."),
    Metric("pinned_rows", "embcache_table_pinned_rows", "gauge", "Cache slots of the batches in flight."),
    Metric(
        "overflow_plans",
        "embcache_table_overflow_batches_total",
        "counter",
        "Batches whose rows did not fit the tier that kernels run on.",
    ),
    Metric(
        "dropped_rows",
        "embcache_table_dropped_rows_total",
        "counter",
        'Rows that `on_full="evict"` removed from the table.',
    ),
    Metric(
        "row_wait",
        "embcache_table_row_wait_seconds",
        "histogram",
        "Time that training waited for the rows of a batch.",
    ),
    Metric(
        "lock_held",
        "embcache_table_lock_held_seconds",
        "histogram",
        "Duration of each hold of the table's lock.",
    ),
    Metric("kernels", "embcache_kernels_info", "text", "Kernels of the table: core, triton or torch."),
    *_tier("device", "on the device"),
    *_tier("host", "in host RAM"),
    *_tier("ssd", "on SSD"),
    Metric(
        "ssd.io_engine",
        "embcache_ssd_io_engine_info",
        "text",
        "Read engine: io_uring or pread; with +direct, reads bypass the page cache.",
    ),
    Metric(
        "ssd.reads",
        "embcache_ssd_reads_total",
        "counter",
        "Disk reads for batches. One read loads all rows that are near each other.",
    ),
    Metric(
        "ssd.read_latency",
        "embcache_ssd_read_latency_seconds",
        "histogram",
        "Latency of a disk read for rows.",
    ),
    Metric(
        "ssd.logical_written_bytes",
        "embcache_ssd_logical_written_bytes_total",
        "counter",
        "Bytes of the rows that were passed to the tier.",
    ),
    Metric("ssd.compaction_bytes", "embcache_ssd_compaction_bytes_total", "counter", "Bytes that compaction wrote."),
    Metric(
        "ssd.live_share",
        "embcache_ssd_live_ratio",
        "gauge",
        "Bytes of live records, divided by the bytes of sealed segments; 0 to 1.",
    ),
    Metric("ssd.segments", "embcache_ssd_segments", "gauge", "Files of the tier."),
    Metric(
        "ssd.index_bytes",
        "embcache_ssd_index_bytes",
        "gauge",
        "Bytes of RAM of the tier's index, which count in the host tier's budget.",
    ),
    Metric(
        "ssd.dropped_rows",
        "embcache_ssd_dropped_rows_total",
        "counter",
        'Rows that `on_full="evict"` removed from the tier.',
    ),
    Metric(
        "ssd.has_lost_flush",
        "embcache_ssd_flush_lost",
        "flag",
        "1 if the last flush cannot be resumed, because its space was needed.",
    ),
    Metric(
        "ssd.space_waits",
        "embcache_ssd_space_waits_total",
        "counter",
        "Calls that waited for compaction to free space.",
    ),
    Metric(
        "ssd.read_only",
        "embcache_ssd_read_only",
        "flag",
        "1 if a write has failed: the table can be read and saved, but not trained.",
    ),
    Metric(
        "admission.admitted",
        "embcache_admission_admitted_ids_total",
        "counter",
        "Ids without a row that were admitted. An id counts once a batch.",
    ),
    Metric(
        "admission.not_admitted",
        "embcache_admission_not_admitted_ids_total",
        "counter",
        "Ids without a row that were not admitted. An id counts once a batch.",
    ),
    Metric("admission.pending", "embcache_admission_pending_ids", "gauge", "Ids with a count and without a row."),
    Metric("admission.pending_bytes", "embcache_admission_pending_bytes", "gauge", "Bytes of RAM of their counts."),
    Metric(
        "admission.forgotten",
        "embcache_admission_forgotten_ids_total",
        "counter",
        "Ids whose counts were discarded, because their memory was full or their window ended.",
    ),
    Metric("eviction.evicted", "embcache_eviction_evicted_rows_total", "counter", "Rows that eviction rules evicted."),
    Metric(
        "eviction.evicted_by_rule",
        "embcache_eviction_evicted_by_rule_rows_total",
        "counter",
        "Rows that eviction rules evicted, by kind of rule.",
        label="rule",
    ),
    Metric(
        "eviction.is_sweeping",
        "embcache_eviction_sweeping",
        "flag",
        "1 while a sweep has not finished.",
    ),
    Metric(
        "eviction.undelivered",
        "embcache_eviction_undelivered_rows",
        "gauge",
        "Evicted rows that were not delivered to `on_evict` or `drain_evicted` yet.",
    ),
)
