"""The optimizer of a module, in TorchRec's form: a `KeyedOptimizer` with one param group per table."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer

from torchrec_embcache.config import check_int
from torchrec_embcache.exceptions import UnsupportedError
from torchrec_embcache.optimizers import OptimizerSpec, common_hyperparameters, grad_scaler_error
from torchrec_embcache.table.cache_table import CacheTable

__all__ = ["TableOptimizer"]


class TableOptimizer(FusedOptimizer):
    """The hyperparameters that every backward reads. `step` and `zero_grad` do nothing, because the backward updates.

    `state_dict` names the slots as FBGEMM does: `<table>.momentum1` is Adagrad's `sum` or Adam's `exp_avg`, and `<table>.momentum2`
    is `exp_avg_sq`. Each has zero rows, because `Saver` saves the slots with the rows.
    """

    # Schedulers check that the optimizer stepped before them. Here the backward steps.
    _opt_called = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raises `UnsupportedError`. `torch.amp.GradScaler.step` reads this attribute first."""
        raise grad_scaler_error()

    def __init__(
        self,
        prefix: str,
        params: Mapping[str, nn.Parameter],
        specs: Mapping[str, OptimizerSpec],
        tables: Sequence[CacheTable],
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
        """Sets the step of each table, used for bias correction by Adam variants and by eviction rules; an integer, 0 or more.

        A load restores it. If a table has another step, the next save is full. Raises `ConfigError` for an invalid `step`, and
        `StateError` if it is less than the table's and batches in flight have rows that a sweep deferred.
        """
        check_int("step", step, 0, (1 << 63) - 1)
        for table in self._tables:
            table.open()
            if table._native_table.step() != step:
                table._native_table.set_step(step)

    def step(self, closure: Any = None) -> None:
        """Does nothing, because the backward updates. Raises `UnsupportedError` for a closure: it would run the backward again."""
        if closure is not None:
            raise UnsupportedError(
                f"step(closure={closure!r}): the update runs in the backward; call loss.backward() alone"
            )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing, because no gradient is stored."""
