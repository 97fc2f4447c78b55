"""The public table: rows by id, in up to three tiers.

The package's modules use further operations of a table, which are in `_shard`; `shard_of` returns that object.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_embcache.config import DEFAULT_TOTAL_NUM_BUCKETS, CachePolicy, OnFull, TierBudgets
from torchrec_embcache.eviction import Policy as EvictionPolicy
from torchrec_embcache.exceptions import StateError
from torchrec_embcache.initializers import Initializer
from torchrec_embcache.optimizers import OptimizerSpec
from torchrec_embcache.stats import TableStats

from ._copy import copy_in_memory, describe_table
from ._settings import TableOptionFields, TableOptions, TableSettings, list_options
from ._shard import TableShard
from ._sweep import set_time_single_rank, sweep_single_rank
from .miss_ratio_curve import MeasuredTable
from .rows import EvictedRows, FoundRows, IdsLike, RowChunk, RowExport, RowMetadata, ValuesLike, ids_array

__all__ = [
    "CacheTable",
    "EvictedRows",
    "FoundRows",
    "IdsLike",
    "RowChunk",
    "RowExport",
    "RowMetadata",
    "TableOptions",
    "ValuesLike",
    "ids_array",
    "shard_of",
]


class CacheTable(MeasuredTable):
    """One shard of a table: rows by 64-bit id, within a byte budget per tier.

    Users get a table from a module, as `bag.table` or `collection.tables["item"]`, and read, import and export its rows. The
    modules train it. The settings are checked by the constructor; the tiers are opened on first use or by `open()`.

    Call `close()`, or use the table in a `with` statement. A table with an SSD tier that was not closed is flushed when it is
    garbage collected and when the process exits, unless the flush needs other ranks. The files of the SSD tier are stored in
    `<ssd_dir>/<module>/<name>/<rank>-of-<world_size>/`, with the names percent-encoded.

    Shapes: n rows, D the table's width.

    Args:
        name: 1 to 200 bytes of UTF-8. It names the SSD directory, and the initial values of rows depend on it.
        dim: D, from 1 to 65,536.
        tiers: the budgets in bytes of the device, host and SSD tier.
        initializer: initial values of new rows; one of `torchrec_embcache.initializers`.
        optimizer: the optimizer whose slots the rows have; one of `torchrec_embcache.optimizers`. None: rows can be read but not
            trained until one is set.
        seed: the seed of the initial values.
        module: the module that the table belongs to, which also names the SSD directory; by default `name`.
        total_num_buckets: number of buckets into which ids are hashed, from 1 to 2^20.
        buckets: the buckets [begin, end) of this shard; by default those of `rank`.
        rank: the rank of this shard, from 0.
        world_size: number of ranks that share the table.
        device: the device of the device tier, such as "cpu" or "cuda:0".
        key: the second input of the initial values, besides `seed`; by default it is derived from `name`.

    The other arguments are those of `TableOptions`.

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

    @list_options(TableOptionFields)
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
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        buckets: tuple[int, int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        key: int | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        settings = TableSettings.checked(
            TableOptionFields(**options),
            name=name,
            dim=dim,
            tiers=tiers,
            initializer=initializer,
            seed=seed,
            module=module,
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
        """The budgets of the tiers. If tables of a module share RAM, this has the table's portion by expected rows."""
        return self._shard.tiers

    @property
    def initializer(self) -> Initializer:
        """The initializer of new rows."""
        return self._shard.settings.initializer

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer whose slots the rows have; None until one is set.

        Setting another kind of optimizer raises `StateError` once the table has rows.
        """
        return self._shard.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: OptimizerSpec) -> None:
        self._shard.optimizer = optimizer

    @property
    def seed(self) -> int:
        """The seed of the rows' initial values."""
        return self._shard.seed

    @property
    def policy(self) -> CachePolicy:
        """The replacement policy of a full tier."""
        return self._shard.policy

    @property
    def eviction(self) -> EvictionPolicy | None:
        """The rules that expire rows, and when they run. None: no rows expire."""
        return self._shard.settings.lifecycle.eviction

    @property
    def on_full(self) -> OnFull:
        """Behavior when the last tier is full: "error" or "evict"."""
        return self._shard.on_full

    @property
    def device(self) -> torch.device:
        """The device of the device tier and of lookup results."""
        return self._shard.device

    @property
    def rank(self) -> int:
        """The rank of this shard."""
        return self._shard.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share the table."""
        return self._shard.world_size

    @property
    def total_num_buckets(self) -> int:
        """Number of buckets into which ids are hashed. Loading a checkpoint sets it to the checkpoint's number."""
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
        """True if the tiers were opened. It stays True after `close`."""
        return self._shard.is_open

    def open(self, commit_id: int | None = None) -> None:
        """Opens the tiers. Idempotent.

        Args:
            commit_id: the committed state of the SSD tier to resume, one of `commit_ids()`; by default the latest complete one.

        Raises:
            InUseError: another process or table uses the directory.
            MismatchError: the directory belongs to a table with other settings.
            StateError: the table is closed, or there is no state to resume.
            StorageError, CorruptionError, HostMemoryError: the files cannot be read, or memory allocation fails.
        """
        self._shard.open(commit_id)

    def commit_ids(self) -> list[int]:
        """Returns the commit ids of the states of the SSD tier that can be resumed, oldest first."""
        return self._shard.commit_ids()

    def flush(self) -> None:
        """Writes every dirty row to the SSD tier and commits a state that can be resumed. Does nothing without an SSD tier.

        Concurrent flushes of one table run one after another. Raises `StorageError` if the disk fails; the previous state is then
        kept.
        """
        self._shard.flush()

    def close(self) -> None:
        """Flushes and closes the table. Idempotent. If the flush fails, the tiers are closed and the error is raised.

        Waits for an asynchronous save of the table, and until `on_evict` has received every row evicted so far. Raises
        `EvictionHookError` if `on_evict` raised. Ctrl-C interrupts the wait and the flush; the table is then still open, and this
        method can be called again. Raises `StateError` in a `progress` callable of that save or in `on_evict`, which would wait for
        itself.
        """
        self._shard.close()

    # ---- rows

    def __bool__(self) -> bool:
        """Returns True, even for a table without rows."""
        return True

    def __len__(self) -> int:
        """Number of rows of this shard in all tiers."""
        return len(self._shard)

    def step(self) -> int:
        """Number of training steps of the table."""
        return self._shard.step()

    def stats(self) -> TableStats:
        """Returns the counters of the table and of its tiers."""
        return self._shard.stats()

    def export(self, chunk_rows: int = 65_536) -> RowExport:
        """Returns a snapshot of the rows of all tiers, in chunks of at most `chunk_rows` rows, each in newly allocated memory.

        Iterating raises `StateError` if the table was trained or changed since the call. It also raises if another call needs space
        on the SSD tier that is occupied by files which remaining chunks are read from.

        For example `table.export().to_numpy()["weights"]` returns [n, D], if all rows fit in RAM.
        """
        return self._shard.export(chunk_rows)

    def read_rows(self, ids: IdsLike) -> FoundRows:
        """Returns the rows of `ids` [n], in that order, with a mask `found` [n]. An id without a row reads its initial value.

        `ids` are an int64 or int32 tensor, a numpy array or a list. Reading moves no rows between tiers and changes no counters.
        """
        return self._shard.read_rows(ids)

    def oov_row(self) -> NDArray[np.float32]:
        """Returns the current weights of the OOV row, shared by ids that are not admitted: float32 [D]. They are equal on all
        ranks.

        Raises `StateError` if the table was not created with `not_admitted="oov"`.

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
            raise StateError(f'table {self.name!r} has no OOV row: make it with not_admitted="oov" and an admission')
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
        """Inserts or overwrites rows.

        Args:
            ids: [n] distinct 64-bit integers, as a tensor, a numpy array or a list.
            weights: [n, D] numbers, likewise. Other dtypes are converted to float32.
            slots: the optimizer's slots by name, as in `RowChunk.slots`. None: zeros.
            metadata: None: the metadata of rows that were never used.
            collective: every rank calls this at the same time, with rows of any ids or with none, and every row is sent to the rank
                that owns it. Otherwise the ids must be in this shard's buckets.

        Raises:
            InputError: an argument is malformed, or an id is duplicated or belongs to another shard.
            StateError: a batch in flight uses one of the rows.
            CapacityError: the rows do not fit.

        On an error no row has changed, unless the error states how many rows were imported: a table with `on_full="evict"` imports
        in parts. If the disk of the SSD tier fails during the call, all rows are imported, rows that could not be written stay in
        RAM, and the next call that writes raises `ReadOnlyError`.
        """
        self._shard.import_rows(ids, weights, slots, metadata, collective=collective)

    def remove_rows(self, ids: IdsLike) -> int:
        """Removes the rows of `ids` [n]. Returns the number of rows removed.

        On an error no row was removed, unless the error states how many were. If the disk of the SSD tier fails during the call,
        all rows are removed, and the next call that writes raises `ReadOnlyError`.
        """
        return self._shard.remove_rows(ids)

    def evict(self) -> None:
        """Runs one eviction pass on this shard for the latest training step: rows that match `eviction` are removed.

        Does nothing if the table has no `eviction`. If ranks share the table, each rank evicts from its own shard;
        `torchrec_embcache.evict(model)` does it for all tables on all ranks.

        Raises `StateError` if the table is closed or poisoned, or if its `eviction` needs all ranks that share the table. Raises
        `ReadOnlyError` if its SSD tier could not be written.
        """
        sweep_single_rank(self._shard)

    def set_time(self, seconds: float) -> None:
        """Sets the event time used by `Ttl(seconds=...)` until the next call; see `torchrec_embcache.set_time`.

        Does nothing for a table without such a rule. Raises `InputError` if the time would decrease or is not a number from 0 to
        2^52, and `StateError` if other ranks share the table.
        """
        set_time_single_rank(self._shard, seconds)

    def drain_evicted(self) -> Iterator[EvictedRows]:
        """Yields the rows that were evicted from this shard and not drained yet, chunk by chunk, in eviction order.

        Requires `on_evict="keep"`. Each chunk is yielded once. If the loop stops early, the remaining rows stay queued, even after
        the table is closed. A sweep in progress is completed incrementally, so that at the end every row evicted so far was
        yielded.

        Raises `StateError` if evicted rows are not kept, or are delivered to a callable. `EvictedRows` has an example.
        """
        return self._shard.evict_notifier.drain(self._shard.native_or_none)

    # ---- representation and copies

    def describe(self, hyperparameters: Mapping[str, Any] | None = None) -> str:
        """Returns settings, optimizer, row count and budgets in one line, without opening the table.

        `hyperparameters`: current hyperparameters of the optimizer.
        """
        return describe_table(self._shard, hyperparameters)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns an in-memory copy with the same rows, slots, metadata, step and epoch. Raises `StateError` with an SSD tier."""
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
    """Returns the internal shard that this package's modules use. Not part of the public interface."""
    return table._shard  # noqa: SLF001 - the one door to it
