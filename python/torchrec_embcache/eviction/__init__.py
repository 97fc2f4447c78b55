"""Eviction rules and policies.

Without a policy a row stays until it is removed, or until a full table with `on_full="evict"` drops it. With a `Policy`, rows are
also evicted in *sweeps*. The rows evicted by a sweep after training step s depend only on the rows (their last training steps,
scores and weights), on s and, with `Ttl(seconds=...)`, on the step times. The result is therefore the same for any budgets, any
number of ranks and threads, and any prefetch depth. The id of an evicted row is missing: it reads as an id without a row, and its
row is initialized again when the id is trained again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from torchrec_embcache import _native
from torchrec_embcache.config import check_int, to_float
from torchrec_embcache.exceptions import ConfigError

from ._inputs import SweepInputs
from ._select import EvictCountFn, LowestRowsRule, TableRowCounts, threshold_rules

__all__ = ["All", "Keep", "L2Norm", "Policy", "Rule", "Score", "Share", "Ttl"]

_MAX_STEPS = 1 << 53
_MAX_ROWS = (1 << 63) - 1
_MAX_FLOAT32 = 3.4028234663852886e38
_MIN_FLOAT32 = 1.401298464324817e-45


class Rule(ABC):
    """Base class of the rules that select the rows of a sweep.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> isinstance(eviction.Ttl(steps=1000), eviction.Rule)
        True
    """

    @abstractmethod
    def native(self) -> _native.SweepRule:
        """Returns the native form for creating a table.

        If `is_collective`, this is `SweepRule.per_sweep()`, and `resolve` returns the rule of each sweep.
        """

    @property
    def is_collective(self) -> bool:
        """True if the ranks that share a table have to agree at each sweep on the rows that match."""
        return False

    @property
    def needs_clock(self) -> bool:
        """True if the rule needs the times of a table's steps."""
        return False

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """Returns the native rule of one sweep, equal on all ranks. Collective if `is_collective`; see `SweepInputs`."""
        del inputs
        return self.native()

    @property
    def kind(self) -> str:
        """Rules of the same kind evaluate the same property. In one list only one of them could have an effect."""
        return type(self).__name__


def _check_positive(field: str, value: object, maximum: float) -> float:
    """Returns `value` as a float. Raises `ConfigError` unless it is a number above 0 and at most `maximum`."""
    number = to_float(value)
    if number is None or math.isnan(number):
        raise ConfigError(f"{field}={value!r} is not a number: give an int or a float above 0")
    if not 0 < number <= maximum:
        raise ConfigError(f"{field}={value!r} is out of range: give more than 0 and at most {maximum:g}")
    return number


def _check_positive_float32(field: str, value: object) -> float:
    """Returns `value` as a float. Raises `ConfigError` unless it is a number whose float32 is above 0 and finite."""
    number = _check_positive(field, value, _MAX_FLOAT32)
    if np.float32(number) == 0:
        raise ConfigError(
            f"{field}={value!r} is 0 as a float32, and nothing is below that: give at least {_MIN_FLOAT32:g}"
        )
    return number


@dataclass(frozen=True, kw_only=True)
class Ttl(Rule):
    """Evicts the rows that were last trained too long ago (time to live).

    With `steps=n` a sweep after step s evicts the rows whose last training step is s - n or earlier: those that were not trained in
    the last n steps. Rows that were imported without metadata count as trained at step 0.

    With `seconds=t` a sweep at time T evicts the rows whose last training step was at T - t or earlier. The time is the system
    clock, or the time set by `torchrec_embcache.set_time`; the time of a step is the maximum over the ranks that ran it. Tables
    keep the step times with a resolution of one second for a minute, then one minute, and after 31 days one hour. A row may be
    evicted later by this resolution, but never earlier. Steps before a checkpoint without times get the time of the first step
    after the load.

    Pass exactly one of the two. This rule does not cap the size of a table: it still grows if ever more ids are trained within the
    time.

    Args:
        steps: training steps, from 1 to 2^53.
        seconds: more than 0, and at most 2^53, with millisecond resolution.

    Raises:
        ConfigError: a value is out of range, or not exactly one of the two is set.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> eviction.Ttl(steps=500_000).steps
        500000
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError(f"Ttl(steps={self.steps!r}, seconds={self.seconds!r}): give exactly one of the two")
        if self.steps is not None:
            check_int("Ttl.steps", self.steps, 1, _MAX_STEPS)
        if self.seconds is not None:
            _check_positive("Ttl.seconds", self.seconds, _MAX_STEPS)

    def native(self) -> _native.SweepRule:
        """Returns the native form. With `seconds` the step is determined at each sweep."""
        return (
            _native.SweepRule.per_sweep(needs_clock=True)
            if self.steps is None
            else _native.SweepRule.last_step(self.steps)
        )

    @property
    def is_collective(self) -> bool:
        """True with `seconds`: clocks differ between ranks, and so do the steps derived from them."""
        return self.seconds is not None

    @property
    def needs_clock(self) -> bool:
        """True with `seconds`."""
        return self.seconds is not None

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """Returns the rule of one sweep. With `seconds` (collective), rows match if they are old enough by every rank's clock."""
        if self.seconds is None:
            return self.native()
        table = inputs.table
        now = max(inputs.ranks.gather(lambda: 0 if table is None else table.now()))
        cut = now - max(1, round(float(self.seconds) * 1000))

        def local_step() -> int | None:
            # None: a rank without rows of the table has no vote. -1: no step is known to be old enough.
            if table is None:
                return None
            step = table.step_at(cut) if cut >= 0 else None
            return -1 if step is None else step

        step = min((step for step in inputs.ranks.gather(local_step) if step is not None), default=-1)
        return _native.SweepRule.nothing() if step < 0 else _native.SweepRule.trained_until(step)

    @property
    def kind(self) -> str:
        """The name and the unit."""
        return "Ttl(steps)" if self.steps is not None else "Ttl(seconds)"


@dataclass(frozen=True)
class Score(Rule):
    """Evicts the rows whose score is below a bound.

    The score of a row is the decayed sum of its occurrences in training. It halves every `score_half_life_steps` steps (a setting
    of the table) in which the row is not used. Rows that were imported without metadata have score 0, so the first sweep evicts
    them.

    Args:
        below: in occurrences; more than 0, and a float32.

    Raises:
        ConfigError: `below` is out of range.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> eviction.Score(below=0.5)
        Score(below=0.5)
    """

    below: float

    def __post_init__(self) -> None:
        _check_positive_float32("Score.below", self.below)

    def native(self) -> _native.SweepRule:
        """Returns the native form."""
        return _native.SweepRule.score(float(self.below))


@dataclass(frozen=True)
class L2Norm(Rule):
    """Evicts the rows whose weights have an L2 norm below a bound. The norm is computed in float64, column by column.

    Args:
        below: in the unit of the weights; more than 0, and a float32.

    Raises:
        ConfigError: `below` is out of range.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> eviction.L2Norm(below=1e-4)
        L2Norm(below=0.0001)
    """

    below: float

    def __post_init__(self) -> None:
        _check_positive_float32("L2Norm.below", self.below)

    def native(self) -> _native.SweepRule:
        """Returns the native form."""
        return _native.SweepRule.l2_norm(float(self.below))


@dataclass(frozen=True)
class Keep(LowestRowsRule, Rule):
    """Evicts the rows with the lowest scores until `rows` rows remain in the entire table, all shards together.

    Scores are those of `Score`. Ties are broken by the last training step, oldest first, and then by id as uint64, lowest first.
    Between two sweeps a table may have more rows.

    Args:
        rows: number of rows to keep, from 1. It must not be less than the number of distinct ids of a batch: if more rows were
            trained in the step before a sweep, the sweep raises `ConfigError` and evicts no rows.

    Raises:
        ConfigError: `rows` is out of range.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> eviction.Keep(rows=100_000_000)
        Keep(rows=100000000)
    """

    rows: int

    def __post_init__(self) -> None:
        check_int("Keep.rows", self.rows, 1, _MAX_ROWS)

    def count_to_evict(self, rows: TableRowCounts) -> int:
        """Returns the number of rows in excess of `rows`."""
        return max(0, rows.rows - self.rows)

    def count_to_evict_alone(self, rows: TableRowCounts) -> int:
        """Like `count_to_evict`, for a rule outside of `All`. Raises `ConfigError` if the last batch has more rows than `rows`."""
        if rows.newest > self.rows:
            raise ConfigError(
                f"{self!r} keeps fewer rows than one batch trains: the step before the sweep trained {rows.newest} rows. Keep more "
                "rows than a batch has distinct ids"
            )
        return self.count_to_evict(rows)


@dataclass(frozen=True)
class Share(LowestRowsRule, Rule):
    """Evicts a fraction of the rows of the entire table: those with the lowest scores, in the order of `Keep`.

    It evicts exactly floor(fraction * N) of N rows. A second sweep evicts none if the table has not changed since the previous
    sweep.

    Args:
        fraction: more than 0 and less than 1.

    Raises:
        ConfigError: `fraction` is out of range.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> eviction.Share(0.1)
        Share(fraction=0.1)
    """

    fraction: float

    def __post_init__(self) -> None:
        if _check_positive("Share.fraction", self.fraction, 1.0) == 1:
            raise ConfigError(f"Share.fraction={self.fraction!r} takes every row: give less than 1")

    def count_to_evict(self, rows: TableRowCounts) -> int:
        """Returns the fraction of the rows, rounded down; 0 if the table is unchanged since a sweep."""
        return 0 if rows.is_swept else math.floor(Fraction(float(self.fraction)) * rows.rows)


@dataclass(frozen=True)
class All(Rule):
    """Evicts the rows that match all of these rules.

    Args:
        rules: two or more, of different kinds.

    Raises:
        ConfigError: there are fewer than two rules, one is not a rule or is itself an `All`, or two contradict each other.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> eviction.All([eviction.Ttl(steps=10_000), eviction.Score(below=2.0)]).rules[1]  # old, and seldom used
        Score(below=2.0)
    """

    rules: Sequence[Rule]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _check_rules("All", self.rules))
        if any(isinstance(rule, All) for rule in self.rules):
            raise ConfigError("All holds an All: list the rules of both in one")
        if len(self.rules) < 2:
            raise ConfigError(f"All({list(self.rules)!r}) is one rule: give that rule itself, or two of them")

    def native(self) -> _native.SweepRule:
        """Returns the native form."""
        return _native.SweepRule.all([rule.native() for rule in self.rules])

    @property
    def is_collective(self) -> bool:
        """True if one of the rules is collective."""
        return any(rule.is_collective for rule in self.rules)

    @property
    def needs_clock(self) -> bool:
        """True if one of the rules needs the clock."""
        return any(rule.needs_clock for rule in self.rules)

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """Returns the conjunction of the resolved rules. Collective if one of the rules is."""
        return _native.SweepRule.all([rule.resolve(inputs) for rule in self.rules])


def _check_rules(owner: str, rules: object) -> tuple[Rule, ...]:
    """Returns `rules` as a tuple. Raises `ConfigError` if it is not a list of rules, is empty, or has contradicting rules."""
    if isinstance(rules, str) or not isinstance(rules, Sequence) or not rules:
        raise ConfigError(f"{owner}.rules={rules!r}: give a list of rules, such as [Ttl(steps=100_000)]")
    for rule in rules:
        if isinstance(rule, Policy):
            raise ConfigError(f"{owner}.rules holds a Policy: list the rules of that policy instead")
        if not isinstance(rule, Rule):
            raise ConfigError(f"{owner}.rules holds {rule!r}: give rules of torchrec_embcache.eviction")
    kinds: dict[str, Rule] = {}
    for rule in rules:
        kind = rule.kind
        if kind != "All" and kind in kinds:
            raise ConfigError(
                f"{owner}.rules holds {kinds[kind]!r} and {rule!r}, which contradict each other: one of them decides alone, so "
                "leave the other out"
            )
        kinds[kind] = rule
    if {"Keep", "Share"} <= kinds.keys():
        raise ConfigError(
            f"{owner}.rules holds {kinds['Keep']!r} and {kinds['Share']!r}, which contradict each other: both say how many rows "
            "stay, so give one of them"
        )
    return tuple(rules)


@dataclass(frozen=True)
class Policy:
    """A table's eviction rules and the schedule of its sweeps.

    A sweep evicts the rows that match any of `rules`.

    Args:
        rules: one or more, of different kinds: `Ttl`, `Score`, `L2Norm`, `Keep`, `Share` and `All`.
        every_steps: runs a sweep after each training step whose number is a multiple of this, from 1 to 2^53. None: at saves only.
            In both cases `torchrec_embcache.evict(model)` runs a sweep, too.
        at_least_rows: protects this many rows of the entire table from all rules: those with the highest scores, in the order of
            `Keep`. A sweep of a table with at most this many rows evicts none.

    Raises:
        ConfigError: a value is out of range, or two settings contradict each other.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> rules = [eviction.Ttl(steps=500_000), eviction.L2Norm(below=1e-4)]
        >>> eviction.Policy(rules, every_steps=1000).every_steps
        1000
    """

    rules: Sequence[Rule]
    every_steps: int | None = None
    at_least_rows: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _check_rules("Policy", self.rules))
        if self.every_steps is not None:
            check_int("Policy.every_steps", self.every_steps, 1, _MAX_STEPS)
        least = check_int("Policy.at_least_rows", self.at_least_rows, 0, _MAX_ROWS)
        for rule in self.rules:
            if isinstance(rule, Keep) and rule.rows < least:
                raise ConfigError(
                    f"Policy.at_least_rows={least} and {rule!r} contradict each other: let at least as many stay as must"
                )

    @property
    def at_saves(self) -> bool:
        """True if a save runs a sweep before it writes."""
        return self.every_steps is None

    def native(self) -> _native.SweepRule:
        """Returns the native form of the rules for creating a table."""
        if self.is_collective:
            return _native.SweepRule.per_sweep(needs_clock=self.needs_clock)
        return _native.SweepRule.any([rule.native() for rule in self.rules])

    @property
    def is_collective(self) -> bool:
        """True if the ranks that share a table have to agree at each sweep on the rows to evict."""
        return self.at_least_rows > 0 or any(rule.is_collective for rule in self.rules)

    @property
    def has_fraction_rule(self) -> bool:
        """True if a second sweep would evict more rows."""
        return any(isinstance(rule, Share) for rule in self._lowest_rows_rules())

    def _lowest_rows_rules(self) -> list[LowestRowsRule]:
        """Returns the rules that evict a number of the lowest rows, including those within `All`."""
        each = [one for rule in self.rules for one in (rule.rules if isinstance(rule, All) else [rule])]
        return [rule for rule in each if isinstance(rule, LowestRowsRule)]

    @property
    def needs_clock(self) -> bool:
        """True if a rule needs the times of a table's steps."""
        return any(rule.needs_clock for rule in self.rules)

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """Returns the native rule of one sweep, equal on all ranks. Collective if `is_collective`.

        Raises, on every rank, the errors of rules and of `find_thresholds`, and ConfigError if `Keep` keeps fewer rows than a batch
        trains.
        """
        ordered = self._lowest_rows_rules()
        wanted: list[EvictCountFn] = [
            rule.count_to_evict_alone if isinstance(rule, Keep) and rule in self.rules else rule.count_to_evict
            for rule in ordered
        ]
        if self.at_least_rows:
            wanted.append(lambda rows: max(0, rows.rows - self.at_least_rows))
        cuts = threshold_rules(inputs, wanted) if wanted else []
        inputs = replace(inputs, thresholds=dict(zip(ordered, cuts, strict=False)))
        taken = _native.SweepRule.any([rule.resolve(inputs) for rule in self.rules])
        return _native.SweepRule.all([taken, cuts[-1]]) if self.at_least_rows else taken
