"""Selects a table's optimizer from TorchRec's settings.

There are two: `apply_optimizer_in_backward(cls, module.parameters(), kwargs)` and the sharder's `fused_params`. As in TorchRec, the
first overrides the second. A hyperparameter set by neither has FBGEMM's default, that of `SplitTableBatchedEmbeddingBagsCodegen`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torchrec import optim as trec_optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRecRowWiseAdagrad
from torchrec.types import DataType

from torchrec_embcache.exceptions import ConfigError, StateError, UnsupportedError
from torchrec_embcache.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    OptimizerSpec,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    check_one_optimizer,
)

__all__ = [
    "NO_OPTIMIZER",
    "OPTIMIZER_ATTRIBUTES",
    "choose_optimizer",
    "no_optimizer_error",
    "without_optimizer_attributes",
]

#: The attributes of a parameter in which `apply_optimizer_in_backward` records its arguments.
OPTIMIZER_ATTRIBUTES = ("_optimizer_classes", "_optimizer_kwargs")

# FBGEMM's Adam decouples weight decay, which is `AdamW`'s formula. As in TorchRec, `torch.optim.Adam` maps to it, unless
# `weight_decay_mode` is L2.
_BY_TYPE: dict[Any, type[OptimizerSpec]] = {
    EmbOptimType.SGD: SGD,
    EmbOptimType.EXACT_SGD: SGD,
    EmbOptimType.EXACT_ADAGRAD: Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.ADAM: AdamW,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: PartialRowWiseAdam,
    EmbOptimType.LAMB: LAMB,
}
# Their weight decay is decoupled. That of the others is added to the gradient.
_DECOUPLED = (AdamW, PartialRowWiseAdam, LAMB)
_BY_CLASS: dict[type[Any], type[OptimizerSpec]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.Adam: AdamW,
    torch.optim.AdamW: AdamW,
    trec_optim.SGD: SGD,
    trec_optim.Adagrad: Adagrad,
    trec_optim.Adam: AdamW,
    trec_optim.PartialRowWiseAdam: PartialRowWiseAdam,
    trec_optim.LAMB: LAMB,
    TorchRecRowWiseAdagrad: RowWiseAdagrad,
}
_FBGEMM_DEFAULTS: dict[str, Any] = {
    "lr": 0.01,
    "eps": 1e-8,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "gradient_clipping": False,
    "max_gradient": 1.0,  # used only with gradient_clipping
}
# Parameters that are accepted only with values without an effect.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "momentum": (0, 0.0),
    "dampening": (0, 0.0),
    "nesterov": (False,),
    "amsgrad": (False,),
    "maximize": (False,),
    "differentiable": (False,),
    "capturable": (False,),
    "foreach": (None, False),
    "fused": (None, False),
    "decoupled_weight_decay": (True,),
    "lr_decay": (0, 0.0),
    "initial_accumulator_value": (0, 0.0),
    "stochastic_rounding": (False,),
    "weights_precision": (DataType.FP32, SparseType.FP32),
    "output_dtype": (DataType.FP32, SparseType.FP32),
    "enforce_hbm": (None, False),
}
# The optimizer of a table without one: its rows have no slots.
NO_OPTIMIZER = SGD(lr=0.0)


def choose_optimizer(
    table: str, param: nn.Parameter | None, fused_params: Mapping[str, Any] | None
) -> OptimizerSpec | None:
    """Returns the optimizer of `table`, whose zero-row weight is `param`. None if neither setting specifies one.

    Raises `UnsupportedError` for an unsupported optimizer or parameter, and `ConfigError` for a value out of range.
    """
    check_one_optimizer(table, param)
    classes = getattr(param, "_optimizer_classes", [])
    chosen: type[OptimizerSpec] | None = None
    called = ""
    values = dict(_FBGEMM_DEFAULTS)
    if fused_params:
        chosen = _spec_type(table, fused_params.get("optimizer", EmbOptimType.EXACT_SGD))
        called = f"EmbOptimType.{fused_params.get('optimizer', EmbOptimType.EXACT_SGD).name}"
    if classes:
        if classes[0] not in _BY_CLASS:
            known = ", ".join(sorted(map(_class_name, _BY_CLASS)))
            raise UnsupportedError(
                f"table {table!r}: optimizer {classes[0].__qualname__} is not supported: use one of {known}"
            )
        chosen, called = _BY_CLASS[classes[0]], _class_name(classes[0])
    if chosen is None:
        return None
    in_backward = getattr(param, "_optimizer_kwargs", [{}])[0] if classes else {}
    if chosen is AdamW and torch.optim.AdamW not in classes and "L2" in map(_decay_mode, (fused_params, in_backward)):
        chosen = Adam
    if fused_params:
        _apply_hyperparameters(table, "fused_params", chosen, fused_params, values)
    if classes:
        if classes[0] is torch.optim.AdamW:
            values["weight_decay"] = 0.01
        _apply_hyperparameters(table, "apply_optimizer_in_backward", chosen, in_backward, values)
    values["betas"] = (values.pop("beta1"), values.pop("beta2"))
    if not values.pop("gradient_clipping"):
        values["max_gradient"] = None
    fields = chosen.__dataclass_fields__
    try:
        return chosen(**{name: value for name, value in values.items() if name in fields}).with_display_name(called)
    except ConfigError as error:
        raise ConfigError(f"table {table!r}: {error}") from None


def _class_name(cls: type[Any]) -> str:
    return f"{cls.__module__.split('.')[0]}.optim.{cls.__name__}"


def _spec_type(table: str, kind: object) -> type[OptimizerSpec]:
    if kind not in _BY_TYPE:
        known = ", ".join(entry.name for entry in _BY_TYPE)
        raise UnsupportedError(
            f"table {table!r}: fused_params optimizer={kind} is not supported: use one of EmbOptimType.{{{known}}}"
        )
    return _BY_TYPE[kind]


def _apply_hyperparameters(
    table: str, source: str, chosen: type[OptimizerSpec], given: Mapping[str, Any], values: dict[str, Any]
) -> None:
    for name, value in given.items():
        if name in ("lr", "learning_rate"):
            values["lr"] = value
        elif name in ("eps", "beta1", "beta2", "weight_decay"):
            values[name] = value
        elif name == "betas":
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ConfigError(f"table {table!r}: {source} betas={value!r} is not a pair: give (beta1, beta2)")
            values["beta1"], values["beta2"] = value
        elif name == "gradient_clipping":
            if not isinstance(value, bool):
                raise ConfigError(f"table {table!r}: {source} gradient_clipping={value!r}: give True or False")
            values[name] = value
        elif name == "max_gradient":
            if value is None:
                continue
            if not given.get("gradient_clipping", values["gradient_clipping"]) and "gradient_clipping" not in given:
                raise UnsupportedError(
                    f"table {table!r}: {source} max_gradient={value!r} without gradient_clipping=True, where FBGEMM ignores it: "
                    "give both, or neither"
                )
            values[name] = value
        elif name == "weight_decay_mode":
            _check_decay_mode(table, source, chosen, value, given)
        elif name != "optimizer" and not any(value is only or value == only for only in _NEUTRAL_VALUES.get(name, ())):
            raise UnsupportedError(
                f"table {table!r}: {source} {name}={value!r} is not supported: known are lr, eps, betas, weight_decay, "
                "gradient_clipping, max_gradient, optimizer"
            )


def _check_decay_mode(
    table: str, source: str, chosen: type[OptimizerSpec], mode: Any, given: Mapping[str, Any]
) -> None:
    name = _decay_mode(given)
    if name == "NONE" and not given.get("weight_decay"):
        return
    only = "DECOUPLE" if chosen in _DECOUPLED else "L2"
    if name != only:
        raise UnsupportedError(
            f"table {table!r}: {source} weight_decay_mode={mode} is not supported with {chosen.__name__}: "
            f"give {only}, or leave it out"
        )


def _decay_mode(given: Mapping[str, Any] | None) -> str:
    """Returns the name of `weight_decay_mode`; "None" if it is not set."""
    mode = (given or {}).get("weight_decay_mode")
    return str(getattr(mode, "name", mode))


def no_optimizer_error(tables: list[str]) -> StateError:
    """Returns the error of training a table without an optimizer."""
    return StateError(
        f"tables {', '.join(map(repr, tables))} have no optimizer and cannot be trained: before the first step and before "
        'sharding call apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, module.parameters(), {"lr": 0.02}), or '
        "give the sharder "
        'fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02}; to only read, call model.eval()'
    )


@contextmanager
def without_optimizer_attributes(params: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Removes `OPTIMIZER_ATTRIBUTES` from the parameters within the block.

    TorchRec would convert them to FBGEMM's arguments, change them, and reject optimizers that this package supports.
    """
    kept = {
        param: {name: param.__dict__.pop(name) for name in OPTIMIZER_ATTRIBUTES if name in param.__dict__}
        for param in params.values()
    }
    try:
        yield
    finally:
        for param, attributes in kept.items():
            param.__dict__.update(attributes)
