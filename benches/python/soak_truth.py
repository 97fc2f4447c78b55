"""The expected rows of the serving soak at each checkpoint, as a pure function of the training step.

A training step adds 1 to each column of every row that it touches. All columns of a row are therefore the number of touches since
it was inserted, which float32 represents exactly, so a partially written row or a row of another checkpoint is detectable. Each id
is touched for a while, then not touched for long enough that an eviction rule expires its row, and then touched again, from 0 on.
Id 0 is touched by every step: the values of its row are the step.

Shapes: N ids.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CLOCK", "Truth"]

Ids = NDArray[np.int64]

# The id that every step touches.
CLOCK = 0


@dataclass(frozen=True)
class Truth:
    """The rows of a table with the ids 1 to `ids`, and `CLOCK`. All fields but `ids` are numbers of training steps.

    In each `cycle` an id is touched every `every` steps during the first `active` steps. A save follows every `save_every` steps.
    """

    ids: int
    save_every: int = 4
    every: int = 3
    active: int = 24
    cycle: int = 96
    ttl: int = 20

    def __post_init__(self) -> None:
        # A row expires before its id is touched again, even if some saves fail.
        assert self.cycle - self.active > self.ttl + self.every + 8 * self.save_every

    def _place_in_cycle(self, ids: Ids, step: int) -> Ids:
        return (step + ids * 7919) % self.cycle

    def touched(self, step: int) -> Ids:
        """Returns the ids that a step touches: int64 [N]."""
        ids = np.arange(1, self.ids + 1, dtype=np.int64)
        is_touched = (self._place_in_cycle(ids, step) < self.active) & ((ids + step) % self.every == 0)
        return np.concatenate([np.array([CLOCK], dtype=np.int64), ids[is_touched]])

    def rows(self, ids: Ids, step: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Returns the value of each column of each id's row at the checkpoint saved after `step`, 0 for an id without a row, and
        True for each id that has a row: float32 [N], bool [N].
        """
        begin = step - self._place_in_cycle(ids, step)  # start of the cycle
        first = np.maximum(begin, 1)
        last = np.minimum(step, begin + self.active - 1)
        last_touch = last - (last + ids) % self.every
        touches = np.maximum((last + ids) // self.every - (first - 1 + ids) // self.every, 0)
        found = (touches > 0) & (step - last_touch < self.ttl)
        is_clock = ids == CLOCK
        values = np.where(is_clock, step, np.where(found, touches, 0)).astype(np.float32)
        return values, found | is_clock
