"""The table that users hold: rows by id, in up to three tiers.

What the modules of this package do with a table beyond this is in `table_shard`; `shard_of` leads there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from .admission import Admission, NotAdmitted
from .config import DEFAULT_TOTAL_NUM_BUCKETS, CachePolicy, MissingRead, OnFull, TierBudgets
from .eviction import Policy as EvictionPolicy
from .exceptions import StateError
from .initializers import Initializer
from .lifecycle import DEFAULT_SCORE_HALF_LIFE_STEPS, LifecycleConfig
from .miss_ratios import MeasuredTable
from .optimizers import OptimizerSpec
from .rows import EvictedRows, FoundRows, IdsLike, RowChunk, RowExport, RowMetadata, ValuesLike, ids_array
from .stats import TableStats
from .sweeping import set_time_single_rank, sweep_single_rank
from .table_copy import copy_in_memory, describe_table
from .table_settings import TableSettings
from .table_shard import TableShard
from .telling import OnEvict

__all__ = [
    "CacheTable",
    "EvictedRows",
    "FoundRows",
    "IdsLike",
    "RowChunk",
    "RowExport",
    "RowMetadata",
    "ValuesLike",
    "ids_array",
    "shard_of",
]


class CacheTable(MeasuredTable):
    """One shard of a table: rows by 64-bit id, within a budget in bytes for each tier.

    Users get one from a module, as `bag.table` or `collection.tables["item"]`, and read, import and export its rows. The modules
    train it. Its settings are checked when it is made; its tiers are opened when it is first used, or by `open()`.

    `close()` it, or use it in a `with` statement. A table with an SSD tier that nobody closed is flushed when it is dropped and
    when the process ends, unless other ranks have to take part. The files of the SSD tier are in
    `<ssd_dir>/<module>/<name>/<rank>-of-<world_size>/`, with the names percent-encoded.

    Shapes: n rows, D the table's width.

    Args:
        name: 1 to 200 bytes of UTF-8. It names the SSD directory, and the births of the rows depend on it.
        dim: D, from 1 to 65,536.
        tiers: the budgets in bytes of the device, host and SSD tier.
        initializer: how rows are born; one of `torchrec_embcache.initializers`.
        optimizer: whose slots the rows carry; one of `torchrec_embcache.optimizers`. None: the rows can be read and not trained
            until one is set.
        seed: of the rows' births.
        module: the module that the table belongs to, which also names the SSD directory; by default `name`.
        policy: which rows leave a full tier first: "s3fifo", "lru" or "lfu".
        on_full: what happens when the last tier is full: "error" raises `CapacityError` and loses nothing, "evict" drops rows.
        admission: which ids get a row when they are trained; one of `torchrec_embcache.admission`. None: all.
        not_admitted: what training reads for an id that gets none: "zeros", its "initial" value, a number for every column, or
            "oov": one row of the table, which the gradients of all such ids train. Only with `admission`.
        missing: what evaluation reads for an id without a row: its "initial" value or "zeros". None: what training reads.
        score_half_life_steps: the score of a row, the sum of its occurrences, halves over so many steps.
        eviction: which rows leave by rule, and when; a `torchrec_embcache.eviction.Policy`. None: none do.
        on_evict: who is told of evicted rows: a callable, which a thread calls with `EvictedRows`; "keep", to drain; or None.
        total_num_buckets: how many buckets ids are spread over, from 1 to 2^20.
        buckets: the buckets [begin, end) of this shard; by default the share of `rank`.
        rank: of this shard, from 0.
        world_size: how many ranks share the table.
        device: of the device tier, such as "cpu" or "cuda:0".
        key: what the births of the rows depend on beside `seed`; by default it is derived from `name`.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
        PathError, StoragePermissionError: `ssd_dir` is not a directory that only this user can write to.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers, optimizers
        >>> table = CacheTable(
        ...     name="item",
        ...     dim=2,
        ...     tiers=TierBudgets(host_bytes="1MiB"),
        ...     initializer=initializers.Constant(0.5),
        ...     optimizer=optimizers.Adagrad(lr=0.1),
        ... )
        >>> table.import_rows([7, -1], [[1.0, 2.0], [3.0, 4.0]])  # n = 2
        >>> found = table.read_rows([7, 8])
        >>> found.weights  # [n, D]: the id 8 has no row, so that this is what it would be born with
        tensor([[1.0000, 2.0000],
                [0.5000, 0.5000]])
        >>> found.found
        tensor([ True, False])
        >>> found.slots["sum"].shape
        torch.Size([2, 2])
        >>> sorted(id for chunk in table.export() for id in chunk.ids.tolist())
        [-1, 7]
        >>> table.remove_rows([7]), len(table), table.step(), table.stats().host.rows
        (1, 1, 0, 1)
        >>> table.describe()
        "'item', embedding_dim=2, optimizer=Adagrad(lr=0.1), policy=s3fifo, rows=1, tiers=(host 1 MiB)"
        >>> table.close()
    """

    def __init__(
        self,
        *,
        name: str,
        dim: int,
        tiers: TierBudgets,
        initializer: Initializer,
        optimizer: OptimizerSpec | None,
        seed: int = 0,
        module: str | None = None,
        policy: CachePolicy = "s3fifo",
        on_full: OnFull = "error",
        admission: Admission | None = None,
        not_admitted: NotAdmitted = "zeros",
        missing: MissingRead | None = None,
        score_half_life_steps: int = DEFAULT_SCORE_HALF_LIFE_STEPS,
        eviction: EvictionPolicy | None = None,
        on_evict: OnEvict | None = None,
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        buckets: tuple[int, int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        key: int | None = None,
    ) -> None:
        settings = TableSettings.checked(
            name=name,
            dim=dim,
            tiers=tiers,
            initializer=initializer,
            seed=seed,
            module=module,
            policy=policy,
            on_full=on_full,
            lifecycle=LifecycleConfig.checked(
                admission=admission,
                not_admitted=not_admitted,
                score_half_life_steps=score_half_life_steps,
                eviction=eviction,
                missing=missing,
            ),
            on_evict=on_evict,
            total_num_buckets=total_num_buckets,
            buckets=buckets,
            rank=rank,
            world_size=world_size,
            device=device,
            key=key,
        )
        self._shard: TableShard = TableShard(settings, optimizer)

    # ---- settings

    @property
    def name(self) -> str:
        """The table's name."""
        return self._shard.name

    @property
    def module(self) -> str:
        """The name of the module that the table belongs to."""
        return self._shard.module

    @property
    def dim(self) -> int:
        """The width D of a row."""
        return self._shard.dim

    @property
    def tiers(self) -> TierBudgets:
        """The budgets of the tiers. Where tables of a module share RAM, this is the table's part by expected rows."""
        return self._shard.tiers

    @property
    def initializer(self) -> Initializer:
        """How rows are born."""
        return self._shard.settings.initializer

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer whose slots the rows carry; None until one is set.

        Setting another kind of optimizer raises `StateError` once the table has rows.
        """
        return self._shard.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: OptimizerSpec) -> None:
        self._shard.optimizer = optimizer

    @property
    def seed(self) -> int:
        """The seed of the rows' births."""
        return self._shard.seed

    @property
    def policy(self) -> CachePolicy:
        """Which rows leave a full tier first."""
        return self._shard.policy

    @property
    def eviction(self) -> EvictionPolicy | None:
        """Which rows leave by rule, and when. None: none do."""
        return self._shard.settings.lifecycle.eviction

    @property
    def on_full(self) -> OnFull:
        """What happens when the last tier is full."""
        return self._shard.on_full

    @property
    def device(self) -> torch.device:
        """The device of the device tier, and of the results of lookups."""
        return self._shard.device

    @property
    def rank(self) -> int:
        """The rank of this shard."""
        return self._shard.rank

    @property
    def world_size(self) -> int:
        """How many ranks share the table."""
        return self._shard.world_size

    @property
    def total_num_buckets(self) -> int:
        """How many buckets ids are spread over. Loading a checkpoint sets it to that of the checkpoint."""
        return self._shard.total_num_buckets

    @property
    def buckets(self) -> tuple[int, int]:
        """The buckets [begin, end) of this shard."""
        return self._shard.buckets

    @property
    def directory(self) -> str | None:
        """The SSD tier's directory of this shard; None without an SSD tier."""
        return self._shard.directory

    # ---- opening and closing

    @property
    def is_open(self) -> bool:
        """Whether the tiers were opened. It stays True after `close`."""
        return self._shard.is_open

    def open(self, commit_id: int | None = None) -> None:
        """Open the tiers; harmless twice.

        Args:
            commit_id: names the state of the SSD tier that is resumed, one of `published()`; by default the newest complete one.

        Raises:
            InUseError: another process or table has the directory.
            MismatchError: the directory is of a table with other settings.
            StateError: the table is closed, or there is nothing to resume.
            StorageError, CorruptionError, HostMemoryError: the files or the memory cannot be had.
        """
        self._shard.open(commit_id)

    def commit_ids(self) -> list[int]:
        """Tokens of the states of the SSD tier that can be resumed, oldest first."""
        return self._shard.commit_ids()

    def flush(self) -> None:
        """Write every dirty row to the SSD tier and publish one state, which a resume takes. Without an SSD tier: nothing.

        Threads that flush one table take turns. Raises `StorageError` where the disk fails; the state before is then kept.
        """
        self._shard.flush()

    def close(self) -> None:
        """Flush and close; harmless twice. The tiers are closed also where the flush fails, which raises.

        A save beside training that has the table is waited for, and so is `on_evict`, until it was given every row that is dead by
        then; `EvictionHookError` where it raised. Ctrl-C ends the wait, and the flush: then the table is open, and
        this can be called again. `StateError` from a `progress` callable of that save, or from `on_evict`, which would wait
        for itself.
        """
        self._shard.close()

    # ---- rows

    def __bool__(self) -> bool:
        """True, also without rows."""
        return True

    def __len__(self) -> int:
        """Rows in all tiers of this shard: those that were born in training or imported, and not removed."""
        return len(self._shard)

    def step(self) -> int:
        """Training steps so far."""
        return self._shard.step()

    def stats(self) -> TableStats:
        """The counters of the table and of its tiers."""
        return self._shard.stats()

    def export(self, chunk_rows: int = 65_536) -> RowExport:
        """Every row of every tier as of this call, in chunks of at most `chunk_rows` rows, in memory of their own.

        Iterating raises `StateError` when the table was trained or changed meanwhile. So it does after a call that needs room on
        the SSD tier, where the files that chunks are still to be read from stand in its way.

        For example `table.export().to_numpy()["weights"]` gives [n, D], where all rows fit in RAM.
        """
        return self._shard.export(chunk_rows)

    def read_rows(self, ids: IdsLike) -> FoundRows:
        """The rows of `ids` [n], in that order, with a mask `found` [n]. An id without a row gives its initial value.

        `ids` are an int64 or int32 tensor, a numpy array or a list. Reading moves no row and counts nowhere.
        """
        return self._shard.read_rows(ids)

    def oov_row(self) -> NDArray[np.float32]:
        """The weights of the row that ids share which were refused one, as they are now: float32 [D]. Every rank has the same.

        Raises `StateError` where the table has no such row: it is made with `not_admitted="oov"`.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, admission, optimizers
            >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
            >>> settings = {"admission": admission.Count(3), "not_admitted": "oov"}
            >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd, **settings)
            >>> item(torch.tensor([7, 8])).sum().backward()  # both occur for the first time
            >>> item.table.oov_row()
            array([-1., -1.], dtype=float32)
        """
        row = self._shard.native.oov_row()
        if row is None:
            raise StateError(f'table {self.name!r} has no shared row: make it with not_admitted="oov" and an admission')
        return row[: self.dim].copy()

    def import_rows(
        self,
        ids: IdsLike,
        weights: ValuesLike,
        slots: Mapping[str, ValuesLike] | None = None,
        metadata: RowMetadata | None = None,
        *,
        collective: bool = False,
    ) -> None:
        """Put rows into the table, over those that are there.

        Args:
            ids: [n] distinct 64-bit integers, as a tensor, a numpy array or a list.
            weights: [n, D] numbers, likewise. Numbers of another type become float32.
            slots: the optimizer's slots by name, as in `RowChunk.slots`. None: zeros.
            metadata: None: as of rows that were never used.
            collective: every rank calls this at the same time, each with rows of any ids, or with none, and every row goes to the
                rank that owns it. Without it the ids must fall into this shard's buckets.

        Raises:
            InputError: an argument is malformed, or an id is given twice or belongs to another shard.
            StateError: a batch in flight uses one of the rows.
            CapacityError: there is no room for the rows.

        On an error no row has changed, unless it says how many were imported: a table with `on_full="evict"` takes them in parts.
        Where the disk of the SSD tier fails amid the call, all rows are imported, what could not be written stays in RAM, and the
        next call that writes raises `ReadOnlyError`.
        """
        self._shard.import_rows(ids, weights, slots, metadata, collective=collective)

    def remove_rows(self, ids: IdsLike) -> int:
        """Forget the rows of `ids` [n], so that the ids are missing from now on. Returns how many of them had a row.

        On an error all of them are there as before, unless it says how many were removed. Where the disk of the SSD tier fails amid
        the call, all are removed, and the next call that writes raises `ReadOnlyError`.
        """
        return self._shard.remove_rows(ids)

    def evict(self) -> None:
        """Sweep this shard now, as of the last training step: the rows that `eviction` takes are missing from here on.

        Nothing is done where the table has no `eviction`. Where ranks share the table each sweeps its own shard;
        `torchrec_embcache.evict(model)` does that for all tables of all ranks together.

        Raises `StateError` where the table is closed or cannot be used, or where ranks share it and have to agree on what its
        `eviction` takes; `ReadOnlyError` where its SSD tier could not be written.
        """
        sweep_single_rank(self._shard)

    def set_time(self, seconds: float) -> None:
        """Say what time it is for `Ttl(seconds=...)`, from now on until the next call; see `torchrec_embcache.set_time`.

        A table without such a rule is left as it is. Raises `InputError` where time would go back or is no number from 0 to 2^52,
        `StateError` where other ranks share the table.
        """
        set_time_single_rank(self._shard, seconds)

    def drain_evicted(self) -> Iterator[EvictedRows]:
        """The rows that were evicted from this shard and not drained yet, chunk by chunk, in the order in which they left.

        It wants `on_evict="keep"`. A chunk that was given is not given again. Where the loop ends early the other rows stay, also
        when the table is closed. A sweep under way is finished bit by bit, so at the end every row was given that is dead by now.

        Raises `StateError` where evicted rows are not kept, or go to a callable. `EvictedRows` has an example.
        """
        return self._shard.evict_notifier.drain(self._shard.native_or_none)

    # ---- for people, and copies

    def describe(self, hyperparameters: Mapping[str, Any] | None = None) -> str:
        """Settings, optimizer, rows and budgets in one line; opens nothing.

        `hyperparameters`: those of the optimizer as they are now.
        """
        return describe_table(self._shard, hyperparameters)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A table of its own in memory, with the same rows, slots, metadata, step and epoch. `StateError` with an SSD tier."""
        made = type(self).__new__(type(self))
        made.__dict__["_shard"] = copy_in_memory(self._shard, memo)
        memo[id(self)] = made
        return made

    def __reduce__(self) -> str:
        raise StateError(
            f"table {self.name!r} cannot be pickled: it owns memory and files; save its rows with Saver(rank).save(model, path), "
            "or export() them"
        )


def shard_of(table: CacheTable) -> TableShard:
    """What the modules of this package work with; it is no part of the public interface."""
    return table._shard  # noqa: SLF001 - the one door to it
