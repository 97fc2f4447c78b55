"""Exports the counters of served tables to Prometheus."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from torchrec_embcache.exceptions import EmbCacheError, InputError
from torchrec_embcache.serving._modules import tables_of
from torchrec_embcache.serving.stats import ServingStats
from torchrec_embcache.serving.tables import Tables

from ._catalog import Metric

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["SERVING_METRICS", "ServingCollector"]

#: Every metric of `ServingStats`, in the order of the documentation. Each has the label `path`, the served directory.
SERVING_METRICS: tuple[Metric, ...] = (
    Metric("version", "embcache_serving_checkpoint_info", "text", "Name of the served checkpoint."),
    Metric("seq", "embcache_serving_version", "gauge", "Number of the served checkpoint."),
    Metric(
        "staleness_seconds", "embcache_serving_staleness_seconds", "gauge", "Age of the served checkpoint, in seconds."
    ),
    Metric("is_stale", "embcache_serving_stale", "flag", "1 if its age exceeds `max_staleness_seconds`."),
    Metric("polls", "embcache_serving_polls_total", "counter", "Polls for a newer checkpoint."),
    Metric(
        "swaps",
        "embcache_serving_swaps_total",
        "counter",
        "Changes of the served checkpoint, including rollbacks.",
    ),
    Metric(
        "failed_polls",
        "embcache_serving_failed_polls_total",
        "counter",
        "Polls that failed; the previous version stays.",
    ),
    Metric("last_error", "embcache_serving_failing", "flag", "1 if the last poll failed; the log has the error."),
    Metric(
        "versions",
        "embcache_serving_versions",
        "gauge",
        "Versions that are served, retained for a rollback, or pinned.",
    ),
    Metric("lookups", "embcache_serving_lookups_total", "counter", "Lookups in tables."),
    Metric("ids", "embcache_serving_ids_total", "counter", "Looked-up ids."),
    Metric("missing", "embcache_serving_missing_ids_total", "counter", "Looked-up ids without a row."),
    Metric(
        "cold_rows",
        "embcache_serving_cold_rows_total",
        "counter",
        "Rows whose pages were probably not in memory, and were requested.",
    ),
    Metric("rows", "embcache_serving_rows", "gauge", "Rows of all tables."),
    Metric("overlay_ids", "embcache_serving_overlay_ids", "gauge", "Ids of deltas that the indexes do not cover yet."),
    Metric(
        "shared_index_bytes",
        "embcache_serving_shared_index_bytes",
        "gauge",
        "Bytes of the indexes that all processes of the machine share.",
    ),
    Metric(
        "private_bytes",
        "embcache_serving_private_bytes",
        "gauge",
        "Bytes of indexes and of ids of deltas in the private memory of this process.",
    ),
)


class ServingCollector:
    """A prometheus_client collector of the current counters of served tables.

    `PrometheusExporter` includes one. Register it with your own registry if the process already serves metrics, as a web server
    does. It keeps neither the tables nor the model alive, and omits closed tables. If a model reads a directory that was opened
    twice, the label `path` of the second ends with "#2".

    Args:
        served: the result of `serving.open`, or a model that reads served tables.

    Raises:
        InputError: `served` is neither.

    Examples:
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
        >>> from torchrec_embcache.monitoring import ServingCollector
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> registry = CollectorRegistry()
        >>> with serving.open("ckpt") as tables:
        ...     registry.register(ServingCollector(tables))
        ...     text = generate_latest(registry).decode()
        >>> [line for line in text.splitlines() if line.startswith("embcache_serving_rows")]
        ['embcache_serving_rows{path=".../ckpt"} 1.0']
        >>> [family.name for family in ServingCollector(tables).collect()]  # they are closed
        []
    """

    def __init__(self, served: Tables | nn.Module) -> None:
        if not isinstance(served, Tables | nn.Module):
            raise InputError(f"served is a {type(served).__name__}: give what serving.open returned, or a model")
        self._served = weakref.ref(served)

    def describe(self) -> Iterator[Family]:
        """Yields nothing: the set of metrics depends on the open tables."""
        yield from ()

    def collect(self) -> Iterator[Family]:
        """Yields the current metrics."""
        having = list(self._stats())
        for metric in SERVING_METRICS if having else ():
            yield _serving_family(metric, having)

    def _stats(self) -> Iterator[tuple[str, ServingStats]]:
        served = self._served()
        if served is None:
            return
        opened: Counter[str] = Counter()
        for tables in [served] if isinstance(served, Tables) else tables_of(served):
            try:
                stats = tables.stats()
            except EmbCacheError:
                continue  # the tables are closed
            opened[tables.path] += 1
            times = opened[tables.path]
            yield tables.path if times == 1 else f"{tables.path}#{times}", stats


def _serving_family(metric: Metric, stats_by_path: list[tuple[str, ServingStats]]) -> Family:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    of_kind: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "flag": GaugeMetricFamily,
        "text": InfoMetricFamily,
    }
    name = metric.name.removesuffix("_total").removesuffix("_info")
    family = of_kind[metric.kind](name, metric.about, labels=["path"])
    for path, stats in stats_by_path:
        value = getattr(stats, metric.path)
        if metric.kind == "text":
            family.add_metric([path], {metric.path: value})
        elif metric.path == "last_error":
            family.add_metric([path], float(value is not None))
        else:
            family.add_metric([path], float(value))
    return family  # type: ignore[no-any-return]
