"""Collectives over ranks: exchange values and raise each other's errors. Without `torch.distributed` there is one rank.

All exchanges are between CPUs. An exchange between devices would wait for pending device work and block the CPU.
"""

import atexit
import hashlib
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchrec_embcache.exceptions import EmbCacheError, InputError, StateError

__all__ = [
    "RankGroup",
    "agree_on_arguments",
    "all_gather",
    "all_reduce_sum",
    "check_arguments_match",
    "cpu_group",
    "gather_results",
    "is_distributed",
    "raise_on_every_rank",
    "rank",
    "run_on_all_ranks",
    "world_size",
]

T = TypeVar("T")


def is_distributed() -> bool:
    """True if there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Returns this process's rank in the default process group; 0 without one."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Returns the number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if is_distributed() else 1


# Maps groups that cannot exchange CPU tensors, such as those of NCCL, to a gloo group of the same ranks.
_gloo_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def cpu_group(group: dist.ProcessGroup | None = None) -> Any:
    """Returns a group of the ranks of `group` (by default the default group) whose own methods exchange CPU tensors.

    Returns `group` itself if it can do so, else a gloo group, which is created by the first call for `group`. All ranks of the
    group, and no others, make that call at the same time.
    """
    asked = group if group is not None else dist.group.WORLD
    assert asked is not None, "the callers ask whether there is a default group"
    if any(device.type == "cpu" for device in asked._device_types):  # noqa: SLF001 - torch says it nowhere else
        return asked
    if asked not in _gloo_groups:
        _gloo_groups[asked] = _gloo_group(asked)
    return _gloo_groups[asked]


def _gloo_group(group: dist.ProcessGroup) -> Any:
    # `new_group` would require ranks outside of the group to take part, or would name later groups differently on these ranks.
    backends = [group._get_backend(device) for device in group._device_types]  # noqa: SLF001
    options = [getattr(backend, "options", None) for backend in backends]
    timeouts = [getattr(each, "_timeout", dist.distributed_c10d.default_pg_timeout) for each in options]
    group_store = dist.distributed_c10d._get_process_group_store(group)  # noqa: SLF001
    store = dist.distributed_c10d.PrefixStore("torchrec_embcache", group_store)
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), max(timeouts))


# As for the group of asynchronous saves: the threads of these groups stop before the interpreter does.
atexit.register(_gloo_groups.clear)


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the value of each rank, in rank order. Collective; values are pickled."""
    if not is_distributed() or dist.get_world_size(group) == 1:
        return [value]
    return _exchange(value, cpu_group(group))


def all_reduce_sum(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sums the values of all ranks in place. `values` is on the CPU. Collective."""
    _reduce(values, dist.ReduceOp.SUM, group)


def _reduce(values: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    cpu_group(group).allreduce([values], options).wait()


def raise_on_every_rank(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises on every rank if any rank has an error. Collective.

    A rank raises its own error if it has one, else the error of the first rank that has one. One flag is reduced; errors are
    exchanged only if it is set.
    """
    if is_distributed() and dist.get_world_size(group) > 1:
        flag = torch.tensor([error is not None], dtype=torch.int32, device="cpu")
        _reduce(flag, dist.ReduceOp.MAX, group)
        if not flag.item():
            return
        errors = all_gather(_picklable_error(error), group)
    else:
        errors = [None]
    if error is not None:
        try:
            raise error
        finally:
            del error  # breaks the reference cycle of this frame and the traceback
    _raise_first(errors)


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Returns the result of `work()` on this rank. An error on any rank is raised on all ranks. Collective."""
    result, error = _capture_error(work)
    raise_on_every_rank(error)
    return result[0]


def gather_results(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the results of `work()` on each rank of `group`, in rank order. An error on any rank is raised on all. Collective.

    Values are pickled.
    """
    result, error = _capture_error(work)
    raise_on_every_rank(error, group)
    return all_gather(result[0], group)


def _capture_error(work: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """Returns the result of `work()` in a list, or the error that it raised."""
    try:
        return [work()], None
    except Exception as error:
        return [], error


def agree_on_arguments(call_name: str, check: Callable[[], Mapping[str, object]]) -> None:
    """Checks the arguments of a collective call, first of all, so that no rank waits for a rank that rejects them. Collective.

    `call_name` names the call. `check()` raises for arguments that this rank rejects, and returns the arguments that must be equal
    on all ranks, by name, as plain values. An error on any rank is raised on all ranks. Raises `InputError` if the values differ or
    if the ranks make different calls. Ranks compare digests; values are exchanged only if the digests differ.
    """
    given, error = _capture_error(check)
    if not is_distributed() or dist.get_world_size() == 1:
        raise_on_every_rank(error)
        return
    mine = (call_name, {name: repr(value) for values in given for name, value in values.items()})
    digest = int.from_bytes(hashlib.sha256(repr(mine).encode()).digest()[:7], "little")
    seen = torch.tensor([error is not None, digest, -digest], dtype=torch.int64, device="cpu")
    _reduce(seen, dist.ReduceOp.MAX, None)
    refused, greatest, least = seen.tolist()
    if refused:
        raise_on_every_rank(error)
    if greatest != -least:
        check_arguments_match(all_gather(mine))


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


class RankGroup:
    """A group of ranks for use by one thread per rank.

    It is independent of collectives of other threads and outlives the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` is a gloo group for exclusive use; None if there is only one rank."""
        self._group = group
        self.is_broken = False
        """True if a rank has exited or the ranks are out of step."""

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Returns the results of `work()` on each rank, in rank order.

        An error on any rank is raised on all ranks. Collective; values are pickled.
        """
        result, error = _capture_error(work)
        outcomes: list[tuple[list[T], EmbCacheError | None]] = [(result, None)]
        if self._group is not None and self._group.size() > 1:
            try:
                outcomes = _exchange((result, _picklable_error(error)), self._group)
            except Exception as lost:
                self.is_broken = True
                if error is None:
                    error = StateError(f"the ranks lost each other in a save: one of them has ended ({lost})")
                    error.__cause__ = lost
        if error is not None:
            try:
                raise error
            finally:
                del error
        _raise_first([other for _, other in outcomes])
        return [value for values, _ in outcomes for value in values]


def _exchange(value: T, group: Any) -> list[T]:
    """Returns the value of each rank, in rank order, using the group's own methods, which need no default group."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(data)], dtype=torch.int64, device="cpu")]).wait()
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = data
    everyone = [torch.empty_like(padded) for _ in sizes]
    group.allgather([everyone], [padded]).wait()
    return [pickle.loads(data[: int(size)].numpy().tobytes()) for data, size in zip(everyone, sizes, strict=True)]


def _raise_first(errors: list[EmbCacheError | None]) -> None:
    """Raises the error of the first rank that has one."""
    for rank, other in enumerate(errors):
        if other is not None:
            other.message = f"rank {rank}: {other.message}"
            raise other


def _picklable_error(error: Exception | None) -> EmbCacheError | None:
    if error is None or isinstance(error, EmbCacheError):
        return error
    return EmbCacheError(f"{type(error).__name__}: {error}")
