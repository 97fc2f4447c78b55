"""The on-disk layouts of embedding tables that `convert` reads. Every layout is read as columns, in chunks of rows.

- `recsdk`: a directory for each table. It has the files `key/slice.data` (ids, int64), `embedding/slice.data` (weights, fp32), and
  for optimizers that have them `momentum1/slice.data` and `momentum2/slice.data` (fp32). Next to each file is a `slice.attribute`
  of int64 numbers: the bytes of an element, the number of rows, and (not for ids) the width of a row. In older saves all of these
  are in a directory `rank<k>` for each rank.
- `recis`: safetensors files. A table is divided into n parts. Part i has a tensor `<table>.id/part_<i>_<n>`, a tensor of the same
  form for `.embedding`, and one for each slot.
- `safetensors`: a directory for each table. The tensors in its `*.safetensors` files are `id`, `weight`, and one for each slot. The
  files of a single table may also be in the given directory itself.
- `npy`: a directory for each table, with `id.npy`, `weight.npy`, and one file for each slot.
- `torchrec-dcp`: a checkpoint of TorchRec's own tables written by `torch.distributed.checkpoint`; see `torchrec_dcp`.

The first two formats are as implemented in the sources of RecSDK's torchrec_embcache and of RecIS 1.2.
"""

import contextlib
import functools
import math
import os
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache._fs import open_regular_file
from torchrec_embcache.checkpoint.recis._schema import PAD
from torchrec_embcache.exceptions import CorruptionError, InputError, UnsupportedError

from .description import DESCRIPTION_FILE, parse_description

__all__ = ["METADATA", "READERS", "StoredTable", "TableColumns", "detect_layout"]

TableColumns = dict[str, NDArray[Any]]

#: The columns of a row's metadata, and the type of each.
METADATA = {"count": np.uint32, "last_step": np.uint64, "score": np.float32, "modified_epoch": np.uint32}
#: The integer columns of the metadata, and the maximum of each. A table must be able to increment it.
_WHOLE_METADATA = {"count": (1 << 32) - 1, "last_step": (1 << 63) - 1, "modified_epoch": (1 << 32) - 2}
#: Maximum width of an embedding.
_MAX_DIM = 65_536
#: Bytes of rows that are read at a time.
_CHUNK_BYTES = 32 << 20
#: Exceptions that numpy raises for a corrupted header. (It evaluates the header as a Python literal.)
_NPY_ERRORS = (ValueError, EOFError, SyntaxError, tokenize.TokenError, RecursionError, OverflowError, TypeError)
#: Name of a RecIS tensor: a part of a table's column.
_PART = re.compile(r"(?P<table>.+)\.(?P<column>[^./]+)/part_(?P<shard>\d{1,9})_(?P<shards>\d{1,9})")
#: Integer types by their names in safetensors.
_INTEGERS = frozenset({"I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8"})
#: The other form of RecIS' names. It ends in the part's slice of ids.
_SLICED = re.compile(r"(?P<table>.+)@(?P<column>[^@^]+)\^(?P<shard>.+)")


@dataclass(frozen=True)
class StoredTable:
    """A table in a foreign layout.

    `slots`: the width of each slot by name: the width of the embedding, or 0 for one value per row. `chunks` yields chunks of rows
    as columns: `id` [n] (int64), `weight` [n, D] and each slot [n, D] or [n] (fp32), and the metadata, if the layout has it.
    `description`: the contents of `table.json`, if `convert` wrote it. `skipped`: the names of tensors that belong to no table.
    `unread`: the slots that cannot be read, by name, with the reason.
    """

    name: str
    rows: int
    dim: int
    slots: Mapping[str, int]
    chunks: Callable[[], Iterator[TableColumns]]
    description: dict[str, Any] | None = None
    skipped: tuple[str, ...] = field(default=())
    unread: Mapping[str, str] = field(default_factory=dict)


def detect_layout(path: Path) -> str:
    """Detects the layout of the directory `path`. Raises `InputError` if it is unknown."""
    if (path / "LATEST").is_file() or (path / "manifest.json").is_file():
        return "embcache"
    for name, marks in {
        "torchrec-dcp": (".metadata",),
        "recsdk": ("*/key/slice.data", "*/rank*/key/slice.data"),
        "npy": ("*/id.npy", "id.npy"),
        "recis": ("torch_rank_weights_embs_table_multi_shard.json", "index"),
        "safetensors": ("*.safetensors", "*/*.safetensors"),
    }.items():
        if any(next(path.glob(mark), None) for mark in marks):
            return name
    raise InputError(f"{path} is in no layout that is known: name it with --from {', '.join(READERS)}")


def _chunk_rows(row_bytes: int) -> int:
    return max(1, _CHUNK_BYTES // max(row_bytes, 1))


@contextlib.contextmanager
def _open_regular_file(path: Path) -> Iterator[Path]:
    """Opens a regular file. The yielded path refers to it even if it is renamed. Raises like `open_regular_file`."""
    fd = open_regular_file(path)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _map_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Maps a file of numbers as an array. Parts of the file are read when that part of the array is used."""
    wanted = math.prod(shape) * np.dtype(dtype).itemsize  # Python integers, which do not overflow.
    with _open_regular_file(path) as file:
        if (found := file.stat().st_size) != wanted:
            raise CorruptionError(f"{path}: offset 0: the file's length: expected {wanted}, found {found}")
        return np.memmap(file, dtype, "r", shape=shape) if wanted else np.empty(shape, dtype)


# ---- RecSDK


def _read_attribute(path: Path, count: int) -> list[int]:
    with _open_regular_file(path) as file:
        numbers = np.fromfile(file, np.int64)
    if len(numbers) != count or (numbers < 0).any():
        raise CorruptionError(
            f"{path}: offset 0: the attribute: expected {count} numbers of 64 bits, found {numbers.tolist()}"
        )
    return [int(number) for number in numbers]


def _read_recsdk_part(part: Path) -> tuple[TableColumns, int]:
    _, rows = _read_attribute(part / "key/slice.attribute", 2)
    columns: TableColumns = {"id": _map_array(part / "key/slice.data", np.int64, (rows,))}
    dim = 0
    for name, folder in (("weight", "embedding"), ("momentum1", "momentum1"), ("momentum2", "momentum2")):
        if folder != "embedding" and not (part / folder / "slice.data").is_file():
            continue
        size, count, dim = _read_attribute(part / folder / "slice.attribute", 3)
        if size != 4 or count != rows:
            raise CorruptionError(
                f"{part / folder / 'slice.attribute'}: offset 0: bytes an element and rows: expected 4 and {rows}, found {size} "
                f"and {count}"
            )
        if not 1 <= dim <= _MAX_DIM:
            raise CorruptionError(
                f"{part / folder / 'slice.attribute'}: offset 16: the width: expected 1 to {_MAX_DIM}, found {dim}"
            )
        columns[name] = _map_array(part / folder / "slice.data", np.float32, (rows, dim))
    return columns, dim


def _read_recsdk(path: Path) -> Iterator[StoredTable]:
    for folder in sorted(folder for folder in path.iterdir() if folder.is_dir()):
        parts = [folder] if (folder / "key/slice.data").is_file() else sorted(folder.glob("rank*"))
        found = [_read_recsdk_part(part) for part in parts if (part / "key/slice.data").is_file()]
        if found:
            yield _table_from_parts(folder.name, [columns for columns, _ in found], found[0][1])


def _check_array(table: str, column: str, values: NDArray[Any]) -> None:
    """Raises `InputError` unless `values` has the dimensions of the column, and for metadata a fitting type."""
    if column == "weight":
        fits, shape = values.ndim == 2, "[rows, dim]"
    elif column == "id" or column in METADATA:
        fits, shape = values.ndim == 1, "[rows]"
    else:
        fits, shape = values.ndim in (1, 2), "[rows] or [rows, dim]"
    if not fits:
        raise InputError(f"table {table!r}: {column} has shape {list(values.shape)} and needs {shape}")
    if column in METADATA:
        _check_metadata(table, column, values)


def _check_metadata(table: str, column: str, values: NDArray[Any]) -> None:
    """Raises `InputError` unless every value fits the metadata's type. Otherwise the conversion would silently change values."""
    whole = column in _WHOLE_METADATA
    if values.dtype.kind not in ("iu" if whole else "f"):
        raise InputError(
            f"table {table!r}: {column} is {values.dtype} and needs {'integers' if whole else 'float32'}: leave all of "
            f"{', '.join(METADATA)} out, and the rows count as never used"
        )
    if whole and len(values):
        least, greatest = int(values.min()), int(values.max())
        if least < 0 or greatest > _WHOLE_METADATA[column]:
            raise InputError(
                f"table {table!r}: {column} has {least if least < 0 else greatest}, and 0 to {_WHOLE_METADATA[column]} fit"
            )


def _table_from_parts(
    name: str, parts: list[TableColumns], dim: int, description: dict[str, Any] | None = None
) -> StoredTable:
    """Returns the table `name` from its parts, each a dict of arrays. The arrays may be mapped files."""
    slots = {
        column: (dim if values.ndim == 2 else 0)
        for column, values in parts[0].items()
        if column not in ("id", "weight", *METADATA)
    }
    for part in parts:
        for column, values in part.items():
            _check_array(name, column, values)
        lengths = {column: len(values) for column, values in part.items()}
        if len(set(lengths.values())) > 1 or part.keys() != parts[0].keys():
            raise CorruptionError(f"table {name!r}: its columns do not belong together: rows {lengths}")
        for column in ("weight", *slots):
            if part[column].dtype != np.float32:
                raise UnsupportedError(f"table {name!r}: {column} is {part[column].dtype}: only float32 is read")
            if part[column].ndim == 2 and part[column].shape[1] != dim:
                raise InputError(f"table {name!r}: {column} is {part[column].shape[1]} wide and the embedding {dim}")

    def chunks() -> Iterator[TableColumns]:
        step = _chunk_rows(4 * dim * (1 + len(slots)) + 8)
        for part in parts:
            for begin in range(0, len(part["id"]), step):
                yield {column: np.ascontiguousarray(values[begin : begin + step]) for column, values in part.items()}

    rows = sum(len(part["id"]) for part in parts)
    return StoredTable(name, rows, dim, slots, chunks, description)


# ---- safetensors: RecIS' files, and plain ones


@dataclass(frozen=True)
class _TensorSlice:
    """A tensor in a safetensors file, read in slices of rows."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, begin: int, end: int) -> NDArray[Any]:
        with _open_safetensors(self.file) as file:
            return np.ascontiguousarray(file.get_slice(self.name)[begin:end])


def _open_safetensors(path: Path) -> Any:
    try:
        import safetensors
    except ImportError as missing:
        raise UnsupportedError(
            'this layout needs the safetensors package: pip install "torchrec-embcache[cli]"'
        ) from missing
    try:
        with _open_regular_file(path) as file:
            return safetensors.safe_open(file, framework="numpy")
    except safetensors.SafetensorError as error:
        raise CorruptionError(f"{path}: offset 0: the header: expected safetensors, found {error}") from error


def _list_tensors(files: Iterable[Path]) -> Iterator[_TensorSlice]:
    for path in files:
        with _open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                piece = file.get_slice(name)
                yield _TensorSlice(path, name, piece.get_dtype(), tuple(piece.get_shape()))


def _table_from_tensors(
    name: str,
    parts: list[dict[str, _TensorSlice]],
    skipped: tuple[str, ...] = (),
    description: dict[str, Any] | None = None,
) -> StoredTable:
    for part in parts:
        if part.keys() != parts[0].keys() or not {"id", "weight"} <= part.keys():
            raise CorruptionError(
                f"table {name!r}: its parts have the columns {sorted(part)} and {sorted(parts[0])}: id and weight are needed, "
                "and the same everywhere"
            )
        lengths = {column: tensor.shape[:1] for column, tensor in part.items()}
        if len(set(lengths.values())) > 1:
            raise CorruptionError(f"table {name!r}: its columns do not belong together: rows {lengths}")
        if part["id"].dtype != "I64":
            raise UnsupportedError(f"table {name!r}: id is {part['id'].dtype}: only I64 is read")
    first = parts[0]
    if len(first["weight"].shape) != 2:
        raise InputError(f"table {name!r}: weight has shape {first['weight'].shape} and needs [rows, dim]")
    dim = first["weight"].shape[1]
    slots = {}
    for column, tensor in first.items():
        if column == "id":
            continue
        if column in METADATA:
            integers = column in _WHOLE_METADATA
            known = tensor.dtype in _INTEGERS if integers else tensor.dtype == "F32"
            if not known or len(tensor.shape) != 1:
                raise UnsupportedError(
                    f"table {name!r}: {column} is {tensor.dtype} {list(tensor.shape)}: only "
                    f"{'integers' if integers else 'F32'} of shape [rows] are read"
                )
            continue
        if tensor.dtype != "F32" or tensor.shape[1:] not in ((), (1,), (dim,)):
            raise UnsupportedError(
                f"table {name!r}: {column} is {tensor.dtype} {list(tensor.shape)}: only F32 as wide as the embedding, or one "
                "number a row, is read; leave it out with --skip"
            )
        if column != "weight":
            slots[column] = dim if tensor.shape[1:] == (dim,) and dim > 1 else 0

    narrow = {slot for slot, width in slots.items() if width == 0}

    def chunks() -> Iterator[TableColumns]:
        step = _chunk_rows(4 * dim * (1 + len(slots)) + 8)
        for part in parts:
            rows = part["id"].shape[0]
            for begin in range(0, rows, step):
                columns = {column: tensor.read(begin, min(begin + step, rows)) for column, tensor in part.items()}
                for column in METADATA.keys() & columns.keys():
                    _check_metadata(name, column, columns[column])
                yield {
                    name: values[:, 0] if name in narrow and values.ndim == 2 else values
                    for name, values in columns.items()
                }

    rows = sum(part["id"].shape[0] for part in parts)
    return StoredTable(name, rows, dim, slots, chunks, description, skipped)


def _read_recis(path: Path) -> Iterator[StoredTable]:
    tables: dict[str, dict[str, dict[str, _TensorSlice]]] = {}
    counts: dict[str, set[int]] = {}
    skipped = []
    for tensor in _list_tensors(sorted(path.glob("*.safetensors"))):
        if tensor.name.startswith(PAD):
            continue
        match = _PART.fullmatch(tensor.name) or _SLICED.fullmatch(tensor.name)
        if match is None:
            skipped.append(tensor.name)  # a dense tensor
            continue
        column = "weight" if match["column"] == "embedding" else match["column"]
        # RecIS prefixes the slot's name with the optimizer's, as in sparse_adam_exp_avg and sparse_adamw_tf_exp_avg_sq.
        column = re.sub(r"^sparse_.+_(exp_avg|exp_avg_sq)$", r"\1", column)
        part = tables.setdefault(match["table"], {}).setdefault(match["shard"], {})
        if column in part:
            raise InputError(
                f"table {match['table']!r}: {tensor.name} is in {part[column].file} and in {tensor.file}: keep the files of one "
                "save only"
            )
        part[column] = tensor
        if "shards" in match.re.groupindex:
            counts.setdefault(match["table"], set()).add(int(match["shards"]))
    for at, (name, shards) in enumerate(sorted(tables.items())):
        if name in counts:
            _check_shards(name, counts[name], shards.keys())
        yield _table_from_tensors(name, [shards[shard] for shard in sorted(shards)], tuple(skipped) if at == 0 else ())


def _check_shards(table: str, counts: set[int], shards: Iterable[str]) -> None:
    """Raises `CorruptionError` unless all n parts of a table (`part_<i>_<n>`) exist. Otherwise rows would be missing."""
    found = {int(shard) for shard in shards}
    wanted = max(counts)
    if len(counts) > 1 or len(found) != wanted or max(found) >= wanted:
        raise CorruptionError(
            f"table {table!r}: expected all the parts of one save, found parts {sorted(found)} of {sorted(counts)}: the files of "
            "every shard must be there"
        )


def _read_description(folder: Path) -> dict[str, Any] | None:
    path = folder / DESCRIPTION_FILE
    if not os.path.lexists(path):
        return None
    with _open_regular_file(path) as file:
        return parse_description(file.read_bytes(), str(path))


def _read_safetensors(path: Path) -> Iterator[StoredTable]:
    alone = [path] if next(path.glob("*.safetensors"), None) else []
    for folder in alone or sorted(folder for folder in path.iterdir() if folder.is_dir()):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            continue
        parts: dict[Path, dict[str, _TensorSlice]] = {}
        for tensor in _list_tensors(files):
            parts.setdefault(tensor.file, {})[tensor.name] = tensor
        yield _table_from_tensors(
            folder.name, [parts[file] for file in files if file in parts], description=_read_description(folder)
        )


def _read_npy(path: Path) -> Iterator[StoredTable]:
    alone = [path] if (path / "id.npy").is_file() else []
    for folder in alone or sorted(folder for folder in path.iterdir() if (folder / "id.npy").is_file()):
        columns: TableColumns = {}
        for file in sorted(folder.glob("*.npy")):
            try:
                with _open_regular_file(file) as plain:
                    columns[file.stem] = np.load(plain, mmap_mode="r", allow_pickle=False)
            except _NPY_ERRORS as error:
                raise CorruptionError(f"{file}: offset 0: the header: expected npy, found {error}") from error
        if "weight" not in columns or columns["weight"].ndim != 2 or columns["id"].dtype != np.int64:
            raise InputError(f"{folder}: id.npy must be int64 [rows] and weight.npy float32 [rows, dim]")
        yield _table_from_parts(folder.name, [columns], columns["weight"].shape[1], _read_description(folder))


def _read_torchrec_dcp(path: Path) -> Iterator[StoredTable]:
    from .torchrec_dcp import read_tables

    tables, skipped = read_tables(path)
    for at, table in enumerate(tables):
        row_bytes = 4 * table.dim * (1 + len(table.slots)) + 8
        chunks = functools.partial(table.chunks, _chunk_rows(row_bytes))
        described = {"module": table.module}
        left = tuple(skipped) if at == 0 else ()
        yield StoredTable(table.name, table.rows, table.dim, table.slots, chunks, described, left, table.unread)


READERS: dict[str, Callable[[Path], Iterator[StoredTable]]] = {
    "recsdk": _read_recsdk,
    "recis": _read_recis,
    "safetensors": _read_safetensors,
    "npy": _read_npy,
    "torchrec-dcp": _read_torchrec_dcp,
}
