"""Offsets of bags of ids.

Shapes: N ids, B bags, F features.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache.exceptions import InputError
from torchrec_embcache.table.rows import check_dense, ids_array

__all__ = ["bag_offsets", "check_offsets"]

I64 = NDArray[np.int64]


def bag_offsets(
    input: Tensor,  # noqa: A002
    ids: I64,
    offsets: object,
    *,
    include_last_offset: bool,
    device: torch.device,
) -> I64:
    """Returns the bounds of the bags in `ids` [N], the ids of `input`: int64 [B + 1].

    `input` and `offsets` have the meaning of `torch.nn.EmbeddingBag`. Raises `InputError` if they do not match.
    """
    if input.dim() == 2:
        if offsets is not None:
            raise InputError("offsets with a 2-D input: each row is a bag already; leave offsets out")
        bounds = np.arange(input.shape[0] + 1, dtype=np.int64) * input.shape[1]
    elif input.dim() == 1:
        if offsets is None:
            raise InputError("offsets=None with a 1-D input: give the position where each bag starts")
        if isinstance(offsets, Tensor):
            check_dense("offsets", offsets)
        if isinstance(offsets, Tensor) and offsets.dim() != 1:
            raise InputError(f"offsets has shape {list(offsets.shape)}: give [B], or [B + 1] with include_last_offset")
        bounds = ids_array(offsets, "offsets", device)
        if not include_last_offset:
            bounds = np.append(bounds, len(ids))
    else:
        raise InputError(f"input has shape {list(input.shape)}: give [N] with offsets, or [B, L]")
    if len(bounds) == 1 and len(ids) and not include_last_offset and input.dim() == 1:
        raise InputError(f"offsets is empty and there are {len(ids)} ids: give the position where each bag starts")
    check_offsets(bounds, len(ids), 1)
    return bounds


def check_offsets(offsets: I64, count: int, features: int) -> None:
    """Raises `InputError` unless `offsets` [F * B + 1] start at 0, are non-decreasing and end at `count`, where F is `features`."""
    if len(offsets) == 0 or (len(offsets) - 1) % features:
        raise InputError(f"offsets has {len(offsets)} entries: give bags * {features} + 1")
    if offsets[0] != 0:
        raise InputError(f"offsets[0]={offsets[0]}: the first bag starts at 0")
    if offsets[-1] != count:
        raise InputError(
            f"offsets[{len(offsets) - 1}]={offsets[-1]} and there are {count} ids: the last bag ends where the ids end"
        )
    steps = np.diff(offsets)
    if len(steps) and steps.min() < 0:
        index = int(np.argmax(steps < 0))
        if offsets[index] > count:
            raise InputError(
                f"offsets[{index}]={offsets[index]} and there are {count} ids: no bag starts past their end"
            )
        raise InputError(
            f"offsets[{index + 1}]={offsets[index + 1]} is below offsets[{index}]={offsets[index]}: sort them"
        )
