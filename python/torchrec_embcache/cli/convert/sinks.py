"""The plain files that `convert` writes a table to: `.npy` with one file per column, or safetensors."""

import contextlib
import io
import os
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from torchrec_embcache._fs import DirectoryHandle, sync, write_at
from torchrec_embcache.exceptions import EmbCacheError, StorageError, UnsupportedError
from torchrec_embcache.optimizers import OptimizerSpec

from .layouts import METADATA, TableColumns

__all__ = ["SINKS", "TableSink"]

#: Bytes of rows per safetensors file.
_PART_BYTES = 256 << 20


class TableSink(Protocol):
    """Writes a table's rows in chunks. Its files are complete and durable when the `with` block ends without an error."""

    def write(self, columns: TableColumns) -> None:
        """Writes some rows of the table: every column, of equal length."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class _NpyColumn:
    """A `.npy` file whose rows are written in order.

    The file is written rather than mapped: on a full file system a write returns an error, but a store to a mapping kills the
    process with SIGBUS.
    """

    def __init__(self, folder: DirectoryHandle, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        header = io.BytesIO()
        described = np.lib.format.header_data_from_array_1_0(np.empty((0,), dtype)) | {"shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        self._dtype = np.dtype(dtype)
        self._path = folder.path_of(f"{name}.npy")
        self._offset = 0
        self._fd = folder.create_file(f"{name}.npy")
        try:
            self._write(np.frombuffer(header.getvalue(), np.uint8))
        except BaseException:
            self.close()
            raise

    def append(self, values: np.ndarray[Any, Any]) -> None:
        plain = np.ascontiguousarray(values, self._dtype)
        self._write(plain.reshape(-1).view(np.uint8))

    def _write(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        write_at(self._fd, self._path, self._offset, data)
        self._offset += len(data)

    def sync(self) -> None:
        sync(self._fd, self._path)

    def close(self) -> None:
        os.close(self._fd)


class _NpySink:
    """One file per column."""

    def __init__(self, folder: DirectoryHandle, entry: dict[str, Any], optimizer: type[OptimizerSpec]) -> None:
        rows, dim = entry["rows"], entry["dim"]
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "id": (np.int64, (rows,)),
            "weight": (np.float32, (rows, dim)),
        }
        for at, name in enumerate(optimizer.slot_names):
            shapes[name] = (np.float32, (rows, dim) if at < optimizer.vector_slots else (rows,))
        shapes |= {name: (dtype, (rows,)) for name, dtype in METADATA.items()}
        with contextlib.ExitStack() as made:
            self._columns = {}
            for name, (dtype, shape) in shapes.items():
                self._columns[name] = _NpyColumn(folder, name, dtype, shape)
                made.callback(self._columns[name].close)
            self._exit_stack = made.pop_all()

    def write(self, columns: TableColumns) -> None:
        for name, values in columns.items():
            self._columns[name].append(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._exit_stack:
            if kind is None:
                for column in self._columns.values():
                    column.sync()


class _SafetensorsSink:
    """Files with at most 256 MiB of rows each."""

    def __init__(self, folder: DirectoryHandle, entry: dict[str, Any], optimizer: type[OptimizerSpec]) -> None:
        try:
            from safetensors import SafetensorError
            from safetensors.numpy import save_file
        except ImportError as missing:
            raise UnsupportedError(
                'this layout needs the safetensors package: pip install "torchrec-embcache[cli]"'
            ) from missing
        self._save = save_file
        self._save_error = SafetensorError
        self._folder = folder
        self._rows = max(1, _PART_BYTES // (entry["dim"] * (1 + optimizer.vector_slots) * 4 + 32))
        self._buffered: list[TableColumns] = []
        self._count = 0
        self._parts = 0

    def write(self, columns: TableColumns) -> None:
        self._buffered.append(columns)
        self._count += len(columns["id"])
        if self._count >= self._rows:
            self._write_file()

    def _write_file(self) -> None:
        names = self._buffered[0].keys()
        whole = {name: np.concatenate([columns[name] for columns in self._buffered]) for name in names}
        name = f"part-{self._parts:05}.safetensors"
        path = self._folder.path_of(name)
        try:
            # The library writes a new file and renames it.
            self._save(whole, f"/proc/self/fd/{self._folder.fd}/{name}")
        except (self._save_error, OSError) as cause:
            if isinstance(cause, EmbCacheError):
                raise
            raise StorageError(f"cannot write {path}: {cause}") from cause
        fd = self._folder.open_file(name)
        try:
            sync(fd, path)
        finally:
            os.close(fd)
        self._parts += 1
        self._buffered, self._count = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._buffered:
            self._write_file()


SINKS: dict[str, type[_NpySink] | type[_SafetensorsSink]] = {"npy": _NpySink, "safetensors": _SafetensorsSink}
