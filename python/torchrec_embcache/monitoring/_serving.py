"""Exports the counters of served tables to Prometheus."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from torchrec_embcache.exceptions import EmbCacheError, InputError
from torchrec_embcache.serving._modules import tables_of
from torchrec_embcache.serving.stats import ServingStats
from torchrec_embcache.serving.tables import Tables

from ._catalog import Metric, metric_of
from ._families import metric_family

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["SERVING_METRICS", "ServingCollector"]

#: Every metric of `ServingStats`, in the order of the documentation. Each has the label `path`, the served directory.
SERVING_METRICS: tuple[Metric, ...] = (
    metric_of("serving", "version", "text", "Name of the served checkpoint.", name="checkpoint"),
    metric_of("serving", "seq", "gauge", "Number of the served checkpoint.", name="version"),
    metric_of("serving", "staleness_seconds", "gauge", "Age of the served checkpoint, in seconds."),
    metric_of("serving", "is_stale", "flag", "1 if its age exceeds `max_staleness_seconds`.", name="stale"),
    metric_of("serving", "polls", "counter", "Polls for a newer checkpoint."),
    metric_of("serving", "swaps", "counter", "Changes of the served checkpoint, including rollbacks."),
    metric_of("serving", "failed_polls", "counter", "Polls that failed; the previous version stays."),
    metric_of("serving", "last_error", "flag", "1 if the last poll failed; the log has the error.", name="failing"),
    metric_of("serving", "versions", "gauge", "Versions that are served, retained for a rollback, or pinned."),
    metric_of("serving", "lookups", "counter", "Lookups in tables."),
    metric_of("serving", "ids", "counter", "Looked-up ids."),
    metric_of("serving", "missing", "counter", "Looked-up ids without a row.", name="missing_ids"),
    metric_of("serving", "cold_rows", "counter", "Rows whose pages were probably not in memory, and were requested."),
    metric_of("serving", "rows", "gauge", "Rows of all tables."),
    metric_of("serving", "overlay_ids", "gauge", "Ids of deltas that the indexes do not cover yet."),
    metric_of(
        "serving", "shared_index_bytes", "gauge", "Bytes of the indexes that all processes of the machine share."
    ),
    metric_of(
        "serving",
        "private_bytes",
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
            values = [([path], getattr(stats, metric.path)) for path, stats in having]
            if metric.path == "last_error":
                values = [(label, error is not None) for label, error in values]
            yield metric_family(metric, ["path"], values)

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
