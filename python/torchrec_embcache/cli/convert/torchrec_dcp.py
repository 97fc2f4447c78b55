"""Layout `torchrec-dcp`: a checkpoint of a model with TorchRec's own tables, written by `torch.distributed.checkpoint.save`.

- `.metadata`: a pickle that lists every tensor, its chunks, and the location of each chunk. It is read by an unpickler that only
  knows the classes of that list, so it cannot run code of the file's author.
- `*.distcp`: the chunks, each written by `torch.save`: a zip file whose single tensor is stored uncompressed. Rows are read in
  chunks from a mapping of that tensor, and its pickle is only used for the shape.

A table is a tensor `<path>.embedding_bags.<table>.weight` or `<path>.embeddings.<table>.weight`, [rows, dim]. Its optimizer slots
are the tensors `….<table>.weight.<table>.<slot>` of `KeyedOptimizer.state_dict()`. The id of a row is its index.
"""

import io
import itertools
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_embcache._fs import open_regular_file
from torchrec_embcache.exceptions import CorruptionError, InputError, UnsupportedError

from .layout import StoredColumn, StoredTable

__all__ = ["MAX_ROWS", "METADATA_FILE", "read_tables"]

METADATA_FILE = ".metadata"
MAX_ROWS = (1 << 48) - 1
_MAX_METADATA_BYTES = 1 << 30
_TABLE = re.compile(r"(?:(?P<module>.+)\.)?(?P<kind>embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight")
_SLOT = re.compile(
    r"(?:(?P<module>.+)\.)?(?P<kind>embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight\.(?P=table)\.(?P<slot>[^.]+)"
)
#: State of an optimizer that does not belong to rows.
_NO_SLOT = frozenset({"iter", "step", "learning_rate"})
#: The names that a pickled list of tensors may use. No other name in it is resolved, so nothing else is ever called.
_ALLOWED_CLASSES = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset(
        {"Size", *(str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype))}
    ),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath"}),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED_CLASSES.get(module, ()):
            raise UnsupportedError(f"it names {module}.{name}, which no list of tensors needs, and which is not loaded")
        return super().find_class(module, name)


def _corruption_error(path: Path, problem: str, expected: object, found: object) -> CorruptionError:
    error = CorruptionError(f"{path}: {problem}: expected {expected}, found {found}")
    error.filename = str(path)
    return error


# ---- locations of chunks


@dataclass(frozen=True)
class _TensorChunk:
    """A rectangle of a tensor, and its location in a file written by `torch.save`."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int

    def values(self) -> NDArray[np.float32]:
        """Maps the rectangle; data is read on access."""
        with open(self.file, "rb", opener=open_regular_file) as whole:
            part = _FileSlice(whole, self.offset, self.length, self.file)
            try:
                # This only reads shape, strides and offset: tensors on "meta" have no data.
                tensor = torch.load(io.BufferedReader(part), map_location="meta", weights_only=True)
                with zipfile.ZipFile(part) as archive:
                    stored = [entry for entry in archive.infolist() if "/data/" in f"/{entry.filename}"]
                    begin = self._storage_offset(whole, stored)
            except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
                raise _corruption_error(self.file, f"offset {self.offset}", "a tensor of torch.save", error) from error
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.dtype != torch.float32
                or tuple(tensor.shape) != self.shape
            ):
                found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor)
                raise _corruption_error(self.file, f"offset {self.offset}", f"float32 {list(self.shape)}", found)
            return _map_strided(whole, begin, stored[0].file_size, tensor, self.file)

    def _storage_offset(self, file: io.BufferedReader, stored: list[zipfile.ZipInfo]) -> int:
        """Returns the offset of the tensor's storage in the file."""
        if len(stored) != 1 or stored[0].compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{len(stored)} storages, or one that is compressed, and not one that is stored as it is")
        header = self.offset + stored[0].header_offset
        file.seek(header)
        local = file.read(30)
        if len(local) < 30:
            raise ValueError("the file ends in the header of a storage")
        # The local header of a zip entry: 30 bytes, of which the last four are the lengths of the name and of the extra field.
        begin = header + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        if begin + stored[0].file_size > self.offset + self.length:
            raise ValueError("a storage that goes past the end of its chunk")
        return begin


class _FileSlice(io.RawIOBase):
    """A range of a file as a separate file object."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int, path: Path) -> None:
        size = os.fstat(file.fileno()).st_size
        if offset < 0 or length < 0 or offset + length > size:
            raise _corruption_error(path, "the file's length", f"at least {offset + length}", size)
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(wanted)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def _map_strided(
    file: io.BufferedReader, begin: int, size: int, tensor: torch.Tensor, path: Path
) -> NDArray[np.float32]:
    """Maps a storage of `size` bytes at `begin`, viewed with the tensor's strides."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not math.prod(shape):
        return np.empty(shape, np.float32)
    last = tensor.storage_offset() + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if min(strides, default=0) < 0 or tensor.storage_offset() < 0 or 4 * (last + 1) > size:
        raise _corruption_error(path, f"offset {begin}", f"at least {4 * (last + 1)} bytes of numbers", size)
    flat = np.memmap(file, np.float32, "r", offset=begin, shape=(size // 4,))[tensor.storage_offset() :]
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(4 * stride for stride in strides), writeable=False)


# ---- tensors


@dataclass(frozen=True)
class _ChunkedTensor:
    """A tensor in chunks that cover it exactly once."""

    shape: tuple[int, ...]
    chunks: Sequence[_TensorChunk]

    def reader(self) -> Callable[[int, int], NDArray[np.float32]]:
        """Returns a function that reads rows [begin, end)."""
        mapped = [(chunk, chunk.values()) for chunk in self.chunks]

        def read(begin: int, end: int) -> NDArray[np.float32]:
            out = np.empty((end - begin, *self.shape[1:]), np.float32)
            for chunk, values in mapped:
                first, last = max(begin, chunk.begin[0]), min(end, chunk.begin[0] + chunk.shape[0])
                if first < last:
                    rows = values[first - chunk.begin[0] : last - chunk.begin[0]]
                    if len(self.shape) == 1:
                        out[first - begin : last - begin] = rows
                    else:
                        column = chunk.begin[1]
                        out[first - begin : last - begin, column : column + chunk.shape[1]] = rows
            return out

        return read


def _sizes(path: Path, name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(isinstance(value, int) and 0 <= value <= MAX_ROWS for value in values):
        raise _corruption_error(path, f"the sizes of {name!r}", "non-negative integers", repr(values))
    return tuple(values)


def _read_tensor(path: Path, folder: Path, metadata: Metadata, name: str) -> _ChunkedTensor:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata), "the caller picked tensors"
    if getattr(entry.properties, "dtype", None) != torch.float32:
        raise UnsupportedError(f"{name!r} is {getattr(entry.properties, 'dtype', None)}: only float32 is read")
    shape = _sizes(path, name, entry.size)
    stored_at: dict[tuple[int, ...], Any] = {
        index.offset: stored for index, stored in metadata.storage_data.items() if index.fqn == name
    }
    chunks = []
    for chunk in entry.chunks:
        begin, size = _sizes(path, name, chunk.offsets), _sizes(path, name, chunk.sizes)
        stored = stored_at.get(chunk.offsets)
        if stored is None or len(begin) != len(shape) or len(size) != len(shape):
            raise _corruption_error(path, f"{name!r}", "a location for each chunk", f"none for the one at {begin}")
        if stored.transform_descriptors:
            raise UnsupportedError(
                f"{name!r} is stored with {list(stored.transform_descriptors)}: save it without transforms"
            )
        file = stored.relative_path
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
            raise _corruption_error(path, f"the file of {name!r}", "a name in the directory", repr(file))
        if not all(isinstance(number, int) for number in (stored.offset, stored.length)):
            raise _corruption_error(path, f"the location of {name!r}", "integers", repr(stored))
        chunks.append(_TensorChunk(begin, size, folder / file, stored.offset, stored.length))
    _check_cover(path, name, shape, chunks)
    return _ChunkedTensor(shape, chunks)


def _check_cover(path: Path, name: str, shape: tuple[int, ...], chunks: list[_TensorChunk]) -> None:
    """Raises `CorruptionError` unless every element of the tensor is in exactly one chunk."""
    covered = 0
    for at, chunk in enumerate(chunks):
        inside = all(
            begin + size <= length for begin, size, length in zip(chunk.begin, chunk.shape, shape, strict=True)
        )
        overlaps = any(_overlap(chunk, other) for other in chunks[:at])
        if not inside or overlaps:
            raise _corruption_error(path, f"{name!r}", "adjacent chunks", f"{chunk.shape} at {chunk.begin}")
        covered += math.prod(chunk.shape)
    if covered != math.prod(shape):
        raise _corruption_error(path, f"{name!r}", f"chunks with all {math.prod(shape)} numbers", covered)


def _overlap(one: _TensorChunk, other: _TensorChunk) -> bool:
    return all(
        max(a, b) < min(a + of_a, b + of_b)
        for a, of_a, b, of_b in zip(one.begin, one.shape, other.begin, other.shape, strict=True)
    )


# ---- tables


def _read_metadata(path: Path) -> Metadata:
    with open(path, "rb", opener=open_regular_file) as file:
        if (length := os.fstat(file.fileno()).st_size) > _MAX_METADATA_BYTES:
            raise _corruption_error(path, "the file's length", f"at most {_MAX_METADATA_BYTES}", length)
        try:
            found = _MetadataUnpickler(file).load()
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: {error}") from error
        except Exception as error:  # an invalid pickle can raise any exception
            raise _corruption_error(path, "the metadata", "a pickle of torch.distributed.checkpoint", error) from error
    if not isinstance(found, Metadata):
        raise _corruption_error(path, "the metadata", "torch.distributed.checkpoint's Metadata", type(found).__name__)
    return found


def read_tables(folder: Path) -> tuple[list[StoredTable], list[str]]:
    """Returns the tables in a checkpoint's directory, and the names of all entries that belong to no table.

    Raises `CorruptionError`, `UnsupportedError` (another type than float32, compressed chunks) and `InputError` (two tables with
    the same module and name).
    """
    path = folder / METADATA_FILE
    metadata = _read_metadata(path)
    try:
        return _find_tables(path, folder, metadata)
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise _corruption_error(path, "the metadata", "torch.distributed.checkpoint's Metadata", error) from error


def _find_tables(path: Path, folder: Path, metadata: Metadata) -> tuple[list[StoredTable], list[str]]:
    tensors = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)]
    tables = {name: match for name in tensors if (match := _TABLE.fullmatch(name))}
    slots: dict[str, dict[str, str]] = {name: {} for name in tables}
    used = set(tables)
    for name in tensors:
        if match := _SLOT.fullmatch(name):
            used.add(name)
            if match["slot"] not in _NO_SLOT:
                slots[_find_owner(path, name, match, tables)][match["slot"]] = name
    found = []
    for name, match in sorted(tables.items()):
        weight = _read_tensor(path, folder, metadata, name)
        if len(weight.shape) != 2:
            raise InputError(f"{path}: {name!r} has shape {list(weight.shape)} and needs [rows, dim]")
        stored = {slot: _read_tensor(path, folder, metadata, of) for slot, of in sorted(slots[name].items())}
        unread = {slot: why for slot, tensor in stored.items() if (why := _unread_reason(tensor, weight))}
        part = {"id": StoredColumn(np.dtype(np.int64), weight.shape[:1], lambda: np.arange)} | {
            column: StoredColumn(np.dtype(np.float32), tensor.shape, tensor.reader)
            for column, tensor in {"weight": weight, **stored}.items()
            if column not in unread
        }
        found.append(StoredTable.from_parts(match["table"], [part], {"module": match["module"] or ""}, unread))
    return found, [str(name) for name in metadata.state_dict_metadata if name not in used]


def _find_owner(path: Path, name: str, slot: re.Match[str], tables: dict[str, re.Match[str]]) -> str:
    """Returns the weight that a slot belongs to: among tables of its name, the one that shares the longest path suffix with the
    slot.

    A model and its optimizer have different prefixes in a state, such as `model.` and `optim.state.`, so only the ends of the paths
    are comparable.
    """
    alike = {
        weight: _common_end(slot["module"], match["module"])
        for weight, match in tables.items()
        if match["table"] == slot["table"] and match["kind"] == slot["kind"]
    }
    most = max(alike.values(), default=0)
    owners = [weight for weight, length in alike.items() if length == most]
    if len(owners) != 1:
        raise InputError(
            f"{path}: {name!r} may belong to any of {owners}: convert a checkpoint in which one table has this name"
            if owners
            else f"{path}: {name!r} is a slot of a table whose weights are not there"
        )
    return owners[0]


def _common_end(one: str | None, other: str | None) -> int:
    """Returns the number of equal trailing components of two paths."""
    pairs = zip(reversed((one or "").split(".")), reversed((other or "").split(".")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _unread_reason(tensor: _ChunkedTensor, weight: _ChunkedTensor) -> str:
    """Returns the reason that a slot is not supported, "" if it is."""
    rows = weight.shape[0]
    if tensor.shape in (weight.shape, (rows,), (rows, 1)):
        return ""
    why = f"it has the shape {list(tensor.shape)} and the weights have {list(weight.shape)}"
    if len(tensor.shape) == 1 and rows and tensor.shape[0] % rows == 0:
        why += " (a table that is sharded by columns has one number a row for each of its shards)"
    return why
