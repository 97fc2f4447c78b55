"""Block-level saving and loading, with the signatures of RecIS: tables and dense tensors as named blocks, picked by a filter.

```python
from torchrec_embcache.serialize import Loader, Saver

Saver(shard_index=0, shard_num=1, path="ckpt/blocks", hashtables={"item": bag}, tensors=model.state_dict()).save()
Loader("ckpt/blocks", hashtables={"item": bag}, tensors=model.state_dict()).load()
```

A table is a block of ids and a block for each of its slots: the weights ("embedding"), the optimizer's, by torch's names, and the
metadata. Rows lie in runs of at most 16 MiB, each sorted by (bucket, `uint64(id)`), so that a shard of any number of shards reads
what it owns; see `buckets`. RecIS' indexes name the slice of `uint64(id) mod total_num_buckets` that the ids of a block are in. The
package `blocks` has the files. Every byte is under a checksum that a load verifies. Names with "@" or "^" are refused: RecIS
keeps them for itself.

Shapes: n rows, D the table's width, V = D * (1 + vector slots).
"""

import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from .blocks.files import Directory
from .blocks.helpers import Helpers
from .blocks.publication import Save, begin
from .blocks.reader import SavedBlocks, SavedTable, SavedTensor
from .blocks.schema import DTYPES, ID, WriteBlock, columns_of, empty_rows, metadata_of, slots_of, with_ids
from .blocks.writer import WINDOW_BYTES, write_shard
from .cache import CacheTable
from .collective import all_gather, is_distributed, together
from .config import check_int
from .exceptions import InputError, MismatchError, StateError, UnsupportedError
from .nn import EmbCacheEmbedding, EmbCacheEmbeddingBag
from .paths import given_path
from .sessions.load import TablesUnderLoad
from .under_way import refuse_in_own_save
from .whole_model import CacheModule

__all__ = ["LoadInfo", "LoadedBlocks", "Loader", "Saver", "WriteBlock"]

_log = logging.getLogger(__name__)

# Destination to {source: slots}. Of a table the slots are names such as "id", "embedding", "sum"; a dense tensor has none.
LoadInfo = dict[str, dict[str, list[str]]]
# A table, and what of which of the checkpoint's goes into it; a tensor and the checkpoint's.
_Plan = list[tuple[CacheTable, list[tuple[SavedTable, list[str]]]]]
_DensePlan = list[tuple[Tensor, SavedTensor]]
# What RecIS keeps for its own names of blocks.
RESERVED = "@^"
# Rows of one call of the core: more at once are refused where they might not fit, and these only where they do not.
ROWS_AT_ONCE = 4096


class Saver:
    """Saves tables and dense tensors as blocks, a shard of them at a time.

    Every shard makes a `Saver` with its `shard_index` and the same `shard_num` and `path`, and calls `save()`; the checkpoint is
    there when the last of them is done, in place of the one before. Where `torch.distributed` has `shard_num` ranks the call is
    collective: it returns when all are done, and an error of one is raised on all. Otherwise shards, in one process or several, may
    save one after the other in any order; none waits.
    """

    def __init__(
        self,
        shard_index: int = 0,
        shard_num: int = 1,
        parallel: int = 8,
        path: str = ".",
        hashtables: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        filter_func: Callable[[list[WriteBlock]], list[WriteBlock]] = lambda blocks: blocks,
    ) -> None:
        """`hashtables`: by name, tables (`module.tables["item"]`), `EmbCacheEmbedding(Bag)`s, or whole cache modules, whose tables
        are called `<name>.<table>`. `tensors`: dense ones by name; only shard 0 saves them. `parallel`: threads that write, and the
        most files of a shard. `filter_func` is given the blocks and returns those to save. Raises `ConfigError`, `InputError`.
        """
        self.shard_num = check_int("shard_num", shard_num, 1, 1 << 20)
        self.shard_index = check_int("shard_index", shard_index, 0, self.shard_num - 1)
        self.parallel = check_int("parallel", parallel, 1, 1024)
        self.path = given_path("path", path)
        self._modules = _modules(hashtables)
        self._tensors = _dense(tensors)
        _refuse_twice(_names(self._modules), self._tensors)
        self.filter_func = filter_func

    def make_write_blocks(self) -> list[WriteBlock]:
        """What `save()` hands to the filter: every block of every table of this shard, and on shard 0 the dense tensors."""
        blocks = []
        for name, table in _tables(self._modules).items():
            rows = len(table)
            for slot, entry in slots_of(table).items():
                blocks.append(WriteBlock(name, slot, entry.dtype, (rows, *entry.shape), table))
        for name, tensor in self._tensors.items() if self.shard_index == 0 else ():
            blocks.append(WriteBlock(name, None, DTYPES[tensor.dtype], tuple(tensor.shape), tensor))
        return blocks

    def save(self) -> None:
        """Write the blocks that the filter leaves. Tables must not be trained meanwhile (`StateError`).

        Until every shard has saved, and when anything fails, a load finds the checkpoint before. Raises `PathError`,
        `StoragePermissionError`, `StorageError`, `MismatchError` (shards that do not make one table), and `InputError` where the
        filter returns something else than blocks, or leaves a table slots without "id".
        """
        if is_distributed() and dist.get_world_size() == self.shard_num > 1:
            self._save_together()
            return
        blocks = self._picked()
        with Directory.to_save(self.path) as root:
            with contextlib.ExitStack() as here:
                save = begin(root, self.shard_index, self.shard_num, _steps(blocks), held_by=here)
                try:
                    last = write_shard(root, save, self.parallel, blocks)
                except BaseException:
                    if self.shard_num == 1:
                        with contextlib.suppress(Exception):  # the error that ended it counts; the next save sweeps it
                            here.close()
                            root.remove(save.name)
                    raise
            _log.info(
                "shard %d of %d is saved in %s%s",
                self.shard_index,
                self.shard_num,
                self.path,
                "" if last else ", others wait",
            )

    def _save_together(self) -> None:
        """As one: the ranks agree on the save, then all write, then all say that they are done."""
        shards = all_gather(self.shard_index)
        if sorted(shards) != list(range(self.shard_num)):
            raise InputError(f"shard_index is {shards} on the ranks: give each shard to one of them")
        blocks = together(self._picked)
        steps = {name: step for each in all_gather(_steps(blocks)) for name, step in each.items()}
        with contextlib.ExitStack() as open_here:
            root = together(lambda: open_here.enter_context(Directory.to_save(self.path)))
            made: list[Save] = []

            def start() -> str:
                made.append(begin(root, self.shard_index, self.shard_num, steps, "", held_by=open_here))
                return made[0].name

            name = all_gather(together(start if dist.get_rank() == 0 else str))[0]

            def join() -> None:
                if not made:
                    made.append(begin(root, self.shard_index, self.shard_num, steps, name, held_by=open_here))

            together(join)
            together(lambda: write_shard(root, made[0], self.parallel, blocks))

    def _picked(self) -> list[WriteBlock]:
        given = self.make_write_blocks()
        picked: object = self.filter_func(list(given))
        if not isinstance(picked, list) or not all(isinstance(block, WriteBlock) for block in picked):
            raise InputError("filter_func did not return a list of the blocks that it was given: return those to save")
        names = {block.tensor_name for block in given}
        kept = [block.tensor_name for block in picked]
        if len(set(kept)) != len(kept) or not names.issuperset(kept):
            raise InputError(
                "filter_func returned a block twice, or one that it was not given: return those to save, once"
            )
        for block in picked:
            if not block.dense and f"{block.name}@{ID}" not in kept:
                raise InputError(
                    f'filter_func left table {block.name!r} without its "id": keep it, or drop the whole table'
                )
        return picked


class Loader:
    """Loads blocks into tables and dense tensors; any number of shards, whatever number saved them."""

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
        """`hashtables` and `tensors` as for `Saver`; every shard gives its own tables and reads the rows that they own.

        `parallel`: threads that read. `filter_func` is given the load info and returns what to load: entries and slots dropped,
        sources renamed, several sources for one table. `strict=False`: load what is there and only report the rest.

        `slots=False`: ids, weights and metadata alone, into tables with any optimizer or none: the load info comes without the
        optimizer's slots, and the tables keep their step. Slots of rows that are new here start at zeros.
        """
        self.checkpoint_path = given_path("checkpoint_path", checkpoint_path)
        self.parallel = check_int("parallel", parallel, 1, 1024)
        self.strict = strict
        self.slots = slots
        self._modules = _modules(hashtables)
        self._tensors = _dense(tensors)
        _refuse_twice(_names(self._modules), self._tensors)
        self.filter_func = filter_func

    def default_load_info(self) -> LoadInfo:
        """Every table and tensor from the source of its own name, with all its slots; without the optimizer's if so asked."""
        info: LoadInfo = {}
        for name, table in _tables(self._modules).items():
            left_out = () if self.slots else table.spec.slot_names
            info[name] = {name: [slot for slot in slots_of(table) if slot not in left_out]}
        return info | {name: {name: []} for name in self._tensors}

    def load(self) -> "LoadedBlocks":
        """Put the rows of the checkpoint over what the tables hold, and its dense tensors into `tensors`, in place.

        A row's slots that are not loaded stay what they are, or are initial where the table has no such row. Metadata and the steps
        of the tables never go back. A table that is empty takes the key of its only source: rows not seen yet are born as they
        would have been there.

        Names that the checkpoint lacks, or that nothing was given for, are a `MismatchError` unless `strict=False`; so are other
        widths, types and shapes. That, and the manifests, are checked before anything is touched. Where rows turn out to be damaged
        (`CorruptionError`), or reading fails (`StorageError`), the tables refuse use until a load succeeds, which starts with them
        empty. Each process raises its own errors only.
        """
        tables = _tables(self._modules)
        default = self.default_load_info()
        info = _checked_info(self.filter_func(json.loads(json.dumps(default))), default)
        with Directory.to_load(self.checkpoint_path) as root, SavedBlocks(root) as saved:
            missing, unexpected = _compare(info, default, saved, tables.keys())
            for what, names in (("has no", missing), ("has, and nothing was given for,", unexpected)):
                if names and self.strict:
                    raise MismatchError(
                        f"the checkpoint in {root.path} {what} {', '.join(names)}: filter them, or strict=False"
                    )
                if names:
                    _log.warning("the checkpoint in %s %s %s", root.path, what, ", ".join(names))
            plan: _Plan = [
                (tables[to], [(saved.tables[name], slots) for name, slots in sources.items() if name in saved.tables])
                for to, sources in info.items()
                if to in tables
            ]
            for table, sources in plan:
                for source, slots in sources:
                    _check_fits(table, source, slots, root.path)
            dense: _DensePlan = [
                (self._tensors[to], saved.tensors[name])
                for to, sources in info.items()
                for name in sources
                if to in self._tensors and name in saved.tensors
            ]
            for tensor, stored in dense:
                if (DTYPES[tensor.dtype], tuple(tensor.shape)) != (stored.entry.dtype, stored.entry.shape):
                    raise MismatchError(
                        f"tensor {stored.entry.name!r} is {stored.entry.dtype} {list(stored.entry.shape)} in {root.path} and "
                        f"{DTYPES[tensor.dtype]} {list(tensor.shape)} here: load it into one of that type and shape"
                    )
            rows = self._read(plan, dense, root.path)
        into = [to for to in info if to in tables]
        return LoadedBlocks(
            tables=dict(zip(into, rows, strict=True)),
            tensors=sorted(to for to in info if to in self._tensors and to not in missing),
            missing=missing,
            unexpected=unexpected,
        )

    def _read(self, plan: _Plan, dense: _DensePlan, where: str) -> list[int]:
        reason = f"loading blocks from {where} did not succeed; load a checkpoint that is whole"
        counts = []
        incomplete = {id(table) for table, _ in plan if table.unusable is not None}
        with (
            TablesUnderLoad([table for table, _ in plan], reason),
            Helpers(self.parallel, "embcache-blocks") as pool,
        ):
            for table, sources in plan:
                if id(table) in incomplete:
                    refuse_in_own_save(table, "load")
                    table.native.clear()
                if len(sources) == 1 and table.stats().rows == 0 and sources[0][0].key != table.native.key:
                    table.adopt(table.total_num_buckets, sources[0][0].key, table.bucket_hash)
            counters = [table.native.counters() for table, _ in plan]
            into = [
                _Into(table, now.step, now.epoch, with_slots=self.slots)
                for (table, _), now in zip(plan, counters, strict=True)
            ]
            for each, (_, sources) in zip(into, plan, strict=True):
                counts.append(sum(each.load(source, slots, pool) for source, slots in sources))
            for tensor, stored in dense:
                _load_dense(tensor, stored, pool)
        return counts


@dataclass(frozen=True)
class LoadedBlocks:
    """What a load did. `tables`: rows by destination. `tensors`: the dense ones. `missing`: asked for and not in the checkpoint.
    `unexpected`: in the checkpoint, and nothing was given for it.
    """

    tables: dict[str, int]
    tensors: list[str]
    missing: list[str]
    unexpected: list[str]


def _modules(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"hashtables is a {type(given).__name__}: give a dict of tables or cache modules by name")
    for name, value in given.items():
        _check_name("hashtables", name)
        if not isinstance(value, CacheTable | CacheModule):
            raise InputError(f"hashtables[{name!r}] is a {type(value).__name__}: give a table or a cache module")
    return dict(given)


def _dense(given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"tensors is a {type(given).__name__}: give a dict of tensors by name")
    for name, tensor in given.items():
        _check_name("tensors", name)
        if not isinstance(tensor, Tensor):
            raise InputError(f"tensors[{name!r}] is a {type(tensor).__name__}: give a tensor")
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.dtype in DTYPES
        if not plain or tensor.is_meta:
            raise UnsupportedError(
                f"tensors[{name!r}] is a {type(tensor).__name__} of {tensor.dtype} on {tensor.device}: give a plain dense tensor, "
                "of a distributed one its local part"
            )
    return dict(given)


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not name or "\0" in name or any(mark in name for mark in RESERVED):
        raise InputError(f"{field} has the name {name!r}: give text without '@' and '^', which RecIS keeps for itself")
    if name == "__metadata__":
        raise InputError(f"{field} has the name {name!r}, which safetensors keeps for itself: give another")


def _names(modules: Mapping[str, Any]) -> list[str]:
    names = []
    for name, value in modules.items():
        single = isinstance(value, CacheTable | EmbCacheEmbedding | EmbCacheEmbeddingBag)
        names += [name] if single else [f"{name}.{table}" for table in value.tables]
    return names


def _tables(modules: Mapping[str, Any]) -> dict[str, CacheTable]:
    """The tables of this shard, opened, by the names of their blocks."""
    tables: list[CacheTable] = []
    for value in modules.values():
        if isinstance(value, CacheTable):
            tables.append(value)
        else:
            value.settle()
            tables += value.tables.values()
    for table in tables:
        table.open()
    return dict(zip(_names(modules), tables, strict=True))


def _refuse_twice(tables: Iterable[str], tensors: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in (*tables, *tensors):
        if name in seen:
            raise InputError(f"{name!r} names two of hashtables and tensors: rename one")
        seen.add(name)


def _steps(blocks: list[WriteBlock]) -> dict[str, int]:
    return {block.name: block.source.native.step() for block in blocks if isinstance(block.source, CacheTable)}


def _checked_info(info: object, default: LoadInfo) -> LoadInfo:
    """What the filter returned, if it is a load info whose destinations were given."""
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
                f'filter_func dropped "id" of {to!r}: keep it beside the slots to load, or drop the whole entry'
            )
        if not known and len(sources) > 1:
            raise InputError(f"filter_func returned {len(sources)} sources for the tensor {to!r}: it can have one")
    return info


def _compare(
    info: LoadInfo, default: LoadInfo, saved: SavedBlocks, tables: Iterable[str]
) -> tuple[list[str], list[str]]:
    """What the checkpoint lacks, and what it has that nothing was given for. What the filter drops is neither."""
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


def _check_fits(table: CacheTable, source: SavedTable, slots: list[str], where: str) -> None:
    mine = slots_of(table)
    for slot, entry in source.slots.items():
        if slot in slots and (entry.dtype, entry.shape) != (mine[slot].dtype, mine[slot].shape):
            raise MismatchError(
                f"table {source.name!r} has {slot!r} of {entry.dtype} {list(entry.shape)} a row in {where} and {table.name!r} "
                f"has {mine[slot].dtype} {list(mine[slot].shape)}: load it into one of that width and optimizer, filter the slot, "
                "or leave all slots out by Loader(..., slots=False)"
            )
    if table.stats().pinned_rows:
        raise StateError(f"table {table.name!r} has rows in use by a batch in flight: load between steps")


@dataclass(frozen=True)
class _Into:
    """A table under load, with its step and epoch before."""

    table: CacheTable
    step: int
    epoch: int
    # Without the optimizer's slots it keeps its step, by which Adam corrects them.
    with_slots: bool

    def load(self, source: SavedTable, slots: list[str], pool: Executor) -> int:
        """Rows loaded. Two runs are read ahead."""
        table = self.table
        wanted = [slot for slot in slots if slot in source.slots]
        count = 0
        waiting: deque[dict[str, Future[NDArray[Any]]]] = deque()

        def take() -> int:
            return self._import({slot: future.result() for slot, future in waiting.popleft().items()})

        for run in source.runs(table.total_num_buckets, table.bucket_hash, table.buckets):
            waiting.append(run.submit(wanted, pool))
            if len(waiting) > 2:
                count += take()
        while waiting:
            count += take()
        table.native.set_step(max(self.step, source.step) if self.with_slots else self.step)
        table.loaded_step = max(table.loaded_step, source.step)
        table.native.set_epoch(max(self.epoch, source.epoch))
        return count

    def _import(self, columns: dict[str, NDArray[Any]]) -> int:
        table, ids = self.table, columns[ID]
        owned = table.owns(ids)
        if not owned.all():
            columns = {slot: column[owned] for slot, column in columns.items()}
            ids = columns[ID]
        if len(ids) == 0:
            return 0
        if columns.keys() >= slots_of(table).keys():
            rows = empty_rows(table, len(ids))
        else:
            found = table.native.read_rows(ids, incomplete=True)
            rows = with_ids(ids, found)
        into = columns_of(table, rows)
        for slot, column in columns.items():
            into[slot][...] = column
        for first in range(0, len(ids), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            table.native.import_rows(rows.ids[part], rows.vectors[part], rows.scalars[part], metadata_of(rows, part))
        return len(ids)


def _load_dense(tensor: Tensor, stored: SavedTensor, pool: Executor) -> None:
    """Copy it into place, in windows; whole where `tensor` is not contiguous."""
    target = tensor.detach()
    flat = target.reshape(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
    width = flat.element_size()

    def window(begin: int, end: int) -> None:
        data = torch.from_numpy(stored.read(begin, end).copy())
        flat[begin // width : end // width].copy_(data.view(flat.dtype))

    total = stored.entry.bytes
    waiting = [pool.submit(window, at, min(at + WINDOW_BYTES, total)) for at in range(0, total, WINDOW_BYTES)]
    for future in waiting:
        future.result()
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))
