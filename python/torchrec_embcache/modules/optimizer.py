"""The optimizer of a module as users of TorchRec hold it: a `KeyedOptimizer` with a param group for each table."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer

from torchrec_embcache.config import check_int
from torchrec_embcache.exceptions import UnsupportedError
from torchrec_embcache.optimizers import OptimizerSpec, common_hyperparameters, grad_scaler_error
from torchrec_embcache.table_shard import TableShard

__all__ = ["TableOptimizer"]


class TableOptimizer(FusedOptimizer):
    """The hyperparameters that every backward reads. `step` and `zero_grad` do nothing, because the backward updates.

    `state_dict` names the slots as FBGEMM does: `<table>.momentum1` is Adagrad's `sum` or Adam's `exp_avg`, and `<table>.momentum2`
    is `exp_avg_sq`. Each has zero rows, because `Saver` saves the slots with the rows.
    """

    # Schedulers ask whether the optimizer stepped before them. Here the backward steps.
    _opt_called = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """`torch.amp.GradScaler.step` asks an optimizer for this first. It raises `UnsupportedError`."""
        raise grad_scaler_error()

    def __init__(
        self,
        prefix: str,
        params: Mapping[str, nn.Parameter],
        specs: Mapping[str, OptimizerSpec],
        tables: Sequence[TableShard],
    ) -> None:
        """`params` has the zero-row parameter [0, D] of each table of `specs`. The keys are `<prefix><table>.weight`.

        `tables`: the tables of `specs`, whose steps `set_optimizer_step` sets.
        """
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
        self.defaults.update(common_hyperparameters(list(self.groups.values())))
        self._tables = list(tables)

    def set_optimizer_step(self, step: int) -> None:
        """Set the step of each table, which Adam and its kin correct by and which eviction rules count; an integer, 0 or more.

        A load restores it. Where a table has another step, the next save is full. Raises `ConfigError` for another `step`, and
        `StateError` where it is less than the table's, and batches in flight have rows that a sweep deferred.
        """
        check_int("step", step, 0, (1 << 63) - 1)
        for table in self._tables:
            table.open()
            if table.native.step() != step:
                table.native.set_step(step)

    def step(self, closure: Any = None) -> None:
        """Do nothing, because the backward updates. `UnsupportedError` for a closure, which would run the backward twice."""
        if closure is not None:
            raise UnsupportedError(
                f"step(closure={closure!r}): the update runs in the backward; call loss.backward() alone"
            )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing, because no gradient is kept."""
