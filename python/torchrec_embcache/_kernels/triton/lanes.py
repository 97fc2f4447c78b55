"""Parts of kernels: pointers to row columns, and sums over a row in the order of the Rust kernels."""

import triton
import triton.language as tl

__all__ = ["add_to_lanes", "float_pointer", "sum_of_lanes"]


@triton.jit
def float_pointer(addresses, at):
    """Returns entry `at` of `addresses` as a pointer to float32. Torch's allocators align them to at least 16 bytes."""
    return tl.multiple_of(tl.load(addresses + at).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def add_to_lanes(lanes, values, CHUNKS: tl.constexpr):
    """Adds `values` [16 * CHUNKS] to `lanes` [16], 16 values at a time, like the Rust kernels on their 16 virtual lanes.

    A chunk is extracted by a sum in which all others are zeros. That sum is exact in any order. The values are squares or products,
    added to lanes that start as +0.0, so that the sign of a zero makes no difference.
    """
    chunks = tl.reshape(values, (CHUNKS, 16))
    number = tl.arange(0, CHUNKS)[:, None]
    for chunk in range(CHUNKS):
        lanes = lanes + tl.sum(tl.where(number == chunk, chunks, 0.0), 0)
    return lanes


@triton.jit
def sum_of_lanes(lanes):
    """Returns the sum of `lanes` [16]. Repeatedly adds the upper half to the lower half."""
    two = _fold_lanes(_fold_lanes(_fold_lanes(lanes, 8), 4), 2)
    first, second = tl.split(two)
    return first + second


@triton.jit
def _fold_lanes(lanes, HALF: tl.constexpr):
    lower, upper = tl.split(tl.permute(tl.reshape(lanes, (2, HALF)), (1, 0)))
    return lower + upper
