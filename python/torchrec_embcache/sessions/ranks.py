"""The ranks that take part in a save or a load, and how they agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torchrec_embcache import collective
from torchrec_embcache.collective import RankGroup

__all__ = ["AllRanks", "GroupRanks", "Ranks", "SingleRank"]

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of one save or load, as this rank knows them. Rank 0 is the coordinator."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    @property
    def has_all_ranks(self) -> bool:
        """Whether `together` asks all ranks. Otherwise somebody else, such as DCP, brings them together."""

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work()` gives on each rank that this one can ask, by rank. An error on one of them is raised on all.

        Collective. Values are pickled.
        """


class AllRanks:
    """All ranks of the default process group; one rank where there is no group."""

    has_all_ranks = True

    def __init__(self) -> None:
        self.rank, self.world_size = collective.rank(), collective.world_size()

    def gather(self, work: Callable[[], T]) -> list[T]:
        """See `Ranks.together`."""
        return collective.all_gather(collective.run_on_all_ranks(work))


class GroupRanks:
    """All ranks, by a process group of their own: for a thread whose collectives must not meet those of training."""

    has_all_ranks = True

    def __init__(self, ranks: Ranks, group: RankGroup) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._group = group

    def gather(self, work: Callable[[], T]) -> list[T]:
        """See `Ranks.together`."""
        return self._group.gather(work)


class SingleRank:
    """One rank, which agrees with no other: a process that works alone, or one whose ranks somebody else brings together."""

    has_all_ranks = False

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work()` gives on this rank."""
        return [work()]
