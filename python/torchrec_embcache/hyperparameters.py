"""The numbers of an optimizer's formula, as `param_groups` has them: what is checked of them, and their order in the core."""

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

# What a load restores: numbers that a schedule changes while training goes on. Torch's schedulers derive theirs from `initial_lr`.
_RESTORED_NAMES = ("lr", "initial_lr", "max_gradient")


class Hyperparameters(NamedTuple):
    """The numbers of an update, in the order in which the core takes them. They are 0 where an optimizer does not have them."""

    lr: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    beta: float
    l1: float
    l2: float


def check_hyperparameters(owner: str, group: Mapping[str, Any]) -> Hyperparameters:
    """The numbers of a `param_groups` entry. `ConfigError` names `owner`."""

    def check_number(field: str, value: Any, below: float = math.inf, *, zero: bool = True) -> float:
        if type(value) is float and 0 < value < below:  # nearly all are, and every step checks them
            return value
        try:
            result = float(value)
        except (TypeError, ValueError):
            result = math.nan
        if isinstance(value, str | bool) or not 0 <= result < below or not (zero or result):
            least = "of 0 or more" if zero else "above 0"
            bound = f"a finite number {least}" if below == math.inf else "a number from 0 to below 1"
            raise ConfigError(f"{owner}.{field}={value!r} is out of range: give {bound}")
        return result

    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"{owner}.betas={betas!r} is not a pair: give (beta1, beta2)")
    return Hyperparameters(
        lr=check_number("lr", group.get("lr"), zero="l1" not in group),  # FTRL, which alone has l1, divides by it
        eps=check_number("eps", group.get("eps", 0.0)),
        beta1=check_number("betas[0]", betas[0], 1.0),
        beta2=check_number("betas[1]", betas[1], 1.0),
        weight_decay=check_number("weight_decay", group.get("weight_decay", 0.0)),
        beta=check_number("beta", group.get("beta", 0.0)),
        l1=check_number("l1", group.get("l1", 0.0)),
        l2=check_number("l2", group.get("l2", 0.0)),
    )


def restored_hyperparameters(saved: Mapping[str, float]) -> dict[str, float]:
    """Those of the numbers that a checkpoint has of an optimizer that a load puts into `param_groups`."""
    return {name: saved[name] for name in _RESTORED_NAMES if name in saved}


def restore_hyperparameters(group: dict[str, Any], saved: Mapping[str, float]) -> None:
    """Put those numbers into a `param_groups` entry. A rate that is a tensor, as for a captured step, stays that tensor."""
    for name, value in restored_hyperparameters(saved).items():
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        else:
            group[name] = value


def check_max_gradient(owner: str, group: Mapping[str, Any]) -> float | None:
    """`max_gradient` of a `param_groups` entry; None where it has none. `ConfigError` names `owner`."""
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
