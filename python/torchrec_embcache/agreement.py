"""What a rule of eviction looks at, and whom it asks, while the ranks that share a table agree on what one sweep takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from . import _native

__all__ = ["RankGather", "SweepInputs", "gather_single_rank"]

T = TypeVar("T")


class RankGather(Protocol):
    """Does some work on every rank."""

    def __call__(self, work: Callable[[], T]) -> list[T]:
        """What `work()` gives on each rank, by rank. An error on one of them is raised on all. Collective; values are pickled."""


def gather_single_rank(work: Callable[[], T]) -> list[T]:
    """A `RankGather` of one rank."""
    return [work()]


@dataclass(frozen=True)
class SweepInputs:
    """One sweep of one table, on one of the ranks that agree on it.

    `Rule.resolve` gets one of these on each rank, and returns the same rule on all of them. The ranks make the same calls of
    `gather` in the same order, and what can fail is done within such a call. So an error on one rank is raised on all, and none
    of them waits for another.

    Attributes:
        step: the training step after which the sweep is made.
        table: this rank's shard; None where it has none, and takes part for the sake of the others.
        gather: does some work on every one of these ranks.
        thresholds: the thresholds that are known already, by rule.
    """

    step: int
    table: _native.Table | None
    gather: RankGather
    thresholds: Mapping[object, _native.SweepRule] = field(default_factory=dict)
