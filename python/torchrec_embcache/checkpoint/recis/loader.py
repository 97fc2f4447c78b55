"""Load of RecIS-format checkpoints, with RecIS' signature."""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache._paths import check_path, open_to_load
from torchrec_embcache._saves_in_flight import check_not_own_save
from torchrec_embcache.checkpoint._load import LoadingTables
from torchrec_embcache.checkpoint._tensor_bytes import WINDOW_BYTES
from torchrec_embcache.config import check_int
from torchrec_embcache.exceptions import InputError, MismatchError, StateError
from torchrec_embcache.table.cache_table import CacheTable

from ._arguments import check_distinct_names, check_hashtables, check_tensors, table_names, tables_of
from ._reader import RecisCheckpoint, RecisTableReader, RecisTensorReader
from ._schema import DTYPES, ID, empty_rows, metadata_of, row_columns, rows_with_ids, table_columns
from ._threads import BoundedExecutor

__all__ = ["BlockLoader", "LoadInfo", "LoadedBlocks"]

_log = logging.getLogger("torchrec_embcache.serialize")

# Destination to {source: slots}. The slots of a table are names such as "id", "embedding", "sum"; a dense tensor has none.
LoadInfo = dict[str, dict[str, list[str]]]
# For each destination table, its source tables in the checkpoint with their slots; for each destination tensor, its source.
_TableLoadPlans = dict[str, tuple[CacheTable, list[tuple[RecisTableReader, list[str]]]]]
_DenseLoadPlans = dict[str, tuple[Tensor, RecisTensorReader]]
# Rows per native import. A call rejects rows that might not fit; a small chunk is rejected only if it really does not fit.
CHUNK_ROWS = 4096


@dataclass(frozen=True)
class LoadedBlocks:
    """Result of a load.

    Attributes:
        tables: number of rows loaded into each table, by its name.
        tensors: names of the tensors that were loaded.
        missing: requested names that are not in the checkpoint.
        unexpected: names in the checkpoint without a table or tensor to load them into.

    Examples:
        >>> import torch
        >>> from torchrec_embcache.serialize import BlockLoader, BlockSaver
        >>> BlockSaver(path="ckpt", tensors={"over.bias": torch.zeros(2)}).save()
        >>> BlockLoader("ckpt", tensors={"over.bias": torch.ones(2), "more": torch.ones(2)}, strict=False).load()
        LoadedBlocks(tables={}, tensors=['over.bias'], missing=['more'], unexpected=[])
    """

    tables: dict[str, int]
    tensors: list[str]
    missing: list[str]
    unexpected: list[str]


class BlockLoader:
    """Loads blocks into tables and dense tensors. The number of loading shards is independent of the number of saving shards.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.serialize import BlockLoader, BlockSaver
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> BlockSaver(path="ckpt", hashtables={"item": item}).save()
        >>> loader = BlockLoader("ckpt", hashtables={"item": item})
        >>> loader.default_load_info()["item"]["item"][:2]
        ['id', 'embedding']
        >>> loader.load().tables
        {'item': 1}
    """

    def __init__(
        self,
        checkpoint_path: str,
        hashtables: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        parallel: int = 16,
        filter_func: Callable[[LoadInfo], LoadInfo] = lambda info: info,
        *,
        strict: bool = True,
        slots: bool = True,
    ) -> None:
        """`hashtables` and `tensors`: as for `BlockSaver`. Every shard passes its own tables and reads the rows that they own.

        `parallel`: number of reading threads. `filter_func` is called with the load info and returns the load info to use. It may
        drop entries and slots, rename sources, and set several sources for one table. All other names in the checkpoint are
        ignored.

        `strict=False`: loads the names that exist and only reports missing ones, also into tables with another optimizer than the
        checkpoint's.

        `slots=False`: loads only ids, weights and metadata, into tables with any optimizer or none. The load info then has no
        optimizer slots, and the tables keep their step. The slots of new rows start at zeros.
        """
        self.checkpoint_path: str = check_path("checkpoint_path", checkpoint_path)
        self.parallel: int = check_int("parallel", parallel, 1, 1024)
        self.strict = strict
        self.slots = slots
        self._modules = check_hashtables(hashtables)
        self._tensors = check_tensors(tensors)
        check_distinct_names(table_names(self._modules), self._tensors)
        self.filter_func = filter_func

    def default_load_info(self) -> LoadInfo:
        """Returns the default load info: each table and tensor is loaded from the source with its own name. Tables are loaded with
        all slots; with `slots=False`, without the optimizer's.
        """
        info: LoadInfo = {}
        for name, table in tables_of(self._modules).items():
            left_out = () if self.slots else table._spec.slot_names
            info[name] = {name: [slot for slot in table_columns(table) if slot not in left_out]}
        return info | {name: {name: []} for name in self._tensors}

    def load(self) -> LoadedBlocks:
        """Loads the rows of the checkpoint over the contents of the tables, and its dense tensors into `tensors`, in place.

        Slots of a row that are not loaded keep their values, or are initialized if the table has no such row. Metadata and the
        steps of the tables never decrease. An empty table inherits the key of its only source: new rows get the same initial values
        as in the source table.

        Raises `MismatchError` for names that the checkpoint lacks, unless `strict=False`; for slots of another optimizer, as in
        `Saver.load`, unless a filter selects slots; and always for other widths, types and shapes. These checks and those of the
        manifests are done before anything is changed. If rows are corrupted (`CorruptionError`) or reading fails (`StorageError`),
        the tables are unusable until a load succeeds; that load starts with empty tables. Each process raises only its own errors.
        """
        tables = tables_of(self._modules)
        default = self.default_load_info()
        info = _check_load_info(self.filter_func(json.loads(json.dumps(default))), default)
        root = open_to_load(self.checkpoint_path)
        with RecisCheckpoint() as saved:
            saved.open(root)
            missing, unexpected = _find_differences(info, default, saved, tables.keys())
            if missing and self.strict:
                raise MismatchError(
                    f"the checkpoint in {root.path} has no {', '.join(missing)}; it has {', '.join(saved.names) or 'nothing'}: "
                    "give names that it has, or drop the others by filter_func, or load with strict=False"
                )
            if missing:
                _log.warning("the checkpoint in %s has no %s", root.path, ", ".join(missing))
            if unexpected:
                _log.info(
                    "the checkpoint in %s has also %s, which nothing was given for", root.path, ", ".join(unexpected)
                )
            plan = _plan_tables(info, tables, saved)
            dense = self._plan_dense(info, saved, root.path)
            for to, (table, sources) in plan.items():
                for source, slots in sources:
                    _check_fits(table, source, slots, root.path)
                    if self.strict and self.slots and set(slots) == set(default[to][to]):
                        _check_optimizer(table, source, root.path)
            rows = self._read(plan, dense, root.path)
            # Not only at the end of the block: an interrupt between its last line and `__exit__` does not run `__exit__`.
            saved.close()
        return LoadedBlocks(rows, sorted(dense), missing, unexpected)

    def _plan_dense(self, info: LoadInfo, saved: RecisCheckpoint, location: str) -> _DenseLoadPlans:
        """Returns the sources of the tensors. Raises `MismatchError` for another type or shape."""
        plan: _DenseLoadPlans = {
            to: (self._tensors[to], saved.tensors[name])
            for to, sources in info.items()
            for name in sources
            if to in self._tensors and name in saved.tensors
        }
        for tensor, stored in plan.values():
            if (DTYPES[tensor.dtype], tuple(tensor.shape)) != (stored.dtype, stored.shape):
                raise MismatchError(
                    f"tensor {stored.name!r} is {stored.dtype} {list(stored.shape)} in {location} and "
                    f"{DTYPES[tensor.dtype]} {list(tensor.shape)} here: load it into one of that type and shape"
                )
        return plan

    def _read(self, plan: _TableLoadPlans, dense: _DenseLoadPlans, location: str) -> dict[str, int]:
        """Executes the plans. Returns the number of rows by destination."""
        reason = f"loading blocks from {location} did not succeed; load a checkpoint that is whole"
        counts: dict[str, int] = {}
        incomplete = {id(table) for table, _ in plan.values() if table._unusable is not None}
        with (
            LoadingTables([table for table, _ in plan.values()], reason),
            BoundedExecutor(self.parallel, "embcache-blocks") as pool,
        ):
            for table, sources in plan.values():
                if id(table) in incomplete:
                    check_not_own_save(table, "load")
                    table._native_table.clear()
                if len(sources) == 1 and table.stats().rows == 0 and sources[0][0].key != table._native_table.key:
                    table._adopt(table.total_num_buckets, sources[0][0].key)
            counters = {to: table._native_table.counters() for to, (table, _) in plan.items()}
            for to, (table, sources) in plan.items():
                into = _TableLoad(table, counters[to].step, counters[to].epoch, with_slots=self.slots)
                counts[to] = sum(into.load(source, slots, pool) for source, slots in sources)
            for tensor, stored in dense.values():
                _load_dense(tensor, stored, pool)
        return counts


def _check_load_info(info: object, default: LoadInfo) -> LoadInfo:
    """Returns the result of the filter. Raises `InputError` if it is not a load info with known destinations."""
    if not isinstance(info, dict):
        raise InputError(
            f"filter_func returned a {type(info).__name__}: return the load info, {{destination: {{source: [slots]}}}}"
        )
    for to, sources in info.items():
        if to not in default:
            raise InputError(
                f"filter_func returned the destination {to!r}, which was not given: there are {sorted(default)}"
            )
        known = next(iter(default[to].values()))
        if not isinstance(sources, dict) or not all(
            isinstance(slots, list) and set(slots) <= set(known) and len(set(slots)) == len(slots)
            for slots in sources.values()
        ):
            raise InputError(
                f"filter_func returned {sources!r} for {to!r}: return {{source: slots}} with slots of {known}"
            )
        if known and any(ID not in slots for slots in sources.values()):
            raise InputError(
                f'filter_func dropped "id" of {to!r}: keep it with the slots to load, or drop the whole entry'
            )
        if not known and len(sources) > 1:
            raise InputError(f"filter_func returned {len(sources)} sources for the tensor {to!r}: it can have one")
    return info


def _find_differences(
    info: LoadInfo, default: LoadInfo, saved: RecisCheckpoint, tables: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Returns the missing and the unexpected names. Names that the filter dropped are neither."""
    known, missing = set(tables), []
    for to, sources in info.items():
        for name, slots in sources.items():
            there = name in (saved.tables if to in known else saved.tensors)
            if not there:
                missing.append(name)
            elif to in known:
                missing += [f"{name}@{slot}" for slot in slots if slot not in saved.tables[name].slots]
    given = {name for sources in info.values() for name in sources} | default.keys()
    return sorted(set(missing)), sorted((saved.tables.keys() | saved.tensors.keys()) - given)


def _plan_tables(info: LoadInfo, tables: Mapping[str, CacheTable], saved: RecisCheckpoint) -> _TableLoadPlans:
    """Returns the sources of the tables. Omits tables whose sources are all missing."""
    plan: _TableLoadPlans = {}
    for to, given in info.items():
        sources = [(saved.tables[name], slots) for name, slots in given.items() if name in saved.tables]
        if to in tables and sources:
            plan[to] = tables[to], sources
    return plan


def _check_optimizer(table: CacheTable, source: RecisTableReader, location: str) -> None:
    """Raises `MismatchError` if the checkpoint has slots that the table does not have."""
    left_out = [slot for slot in source.slots if slot not in table_columns(table)]
    if left_out:
        optimizer = table.optimizer.display_name if table.optimizer is not None else "no optimizer"
        raise MismatchError(
            f"table {table.name!r} has {optimizer}, and {source.name!r} in {location} has the slots "
            f"{', '.join(left_out)} too: give "
            "it that optimizer to train on; to evaluate, or to fine-tune with another, load with BlockLoader(..., slots=False)"
        )


def _check_fits(table: CacheTable, source: RecisTableReader, slots: list[str], location: str) -> None:
    mine = table_columns(table)
    for slot, entry in source.slots.items():
        if slot in slots and (entry.dtype, entry.shape) != (mine[slot].dtype, mine[slot].shape):
            raise MismatchError(
                f"table {source.name!r} has {slot!r} of {entry.dtype} {list(entry.shape)} a row in {location} and {table.name!r} "
                f"has {mine[slot].dtype} {list(mine[slot].shape)}: load it into one of that width and optimizer, filter the slot, "
                "or leave all slots out by BlockLoader(..., slots=False)"
            )
    if table.stats().pinned_rows:
        raise StateError(f"table {table.name!r} has rows in use by a batch in flight: load between steps")


@dataclass(frozen=True)
class _TableLoad:
    """A table being loaded, with its previous step and epoch."""

    table: CacheTable
    step: int
    epoch: int
    # Without the optimizer's slots the table keeps its step, which Adam's bias correction uses.
    with_slots: bool

    def load(self, source: RecisTableReader, slots: list[str], pool: Executor) -> int:
        """Loads a source and returns the number of rows. Reads two runs ahead."""
        table = self.table
        wanted = [slot for slot in slots if slot in source.slots]
        count = 0
        waiting: deque[dict[str, Future[NDArray[Any]]]] = deque()

        def import_next() -> int:
            return self._import({slot: future.result() for slot, future in waiting.popleft().items()})

        for run in source.runs(table.total_num_buckets, table.buckets):
            waiting.append(source.submit(run, wanted, pool))
            if len(waiting) > 2:
                count += import_next()
        while waiting:
            count += import_next()
        table._native_table.set_step(max(self.step, source.step) if self.with_slots else self.step)
        table._loaded_step = max(table._loaded_step, source.step)
        table._native_table.set_epoch(max(self.epoch, source.epoch))
        return count

    def _import(self, columns: dict[str, NDArray[Any]]) -> int:
        table, ids = self.table, columns[ID]
        owned = table._owns(ids)
        if not owned.all():
            columns = {slot: column[owned] for slot, column in columns.items()}
            ids = columns[ID]
        if len(ids) == 0:
            return 0
        if columns.keys() >= table_columns(table).keys():
            rows = empty_rows(table, len(ids))
        else:
            rows = rows_with_ids(ids, table._native_table.read_rows(ids, incomplete=True))
        into = row_columns(table, rows)
        for slot, column in columns.items():
            into[slot][...] = column
        for first in range(0, len(ids), CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            table._native_table.import_rows(
                rows.ids[part], rows.vectors[part], rows.scalars[part], metadata_of(rows, part)
            )
        return len(ids)


def _load_dense(tensor: Tensor, saved: RecisTensorReader, pool: Executor) -> None:
    """Copies a dense tensor into `tensor` in windows, or in one piece if `tensor` is not contiguous."""
    target = tensor.detach()
    flat = (
        target.reshape(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype, device="cpu")
    )
    width = flat.element_size()

    def window(begin: int, end: int) -> None:
        data = torch.from_numpy(saved.read(begin, end).copy())
        flat[begin // width : end // width].copy_(data.view(flat.dtype))

    total = saved.bytes
    waiting = [pool.submit(window, at, min(at + WINDOW_BYTES, total)) for at in range(0, total, WINDOW_BYTES)]
    for future in waiting:
        future.result()
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))
