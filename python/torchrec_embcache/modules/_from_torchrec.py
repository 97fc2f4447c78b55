"""Imports the rows of a TorchRec module, with the state of the optimizer that trained them.

Shapes: N rows of a table, D its width.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torchrec.optim.fused import EmptyFusedOptimizer

from torchrec_embcache.exceptions import ConfigError, InputError, UnsupportedError
from torchrec_embcache.table.cache_table import CacheTable

__all__ = ["TrainedState", "find_trained_state", "import_torchrec"]

#: Hyperparameters of a param group that a table's optimizer adopts.
_KNOWN_HYPERPARAMETERS = frozenset({"lr", "eps", "betas", "weight_decay"})
#: Number of rows that are copied at a time.
_IMPORT_ROWS = 65_536


@dataclass(frozen=True)
class TrainedState:
    """The optimizer that trained a weight of TorchRec's: its class, hyperparameters, and state of that weight."""

    kind: type[torch.optim.Optimizer]
    hyperparameters: Mapping[str, Any]
    state: Mapping[str, Any]

    def annotate(self, param: nn.Parameter) -> None:
        """Records the optimizer on `param`, the zero-row weight of a table, like `apply_optimizer_in_backward`."""
        param.__dict__["_optimizer_classes"] = [self.kind]
        param.__dict__["_optimizer_kwargs"] = [dict(self.hyperparameters)]
        param.__dict__["_in_backward_optimizers"] = [EmptyFusedOptimizer()]

    def step(self) -> int:
        """Returns the number of training steps of the weight."""
        step = self.state.get("step", 0)
        return int(step.item() if isinstance(step, Tensor) else step)

    def slot(self, name: str, weight: Tensor, width: int) -> Tensor | None:
        """Returns the state `name` as rows [N, D] of `width` D, or [N] if `width` is 0. None if the weight was never trained."""
        if not self.state:
            return None
        values = self.state.get(name)
        rows = len(weight)
        fits = ((rows, width),) if width else ((rows,), (rows, 1))
        if not isinstance(values, Tensor) or tuple(values.shape) not in fits:
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"the state {name!r} of {self.kind.__name__} is {found}: expected a tensor {list(fits[0])}"
            )
        return values.detach().reshape(rows, width) if width else values.detach().reshape(rows)


def find_trained_state(
    weight: nn.Parameter, optimizer: torch.optim.Optimizer | Literal["in_backward"] | None
) -> TrainedState | None:
    """Returns the optimizer state of `weight`: of `optimizer`, or with "in_backward" that of `apply_optimizer_in_backward`.

    Returns None for None. Raises `ConfigError` if `optimizer` is not an optimizer, or does not have the weight.
    """
    if optimizer is None:
        return None
    if optimizer == "in_backward":
        found = getattr(weight, "_in_backward_optimizers", [])
        if len(found) != 1:
            raise ConfigError(
                f'optimizer="in_backward" and the weight has {len(found)} of them: call apply_optimizer_in_backward once on the '
                "parameters of TorchRec's module, or give the optimizer that has them"
            )
        (optimizer,) = found
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f'optimizer={optimizer!r}: give the torch optimizer that trained the rows, "in_backward", or None'
        )
    for group in optimizer.param_groups:
        if any(param is weight for param in group["params"]):
            return TrainedState(
                type(optimizer), _hyperparameters(type(optimizer), group), optimizer.state.get(weight, {})
            )
    raise ConfigError(
        f"optimizer={type(optimizer).__name__} does not have the weights of TorchRec's module: give the one that has"
    )


def _hyperparameters(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a param group that a table's optimizer adopts, and all others with non-default values."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    numbers = {}
    for name, value in group.items():
        if name in _KNOWN_HYPERPARAMETERS:
            numbers[name] = float(value) if isinstance(value, Tensor) else value
        elif name not in ("params", "initial_lr") and value != defaults.get(name):
            numbers[name] = value
    # In a backward, TorchRec's name for the formula of torch's Adam is that of AdamW.
    if kind is torch.optim.Adam and numbers["weight_decay"] and not group.get("decoupled_weight_decay"):
        numbers["weight_decay_mode"] = WeightDecayMode.L2
    return numbers


def import_torchrec(table: CacheTable, weight: Tensor, trained_state: TrainedState | None) -> None:
    """Imports rows 0 to N - 1 of a table from TorchRec's `weight` [N, D] in chunks, with the slots in `trained_state`."""
    if weight.dtype != torch.float32:
        raise UnsupportedError(f"table {table.name!r} has {weight.dtype} weights: rows are float32, convert it first")
    spec = table._spec
    slots: dict[str, Tensor] = {}
    if trained_state is not None:
        for number, name in enumerate(spec.slot_names):
            values = trained_state.slot(name, weight, table.dim if number < spec.vector_slots else 0)
            if values is not None:
                slots[name] = values
    for first in range(0, len(weight), _IMPORT_ROWS):
        some = slice(first, first + _IMPORT_ROWS)
        rows = weight[some]
        parts = {name: values[some] for name, values in slots.items()} if slots else None
        table.import_rows(torch.arange(first, first + len(rows), dtype=torch.int64, device="cpu"), rows, parts)
    if trained_state is not None:
        table._native_table.set_step(trained_state.step())
