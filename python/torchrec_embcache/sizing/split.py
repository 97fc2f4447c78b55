"""Dividing a budget between tables, so that the cost of what it does not hold is least."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache.exceptions import ConfigError
from torchrec_embcache.miss_ratios import MissRatioCurve

__all__ = ["BudgetRequest", "divide_budget"]

# Sizes at which the cost of a table is looked at.
_SIZES = 256


@dataclass(frozen=True)
class BudgetRequest:
    """What a table wants of a budget.

    - `min_bytes`: bytes that it must have.
    - `max_bytes`: bytes of which more is of no use.
    - `row_bytes`: bytes of a row.
    - `fixed_bytes`: bytes that hold no rows, such as those of an index. They are part of `min_bytes`.
    - `rows_elsewhere`: rows that another tier of RAM holds already.
    - `curve`: its miss ratios.
    - `weight`: the cost of a miss of all lookups.
    """

    min_bytes: int
    max_bytes: int
    row_bytes: int
    fixed_bytes: int
    rows_elsewhere: float
    curve: MissRatioCurve
    weight: float

    def rows(self, size: float) -> float:
        """The rows that are in RAM with a budget of `size` bytes, those of the other tier included."""
        return self.rows_elsewhere + max(size - self.fixed_bytes, 0.0) / self.row_bytes

    def cost(self, size: float) -> float:
        """The cost of the misses with a budget of `size` bytes."""
        return self.weight * self.curve.reads_at(self.rows(size))


def divide_budget(budget: int, requests: Sequence[BudgetRequest], field: str) -> list[int]:
    """Bytes for each table, `budget` in all, such that the costs add up to the least.

    The costs are taken at many sizes, and their lower convex hulls are descended where the next byte saves most. That is the best
    division of these hulls (Stone, Turek, Wolf, "Optimal partitioning of cache memory", 1992). A budget that is larger than all
    tables can use is divided by what they can use.

    `ConfigError` names `field` where the budget is below what the tables need at least.
    """
    least = sum(share.min_bytes for share in requests)
    if budget < least:
        raise ConfigError(
            f"{field}={budget} is too small: the {len(requests)} tables need {least} bytes at least, for their "
            f"indexes and the rows "
            "of the batches in flight"
        )
    given = [share.min_bytes for share in requests]
    left = budget - least
    steps = [_hull(share) for share in requests]
    # The next step of each table, the one that saves most for a byte first.
    queue = [(-slopes[0], table, 0) for table, (_, slopes) in enumerate(steps) if len(slopes)]
    heapq.heapify(queue)
    while queue and left > 0:
        _, table, step = heapq.heappop(queue)
        sizes, slopes = steps[table]
        taken = min(left, int(sizes[step + 1] - sizes[step]))
        given[table] += taken
        left -= taken
        if step + 1 < len(slopes):
            heapq.heappush(queue, (-slopes[step + 1], table, step + 1))
    if left > 0:
        useful = sum(share.max_bytes for share in requests)
        given = [size + left * share.max_bytes // useful for size, share in zip(given, requests, strict=True)]
    return given


def _hull(request: BudgetRequest) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The corners of the lower convex hull of a table's cost, as sizes [n + 1], and what a byte saves between them [n]."""
    least, most = float(request.min_bytes), float(max(request.max_bytes, request.min_bytes))
    if most <= least:
        return np.array([least]), np.empty(0)
    first = max(least, 1.0)
    sizes = np.unique(np.concatenate(([least], np.floor(np.geomspace(first, most, _SIZES)), [most])))
    sizes = sizes[(sizes >= least) & (sizes <= most)]
    costs = np.minimum.accumulate([request.cost(size) for size in sizes])
    corners = [0]
    for at in range(1, len(sizes)):
        while len(corners) > 1 and _slope(sizes, costs, corners[-2], corners[-1]) <= _slope(
            sizes, costs, corners[-1], at
        ):
            corners.pop()
        corners.append(at)
    saved = np.array([_slope(sizes, costs, a, b) for a, b in itertools.pairwise(corners)])
    return sizes[corners], saved


def _slope(sizes: NDArray[np.float64], costs: NDArray[np.float64], begin: int, end: int) -> float:
    """What a byte saves between two sizes."""
    return float((costs[begin] - costs[end]) / (sizes[end] - sizes[begin]))
