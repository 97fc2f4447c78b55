"""What ranks that share tables do together in a step, beside the exchanges of the batch."""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from torchrec_embcache.cache import CacheTable, internals
from torchrec_embcache.collective import all_gather
from torchrec_embcache.exceptions import StateError

__all__ = ["add_up", "agree_on_steps"]


def add_up(values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up the values of all ranks, in place. Collective. Integers, so that the order does not matter."""
    dist.all_reduce(values, dist.ReduceOp.SUM, group)


def agree_on_steps(tables: Mapping[str, CacheTable], group: dist.ProcessGroup | None) -> None:
    """Count a backward that failed on some ranks as a step of all: a table whose ranks count differently could not be saved.

    The row that refused ids share becomes that of a rank which made the step, because it is the same on all ranks.
    """
    mine: dict[str, tuple[int, NDArray[np.float32] | None]] = {}
    for name, table in tables.items():
        # A table that was half updated refuses to say its step. The other ranks wait for this rank all the same.
        with suppress(StateError):
            if table.is_open:
                mine[name] = table.step(), internals(table).native.shared_row()
    for theirs in all_gather(mine, group):
        for name, (step, shared_row) in theirs.items():
            if name in mine and step > mine[name][0]:
                mine[name] = step, shared_row
                native = internals(tables[name]).native
                native.set_step(step)
                if shared_row is not None:
                    native.set_shared_row(shared_row)
