"""Eviction passes (sweeps) requested by the user and before a save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import Ranks, SingleRank, all_ranks
from torchrec_embcache.eviction import Policy
from torchrec_embcache.eviction._inputs import SweepInputs
from torchrec_embcache.exceptions import ConfigError, InputError, StateError
from torchrec_embcache.table.cache_table import CacheTable, sweep_prepared

from . import cache_modules
from ._names import display_name
from ._shards import ModuleShard, shards_of

__all__ = ["evict", "sweep_before_save", "tables_by_name"]

_log = logging.getLogger("torchrec_embcache.eviction")


def evict(model: nn.Module) -> None:
    """Runs one eviction pass on every table of `model` that has an eviction policy, on all ranks. Collective.

    A sweep evaluates the policy's rules for the last training step and removes the matching rows; their ids are missing afterwards.
    Two calls after one step have the same result as one, except for `Ttl(seconds=...)` with the system time. Call it between steps,
    on every rank. A table without a policy is not changed. A policy with `every_steps=None` also runs before each save; a policy
    with a number of steps runs without any call.

    Raises on every rank, regardless of the rank with the error:
        InputError: `model` has no cache module.
        ConfigError: ranks have different policies for one table.
        StateError: ranks that share a table are at different steps, or a table is closed or unusable.
        ReadOnlyError: an earlier write to an SSD tier failed.

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
    tables: dict[str, CacheTable] = {}

    def check() -> dict[str, object]:
        if not cache_modules(model):
            raise InputError(f"{type(model).__name__} has no cache module: nothing to evict from")
        tables.update(tables_by_name(shards_of(model)))
        return {}

    ranks = all_ranks()
    ranks.agree_on_arguments("evict", check)
    _sweep(tables, ranks, at_save=False)


def sweep_before_save(
    tables: Mapping[str, CacheTable], ranks: Ranks, before_sweep: Callable[[], object] | None = None
) -> None:
    """Sweeps the `tables` whose policies run at saves, before a save selects the rows to write. Collective.

    `before_sweep` is called first and may fail on a single rank. If ranks sweep together, it then fails on all of them.

    Every kind of save calls this once, before it creates a checkpoint. A save whose sweep fails has therefore written nothing. A
    second save after the same step writes the same rows, because a second sweep after a step removes nothing.

    These tables are saved without a sweep: a table without an optimizer, as for evaluation; a table at step 0; a table with a
    failed write to its SSD tier, whose rows must not change so that they can be rescued; and a table that was not trained since it
    was loaded, if its policy evicts a fraction of the rows, because the save that it was loaded from already evicted that fraction.
    """
    _sweep(tables, ranks, at_save=True, before_sweep=before_sweep)


def tables_by_name(shards: Sequence[ModuleShard]) -> dict[str, CacheTable]:
    """Returns the tables by display name."""
    return {display_name((module_path, table.name)): table for module_path, _, table in shards}


@dataclass(frozen=True)
class _TableSweepState:
    """State of a table on one rank before a sweep."""

    policy: Policy | None
    is_shared: bool
    is_due: bool
    step: int
    is_read_only: bool


def _sweep(
    tables: Mapping[str, CacheTable], ranks: Ranks, *, at_save: bool, before_sweep: Callable[[], object] | None = None
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
    # All ranks have the same states, so all of them raise or none.
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
            own = tables[name]._native_table if name in mine and mine[name].is_shared else None
            rules[name] = shared.policy.resolve(SweepInputs(shared.step, own, ranks))

    def prepare() -> None:
        for name in due:
            policy = mine[name].policy
            if not mine[name].is_shared and policy is not None and policy.is_collective:
                rules[name] = policy.resolve(SweepInputs(mine[name].step, tables[name]._native_table, SingleRank()))
            tables[name]._native_table.prepare_sweep(rules.get(name))

    def sweep() -> None:
        sweep_prepared([tables[name] for name in due], [rules.get(name) for name in due])

    ranks.gather(prepare)
    ranks.gather(sweep)


def _is_collective(table: CacheTable, *, at_save: bool) -> bool:
    """True if this rank needs the other ranks to sweep the table. Depends only on settings, so all ranks agree."""
    life = table._settings.lifecycle
    return table._needs_collective_sweep and (not at_save or (life.is_swept_at_saves and table.optimizer is not None))


def _sweep_ranks(tables: Mapping[str, CacheTable]) -> Ranks:
    """Returns all ranks, for a save that another program coordinates. Raises `StateError` if there is only one process."""
    ranks = all_ranks()
    if ranks.world_size == 1:
        name = next(name for name, table in tables.items() if table._needs_collective_sweep)
        raise StateError(
            f"table {name} is shared by {tables[name].world_size} ranks, which have to agree on what its eviction takes, and this "
            "process knows no other: initialise torch.distributed on all of them, and save on all of them together"
        )
    return ranks


def _sweep_state(table: CacheTable, *, at_save: bool) -> _TableSweepState:
    """Returns this rank's state of a table."""
    life, is_shared = table._settings.lifecycle, table.world_size > 1
    wanted = life.is_swept_at_saves and table.optimizer is not None if at_save else life.eviction is not None
    if not wanted:
        return _TableSweepState(life.eviction, is_shared, is_due=False, step=0, is_read_only=False)
    step = table.step()
    due = step > 0 or not at_save
    if not at_save:
        # Checked before any table is swept.
        table._native_table.check_writable()
    if at_save and life.eviction is not None and life.eviction.has_fraction_rule and step == table._loaded_step:
        due = False
    return _TableSweepState(
        life.eviction, is_shared, is_due=due, step=step, is_read_only=table._native_table.is_read_only()
    )


def _check_states_match(name: str, states: Mapping[int, _TableSweepState]) -> None:
    """Raises if ranks that share the table have different states. `states` maps ranks to states."""
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
