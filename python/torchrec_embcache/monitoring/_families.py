"""Metrics in the form of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torchrec_embcache.stats import Histogram

from ._catalog import Metric
from ._sampling import MetricValue

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["BOUNDS_NS", "metric_family"]

#: Histogram bounds: the powers of two from 1 µs to 34 s, which are exact bounds of the native buckets. Fewer than the native
#: buckets, because Prometheus keeps a series for each.
BOUNDS_NS = tuple(1 << power for power in range(10, 36))


def metric_family(metric: Metric, labels: Iterable[str], samples: Iterable[tuple[list[str], Any]]) -> Family:
    """Returns a metric in the form of prometheus_client, of its values by the values of `labels`."""
    from prometheus_client import metrics_core

    kinds: dict[str, Any] = {
        "counter": metrics_core.CounterMetricFamily,
        "gauge": metrics_core.GaugeMetricFamily,
        "flag": metrics_core.GaugeMetricFamily,
        "histogram": metrics_core.HistogramMetricFamily,
        "text": metrics_core.InfoMetricFamily,
    }
    labels = [*labels, *([metric.label] if metric.label else [])]
    family = kinds[metric.kind](metric.name.removesuffix("_total").removesuffix("_info"), metric.about, labels=labels)
    for values, value in samples:
        _add_sample(family, metric, values, value)
    return family  # type: ignore[no-any-return]


def _add_sample(family: Any, metric: Metric, labels: list[str], value: MetricValue) -> None:
    if isinstance(value, Histogram):
        family.add_metric(labels, buckets=_cumulative(value), sum_value=value.sum_ns / 1e9)
    elif isinstance(value, Mapping):
        for name, number in value.items():
            family.add_metric([*labels, name], number)
    elif isinstance(value, str):
        family.add_metric(labels, {metric.path.split(".")[-1]: value})
    else:
        family.add_metric(labels, value / 1e9 if metric.path.endswith("_ns") else float(value))


def _cumulative(value: Histogram) -> list[tuple[str, float]]:
    """Returns the number of durations up to each bound, in seconds, in the form of Prometheus."""
    found: list[tuple[str, float]] = []
    at = seen = 0
    for bound in BOUNDS_NS:
        while at < len(value.buckets) and value.buckets[at][0] <= bound:
            seen += value.buckets[at][1]
            at += 1
        found.append((repr(bound / 1e9), seen))
    return [*found, ("+Inf", value.count)]
