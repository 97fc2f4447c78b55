"""Parts of kernels: columns of rows, and sums over a row in the core's order."""

import triton
import triton.language as tl

__all__ = ["add_to_lanes", "float_pointer", "sum_of_lanes"]


@triton.jit
def float_pointer(addresses, at):
    """Address number `at` of `addresses`, as that of float32 numbers. Torch's allocators align them to 16 bytes at least."""
    return tl.multiple_of(tl.load(addresses + at).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def add_to_lanes(lanes, values, CHUNKS: tl.constexpr):
    """Add `values` [16 * CHUNKS] to `lanes` [16], 16 values at a time, as the core does on its 16 virtual lanes.

    A chunk is taken out by a sum in which all others are zeros. That sum is exact in any order. The values are squares or products
    that are added to lanes which began as +0.0, so that the sign of a zero makes no difference.
    """
    chunks = tl.reshape(values, (CHUNKS, 16))
    number = tl.arange(0, CHUNKS)[:, None]
    for chunk in range(CHUNKS):
        lanes = lanes + tl.sum(tl.where(number == chunk, chunks, 0.0), 0)
    return lanes


@triton.jit
def sum_of_lanes(lanes):
    """The sum of `lanes` [16]. The upper half is added to the lower half, again and again."""
    two = _fold_lanes(_fold_lanes(_fold_lanes(lanes, 8), 4), 2)
    first, second = tl.split(two)
    return first + second


@triton.jit
def _fold_lanes(lanes, HALF: tl.constexpr):
    lower, upper = tl.split(tl.permute(tl.reshape(lanes, (2, HALF)), (1, 0)))
    return lower + upper
