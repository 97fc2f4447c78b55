"""Hyperparameters of an optimizer, as in `param_groups`: validation, and their order in the native extension."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .exceptions import ConfigError

__all__ = [
    "Hyperparameters",
    "check_hyperparameters",
    "check_max_gradient",
    "restore_hyperparameters",
    "restored_hyperparameters",
]

# Restored by a load: hyperparameters that a schedule changes during training. Torch's schedulers derive theirs from `initial_lr`.
_RESTORED_NAMES = ("lr", "initial_lr", "max_gradient")


class Hyperparameters(NamedTuple):
    """Hyperparameters of an update, in the order of the native extension. They are 0 if an optimizer does not have them."""

    lr: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    beta: float
    l1: float
    l2: float


def check_hyperparameters(owner: str, group: Mapping[str, Any]) -> Hyperparameters:
    """Returns the validated hyperparameters of a `param_groups` entry. Raises `ConfigError`, which names `owner`."""

    def check_number(field: str, value: Any, below: float = math.inf, *, zero: bool = True) -> float:
        if type(value) is float and 0 < value < below:  # fast path of nearly all values, checked in every step
            return value
        result = _number(value)
        if not 0 <= result < below or not (zero or result):
            least = "of 0 or more" if zero else "above 0"
            bound = f"a finite number {least}" if below == math.inf else "a number from 0 to below 1"
            raise ConfigError(f"{owner}.{field}={value!r} is out of range: give {bound}")
        return result

    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"{owner}.betas={betas!r} is not a pair: give (beta1, beta2)")
    return Hyperparameters(
        lr=check_number("lr", group.get("lr"), zero="l1" not in group),  # FTRL, the one with l1, divides by it
        eps=check_number("eps", group.get("eps", 0.0)),
        beta1=check_number("betas[0]", betas[0], 1.0),
        beta2=check_number("betas[1]", betas[1], 1.0),
        weight_decay=check_number("weight_decay", group.get("weight_decay", 0.0)),
        beta=check_number("beta", group.get("beta", 0.0)),
        l1=check_number("l1", group.get("l1", 0.0)),
        l2=check_number("l2", group.get("l2", 0.0)),
    )


def restored_hyperparameters(saved: Mapping[str, float]) -> dict[str, float]:
    """Returns the saved hyperparameters that a load restores into `param_groups`."""
    return {name: saved[name] for name in _RESTORED_NAMES if name in saved}


def restore_hyperparameters(group: dict[str, Any], saved: Mapping[str, float]) -> None:
    """Restores hyperparameters into a `param_groups` entry. A tensor rate, as for a captured step, is updated in place."""
    for name, value in restored_hyperparameters(saved).items():
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        else:
            group[name] = value


def check_max_gradient(owner: str, group: Mapping[str, Any]) -> float | None:
    """Returns the validated `max_gradient` of a `param_groups` entry; None if unset. Raises `ConfigError`, which names `owner`."""
    limit = group.get("max_gradient")
    if limit is None:
        return None
    number = _number(limit)
    if not 0 < number < math.inf:
        raise ConfigError(
            f"{owner}.max_gradient={limit!r} is out of range: give a finite number above 0, or None to clamp nothing"
        )
    return number


def _number(value: Any) -> float:
    """Returns `value` as a float, NaN if it is no number."""
    try:
        return math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
