"""The forward pass, and the gradient of per-sample weights.

A program processes one bag of one feature, or some occurrences of a feature. `features` is int64 [F, 4]: for each feature the
address of its table's weights, the address of the row read for missing ids (0: they read zeros), its first column in the output,
and 1 for mean pooling. `members` is int32 [m]: the features of the launch, which have one width. `slots` is int32 [N]: the cache
slot of each occurrence, -1 for a missing id. ALIGNED divides the first columns and the widths.
"""

import triton
import triton.language as tl

from .lanes import add_to_lanes, float_pointer, sum_of_lanes

__all__ = ["pooled_rows", "sequence_rows", "weight_gradients"]


@triton.jit
def _row(weights, missing, slot, columns, wanted, D: tl.constexpr):
    """Returns the given columns of the row read by an occurrence in `slot`."""
    is_absent = slot < 0
    row = tl.where(is_absent, missing, weights + slot.to(tl.int64) * D)
    return tl.load(row + columns, mask=wanted, other=0.0)


@triton.jit
def pooled_rows(
    members,
    features,
    slots,
    offsets,  # int32 [F * B + 1]: start of each bag in `slots`
    sample_weights,  # float32 [N], ignored if WEIGHTED is false
    out,  # float32 [B, C]
    bags,
    columns_of_out,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Sums or averages the rows of each bag. The grid is (B, m, blocks of columns)."""
    bag, feature = tl.program_id(0), tl.load(members + tl.program_id(1))
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    weights, absent = float_pointer(features, feature * 4), float_pointer(features, feature * 4 + 1)
    reads_absent = tl.load(features + feature * 4 + 1) != 0
    first_column = tl.load(features + feature * 4 + 2)
    is_mean = tl.load(features + feature * 4 + 3) != 0
    begin, end = tl.load(offsets + feature * bags + bag), tl.load(offsets + feature * bags + bag + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            at = first + step
            slot = tl.load(slots + at, mask=at < end, other=-1)
            counts = (at < end) & ((slot >= 0) | reads_absent)
            value = _row(weights, absent, slot, columns, inside & counts, D)
            if WEIGHTED:
                value = value * tl.load(sample_weights + at, mask=counts, other=0.0)
            total = tl.where(counts, total + value, total)
    if is_mean & (end > begin):
        total = tl.math.div_rn(total, (end - begin).to(tl.float32))
    start = tl.multiple_of(bag.to(tl.int64) * columns_of_out + first_column, ALIGNED)
    tl.store(out + start + columns, total, mask=inside)


@triton.jit
def sequence_rows(
    features,
    slots,
    starts,  # int32 [F + 1]: start of each feature's occurrences in `slots`
    out,  # float32 [N, D]
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copies the row of each occurrence. The grid is (blocks of ROWS occurrences of the longest feature, F, blocks of columns)."""
    feature = tl.program_id(1)
    columns = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[None, :]
    weights, absent = float_pointer(features, feature * 4), float_pointer(features, feature * 4 + 1)
    reads_absent = tl.load(features + feature * 4 + 1) != 0
    begin, end = tl.load(starts + feature), tl.load(starts + feature + 1)
    at = (begin + tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    slot = tl.load(slots + at, mask=at < end, other=-1)
    wanted = (at < end) & (columns < D)
    row = tl.where(slot < 0, absent, weights + slot.to(tl.int64) * D)
    if D % 4 == 0:
        row = tl.multiple_of(row, (16, 1))
    value = tl.load(row + columns, mask=wanted & ((slot >= 0) | reads_absent), other=0.0)
    tl.store(out + at.to(tl.int64) * D + columns, value, mask=wanted)


@triton.jit
def weight_gradients(
    members,
    features,
    slots,
    offsets,  # int32 [F * B + 1]
    grad,  # float32 [B, C], gradient of the pooled output
    out,  # float32 [N]
    bags,
    columns_of_grad,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Computes the gradient of each occurrence's weight: its row times the gradient of its bag, divided by the bag's length for
    means.

    Rows have their values before the update. The grid is (B, m).
    """
    bag, feature = tl.program_id(0), tl.load(members + tl.program_id(1))
    weights, absent = float_pointer(features, feature * 4), float_pointer(features, feature * 4 + 1)
    reads_absent = tl.load(features + feature * 4 + 1) != 0
    first_column = tl.load(features + feature * 4 + 2)
    is_mean = tl.load(features + feature * 4 + 3) != 0
    begin, end = tl.load(offsets + feature * bags + bag), tl.load(offsets + feature * bags + bag + 1)
    of_bag = grad + tl.multiple_of(bag.to(tl.int64) * columns_of_grad + first_column, ALIGNED)
    one = tl.full((), 1.0, tl.float32)
    share = tl.where(is_mean, tl.math.div_rn(one, tl.maximum(end - begin, 1).to(tl.float32)), one)
    for at in range(begin, end):
        slot = tl.load(slots + at)
        lanes = tl.zeros((16,), tl.float32)
        for block in range(BLOCKS):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < D
            read = inside & ((slot >= 0) | reads_absent)
            # An occurrence that reads no row has gradient 0 even if the bag's gradient is infinite.
            gradient = tl.load(of_bag + columns, mask=read, other=0.0)
            lanes = add_to_lanes(lanes, gradient * _row(weights, absent, slot, columns, read, D), BLOCK // 16)
        tl.store(out + at, sum_of_lanes(lanes) * share)
