"""The newest block-level save of a directory, as columns of rows and as tensors. The core reads and verifies it."""

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.paths import Directory

from .schema import NUMPY_TYPES, Column

__all__ = ["SavedBlocks", "SavedRun", "SavedTable", "SavedTensor"]


class SavedTensor:
    """A dense tensor of the save. `dtype` as safetensors names it."""

    def __init__(self, reader: _native.BlockReader, shape: _native.BlockShape) -> None:
        self._reader = reader
        self.name, self.dtype, self.bytes = shape.name, shape.dtype, shape.bytes
        self.shape = tuple(shape.shape)

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes [begin, end) of it, verified."""
        into = np.empty(end - begin, np.uint8)
        self._reader.read_tensor(self.name, begin, into)
        return into


@dataclass(frozen=True)
class SavedRun:
    """Rows of one shard that lie together, sorted by (bucket, `uint64(id)`)."""

    table: "SavedTable"
    run: _native.BlockRun

    def submit(self, slots: list[str], helpers: Executor) -> dict[str, Future[NDArray[Any]]]:
        """Start to read some slots."""
        return {slot: helpers.submit(self._column, slot) for slot in slots}

    def _column(self, slot: str) -> NDArray[Any]:
        column = self.table.slots[slot]
        values = np.empty((self.run.rows, *column.shape), NUMPY_TYPES[column.dtype])
        self.table.reader.read_rows(self.table.name, self.run, slot, values.reshape(-1).view(np.uint8))
        return values


class SavedTable:
    """A table of the save. `slots`: what it has, with the type and shape of one row."""

    def __init__(self, reader: _native.BlockReader, about: _native.TableOfBlocks) -> None:
        self.reader = reader
        self.name, self.dim, self.key, self.step, self.epoch = (
            about.name,
            about.dim,
            about.key,
            about.step,
            about.epoch,
        )
        self.slots = {shape.name: Column(shape.dtype, tuple(shape.shape)) for shape in about.slots}

    def runs(self, total_num_buckets: int, buckets: tuple[int, int]) -> Iterator[SavedRun]:
        """What holds the rows whose buckets (of `total_num_buckets`) are in [begin, end): where the save has the same buckets only
        those, else all rows.
        """
        for run in self.reader.runs(self.name, total_num_buckets, *buckets):
            yield SavedRun(self, run)


class SavedBlocks:
    """The newest complete save in a directory, once it is open: `tables` and `tensors` by name.

    As a block it keeps the save from being removed, from `open` on until the block is left.
    """

    def __init__(self) -> None:
        self._reader: _native.BlockReader | None = None
        self.tables: dict[str, SavedTable] = {}
        self.tensors: dict[str, SavedTensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self, directory: Directory) -> None:
        """Open the newest save of `directory`.

        Raises `PathError` where there is none, `CorruptionError`, `UnsupportedError` (a newer format), `StorageError`.
        """
        reader = self._reader = _native.BlockReader(directory)
        self.tables = {table.name: SavedTable(reader, table) for table in reader.tables()}
        self.tensors = {tensor.name: SavedTensor(reader, tensor) for tensor in reader.tensors()}

    @property
    def names(self) -> list[str]:
        """The names of all tables and tensors."""
        return sorted((*self.tables, *self.tensors))

    def close(self) -> None:
        """Nothing more is read: saves may remove it. Harmless twice."""
        if self._reader is not None:
            self._reader.release()
