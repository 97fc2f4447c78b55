"""Settings for following a trainer that publishes checkpoints."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Literal

from torchrec_embcache.config import check_choice, to_float
from torchrec_embcache.exceptions import ConfigError

__all__ = ["Follow"]

OnStale = Literal["serve", "raise"]


@dataclass(frozen=True, kw_only=True)
class Follow:
    """Settings for serving that follows a trainer.

    - `poll_seconds`: interval at which a background thread looks for a newer checkpoint.
    - `max_staleness_seconds`: the served checkpoint is stale once it was published longer ago than this. None: it is never stale.
    - `source`: the trainer's directory, for a served checkpoint that was converted from it (`embcache convert --to serving`). Later
      incremental checkpoints in that directory are served too, rounded to the precision of the served weights. Nothing is written
      there. None: newer checkpoints appear in the served directory.
    - `on_stale`: "serve" continues to serve stale tables; "raise" makes `pin` raise `StaleError`. In both cases
      `Tables.stats().staleness_seconds` and the metrics report the age.

    Raises `ConfigError` for a value out of range.

    Examples:
        >>> from torchrec_embcache import serving
        >>> serving.Follow(poll_seconds=1, max_staleness_seconds=300, on_stale="raise")
        Follow(poll_seconds=1, max_staleness_seconds=300, on_stale='raise', source=None)

        A converted checkpoint, and the trainer's deltas after it:

        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, cli, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item, saver = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd), Saver(0)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> first = saver.save(item, "trained")
        >>> cli.main(["convert", "trained", "served", "--to", "serving", "--precision", "fp16"])
        0000000001-...
        0
        >>> item.import_rows([7], [[1.0, 0.1]])
        >>> second = saver.save(item, "trained", incremental=True)
        >>> with serving.open("served", follow=serving.Follow(source="trained")) as tables:
        ...     tables.pin()["item"].lookup([7]).tolist()
        [[1.0, 0.0999755859375]]
    """

    poll_seconds: float = 1.0
    max_staleness_seconds: float | None = None
    on_stale: OnStale = "serve"
    source: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        poll = to_float(self.poll_seconds)
        if poll is None or not 0.0 < poll <= threading.TIMEOUT_MAX:
            raise ConfigError(f"Follow.poll_seconds={self.poll_seconds!r}: give seconds above 0")
        if self.max_staleness_seconds is not None:
            most = to_float(self.max_staleness_seconds)
            if most is None or not 0.0 <= most <= threading.TIMEOUT_MAX:
                raise ConfigError(
                    f"Follow.max_staleness_seconds={self.max_staleness_seconds!r}: give seconds from 0, or None for no bound"
                )
        check_choice("Follow.on_stale", self.on_stale, OnStale)
        if self.on_stale == "raise" and self.max_staleness_seconds is None:
            raise ConfigError('Follow.on_stale="raise" needs a bound: give max_staleness_seconds')
        if not isinstance(self.source, str | os.PathLike | None):
            raise ConfigError(f"Follow.source={self.source!r}: give the path of the trainer's directory, or None")
