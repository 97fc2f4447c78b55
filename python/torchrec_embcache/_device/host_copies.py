"""Copies a batch's tensors to RAM, where ids are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .pinned import copy_to_host, has_async_copies
from .streams import current_stream, on_stream

__all__ = ["host_copies"]


def host_copies(tensors: Sequence[Tensor], arrival_stream: Any = None) -> list[Tensor]:
    """Returns the tensors on the CPU. CPU tensors are not copied.

    `arrival_stream` is the device stream on which the tensors arrived; None: the caller's stream. The copies run on that stream, so
    that the CPU waits for the work queued there before this call, and not for other streams.
    """
    device = tensors[0].device
    if not has_async_copies(device) or any(tensor.device != device for tensor in tensors):
        return [tensor.detach().cpu() for tensor in tensors]
    with on_stream(arrival_stream, device), torch.no_grad():
        copies = [copy_to_host(tensor) for tensor in tensors]
        stream = current_stream(device)
        if stream is not None:
            stream.record_event().synchronize()
    return copies
