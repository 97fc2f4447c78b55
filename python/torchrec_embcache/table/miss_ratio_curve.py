"""Miss ratio as a function of the number of rows in RAM."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.config import CachePolicy
from torchrec_embcache.exceptions import CorruptionError

__all__ = ["MissRatioCurve"]


@dataclass(frozen=True, eq=False)
class MissRatioCurve:
    """Miss ratios of caches of several sizes, measured on the traffic of one shard of a table.

    A lookup is a distinct id of a batch that has a row or gets one. A cache is the device tier and the host tier together.

    - `policy`: the replacement policy of the caches.
    - `rows`: number of rows in a cache, int64 [n], ascending.
    - `miss_ratios`: its misses divided by its lookups, float64 [n], 0 to 1. The first use of an id is a miss, too.
    - `first_use_ratio`: the fraction of lookups that were the first of their id. They miss in every cache.
    - `new_row_ratio`: the fraction of lookups that initialize their row. They miss, too, but read nothing.
    - `lookups`: number of lookups.
    - `batches`: number of batches.
    - `largest_batch`: maximum number of lookups in a batch.
    - `distinct_ids`: estimated number of distinct ids since the table was opened.
    - `sampling_rate`: the fraction of the ids that the measurement currently follows.

    The sizes are multiples of the measurement's resolution, from 32 / `sampling_rate` rows on; `at` returns the ratio of any size.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, MissRatioCurve, TierBudgets, optimizers
        >>> bag = EmbCacheEmbeddingBag(
        ...     name="item",
        ...     embedding_dim=4,
        ...     tiers=TierBudgets(host_bytes="1MiB", sizing=True),
        ...     optimizer=optimizers.SGD(lr=0.1),
        ... )
        >>> for step in range(4):  # each batch has the ids 0 to 99, and so each comes back after 99 others
        ...     bag(torch.arange(100).view(1, -1)).sum().backward()
        >>> curve = bag.table.miss_ratio_curve()
        >>> curve.lookups, curve.distinct_ids, curve.first_use_ratio
        (400, 100, 0.25)
        >>> curve.at(100), curve.at(50) > 0.9, curve.reads_at(100)  # the rows were born in the first batch, and nothing was read
        (0.25, True, 0.0)
        >>> MissRatioCurve.from_dict(curve.as_dict()).lookups
        400
    """

    policy: CachePolicy
    rows: NDArray[np.int64]
    miss_ratios: NDArray[np.float64]
    first_use_ratio: float
    new_row_ratio: float
    lookups: int
    batches: int
    largest_batch: int
    distinct_ids: int
    sampling_rate: float

    @classmethod
    def from_native(cls, native: _native.MissRatioCurve) -> Self:
        """Converts the native curve."""
        values = {field.name: getattr(native, field.name) for field in fields(cls)}
        return cls(**values | {"rows": native.rows.astype(np.int64)})

    def at(self, rows: float) -> float:
        """Returns the miss ratio of a cache of `rows` rows, 0 to 1, interpolated over the logarithm of the size.

        A cache of 0 rows always misses. From there to the smallest measured size the ratio is interpolated linearly.
        """
        if not len(self.rows) or self.lookups == 0:
            return 0.0
        if rows < self.rows[0]:
            share = max(float(rows), 0.0) / float(self.rows[0])
            return 1.0 + share * (float(self.miss_ratios[0]) - 1.0)
        logs = np.log(np.maximum(self.rows, 1))
        return float(np.interp(np.log(max(rows, 1.0)), logs, self.miss_ratios))

    def reads_at(self, rows: float) -> float:
        """Returns the fraction of lookups for which a cache of `rows` rows reads a row from SSD: its misses without new rows."""
        return max(self.at(rows) - self.new_row_ratio, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values; the inverse of `from_dict`."""
        return {**vars(self), "rows": self.rows.tolist(), "miss_ratios": self.miss_ratios.tolist()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Restores the curve from the result of `as_dict`. Raises `CorruptionError` for any other input."""
        try:
            made = cls(
                policy=fields["policy"],
                rows=np.array(fields["rows"], np.int64),
                miss_ratios=np.array(fields["miss_ratios"], np.float64),
                first_use_ratio=float(fields["first_use_ratio"]),
                new_row_ratio=float(fields["new_row_ratio"]),
                lookups=int(fields["lookups"]),
                batches=int(fields["batches"]),
                largest_batch=int(fields["largest_batch"]),
                distinct_ids=int(fields["distinct_ids"]),
                sampling_rate=float(fields["sampling_rate"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as cause:
            raise CorruptionError(f"no miss ratio curve: expected the fields of as_dict(), found {cause!r}") from cause
        rises = made.rows.ndim == 1 and bool((np.diff(made.rows) > 0).all()) and bool((made.rows >= 0).all())
        if not rises or made.miss_ratios.shape != made.rows.shape or not _are_ratios(made):
            raise CorruptionError("no miss ratio curve: expected rising sizes and as many ratios from 0 to 1")
        return made


def _are_ratios(curve: MissRatioCurve) -> bool:
    ratios = np.append(curve.miss_ratios, [curve.first_use_ratio, curve.new_row_ratio])
    return bool(((ratios >= 0) & (ratios <= 1)).all())
