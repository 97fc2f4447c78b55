"""Page-locked host buffers, and asynchronous copies through them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "copy_staged_to_device",
    "copy_to_device",
    "copy_to_host",
    "has_async_copies",
    "pinned_empty",
    "staging_empty",
]


def has_async_copies(device: torch.device) -> bool:
    """True if `device` copies from and to pinned memory asynchronously on its streams."""
    return device.type == "cuda"


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocates pinned memory. Torch pools it per process, and reuses it only after the copies that it has recorded."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def staging_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates CPU memory that the caller fills and then sends to `device`. It is pinned if the device copies asynchronously."""
    if has_async_copies(device):
        return pinned_empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def copy_to_host(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU. If the device copies asynchronously, it is queued on torch's stream: wait before reading it."""
    if not has_async_copies(tensor.device):
        return tensor.cpu()
    return pinned_empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def copy_staged_to_device(staged: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on `device` of memory from `staging_empty`, which must not change afterwards. It is queued on torch's stream.

    The caller may free the memory immediately: torch records that the device copies from pinned memory.
    """
    return staged.to(device, non_blocking=has_async_copies(device))


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on `device` of a CPU tensor, which may change afterwards. It is queued as by `copy_staged_to_device`."""
    if not has_async_copies(device):
        return tensor.to(device)
    return copy_staged_to_device(pinned_empty(tensor.shape, tensor.dtype).copy_(tensor), device)
