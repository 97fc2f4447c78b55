"""Which bucket an id falls into, and so which rank owns its row.

`bucket = hash(uint64(id)) mod total_num_buckets`; ranks own ranges of buckets. The hash is the finaliser of SplitMix64
(Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014): a bijection of 64-bit integers, after which ids
of any pattern spread evenly. The rule is part of the formats on disk: the core's, NumPy's side and torch's give the same numbers.
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from . import _native

__all__ = ["buckets_of", "hash_ids_", "unhash_ids_"]

# The multipliers, and their inverses modulo 2^64, as torch's signed integers.
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58_476D_1CE4_E5B9 - (1 << 64), 0x94D0_49BB_1331_11EB - (1 << 64)
_INVERSE_1, _INVERSE_2 = 0x96DE_1B17_3F11_9089 - (1 << 64), 0x3196_42B2_D24D_8EC3


def buckets_of(ids: NDArray[np.int64], total_num_buckets: int) -> NDArray[np.uint32]:
    """The bucket of each of `ids` [n]."""
    return _native.buckets_of(np.ascontiguousarray(ids), total_num_buckets)


def hash_ids_(ids: Tensor) -> Tensor:
    """Replace `ids` (contiguous int64 [n], on any device) by their hashes, whose remainder as unsigned numbers is the bucket."""
    if ids.device.type == "cpu":
        _native.hash_ids(_array_view(ids))
        return ids
    ids.bitwise_xor_(_shift_right(ids, 30)).mul_(_MULTIPLIER_1)
    ids.bitwise_xor_(_shift_right(ids, 27)).mul_(_MULTIPLIER_2)
    return ids.bitwise_xor_(_shift_right(ids, 31))


def unhash_ids_(hashes: Tensor) -> Tensor:
    """Replace `hashes` (contiguous int64 [n], on any device) by the ids that `hash_ids_` made them of."""
    if hashes.device.type == "cpu":
        _native.unhash_ids(_array_view(hashes))
        return hashes
    hashes.bitwise_xor_(_shift_right(hashes, 31) ^ _shift_right(hashes, 62)).mul_(_INVERSE_2)
    hashes.bitwise_xor_(_shift_right(hashes, 27) ^ _shift_right(hashes, 54)).mul_(_INVERSE_1)
    return hashes.bitwise_xor_(_shift_right(hashes, 30) ^ _shift_right(hashes, 60))


def _array_view(tensor: Tensor) -> NDArray[np.int64]:
    """An array of the same memory. With one of `Tensor.numpy`, a pipeline with `clear_data_dist_inputs` could not free it."""
    return cast(NDArray[np.int64], np.from_dlpack(tensor.detach()))


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """`values` as unsigned numbers, shifted to the right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
