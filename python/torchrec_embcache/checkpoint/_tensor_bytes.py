"""Converts tensors to bytes and back in bounded windows, never an entire tensor at a time."""

import io
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["byte_windows", "deserialize_tensor", "is_raw", "read_box", "serialize_tensor"]

# Window size in bytes for a tensor that is not in host memory in row-major order.
WINDOW_BYTES = 8 << 20
# Longer rows, in bytes, are not read entirely if only some of their columns are requested.
WIDE_ROW_BYTES = 1 << 20

# Reads bytes of an extent: the first byte in it, and the destination memory.
ReadBytes = Callable[[int, NDArray[np.uint8]], None]


def is_raw(tensor: torch.Tensor) -> bool:
    """True if the tensor is fully described by its elements in row-major order."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


def byte_windows(tensor: torch.Tensor) -> Iterator[NDArray[np.uint8]]:
    """Yields the bytes of a tensor's elements in row-major order, in windows of at most 8 MiB if they have to be copied."""
    if tensor.numel() == 0:
        return
    if _is_contiguous_storage(tensor):
        yield _bytes_of(tensor)
    elif tensor.nbytes <= WINDOW_BYTES or tensor.dim() == 0:
        yield _bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())
    else:
        rows = WINDOW_BYTES // (tensor.nbytes // len(tensor))
        for start in range(0, len(tensor), max(rows, 1)):
            yield from byte_windows(tensor.narrow(0, start, min(rows, len(tensor) - start)) if rows else tensor[start])


def read_box(
    read: ReadBytes,
    dtype: torch.dtype,
    shape: Sequence[int],
    offsets: Sequence[int],
    target: torch.Tensor,
    start: int = 0,
) -> None:
    """Copies a box of a saved tensor into `target`, which has the shape of the box.

    The saved tensor has `dtype` and `shape`, and starts at byte `start` of the input of `read`; `offsets` is the box's corner.
    `target` may have any device, strides and dtype.
    """
    if target.numel() == 0:
        return
    lengths = target.shape
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    full_rows = list(lengths[1:]) == list(shape[1:])
    begin = start + offsets[0] * row_bytes if shape else start
    if full_rows and target.dtype == dtype and _is_contiguous_storage(target):
        read(begin, _bytes_of(target))
    elif full_rows and target.nbytes // target.itemsize * dtype.itemsize <= WINDOW_BYTES:
        window = torch.empty(lengths, dtype=dtype, device="cpu")
        read(begin, _bytes_of(window))
        target.copy_(window)
    elif row_bytes <= (WINDOW_BYTES if full_rows else WIDE_ROW_BYTES):
        rows = WINDOW_BYTES // row_bytes
        for row in range(0, lengths[0], rows):
            part = target.narrow(0, row, min(rows, lengths[0] - row))
            window = torch.empty([len(part), *shape[1:]], dtype=dtype, device="cpu")
            read(begin + row * row_bytes, _bytes_of(window))
            for dim, (offset, length) in enumerate(zip(offsets[1:], lengths[1:], strict=True), 1):
                window = window.narrow(dim, offset, length)
            part.copy_(window)
    else:
        for row in range(lengths[0]):
            read_box(read, dtype, shape[1:], offsets[1:], target[row], begin + row * row_bytes)


def serialize_tensor(tensor: torch.Tensor) -> bytes:
    """Serializes a tensor with `torch.save`, for one not described by its elements: sparse, quantized, or a wrapper subclass."""
    stream = io.BytesIO()
    torch.save(tensor.cpu(), stream)
    return stream.getvalue()


def deserialize_tensor(saved: NDArray[np.uint8]) -> torch.Tensor:
    """Deserializes the result of `serialize_tensor`. `torch.load` rejects types that torch does not regard as safe."""
    tensor = torch.load(io.BytesIO(saved.data), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} is stored in place of a tensor")
    return tensor


def _is_contiguous_storage(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory contains its elements in row-major order and nothing else."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Returns the memory of a tensor for which `_is_contiguous_storage` is true."""
    # A dimension of one element may have any stride, which `reshape` keeps and a view of bytes rejects.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array
