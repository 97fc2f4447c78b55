"""Inputs of an eviction rule: statistics of this shard, and the collective that combines them over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torchrec_embcache import _native

__all__ = ["RankGather", "SweepInputs", "gather_single_rank"]

T = TypeVar("T")


class RankGather(Protocol):
    """Runs work on every rank and gathers the results."""

    def __call__(self, work: Callable[[], T]) -> list[T]:
        """Returns the result of `work()` of each rank, by rank. An error on any rank is raised on all. Collective; values are
        pickled.
        """


def gather_single_rank(work: Callable[[], T]) -> list[T]:
    """A `RankGather` for a single rank."""
    return [work()]


@dataclass(frozen=True)
class SweepInputs:
    """Inputs of one eviction pass over one table, on one of the ranks that share it.

    `Rule.resolve` receives these inputs on each rank and returns the same rule on every rank. The ranks call `gather` the same
    number of times in the same order. Work that can fail runs inside such a call, so that an error on one rank is raised on all
    ranks and no rank waits for another.

    Attributes:
        step: the training step after which the sweep runs.
        table: this rank's shard; None if this rank has no shard and only takes part in the collectives.
        gather: runs work on each of these ranks.
        thresholds: the thresholds found so far, by rule.
    """

    step: int
    table: _native.Table | None
    gather: RankGather
    thresholds: Mapping[object, _native.SweepRule] = field(default_factory=dict)
