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
from .agreement import Agreement
from .exceptions import StateError

__all__ = ["LISTED_ROWS", "CutOff", "HowMany", "Rows", "Standing", "find_cuts", "rules_of_cuts"]

LISTED_ROWS = 1 << 18
"""So many rows of all ranks are listed and exchanged at most, of 24 bytes each."""
_TRIES = 16


class Standing(NamedTuple):
    """Where a row stands in the order. `score` is mapped to a number that rises with it."""

    score: int
    last_step: int
    id: int

    def below(self) -> _native.SweepRule:
        """The rule that takes the rows below this standing."""
        return _native.SweepRule.below(*self)


_LOWEST = Standing(0, 0, 0)
_HIGHEST = Standing((1 << 32) - 1, (1 << 64) - 1, (1 << 64) - 1)


class Rows(NamedTuple):
    """How many rows the whole table has."""

    rows: int
    """Those that a sweep looks at."""
    newest: int
    """Those of them that were trained in the step of the sweep; 0 where it is step 0, in which none was trained."""
    are_swept: bool
    """Whether nothing has changed since the sweep before but what that took."""


HowMany = Callable[[Rows], int]
"""How many of the lowest rows to cut off."""


_Span = tuple[Standing, Standing, bool]
"""The lowest standing of a span, the highest, and whether its standings are listed."""


@dataclass(frozen=True)
class _Target:
    """The row that so many stand below in a span of standings, from `low` to `high`, which has at most `rows` rows."""

    low: Standing
    high: Standing
    rows: int
    below: int

    @property
    def is_listed(self) -> bool:
        """Whether the rows of the span are few enough to be exchanged."""
        return self.rows <= LISTED_ROWS

    @property
    def span(self) -> _Span:
        """The span."""
        return self.low, self.high, self.is_listed


def find_cuts(on: Agreement, wanted: Sequence[HowMany]) -> list[Standing | None]:
    """For each of `wanted`, the lowest row that stays where so many of the lowest rows go; None where none goes.

    Collective: the same on all ranks, of the rows of all their shards together. What a sweep under way takes goes first and is not
    counted. Nothing else changes. Where another thread changes a table between two passes, all ranks begin again.

    Raises on every rank, whichever has the error: what `wanted` raises; StateError where other threads go on changing the tables;
    what reading an SSD tier raises.
    """
    for _ in range(_TRIES):
        cuts = _tried(on, wanted)
        if cuts is not None:
            return cuts
    raise StateError(
        f"a table changed {_TRIES} times while its rows were counted for a sweep after step {on.step}, by imports or removals of "
        "other threads: let them end before the sweep"
    )


def rules_of_cuts(on: Agreement, wanted: Sequence[HowMany]) -> list[_native.SweepRule]:
    """For each of `wanted`, the rule that takes so many of the lowest rows. Collective, and raises, as `find_cuts`."""
    return [_native.SweepRule.nothing() if cut is None else cut.below() for cut in find_cuts(on, wanted)]


class CutOff(ABC):
    """The part of a rule of eviction by which it takes a number of the lowest rows of the whole table."""

    @abstractmethod
    def lowest(self, rows: Rows) -> int:
        """How many of the lowest rows it takes."""

    @property
    def is_agreed(self) -> bool:
        """It is: the cut is one of the rows of all ranks."""
        return True

    def native(self) -> _native.SweepRule:
        """As the core takes it when a table is made: `resolve` finds the cut."""
        return _native.SweepRule.given()

    def resolve(self, on: Agreement) -> _native.SweepRule:
        """Take the rows below the cut, which a `Policy` has found together with those of its other rules. Collective."""
        return on.cuts[self] if self in on.cuts else rules_of_cuts(on, [self.lowest])[0]


def _tried(on: Agreement, wanted: Sequence[HowMany]) -> list[Standing | None] | None:
    """As `find_cuts`; None where a table has changed meanwhile."""
    table = on.table

    def size() -> tuple[int, bool] | None:
        return None if table is None else (len(table), table.is_as_swept())

    sizes = [said for said in on.together(size) if said is not None]
    are_swept = all(is_swept for _, is_swept in sizes)
    # Rows that a sweep does not look at are among these. Of fewer rows no more are cut off.
    most = sum(rows for rows, _ in sizes)
    if not any(how_many(Rows(most, 0, are_swept)) > 0 for how_many in wanted):
        return [None] * len(wanted)
    passes = _Passes(on)
    whole = _Target(_LOWEST, _HIGHEST, most, 0)
    counted = passes.count([whole.span])
    if counted is None:
        return None
    cut_off = [how_many(Rows(passes.rows, passes.newest if on.step else 0, are_swept)) for how_many in wanted]
    targets = [replace(whole, below=below) if below > 0 else None for below in cut_off]
    standings = _narrowed(passes, {target for target in targets if target is not None}, counted)
    return None if standings is None else [None if target is None else standings[target] for target in targets]


def _narrowed(passes: _Passes, wanted: set[_Target], counted: Mapping[_Span, _Sum]) -> dict[_Target, Standing] | None:
    """The standing of each target, of whose span the rows were counted; None where a table has changed meanwhile."""
    standings: dict[_Target, Standing] = {}
    left = {target: target for target in wanted}  # with the narrowest span that is known of each
    while left:
        parts: dict[_Target, _Part] = {}
        for target, now in left.items():
            if now.is_listed:
                standings[target] = counted[now.span].nth(now.below)
            else:
                parts[target] = counted[now.span].part_with(now.below)
        borders = passes.borders(sorted({(left[target].span, part.digit) for target, part in parts.items()}))
        narrower = {
            target: _Target(*borders[left[target].span, part.digit], part.rows, part.below)
            for target, part in parts.items()
        }
        left = {}
        for target, now in narrower.items():
            if now.below in (0, now.rows - 1):
                standings[target] = now.low if now.below == 0 else now.high
            else:
                left[target] = now
        if left:
            again = passes.count(sorted({now.span for now in left.values()}))
            if again is None:
                return None
            counted = again
    return standings


class _Part(NamedTuple):
    """The part of a span that has a row: its rows, and how many of them stand below that row."""

    digit: int
    rows: int
    below: int


class _Sum:
    """What all ranks together have in a span."""

    def __init__(self, shards: Sequence[_Shard]) -> None:
        self._rows: dict[int, int] = {}
        for shard in shards:
            for digit, rows in zip(shard.digits.tolist(), shard.rows.tolist(), strict=True):
                self._rows[digit] = self._rows.get(digit, 0) + rows
        self._listed = np.concatenate([shard.listed for shard in shards])

    def part_with(self, below: int) -> _Part:
        """The part with the row that has so many of the span below it."""
        for digit, rows in sorted(self._rows.items()):
            if below < rows:
                return _Part(digit, rows, below)
            below -= rows
        raise AssertionError("a census of unchanged tables found fewer rows than the one before")

    def nth(self, below: int) -> Standing:
        """The row that has so many of those that are listed below it."""
        scores, last_steps, ids = self._listed.T
        order = np.lexsort((ids, last_steps, scores))
        return _standing(self._listed[order[below]])


class _Shard(NamedTuple):
    """What one shard has in a span."""

    digits: NDArray[np.uint32]
    rows: NDArray[np.uint64]
    listed: NDArray[np.uint64]


class _Said(NamedTuple):
    """What a rank with a shard says of a pass: nothing where the shard has changed."""

    rows: int
    newest: int
    spans: list[_Shard] | None


class _Passes:
    """Passes over the rows of all ranks."""

    def __init__(self, on: Agreement) -> None:
        self._on = on
        self._version: int | None = None
        self._own: dict[_Span, _native.SpanCounted] = {}
        self.rows = self.newest = 0

    def count(self, spans: Sequence[_Span]) -> dict[_Span, _Sum] | None:
        """Count or list the rows in each of the spans. None where a table has changed since the first pass. Collective."""
        said = [one for one in self._on.together(lambda: self._census(spans)) if one is not None]
        self.rows, self.newest = sum(one.rows for one in said), sum(one.newest for one in said)
        of_ranks = [one.spans for one in said if one.spans is not None]
        if len(of_ranks) < len(said):
            return None
        return {span: _Sum([shards[at] for shards in of_ranks]) for at, span in enumerate(spans)}

    def _census(self, spans: Sequence[_Span]) -> _Said | None:
        if self._on.table is None:
            return None
        asked = [
            _native.Span(_native.Standing(*low), _native.Standing(*high), is_listed=listed)
            for low, high, listed in spans
        ]
        census = self._on.table.census(self._on.step, asked, self._version)
        if census is None:
            return _Said(0, 0, None)
        self._version = census.version
        self._own = dict(zip(spans, census.spans, strict=True))
        shards = [_Shard(counted.digits, counted.rows, counted.listed) for counted in census.spans]
        return _Said(census.rows, census.newest, shards)

    def borders(self, parts: Sequence[tuple[_Span, int]]) -> dict[tuple[_Span, int], tuple[Standing, Standing]]:
        """The lowest and the highest standing of some parts of the spans of the last pass. Collective, where there are any."""
        if not parts:
            return {}
        said = self._on.together(lambda: {part: own for part in parts if (own := self._own_borders(*part)) is not None})
        found = {part: [own[part] for own in said if part in own] for part in parts}
        return {
            part: (min(low for low, _ in borders), max(high for _, high in borders)) for part, borders in found.items()
        }

    def _own_borders(self, span: _Span, digit: int) -> tuple[Standing, Standing] | None:
        counted = self._own.get(span)
        if counted is None:
            return None
        at = np.flatnonzero(counted.digits == digit)
        if len(at) == 0:
            return None
        return _standing(counted.lows[at[0]]), _standing(counted.highs[at[0]])


def _standing(columns: NDArray[np.uint64]) -> Standing:
    return Standing(*columns.tolist())
