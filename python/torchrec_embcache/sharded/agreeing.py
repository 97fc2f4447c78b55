"""What the ranks of a sharded collection agree on: that all went well, how ids fall into buckets, and what sweeps take."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_embcache.buckets import BucketHash
from torchrec_embcache.cache import CacheTable, internals
from torchrec_embcache.collective import all_gather, gathered, raise_on_every_rank
from torchrec_embcache.eviction import Policy
from torchrec_embcache.exceptions import ConfigError, MismatchError, StateError
from torchrec_embcache.gradients import raise_at_end_of_backward
from torchrec_embcache.modules.tables import ModuleTables
from torchrec_embcache.sweeping import sweep_after_step, swept_after_steps
from torchrec_embcache.table_shard import TableShard

__all__ = ["AgreesWithRanks"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Said:
    """What a rank says of a table before the first batch."""

    buckets: tuple[int, BucketHash]
    eviction: Policy | None


class AgreesWithRanks:
    """The part of a sharded collection that agrees with those of the other ranks."""

    _cache: ModuleTables
    _env: ShardingEnv
    _owner: str
    _buckets_known: bool

    def _agree(self, error: Exception | None) -> None:
        """Raise the error of any rank on all of them. Every rank comes here at the same point of a step."""
        raise_on_every_rank(error, self._env.process_group, self._cache.device)

    def _add_up(self, values: Tensor) -> None:
        """Add up the integers of all ranks, in place, so that the order does not matter. Collective."""
        dist.all_reduce(values, dist.ReduceOp.SUM, self._env.process_group)

    def _after_backward(self, tables: Sequence[TableShard]) -> Callable[[Exception | None], None]:
        """What the backward of a lookup over this rank's `tables` calls at its end."""
        return lambda error: self._agree_in_backward(error, tables)

    def _agree_in_backward(self, error: Exception | None, tables: Sequence[TableShard]) -> None:
        """Do as `_agree`, and then sweep those of `tables` whose sweep is due and hangs on all ranks.

        An error is raised when the whole backward is through: DDP's reducer would refuse every later step if its backward were cut
        short.
        """
        try:
            self._agree(error)
        except Exception as caught:
            _agree_on_steps(self._cache, self._env.process_group)
            raise_at_end_of_backward(caught)
            return
        try:
            sweep_after_step(swept_after_steps(tables, by_ranks=True), self._together)
        except Exception as caught:
            raise_at_end_of_backward(caught)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What `work()` gives on each rank. An error on one of them is raised on all. Collective."""
        return gathered(work, self._env.process_group, self._cache.device)

    def _agree_on_buckets(self) -> None:
        """Open the tables, and check that all ranks say the same of how ids fall into buckets, and of eviction. Collective.

        The files of a table that is resumed say it. Every rank comes here before its first batch is sent. Where a table cannot be
        opened on one of them, or they do not agree, all come here again with the next batch.
        """
        mine: dict[str, _Said] = {}
        error: Exception | None = None
        try:
            for name, table in self._cache.items():
                table.open()
                mine[name] = _Said((table.total_num_buckets, table.bucket_hash), table.eviction)
        except Exception as caught:
            error = caught
        everyone = all_gather((mine, error is None), self._env.process_group)
        self._buckets_known = all(opened for _, opened in everyone)
        if error is not None:
            raise error
        for rank, (theirs, _) in enumerate(everyone):
            for name, said in theirs.items():
                own = mine.get(name, said)
                if said.buckets != own.buckets:
                    self._buckets_known = False
                    raise MismatchError(
                        f"{self._owner}: table {name!r} has {own.buckets[0]} buckets of kind {own.buckets[1]!r} on this rank, and "
                        f"{said.buckets[0]} of kind {said.buckets[1]!r} on rank {rank}: their SSD directories are of different "
                        'saves; load a checkpoint made with Saver, with reopen="discard"'
                    )
        self._refuse_other_policies([theirs for theirs, _ in everyone])

    def _refuse_other_policies(self, everyone: Sequence[dict[str, _Said]]) -> None:
        """`ConfigError`, on every rank, where ranks that have to agree on sweeps would not begin the same ones."""
        for name in dict.fromkeys(name for said in everyone for name in said):
            said = [(rank, theirs[name].eviction) for rank, theirs in enumerate(everyone) if name in theirs]
            first_rank, first = said[0]
            for rank, policy in said[1:]:
                if policy != first and any(each is not None and each.is_agreed for each in (policy, first)):
                    self._buckets_known = False
                    raise ConfigError(
                        f"{self._owner}: table {name!r} has eviction={first!r} on rank {first_rank} and eviction={policy!r} on "
                        f"rank {rank}: give all ranks the same"
                    )


def _agree_on_steps(tables: Mapping[str, CacheTable], group: dist.ProcessGroup | None) -> None:
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
