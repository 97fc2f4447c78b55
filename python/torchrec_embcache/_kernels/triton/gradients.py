"""The position of each occurrence's gradient, and the sum of a row's gradients. ALIGNED is as in `lookups`."""

import triton
import triton.language as tl

__all__ = ["gradient_places", "gradient_sums", "row_gradient"]


@triton.jit
def gradient_places(
    features,  # int64 [F, 4], as in `lookups`
    offsets,  # int32 [F * B + 1]
    sample_weights,  # float32 [N], ignored if WEIGHTED is false
    places,  # int64 [N], output: start of each occurrence's gradient within that of the pooled output
    scale,  # float32 [N], output if SCALED is true: each occurrence's weight, divided by the bag's length for means
    bags,
    columns_of_grad,
    SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the gradients of all occurrences. The grid is (B, F)."""
    bag, feature = tl.program_id(0), tl.program_id(1)
    first_column, is_mean = tl.load(features + feature * 4 + 2), tl.load(features + feature * 4 + 3) != 0
    begin, end = tl.load(offsets + feature * bags + bag), tl.load(offsets + feature * bags + bag + 1)
    one = tl.full((), 1.0, tl.float32)
    share = tl.where(is_mean, tl.math.div_rn(one, tl.maximum(end - begin, 1).to(tl.float32)), one)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(
            places + at, tl.zeros((BLOCK,), tl.int64) + bag.to(tl.int64) * columns_of_grad + first_column, mask=at < end
        )
        if SCALED:
            factor = tl.zeros((BLOCK,), tl.float32) + share
            if WEIGHTED:
                factor = tl.load(sample_weights + at, mask=at < end, other=0.0) * factor
            tl.store(scale + at, factor, mask=at < end)


@triton.jit
def _gradient(
    grad,
    places,
    scale,
    occurrence,
    columns,
    wanted,
    D: tl.constexpr,
    ALIGNED: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Returns the given columns of the gradient of one occurrence, scaled."""
    if POOLED:
        place = tl.multiple_of(tl.load(places + occurrence), ALIGNED)
    else:
        place = occurrence.to(tl.int64) * D
    value = tl.load(grad + place + columns, mask=wanted, other=0.0)
    if SCALED:
        value = value * tl.load(scale + occurrence)
    return value


@triton.jit
def row_gradient(
    grad,
    places,
    scale,
    occurrences,
    begin,
    end,
    columns,
    D: tl.constexpr,
    ALIGNED: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Returns some columns of the sum of the gradients of `occurrences[begin:end]`, at least one, in their order.

    The sum starts with the first gradient and not with zero, so that the gradient of a single occurrence is bitwise unchanged.
    AT_ONCE gradients are loaded before the first of them is added.
    """
    inside = columns < D
    total = _gradient(grad, places, scale, tl.load(occurrences + begin), columns, inside, D, ALIGNED, POOLED, SCALED)
    for first in range(begin + 1, end, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            at = first + step
            there = at < end
            occurrence = tl.load(occurrences + at, mask=there, other=0)
            value = _gradient(grad, places, scale, occurrence, columns, inside & there, D, ALIGNED, POOLED, SCALED)
            total = tl.where(there, total + value, total)
    return total


@triton.jit
def gradient_sums(
    begins,  # int32 [n]
    ends,  # int32 [n]
    occurrences,  # int32 [N']
    grad,
    places,
    scale,
    out,  # float32 [n, D]
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Sums the gradients of `occurrences[begins[i]:ends[i]]` for each i. The grid is (n, blocks of columns)."""
    number = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(begins + number), tl.load(ends + number)
    total = row_gradient(grad, places, scale, occurrences, begin, end, columns, D, ALIGNED, POOLED, SCALED, AT_ONCE)
    tl.store(out + number.to(tl.int64) * D + columns, total, mask=columns < D)
