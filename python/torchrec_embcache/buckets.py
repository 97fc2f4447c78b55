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

__all__ = ["buckets_of", "hash_ids_", "ids_of_hashes_"]

# The multipliers, and their inverses modulo 2^64, as torch's signed integers.
_FIRST, _SECOND = 0xBF58_476D_1CE4_E5B9 - (1 << 64), 0x94D0_49BB_1331_11EB - (1 << 64)
_FIRST_BACK, _SECOND_BACK = 0x96DE_1B17_3F11_9089 - (1 << 64), 0x3196_42B2_D24D_8EC3


def buckets_of(ids: NDArray[np.int64], total_num_buckets: int) -> NDArray[np.uint32]:
    """The bucket of each of `ids` [n]."""
    return _native.buckets_of(np.ascontiguousarray(ids), total_num_buckets)


def hash_ids_(ids: Tensor) -> Tensor:
    """Replace `ids` (contiguous int64 [n], on any device) by their hashes, whose remainder as unsigned numbers is the bucket."""
    if ids.device.type == "cpu":
        _native.hash_ids(_array(ids))
        return ids
    ids.bitwise_xor_(_shifted(ids, 30)).mul_(_FIRST)
    ids.bitwise_xor_(_shifted(ids, 27)).mul_(_SECOND)
    return ids.bitwise_xor_(_shifted(ids, 31))


def ids_of_hashes_(hashes: Tensor) -> Tensor:
    """Replace `hashes` (contiguous int64 [n], on any device) by the ids that `hash_ids_` made them of."""
    if hashes.device.type == "cpu":
        _native.ids_of_hashes(_array(hashes))
        return hashes
    hashes.bitwise_xor_(_shifted(hashes, 31) ^ _shifted(hashes, 62)).mul_(_SECOND_BACK)
    hashes.bitwise_xor_(_shifted(hashes, 27) ^ _shifted(hashes, 54)).mul_(_FIRST_BACK)
    return hashes.bitwise_xor_(_shifted(hashes, 30) ^ _shifted(hashes, 60))


def _array(tensor: Tensor) -> NDArray[np.int64]:
    """An array of the same memory. With one of `Tensor.numpy`, a pipeline with `clear_data_dist_inputs` could not free it."""
    return cast(NDArray[np.int64], np.from_dlpack(tensor.detach()))


def _shifted(values: Tensor, by: int) -> Tensor:
    """`values` as unsigned numbers, shifted to the right."""
    return (values >> by) & ((1 << (64 - by)) - 1)
