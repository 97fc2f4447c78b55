"""The backward pass by distinct row, fused with the optimizer.

`numbers` is float32 [T, 9], in the order of `launch.update_numbers`. The formulas are those of the Rust module
`kernels::optimizer`.
"""

import triton
import triton.language as tl

from .gradients import row_gradient
from .lanes import add_to_lanes, float_pointer, sum_of_lanes

__all__ = ["update_by_columns", "update_by_rows"]


@triton.jit
def _decayed(gradient, weights, decay):
    return tl.where(decay == 0.0, gradient, gradient + decay * weights)


@triton.jit
def _divide_or_zero(values, divisor):
    is_zero = divisor == 0.0
    return tl.where(is_zero, 0.0, tl.math.div_rn(values, tl.where(is_zero, 1.0, divisor)))


@triton.jit
def _adagrad(w, g, sums, lr, eps):
    sums = sums + g * g
    return w - tl.math.div_rn(lr * g, tl.math.sqrt_rn(sums) + eps), sums


@triton.jit
def _ftrl(w, g, z, before, per_lr, beta, l1, l2):
    n = before + g * g
    root = tl.math.sqrt_rn(n)
    sigma = (root - tl.math.sqrt_rn(before)) * per_lr
    z = z + (g - sigma * w)
    divisor = (beta + root) * per_lr + l2
    shrunk = tl.where(tl.abs(z) <= l1, 0.0, z - tl.where(z < 0.0, -l1, l1))
    return _divide_or_zero(0.0 - shrunk, divisor), z, n


@triton.jit
def _moments(g, first, second, numbers):
    """Returns the moments updated by the gradient."""
    beta1, beta2 = tl.load(numbers + 3), tl.load(numbers + 4)
    fresh1, fresh2 = tl.load(numbers + 5), tl.load(numbers + 6)
    return beta1 * first + fresh1 * g, beta2 * second + fresh2 * (g * g)


@triton.jit
def _root_of_second(second, numbers):
    """Returns the root of the bias-corrected second moment, plus `eps`."""
    return tl.math.sqrt_rn(second * tl.load(numbers + 8)) + tl.load(numbers + 1)


@triton.jit
def _lamb_direction(first, second, w, numbers):
    direction = _divide_or_zero(first * tl.load(numbers + 7), _root_of_second(second, numbers))
    return _decayed(direction, w, tl.load(numbers + 2))


@triton.jit
def _by_columns(w, g, first_slot, second_slot, at, inside, numbers, KIND: tl.constexpr):
    """Updates some columns of a row with an optimizer that requires no sum over the row. Returns the new weights."""
    lr, eps, decay = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    if KIND != "adamw":
        g = _decayed(g, w, decay)
    if KIND == "sgd":
        new = w - lr * g
    elif KIND == "adagrad":
        new, sums = _adagrad(w, g, tl.load(first_slot + at, mask=inside, other=0.0), lr, eps)
        tl.store(first_slot + at, sums, mask=inside)
    else:
        first = tl.load(first_slot + at, mask=inside, other=0.0)
        second = tl.load(second_slot + at, mask=inside, other=0.0)
        if KIND == "ftrl":
            l1, l2 = tl.load(numbers + 5), tl.load(numbers + 6)
            new, first, second = _ftrl(w, g, first, second, tl.load(numbers + 3), tl.load(numbers + 4), l1, l2)
        else:
            tl.static_assert((KIND == "adam") | (KIND == "adamw"), "no update by columns is of this kind")
            first, second = _moments(g, first, second, numbers)
            direction = tl.math.div_rn(first * tl.load(numbers + 7), _root_of_second(second, numbers))
            if KIND == "adamw":
                direction = _decayed(direction, w, decay)
            new = w - lr * direction
        tl.store(first_slot + at, first, mask=inside)
        tl.store(second_slot + at, second, mask=inside)
    return new


@triton.jit
def _rowwise_multiplier(scalars, slot, mean_of_squares, numbers, KIND: tl.constexpr):
    """Updates the row's scalar slot. Returns the factor for its gradient or first moment."""
    before = tl.load(scalars + slot)
    if KIND == "rowwise_adagrad":
        after = before + mean_of_squares
        multiplier = tl.math.div_rn(tl.load(numbers), tl.math.sqrt_rn(after) + tl.load(numbers + 1))
    else:
        tl.static_assert(KIND == "partial_rowwise_adam", "no update by rows is of this kind")
        after = tl.load(numbers + 4) * before + tl.load(numbers + 6) * mean_of_squares
        multiplier = tl.math.div_rn(tl.load(numbers + 7), _root_of_second(after, numbers))
    tl.debug_barrier()  # every thread has read the value before it is overwritten
    tl.store(scalars + slot, after)
    return multiplier


@triton.jit
def _by_row(w, g, multiplier, first_slot, at, inside, numbers, KIND: tl.constexpr):
    """Updates some columns of a row with an optimizer that has one scalar per row. Returns the new weights."""
    decay = tl.load(numbers + 2)
    if KIND == "rowwise_adagrad":
        return w - multiplier * _decayed(g, w, decay)
    else:
        before = tl.load(first_slot + at, mask=inside, other=0.0)
        first = tl.load(numbers + 3) * before + tl.load(numbers + 5) * g
        tl.store(first_slot + at, first, mask=inside)
        return w - tl.load(numbers) * _decayed(first * multiplier, w, decay)


@triton.jit
def _trust_ratio(of_weights, of_direction):
    """Returns the norm of the weights divided by the norm of the direction, from their sums of squares; 1 if either is 0."""
    either = (of_weights == 0.0) | (of_direction == 0.0)
    norm = tl.math.sqrt_rn(tl.where(either, 1.0, of_direction))
    return tl.where(either, 1.0, tl.math.div_rn(tl.math.sqrt_rn(of_weights), norm))


@triton.jit
def _tier(tiers, tables, row):
    """Returns the addresses of the weights, the two vector slots and the scalar slot, and the row's table."""
    table = tl.load(tables + row)
    first_slot, second_slot = float_pointer(tiers, table * 4 + 1), float_pointer(tiers, table * 4 + 2)
    return float_pointer(tiers, table * 4), first_slot, second_slot, float_pointer(tiers, table * 4 + 3), table


@triton.jit
def update_by_columns(
    tiers,  # int64 [T, 4]: for each table the addresses of its weights, its two vector slots, and its scalar slot
    numbers,
    tables,  # int32 [U]: the table of each distinct row
    slots,  # int32 [U]: its cache slot; -1: the row is not updated
    starts,  # int32 [U + 1]: start of its occurrences
    occurrences,  # int32 [N']
    grad,  # float32 [B, C], or [N, D] if POOLED is false
    places,  # int64 [N], the output of `gradients.gradient_places`
    scale,  # float32 [N], likewise
    KIND: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Sums each distinct row's gradient in the order of its occurrences, and updates the row once. The grid is (U,).

    For optimizers that update each column independently.
    """
    row = tl.program_id(0)
    slot, begin, end = tl.load(slots + row).to(tl.int64), tl.load(starts + row), tl.load(starts + row + 1)
    if (slot < 0) | (begin == end):
        return
    weights, first_slot, second_slot, _scalars, table = _tier(tiers, tables, row)
    for block in range(BLOCKS):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside, at = columns < D, slot * D + columns
        g = row_gradient(grad, places, scale, occurrences, begin, end, columns, D, ALIGNED, POOLED, SCALED, AT_ONCE)
        w = tl.load(weights + at, mask=inside, other=0.0)
        new = _by_columns(w, g, first_slot, second_slot, at, inside, numbers + table * 9, KIND)
        tl.store(weights + at, new, mask=inside)


@triton.jit
def _first_pass(w, g, first_slot, second_slot, at, inside, numbers, KIND: tl.constexpr):
    """Returns the values whose squares are summed over some columns of a row, and the moments there. Updates LAMB's moments."""
    first, second = w, w
    value = g
    if KIND == "rowwise_adagrad":
        value = _decayed(g, w, tl.load(numbers + 2))
    elif KIND == "lamb":
        first, second = (
            tl.load(first_slot + at, mask=inside, other=0.0),
            tl.load(second_slot + at, mask=inside, other=0.0),
        )
        first, second = _moments(g, first, second, numbers)
        tl.store(first_slot + at, first, mask=inside)
        tl.store(second_slot + at, second, mask=inside)
        # Lanes past the row's end contribute 0.
        value = tl.where(inside, _lamb_direction(first, second, w, numbers), 0.0)
    return value, first, second


@triton.jit
def _second_pass(w, g, first, second, multiplier, first_slot, at, inside, numbers, KIND: tl.constexpr):
    """Returns the new weights of some columns from the first pass. LAMB only reads its moments, the others the gradient."""
    if KIND == "lamb":
        return w - multiplier * _lamb_direction(first, second, w, numbers)
    else:
        return _by_row(w, g, multiplier, first_slot, at, inside, numbers, KIND)


@triton.jit
def _multiplier(scalars, slot, squares, squares_of_weights, numbers, KIND: tl.constexpr, D: tl.constexpr):
    """Returns the factor of the second pass, from the sums of the first. Updates the scalar slot, if there is one."""
    total = sum_of_lanes(squares)
    if KIND == "lamb":
        return tl.load(numbers) * _trust_ratio(sum_of_lanes(squares_of_weights), total)
    else:
        return _rowwise_multiplier(scalars, slot, tl.math.div_rn(total, tl.full((), D, tl.float32)), numbers, KIND)


@triton.jit
def update_by_rows(
    tiers,
    numbers,
    tables,
    slots,
    starts,
    occurrences,
    grad,
    places,
    scale,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Like `update_by_columns`, with the same arguments, for optimizers that require sums over the row.

    A first pass computes the sums. The first BLOCK columns are kept in registers for the second pass. For the remaining columns of
    a wider row, the gradient is summed again.
    """
    row = tl.program_id(0)
    slot, begin, end = tl.load(slots + row).to(tl.int64), tl.load(starts + row), tl.load(starts + row + 1)
    if (slot < 0) | (begin == end):
        return
    weights, first_slot, second_slot, scalars, table = _tier(tiers, tables, row)
    numbers += table * 9
    columns = tl.arange(0, BLOCK)
    g = row_gradient(grad, places, scale, occurrences, begin, end, columns, D, ALIGNED, POOLED, SCALED, AT_ONCE)
    w = tl.load(weights + slot * D + columns, mask=columns < D, other=0.0)
    value, first, second = _first_pass(w, g, first_slot, second_slot, slot * D + columns, columns < D, numbers, KIND)
    squares = add_to_lanes(tl.zeros((16,), tl.float32), value * value, BLOCK // 16)
    squares_of_weights = tl.zeros((16,), tl.float32)
    if KIND == "lamb":
        squares_of_weights = add_to_lanes(squares_of_weights, w * w, BLOCK // 16)
    for block in range(1, BLOCKS):
        there = block * BLOCK + columns
        more = row_gradient(grad, places, scale, occurrences, begin, end, there, D, ALIGNED, POOLED, SCALED, AT_ONCE)
        of_block = tl.load(weights + slot * D + there, mask=there < D, other=0.0)
        summed, _, _ = _first_pass(of_block, more, first_slot, second_slot, slot * D + there, there < D, numbers, KIND)
        squares = add_to_lanes(squares, summed * summed, BLOCK // 16)
        if KIND == "lamb":
            squares_of_weights = add_to_lanes(squares_of_weights, of_block * of_block, BLOCK // 16)
    multiplier = _multiplier(scalars, slot, squares, squares_of_weights, numbers, KIND, D)
    new = _second_pass(w, g, first, second, multiplier, first_slot, slot * D + columns, columns < D, numbers, KIND)
    tl.store(weights + slot * D + columns, new, mask=columns < D)
    if BLOCKS > 1:
        tl.debug_barrier()  # values that are read again may have been written by other threads
    for block in range(1, BLOCKS):
        there = block * BLOCK + columns
        at, inside = slot * D + there, there < D
        of_block = tl.load(weights + at, mask=inside, other=0.0)
        if KIND == "lamb":
            old = tl.load(first_slot + at, mask=inside, other=0.0)
            older = tl.load(second_slot + at, mask=inside, other=0.0)
            changed = _second_pass(of_block, of_block, old, older, multiplier, first_slot, at, inside, numbers, KIND)
        else:
            more = row_gradient(
                grad, places, scale, occurrences, begin, end, there, D, ALIGNED, POOLED, SCALED, AT_ONCE
            )
            changed = _second_pass(of_block, more, more, more, multiplier, first_slot, at, inside, numbers, KIND)
        tl.store(weights + at, changed, mask=inside)
