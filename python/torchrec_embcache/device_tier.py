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
from .pinned_memory import copy_staged_to_device, copy_to_device, copy_to_host, staging_empty
from .stream_order import SlotIds, StreamOrder, current_stream, on_stream, transfer_streams

if TYPE_CHECKING:
    from ._native import DeviceArrays, FetchedRows, GatheredRows, Plan

__all__ = [
    "DeviceTier",
    "RowMover",
    "TorchRowMover",
    "convert_out_of_memory",
    "is_out_of_memory",
    "place_rows",
    "table_memory_errors",
]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or numpy says that there is no memory. On the CPU torch has no exception class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # CUDA says the second of pinned memory, and Triton of a kernel that is loaded.
    return isinstance(error, RuntimeError) and any(said in str(error) for said in ("allocate memory", "out of memory"))


@contextmanager
def convert_out_of_memory(missing_text: str) -> Iterator[None]:
    """Say what memory is missing, and what to do, where a device has none: `DeviceMemoryError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as cause:
        if isinstance(cause, EmbCacheError) or not is_out_of_memory(cause):
            raise
        raise DeviceMemoryError(f"{missing_text} ({cause})") from cause


def table_memory_errors(tables: str, device: torch.device) -> AbstractContextManager[None]:
    """Name the tables, and what to do, where `device` has no memory for a step of them: `DeviceMemoryError`."""
    return convert_out_of_memory(
        f"{device} has no memory for a step of {tables}: lower the budgets there, use smaller batches or free memory, and try the "
        "step again"
    )


class RowMover(Protocol):
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


class TorchRowMover:
    """Moves by torch's operators, on any device, for the kernels that are named."""

    def __init__(self, kernels: str = "torch") -> None:
        self.kernels = kernels

    def gather(self, tier: DeviceTier, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowMover`."""
        index = slots.to(tier.device)
        vectors = torch.cat([part.index_select(0, index) for part in (tier.weights, *tier.vector_slots)], 1)
        if tier.scalars is None:
            return vectors, torch.zeros(len(slots), dtype=torch.float32, device="cpu")
        return vectors, tier.scalars.index_select(0, index)

    def scatter(self, tier: DeviceTier, slots: Tensor, vectors: Tensor, scalars: Tensor) -> None:
        """See `RowMover`."""
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
        self, dim: int, vector_slots: int, scalar_slot: bool, capacity: int, device: torch.device, mover: RowMover
    ) -> None:
        self.dim = dim
        self.capacity = capacity
        self.device = device
        self._mover = mover
        with torch.inference_mode(False):  # a table may be opened by an evaluation, and trained later
            # The dtype and the device are named: torch's defaults may be others.
            made: dict[str, Any] = {"dtype": torch.float32, "device": device}
            self.weights = torch.zeros(capacity, dim, **made)
            self.vector_slots = [torch.zeros(capacity, dim, **made) for _ in range(vector_slots)]
            self.scalars = torch.zeros(capacity, **made) if scalar_slot else None
        self._stream_order = StreamOrder()
        with self.writing():
            pass  # the zeros are queued

    @property
    def kernels(self) -> str:
        """The name of the kernels that run on the rows."""
        return self._mover.kernels

    @contextmanager
    def reading(self) -> Iterator[Tensor]:
        """Read weights meanwhile on the caller's stream, which waits for what changes them on others. Gives the weights to read.

        The rows of the caller's plan stay right in them, also where another thread replaces the tier's tensors meanwhile.
        """
        stream: Any = current_stream(self.device)
        weights = self.weights
        if stream is not None:
            weights.record_stream(stream)
        with self._stream_order.reading(stream):
            yield weights

    def writing(self, slots: SlotIds | None = None) -> AbstractContextManager[None]:
        """Change rows meanwhile on the caller's stream, which waits for what uses them on others.

        `slots`: those that change, [n], where -1 is none; None for all.
        """
        stream = current_stream(self.device)
        if stream is not None:
            self._record_stream(stream)
            slots = slots[slots >= 0] if slots is not None else None
        return self._stream_order.writing(stream, slots)

    def ensure_capacity(self, slots: int) -> None:
        """Hold at least `slots` rows; those that are there keep their slots. On an error the tensors stay what they were."""
        more = slots - self.weights.shape[0]
        if more <= 0:
            return
        more = max(more, self.weights.shape[0] // 8)
        with self.writing(), torch.inference_mode(False):
            weights = _grow(self.weights, more)
            vector_slots = [_grow(slot, more) for slot in self.vector_slots]
            scalars = _grow(self.scalars, more) if self.scalars is not None else None
        self.weights, self.vector_slots, self.scalars = weights, vector_slots, scalars

    def _record_stream(self, stream: Any) -> None:
        """Tell torch's allocator that a stream uses the tensors: their memory is not given away before that is done."""
        for part in (self.weights, *self.vector_slots, *([self.scalars] if self.scalars is not None else [])):
            part.record_stream(stream)

    def gather(self, slots: NDArray[np.int64]) -> GatheredRows:
        """The rows of cache slots [n], for the core. Their scalars are zeros where there is no scalar slot.

        The copies leave the device on a stream of their own, which waits for those alone who wrote these slots. The CPU waits for
        the copies. Raises `MemoryError` where torch has no memory.
        """
        side = transfer_streams(self.device)
        down = side.to_host if side is not None else None
        try:
            with on_stream(down, self.device), torch.no_grad(), self._stream_order.reading(down, slots):
                rows = self._mover.gather(self, torch.from_numpy(slots))
                vectors, scalars = (copy_to_host(part) for part in rows)
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

    def staging_buffer(self, rows: int) -> Tensor | None:
        """Memory [n, V] for the vectors of about so many rows on their way here; None for no rows. The core writes them there.

        n is `rows`, or `capacity` where that is less: mostly no more come at once, and where they do the core has memory of its
        own. The device copies from this by itself, where it can. Raises torch's error where there is no memory.
        """
        rows = min(rows, self.capacity)
        if rows == 0:
            return None
        floats = self.dim * (1 + len(self.vector_slots))
        return staging_empty((rows, floats), torch.float32, self.device)

    def scatter(self, fetched_rows: FetchedRows, staging: Tensor | None) -> None:
        """Put the rows that a plan fetched, with this memory for their vectors, into their cache slots.

        They come to the device on a stream of their own. It waits for those who used these slots, and who reads rows waits for it.
        """
        count = len(fetched_rows.slots)
        if count == 0:
            return
        side = transfer_streams(self.device)
        up = side.to_device if side is not None else None
        with on_stream(up, self.device), self._stream_order.writing(up, fetched_rows.slots):
            if up is not None:
                self._record_stream(up)
            if fetched_rows.vectors is not None:
                vectors = copy_to_device(torch.from_numpy(fetched_rows.vectors), self.device)
            else:
                assert staging is not None, "the core says None only for rows that are there"
                vectors = copy_staged_to_device(staging[:count], self.device)
            scalars = copy_to_device(torch.from_numpy(fetched_rows.scalars), self.device)
            self._mover.scatter(self, torch.from_numpy(fetched_rows.slots), vectors, scalars)

    def arrays(self) -> DeviceArrays:
        """The tensors as numpy arrays of the same memory, for the core's kernels on the CPU."""
        scalars = self.scalars.numpy() if self.scalars is not None else None
        return _native.DeviceArrays(self.weights.numpy(), [slot.numpy() for slot in self.vector_slots], scalars)


def place_rows(plan: Plan, tiers: Sequence[DeviceTier | None]) -> None:
    """Bring the rows of a plan into their slots; call this within `Plan.exclusively`. `tiers` has one for each table, or None."""
    most = plan.max_arriving_rows()
    staging = [tier.staging_buffer(rows) if tier is not None else None for tier, rows in zip(tiers, most, strict=True)]
    lent = [memory.numpy() if memory is not None else None for memory in staging]
    plan.wait(lent)
    for table, (tier, memory) in enumerate(zip(tiers, staging, strict=True)):
        if tier is not None:
            tier.ensure_capacity(plan.required_slots(table))
            tier.scatter(plan.fetched_rows(table, lent[table]), memory)
    plan.mark_scattered()


def _grow(tensor: Tensor, slots: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(slots, *tensor.shape[1:])])
