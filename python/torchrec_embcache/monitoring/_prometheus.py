"""Exports the counters of a model's tables to Prometheus. Tables are sampled on each scrape."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache.exceptions import StorageError, UnsupportedError
from torchrec_embcache.serving.tables import Tables

from ._background import FailureLogger, close_at_exit
from ._catalog import METRICS
from ._families import metric_family
from ._sampling import Sampler
from ._serving import ServingCollector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["LABELS", "PrometheusExporter"]

#: The labels of every metric.
LABELS = ("module", "table", "rank")


class PrometheusExporter(CloseOnExitMixin):
    """Serves the counters of a model's tables to Prometheus over HTTP, on its own thread.

    The tables are sampled only when Prometheus scrapes `/metrics`. `docs/metrics.md` lists the metrics. Each has the labels
    `module`, `table` and `rank`. In distributed training, every rank serves its own tables on its own port.

    Args:
        model: any `nn.Module` with tables of this package, including served tables; or the result of `serving.open`. The exporter
            keeps neither the model nor its tables alive.
        port: TCP port to listen on. 0 picks a free port, which `port` and `url` return.
        host: address to listen on. The default is reachable only from this machine; "0.0.0.0" listens on all networks, as a
            container requires. The endpoint is read-only and exposes the names and sizes of the tables.

    Raises:
        InputError: `model` is neither.
        UnsupportedError: prometheus-client is not installed.
        StorageError: the port is in use, or the OS does not permit it.

    Examples:
        >>> import torch
        >>> from urllib.request import urlopen
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.monitoring import PrometheusExporter
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.1)
        ... )
        >>> item(torch.tensor([7, 8])).sum().backward()
        >>> with PrometheusExporter(item, port=0) as exporter:
        ...     text = urlopen(exporter.url).read().decode()
        >>> [line for line in text.splitlines() if line.startswith("embcache_host_misses_total")]
        ['embcache_host_misses_total{module="",rank="0",table="item"} 2.0']
    """

    def __init__(self, model: nn.Module | Tables, port: int, *, host: str = "127.0.0.1") -> None:
        collectors: list[Any] = [] if isinstance(model, Tables) else [_TableCollector(Sampler(model))]
        collectors.append(ServingCollector(model))
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as missing:
            raise UnsupportedError(
                'PrometheusExporter needs prometheus-client: pip install "torchrec-embcache[prometheus]"'
            ) from missing
        registry = CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise StorageError(
                f"cannot serve metrics at {host}:{port} ({error}): give another port, or 0 for a free one"
            ) from error
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._closed = False
        self.host = host
        self.port: int = self._server.server_port
        close_at_exit(self)

    @property
    def url(self) -> str:
        """URL of the metrics, for a browser on this machine or for `embcache top`."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stops serving and frees the port. Idempotent."""
        with self._close_lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        if self._pid == os.getpid():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __repr__(self) -> str:
        return f"PrometheusExporter({self.url})"


class _TableCollector:
    """The collector that prometheus_client calls at each scrape."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._failure_logger = FailureLogger("PrometheusExporter")

    def describe(self) -> Iterator[Family]:
        """Yields nothing: the set of metrics depends on the tables."""
        yield from ()

    def collect(self) -> Iterator[Family]:
        """Yields the current metrics."""
        try:
            tables = self._sampler.sample().tables
        except Exception as error:  # the model was changed during the sample
            self._failure_logger.log_failure(error)
            return
        self._failure_logger.reset()
        for metric in METRICS:
            having = [table for table in tables if metric.path in table.values]
            if having:
                samples = [([each.module, each.table, str(each.rank)], each.values[metric.path]) for each in having]
                yield metric_family(metric, LABELS, samples)
