"""What happens to a gradient before it updates rows, a check that it is to update them, and errors of a backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .exceptions import UnsupportedError

__all__ = ["anchor_gradient", "check_backward_updates_rows", "clamp_gradient", "raise_at_end_of_backward"]


def clamp_gradient(grad: Tensor, limits: Sequence[float | None], sizes: Sequence[int], dim: int) -> Tensor:
    """`grad` with each of its parts, which have `sizes` along `dim`, clamped to [-limit, limit]. None leaves a part as it is.

    Each element is clamped by itself, so that the bits do not depend on threads, instruction sets or kernels. Without limits this
    costs nothing.
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
    """`UnsupportedError` where a backward is asked for some gradients only, by `torch.autograd.grad` or `backward(inputs=...)`.

    `anchor` is the autograd node that accumulates the gradient of the lookup's anchor. `loss.backward()` runs the nodes of all
    leaves, this one included.
    """
    try:
        wanted = torch._C._will_engine_execute_node(anchor)  # noqa: SLF001 - as torch's own hooks do
    except RuntimeError:  # the gradient of the anchor itself was asked for
        wanted = False
    if not wanted:
        raise UnsupportedError(
            "torch.autograd.grad(), or backward(inputs=...): it asks for some gradients, and this backward would update the rows. "
            "Call loss.backward() to train, or put the module into eval() for gradients alone"
        )


def anchor_gradient(anchor: Any) -> Tensor | None:
    """The gradient that a lookup's anchor gets: zeros where hooks take it, such as those of `wandb.watch`, else None.

    Every hook is called, with None too. `grad` of the anchor is None after the backward, so that no dense optimizer sees it.
    `anchor` is as in `check_backward_updates_rows`.
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
    """Raise `error` when the backward that is under way is through."""
    engine = _autograd_engine()
    pending = [error]

    def fail() -> None:
        raise pending.pop()

    # Callbacks run in the order in which they are added, and those that a callback adds run last. So this one runs after DDP's,
    # which DDP adds when its last gradient is ready.
    engine.queue_callback(lambda: engine.queue_callback(fail))
