"""Ranks that work together: they exchange values, and raise each other's errors."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_embcache.exceptions import EmbCacheError, InputError, StateError

from .collective import cpu_group, exchange, is_distributed

__all__ = ["BackgroundRanks", "ProcessGroupRanks", "Ranks", "SingleRank", "all_ranks", "check_arguments_match"]

T = TypeVar("T")


class Ranks(ABC):
    """The ranks that make the same collective calls in the same order, as this rank knows them. Rank 0 is the coordinator.

    Subclasses implement the three exchanges; all other methods use only these. Every exchange is between CPUs.
    """

    rank: int
    """This process's rank."""
    world_size: int
    """Number of ranks."""
    has_all_ranks: bool = True
    """True if the exchanges reach all ranks. Otherwise another program, such as DCP, coordinates the ranks."""

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """Returns the value of each rank, in rank order. Collective; values are pickled."""

    @abstractmethod
    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduces the values of all ranks in place. `values` is on the CPU. Collective."""

    @abstractmethod
    def all_to_all(self, data: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends `sent[r]` bytes of `data` (uint8, on the CPU) to each rank r. Returns the `received[r]` bytes of each rank r, in
        rank order. Collective.
        """

    def raise_on_every_rank(self, error: Exception | None) -> None:
        """Raises on every rank if any rank has an error. Collective.

        A rank raises its own error if it has one, else the error of the first rank that has one. One flag is reduced; errors are
        exchanged only if it is set.
        """
        errors: list[EmbCacheError | None] = []
        if self.world_size > 1:
            flag = torch.tensor([error is not None], dtype=torch.int32, device="cpu")
            self.all_reduce(flag, dist.ReduceOp.MAX)
            if not flag.item():
                return
            errors = self.all_gather(_picklable_error(error))
        try:
            _raise_first(error, errors)
        finally:
            del error, errors  # breaks the reference cycle of this frame and the traceback

    def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work()` on this rank. An error on any rank is raised on all ranks. Collective."""
        result, error = _capture_error(work)
        try:
            self.raise_on_every_rank(error)
        finally:
            del error  # as in `raise_on_every_rank`
        return result[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Returns the results of `work()` on each rank, in rank order. An error on any rank is raised on all. Collective.

        Values are pickled.
        """
        return self.all_gather(self.run(work))

    def agree_on_arguments(self, call_name: str, check: Callable[[], Mapping[str, object]]) -> None:
        """Checks the arguments of a collective call, first of all, so that no rank waits for a rank that rejects them. Collective.

        `call_name` names the call. `check()` raises for arguments that this rank rejects, and returns the arguments that must be
        equal on all ranks, by name, as plain values. An error on any rank is raised on all ranks. Raises `InputError` if the values
        differ or if the ranks make different calls. Ranks compare digests; values are exchanged only if the digests differ.
        """
        given, error = _capture_error(check)
        try:
            if self.world_size == 1:
                self.raise_on_every_rank(error)
                return
            mine = (call_name, {name: repr(value) for values in given for name, value in values.items()})
            digest = int.from_bytes(hashlib.sha256(repr(mine).encode()).digest()[:7], "little")
            seen = torch.tensor([error is not None, digest, -digest], dtype=torch.int64, device="cpu")
            self.all_reduce(seen, dist.ReduceOp.MAX)
            refused, greatest, least = seen.tolist()
            if refused:
                self.raise_on_every_rank(error)
        finally:
            del error  # as in `raise_on_every_rank`
        if greatest != -least:
            check_arguments_match(self.all_gather(mine))


class SingleRank(Ranks):
    """A rank that exchanges nothing: a single process, or one whose ranks are coordinated by another program."""

    rank, world_size = 0, 1

    def __init__(self, *, has_all_ranks: bool = False) -> None:
        self.has_all_ranks = has_all_ranks

    def all_gather(self, value: T) -> list[T]:
        """Returns the value."""
        return [value]

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Does nothing."""

    def all_to_all(self, data: Tensor, sent: list[int], received: list[int]) -> Tensor:  # noqa: ARG002
        """Returns the data."""
        return data


class ProcessGroupRanks(Ranks):
    """The ranks of a process group, by default of the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def _cpu_group(self) -> Any:
        """The group that exchanges CPU tensors."""
        return cpu_group(self._group)

    def all_gather(self, value: T) -> list[T]:
        """See `Ranks.all_gather`."""
        return exchange(value, self._cpu_group)

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """See `Ranks.all_reduce`."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._cpu_group.allreduce([values], options).wait()

    def all_to_all(self, data: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """See `Ranks.all_to_all`."""
        arrived = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
        self._cpu_group.alltoall_base(arrived, data, received, sent).wait()
        return arrived


class BackgroundRanks(ProcessGroupRanks):
    """The ranks of a gloo group for the exclusive use of one thread per rank.

    `gather` is independent of the collectives of other threads and outlives the default group.
    """

    is_broken = False
    """True if a rank has exited or the ranks are out of step."""
    _cpu_group: Any = None

    def __init__(self, group: Any) -> None:
        """`group`: a new gloo group, made by `gloo_group`."""
        self._cpu_group = group
        self.rank, self.world_size = group.rank(), group.size()

    def gather(self, work: Callable[[], T]) -> list[T]:
        """See `Ranks.gather`. Results and errors are exchanged at once."""
        result, error = _capture_error(work)
        outcomes: list[tuple[list[T], EmbCacheError | None]] = []
        try:
            outcomes = self.all_gather((result, _picklable_error(error)))
        except Exception as lost:
            self.is_broken = True
            if error is None:
                error = StateError(f"the ranks lost each other in a save: one of them has ended ({lost})")
                error.__cause__ = lost
        try:
            _raise_first(error, [other for _, other in outcomes])
        finally:
            del error
        return [value for values, _ in outcomes for value in values]


def all_ranks(group: dist.ProcessGroup | None = None) -> Ranks:
    """Returns the ranks of `group`, by default of the default group; a single rank without one. All ranks are obtained here."""
    if is_distributed() and dist.get_world_size(group) > 1:
        return ProcessGroupRanks(group)
    return SingleRank(has_all_ranks=True)


def check_arguments_match(by_rank: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Raises `InputError` unless all ranks make the same call with the same arguments. `by_rank`: call and arguments by rank."""
    call, arguments = by_rank[0]
    if any(other != call for other, _ in by_rank):
        made = ", ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(by_rank))
        raise InputError(f"ranks make different collective calls at the same time ({made}): make the same on all ranks")
    for name in arguments:
        said = [values.get(name, "nothing") for _, values in by_rank]
        if len(set(said)) > 1:
            values = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(said))
            raise InputError(f"{call}: {name} differs between ranks ({values}): give all ranks the same")


def _capture_error(work: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """Returns the result of `work()` in a list, or the error that it raised."""
    try:
        return [work()], None
    except Exception as error:
        return [], error


def _raise_first(own: Exception | None, errors: Sequence[EmbCacheError | None]) -> None:
    """Raises this rank's error, else the error of the first rank that has one."""
    if own is not None:
        try:
            raise own
        finally:
            del own
    for rank, other in enumerate(errors):
        if other is not None:
            other.message = f"rank {rank}: {other.message}"
            try:
                raise other
            finally:
                del other, errors


def _picklable_error(error: Exception | None) -> EmbCacheError | None:
    if error is None or isinstance(error, EmbCacheError):
        return error
    return EmbCacheError(f"{type(error).__name__}: {error}")
