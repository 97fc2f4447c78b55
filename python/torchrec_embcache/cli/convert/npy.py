"""Layout `npy`: a directory for each table, with `id.npy`, `weight.npy`, and one file for each slot."""

import contextlib
import io
import os
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_embcache._fs import DirectoryHandle, sync, write_at
from torchrec_embcache.exceptions import CorruptionError
from torchrec_embcache.optimizers import OptimizerSpec

from .layout import METADATA, StoredColumn, TableColumns, regular_file
from .plain import ColumnWriter, PlainLayout

__all__ = ["NpyLayout"]

#: Exceptions that numpy raises for a corrupted header. (It evaluates the header as a Python literal.)
_NPY_ERRORS = (ValueError, EOFError, SyntaxError, tokenize.TokenError, RecursionError, OverflowError, TypeError)


class NpyLayout(PlainLayout):
    """Reads and writes a `.npy` file for each column."""

    name = "npy"
    marks = ("*/id.npy", "id.npy")
    mark = "id.npy"

    def read_parts(self, folder: Path) -> list[dict[str, StoredColumn]]:
        """Implements `PlainLayout`."""
        columns: dict[str, StoredColumn] = {}
        for file in sorted(folder.glob("*.npy")):
            try:
                with regular_file(file) as plain:
                    columns[file.stem] = StoredColumn.of_array(np.load(plain, mmap_mode="r", allow_pickle=False))
            except _NPY_ERRORS as error:
                raise CorruptionError(f"{file}: offset 0: the header: expected npy, found {error}") from error
        return [columns]

    @contextlib.contextmanager
    def open_writer(
        self, folder: DirectoryHandle, entry: dict[str, Any], optimizer: type[OptimizerSpec]
    ) -> Iterator[ColumnWriter]:
        """Implements `PlainLayout`."""
        rows, dim = entry["rows"], entry["dim"]
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "id": (np.int64, (rows,)),
            "weight": (np.float32, (rows, dim)),
        }
        for at, name in enumerate(optimizer.slot_names):
            shapes[name] = (np.float32, (rows, dim) if at < optimizer.vector_slots else (rows,))
        shapes |= {name: (dtype, (rows,)) for name, dtype in METADATA.items()}
        with contextlib.ExitStack() as open_files:
            files = {}
            for name, (dtype, shape) in shapes.items():
                files[name] = _NpyFile(folder, name, dtype)
                open_files.callback(os.close, files[name].fd)
                files[name].write_header(shape)

            def write(columns: TableColumns) -> None:
                for name, values in columns.items():
                    files[name].append(values)

            yield write
            for file in files.values():
                sync(file.fd, file.path)


class _NpyFile:
    """A `.npy` file whose rows are written in order.

    The file is written rather than mapped: on a full file system a write returns an error, but a store to a mapping kills the
    process with SIGBUS.
    """

    def __init__(self, folder: DirectoryHandle, name: str, dtype: Any) -> None:
        self.path, self._dtype, self._offset = folder.path_of(f"{name}.npy"), np.dtype(dtype), 0
        self.fd = folder.create_file(f"{name}.npy")

    def write_header(self, shape: tuple[int, ...]) -> None:
        header = io.BytesIO()
        described = np.lib.format.header_data_from_array_1_0(np.empty((0,), self._dtype)) | {"shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        self._write(np.frombuffer(header.getvalue(), np.uint8))

    def append(self, values: np.ndarray[Any, Any]) -> None:
        self._write(np.ascontiguousarray(values, self._dtype).reshape(-1).view(np.uint8))

    def _write(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        write_at(self.fd, self.path, self._offset, data)
        self._offset += len(data)
