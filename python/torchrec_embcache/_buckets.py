"""Maps ids to buckets, and so to the ranks that own their rows.

`bucket = hash(uint64(id)) mod total_num_buckets`; each rank owns a range of buckets. The hash is the finalizer of SplitMix64
(Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014): a bijection of 64-bit integers that distributes
ids of any pattern evenly. The hash is part of the on-disk formats: the native extension, NumPy and torch compute the same values.
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from . import _native

__all__ = ["buckets_of", "hash_ids_", "unhash_ids_"]

# The multipliers and their inverses modulo 2^64, as signed integers for torch.
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58_476D_1CE4_E5B9 - (1 << 64), 0x94D0_49BB_1331_11EB - (1 << 64)
_INVERSE_1, _INVERSE_2 = 0x96DE_1B17_3F11_9089 - (1 << 64), 0x3196_42B2_D24D_8EC3


def buckets_of(ids: NDArray[np.int64], total_num_buckets: int) -> NDArray[np.uint32]:
    """Returns the bucket of each id in `ids` [n]."""
    return _native.buckets_of(np.ascontiguousarray(ids), total_num_buckets)


def hash_ids_(ids: Tensor) -> Tensor:
    """Replaces `ids` (contiguous int64 [n], on any device) by their hashes in place.

    The bucket is the hash, as uint64, modulo the number of buckets.
    """
    if ids.device.type == "cpu":
        _native.hash_ids(_array_view(ids))
        return ids
    ids.bitwise_xor_(_shift_right(ids, 30)).mul_(_MULTIPLIER_1)
    ids.bitwise_xor_(_shift_right(ids, 27)).mul_(_MULTIPLIER_2)
    return ids.bitwise_xor_(_shift_right(ids, 31))


def unhash_ids_(hashes: Tensor) -> Tensor:
    """Replaces `hashes` (contiguous int64 [n], on any device) by their ids in place: the inverse of `hash_ids_`."""
    if hashes.device.type == "cpu":
        _native.unhash_ids(_array_view(hashes))
        return hashes
    hashes.bitwise_xor_(_shift_right(hashes, 31) ^ _shift_right(hashes, 62)).mul_(_INVERSE_2)
    hashes.bitwise_xor_(_shift_right(hashes, 27) ^ _shift_right(hashes, 54)).mul_(_INVERSE_1)
    return hashes.bitwise_xor_(_shift_right(hashes, 30) ^ _shift_right(hashes, 60))


def _array_view(tensor: Tensor) -> NDArray[np.int64]:
    """Returns an array that shares the tensor's memory.

    An array from `Tensor.numpy` would prevent a pipeline with `clear_data_dist_inputs` from freeing it.
    """
    return cast(NDArray[np.int64], np.from_dlpack(tensor.detach()))


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Returns `values`, taken as unsigned numbers, shifted right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
