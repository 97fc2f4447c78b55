"""What any tracer of `torch.fx` sees of a module with tables: one call."""

from typing import Any

from torch import fx, nn

__all__ = ["trace_as_call"]


def trace_as_call(module: nn.Module, *arguments: Any) -> fx.Proxy | None:
    """The call of `module` as one node of a tracer's graph, where a tracer of `torch.fx` runs it. None where tensors are given.

    A tracer records operations on tensors. A lookup has none, because its rows come from the core.
    """
    tracer = next((argument.tracer for argument in arguments if isinstance(argument, fx.Proxy)), None)
    if tracer is None:
        return None
    path = tracer.path_of_module(module)  # type: ignore[attr-defined]
    if path:
        return tracer.create_proxy("call_module", path, arguments, {})
    # The module that is traced has no path, because it is not inside itself.
    return tracer.create_proxy("call_function", module.forward, arguments, {})
