"""Optimizers that update the rows of a batch in the backward itself.

The formulas are FBGEMM's (`fbgemm_gpu/codegen/genscript/optimizers.py`) if it has the optimizer. The gradients of an id that occurs
several times are summed first; then its row is updated once. Weight decay applies only to the rows of the batch. The default
hyperparameters are those of `torch.optim` if it has the optimizer.

In the formulas `w` is a row's weights [D], `g` the sum of its gradients [D], and D the table's width. N rows have slots [N, D] or
[N].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ._hyperparameters import Hyperparameters, check_hyperparameters, check_max_gradient
from .exceptions import MismatchError, UnsupportedError

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FusedOptimizer",
    "OptimizerSpec",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "check_saved_optimizer",
    "gradient_limits",
    "native_hyperparameters",
]


OptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "ftrl", "lamb"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Base class of the optimizers: the slots of rows and the initial hyperparameters.

    Args:
        lr: learning rate, 0 or more.
        weight_decay: 0 or more.
        max_gradient: clamps each element of the gradient of the lookup's output to [-max_gradient, max_gradient], before it is
            divided for a mean, weighted, and summed over the occurrences of an id. FBGEMM does this with `gradient_clipping=True`.
            None: no clamping. `docs/fused-updates.md` has the other kinds of clipping.

    Raises `ConfigError` for a value out of range.

    Examples:
        >>> from torchrec_embcache import optimizers
        >>> adam = optimizers.Adam(lr=0.01, max_gradient=1.0)
        >>> adam.slot_names, adam.record_floats(64)  # a row of width 64 with its slots
        (('exp_avg', 'exp_avg_sq'), 192)
    """

    kind: ClassVar[OptimizerKind]
    slot_names: ClassVar[tuple[str, ...]]
    vector_slots: ClassVar[int]  # number of slots of width D; a further slot is one float per row
    lr: float
    weight_decay: float = 0.0
    max_gradient: float | None = None

    def __post_init__(self) -> None:
        check_hyperparameters(type(self).__name__, self.param_group())
        check_max_gradient(type(self).__name__, self.param_group())

    def param_group(self) -> dict[str, Any]:
        """Returns a new entry for `param_groups`, without its params: `lr`, `weight_decay`, and the other hyperparameters."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.max_gradient is None:
            del values["max_gradient"]
        return values

    @property
    def display_name(self) -> str:
        """The user's name for it, such as "torch.optim.Adagrad". By default its name here, such as "optimizers.Adagrad"."""
        return str(self.__dict__.get("_given_as", f"optimizers.{type(self).__name__}"))

    def with_display_name(self, name: str) -> Self:
        """Sets the user's name for this optimizer to `name`. Returns self."""
        object.__setattr__(self, "_given_as", name)
        return self

    def scalar_slot(self) -> bool:
        """True if rows have a slot of one float."""
        return len(self.slot_names) > self.vector_slots

    def vector_floats(self, dim: int) -> int:
        """Returns the number of floats in a row's vector part: D for the weights, and D for each vector slot."""
        return dim * (1 + self.vector_slots)

    def record_floats(self, dim: int) -> int:
        """Returns the number of floats in a row with all its slots."""
        return self.vector_floats(dim) + self.scalar_slot()


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    """`w -= lr * (g + weight_decay * w)`; no slots.


    Examples:
        >>> from torchrec_embcache import optimizers
        >>> optimizers.SGD(lr=0.1).param_group()
        {'lr': 0.1, 'weight_decay': 0.0}
    """

    kind: ClassVar[OptimizerKind] = "sgd"
    slot_names: ClassVar[tuple[str, ...]] = ()
    vector_slots: ClassVar[int] = 0
    lr: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Adagrad(OptimizerSpec):
    """`g += weight_decay * w; sum += g * g; w -= lr * g / (sqrt(sum) + eps)`, with the slot `sum` [N, D].

    `eps`: 0 or more.

    Examples:
        >>> from torchrec_embcache import optimizers
        >>> optimizers.Adagrad(lr=0.02).param_group()
        {'lr': 0.02, 'weight_decay': 0.0, 'eps': 1e-10}
    """

    kind: ClassVar[OptimizerKind] = "adagrad"
    slot_names: ClassVar[tuple[str, ...]] = ("sum",)
    vector_slots: ClassVar[int] = 1
    lr: float = 1e-2
    eps: float = 1e-10


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(OptimizerSpec):
    """`g += weight_decay * w; sum += mean(g * g); w -= lr * g / (sqrt(sum) + eps)`, with the slot `sum` [N].

    It stores one float per row. `eps`: 0 or more.

    Examples:
        >>> from torchrec_embcache import optimizers
        >>> optimizers.RowWiseAdagrad(lr=0.02).param_group()
        {'lr': 0.02, 'weight_decay': 0.0, 'eps': 1e-10}
    """

    kind: ClassVar[OptimizerKind] = "rowwise_adagrad"
    slot_names: ClassVar[tuple[str, ...]] = ("sum",)
    vector_slots: ClassVar[int] = 0
    lr: float = 1e-2
    eps: float = 1e-10


@dataclass(frozen=True, kw_only=True)
class _MomentsOptimizer(OptimizerSpec):
    """An optimizer with moving averages of the gradient and of its square."""

    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    vector_slots: ClassVar[int] = 2
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Adam(_MomentsOptimizer):
    """Adam with L2 weight decay, which is added to the gradient. Its slots are `exp_avg` and `exp_avg_sq`, [N, D] each.

    The bias correction uses the table's step. As with `torch.optim.SparseAdam`, rows outside the batch are not updated, and their
    moments do not decay. `betas`: two numbers from 0 to below 1. `eps`: 0 or more.

    Examples:
        >>> from torchrec_embcache import optimizers
        >>> optimizers.Adam(lr=1e-3).param_group()
        {'lr': 0.001, 'weight_decay': 0.0, 'betas': (0.9, 0.999), 'eps': 1e-08}
    """

    kind: ClassVar[OptimizerKind] = "adam"


@dataclass(frozen=True, kw_only=True)
class AdamW(_MomentsOptimizer):
    """Adam with decoupled weight decay, `w -= lr * weight_decay * w`. Its slots and hyperparameters are those of `Adam`.

    Examples:
        >>> from torchrec_embcache import optimizers
        >>> optimizers.AdamW(weight_decay=0.1).param_group()
        {'lr': 0.001, 'weight_decay': 0.1, 'betas': (0.9, 0.999), 'eps': 1e-08}
    """

    kind: ClassVar[OptimizerKind] = "adamw"
    weight_decay: float = 1e-2


@dataclass(frozen=True, kw_only=True)
class PartialRowWiseAdam(_MomentsOptimizer):
    """`AdamW` with one second moment per row: it stores D + 1 floats per row instead of Adam's 2 D.

    The formula is that of FBGEMM's `PARTIAL_ROWWISE_ADAM`, at the table's step t:
    `m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * mean(g * g);`
    `w -= lr * (m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * w)`.

    Args:
        lr: learning rate, 0 or more.
        betas: b1 and b2, two numbers from 0 to below 1.
        eps: 0 or more.
        weight_decay: 0 or more; decoupled from the gradient, as in FBGEMM.
        max_gradient: see `OptimizerSpec`.

    Its slots are `exp_avg` [N, D], which is m, and `exp_avg_sq` [N], which is v. Raises `ConfigError` for a value out of range.

    Examples:
        >>> from torchrec_embcache import optimizers
        >>> spec = optimizers.PartialRowWiseAdam(lr=1e-3)
        >>> spec.slot_names, spec.record_floats(64)
        (('exp_avg', 'exp_avg_sq'), 129)
    """

    kind: ClassVar[OptimizerKind] = "partial_rowwise_adam"
    vector_slots: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class FTRL(OptimizerSpec):
    """FTRL-Proximal by column. Its L1 regularization makes weights exactly 0 (McMahan et al., KDD 2013).

    The source is "Ad click prediction: a view from the trenches", algorithm 1, whose alpha is `lr`. With `g` of the batch:
    `g += weight_decay * w; sigma = (sqrt(n + g * g) - sqrt(n)) / lr; z += g - sigma * w; n += g * g;`
    `w = -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)`, and `w = 0` if `abs(z) <= l1`. If that divisor is 0 (`beta` and `l2`
    are 0, and all gradients were 0) w is 0, too.

    A new row has the weights w0 of its initializer and z = n = 0. Its first update weighs them against `beta`: without l1, l2 and
    decay it gives `w = (abs(g) * w0 - lr * g) / (beta + abs(g))`. A large `beta` therefore nearly forgets w0, `beta=0` keeps it,
    and a column whose gradient is 0 becomes 0. In the paper new rows are zeros: `initializers.Constant(0.0)`. The same first update
    applies to rows that are imported without slots or loaded with `slots=False`. TensorFlow's `Ftrl` forgets w0 in the same way.

    Keep `lr` constant while a table trains. z represents weights of one learning rate: after `lr` is multiplied by a, the next
    update of a row multiplies its weights by about a. The steps become smaller as n grows.

    Args:
        lr: learning rate, more than 0.
        beta: 0 or more; it bounds the first steps.
        l1: 0 or more; a column is 0 as long as its z is within l1 of 0.
        l2: 0 or more; it draws weights towards 0. It is the paper's: TensorFlow and Keras multiply theirs by 2.
        weight_decay: 0 or more; it is added to the gradient, in addition to l2, and so counts in n.
        max_gradient: see `OptimizerSpec`.

    Its slots are `z` and `n`, [N, D] each. Raises `ConfigError` for a value out of range. TorchRec and FBGEMM have no such
    optimizer, so only modules that take an optimizer of this module support it.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers
        >>> with EmbCacheEmbeddingBag(
        ...     name="item", embedding_dim=2, mode="sum", tiers=TierBudgets(host_bytes="1MiB"),
        ...     initializer=initializers.Constant(0.0), optimizer=optimizers.FTRL(lr=0.5, l1=1.0),
        ... ) as bag:
        ...     (bag(torch.tensor([[7]])) * torch.tensor([[3.0, 1.0]])).sum().backward()
        ...     bag.read_rows(torch.tensor([7])).weights  # -(3 - 1) / ((1 + 3) / 0.5), and 0 because 1 is not more than l1
        tensor([[-0.2500,  0.0000]])
    """

    kind: ClassVar[OptimizerKind] = "ftrl"
    slot_names: ClassVar[tuple[str, ...]] = ("z", "n")
    vector_slots: ClassVar[int] = 2
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LAMB(_MomentsOptimizer):
    """LAMB by row: a step has the direction of `AdamW`'s, and the length lr times the norm of the row's weights.

    LAMB is by You et al., "Large batch optimization for deep learning", ICLR 2020.
    The formula is that of FBGEMM's `LAMB`, with the norms of a row, at the table's step t:
    `m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g * g;`
    `r = m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * w; w -= lr * norm(w) / norm(r) * r`.
    If a norm is 0, their ratio counts as 1, as in the code of LAMB's authors. FBGEMM differs: a row of zeros is never updated, and
    a row without gradient and decay becomes NaN.

    Args:
        lr: learning rate, 0 or more; an update changes a row by this fraction of its norm.
        betas: b1 and b2, two numbers from 0 to below 1.
        eps: 0 or more.
        weight_decay: 0 or more; it is added to the direction, not to the gradient, and counts in its norm.
        max_gradient: see `OptimizerSpec`.

    Its slots are `exp_avg`, which is m, and `exp_avg_sq`, which is v, [N, D] each. Raises `ConfigError` for a value out of range.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers
        >>> with EmbCacheEmbeddingBag(
        ...     name="item", embedding_dim=2, mode="sum", tiers=TierBudgets(host_bytes="1MiB"),
        ...     initializer=initializers.Constant(2.0), optimizer=optimizers.LAMB(lr=0.25),
        ... ) as bag:
        ...     (bag(torch.tensor([[7]])) * torch.tensor([[3.0, -1.0]])).sum().backward()
        ...     bag.read_rows(torch.tensor([7])).weights  # r is (1, -1) at the first step, and the norms' ratio is 2
        tensor([[1.5000, 2.5000]])
    """

    kind: ClassVar[OptimizerKind] = "lamb"


#: All optimizers by kind.
BY_KIND: dict[str, type[OptimizerSpec]] = {
    spec.kind: spec for spec in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, PartialRowWiseAdam, FTRL, LAMB)
}
# A checkpoint identifies only the formula of its optimizer. These are the names that a user may know it by.
_SAVED_NAMES = {
    "sgd": "SGD (or no optimizer)",
    "adagrad": "optimizers.Adagrad (torch's and TorchRec's Adagrad)",
    "rowwise_adagrad": "optimizers.RowWiseAdagrad (torchrec.optim.RowWiseAdagrad)",
    "adam": "optimizers.Adam (TorchRec's and FBGEMM's Adam with weight_decay_mode=WeightDecayMode.L2)",
    "adamw": "optimizers.AdamW (TorchRec's and FBGEMM's Adam too)",
    "partial_rowwise_adam": "optimizers.PartialRowWiseAdam (torchrec.optim.PartialRowWiseAdam)",
    "ftrl": "optimizers.FTRL",
    "lamb": "optimizers.LAMB (torchrec.optim.LAMB)",
}


def check_one_optimizer(table: str, param: torch.nn.Parameter | None, *, other_optimizers: int = 0) -> None:
    """Raises `UnsupportedError` if the weight `param` of `table` has several optimizers, of which one would be ignored.

    Counts those of `apply_optimizer_in_backward`, and `other_optimizers` that the table has from other settings.
    """
    count = other_optimizers + len(getattr(param, "_optimizer_classes", ()))
    if other_optimizers and count > other_optimizers:
        raise UnsupportedError(
            f"table {table!r} has {count} optimizers in backward, of which one is that of optimizer=: leave its weight out of "
            "apply_optimizer_in_backward"
        )
    if count > 1:
        raise UnsupportedError(
            f"table {table!r} has {count} optimizers in backward: apply one, before the first step and before sharding. To change "
            "its numbers, write into the optimizer's param_groups; for another optimizer, make the module again"
        )


def check_saved_optimizer(table: str, optimizer: OptimizerSpec | None, saved: str) -> None:
    """Raises `MismatchError` unless rows with slots of the optimizer kind `saved` fit the table, which has `optimizer`."""
    if (optimizer.kind if optimizer is not None else SGD.kind) == saved:
        return
    mine = f"the optimizer {optimizer.display_name}" if optimizer is not None else "no optimizer"
    raise MismatchError(
        f"table {table} has {mine}, and in the checkpoint rows have the slots of {_SAVED_NAMES.get(saved, saved)}: give it that "
        "optimizer to train on; to evaluate, or to fine-tune with another, load with slots=False, which takes the weights and "
        "resets the slots"
    )


def gradient_limits(groups: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Returns `max_gradient` of each `param_groups` entry. There is one entry per table."""
    return [check_max_gradient(f"param_groups[{index}]", group) for index, group in enumerate(groups)]


def native_hyperparameters(groups: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Returns the native form of the `param_groups` of T tables: float64 [T, 8], whose columns are `Hyperparameters`."""
    rows = [check_hyperparameters(f"param_groups[{index}]", group) for index, group in enumerate(groups)]
    return np.array(rows, np.float64).reshape(len(rows), len(Hyperparameters._fields))


def common_hyperparameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the `defaults` of an optimizer with these `param_groups`: the names that all groups have. Schedulers read `betas`."""
    first = groups[0] if groups else {}
    return {name: first[name] for name in first if name != "params" and all(name in group for group in groups)}


def grad_scaler_error() -> UnsupportedError:
    """Returns the error that `GradScaler.step` raises for an optimizer fused into the backward."""
    return UnsupportedError(
        "GradScaler.step(): the rows were updated in the backward, with gradients that were still scaled. Train in bfloat16, which "
        "needs no scaler, or divide at the lookup's output: out.register_hook(lambda grad: grad / scaler.get_scale()); see "
        "docs/fused-updates.md"
    )


class FusedOptimizer(torch.optim.Optimizer):
    """The user's handle of an optimizer that runs in the backward: its `param_groups`, which every backward reads.

    `step()` and `zero_grad()` do nothing. Torch's learning-rate schedulers work on it: `OneCycleLR` and `CyclicLR` cycle the first
    of `betas`, and an optimizer without `betas` needs their `cycle_momentum=False`. Its `state_dict` contains only the groups,
    because the slots belong to the rows.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.optimizer.param_groups[0]["lr"] = 0.1  # from the next backward on
    """

    # Schedulers check that the optimizer stepped before them. Here the backward steps.
    _opt_called = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raises `UnsupportedError`. `torch.amp.GradScaler.step` reads this attribute first."""
        raise grad_scaler_error()

    def __init__(self, params: Sequence[torch.nn.Parameter], specs: Sequence[OptimizerSpec]) -> None:
        """Group i has one param, `params[i]`, the zero-row parameter of a table, and the hyperparameters of `specs[i]`."""
        groups = [{"params": [param], **spec.param_group()} for param, spec in zip(params, specs, strict=True)]
        super().__init__(groups, common_hyperparameters(groups))

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Does nothing, because the backward updates. Raises `UnsupportedError` for a closure: it would run the backward again."""
        if closure is not None:
            raise UnsupportedError(
                f"step(closure={closure!r}): the update runs in the backward; call loss.backward() alone"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, because no gradient is stored."""
