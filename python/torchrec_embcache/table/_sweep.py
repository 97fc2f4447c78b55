"""Sweeps whose rules need agreement of the ranks that share a table: their schedule, and all-or-nothing sweeps on all ranks.

Rules that depend only on a row's own columns and on the step need no agreement; the native table sweeps by them without this
module.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_embcache import _native
from torchrec_embcache._autograd import raise_at_end_of_backward
from torchrec_embcache.config import to_float
from torchrec_embcache.eviction._inputs import RankGather, SweepInputs, gather_single_rank
from torchrec_embcache.exceptions import InputError, StateError

from ._shard import TableShard

__all__ = [
    "needs_collective_sweep",
    "set_time_single_rank",
    "sweep_after_step",
    "sweep_in_backward",
    "sweep_prepared",
    "sweep_single_rank",
    "tables_swept_after_steps",
    "to_milliseconds",
]

_MAX_SECONDS = 1 << 52


def needs_collective_sweep(table: TableShard) -> bool:
    """True if a sweep of the table depends on other ranks: its rule is collective, and the table is sharded over them.

    Depends only on settings, so that all of these ranks agree, even ranks that own no bucket of a loaded checkpoint.
    """
    policy = table.settings.lifecycle.eviction
    return policy is not None and policy.is_collective and table.is_sharded


def tables_swept_after_steps(tables: Sequence[TableShard], *, by_ranks: bool) -> list[TableShard]:
    """Returns those of `tables` for which `sweep_after_step` is to be called, by each rank separately or by the ranks together."""
    return [table for table in tables if _every_steps(table) is not None and needs_collective_sweep(table) is by_ranks]


def _every_steps(table: TableShard) -> int | None:
    policy = table.settings.lifecycle.eviction
    return policy.every_steps if policy is not None and policy.is_collective else None


def sweep_single_rank(table: TableShard) -> None:
    """Sweeps a table for its last step. Raises `StateError` if other ranks have to agree on the rows to evict."""
    if needs_collective_sweep(table):
        raise StateError(
            f"table {table.name!r} is shared by {table.world_size} ranks, which have to agree on what its eviction takes: call "
            "torchrec_embcache.evict(model) on all of them"
        )
    policy = table.settings.lifecycle.eviction
    if policy is None or not policy.is_collective:
        table.sweep()
        return
    _sweep([table], table.step(), gather_single_rank)


def to_milliseconds(field: str, seconds: object) -> int:
    """Returns `seconds` as milliseconds, rounded. Raises `InputError` unless it is a number from 0 to 2^52."""
    number = to_float(seconds)
    if number is None or not 0 <= number <= _MAX_SECONDS:
        raise InputError(f"{field}({seconds!r}): give seconds as a number from 0 to 2^52, an int or a float")
    return round(number * 1000)


def set_time_single_rank(table: TableShard, seconds: float) -> None:
    """Sets a table's event time for `Ttl(seconds=...)`, if it has one. Raises `StateError` if other ranks share the table."""
    if needs_collective_sweep(table):
        raise StateError(
            f"table {table.name!r} is shared by {table.world_size} ranks, which have one time: call "
            "torchrec_embcache.set_time(model, seconds) on all of them"
        )
    time = to_milliseconds("set_time", seconds)
    if table.settings.lifecycle.needs_clock:
        table.native.set_time(time)


def sweep_after_step(tables: Sequence[TableShard], gather: RankGather) -> None:
    """Sweeps those of `tables` whose sweep is due after a committed training step. Collective, if one is due.

    The tables are those of `tables_swept_after_steps`, in the same order on every rank, and were trained by one batch. An error on
    one rank is raised on all, and then no table was swept.
    """
    due = []
    for table in tables:
        step = table.native.step()
        every = _every_steps(table)
        if every is not None and step % every == 0:
            due.append((table, step))
    for step in dict.fromkeys(step for _, step in due):
        _sweep([table for table, at in due if at == step], step, gather)


def sweep_in_backward(tables: Sequence[TableShard], *, until_done: bool) -> None:
    """Like `sweep_after_step`, within a backward, for tables that this rank sweeps on its own.

    With `until_done` an error is raised at the end of the entire backward: the step is already made, and the other modules of the
    loss, and DDP's reducer, need the rest of the backward.
    """
    try:
        sweep_after_step(tables, gather_single_rank)
    except Exception as error:
        if not until_done:
            raise
        raise_at_end_of_backward(error)


def _sweep(tables: Sequence[TableShard], step: int, gather: RankGather) -> None:
    rules: list[_native.SweepRule] = []
    for table in tables:
        policy = table.settings.lifecycle.eviction
        assert policy is not None, "only tables with a policy are swept"
        rules.append(policy.resolve(SweepInputs(step, table.native, gather)))

    def prepare() -> None:
        for table, rule in zip(tables, rules, strict=True):
            table.native.prepare_sweep(rule)

    gather(prepare)
    sweep_prepared(tables, rules)


def sweep_prepared(tables: Sequence[TableShard], rules: Sequence[_native.SweepRule | None]) -> None:
    """Sweeps prepared tables, each by its entry of `rules`, or by its own rule for None.

    Runs as one native call, so that Ctrl-C finds all of them swept, or none.
    """
    _native.sweep_tables([table.native for table in tables], list(rules))
