"""Which occurrences of distinct rows are summed by themselves: the decisions on the CPU, before a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["OCCURRENCES_OF_A_PART", "Parts", "parts_of"]

Integers = NDArray[np.signedinteger[Any]]

# So many gradients of a row are summed one after another, and then the sums of such parts. It is that of the core's backward.
OCCURRENCES_OF_A_PART = 256


@dataclass(frozen=True)
class Parts:
    """The parts of n rows.

    Those of row i are `starts[i]` to `starts[i + 1]`, and part p has the occurrences `begins[p]` to `ends[p]`.
    """

    begins: Integers
    ends: Integers
    starts: Integers


def parts_of(begins: Integers, ends: Integers) -> Parts:
    """The parts of rows whose occurrences are `begins[i]` to `ends[i]`, of which there is one at least.

    Examples:
        >>> parts = parts_of(np.array([0, 600]), np.array([600, 601]))
        >>> parts.begins.tolist(), parts.ends.tolist(), parts.starts.tolist()
        ([0, 256, 512, 600], [256, 512, 600, 601], [0, 3, 4])
    """
    counts = -(-(ends - begins) // OCCURRENCES_OF_A_PART)
    starts = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    first = np.repeat(begins, counts) + within * OCCURRENCES_OF_A_PART
    return Parts(first, np.minimum(first + OCCURRENCES_OF_A_PART, np.repeat(ends, counts)), starts)
