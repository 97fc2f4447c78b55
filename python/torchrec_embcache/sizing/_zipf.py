"""Computed miss ratios of ids that are drawn from a Zipf distribution."""

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache.table.miss_ratio_curve import MissRatioCurve

__all__ = ["zipf_curve"]

_GROUPS = 1024
_SIZES = 64
# Positions in a batch at which a lookup is evaluated.
_QUANTILES = (np.arange(8) + 0.5) / 8


def zipf_curve(ids: int, ids_per_batch: int, exponent: float) -> MissRatioCurve:
    """Returns the "lru" curve in the steady state, if each batch draws `ids_per_batch` of `ids` ids independently.

    Uses Che's approximation: an id is in the cache if it was used in the last `t` batches, and `t` is such that the cache is full
    (Che, Tung, Wang, "Hierarchical web caching systems", 2002; Fricker, Robert, Roberts, "A versatile and accurate approximation
    for LRU cache performance", ITC 2012). A batch looks an id up at most once, at any position.
    """
    counts, share = _popularity(ids, exponent)
    # The probability that a batch contains the id.
    in_batch = -np.expm1(ids_per_batch * np.log1p(-np.minimum(share, 1 - 1e-12)))
    lookups = float((counts * in_batch).sum())
    rows, ratios = [], []
    for batches in np.geomspace(1e-2, 64 / max(float(in_batch.min()), 1e-18), 4 * _SIZES):
        absent, missed = _unused_probabilities(in_batch, batches)
        rows.append(float((counts * (1 - absent)).sum()))
        ratios.append(float((counts * in_batch * missed).sum()) / lookups)
    sizes = np.unique(np.geomspace(max(ids // 4096, 1), ids, _SIZES).astype(np.int64))
    misses = np.interp(sizes, rows, ratios)
    misses[-1] = 0.0
    return MissRatioCurve(
        policy="lru",
        rows=sizes,
        miss_ratios=np.minimum.accumulate(misses),
        first_use_ratio=0.0,
        new_row_ratio=0.0,
        lookups=round(lookups),
        batches=1,
        largest_batch=round(lookups),
        distinct_ids=ids,
        sampling_rate=0.0,
    )


def _popularity(ids: int, exponent: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns groups of ids of similar popularity: the number of ids in each, and the fraction of occurrences of one of them."""
    edges = np.unique(np.round(np.geomspace(1, ids + 1, _GROUPS)))
    counts = np.diff(edges)
    weight = (edges[:-1] + (counts - 1) / 2) ** -exponent
    return counts, weight / (counts * weight).sum()


def _unused_probabilities(
    in_batch: NDArray[np.float64], batches: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the probabilities that an id was not used in the last `batches` batches: at any time, and before a lookup of it."""
    absent, missed = np.zeros_like(in_batch), np.zeros_like(in_batch)
    for place in _QUANTILES:
        # The time before the lookup: the part of this batch before its position, then entire batches, then a part of one.
        whole, part = divmod(max(batches - place, 0.0), 1.0)
        before = np.exp(whole * np.log1p(-np.minimum(in_batch, 1 - 1e-12))) * (1 - in_batch * part)
        absent += before * (1 - in_batch * min(place, batches))
        missed += before
    return absent / len(_QUANTILES), missed / len(_QUANTILES)
