"""Reads the latest RecIS-format save of a directory as row columns and tensors. The native extension reads and verifies it."""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache._paths import CheckpointDirectory

from ._schema import NUMPY_TYPES, RecisColumn

__all__ = ["RecisCheckpoint", "RecisTableReader", "RecisTensorReader"]


class RecisTensorReader:
    """A dense tensor of the save. `dtype` is named as in safetensors."""

    def __init__(self, reader: _native.RecisReader, shape: _native.RecisBlockShape) -> None:
        self._reader = reader
        self.name, self.dtype, self.bytes = shape.name, shape.dtype, shape.bytes
        self.shape = tuple(shape.shape)

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Reads and verifies its bytes [begin, end)."""
        into = np.empty(end - begin, np.uint8)
        self._reader.read_tensor(self.name, begin, into)
        return into


class RecisTableReader:
    """A table of the save. `slots`: its slots, with the type and shape of one row."""

    def __init__(self, reader: _native.RecisReader, entry: _native.RecisTableInfo) -> None:
        self._reader = reader
        self.name, self.dim, self.key = entry.name, entry.dim, entry.key
        self.step, self.epoch = entry.step, entry.epoch
        self.slots = {shape.name: RecisColumn(shape.dtype, tuple(shape.shape)) for shape in entry.slots}

    def runs(self, total_num_buckets: int, buckets: tuple[int, int]) -> Sequence[_native.RecisRun]:
        """Returns the runs that contain the rows whose buckets (of `total_num_buckets`) are in [begin, end). If the save has the
        same number of buckets, the runs contain only these rows, otherwise all rows.

        A run is contiguous rows of one shard, sorted by (bucket, `uint64(id)`).
        """
        return self._reader.runs(self.name, total_num_buckets, *buckets)

    def submit(self, run: _native.RecisRun, slots: list[str], executor: Executor) -> dict[str, Future[NDArray[Any]]]:
        """Starts to read the given slots of a run."""
        return {slot: executor.submit(self._column, run, slot) for slot in slots}

    def _column(self, run: _native.RecisRun, slot: str) -> NDArray[Any]:
        column = self.slots[slot]
        values = np.empty((run.rows, *column.shape), NUMPY_TYPES[column.dtype])
        self._reader.read_rows(self.name, run, slot, values.reshape(-1).view(np.uint8))
        return values


class RecisCheckpoint(CloseOnExitMixin):
    """The latest complete save in a directory, with `tables` and `tensors` by name once it is open.

    As a context manager it prevents the removal of the save, from `open` to the end of the block.
    """

    def __init__(self) -> None:
        self._reader: _native.RecisReader | None = None
        self.tables: dict[str, RecisTableReader] = {}
        self.tensors: dict[str, RecisTensorReader] = {}

    def open(self, directory: CheckpointDirectory) -> None:
        """Opens the latest save of `directory`.

        Raises `PathError` if there is none, `CorruptionError`, `UnsupportedError` (a newer format), `StorageError`.
        """
        reader = self._reader = _native.RecisReader(directory)
        self.tables = {table.name: RecisTableReader(reader, table) for table in reader.tables()}
        self.tensors = {tensor.name: RecisTensorReader(reader, tensor) for tensor in reader.tensors()}

    @property
    def names(self) -> list[str]:
        """The names of all tables and tensors."""
        return sorted((*self.tables, *self.tensors))

    def close(self) -> None:
        """Closes the save and allows its removal. Idempotent."""
        if self._reader is not None:
            self._reader.release()
