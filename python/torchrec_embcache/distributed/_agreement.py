"""Collective agreements of a sharded collection's ranks: equal settings, errors, bucket counts, and sweeps."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_embcache._autograd import raise_at_end_of_backward
from torchrec_embcache._dist.ranks import Ranks, all_ranks
from torchrec_embcache.exceptions import ConfigError, MismatchError, StateError
from torchrec_embcache.modules._tables import ModuleTables
from torchrec_embcache.table._lifecycle import LifecycleConfig
from torchrec_embcache.table._sweep import sweep_after_step, tables_swept_after_steps
from torchrec_embcache.table.cache_table import CacheTable

__all__ = ["RankAgreementMixin", "check_same_settings"]


class RankAgreementMixin:
    """The collective agreements of a sharded collection."""

    _module_tables: ModuleTables
    _env: ShardingEnv
    _owner: str
    _has_checked_buckets: bool
    #: True if a table of the module drops rows when it is full, on any rank.
    _drops_rows: bool = False

    @property
    def _ranks(self) -> Ranks:
        """The ranks of the collection's process group."""
        return all_ranks(self._env.process_group)

    def _all_reduce(self, values: Tensor) -> None:
        """Sums the integers of all ranks in place, so that the order does not matter. `values` is on the CPU. Collective."""
        self._ranks.all_reduce(values)

    def _after_backward(self, tables: Sequence[CacheTable]) -> Callable[[Exception | None], None]:
        """Returns the function that the backward of a lookup over this rank's `tables` calls at its end."""
        return lambda error: self._end_backward(error, tables)

    def _end_backward(self, error: Exception | None, tables: Sequence[CacheTable]) -> None:
        """Raises any rank's error on all ranks, else sweeps those of `tables` whose sweep is due and needs all ranks.

        An error is raised at the end of the entire backward: DDP's reducer would reject every later step if its backward were
        interrupted.
        """
        try:
            self._ranks.raise_on_every_rank(error)
        except Exception as caught:
            _advance_failed_steps(self._module_tables, self._ranks)
            raise_at_end_of_backward(caught)
            return
        try:
            sweep_after_step(tables_swept_after_steps(tables, by_ranks=True), self._ranks)
        except Exception as caught:
            raise_at_end_of_backward(caught)

    def _check_buckets_match(self) -> None:
        """Opens the tables, and checks that all ranks have the same number of buckets. Collective.

        It is defined by each rank's settings, or by the checkpoint that it loaded. Every rank calls this before its first batch is
        sent. If a table cannot be opened on one of them, or the numbers differ, all call it again with the next batch.
        """
        mine: dict[str, int] = {}
        error: Exception | None = None
        try:
            for name, table in self._module_tables.items():
                table.open()
                mine[name] = table.total_num_buckets
        except Exception as caught:
            error = caught
        everyone = self._ranks.all_gather((mine, error is None, self._module_tables.drops_rows))
        self._has_checked_buckets = all(opened for _, opened, _ in everyone)
        self._drops_rows = any(drops for _, _, drops in everyone)
        if error is not None:
            raise error
        for rank, (theirs, _, _) in enumerate(everyone):
            for name, said in theirs.items():
                own = mine.get(name, said)
                if said != own:
                    self._has_checked_buckets = False
                    raise MismatchError(
                        f"{self._owner}: table {name!r} has {own} buckets on this rank, and {said} on rank {rank}: "
                        "give all ranks the same total_num_buckets, and load the same checkpoint on all of them"
                    )


def check_same_settings(owner: str, lifecycles: Mapping[str, LifecycleConfig], ranks: Ranks) -> None:
    """Raises `ConfigError`, on every rank, if ranks have different lifecycle settings of a table. Collective.

    `lifecycles` has the settings of every table, including those on other ranks. They define the exchanges of a step and of a
    sweep, so that ranks with other settings would deadlock.
    """
    everyone = ranks.all_gather(dict(lifecycles))
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        for setting in fields(LifecycleConfig):
            found: list[tuple[object, list[int]]] = []  # each value, and the ranks that have it
            for rank, theirs in enumerate(everyone):
                if name in theirs:
                    value = getattr(theirs[name], setting.name)
                    others = next((others for other, others in found if other == value), None)
                    if others is None:
                        found.append((value, [rank]))
                    else:
                        others.append(rank)
            if len(found) > 1:
                said = " and ".join(f"{setting.name}={value!r} on {_ranks_text(others)}" for value, others in found)
                raise ConfigError(f"{owner}: table {name!r} has {said}: give all ranks the same")


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _advance_failed_steps(tables: Mapping[str, CacheTable], ranks: Ranks) -> None:
    """Counts a backward that failed on some ranks as a step of all ranks: a table with different steps on ranks could not be saved.

    The OOV row is copied from a rank that made the step, because it must be equal on all ranks.
    """
    mine: dict[str, tuple[int, NDArray[np.float32] | None]] = {}
    for name, table in tables.items():
        # A poisoned table does not return its step. The other ranks wait for this rank nevertheless.
        with suppress(StateError):
            if table.is_open:
                mine[name] = table.step(), table._native_table.oov_row()
    for theirs in ranks.all_gather(mine):
        for name, (step, oov_row) in theirs.items():
            if name in mine and step > mine[name][0]:
                mine[name] = step, oov_row
                native = tables[name]._native_table
                native.set_step(step)
                if oov_row is not None:
                    native.set_oov_row(oov_row)
