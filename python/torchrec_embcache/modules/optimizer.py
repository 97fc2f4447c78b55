"""The optimizer of a module as TorchRec's users hold it: a `KeyedOptimizer`, one param group a table."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer

from torchrec_embcache.exceptions import UnsupportedError
from torchrec_embcache.optimizers import OptimizerSpec, scaler_error

__all__ = ["TableOptimizer"]


class TableOptimizer(FusedOptimizer):
    """Hyperparameters that every backward reads; `step` and `zero_grad` do nothing, the backward updates.

    `state_dict` names the slots as FBGEMM does, `<table>.momentum1` (Adagrad's `sum`, Adam's `exp_avg`) and `<table>.momentum2`
    (`exp_avg_sq`), each with zero rows: the rows' slots are saved with the rows, by `Saver`.
    """

    # Schedulers ask whether the optimizer stepped before they did; here the backward steps.
    _opt_called = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler.step` asks of an optimizer first."""
        raise scaler_error()

    def __init__(self, prefix: str, params: Mapping[str, nn.Parameter], specs: Mapping[str, OptimizerSpec]) -> None:
        """`params[table]`, zero rows by the table's width, for each table of `specs`. Keys are `<prefix><table>.weight`."""
        state: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        for table, spec in specs.items():
            param = params[table]
            self.groups[table] = {"params": [param], **spec.param_group()}
            state[param] = {
                f"{table}.momentum{index + 1}": param.new_empty((0,) if index >= spec.vector_slots else param.shape)
                for index in range(len(spec.slot_names))
            }
        super().__init__(
            {f"{prefix}{table}.weight": params[table] for table in specs}, state, list(self.groups.values())
        )

    def step(self, closure: Any = None) -> None:
        """Nothing: the update is in the backward. A closure, which would run it twice, is refused."""
        if closure is not None:
            raise UnsupportedError(
                f"step(closure={closure!r}): the update runs in the backward; call loss.backward() alone"
            )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: no gradient is kept."""
