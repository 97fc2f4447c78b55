"""Every metric of `stats()`: its path, its name in Prometheus, and its description.

A test fails if a field of the classes in `stats.py` has no entry here. JSON lines contain such a field too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "Metric", "MetricKind", "metric_of"]

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


#: Ends of names in Prometheus. Its unit of time is the second.
_SUFFIXES = {"counter": "_total", "text": "_info", "histogram": "_seconds"}


def metric_of(
    group: str, field: str, kind: MetricKind, about: str, *, name: str | None = None, label: str | None = None
) -> Metric:
    """Returns the metric of a field. `group`: a part of `TableStats`, or "table" or "serving" for a field that is in none.

    `name` replaces the field in the name of the metric.
    """
    path = field if group in ("table", "serving") else f"{group}.{field}"
    return Metric(path, f"embcache_{group}_{name or field}{_SUFFIXES.get(kind, '')}", kind, about, label)


def _tier(tier: str, location: str) -> list[Metric]:
    """Returns the metrics that every tier has."""
    return [
        metric_of(tier, "rows", "gauge", f"Rows {location}."),
        metric_of(tier, "bytes", "gauge", f"Bytes of the rows and of the tier's index {location}."),
        metric_of(tier, "capacity_bytes", "gauge", "The tier's budget in bytes."),
        metric_of(tier, "hits", "counter", f"Distinct ids of batches whose rows were found {location}."),
        metric_of(tier, "misses", "counter", f"Distinct ids of batches whose rows were not found {location}."),
        metric_of(tier, "evictions", "counter", "Rows that left the tier to free space."),
        metric_of(tier, "read_bytes", "counter", "Bytes read from the tier for batches."),
        metric_of(tier, "written_bytes", "counter", "Bytes written to the tier."),
        metric_of(
            tier, "time_ns", "counter", "Time that batches spent on the tier, including waits.", name="time_seconds"
        ),
    ]


#: Every metric of `TableStats`, in the order of the documentation.
METRICS: tuple[Metric, ...] = (
    metric_of("table", "rows", "gauge", "Rows in all tiers, including rows that a running sweep has yet to remove."),
    metric_of("table", "step", "gauge", "Training steps. A load sets it back."),
    metric_of("table", "pinned_rows", "gauge", "Cache slots of the batches in flight."),
    metric_of(
        "table",
        "overflow_plans",
        "counter",
        "Batches whose rows did not fit the tier that kernels run on.",
        name="overflow_batches",
    ),
    metric_of("table", "dropped_rows", "counter", 'Rows that `on_full="evict"` removed from the table.'),
    metric_of("table", "row_wait", "histogram", "Time that training waited for the rows of a batch."),
    metric_of("table", "lock_held", "histogram", "Duration of each hold of the table's lock."),
    Metric("kernels", "embcache_kernels_info", "text", "Kernels of the table: core, triton or torch."),
    *_tier("device", "on the device"),
    *_tier("host", "in host RAM"),
    *_tier("ssd", "on SSD"),
    metric_of("ssd", "io_engine", "text", "Read engine: io_uring or pread; with +direct, reads bypass the page cache."),
    metric_of("ssd", "reads", "counter", "Disk reads for batches. One read loads all rows that are near each other."),
    metric_of("ssd", "read_latency", "histogram", "Latency of a disk read for rows."),
    metric_of("ssd", "logical_written_bytes", "counter", "Bytes of the rows that were passed to the tier."),
    metric_of("ssd", "compaction_bytes", "counter", "Bytes that compaction wrote."),
    metric_of(
        "ssd",
        "live_share",
        "gauge",
        "Bytes of live records, divided by the bytes of sealed segments; 0 to 1.",
        name="live_ratio",
    ),
    metric_of("ssd", "segments", "gauge", "Files of the tier."),
    metric_of(
        "ssd", "index_bytes", "gauge", "Bytes of RAM of the tier's index, which count in the host tier's budget."
    ),
    metric_of("ssd", "dropped_rows", "counter", 'Rows that `on_full="evict"` removed from the tier.'),
    metric_of(
        "ssd",
        "has_lost_flush",
        "flag",
        "1 if the last flush cannot be resumed, because its space was needed.",
        name="flush_lost",
    ),
    metric_of("ssd", "space_waits", "counter", "Calls that waited for compaction to free space."),
    metric_of("ssd", "read_only", "flag", "1 if a write has failed: the table can be read and saved, but not trained."),
    metric_of(
        "admission",
        "admitted",
        "counter",
        "Ids without a row that were admitted. An id counts once a batch.",
        name="admitted_ids",
    ),
    metric_of(
        "admission",
        "not_admitted",
        "counter",
        "Ids without a row that were not admitted. An id counts once a batch.",
        name="not_admitted_ids",
    ),
    metric_of("admission", "pending", "gauge", "Ids with a count and without a row.", name="pending_ids"),
    metric_of("admission", "pending_bytes", "gauge", "Bytes of RAM of their counts."),
    metric_of(
        "admission",
        "forgotten",
        "counter",
        "Ids whose counts were discarded, because their memory was full or their window ended.",
        name="forgotten_ids",
    ),
    metric_of("eviction", "evicted", "counter", "Rows that eviction rules evicted.", name="evicted_rows"),
    metric_of(
        "eviction",
        "evicted_by_rule",
        "counter",
        "Rows that eviction rules evicted, by kind of rule.",
        name="evicted_by_rule_rows",
        label="rule",
    ),
    metric_of(
        "eviction",
        "is_sweeping",
        "flag",
        "1 while a sweep has not finished.",
        name="sweeping",
    ),
    metric_of(
        "eviction",
        "undelivered",
        "gauge",
        "Evicted rows that were not delivered to `on_evict` or `drain_evicted` yet.",
        name="undelivered_rows",
    ),
)
