"""Checks of a batch of features, before anything of it is planned or sent."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_embcache.exceptions import InputError, UnsupportedError
from torchrec_embcache.host_copies import host_copies
from torchrec_embcache.rows import check_plain, clicks_array

__all__ = ["check_features", "clicks_of", "in_order"]


def check_features(
    features: Any, names: list[str], *, weighted: bool, clicks: bool, owner: str, device: torch.device
) -> KeyedJaggedTensor:
    """`features` as a KeyedJaggedTensor with int64 values and lengths, checked. It may have keys that no table reads.

    `names` are the features that the tables read. With `clicks` the weights are the clicks of each value. They are float64 in what
    is returned, and zeros where the batch has none. `InputError`, which names `owner`, the field, its value and what to do, is
    raised for a feature that is missing, a wrong dtype or device, lengths that do not sum to the number of values, weights where
    the module is not `weighted`, missing weights where it is, and clicks that are no integers from 0. `UnsupportedError` for a
    batch size that varies by feature.
    """
    if isinstance(features, TensorDict):
        features = maybe_td_to_kjt(features, None)
    if not isinstance(features, KeyedJaggedTensor):
        raise InputError(
            f"{owner}: features={type(features).__name__} is no batch of features: give a KeyedJaggedTensor"
        )
    keys = features.keys()
    missing = [name for name in names if name not in set(keys)]
    if missing:
        raise InputError(
            f"{owner}: the batch has features {keys} and lacks {missing}: tables read every feature they name"
        )
    if len(set(keys)) != len(keys):
        raise InputError(f"{owner}: the batch names features twice: {keys}")
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise UnsupportedError(
            f"{owner}: a batch size that varies by feature is not supported yet: give every feature the same"
        )
    values, weights = features.values(), features.weights_or_none()
    _check_tensor(owner, "values", values, (torch.int64, torch.int32), "int64 (or int32)", device)
    _check_lengths(owner, features, device)
    if weighted:
        if weights is None:
            raise InputError(
                f"{owner}: is_weighted=True and the batch has no weights: give the KeyedJaggedTensor weights"
            )
        _check_tensor(owner, "weights", weights, (torch.float32,), "float32", device)
        if weights.numel() != values.numel():
            raise InputError(f"{owner}: {weights.numel()} weights for {values.numel()} values: give one a value")
    elif clicks:
        weights = _clicks(owner, weights, values)
    elif weights is not None:
        raise InputError(
            f"{owner}: the batch has weights and the module is not weighted: leave them out, or make it with is_weighted=True"
        )
    lengths = features.lengths()
    if values.dtype != torch.int64 or lengths.dtype != torch.int64 or clicks:
        # Every rank sends this dtype: an exchange between ranks of different ones would fail.
        features = KeyedJaggedTensor(
            keys=keys, values=values.long(), weights=weights, lengths=lengths.long(), stride=features.stride()
        )
    return features


def _check_tensor(
    owner: str, field: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], wanted: str, device: torch.device
) -> None:
    if tensor.dtype not in dtypes:
        raise InputError(f"{owner}: {field} have dtype {tensor.dtype}: give {wanted}")
    check_plain(f"{owner}: {field}", tensor)
    if tensor.device.type != device.type or _has_other_number(tensor.device, device):
        raise InputError(
            f"{owner}: {field} are on {tensor.device} and the module on {device}: call .to({str(device)!r}) on the batch"
        )
    if tensor.dim() != 1:
        raise InputError(f"{owner}: {field} have shape {tuple(tensor.shape)}: give one dimension")


def _has_other_number(one: torch.device, other: torch.device) -> bool:
    """Whether two devices of a kind are different ones. The CPU is one device, and a kind alone stands for any of it."""
    return one.type != "cpu" and None not in (one.index, other.index) and one.index != other.index


def clicks_of(features: KeyedJaggedTensor) -> NDArray[np.uint32]:
    """The clicks [N] of a batch that was checked."""
    clicks: NDArray[np.uint32] = features.weights().cpu().numpy().astype(np.uint32)
    return clicks


def _clicks(owner: str, weights: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    if weights is None:
        return torch.zeros(values.numel(), dtype=torch.float64, device=values.device)
    clicks = clicks_array(weights, f"{owner}: weights, which are clicks,", values.numel())
    return torch.from_numpy(clicks.astype(np.float64)).to(values.device)


def _check_lengths(owner: str, features: KeyedJaggedTensor, device: torch.device) -> None:
    lengths = features.lengths()
    _check_tensor(owner, "lengths", lengths.reshape(-1), (torch.int64, torch.int32), "int32 or int64", device)
    count = len(features.keys())
    if count and lengths.numel() % count:
        raise InputError(f"{owner}: {lengths.numel()} lengths for {count} features: give every feature one a sample")
    # Lengths are few, so that torch's threads would cost more time than they save. From a device they are copied once.
    (there,) = host_copies([lengths])
    least, total = int(there.numpy().min(initial=0)), int(there.numpy().sum())
    if least < 0:
        raise InputError(f"{owner}: lengths hold {least}: give 0 or more (offsets that never fall)")
    if total != features.values().numel():
        raise InputError(
            f"{owner}: lengths sum to {total} and there are {features.values().numel()} values: make them agree"
        )


def in_order(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """`features` with exactly the keys `names`, in that order. A name may occur more than once."""
    keys = features.keys()
    if keys == names:
        return features
    order = [keys.index(name) for name in names]
    weights = features.weights_or_none()
    if weights is None or not weights.requires_grad:
        return features.permute(order)
    # The gradient of fbgemm's permutation is wrong where keys are left out or repeat, so that torch permutes the weights.
    parts = torch.split(weights, features.length_per_key())
    bare = KeyedJaggedTensor(keys=keys, values=features.values(), lengths=features.lengths(), stride=features.stride())
    bare = bare.permute(order)
    return KeyedJaggedTensor(
        keys=names,
        values=bare.values(),
        weights=torch.cat([parts[index] for index in order]),
        lengths=bare.lengths(),
        stride=bare.stride(),
    )
