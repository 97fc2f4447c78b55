"""Optimizers that update the rows of a batch in the backward itself.

Formulas are FBGEMM's (`fbgemm_gpu/codegen/genscript/optimizers.py`): the gradients of an id that occurs several times are summed
first, then its row is updated once; weight decay touches only rows of the batch. Hyperparameters default to those of `torch.optim`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from .exceptions import ConfigError, MismatchError, UnsupportedError

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FusedOptimizer",
    "OptimizerSpec",
    "RowWiseAdagrad",
    "check_saved_optimizer",
    "gradient_limits",
    "native_hyperparameters",
]


OptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Base of the optimizers: which slots rows carry, and the numbers that training starts with.

    `max_gradient`: each element of the gradient that reaches the lookup's output is clamped to [-max_gradient, max_gradient],
    before it is divided for a mean, weighted, and summed over an id's occurrences; None: not clamped. That is what FBGEMM does with
    `gradient_clipping=True`. See `docs/fused-updates.md` for what other kinds of clipping become here.
    """

    kind: ClassVar[OptimizerKind]
    slot_names: ClassVar[tuple[str, ...]]
    vector_slots: ClassVar[int]  # slots of width D; a further slot is one scalar a row
    lr: float
    weight_decay: float = 0.0
    max_gradient: float | None = None

    def __post_init__(self) -> None:
        check_hyperparameters(type(self).__name__, self.param_group())
        check_max_gradient(type(self).__name__, self.param_group())

    def param_group(self) -> dict[str, Any]:
        """A fresh `param_groups` entry without its params: `lr`, `weight_decay`, and what else is set or the formula has."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.max_gradient is None:
            del values["max_gradient"]
        return values

    @property
    def given_as(self) -> str:
        """What the user called it, such as "torch.optim.Adagrad"; by default the name here, such as "optimizers.Adagrad"."""
        return str(self.__dict__.get("_given_as", f"optimizers.{type(self).__name__}"))

    def call(self, name: str) -> Self:
        """It, known to be what the user called `name`."""
        object.__setattr__(self, "_given_as", name)
        return self

    def scalar_slot(self) -> bool:
        """Whether rows carry one scalar slot."""
        return len(self.slot_names) > self.vector_slots

    def vector_floats(self, dim: int) -> int:
        """Floats of a row's vector part: weights, then vector slots."""
        return dim * (1 + self.vector_slots)

    def record_floats(self, dim: int) -> int:
        """Floats of a row with all its slots."""
        return self.vector_floats(dim) + self.scalar_slot()


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    """`w -= lr * (g + weight_decay * w)`."""

    kind: ClassVar[OptimizerKind] = "sgd"
    slot_names: ClassVar[tuple[str, ...]] = ()
    vector_slots: ClassVar[int] = 0
    lr: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Adagrad(OptimizerSpec):
    """`g += weight_decay * w; sum += g * g; w -= lr * g / (sqrt(sum) + eps)`; slot `sum` [N, D]."""

    kind: ClassVar[OptimizerKind] = "adagrad"
    slot_names: ClassVar[tuple[str, ...]] = ("sum",)
    vector_slots: ClassVar[int] = 1
    lr: float = 1e-2
    eps: float = 1e-10


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(OptimizerSpec):
    """`g += weight_decay * w; sum += mean(g * g); w -= lr * g / (sqrt(sum) + eps)`; slot `sum` [N], one number a row."""

    kind: ClassVar[OptimizerKind] = "rowwise_adagrad"
    slot_names: ClassVar[tuple[str, ...]] = ("sum",)
    vector_slots: ClassVar[int] = 0
    lr: float = 1e-2
    eps: float = 1e-10


@dataclass(frozen=True, kw_only=True)
class Adam(OptimizerSpec):
    """Adam with L2 weight decay (added to the gradient), bias correction by the table's step; slots `exp_avg`, `exp_avg_sq` [N, D].

    As `torch.optim.SparseAdam`, rows outside the batch do not move and their moments do not decay.
    """

    kind: ClassVar[OptimizerKind] = "adam"
    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    vector_slots: ClassVar[int] = 2
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerSpec):
    """Adam with decoupled weight decay, `w -= lr * weight_decay * w`; slots `exp_avg`, `exp_avg_sq` [N, D]."""

    kind: ClassVar[OptimizerKind] = "adamw"
    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    vector_slots: ClassVar[int] = 2
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


# What users may have called the optimizer of which a checkpoint knows the formula alone.
_SAVED_NAMES = {
    "sgd": "SGD (or no optimizer)",
    "adagrad": "optimizers.Adagrad (torch's and TorchRec's Adagrad)",
    "rowwise_adagrad": "optimizers.RowWiseAdagrad (torchrec.optim.RowWiseAdagrad)",
    "adam": "optimizers.Adam",
    "adamw": "optimizers.AdamW (TorchRec's and FBGEMM's Adam too)",
}


def check_saved_optimizer(table: str, optimizer: OptimizerSpec | None, saved: str) -> None:
    """`MismatchError` unless rows with the slots of the kind `saved` fit `table`, which has `optimizer`."""
    if (optimizer.kind if optimizer is not None else SGD.kind) == saved:
        return
    mine = f"the optimizer {optimizer.given_as}" if optimizer is not None else "no optimizer"
    raise MismatchError(
        f"table {table} has {mine}, and in the checkpoint rows have the slots of {_SAVED_NAMES.get(saved, saved)}: give it that "
        "optimizer to train on; to evaluate, or to fine-tune with another, load with slots=False, which takes the weights and "
        "starts slots anew"
    )


def check_hyperparameters(owner: str, group: Mapping[str, Any]) -> tuple[float, float, float, float, float]:
    """`(lr, eps, beta1, beta2, weight_decay)` of a `param_groups` entry, 0 where it has none; `ConfigError` names `owner`."""

    def number(field: str, value: Any, below: float = math.inf) -> float:
        try:
            result = float(value)
        except (TypeError, ValueError):
            result = math.nan
        if isinstance(value, str | bool) or not 0 <= result < below:
            bound = "a finite number of 0 or more" if below == math.inf else "a number from 0 to below 1"
            raise ConfigError(f"{owner}.{field}={value!r} is out of range: give {bound}")
        return result

    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"{owner}.betas={betas!r} is not a pair: give (beta1, beta2)")
    return (
        number("lr", group.get("lr")),
        number("eps", group.get("eps", 0.0)),
        number("betas[0]", betas[0], 1.0),
        number("betas[1]", betas[1], 1.0),
        number("weight_decay", group.get("weight_decay", 0.0)),
    )


def check_max_gradient(owner: str, group: Mapping[str, Any]) -> float | None:
    """`max_gradient` of a `param_groups` entry, None where it has none; `ConfigError` names `owner`."""
    limit = group.get("max_gradient")
    if limit is None:
        return None
    try:
        number = float(limit)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(limit, str | bool) or not 0 < number < math.inf:
        raise ConfigError(
            f"{owner}.max_gradient={limit!r} is out of range: give a finite number above 0, or None to clamp nothing"
        )
    return number


def gradient_limits(groups: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """`max_gradient` of each `param_groups` entry, one a table."""
    return [check_max_gradient(f"param_groups[{index}]", group) for index, group in enumerate(groups)]


def native_hyperparameters(groups: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """`param_groups` entries, one a table, as the core takes them: float64 [T, 5], lr, eps, beta1, beta2, weight_decay."""
    rows = [check_hyperparameters(f"param_groups[{index}]", group) for index, group in enumerate(groups)]
    return np.array(rows, np.float64).reshape(len(rows), 5)


def scaler_error() -> UnsupportedError:
    """What `GradScaler.step` of an optimizer that is fused into the backward raises."""
    return UnsupportedError(
        "GradScaler.step(): the rows were updated in the backward, with gradients that were still scaled. Train in bfloat16, which "
        "needs no scaler, or divide at the lookup's output: out.register_hook(lambda grad: grad / scaler.get_scale()); see "
        "docs/fused-updates.md"
    )


class FusedOptimizer(torch.optim.Optimizer):
    """What a user holds of an optimizer that runs in the backward: its `param_groups`, which every backward reads.

    `step()` and `zero_grad()` do nothing. Learning-rate schedulers of torch work on it. Its `state_dict` holds the groups
    alone: the slots are the rows'.
    """

    # Schedulers ask whether the optimizer stepped before they did; here the backward steps.
    _opt_called = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler.step` asks of an optimizer first."""
        raise scaler_error()

    def __init__(self, params: Sequence[torch.nn.Parameter], specs: Sequence[OptimizerSpec]) -> None:
        """`params[i]`, the zero-row parameter of a table, is the sole param of group i, whose numbers come from `specs[i]`."""
        groups = [{"params": [param], **spec.param_group()} for param, spec in zip(params, specs, strict=True)]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the update is in the backward. A closure, which would run it twice, is refused."""
        if closure is not None:
            raise UnsupportedError(
                f"step(closure={closure!r}): the update runs in the backward; call loss.backward() alone"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: no gradient is kept."""
