"""Thresholds of a table's rows in eviction order: the k-th lowest row of all shards together.

The eviction order compares the decayed score at the step of a sweep, then the last step in which the row was trained, then the id
as uint64. No two rows of a table are equal, so a threshold selects an exact number of rows. Thresholds do not depend on the budgets
or on the number of ranks.

The k-th lowest row is found by a radix select. Each pass counts the rows of each shard by 16 bits of their rank keys. The sums over
all ranks identify the part of the order that contains the row, and the bounds of that part. Once the part is small its rows are
listed and exchanged. A small table takes one pass, others mostly two or three. A pass uses a few MiB, independent of the number of
rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.exceptions import StateError

from ._inputs import SweepInputs

__all__ = [
    "MAX_LISTED_ROWS",
    "EvictCountFn",
    "LowestRowsRule",
    "RankKey",
    "TableRowCounts",
    "find_thresholds",
    "threshold_rules",
]

MAX_LISTED_ROWS = 1 << 18
"""Maximum number of rows of all ranks together that are listed and exchanged, at 24 bytes each."""
_MAX_ATTEMPTS = 16


class RankKey(NamedTuple):
    """A row's position in eviction order. `score` is mapped to an integer that increases with it."""

    score: int
    last_step: int
    id: int

    def rule_below(self) -> _native.SweepRule:
        """Returns the rule that evicts the rows below this key."""
        return _native.SweepRule.below_rank(*self)


_MIN_KEY = RankKey(0, 0, 0)
_MAX_KEY = RankKey((1 << 32) - 1, (1 << 64) - 1, (1 << 64) - 1)


class TableRowCounts(NamedTuple):
    """Row counts of the entire table."""

    rows: int
    """Rows that a sweep considers."""
    newest: int
    """Number of these rows that were trained in the step of the sweep; 0 at step 0."""
    is_swept: bool
    """True if the table has only changed by evictions of the previous sweep since then."""


EvictCountFn = Callable[[TableRowCounts], int]
"""Returns the number of lowest rows to evict."""


_RankKeyRange = tuple[RankKey, RankKey, bool]
"""The lowest key of a range, the highest, and a flag that is true if its keys are listed."""


@dataclass(frozen=True)
class _SelectionTarget:
    """The row with `rows_below` rows below it in the key range from `low` to `high`, which contains at most `rows` rows."""

    low: RankKey
    high: RankKey
    rows: int
    rows_below: int

    @property
    def is_listed(self) -> bool:
        """True if the range has few enough rows to exchange them."""
        return self.rows <= MAX_LISTED_ROWS

    @property
    def key_range(self) -> _RankKeyRange:
        """The key range."""
        return self.low, self.high, self.is_listed


def find_thresholds(inputs: SweepInputs, count_fns: Sequence[EvictCountFn]) -> list[RankKey | None]:
    """Returns, for each of `count_fns`, the lowest row that remains after the evictions; None if no row is evicted.

    Collective: the result is the same on all ranks and covers the rows of all shards. Rows that a sweep in progress evicts are
    removed first and not counted. Nothing else changes. If another thread changes a table between two passes, all ranks start
    again.

    Raises on every rank, whichever rank has the error: an error of `count_fns`; StateError if other threads keep changing the
    tables; an error of reading an SSD tier.
    """
    for _ in range(_MAX_ATTEMPTS):
        cuts = _try_find(inputs, count_fns)
        if cuts is not None:
            return cuts
    raise StateError(
        f"a table changed {_MAX_ATTEMPTS} times while its rows were counted for a sweep after step "
        f"{inputs.step}, by imports or removals of "
        "other threads: let them end before the sweep"
    )


def threshold_rules(inputs: SweepInputs, count_fns: Sequence[EvictCountFn]) -> list[_native.SweepRule]:
    """Returns, for each of `count_fns`, the rule that evicts that number of lowest rows. Collective; see `find_thresholds`."""
    return [
        _native.SweepRule.nothing() if cut is None else cut.rule_below() for cut in find_thresholds(inputs, count_fns)
    ]


class LowestRowsRule(ABC):
    """A base of eviction rules that evict a number of the lowest rows of the entire table."""

    @abstractmethod
    def count_to_evict(self, rows: TableRowCounts) -> int:
        """Returns the number of lowest rows to evict."""

    @property
    def is_collective(self) -> bool:
        """True: the threshold depends on the rows of all ranks."""
        return True

    def native(self) -> _native.SweepRule:
        """Returns the native placeholder used when a table is created: `resolve` finds the threshold."""
        return _native.SweepRule.per_sweep()

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """Returns the rule for rows below the threshold, which a `Policy` may have found for all its rules. Collective."""
        return (
            inputs.thresholds[self] if self in inputs.thresholds else threshold_rules(inputs, [self.count_to_evict])[0]
        )


def _try_find(inputs: SweepInputs, count_fns: Sequence[EvictCountFn]) -> list[RankKey | None] | None:
    """Like `find_thresholds`, but returns None if a table has changed between passes."""
    table = inputs.table

    def size() -> tuple[int, bool] | None:
        return None if table is None else (len(table), table.is_unchanged_since_sweep())

    sizes = [said for said in inputs.ranks.gather(size) if said is not None]
    are_swept = all(is_swept for _, is_swept in sizes)
    # An upper bound: it includes rows that a sweep does not consider, so the exact count evicts no more rows.
    most = sum(rows for rows, _ in sizes)
    if not any(how_many(TableRowCounts(most, 0, are_swept)) > 0 for how_many in count_fns):
        return [None] * len(count_fns)
    passes = _SelectionRounds(inputs)
    whole = _SelectionTarget(_MIN_KEY, _MAX_KEY, most, 0)
    counted = passes.count([whole.key_range])
    if counted is None:
        return None
    cut_off = [
        how_many(TableRowCounts(passes.rows, passes.newest if inputs.step else 0, are_swept)) for how_many in count_fns
    ]
    targets = [replace(whole, rows_below=below) if below > 0 else None for below in cut_off]
    standings = _narrow_targets(passes, {target for target in targets if target is not None}, counted)
    return None if standings is None else [None if target is None else standings[target] for target in targets]


def _narrow_targets(
    rounds: _SelectionRounds, targets: set[_SelectionTarget], totals: Mapping[_RankKeyRange, _RangeTotals]
) -> dict[_SelectionTarget, RankKey] | None:
    """Returns the rank key of each target, given the row totals of its range; None if a table has changed between passes."""
    standings: dict[_SelectionTarget, RankKey] = {}
    left = {target: target for target in targets}  # each with the narrowest known range
    while left:
        parts: dict[_SelectionTarget, _RangePart] = {}
        for target, now in left.items():
            if now.is_listed:
                standings[target] = totals[now.key_range].nth_listed(now.rows_below)
            else:
                parts[target] = totals[now.key_range].part_at(now.rows_below)
        borders = rounds.part_bounds(sorted({(left[target].key_range, part.digit) for target, part in parts.items()}))
        narrower = {
            target: _SelectionTarget(*borders[left[target].key_range, part.digit], part.rows, part.rows_below)
            for target, part in parts.items()
        }
        left = {}
        for target, now in narrower.items():
            if now.rows_below in (0, now.rows - 1):
                standings[target] = now.low if now.rows_below == 0 else now.high
            else:
                left[target] = now
        if left:
            again = rounds.count(sorted({now.key_range for now in left.values()}))
            if again is None:
                return None
            totals = again
    return standings


class _RangePart(NamedTuple):
    """The part of a range that contains a row: its row count, and the number of its rows below that row."""

    digit: int
    rows: int
    rows_below: int


class _RangeTotals:
    """Row totals of all ranks in a range."""

    def __init__(self, shards: Sequence[_ShardRange]) -> None:
        self._rows: dict[int, int] = {}
        for shard in shards:
            for digit, rows in zip(shard.digits.tolist(), shard.rows.tolist(), strict=True):
                self._rows[digit] = self._rows.get(digit, 0) + rows
        self._listed = np.concatenate([shard.listed for shard in shards])

    def part_at(self, rows_below: int) -> _RangePart:
        """Returns the part with the row that has `rows_below` rows of the range below it."""
        for digit, rows in sorted(self._rows.items()):
            if rows_below < rows:
                return _RangePart(digit, rows, rows_below)
            rows_below -= rows
        raise AssertionError("a count of unchanged tables found fewer rows than the one before")

    def nth_listed(self, rows_below: int) -> RankKey:
        """Returns the listed row that has `rows_below` listed rows below it."""
        scores, last_steps, ids = self._listed.T
        order = np.lexsort((ids, last_steps, scores))
        return _rank_key_from(self._listed[order[rows_below]])


class _ShardRange(NamedTuple):
    """Rows of one shard in a range."""

    digits: NDArray[np.uint32]
    rows: NDArray[np.uint64]
    listed: NDArray[np.uint64]


class _ShardReply(NamedTuple):
    """The reply of a rank with a shard to one selection round; `ranges` is None if the shard has changed."""

    rows: int
    newest: int
    ranges: list[_ShardRange] | None


class _SelectionRounds:
    """Selection rounds: passes over the rows of all ranks."""

    def __init__(self, inputs: SweepInputs) -> None:
        self._inputs = inputs
        self._version: int | None = None
        self._local_ranges: dict[_RankKeyRange, _native.RankRangeCounts] = {}
        self.rows = self.newest = 0

    def count(self, ranges: Sequence[_RankKeyRange]) -> dict[_RankKeyRange, _RangeTotals] | None:
        """Counts or lists the rows in each range. Returns None if a table has changed since the first pass. Collective."""
        said = [one for one in self._inputs.ranks.gather(lambda: self._score_histogram(ranges)) if one is not None]
        self.rows, self.newest = sum(one.rows for one in said), sum(one.newest for one in said)
        of_ranks = [one.ranges for one in said if one.ranges is not None]
        if len(of_ranks) < len(said):
            return None
        return {span: _RangeTotals([shards[at] for shards in of_ranks]) for at, span in enumerate(ranges)}

    def _score_histogram(self, ranges: Sequence[_RankKeyRange]) -> _ShardReply | None:
        if self._inputs.table is None:
            return None
        asked = [
            _native.RankKeyRange(_native.RankKey(*low), _native.RankKey(*high), is_listed=listed)
            for low, high, listed in ranges
        ]
        counts = self._inputs.table.score_histogram(self._inputs.step, asked, self._version)
        if counts is None:
            return _ShardReply(0, 0, None)
        self._version = counts.version
        self._local_ranges = dict(zip(ranges, counts.ranges, strict=True))
        shards = [_ShardRange(counted.digits, counted.rows, counted.listed) for counted in counts.ranges]
        return _ShardReply(counts.rows, counts.newest, shards)

    def part_bounds(
        self, parts: Sequence[tuple[_RankKeyRange, int]]
    ) -> dict[tuple[_RankKeyRange, int], tuple[RankKey, RankKey]]:
        """Returns the lowest and the highest key of parts of the ranges of the last pass. Collective, unless `parts` is empty."""
        if not parts:
            return {}
        said = self._inputs.ranks.gather(
            lambda: {part: own for part in parts if (own := self._local_bounds(*part)) is not None}
        )
        found = {part: [own[part] for own in said if part in own] for part in parts}
        return {
            part: (min(low for low, _ in borders), max(high for _, high in borders)) for part, borders in found.items()
        }

    def _local_bounds(self, key_range: _RankKeyRange, digit: int) -> tuple[RankKey, RankKey] | None:
        counted = self._local_ranges.get(key_range)
        if counted is None:
            return None
        at = np.flatnonzero(counted.digits == digit)
        if len(at) == 0:
            return None
        return _rank_key_from(counted.lows[at[0]]), _rank_key_from(counted.highs[at[0]])


def _rank_key_from(columns: NDArray[np.uint64]) -> RankKey:
    return RankKey(*columns.tolist())
