"""The ranks that take part in a save or a load, and how they agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torchrec_embcache import collective
from torchrec_embcache.collective import Group

__all__ = ["AllRanks", "GroupRanks", "OneRank", "Ranks"]

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
    def sees_all(self) -> bool:
        """Whether `together` asks all ranks. Otherwise somebody else, such as DCP, brings them together."""

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work()` gives on each rank that this one can ask, by rank. An error on one of them is raised on all.

        Collective. Values are pickled.
        """


class AllRanks:
    """All ranks of the default process group; one rank where there is no group."""

    sees_all = True

    def __init__(self) -> None:
        self.rank, self.world_size = collective.rank(), collective.world_size()

    def together(self, work: Callable[[], T]) -> list[T]:
        """See `Ranks.together`."""
        return collective.all_gather(collective.together(work))


class GroupRanks:
    """All ranks, by a process group of their own: for a thread whose collectives must not meet those of training."""

    sees_all = True

    def __init__(self, ranks: Ranks, group: Group) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._group = group

    def together(self, work: Callable[[], T]) -> list[T]:
        """See `Ranks.together`."""
        return self._group.together(work)


class OneRank:
    """One rank, which agrees with no other: a process that works alone, or one whose ranks somebody else brings together."""

    sees_all = False

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work()` gives on this rank."""
        return [work()]
