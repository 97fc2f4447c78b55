"""The device tier's tensors.

Shapes: n rows, D a table's width, V = D * (1 + vector slots), S cache slots of the tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _native
from .exceptions import DeviceMemoryError, EmbCacheError
from .pinned_memory import queued_to_device, to_device, to_fill, to_host
from .stream_order import Slots, StreamOrder, current_stream, on_stream, side_streams

if TYPE_CHECKING:
    from ._native import DeviceArrays, FetchedRows, GatheredRows, Plan

__all__ = ["DeviceTier", "RowMoves", "TorchMoves", "bring_rows", "is_out_of_memory", "memory_of", "memory_that"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or numpy says that there is no memory. On the CPU torch has no exception class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # CUDA says the second of pinned memory, and Triton of a kernel that is loaded.
    return isinstance(error, RuntimeError) and any(said in str(error) for said in ("allocate memory", "out of memory"))


@contextmanager
def memory_that(is_missing: str) -> Iterator[None]:
    """Say what memory is missing, and what to do, where a device has none: `DeviceMemoryError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as cause:
        if isinstance(cause, EmbCacheError) or not is_out_of_memory(cause):
            raise
        raise DeviceMemoryError(f"{is_missing} ({cause})") from cause


def memory_of(tables: str, device: torch.device) -> AbstractContextManager[None]:
    """Name the tables, and what to do, where `device` has no memory for a step of them: `DeviceMemoryError`."""
    return memory_that(
        f"{device} has no memory for a step of {tables}: lower the budgets there, use smaller batches or free memory, and try the "
        "step again"
    )


class RowMoves(Protocol):
    """Copies rows between the cache slots of a tier and contiguous tensors on its device: vectors [n, V] and scalars [n].

    It queues its work on torch's stream.
    """

    @property
    def kernels(self) -> str:
        """The name of the kernels that the tier is for; see `TableStats.kernels`."""

    def gather(self, tier: DeviceTier, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The rows in cache slots int64 [n], which are on the CPU. Their scalars are zeros where there is no scalar slot."""

    def scatter(self, tier: DeviceTier, slots: Tensor, vectors: Tensor, scalars: Tensor) -> None:
        """Put rows into different cache slots int64 [n], which are on the CPU."""


class TorchMoves:
    """Moves by torch's operators, on any device, for the kernels that are named."""

    def __init__(self, kernels: str = "torch") -> None:
        self.kernels = kernels

    def gather(self, tier: DeviceTier, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowMoves`."""
        index = slots.to(tier.device)
        vectors = torch.cat([part.index_select(0, index) for part in (tier.weights, *tier.vector_slots)], 1)
        if tier.scalars is None:
            return vectors, torch.zeros(len(slots), dtype=torch.float32, device="cpu")
        return vectors, tier.scalars.index_select(0, index)

    def scatter(self, tier: DeviceTier, slots: Tensor, vectors: Tensor, scalars: Tensor) -> None:
        """See `RowMoves`."""
        index = slots.to(tier.device)
        for number, part in enumerate((tier.weights, *tier.vector_slots)):
            part.index_copy_(0, index, vectors[:, number * tier.dim : (number + 1) * tier.dim])
        if tier.scalars is not None:
            tier.scalars.index_copy_(0, index, scalars)


class DeviceTier:
    """The rows of one table that are on the device: weights [S, D], vector slots [S, D] each, scalar slot [S]; all float32.

    The core knows which row is in which cache slot, and this has the memory. Slots from `capacity` on are overflow. Rows
    change, and the tensors are replaced by larger ones, within `Plan.exclusively` only.
    """

    def __init__(
        self, dim: int, vector_slots: int, scalar_slot: bool, capacity: int, device: torch.device, moves: RowMoves
    ) -> None:
        self.dim = dim
        self.capacity = capacity
        self.device = device
        self._moves = moves
        with torch.inference_mode(False):  # a table may be opened by an evaluation, and trained later
            # The dtype and the device are named: torch's defaults may be others.
            made: dict[str, Any] = {"dtype": torch.float32, "device": device}
            self.weights = torch.zeros(capacity, dim, **made)
            self.vector_slots = [torch.zeros(capacity, dim, **made) for _ in range(vector_slots)]
            self.scalars = torch.zeros(capacity, **made) if scalar_slot else None
        self._order = StreamOrder()
        with self.changes():
            pass  # the zeros are queued

    @property
    def kernels(self) -> str:
        """The name of the kernels that run on the rows."""
        return self._moves.kernels

    @contextmanager
    def reads(self) -> Iterator[Tensor]:
        """Read weights meanwhile on the caller's stream, which waits for what changes them on others. Gives the weights to read.

        The rows of the caller's plan stay right in them, also where another thread replaces the tier's tensors meanwhile.
        """
        stream: Any = current_stream(self.device)
        weights = self.weights
        if stream is not None:
            weights.record_stream(stream)
        with self._order.reading(stream):
            yield weights

    def changes(self, slots: Slots | None = None) -> AbstractContextManager[None]:
        """Change rows meanwhile on the caller's stream, which waits for what uses them on others.

        `slots`: those that change, [n], where -1 is none; None for all.
        """
        stream = current_stream(self.device)
        if stream is not None:
            self._keep_for(stream)
            slots = slots[slots >= 0] if slots is not None else None
        return self._order.writing(stream, slots)

    def ensure(self, slots: int) -> None:
        """Hold at least `slots` rows; those that are there keep their slots. On an error the tensors stay what they were."""
        more = slots - self.weights.shape[0]
        if more <= 0:
            return
        more = max(more, self.weights.shape[0] // 8)
        with self.changes(), torch.inference_mode(False):
            weights = _grown(self.weights, more)
            vector_slots = [_grown(slot, more) for slot in self.vector_slots]
            scalars = _grown(self.scalars, more) if self.scalars is not None else None
        self.weights, self.vector_slots, self.scalars = weights, vector_slots, scalars

    def _keep_for(self, stream: Any) -> None:
        """Tell torch's allocator that a stream uses the tensors: their memory is not given away before that is done."""
        for part in (self.weights, *self.vector_slots, *([self.scalars] if self.scalars is not None else [])):
            part.record_stream(stream)

    def gather(self, slots: NDArray[np.int64]) -> GatheredRows:
        """The rows of cache slots [n], for the core. Their scalars are zeros where there is no scalar slot.

        The copies leave the device on a stream of their own, which waits for those alone who wrote these slots. The CPU waits for
        the copies. Raises `MemoryError` where torch has no memory.
        """
        side = side_streams(self.device)
        down = side.down if side is not None else None
        try:
            with on_stream(down, self.device), torch.no_grad(), self._order.reading(down, slots):
                rows = self._moves.gather(self, torch.from_numpy(slots))
                vectors, scalars = (to_host(part) for part in rows)
            if down is not None:
                down.record_event().synchronize()
            return _native.GatheredRows(vectors.numpy(), scalars.numpy())
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise MemoryError(
                    f"{self.device} has no memory for {len(slots)} rows that leave it: lower the budgets there, use smaller "
                    f"batches or free memory, and try again ({error})"
                ) from error
            raise

    def staging(self, rows: int) -> Tensor | None:
        """Memory [n, V] for the vectors of about so many rows on their way here; None for no rows. The core writes them there.

        n is `rows`, or `capacity` where that is less: mostly no more come at once, and where they do the core has memory of its
        own. The device copies from this by itself, where it can. Raises torch's error where there is no memory.
        """
        rows = min(rows, self.capacity)
        if rows == 0:
            return None
        floats = self.dim * (1 + len(self.vector_slots))
        return to_fill((rows, floats), torch.float32, self.device)

    def scatter(self, fetched: FetchedRows, staging: Tensor | None) -> None:
        """Put the rows that a plan fetched, with this memory for their vectors, into their cache slots.

        They come to the device on a stream of their own. It waits for those who used these slots, and who reads rows waits for it.
        """
        count = len(fetched.slots)
        if count == 0:
            return
        side = side_streams(self.device)
        up = side.up if side is not None else None
        with on_stream(up, self.device), self._order.writing(up, fetched.slots):
            if up is not None:
                self._keep_for(up)
            if fetched.vectors is not None:
                vectors = to_device(torch.from_numpy(fetched.vectors), self.device)
            else:
                assert staging is not None, "the core says None only for rows that are there"
                vectors = queued_to_device(staging[:count], self.device)
            scalars = to_device(torch.from_numpy(fetched.scalars), self.device)
            self._moves.scatter(self, torch.from_numpy(fetched.slots), vectors, scalars)

    def arrays(self) -> DeviceArrays:
        """The tensors as numpy arrays of the same memory, for the core's kernels on the CPU."""
        scalars = self.scalars.numpy() if self.scalars is not None else None
        return _native.DeviceArrays(self.weights.numpy(), [slot.numpy() for slot in self.vector_slots], scalars)


def bring_rows(plan: Plan, tiers: Sequence[DeviceTier | None]) -> None:
    """Bring the rows of a plan into their slots; call this within `Plan.exclusively`. `tiers` has one for each table, or None."""
    most = plan.most_arriving()
    staging = [tier.staging(rows) if tier is not None else None for tier, rows in zip(tiers, most, strict=True)]
    lent = [memory.numpy() if memory is not None else None for memory in staging]
    plan.wait(lent)
    for table, (tier, memory) in enumerate(zip(tiers, staging, strict=True)):
        if tier is not None:
            tier.ensure(plan.required_slots(table))
            tier.scatter(plan.fetched(table, lent[table]), memory)
    plan.scattered()


def _grown(tensor: Tensor, more: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
