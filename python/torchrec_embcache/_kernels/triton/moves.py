"""Copies rows between cache slots and contiguous memory, for demotions from a device tier and promotions into it."""

import triton
import triton.language as tl

from .lanes import float_pointer

__all__ = ["move_rows"]


@triton.jit
def move_rows(
    tier,  # int64 [4]: the addresses of a table's weights, its two vector slots, and its scalar slot
    slots,  # int32 [n], distinct
    vectors,  # float32 [n, V]: the weights of each row, then its vector slots
    scalars,  # float32 [n]
    count,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SCALAR: tl.constexpr,
    INTO_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copies rows from `vectors` and `scalars` into cache slots, or out of them.

    The grid is (blocks of ROWS rows, blocks of columns, PARTS).
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    part = tl.program_id(2)
    wanted = (row < count) & (columns < D)
    slot = tl.load(slots + row, mask=row < count, other=0).to(tl.int64)
    in_tier = float_pointer(tier, part) + slot * D + columns
    outside = vectors + row.to(tl.int64) * (D * PARTS) + part * D + columns
    if INTO_SLOTS:
        tl.store(in_tier, tl.load(outside, mask=wanted, other=0.0), mask=wanted)
    else:
        tl.store(outside, tl.load(in_tier, mask=wanted, other=0.0), mask=wanted)
    if HAS_SCALAR:
        if (part == 0) & (tl.program_id(1) == 0):
            in_tier_scalars = float_pointer(tier, 3)
            if INTO_SLOTS:
                tl.store(in_tier_scalars + slot, tl.load(scalars + row, mask=row < count, other=0.0), mask=row < count)
            else:
                tl.store(scalars + row, tl.load(in_tier_scalars + slot, mask=row < count, other=0.0), mask=row < count)
