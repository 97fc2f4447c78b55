"""Validates a batch of features, before it is planned or sent."""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_embcache._device.host_copies import host_copies
from torchrec_embcache.exceptions import InputError, UnsupportedError
from torchrec_embcache.table.rows import check_dense, clicks_array, contiguous

__all__ = ["check_features", "clicks_of", "copy_features", "ids_and_offsets", "reorder_features"]


def check_features(
    features: Any, names: list[str], *, weighted: bool, clicks: bool, owner: str, device: torch.device
) -> KeyedJaggedTensor:
    """Returns the validated `features`, a KeyedJaggedTensor with int64 values and lengths. Keys that no table reads are allowed.

    Its tensors are contiguous, because fbgemm and the collectives read raw memory. It contains nothing else of `features`.

    `names` are the features that the tables read. With `clicks` the weights are the clicks of each value; the returned ones are
    float64, and zeros if the batch has none. Raises `InputError`, which names `owner`, the field, its value and the remedy, for a
    missing feature, a wrong dtype or device, lengths that do not sum to the number of values, weights if the module is not
    `weighted`, missing weights if it is, and clicks that are not integers from 0. Raises `UnsupportedError` for a batch size that
    varies by feature.
    """
    if isinstance(features, TensorDict):
        features = maybe_td_to_kjt(features, None)
    if not isinstance(features, KeyedJaggedTensor):
        raise InputError(
            f"{owner}: features={type(features).__name__} is not a batch of features: give a KeyedJaggedTensor"
        )
    keys = features.keys()
    present = set(keys)
    missing = [name for name in names if name not in present]
    if missing:
        raise InputError(
            f"{owner}: the batch has features {keys} and lacks {missing}: tables read every feature they name"
        )
    if len(present) != len(keys):
        raise InputError(f"{owner}: the batch names features twice: {keys}")
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise UnsupportedError(
            f"{owner}: a batch size that varies by feature is not supported yet: give every feature the same"
        )
    values, weights = features.values(), features.weights_or_none()
    _check_tensor(owner, "values", values, (torch.int64, torch.int32), "int64 (or int32)", device)
    lengths = _check_lengths(owner, features, device)
    if weighted:
        if weights is None:
            raise InputError(
                f"{owner}: is_weighted=True and the batch has no weights: give the KeyedJaggedTensor weights"
            )
        _check_tensor(owner, "weights", weights, (torch.float32,), "float32", device)
        if weights.numel() != values.numel():
            raise InputError(f"{owner}: {weights.numel()} weights for {values.numel()} values: give one a value")
    elif clicks:
        weights = _check_clicks(owner, weights, values)
    elif weights is not None:
        raise InputError(
            f"{owner}: the batch has weights and the module is not weighted: leave them out, or make it with is_weighted=True"
        )
    # Every rank sends this dtype: an exchange between ranks with different dtypes would fail.
    return KeyedJaggedTensor(
        keys=keys,
        values=contiguous(values.long()),
        weights=contiguous(weights) if weights is not None else None,
        lengths=lengths,
        stride=features.stride(),
    )


def _check_tensor(
    owner: str, field: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], expected: str, device: torch.device
) -> None:
    if tensor.dtype not in dtypes:
        raise InputError(f"{owner}: {field} have dtype {tensor.dtype}: give {expected}")
    check_dense(f"{owner}: {field}", tensor)
    if tensor.device.type != device.type or _is_other_device(tensor.device, device):
        raise InputError(
            f"{owner}: {field} are on {tensor.device} and the module on {device}: call .to({str(device)!r}) on the batch"
        )
    if tensor.dim() != 1:
        raise InputError(f"{owner}: {field} have shape {tuple(tensor.shape)}: give one dimension")


def _is_other_device(one: torch.device, other: torch.device) -> bool:
    """True if two devices of a type are different. The CPU is one device, and a device without an index matches any of its type."""
    return one.type != "cpu" and None not in (one.index, other.index) and one.index != other.index


def clicks_of(features: KeyedJaggedTensor) -> NDArray[np.uint32]:
    """Returns the clicks [N] of a validated batch."""
    clicks: NDArray[np.uint32] = features.weights().cpu().numpy().astype(np.uint32)
    return clicks


def _check_clicks(owner: str, weights: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    if weights is None:
        return torch.zeros(values.numel(), dtype=torch.float64, device=values.device)
    clicks = clicks_array(weights, f"{owner}: weights, which are clicks,", values.numel())
    return torch.from_numpy(clicks.astype(np.float64)).to(values.device)


def _check_lengths(owner: str, features: KeyedJaggedTensor, device: torch.device) -> torch.Tensor:
    """Returns the validated lengths of a batch: contiguous int64 [F * B]."""
    count, stride, values = len(features.keys()), features.stride(), features.values()
    offsets = features.offsets_or_none() if features.lengths_or_none() is None else None
    field, given = ("lengths", features.lengths_or_none()) if offsets is None else ("offsets", offsets)
    if given is None:
        raise InputError(f"{owner}: the batch has neither lengths nor offsets: give one of them")
    check_dense(f"{owner}: {field}", given)
    _check_tensor(owner, field, given.reshape(-1), (torch.int64, torch.int32), "int32 or int64", device)
    lengths = contiguous(features.lengths().long().reshape(-1))
    if count and lengths.numel() != count * stride:
        raise InputError(
            f"{owner}: {lengths.numel()} lengths for {count} features and a stride of {stride}: give every feature one a sample"
        )
    # There are few lengths, so that torch's threads would cost more time than they save. From a device they are copied once. An
    # array from `Tensor.numpy` would prevent a pipeline with `free_features_storage_early` from freeing them.
    there, *first = (
        np.from_dlpack(copy) for copy in host_copies([lengths, *([] if offsets is None else [offsets.reshape(-1)[:1]])])
    )
    least, total = int(there.min(initial=0)), int(there.sum())
    if any(begin.any() for begin in first):
        raise InputError(f"{owner}: offsets begin with {int(first[0][0])}: the first bag starts at 0")
    if least < 0:
        raise InputError(f"{owner}: lengths hold {least}: give 0 or more (offsets that never fall)")
    if total != values.numel():
        raise InputError(f"{owner}: lengths sum to {total} and there are {values.numel()} values: make them agree")
    return lengths


def ids_and_offsets(features: KeyedJaggedTensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the ids [N] of a validated batch on the host, and the bounds of the bags in them: int64 [F * B + 1]."""
    ids, lengths = (copy.numpy() for copy in host_copies([features.values(), features.lengths()]))
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return ids, offsets


def copy_features(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a copy of the batch in newly allocated memory."""
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().clone(),
        weights=weights.clone() if weights is not None else None,
        lengths=features.lengths().clone(),
        stride=features.stride(),
    )


def reorder_features(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """Returns `features` with exactly the keys `names`, in that order. A name may occur more than once."""
    keys = features.keys()
    if keys == names:
        return features
    order, there = _feature_order(tuple(keys), tuple(names), features.device())
    weights = features.weights_or_none()
    if weights is None or not weights.requires_grad:
        return features.permute(order, there)
    # The gradient of fbgemm's permutation is wrong if keys are omitted or repeated, so torch permutes the weights.
    parts = torch.split(weights, features.length_per_key())
    bare = KeyedJaggedTensor(keys=keys, values=features.values(), lengths=features.lengths(), stride=features.stride())
    bare = bare.permute(order, there)
    return KeyedJaggedTensor(
        keys=names,
        values=bare.values(),
        weights=torch.cat([parts[index] for index in order]),
        lengths=bare.lengths(),
        stride=bare.stride(),
    )


@functools.lru_cache(maxsize=256)
def _feature_order(
    keys: tuple[str, ...], names: tuple[str, ...], device: torch.device
) -> tuple[list[int], torch.Tensor]:
    """Returns the index of each name in `keys`, as a list and on the device. Most batches have the same keys and share one copy."""
    order = [keys.index(name) for name in names]
    return order, torch.tensor(order, dtype=torch.int32, device=device)
