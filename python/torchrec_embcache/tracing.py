"""What `torch.fx` sees of a module with tables: one call, whichever tracer it is."""

from typing import Any

from torch import fx, nn

__all__ = ["as_one_call"]


def as_one_call(module: nn.Module, *arguments: Any) -> fx.Proxy | None:
    """Where a tracer of `torch.fx` runs `module`'s forward: the call as one node of its graph. None where real tensors are given.

    A tracer records the operations on tensors, and a lookup has none: its rows come from the core.
    """
    tracer = next((argument.tracer for argument in arguments if isinstance(argument, fx.Proxy)), None)
    if tracer is None:
        return None
    path = tracer.path_of_module(module)  # type: ignore[attr-defined]
    if path:
        return tracer.create_proxy("call_module", path, arguments, {})
    # The traced module itself has no path within itself.
    return tracer.create_proxy("call_function", module.forward, arguments, {})
