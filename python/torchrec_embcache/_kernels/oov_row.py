"""The gradient of the OOV row: exact sums over the occurrences on all ranks.

A finite float32 is an integer multiple of 2^-149. A column's sum is stored in 32-bit limbs, each in 64 bits, which are added
without carrying. The sums of several ranks are therefore added elementwise, and the result is the same for any number of ranks. The
native extension stores its sums in the same way.

Shapes: n occurrences of ids that are not admitted, D the table's width.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_embcache.exceptions import StateError

__all__ = ["OovGradientSums", "OtherRankFailedError", "exact_sums", "oov_sums_size"]

# Limbs of a column's sum, the lowest first, followed by the number of its non-finite values.
_LIMBS = 9
_INTEGERS_PER_COLUMN = _LIMBS + 1
_LIMB_BITS = 32
_MANTISSA_BITS = 23
# Number of values that are summed at a time: the temporaries use dozens of bytes per value.
_CHUNK_ELEMENTS = 1 << 21


class OtherRankFailedError(StateError):
    """Another rank has failed in this backward, and raises its error on every rank."""


class OovGradientSums:
    """The sums of one backward, until they are reduced over all ranks. Every rank reduces once, even if it has failed."""

    def __init__(self, all_reduce_fn: Callable[[Tensor], None] | None, size: int) -> None:
        """`all_reduce_fn` sums a CPU tensor over all ranks in place; None for one rank. `size`: number of integers in the sums."""
        self._all_reduce_fn, self._size = all_reduce_fn, size

    def all_reduce(self, sums: Tensor) -> Tensor:
        """Returns the sums, int64 [size], over all ranks, on the CPU. Collective.

        Raises `OtherRankFailedError` if a rank has failed before its call.
        """
        if self._all_reduce_fn is None:
            return sums.cpu()
        both = torch.cat([sums.cpu(), torch.zeros(1, dtype=torch.int64, device="cpu")])
        self._reduce(both)
        if both[-1].item():
            raise OtherRankFailedError("another rank has failed in this backward, and nothing is updated")
        return both[:-1]

    def notify_failure(self) -> None:
        """Notifies the other ranks that this rank has failed, unless it has already reduced its sums. Collective."""
        if self._all_reduce_fn is not None:
            failed = torch.zeros(self._size + 1, dtype=torch.int64, device="cpu")
            failed[-1] = 1
            with contextlib.suppress(Exception):  # the error that caused this call is raised
                self._reduce(failed)

    def _reduce(self, sums: Tensor) -> None:
        add_up, self._all_reduce_fn = self._all_reduce_fn, None
        assert add_up is not None, "the callers ask"
        add_up(sums)


def oov_sums_size(dim: int) -> int:
    """Returns the number of integers in the sums of a table of width `dim`: per column, plus one for the occurrences."""
    return dim * _INTEGERS_PER_COLUMN + 1


def exact_sums(rows: Tensor) -> Tensor:
    """Returns the column sums of `rows`, float32 [n, D], followed by n: int64 [`oov_sums_size(D)`], on the device of the rows."""
    count, dim = rows.shape
    sums = torch.zeros(oov_sums_size(dim), dtype=torch.int64, device=rows.device)
    sums[-1] = count
    for part in torch.split(rows.contiguous(), max(1, _CHUNK_ELEMENTS // dim)):
        _add(sums[:-1], part)
    return sums


def _add(sums: Tensor, rows: Tensor) -> None:
    dim = rows.shape[1]
    bits = rows.view(torch.int32).to(torch.int64)
    exponent = (bits >> _MANTISSA_BITS) & 0xFF
    finite = exponent < 0xFF
    mantissa = (bits & ((1 << _MANTISSA_BITS) - 1)) | ((exponent > 0).to(torch.int64) << _MANTISSA_BITS)
    place = exponent.clamp(min=1, max=0xFE) - 1
    shifted = torch.where(finite, mantissa << (place % _LIMB_BITS), 0)
    sign = torch.where(bits < 0, -1, 1)
    begin = torch.arange(dim, dtype=torch.int64, device=rows.device) * _INTEGERS_PER_COLUMN
    limb = (begin + place // _LIMB_BITS).flatten()
    sums.index_add_(0, limb, (sign * (shifted & 0xFFFFFFFF)).flatten())
    sums.index_add_(0, limb + 1, (sign * (shifted >> _LIMB_BITS)).flatten())
    sums.index_add_(0, begin + _LIMBS, (~finite).sum(0))
