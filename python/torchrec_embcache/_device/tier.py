"""Tensors of the device tier.

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

from torchrec_embcache import _native
from torchrec_embcache.exceptions import DeviceMemoryError, EmbCacheError

from .pinned import copy_staged_to_device, copy_to_device, copy_to_host, staging_empty
from .streams import SlotIds, StreamOrder, current_stream, on_stream, transfer_streams

if TYPE_CHECKING:
    from torchrec_embcache._native import DeviceArrays, FetchedRows, GatheredRows, Plan

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
    """True if `error` is an out-of-memory error of torch or numpy. On the CPU torch has no exception class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # CUDA raises "out of memory" for pinned memory, and Triton for loading a kernel.
    return isinstance(error, RuntimeError) and any(said in str(error) for said in ("allocate memory", "out of memory"))


@contextmanager
def convert_out_of_memory(missing_text: str) -> Iterator[None]:
    """Converts out-of-memory errors to `DeviceMemoryError`, with `missing_text` as the message."""
    try:
        yield
    except (RuntimeError, MemoryError) as cause:
        if isinstance(cause, EmbCacheError) or not is_out_of_memory(cause):
            raise
        raise DeviceMemoryError(f"{missing_text} ({cause})") from cause


def table_memory_errors(tables: str, device: torch.device) -> AbstractContextManager[None]:
    """Converts out-of-memory errors of `device` in a training step to `DeviceMemoryError`, which names the tables."""
    return convert_out_of_memory(
        f"{device} has no memory for a step of {tables}: lower the budgets there, use smaller batches or free memory, and try the "
        "step again"
    )


class RowMover(Protocol):
    """Copies rows between the cache slots of a tier and contiguous tensors on its device: vectors [n, V] and scalars [n].

    The work is queued on torch's current stream.
    """

    @property
    def kernels(self) -> str:
        """The name of the tier's kernels; see `TableStats.kernels`."""

    def gather(self, tier: DeviceTier, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows in the cache slots int64 [n], a CPU tensor. Scalars are zeros if there is no scalar slot."""

    def scatter(self, tier: DeviceTier, slots: Tensor, vectors: Tensor, scalars: Tensor) -> None:
        """Writes rows into distinct cache slots int64 [n], a CPU tensor."""


class TorchRowMover:
    """Moves rows with torch operators on any device, for the kernels named `kernels`."""

    def __init__(self, kernels: str = "torch") -> None:
        self.kernels = kernels

    def gather(self, tier: DeviceTier, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `RowMover`."""
        index = slots.to(tier.device)
        vectors = torch.cat([part.index_select(0, index) for part in (tier.weights, *tier.vector_slots)], 1)
        if tier.scalars is None:
            return vectors, torch.zeros(len(slots), dtype=torch.float32, device="cpu")
        return vectors, tier.scalars.index_select(0, index)

    def scatter(self, tier: DeviceTier, slots: Tensor, vectors: Tensor, scalars: Tensor) -> None:
        """Implements `RowMover`."""
        index = slots.to(tier.device)
        for number, part in enumerate((tier.weights, *tier.vector_slots)):
            part.index_copy_(0, index, vectors[:, number * tier.dim : (number + 1) * tier.dim])
        if tier.scalars is not None:
            tier.scalars.index_copy_(0, index, scalars)


class DeviceTier:
    """The rows of one table on the device: weights [S, D], vector slots [S, D] each, scalar slot [S]; all float32.

    The native table maps rows to cache slots; this class owns the memory. Slots from `capacity` on are overflow. Rows change, and
    tensors are replaced by larger ones, only within `Plan.run_exclusively`.
    """

    def __init__(
        self, dim: int, vector_slots: int, scalar_slot: bool, capacity: int, device: torch.device, mover: RowMover
    ) -> None:
        self.dim = dim
        self.capacity = capacity
        self.device = device
        self._mover = mover
        with torch.inference_mode(False):  # a table may be opened by an evaluation and trained later
            # Explicit dtype and device, because the user can change torch's defaults.
            made: dict[str, Any] = {"dtype": torch.float32, "device": device}
            self.weights = torch.zeros(capacity, dim, **made)
            self.vector_slots = [torch.zeros(capacity, dim, **made) for _ in range(vector_slots)]
            self.scalars = torch.zeros(capacity, **made) if scalar_slot else None
        self._stream_order = StreamOrder()
        with self.writing():
            pass  # queues the zeros

    @property
    def kernels(self) -> str:
        """The name of the kernels that run on the rows."""
        return self._mover.kernels

    @contextmanager
    def reading(self) -> Iterator[Tensor]:
        """Reads weights in the block on the caller's stream, after pending writes of other streams. Yields the weights.

        The rows of the caller's plan stay valid in them, even if another thread replaces the tier's tensors during the block.
        """
        stream: Any = current_stream(self.device)
        weights = self.weights
        if stream is not None:
            weights.record_stream(stream)
        with self._stream_order.reading(stream):
            yield weights

    def writing(self, slots: SlotIds | None = None) -> AbstractContextManager[None]:
        """Writes rows in the block on the caller's stream, after pending reads and writes of other streams.

        `slots`: the slots that change, [n], where -1 stands for none; None for all.
        """
        stream = current_stream(self.device)
        if stream is not None:
            self._record_stream(stream)
            slots = slots[slots >= 0] if slots is not None else None
        return self._stream_order.writing(stream, slots)

    def ensure_capacity(self, slots: int) -> None:
        """Grows the tier to at least `slots` rows; existing rows keep their slots. On an error the tensors are unchanged."""
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
        """Records in torch's allocator that a stream uses the tensors, so that their memory is not reused too early."""
        for part in (self.weights, *self.vector_slots, *([self.scalars] if self.scalars is not None else [])):
            part.record_stream(stream)

    def gather(self, slots: NDArray[np.int64]) -> GatheredRows:
        """Returns the rows of cache slots [n] for the native extension. Scalars are zeros if there is no scalar slot.

        The copies run on a separate stream, which waits only for the writers of these slots. The CPU waits for the copies. Raises
        `MemoryError` if torch cannot allocate memory.
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
        """Returns host memory [n, V] in which the native extension stages the vectors of about `rows` rows; None for no rows.

        n is `rows` or `capacity`, whichever is less. If more rows arrive at once, which is rare, the native extension allocates its
        own memory. The device copies from this memory asynchronously, if it can. Raises torch's error if allocation fails.
        """
        rows = min(rows, self.capacity)
        if rows == 0:
            return None
        floats = self.dim * (1 + len(self.vector_slots))
        return staging_empty((rows, floats), torch.float32, self.device)

    def scatter(self, fetched_rows: FetchedRows, staging: Tensor | None) -> None:
        """Writes the rows that a plan fetched into their cache slots; `staging` contains their vectors.

        The copies run on a separate stream. It waits for users of these slots, and readers of the rows wait for it.
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
        """Returns the tensors as numpy arrays that share their memory, for the native kernels on the CPU."""
        scalars = self.scalars.numpy() if self.scalars is not None else None
        return _native.DeviceArrays(self.weights.numpy(), [slot.numpy() for slot in self.vector_slots], scalars)


def place_rows(plan: Plan, tiers: Sequence[DeviceTier | None]) -> None:
    """Loads the rows of a plan into their slots. Call it within `Plan.run_exclusively`. `tiers` has an entry or None per table."""
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
