"""Gradient clamping, a check that a backward updates rows, and errors raised in a backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .exceptions import UnsupportedError

__all__ = ["anchor_gradient", "check_backward_updates_rows", "clamp_gradient", "raise_at_end_of_backward"]


def clamp_gradient(grad: Tensor, limits: Sequence[float | None], sizes: Sequence[int], dim: int) -> Tensor:
    """Returns `grad` with each part, of `sizes` along `dim`, clamped to [-limit, limit]. None leaves a part unchanged.

    The clamp is elementwise, so that the result is bitwise independent of threads, instruction sets and kernels. Without limits it
    is free.
    """
    if all(limit is None for limit in limits):
        return grad
    if len(set(limits)) == 1:
        return _clamp(grad, limits[0])
    parts = torch.split(grad, list(sizes), dim)
    return torch.cat([_clamp(part, limit) for part, limit in zip(parts, limits, strict=True)], dim)


def _clamp(grad: Tensor, limit: float | None) -> Tensor:
    return grad if limit is None else grad.clamp(-limit, limit)


def check_backward_updates_rows(anchor: Any) -> None:
    """Raises `UnsupportedError` for a partial backward, by `torch.autograd.grad` or `backward(inputs=...)`.

    `anchor` is the autograd node that accumulates the gradient of the lookup's anchor. `loss.backward()` runs the nodes of all
    leaves, including this one.
    """
    try:
        wanted = torch._C._will_engine_execute_node(anchor)  # noqa: SLF001 - as torch's own hooks do
    except RuntimeError:  # the gradient of the anchor itself was requested
        wanted = False
    if not wanted:
        raise UnsupportedError(
            "torch.autograd.grad(), or backward(inputs=...): it asks for some gradients, and this backward would update the rows. "
            "Call loss.backward() to train, or put the module into eval() for gradients alone"
        )


def anchor_gradient(anchor: Any) -> Tensor | None:
    """Returns the gradient of a lookup's anchor: zeros if it has hooks, such as those of `wandb.watch`, else None.

    Every hook is called, also with None. `grad` of the anchor is None after the backward, so that dense optimizers ignore it.
    `anchor` is the node of `check_backward_updates_rows`.
    """
    variable: Tensor = anchor.variable
    if not variable._backward_hooks:  # noqa: SLF001 - torch offers no other way to ask
        return None

    def forget() -> None:
        variable.grad = None

    _autograd_engine().queue_callback(forget)
    return torch.zeros_like(variable)


def _autograd_engine() -> Any:
    return torch.autograd.Variable._execution_engine  # noqa: SLF001 - torch's own users of it, DDP and FSDP, say so too


def raise_at_end_of_backward(error: Exception) -> None:
    """Raises `error` when the running backward has finished."""
    engine = _autograd_engine()
    pending = [error]

    def fail() -> None:
        raise pending.pop()

    # Callbacks run in the order in which they are added; callbacks added by a callback run last. This one therefore runs after
    # DDP's, which DDP adds when its last gradient is ready.
    engine.queue_callback(lambda: engine.queue_callback(fail))
