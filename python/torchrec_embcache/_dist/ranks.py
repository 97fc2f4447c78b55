"""The ranks that take part in a save or a load, and their communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from . import collective
from .collective import RankGroup

__all__ = ["AllRanks", "GroupRanks", "Ranks", "SingleRank"]

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of one save or load, as this rank knows them. Rank 0 is the coordinator."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def has_all_ranks(self) -> bool:
        """True if `gather` reaches all ranks. Otherwise another program, such as DCP, coordinates the ranks."""

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Returns the results of `work()` on each reachable rank, by rank. An error on one of them is raised on all.

        Collective. Values are pickled.
        """


class AllRanks:
    """All ranks of the default process group; a single rank without a group."""

    has_all_ranks = True

    def __init__(self) -> None:
        self.rank, self.world_size = collective.rank(), collective.world_size()

    def gather(self, work: Callable[[], T]) -> list[T]:
        """See `Ranks.gather`."""
        return collective.all_gather(collective.run_on_all_ranks(work))


class GroupRanks:
    """All ranks, with a separate process group: for a thread whose collectives must not interleave with those of training."""

    has_all_ranks = True

    def __init__(self, ranks: Ranks, group: RankGroup) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._group = group

    def gather(self, work: Callable[[], T]) -> list[T]:
        """See `Ranks.gather`."""
        return self._group.gather(work)


class SingleRank:
    """A rank without communication: a single process, or a process whose ranks are coordinated by another program."""

    has_all_ranks = False

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Returns the result of `work()` on this rank."""
        return [work()]
