"""The counters of a model's tables in Prometheus, TensorBoard and JSON lines.

    with PrometheusExporter(model, port=9400), JsonlLogger(model, "metrics.jsonl", interval_s=10):
        train(model)

All of them read `stats()` of the model's tables, on a thread or where they are told to, and change nothing else: no training step
does more or waits longer for them. `docs/monitoring.md` lists every metric with its meaning.
`torchrec_embcache.lightning.EmbCacheMonitor` does the same as a callback, and `embcache top` shows what they write in a terminal.
"""

from .catalog import METRICS, Metric
from .jsonl import JsonlLogger
from .prometheus import PrometheusExporter
from .rates import scalars
from .sampling import MetricValue, Sample, Sampler, TableSample
from .serving import SERVING_METRICS, ServingCollector
from .tensorboard import TensorBoardLogger

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
