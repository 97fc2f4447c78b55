"""`convert --to torchrec-dcp`: writes a checkpoint's tables in TorchRec's format for `torch.distributed.checkpoint`.

A TorchRec table is a tensor [N, D] whose row indexes are the ids, so rows must be written in the order of their ids, but our
checkpoints store them in the order of their buckets. Rows are therefore written twice: in checkpoint order to an unnamed temporary
file, and from there in parts of consecutive ids, each of which fits in RAM. A part is a chunk of the tensor, in the format of
`torch.save`. Memory use is bounded for any table size, and the output is written sequentially.
"""

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_embcache import _native, initializers
from torchrec_embcache._fs import DirectoryHandle, sync, write_at
from torchrec_embcache.cli.checkpoints import OpenCheckpoint
from torchrec_embcache.config import TierBudgets
from torchrec_embcache.exceptions import CorruptionError, InputError, UnsupportedError
from torchrec_embcache.optimizers import BY_KIND, OptimizerSpec
from torchrec_embcache.table.cache_table import CacheTable

from .layout import ConvertSettings, check_known_names
from .torchrec_dcp import MAX_ROWS, METADATA_FILE

__all__ = ["write_tables"]

#: Bytes of a part's rows, all columns together; also of the rows that are sorted by part at a time.
_PART_BYTES = 64 << 20
#: Number of missing rows that are initialized at a time.
_INIT_CHUNK_ROWS = 65_536
#: Slot names in `KeyedOptimizer.state_dict()` of TorchRec's fused optimizers, by our names.
_NAMES = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq"}
_INITIALIZERS = {
    "constant": initializers.Constant,
    "uniform": initializers.Uniform,
    "normal": initializers.Normal,
    "truncated_normal": initializers.TruncatedNormal,
    "linear": initializers.Linear,
}


@dataclass(frozen=True)
class _DcpColumn:
    """A tensor of a table: its name in the checkpoint, and the range [begin, end) of a row's floats. A scalar column is [N]."""

    name: str
    path: tuple[str, ...]
    begin: int
    end: int
    is_scalar: bool


def write_tables(opened: OpenCheckpoint, target: DirectoryHandle, settings: ConvertSettings) -> list[dict[str, Any]]:
    """Writes every table of a checkpoint, then the metadata that makes the directory a checkpoint.

    Raises `InputError` (a table whose row count is not set, an id that is not a row index), `UnsupportedError` (slots for which
    TorchRec has no name), and `StorageError` if a write fails.
    """
    plans = [_plan_table(entry, settings) for entry in opened.tables]
    _check_names(opened, settings)
    found = [column.name for _, columns, _ in plans for column in columns]
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise InputError(f"two tables would be {twice[0]!r}: tell them apart with --rename")
    metadata = Metadata({}, {}, {}, None, CURRENT_DCP_VERSION)
    written = []
    for at, (entry, (rows, columns, optimizer)) in enumerate(zip(opened.tables, plans, strict=True)):
        _DcpTableWriter(opened, target, entry, rows, columns, optimizer).write(f"__0_{at}.distcp", metadata)
        written.append(
            {key: entry[key] for key in ("module", "table", "dim")} | {"rows": rows, "optimizer": optimizer.kind}
        )
    target.write_atomically(METADATA_FILE, pickle.dumps(metadata))
    return written


def _check_names(opened: OpenCheckpoint, settings: ConvertSettings) -> None:
    """Raises `InputError` for an option with a name that is not in the checkpoint."""
    tables = {name for entry in opened.tables for name in (entry["table"], f"{entry['module']}/{entry['table']}")}
    modules = {entry["module"] for entry in opened.tables}
    slots = {slot for entry in opened.tables for slot in BY_KIND[entry["optimizer"]["name"]].slot_names}
    for option, given, known in (
        ("--rows", settings.rows, tables),
        ("--rename", settings.rename, tables),
        ("--sequence", settings.sequences, modules),
        ("--skip", settings.skip, slots),
    ):
        check_known_names(option, given, known, "the checkpoint")


def _plan_table(entry: dict[str, Any], settings: ConvertSettings) -> tuple[int, list[_DcpColumn], type[OptimizerSpec]]:
    """Returns a table's row count, its tensors and its optimizer."""
    module, table, dim = entry["module"], entry["table"], entry["dim"]
    rows = settings.rows.get(f"{module}/{table}", settings.rows.get(table))
    if rows is None:
        raise InputError(f"table {table!r}: say how many rows it has in TorchRec, as in --rows {table}=NUM_EMBEDDINGS")
    if not 1 <= rows <= MAX_ROWS:
        raise InputError(f"--rows {table}={rows}: give 1 to {MAX_ROWS}")
    optimizer = BY_KIND[entry["optimizer"]["name"]]
    slots = [slot for slot in optimizer.slot_names if slot not in settings.skip]
    if unnamed := [slot for slot in slots if slot not in _NAMES]:
        raise UnsupportedError(
            f"table {table!r}: TorchRec has no optimizer with the slots of {optimizer.kind}: leave them out with "
            f"{' '.join(f'--skip {slot}' for slot in unnamed)}"
        )
    called = settings.rename.get(f"{module}/{table}", settings.rename.get(table, table))
    kind = "embeddings" if module in settings.sequences else "embedding_bags"
    weight = ".".join(part for part in (module, kind, called, "weight") if part)
    model = (settings.model_key,) if settings.model_key else ()
    state = (*((settings.optimizer_key,) if settings.optimizer_key else ()), "state", weight)
    columns = [_DcpColumn(".".join((*model, weight)), (*model, weight), 0, dim, is_scalar=False)]
    for at, slot in enumerate(optimizer.slot_names):
        if slot in slots:
            begin, narrow = dim * (1 + at), at >= optimizer.vector_slots
            path = (*state, f"{called}.{_NAMES[slot]}")
            columns.append(_DcpColumn(".".join(path), path, begin, begin + (1 if narrow else dim), narrow))
    return rows, columns, optimizer


class _DcpTableWriter:
    """Writes a table: first the rows to an unnamed temporary file, then part by part to the checkpoint."""

    def __init__(
        self,
        opened: OpenCheckpoint,
        target: DirectoryHandle,
        entry: dict[str, Any],
        rows: int,
        columns: list[_DcpColumn],
        optimizer: type[OptimizerSpec],
    ) -> None:
        self._opened, self._target, self._entry, self._columns = opened, target, entry, columns
        self._rows, self._scalar = rows, len(optimizer.slot_names) > optimizer.vector_slots
        self._floats = entry["dim"] * (1 + optimizer.vector_slots) + self._scalar
        #: Format of a row in the temporary file.
        self._row = np.dtype([("id", np.int64), ("floats", np.float32, (self._floats,))])
        self._part_rows = max(1, _PART_BYTES // self._row.itemsize)

    def write(self, name: str, metadata: Metadata) -> None:
        with contextlib.ExitStack() as open_files:
            spool = _RowSpool(self._target, self._row, self._part_rows)
            open_files.callback(spool.close)
            self._fill_spool(spool)
            fd = self._target.create_file(name)
            open_files.callback(os.close, fd)
            born = _InitialRows(self._entry)
            at = 0
            for part in range(-(-self._rows // self._part_rows)):
                begin = part * self._part_rows
                floats = self._read_part(spool, part, born)
                for column in self._columns:
                    data = _serialize_tensor(floats[:, column.begin : column.end], is_scalar=column.is_scalar)
                    write_at(fd, self._target.path_of(name), at, data)
                    self._record_chunk(metadata, column, begin, len(floats), _StorageInfo(name, at, len(data)))
                    at += len(data)
            sync(fd, self._target.path_of(name))

    def _fill_spool(self, spool: "_RowSpool") -> None:
        def add_block(block: _native.RowBlock) -> None:
            if len(outside := block.ids[(block.ids < 0) | (block.ids >= self._rows)]):
                raise InputError(
                    f"table {self._entry['table']!r} has a row of the id {outside[0]}, and TorchRec's ids are row numbers, here "
                    f"0 to {self._rows - 1}: give the table's num_embeddings with --rows, or remove the row (`remove_rows`) "
                    "before the save"
                )
            rows = np.empty(len(block.ids), self._row)
            rows["id"] = block.ids
            rows["floats"][:, : block.vectors.shape[1]] = block.vectors
            if self._scalar:
                rows["floats"][:, -1] = block.scalars
            spool.add(rows)

        entry = self._entry
        self._opened.rows.read(entry["module"], entry["table"], 0, entry["total_num_buckets"], add_block)
        spool.flush()

    def _read_part(self, spool: "_RowSpool", part: int, initial_rows: "_InitialRows") -> NDArray[np.float32]:
        """Returns the rows of a part in the order of their ids. Missing ids have their initial values."""
        begin = part * self._part_rows
        count = min(self._part_rows, self._rows - begin)
        floats = np.zeros((count, self._floats), np.float32)
        there = np.zeros(count, np.bool_)
        for rows in spool.rows(part):
            floats[rows["id"] - begin] = rows["floats"]
            there[rows["id"] - begin] = True
        missing = np.flatnonzero(~there)
        for at in range(0, len(missing), _INIT_CHUNK_ROWS):
            piece = missing[at : at + _INIT_CHUNK_ROWS]
            floats[piece, : self._entry["dim"]] = initial_rows.weights(begin + piece)
        return floats

    def _record_chunk(
        self, metadata: Metadata, column: _DcpColumn, begin: int, count: int, stored: _StorageInfo
    ) -> None:
        """Records a chunk in the metadata."""
        wide = () if column.is_scalar else (column.end - column.begin,)
        entry = metadata.state_dict_metadata.setdefault(
            column.name,
            TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((self._rows, *wide)), []),
        )
        assert isinstance(entry, TensorStorageMetadata), "only tensors are noted"
        offsets = torch.Size((begin, *(0 for _ in wide)))
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size((count, *wide))))
        metadata.planner_data[column.name] = column.path
        metadata.storage_data[MetadataIndex(column.name, offsets, len(entry.chunks) - 1)] = stored


class _RowSpool:
    """Rows in an unnamed temporary file, with the location of each part's rows."""

    def __init__(self, folder: DirectoryHandle, row: np.dtype[Any], part_rows: int) -> None:
        self._row, self._part_rows = row, part_rows
        self._path = folder.path_of("rows.tmp")
        self._fd = folder.create_file("rows.tmp")
        try:
            folder.remove("rows.tmp")
        except BaseException:
            os.close(self._fd)
            raise
        self._buffered: list[NDArray[Any]] = []
        self._count = 0
        self._length = 0
        #: For each part, the runs of its rows as [begin, end) row indexes.
        self._runs: dict[int, list[tuple[int, int]]] = {}

    def close(self) -> None:
        os.close(self._fd)

    def add(self, rows: NDArray[Any]) -> None:
        """Adds rows in any order. They are written in large batches, so that the runs of a part are long."""
        self._buffered.append(rows)
        self._count += len(rows)
        if self._count >= self._part_rows:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered rows."""
        if not self._count:
            return
        rows = np.concatenate(self._buffered)
        self._buffered, self._count = [], 0
        parts = rows["id"] // self._part_rows
        rows = rows[np.argsort(parts, kind="stable")]
        present, counts = np.unique(parts, return_counts=True)
        write_at(self._fd, self._path, self._length * self._row.itemsize, rows.view(np.uint8))
        for part, count in zip(present.tolist(), counts.tolist(), strict=True):
            self._runs.setdefault(part, []).append((self._length, self._length + count))
            self._length += count

    def rows(self, part: int) -> Iterator[NDArray[Any]]:
        """Yields the rows of a part run by run."""
        for begin, end in self._runs.get(part, ()):
            rows = np.empty(end - begin, self._row)
            view = memoryview(rows.view(np.uint8).data)
            at = begin * self._row.itemsize
            while len(view):
                read = os.preadv(self._fd, [view], at)
                if read == 0:
                    raise CorruptionError(f"{self._path}: the file that holds rows for a while was cut off at {at}")
                view, at = view[read:], at + read
            yield rows


class _InitialRows:
    """Initial values of a table's new rows."""

    def __init__(self, entry: dict[str, Any]) -> None:
        described = dict(entry["initializer"])
        self._table = CacheTable(
            name=entry["table"],
            dim=entry["dim"],
            tiers=TierBudgets(host_bytes="1MiB"),
            initializer=_INITIALIZERS[described.pop("name")](**described),
            optimizer=None,
            seed=entry["seed"],
            key=entry["key"],
        )

    def weights(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the initial weights [n, D] of ids [n]."""
        found: NDArray[np.float32] = self._table.read_rows(ids).weights.numpy()
        return found


def _serialize_tensor(values: NDArray[np.float32], *, is_scalar: bool) -> NDArray[np.uint8]:
    """Serializes a tensor with `torch.save`."""
    plain = np.ascontiguousarray(values[:, 0] if is_scalar else values)
    out = io.BytesIO()
    torch.save(torch.from_numpy(plain), out)
    return np.frombuffer(out.getbuffer(), np.uint8)
