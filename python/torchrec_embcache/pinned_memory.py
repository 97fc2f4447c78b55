"""Pinned memory of the CPU, which a device copies from and to by itself, and the copies through it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["copies_by_itself", "pinned", "queued_to_device", "to_device", "to_fill", "to_host"]


def copies_by_itself(device: torch.device) -> bool:
    """Whether `device` copies from and to pinned memory on its streams, while the CPU goes on."""
    return device.type == "cuda"


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Pinned memory. Torch keeps a pool of it for the process, and gives none away before the copies are done that it knows of."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def to_fill(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the CPU that the caller fills and then sends to `device`. It is pinned where the device copies by itself."""
    if copies_by_itself(device):
        return pinned(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU. Where the device copies by itself, it is queued on torch's stream: wait for that before you read it."""
    if not copies_by_itself(tensor.device):
        return tensor.cpu()
    return pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def queued_to_device(filled: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of memory from `to_fill`, which must not change any more. It is queued on torch's stream if there is one.

    The caller may drop the memory at once: of pinned memory torch notes that the device copies from it.
    """
    return filled.to(device, non_blocking=copies_by_itself(device))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of a tensor on the CPU, which may change afterwards. It is queued as by `queued_to_device`."""
    if not copies_by_itself(device):
        return tensor.to(device)
    return queued_to_device(pinned(tensor.shape, tensor.dtype).copy_(tensor), device)
