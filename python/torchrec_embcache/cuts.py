"""Cuts of a table's rows by their order: which row is the k-th lowest of all shards together.

Rows are ordered by their score as it has decayed by the step of a sweep, then by the step in which they were trained last, then by
their id as a uint64. No two rows of a table are equal, so a cut takes an exact number of rows. They are the same for any budgets
and any number of ranks.

The k-th lowest row is found by a radix select. A pass over the rows of each shard counts them by 16 bits of their standings. The
sums over all ranks say which part of the order has the row, and between which standings that part lies. Once the part has few rows
they are listed and exchanged. A table of few rows takes one pass, others mostly two or three. A pass takes some MiB, however many
rows there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _native
from .agreement import SweepInputs
from .exceptions import StateError

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
"""So many rows of all ranks are listed and exchanged at most, of 24 bytes each."""
_MAX_ATTEMPTS = 16


class RankKey(NamedTuple):
    """Where a row stands in the order. `score` is mapped to a number that rises with it."""

    score: int
    last_step: int
    id: int

    def rule_below(self) -> _native.SweepRule:
        """The rule that takes the rows below this standing."""
        return _native.SweepRule.below_rank(*self)


_MIN_KEY = RankKey(0, 0, 0)
_MAX_KEY = RankKey((1 << 32) - 1, (1 << 64) - 1, (1 << 64) - 1)


class TableRowCounts(NamedTuple):
    """How many rows the whole table has."""

    rows: int
    """Those that a sweep looks at."""
    newest: int
    """Those of them that were trained in the step of the sweep; 0 where it is step 0, in which none was trained."""
    is_swept: bool
    """Whether nothing has changed since the sweep before but what that took."""


EvictCountFn = Callable[[TableRowCounts], int]
"""How many of the lowest rows to cut off."""


_RankKeyRange = tuple[RankKey, RankKey, bool]
"""The lowest standing of a span, the highest, and whether its standings are listed."""


@dataclass(frozen=True)
class _SelectionTarget:
    """The row that so many stand below in a span of standings, from `low` to `high`, which has at most `rows` rows."""

    low: RankKey
    high: RankKey
    rows: int
    rows_below: int

    @property
    def is_listed(self) -> bool:
        """Whether the rows of the span are few enough to be exchanged."""
        return self.rows <= MAX_LISTED_ROWS

    @property
    def key_range(self) -> _RankKeyRange:
        """The span."""
        return self.low, self.high, self.is_listed


def find_thresholds(inputs: SweepInputs, count_fns: Sequence[EvictCountFn]) -> list[RankKey | None]:
    """For each of `count_fns`, the lowest row that stays where so many of the lowest rows go; None where none goes.

    Collective: the same on all ranks, of the rows of all their shards together. What a sweep under way takes goes first and is not
    counted. Nothing else changes. Where another thread changes a table between two passes, all ranks begin again.

    Raises on every rank, whichever has the error: what `count_fns` raises; StateError where other threads go on changing the
    tables; what reading an SSD tier raises.
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
    """For each of `count_fns`, the rule that takes so many of the lowest rows. Collective, and raises, as `find_thresholds`."""
    return [
        _native.SweepRule.nothing() if cut is None else cut.rule_below() for cut in find_thresholds(inputs, count_fns)
    ]


class LowestRowsRule(ABC):
    """The part of a rule of eviction by which it takes a number of the lowest rows of the whole table."""

    @abstractmethod
    def count_to_evict(self, rows: TableRowCounts) -> int:
        """How many of the lowest rows it takes."""

    @property
    def is_collective(self) -> bool:
        """It is: the cut is one of the rows of all ranks."""
        return True

    def native(self) -> _native.SweepRule:
        """As the core takes it when a table is made: `resolve` finds the cut."""
        return _native.SweepRule.per_sweep()

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """Take the rows below the cut, which a `Policy` has found together with those of its other rules. Collective."""
        return (
            inputs.thresholds[self] if self in inputs.thresholds else threshold_rules(inputs, [self.count_to_evict])[0]
        )


def _try_find(inputs: SweepInputs, count_fns: Sequence[EvictCountFn]) -> list[RankKey | None] | None:
    """As `find_thresholds`; None where a table has changed meanwhile."""
    table = inputs.table

    def size() -> tuple[int, bool] | None:
        return None if table is None else (len(table), table.is_unchanged_since_sweep())

    sizes = [said for said in inputs.gather(size) if said is not None]
    are_swept = all(is_swept for _, is_swept in sizes)
    # Rows that a sweep does not look at are among these. Of fewer rows no more are cut off.
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
    """The standing of each target, of whose span the rows were counted; None where a table has changed meanwhile."""
    standings: dict[_SelectionTarget, RankKey] = {}
    left = {target: target for target in targets}  # with the narrowest span that is known of each
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
    """The part of a span that has a row: its rows, and how many of them stand below that row."""

    digit: int
    rows: int
    rows_below: int


class _RangeTotals:
    """What all ranks together have in a span."""

    def __init__(self, shards: Sequence[_ShardRange]) -> None:
        self._rows: dict[int, int] = {}
        for shard in shards:
            for digit, rows in zip(shard.digits.tolist(), shard.rows.tolist(), strict=True):
                self._rows[digit] = self._rows.get(digit, 0) + rows
        self._listed = np.concatenate([shard.listed for shard in shards])

    def part_at(self, rows_below: int) -> _RangePart:
        """The part with the row that has so many of the span below it."""
        for digit, rows in sorted(self._rows.items()):
            if rows_below < rows:
                return _RangePart(digit, rows, rows_below)
            rows_below -= rows
        raise AssertionError("a census of unchanged tables found fewer rows than the one before")

    def nth_listed(self, rows_below: int) -> RankKey:
        """The row that has so many of those that are listed below it."""
        scores, last_steps, ids = self._listed.T
        order = np.lexsort((ids, last_steps, scores))
        return _rank_key_from(self._listed[order[rows_below]])


class _ShardRange(NamedTuple):
    """What one shard has in a span."""

    digits: NDArray[np.uint32]
    rows: NDArray[np.uint64]
    listed: NDArray[np.uint64]


class _ShardReply(NamedTuple):
    """What a rank with a shard says of a pass: nothing where the shard has changed."""

    rows: int
    newest: int
    ranges: list[_ShardRange] | None


class _SelectionRounds:
    """Passes over the rows of all ranks."""

    def __init__(self, inputs: SweepInputs) -> None:
        self._inputs = inputs
        self._version: int | None = None
        self._local_ranges: dict[_RankKeyRange, _native.RankRangeCounts] = {}
        self.rows = self.newest = 0

    def count(self, ranges: Sequence[_RankKeyRange]) -> dict[_RankKeyRange, _RangeTotals] | None:
        """Count or list the rows in each of the spans. None where a table has changed since the first pass. Collective."""
        said = [one for one in self._inputs.gather(lambda: self._score_histogram(ranges)) if one is not None]
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
        census = self._inputs.table.score_histogram(self._inputs.step, asked, self._version)
        if census is None:
            return _ShardReply(0, 0, None)
        self._version = census.version
        self._local_ranges = dict(zip(ranges, census.ranges, strict=True))
        shards = [_ShardRange(counted.digits, counted.rows, counted.listed) for counted in census.ranges]
        return _ShardReply(census.rows, census.newest, shards)

    def part_bounds(
        self, parts: Sequence[tuple[_RankKeyRange, int]]
    ) -> dict[tuple[_RankKeyRange, int], tuple[RankKey, RankKey]]:
        """The lowest and the highest standing of some parts of the spans of the last pass. Collective, where there are any."""
        if not parts:
            return {}
        said = self._inputs.gather(
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
