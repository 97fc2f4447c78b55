"""Pinned memory of the CPU, which a device copies from and to by itself, and the copies through it."""

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
    """Whether `device` copies from and to pinned memory on its streams, while the CPU goes on."""
    return device.type == "cuda"


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Pinned memory. Torch keeps a pool of it for the process, and gives none away before the copies are done that it knows of."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def staging_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the CPU that the caller fills and then sends to `device`. It is pinned where the device copies by itself."""
    if has_async_copies(device):
        return pinned_empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU. Where the device copies by itself, it is queued on torch's stream: wait for that before you read it."""
    if not has_async_copies(tensor.device):
        return tensor.cpu()
    return pinned_empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def copy_staged_to_device(staged: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of memory from `staging_empty`, which must not change any more. It is queued on torch's stream if there is
    one.

    The caller may drop the memory at once: of pinned memory torch notes that the device copies from it.
    """
    return staged.to(device, non_blocking=has_async_copies(device))


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of a tensor on the CPU, which may change afterwards. It is queued as by `copy_staged_to_device`."""
    if not has_async_copies(device):
        return tensor.to(device)
    return copy_staged_to_device(pinned_empty(tensor.shape, tensor.dtype).copy_(tensor), device)
