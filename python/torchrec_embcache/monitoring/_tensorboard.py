"""Writes samples as TensorBoard scalars."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchrec_embcache.exceptions import InputError

from ._background import SampleMonitor
from ._rates import scalars
from ._sampling import Sample

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(SampleMonitor):
    """Writes the counters of a model's tables as scalars, as "embcache/<module>/<table>/host/hit_rate".

    Counters are written as a rate per second since the previous sample, and gauges unchanged. Waits are written as their median
    ("p50_ms"), their 99th percentile ("p99_ms") and their mean, in milliseconds. `scalars` computes these metrics from two samples.

    Args:
        model: any `nn.Module` with tables of this package.
        writer: a `torch.utils.tensorboard.SummaryWriter`, or any object with its `add_scalar(name, value, step)`. The caller owns
            it: `close` does not close it.
        interval_s: seconds between samples taken by a thread. None: only `sample(step)` takes samples.

    Raises:
        InputError: `model` is not an `nn.Module`, or `writer` has no `add_scalar`.
        ConfigError: `interval_s` is not above 0.

    Examples:
        >>> from torch.utils.tensorboard import SummaryWriter
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.monitoring import TensorBoardLogger
        >>> tiers = TierBudgets(host_bytes="1MiB")
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
        >>> with SummaryWriter("runs") as writer, TensorBoardLogger(item, writer, interval_s=None) as logger:
        ...     for step in range(2):
        ...         item(torch.tensor([7, 8])).sum().backward()
        ...         logger.sample(step)
    """

    def __init__(self, model: nn.Module, writer: Any, *, interval_s: float | None = 10.0) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise InputError(f"writer is a {type(writer).__name__}: give a torch.utils.tensorboard.SummaryWriter")
        self._writer = writer
        self._before: Sample | None = None
        super().__init__(model, interval_s)

    def __repr__(self) -> str:
        return f"TensorBoardLogger({type(self._writer).__name__})"

    def _write(self, sample: Sample) -> None:
        numbers, self._before = scalars(self._before, sample), sample
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, sample.step)
