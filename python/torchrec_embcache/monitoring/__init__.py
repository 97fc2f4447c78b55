"""Exports the counters of a model's tables to Prometheus, TensorBoard and JSON lines.

    with PrometheusExporter(model, port=9400), JsonlLogger(model, "metrics.jsonl", interval_s=10):
        train(model)

The exporters read `stats()` of the model's tables, periodically on a thread or on request, and change nothing else: training steps
do no extra work and wait no longer. `docs/metrics.md` lists every metric with its meaning.
`torchrec_embcache.integrations.lightning.EmbCacheMonitor` does the same as a callback, and `embcache top` displays the metrics in a
terminal.
"""

from ._catalog import METRICS, Metric
from ._jsonl import JsonlLogger
from ._prometheus import PrometheusExporter
from ._rates import scalars
from ._sampling import MetricValue, Sample, Sampler, TableSample
from ._serving import SERVING_METRICS, ServingCollector
from ._tensorboard import TensorBoardLogger

__all__ = [
    "METRICS",
    "SERVING_METRICS",
    "JsonlLogger",
    "Metric",
    "MetricValue",
    "PrometheusExporter",
    "Sample",
    "Sampler",
    "ServingCollector",
    "TableSample",
    "TensorBoardLogger",
    "scalars",
]
