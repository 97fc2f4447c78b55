"""Tracing by `torch.fx`: a module with tables is recorded as one call."""

from typing import Any

from torch import fx, nn

__all__ = ["trace_as_call"]


def trace_as_call(module: nn.Module, *arguments: Any) -> fx.Proxy | None:
    """Records the call of `module` as one node, if called by a tracer of `torch.fx`. Returns None for tensor arguments.

    A tracer records operations on tensors. A lookup has none, because its rows come from the native extension.
    """
    tracer = next((argument.tracer for argument in arguments if isinstance(argument, fx.Proxy)), None)
    if tracer is None:
        return None
    path = tracer.path_of_module(module)  # type: ignore[attr-defined]
    if path:
        return tracer.create_proxy("call_module", path, arguments, {})
    # The traced module itself has no path.
    return tracer.create_proxy("call_function", module.forward, arguments, {})
