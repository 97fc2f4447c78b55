"""What ranks do together: exchange values, raise each other's errors. Without `torch.distributed` there is one rank."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from .exceptions import EmbCacheError

__all__ = ["all_gather", "is_distributed", "raise_on_every_rank", "rank", "together"]

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether a default process group is initialised."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank in the default process group; 0 without one."""
    return dist.get_rank() if is_distributed() else 0


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of each rank, in rank order. Collective; values are pickled."""
    if not is_distributed():
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def raise_on_every_rank(
    error: Exception | None, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Raise on each rank if any rank has an error: its own where it has one, else that of the first rank that has. Collective.

    One flag, a tensor on `device`, is reduced; errors travel only when it is set.
    """
    if is_distributed() and dist.get_world_size(group) > 1:
        flag = torch.tensor([error is not None], dtype=torch.int32, device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
        if not flag.item():
            return
        errors = all_gather(_portable(error), group)
    else:
        errors = [None]
    if error is not None:
        try:
            raise error
        finally:
            del error  # no cycle with this frame: what the traceback holds is freed with the error
    for rank, other in enumerate(errors):
        if other is not None:
            other.message = f"rank {rank}: {other.message}"
            raise other


def together(work: Callable[[], T]) -> T:
    """`work()` on this rank; an error on any rank is raised on all. Collective."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as caught:
        error = caught
    raise_on_every_rank(error)
    return result[0]


def _portable(error: Exception | None) -> EmbCacheError | None:
    if error is None or isinstance(error, EmbCacheError):
        return error
    return EmbCacheError(f"{type(error).__name__}: {error}")
