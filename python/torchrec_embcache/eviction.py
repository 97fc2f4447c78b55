"""Which rows leave a table, and when.

Without eviction a row stays until it is removed, or until a full table with `on_full="evict"` drops it. With a `Policy` rows
also leave in *sweeps*. What a sweep after training step s takes follows from the rows (when they were trained last, their
scores, their weights), from s, with `Ttl(seconds=...)` from the times of steps, and from nothing else. So the same rows leave
whatever the budgets, the number of ranks and threads, and however far ahead batches are prefetched. A row that left is missing:
it reads as an id without a row, and is born again when it is trained again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from . import _native
from .agreement import SweepInputs
from .config import check_int, to_float
from .cuts import EvictCountFn, LowestRowsRule, TableRowCounts, threshold_rules
from .exceptions import ConfigError

__all__ = ["All", "Keep", "L2Norm", "Policy", "Rule", "Score", "Share", "Ttl"]

_MAX_STEPS = 1 << 53
_MAX_ROWS = (1 << 63) - 1
_MAX_FLOAT32 = 3.4028234663852886e38
_MIN_FLOAT32 = 1.401298464324817e-45


class Rule(ABC):
    """Base of the rules that say which rows a sweep takes.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> isinstance(eviction.Ttl(steps=1000), eviction.Rule)
        True
    """

    @abstractmethod
    def native(self) -> _native.SweepRule:
        """As the core takes it when a table is made.

        Where `is_collective` that is `SweepRule.per_sweep()`, and `resolve` gives what a sweep takes.
        """

    @property
    def is_collective(self) -> bool:
        """Whether the ranks that share a table have to agree, at each sweep, on what this takes."""
        return False

    @property
    def needs_clock(self) -> bool:
        """Whether this needs the times of a table's steps."""
        return False

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """What this takes in one sweep, the same on all ranks. Collective where `is_collective`; see `SweepInputs`."""
        del inputs
        return self.native()

    @property
    def kind(self) -> str:
        """Rules of one kind measure the same. Of two of them, side by side, one decides alone."""
        return type(self).__name__


def _check_positive(field: str, value: object, maximum: float) -> float:
    """`value` as a float. `ConfigError` unless it is a number above 0 and at most `maximum`."""
    number = to_float(value)
    if number is None or math.isnan(number):
        raise ConfigError(f"{field}={value!r} is not a number: give an int or a float above 0")
    if not 0 < number <= maximum:
        raise ConfigError(f"{field}={value!r} is out of range: give more than 0 and at most {maximum:g}")
    return number


def _check_positive_float32(field: str, value: object) -> float:
    """`value` as a float. `ConfigError` unless it is a number whose float32 is above 0 and finite."""
    number = _check_positive(field, value, _MAX_FLOAT32)
    if np.float32(number) == 0:
        raise ConfigError(
            f"{field}={value!r} is 0 as a float32, and nothing is below that: give at least {_MIN_FLOAT32:g}"
        )
    return number


@dataclass(frozen=True, kw_only=True)
class Ttl(Rule):
    """A sweep takes the rows that were trained too long ago (their time to live is over).

    With `steps=n` a sweep after step s takes the rows whose last training step is s - n or before: those that were not trained in
    the last n steps. Rows that were imported without metadata count as trained at step 0.

    With `seconds=t` a sweep at the time `now` takes the rows whose last training step was made at `now - t` or before. Time is the
    system's, or what `torchrec_embcache.set_time` says, and a step's is the greatest of the ranks that made it. Tables keep the
    times of their steps to the second for a minute, then to the minute, and after 31 days to the hour: by so much a row may leave
    later, and none leaves earlier. Steps before a checkpoint that has no times count as made with the first step after the load.

    Give exactly one of the two. This rule alone is no cap: a table still grows where ever more ids are trained within the time.

    Args:
        steps: training steps, from 1 to 2^53.
        seconds: more than 0, and at most 2^53. Thousandths count.

    Raises:
        ConfigError: a value is out of range, or not exactly one of both is given.

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
        """As the core takes it. With `seconds` the step is found at each sweep."""
        return (
            _native.SweepRule.per_sweep(needs_clock=True)
            if self.steps is None
            else _native.SweepRule.last_step(self.steps)
        )

    @property
    def is_collective(self) -> bool:
        """With `seconds`: clocks differ, and so do the steps that they say."""
        return self.seconds is not None

    @property
    def needs_clock(self) -> bool:
        """With `seconds`."""
        return self.seconds is not None

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """What a sweep of now takes. With `seconds`, where it is collective: rows of steps that are old enough by all clocks."""
        if self.seconds is None:
            return self.native()
        table = inputs.table
        now = max(inputs.gather(lambda: 0 if table is None else table.now()))
        cut = now - max(1, round(float(self.seconds) * 1000))

        def local_step() -> int | None:
            # A rank that has no rows of the table has no say; -1: no step is known to be so old.
            if table is None:
                return None
            step = table.step_at(cut) if cut >= 0 else None
            return -1 if step is None else step

        step = min((step for step in inputs.gather(local_step) if step is not None), default=-1)
        return _native.SweepRule.nothing() if step < 0 else _native.SweepRule.trained_until(step)

    @property
    def kind(self) -> str:
        """Its name, and what it counts in."""
        return "Ttl(steps)" if self.steps is not None else "Ttl(seconds)"


@dataclass(frozen=True)
class Score(Rule):
    """A sweep takes the rows whose score is below a bound.

    The score of a row is the sum of its occurrences in training, and halves over `score_half_life_steps` (a setting of the table)
    in which it is not used. Rows that were imported without metadata have the score 0, so the first sweep takes them.

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
        """As the core takes it."""
        return _native.SweepRule.score(float(self.below))


@dataclass(frozen=True)
class L2Norm(Rule):
    """A sweep takes the rows whose weights have an L2 norm below a bound. It is computed in float64, column after column.

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
        """As the core takes it."""
        return _native.SweepRule.l2_norm(float(self.below))


@dataclass(frozen=True)
class Keep(LowestRowsRule, Rule):
    """A sweep takes the rows of the lowest scores, until `rows` are left in the whole table, all its shards together.

    Scores are those of `Score`. Of rows with equal scores those go first that were trained last longest ago, and then those with
    the lowest ids, as uint64. Between two sweeps a table may have more rows.

    Args:
        rows: how many stay, from 1. A batch has fewer distinct ids: a sweep raises `ConfigError` where more rows than this were
            trained in the step before it, and takes none.

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
        """All but `rows`."""
        return max(0, rows.rows - self.rows)

    def count_to_evict_alone(self, rows: TableRowCounts) -> int:
        """As `lowest`, where no other rule spares rows. `ConfigError` where the last batch alone has more rows than stay."""
        if rows.newest > self.rows:
            raise ConfigError(
                f"{self!r} keeps fewer rows than one batch trains: the step before the sweep trained {rows.newest} rows. Keep more "
                "rows than a batch has distinct ids"
            )
        return self.count_to_evict(rows)


@dataclass(frozen=True)
class Share(LowestRowsRule, Rule):
    """A sweep takes this share of the rows of the whole table: those of the lowest scores, in the order of `Keep`.

    Of N rows it takes the share times N, rounded down; both are taken exactly. A second sweep takes none where nothing has changed
    since the one before.

    Args:
        fraction: more than 0 and less than 1.

    Raises:
        ConfigError: `fraction` is out of range.

    Examples:
        >>> from torchrec_embcache import eviction
        >>> eviction.Share(0.1)
        Share(share=0.1)
    """

    fraction: float

    def __post_init__(self) -> None:
        if _check_positive("Share.share", self.fraction, 1.0) == 1:
            raise ConfigError(f"Share.share={self.fraction!r} takes every row: give less than 1")

    def count_to_evict(self, rows: TableRowCounts) -> int:
        """The share of the rows, rounded down; none where a sweep has taken it."""
        return 0 if rows.is_swept else math.floor(Fraction(float(self.fraction)) * rows.rows)


@dataclass(frozen=True)
class All(Rule):
    """A sweep takes the rows that every one of these rules takes.

    Args:
        rules: two or more, of different kinds.

    Raises:
        ConfigError: there are fewer than two rules, one is no rule or is an `All` itself, or two contradict each other.

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
        """As the core takes it."""
        return _native.SweepRule.all([rule.native() for rule in self.rules])

    @property
    def is_collective(self) -> bool:
        """Whether one of the rules is."""
        return any(rule.is_collective for rule in self.rules)

    @property
    def needs_clock(self) -> bool:
        """Whether one of the rules is."""
        return any(rule.needs_clock for rule in self.rules)

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """What all of the rules take. Collective where one of them is agreed on."""
        return _native.SweepRule.all([rule.resolve(inputs) for rule in self.rules])


def _check_rules(owner: str, rules: object) -> tuple[Rule, ...]:
    """`rules` as a tuple. `ConfigError` where they are no rules, none at all, or two contradict each other."""
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
    """Which rows a table's sweeps take, and when it is swept.

    A sweep takes the rows that any of `rules` takes.

    Args:
        rules: one or more, of different kinds: `Ttl`, `Score`, `L2Norm`, `Keep`, `Share` and `All`.
        every_steps: sweep after each training step whose number is a multiple of this, from 1 to 2^53. None: at saves, and when
            `torchrec_embcache.evict(model)` is called, which can be done in either case.
        at_least_rows: no rule takes any of so many rows of the whole table: those of the highest scores, in the order of `Keep`.
            Where the table has no more rows than that, a sweep takes none.

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
        """Whether a save sweeps before it writes."""
        return self.every_steps is None

    def native(self) -> _native.SweepRule:
        """The rules as the core takes them when a table is made."""
        if self.is_collective:
            return _native.SweepRule.per_sweep(needs_clock=self.needs_clock)
        return _native.SweepRule.any([rule.native() for rule in self.rules])

    @property
    def is_collective(self) -> bool:
        """Whether the ranks that share a table have to agree, at each sweep, on what leaves."""
        return self.at_least_rows > 0 or any(rule.is_collective for rule in self.rules)

    @property
    def has_fraction_rule(self) -> bool:
        """Whether a sweep of the rows that a sweep left would take more of them."""
        return any(isinstance(rule, Share) for rule in self._lowest_rows_rules())

    def _lowest_rows_rules(self) -> list[LowestRowsRule]:
        """The rules that take a number of rows, also those of `All`."""
        each = [one for rule in self.rules for one in (rule.rules if isinstance(rule, All) else [rule])]
        return [rule for rule in each if isinstance(rule, LowestRowsRule)]

    @property
    def needs_clock(self) -> bool:
        """Whether a rule needs the times of a table's steps."""
        return any(rule.needs_clock for rule in self.rules)

    def resolve(self, inputs: SweepInputs) -> _native.SweepRule:
        """What one sweep takes, the same on all ranks. Collective where `is_collective`.

        Raises on every rank what rules and cuts raise, and ConfigError where `Keep` keeps fewer rows than a batch trains.
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
