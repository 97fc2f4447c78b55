"""Splits the occurrences of distinct rows into parts that are summed separately. Computed on the CPU, before a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PART_OCCURRENCES", "RowParts", "split_rows"]

Integers = NDArray[np.signedinteger[Any]]

# Gradients of a row are summed in parts of this many, then the sums of the parts. Same value as in the Rust backward.
PART_OCCURRENCES = 256


@dataclass(frozen=True)
class RowParts:
    """The parts of n rows.

    Row i has the parts `starts[i]` to `starts[i + 1]`, and part p has the occurrences `begins[p]` to `ends[p]`.
    """

    begins: Integers
    ends: Integers
    starts: Integers


def split_rows(begins: Integers, ends: Integers) -> RowParts:
    """Returns the parts of rows whose occurrences are `begins[i]` to `ends[i]`, at least one each.

    Examples:
        >>> parts = split_rows(np.array([0, 600]), np.array([600, 601]))
        >>> parts.begins.tolist(), parts.ends.tolist(), parts.starts.tolist()
        ([0, 256, 512, 600], [256, 512, 600, 601], [0, 3, 4])
    """
    counts = -(-(ends - begins) // PART_OCCURRENCES)
    starts = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    first = np.repeat(begins, counts) + within * PART_OCCURRENCES
    return RowParts(first, np.minimum(first + PART_OCCURRENCES, np.repeat(ends, counts)), starts)
