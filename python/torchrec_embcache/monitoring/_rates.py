"""Derived metrics of the interval between two samples: rates, hit rates, and quantiles of waits."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec_embcache.stats import Histogram

from ._catalog import METRICS
from ._sampling import MetricValue, Sample, TableSample

__all__ = ["QUANTILES", "TIERS", "scalars", "table_rates"]

TIERS = ("device", "host", "ssd")
#: The reported quantiles of waits, by name.
QUANTILES = {"p50": 0.5, "p99": 0.99}
_KINDS = {metric.path: metric.kind for metric in METRICS}


def scalars(before: Sample | None, after: Sample) -> dict[str, float]:
    """Returns the metrics of two samples of a model by name, as "embcache/<module>/<table>/host/hit_rate"; see `table_rates`.

    `before` is None for the first sample: in that case there are no rates, and ratios and quantiles cover the time since the tables
    were opened.

    Examples:
        >>> from torchrec_embcache.monitoring import Sample, TableSample, scalars
        >>> before = Sample(10.0, 1, (TableSample("", "item", 0, {"host.hits": 0, "host.misses": 0}),))
        >>> after = Sample(12.0, 5, (TableSample("", "item", 0, {"host.hits": 30, "host.misses": 10}),))
        >>> scalars(before, after)["embcache/item/host/hit_rate"]
        0.75
        >>> scalars(before, after)["embcache/item/host/hits_per_second"]
        15.0
    """
    earlier = {(table.module, table.table, table.rank): table for table in (before.tables if before else ())}
    found: dict[str, float] = {}
    for table in after.tables:
        last = earlier.get((table.module, table.table, table.rank))
        seconds = after.time - before.time if before is not None and last is not None else 0.0
        numbers = table_rates(last, table, seconds)
        found.update({f"embcache/{table.title}/{name}": number for name, number in numbers.items()})
    return found


def table_rates(before: TableSample | None, after: TableSample, seconds: float) -> dict[str, float]:
    """Returns the metrics of a table for the interval between two samples that are `seconds` apart.

    Gauges have their current value. A counter `host.hits` becomes "host/hits_per_second", if `seconds` is above 0.0. A histogram of
    waits becomes "row_wait/p50_ms", "row_wait/p99_ms" and "row_wait/mean_ms" of the waits since `before`. A tier with lookups has
    "host/hit_rate", and the SSD tier has "ssd/write_amplification" if rows were written to it.

    If the table was reopened between the samples, its counters restarted at 0, and the metrics cover the time since then.
    """
    earlier = before.values if before is not None and not _was_reopened(before, after) else {}
    found: dict[str, float] = {}
    for path, value in after.values.items():
        name, kind = path.replace(".", "/"), _KINDS.get(path)
        if isinstance(value, Histogram):
            found.update(_histogram_rates(name, histogram_since(value, earlier.get(path))))
        elif isinstance(value, Mapping):
            last = earlier.get(path)
            for key, number in value.items() if seconds > 0.0 else ():
                begun = last.get(key) if isinstance(last, Mapping) else None
                found[f"{name}/{key}_per_second"] = _increase(number, begun) / seconds
        elif isinstance(value, str):
            continue
        elif kind == "counter":
            if seconds > 0.0:
                found[f"{name.removesuffix('_ns')}_per_second"] = (
                    _increase(value, earlier.get(path)) / seconds * _path_scale(path)
                )
        else:
            found[name] = float(value)
    if seconds > 0.0 and before is not None and "step" in earlier:
        found["steps_per_second"] = max(0.0, _increase(_as_number(after.values.get("step")), earlier["step"]) / seconds)
    found.update(_ratios(earlier, after))
    return found


def histogram_since(value: Histogram, earlier: MetricValue | None) -> Histogram:
    """Returns the durations that a histogram has counted since an earlier state."""
    return value - earlier if isinstance(earlier, Histogram) else value


def _path_scale(path: str) -> float:
    return 1e-9 if path.endswith("_ns") else 1.0


def _was_reopened(before: TableSample, after: TableSample) -> bool:
    """True if the table was reopened, so that its counters restarted at 0."""
    return any(
        kind == "counter" and _as_number(after.values.get(path)) < _as_number(before.values.get(path))
        for path, kind in _KINDS.items()
    )


def _as_number(value: MetricValue | None) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _increase(value: float, earlier: MetricValue | None) -> float:
    return value - _as_number(earlier)


def _histogram_rates(name: str, histogram: Histogram) -> dict[str, float]:
    if not histogram.count:
        return {}
    found = {f"{name}/{label}_ms": histogram.quantile(q) / 1e6 for label, q in QUANTILES.items()}
    return {**found, f"{name}/mean_ms": histogram.mean_ns / 1e6}


def _ratios(earlier: Mapping[str, MetricValue], after: TableSample) -> dict[str, float]:
    """Returns hits per lookup of each tier, and written bytes per logical byte of the SSD tier."""

    def rise(path: str) -> float:
        return _increase(_as_number(after.values.get(path)), earlier.get(path))

    found: dict[str, float] = {}
    for tier in TIERS:
        hits, misses = rise(f"{tier}.hits"), rise(f"{tier}.misses")
        if hits + misses > 0:
            found[f"{tier}/hit_rate"] = hits / (hits + misses)
    if rise("ssd.logical_written_bytes") > 0:
        found["ssd/write_amplification"] = rise("ssd.written_bytes") / rise("ssd.logical_written_bytes")
    return found
