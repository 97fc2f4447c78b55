"""Division of a budget between tables that minimizes the cost of misses."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache.exceptions import ConfigError
from torchrec_embcache.table.miss_ratio_curve import MissRatioCurve

__all__ = ["BudgetRequest", "divide_budget"]

# Number of sizes at which the cost of a table is evaluated.
_SIZES = 256


@dataclass(frozen=True)
class BudgetRequest:
    """A table's request for a part of a budget.

    - `min_bytes`: required bytes.
    - `max_bytes`: bytes beyond which more is useless.
    - `row_bytes`: bytes of a row.
    - `fixed_bytes`: bytes that store no rows, such as those of an index. They are included in `min_bytes`.
    - `rows_elsewhere`: rows that another tier of RAM already holds.
    - `curve`: its miss ratios.
    - `weight`: the cost if every lookup is a miss.
    """

    min_bytes: int
    max_bytes: int
    row_bytes: int
    fixed_bytes: int
    rows_elsewhere: float
    curve: MissRatioCurve
    weight: float

    def rows(self, size: float) -> float:
        """Returns the number of rows in RAM with a budget of `size` bytes, including the other tier's rows."""
        return self.rows_elsewhere + max(size - self.fixed_bytes, 0.0) / self.row_bytes

    def cost(self, size: float) -> float:
        """Returns the cost of misses with a budget of `size` bytes."""
        return self.weight * self.curve.reads_at(self.rows(size))


def divide_budget(budget: int, requests: Sequence[BudgetRequest], field: str) -> list[int]:
    """Returns the bytes of each table, `budget` in total, such that the sum of the costs is minimal.

    The costs are sampled at many sizes, and the lower convex hulls are descended in order of savings per byte. This is the optimal
    division of these hulls (Stone, Turek, Wolf, "Optimal partitioning of cache memory", 1992). If the budget exceeds the sum of
    `max_bytes`, the excess is divided in proportion to `max_bytes`.

    Raises `ConfigError`, which names `field`, if the budget is below the sum of the required bytes.
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
    # The next step of each table, largest savings per byte first.
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
    """Returns the corners of a table's lower convex cost hull as sizes [n + 1], and the savings per byte between them [n]."""
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
    """Returns the savings per byte between two sizes."""
    return float((costs[begin] - costs[end]) / (sizes[end] - sizes[begin]))
