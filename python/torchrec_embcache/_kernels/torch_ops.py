"""Optimizer updates as torch ops, on any device; `optimizers` has the formulas.

Shapes: U distinct rows of a table, D its width, S cache slots of its device tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrec_embcache._hyperparameters import Hyperparameters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from torchrec_embcache._device.tier import DeviceTier
    from torchrec_embcache.optimizers import OptimizerSpec

__all__ = ["updated_rows"]


@dataclass
class _UpdateRows:
    """The working copy of the rows of an update. The tier is unchanged.

    `weights` [U, D]; `vectors`: each vector slot [U, D]; `scalar` [U], empty if rows have none; `grad` [U, D].
    """

    weights: Tensor
    vectors: list[Tensor]
    scalar: Tensor
    grad: Tensor
    numbers: Hyperparameters
    step: int

    def decay_gradient(self) -> None:
        """Adds the weight decay to the gradient."""
        if self.numbers.weight_decay:
            self.grad = self.grad + self.numbers.weight_decay * self.weights

    def move_decoupled(self, direction: Tensor) -> None:
        """Moves the weights against `direction` [U, D] with decoupled weight decay. Changes `direction`."""
        direction += self.numbers.weight_decay * self.weights
        self.weights -= self.numbers.lr * direction

    def first_moment(self) -> Tensor:
        """Updates the first moment, `vectors[0]`. Returns its bias-corrected value, [U, D]."""
        beta = self.numbers.beta1
        self.vectors[0] = self.vectors[0] * beta + self.grad * (1 - beta)
        return self.vectors[0] / (1 - beta**self.step)

    def second_moment(self) -> Tensor:
        """Updates the second moment, `vectors[1]`. Returns the root of its bias-corrected value, plus `eps`, [U, D]."""
        beta = self.numbers.beta2
        self.vectors[1] = self.vectors[1] * beta + self.grad.square() * (1 - beta)
        return (self.vectors[1] / (1 - beta**self.step)).sqrt() + self.numbers.eps


def _sgd(rows: _UpdateRows) -> None:
    rows.decay_gradient()
    rows.weights -= rows.numbers.lr * rows.grad


def _adagrad(rows: _UpdateRows) -> None:
    rows.decay_gradient()
    rows.vectors[0].addcmul_(rows.grad, rows.grad)
    rows.weights -= rows.numbers.lr * rows.grad / (rows.vectors[0].sqrt() + rows.numbers.eps)


def _rowwise_adagrad(rows: _UpdateRows) -> None:
    rows.decay_gradient()
    rows.scalar += rows.grad.square().mean(1)
    rows.weights -= rows.numbers.lr * rows.grad / (rows.scalar.sqrt() + rows.numbers.eps)[:, None]


def _adam(rows: _UpdateRows) -> None:
    rows.decay_gradient()
    rows.weights -= rows.numbers.lr * (rows.first_moment() / rows.second_moment())


def _adamw(rows: _UpdateRows) -> None:
    rows.move_decoupled(rows.first_moment() / rows.second_moment())


def _partial_rowwise_adam(rows: _UpdateRows) -> None:
    beta = rows.numbers.beta2
    rows.scalar = rows.scalar * beta + rows.grad.square().mean(1) * (1 - beta)
    root = (rows.scalar / (1 - beta**rows.step)).sqrt() + rows.numbers.eps
    rows.move_decoupled(rows.first_moment() / root[:, None])


def _ftrl(rows: _UpdateRows) -> None:
    rows.decay_gradient()
    numbers, (z, n) = rows.numbers, rows.vectors
    root = n.sqrt()
    n = n + rows.grad.square()
    sigma = (n.sqrt() - root) / numbers.lr
    z = z + (rows.grad - sigma * rows.weights)
    divisor = (n.sqrt() + numbers.beta) / numbers.lr + numbers.l2
    shrunk = z.sign() * (z.abs() - numbers.l1).clamp(min=0)
    rows.vectors = [z, n]
    rows.weights = ((0.0 - shrunk) / divisor).masked_fill_(divisor == 0, 0.0)  # never -0.0, as in the native kernels


def _lamb(rows: _UpdateRows) -> None:
    first, root = rows.first_moment(), rows.second_moment()
    direction = (first / root).masked_fill_(root == 0, 0.0)
    if rows.numbers.weight_decay:
        direction += rows.numbers.weight_decay * rows.weights
    of_weights, of_direction = (values.square().sum(1) for values in (rows.weights, direction))
    trust = (of_weights.sqrt() / of_direction.sqrt()).masked_fill_((of_weights == 0) | (of_direction == 0), 1.0)
    rows.weights -= rows.numbers.lr * trust[:, None] * direction


_UPDATES: dict[str, Callable[[_UpdateRows], None]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "adamw": _adamw,
    "partial_rowwise_adam": _partial_rowwise_adam,
    "ftrl": _ftrl,
    "lamb": _lamb,
}


def updated_rows(
    spec: OptimizerSpec, tier: DeviceTier, slots: Tensor, grad: Tensor, hyperparameters: NDArray[np.float64], step: int
) -> list[tuple[Tensor, Tensor]]:
    """Computes the new values of the rows in distinct cache slots [U], from their summed gradients [U, D].

    Returns each tensor of the tier that is to change, with its rows' new values, and changes nothing. `hyperparameters` is a row of
    `native_hyperparameters`; `step` is the table's step counter, which is 1 at the first update.
    """
    rows = _UpdateRows(
        weights=tier.weights.index_select(0, slots),
        vectors=[slot.index_select(0, slots) for slot in tier.vector_slots],
        scalar=tier.scalars.index_select(0, slots) if tier.scalars is not None else tier.weights.new_empty(0),
        grad=grad,
        numbers=Hyperparameters(*hyperparameters.tolist()),
        step=step,
    )
    _UPDATES[spec.kind](rows)
    changed = [(tier.weights, rows.weights), *zip(tier.vector_slots, rows.vectors, strict=True)]
    return changed if tier.scalars is None else [*changed, (tier.scalars, rows.scalar)]
