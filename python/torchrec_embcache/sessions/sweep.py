"""Sweeps: the rows that the tables' policies of eviction take leave, when a user says so and before a save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from torchrec_embcache import _native
from torchrec_embcache.agreement import SweepInputs, gather_single_rank
from torchrec_embcache.collective import agree_on_arguments
from torchrec_embcache.eviction import Policy
from torchrec_embcache.exceptions import ConfigError, InputError, StateError
from torchrec_embcache.shards import ModuleShard, shards_of
from torchrec_embcache.sweeping import needs_collective_sweep, sweep_prepared
from torchrec_embcache.table_names import display_name
from torchrec_embcache.table_shard import TableShard
from torchrec_embcache.whole_model import cache_modules

from .ranks import AllRanks, Ranks

__all__ = ["evict", "sweep_before_save", "tables_by_name"]

_log = logging.getLogger("torchrec_embcache.eviction")


def evict(model: nn.Module) -> None:
    """Sweep every table of `model` that has a policy of eviction, now, on all ranks together. Collective.

    A sweep is as of the last training step: it takes the rows that the policy's rules take after that step. They are missing from
    here on. Two calls after one step do what one does, but for `Ttl(seconds=...)` with the system's time. Call it between steps, on
    every rank. A table without a policy is left as it is. A policy with `every_steps=None` is applied before each save too, and
    one with a number of steps without any call.

    Raises on every rank, whichever rank has the error:
        InputError: `model` has no cache module.
        ConfigError: ranks have different policies for one table.
        StateError: ranks that share a table are at different steps, or a table is closed or cannot be used.
        ReadOnlyError: an SSD tier could not be written before.

    After one of these errors no table is swept.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, evict, eviction, optimizers
        >>> model = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5),
        ...     eviction=eviction.Policy([eviction.Ttl(steps=1)]),  # at saves, and when `evict` is called
        ... )
        >>> for id in (7, 8):
        ...     model(torch.tensor([id])).sum().backward()
        >>> evict(model)
        >>> [chunk.ids.tolist() for chunk in model.export()]
        [[8]]
    """
    tables: dict[str, TableShard] = {}

    def check() -> dict[str, object]:
        if not cache_modules(model):
            raise InputError(f"{type(model).__name__} has no cache module: nothing to evict from")
        tables.update(tables_by_name(shards_of(model)))
        return {}

    agree_on_arguments("evict", check)
    _sweep(tables, AllRanks(), at_save=False)


def sweep_before_save(
    tables: Mapping[str, TableShard], ranks: Ranks, before_sweep: Callable[[], object] | None = None
) -> None:
    """Sweep those of `tables` whose policies say "at saves", before a save chooses what it writes. Collective.

    `before_sweep` is what has to be done first and may fail on one rank alone. Where ranks sweep together it fails on all of them
    then.

    Every way to save calls this once, before it begins a checkpoint. So a save whose sweep fails has written nothing. A second save
    after the same step writes the same rows, because a sweep after a step takes nothing that the one before left.

    A table that is not trained here is saved as it is: one without an optimizer, as for evaluation, and one of step 0. So is a
    table whose SSD tier could not be written: nothing may change in it, and its rows are to be rescued. So is a table that was not
    trained since it was loaded, where its policy takes a share of the rows: the save that it was loaded from has taken the share.
    """
    _sweep(tables, ranks, at_save=True, before_sweep=before_sweep)


def tables_by_name(shards: Sequence[ModuleShard]) -> dict[str, TableShard]:
    """The tables by what users call them."""
    return {display_name((module_path, table.name)): table for module_path, _, table in shards}


@dataclass(frozen=True)
class _TableSweepState:
    """What a rank says of a table before it is swept."""

    policy: Policy | None
    is_shared: bool
    is_due: bool
    step: int
    is_read_only: bool


def _sweep(
    tables: Mapping[str, TableShard], ranks: Ranks, *, at_save: bool, before_sweep: Callable[[], object] | None = None
) -> None:
    mine: dict[str, _TableSweepState] = {}

    def report_state() -> dict[str, _TableSweepState]:
        if before_sweep is not None:
            before_sweep()
        mine.update({name: _sweep_state(table, at_save=at_save) for name, table in tables.items()})
        return mine

    if not ranks.has_all_ranks and any(_is_collective(table, at_save=at_save) for table in tables.values()):
        ranks = _sweep_ranks(tables)
    everyone = ranks.gather(report_state)
    # All ranks see the same, so that all of them raise, or none.
    by_table = {
        name: {rank: said[name] for rank, said in enumerate(everyone) if name in said}
        for name in dict.fromkeys(name for said in everyone for name in said)
    }
    for name, said in by_table.items():
        _check_states_match(name, said)
    left_out = {name for name, said in by_table.items() if at_save and any(one.is_read_only for one in said.values())}
    for name in left_out:
        if name in mine and mine[name].is_due:
            _log.warning("table %s is saved without a sweep: its SSD tier, on a rank, could not be written", name)
    due = [name for name, said in mine.items() if said.is_due and name not in left_out]
    rules: dict[str, _native.SweepRule] = {}
    for name, said in by_table.items():
        shared = next((one for one in said.values() if one.is_shared and one.is_due), None)
        if name not in left_out and shared is not None and shared.policy is not None and shared.policy.is_collective:
            own = tables[name].native if name in mine and mine[name].is_shared else None
            rules[name] = shared.policy.resolve(SweepInputs(shared.step, own, ranks.gather))

    def prepare() -> None:
        for name in due:
            policy = mine[name].policy
            if not mine[name].is_shared and policy is not None and policy.is_collective:
                rules[name] = policy.resolve(SweepInputs(mine[name].step, tables[name].native, gather_single_rank))
            tables[name].native.prepare_sweep(rules.get(name))

    def sweep() -> None:
        sweep_prepared([tables[name] for name in due], [rules.get(name) for name in due])

    ranks.gather(prepare)
    ranks.gather(sweep)


def _is_collective(table: TableShard, *, at_save: bool) -> bool:
    """Whether this rank cannot sweep the table without the others. By its settings alone, so that all ranks say the same."""
    life = table.settings.lifecycle
    return needs_collective_sweep(table) and (not at_save or (life.is_swept_at_saves and table.optimizer is not None))


def _sweep_ranks(tables: Mapping[str, TableShard]) -> AllRanks:
    """All ranks, where somebody else brings them together for the rest of a save. `StateError` where there is one process only."""
    ranks = AllRanks()
    if ranks.world_size == 1:
        name = next(name for name, table in tables.items() if needs_collective_sweep(table))
        raise StateError(
            f"table {name} is shared by {tables[name].world_size} ranks, which have to agree on what its eviction takes, and this "
            "process knows no other: initialise torch.distributed on all of them, and save on all of them together"
        )
    return ranks


def _sweep_state(table: TableShard, *, at_save: bool) -> _TableSweepState:
    """What this rank says of a table."""
    life, is_shared = table.settings.lifecycle, table.world_size > 1
    wanted = life.is_swept_at_saves and table.optimizer is not None if at_save else life.eviction is not None
    if not wanted:
        return _TableSweepState(life.eviction, is_shared, is_due=False, step=0, is_read_only=False)
    step = table.step()
    due = step > 0 or not at_save
    if not at_save:
        # Before any table is swept.
        table.native.check_writable()
    if at_save and life.eviction is not None and life.eviction.has_fraction_rule and step == table.loaded_step:
        due = False
    return _TableSweepState(life.eviction, is_shared, is_due=due, step=step, is_read_only=table.native.is_read_only())


def _check_states_match(name: str, states: Mapping[int, _TableSweepState]) -> None:
    """Raise where ranks that share the table do not say the same of it. `states` has what they say by rank."""
    shared = [(rank, said) for rank, said in states.items() if said.is_shared]
    for rank, said in shared[1:]:
        first_rank, first = shared[0]
        if said.policy != first.policy:
            raise ConfigError(
                f"table {name} has eviction={first.policy!r} on rank {first_rank} and eviction={said.policy!r} on rank {rank}: "
                "give all ranks the same"
            )
        if said.step != first.step:
            raise StateError(
                f"table {name} is at step {first.step} on rank {first_rank} and at step {said.step} on rank {rank}: sweep and save "
                "between steps, on all ranks"
            )
