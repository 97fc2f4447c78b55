"""Schedule of sweeps whose rules need agreement of the ranks that share a table.

Rules that depend only on a row's own columns and on the step need no agreement; the native table sweeps by them without this
module.
"""

from collections.abc import Sequence

from torchrec_embcache._autograd import raise_at_end_of_backward
from torchrec_embcache._dist.ranks import Ranks, SingleRank

from .cache_table import CacheTable, sweep_tables

__all__ = ["sweep_after_step", "sweep_in_backward", "tables_swept_after_steps"]


def tables_swept_after_steps(tables: Sequence[CacheTable], *, by_ranks: bool) -> list[CacheTable]:
    """Returns those of `tables` for which `sweep_after_step` is to be called, by each rank separately or by the ranks together."""
    return [table for table in tables if _every_steps(table) is not None and table._needs_collective_sweep is by_ranks]


def _every_steps(table: CacheTable) -> int | None:
    policy = table.eviction
    return policy.every_steps if policy is not None and policy.is_collective else None


def sweep_after_step(tables: Sequence[CacheTable], ranks: Ranks) -> None:
    """Sweeps those of `tables` whose sweep is due after a committed training step. Collective, if one is due.

    The tables are those of `tables_swept_after_steps`, in the same order on every rank, and were trained by one batch. An error on
    one rank is raised on all, and then no table was swept.
    """
    due = []
    for table in tables:
        step = table._native_table.step()
        every = _every_steps(table)
        if every is not None and step % every == 0:
            due.append((table, step))
    for step in dict.fromkeys(step for _, step in due):
        sweep_tables([table for table, at in due if at == step], step, ranks)


def sweep_in_backward(tables: Sequence[CacheTable], *, until_done: bool) -> None:
    """Like `sweep_after_step`, within a backward, for tables that this rank sweeps on its own.

    With `until_done` an error is raised at the end of the entire backward: the step is already made, and the other modules of the
    loss, and DDP's reducer, need the rest of the backward.
    """
    try:
        sweep_after_step(tables, SingleRank())
    except Exception as error:
        if not until_done:
            raise
        raise_at_end_of_backward(error)
