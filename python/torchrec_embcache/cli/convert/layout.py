"""The interface of the formats that `convert` reads and writes, and the tables that they contain.

A table is read as columns, in chunks of rows, so that memory is bounded for tables of any size.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache._fs import DirectoryHandle, open_regular_file
from torchrec_embcache.cli.checkpoints import OpenCheckpoint
from torchrec_embcache.exceptions import CorruptionError, InputError, UnsupportedError

__all__ = [
    "METADATA",
    "CheckpointLayout",
    "ConvertSettings",
    "StoredColumn",
    "StoredTable",
    "TableColumns",
    "check_known_names",
    "regular_file",
]

TableColumns = dict[str, NDArray[Any]]

#: The columns of a row's metadata, and the type of each.
METADATA = {"count": np.uint32, "last_step": np.uint64, "score": np.float32, "modified_epoch": np.uint32}
#: The integer columns of the metadata, and the maximum of each. A table must be able to increment it.
_WHOLE_METADATA = {"count": (1 << 32) - 1, "last_step": (1 << 63) - 1, "modified_epoch": (1 << 32) - 2}
#: Bytes of rows that are read at a time.
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class ConvertSettings:
    """Settings that a format does not contain.

    `rename`: new names of tables. `skip`: omitted slots. The other settings of a conversion to our checkpoint are those of its
    tables.

    Settings of a conversion to TorchRec. `rows`: `num_embeddings` of each table, by `<table>` or `<module>/<table>`. `model_key`,
    `optimizer_key`: keys of the state dicts of the model and of its fused optimizer in the saved state; "" for none. `sequences`:
    the modules that are an `EmbeddingCollection`; all others are an `EmbeddingBagCollection`.
    """

    module: str = ""
    optimizer: str | None = None
    step: int = 0
    total_num_buckets: int = 65_536
    rename: Mapping[str, str] = field(default_factory=dict)
    skip: Sequence[str] = ()
    model_key: str = ""
    optimizer_key: str = "optim"
    rows: Mapping[str, int] = field(default_factory=dict)
    sequences: Sequence[str] = ()


def check_known_names(option: str, given: Collection[str], known: Collection[str], source: str) -> None:
    """Raises `InputError` for a name of an option that is not in the source, which may be a typing error."""
    if unknown := sorted(set(given) - set(known)):
        raise InputError(f"{option} {unknown[0]}: {source} has {', '.join(sorted(known)) or 'none'}")


@dataclass(frozen=True)
class StoredColumn:
    """A column of a table in files: one value per row, or one row of them.

    `dtype`: the type of the values; the format's name of it if numpy has no such type. `shape`: the dimensions, rows first.
    `open`: returns a function that reads rows [begin, end).
    """

    dtype: np.dtype[Any] | str
    shape: tuple[int, ...]
    open: Callable[[], Callable[[int, int], NDArray[Any]]]

    @classmethod
    def of_array(cls, values: NDArray[Any]) -> "StoredColumn":
        """Returns the column in an array, which may be a mapped file."""
        return cls(values.dtype, values.shape, lambda: lambda begin, end: np.ascontiguousarray(values[begin:end]))


@dataclass(frozen=True)
class StoredTable:
    """A table in a foreign format.

    `parts`: its columns by name, in one or several parts of rows: `id` [n] (int64), `weight` [n, D] and each slot, [n, D] or [n]
    (float32), and the metadata, if the format has it. `slots`: the width of each slot: D, or 0 for one value per row. `unread`: the
    slots that cannot be read, with the reason. `description`: fields of a manifest entry, as far as the format has them.
    """

    name: str
    dim: int
    parts: Sequence[Mapping[str, StoredColumn]]
    slots: Mapping[str, int]
    unread: Mapping[str, str]
    description: Mapping[str, Any]

    @classmethod
    def from_parts(
        cls,
        name: str,
        parts: Sequence[Mapping[str, StoredColumn]],
        description: Mapping[str, Any] | None = None,
        unread: Mapping[str, str] | None = None,
    ) -> "StoredTable":
        """Returns the table of `parts`. `unread`: slots that are not in the parts.

        Raises `CorruptionError`, `InputError` or `UnsupportedError` unless ids, weights and metadata fit each other and our rows.
        """
        for part in parts:
            if part.keys() != parts[0].keys() or not {"id", "weight"} <= part.keys():
                raise CorruptionError(
                    f"table {name!r}: its parts have the columns {sorted(part)} and {sorted(parts[0])}: id and weight are needed, "
                    "and the same everywhere"
                )
            for column in ("id", "weight", *METADATA):
                if column in part:
                    _check_column(name, column, part[column])
            lengths = {column: stored.shape[0] if stored.shape else 0 for column, stored in part.items()}
            if len(set(lengths.values())) > 1:
                raise CorruptionError(f"table {name!r}: its columns do not belong together: rows {lengths}")
        dims = {part["weight"].shape[1] for part in parts}
        if len(dims) > 1:
            raise InputError(f"table {name!r}: weight is {sorted(dims)} wide in its parts")
        (dim,) = dims
        slots, unreadable = {}, dict(unread or {})
        for slot in parts[0]:
            if slot not in ("id", "weight", *METADATA):
                width, *others = {_slot_width(part[slot], dim) for part in parts}
                if isinstance(width, int) and not others:
                    slots[slot] = width
                else:
                    unreadable[slot] = " and ".join(
                        f"it is {part[slot].dtype} {list(part[slot].shape)}" for part in parts
                    )
                    unreadable[slot] += f": only float32 of the shape [rows] or [rows, {dim}] is read"
        return cls(name, dim, parts, slots, unreadable, description or {})

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return sum(part["id"].shape[0] for part in self.parts)

    def chunks(self, rows: int | None = None) -> Iterator[TableColumns]:
        """Yields its columns in chunks of rows. Raises `InputError` for metadata that fits no row."""
        step = rows or max(1, _CHUNK_BYTES // (4 * self.dim * (1 + len(self.slots)) + 8))
        for part in self.parts:
            readers = {name: stored.open() for name, stored in part.items() if name not in self.unread}
            length = part["id"].shape[0]
            for begin in range(0, length, step):
                columns = {name: read(begin, min(begin + step, length)) for name, read in readers.items()}
                for name, greatest in _WHOLE_METADATA.items():
                    _check_range(self.name, name, columns.get(name), greatest)
                yield columns


def _slot_width(stored: StoredColumn, dim: int) -> int | None:
    """Returns the width of a slot (0: one value per row), or None if it cannot be read."""
    if stored.dtype != np.float32:
        return None
    return {(dim,): dim, (): 0, (1,): 0}.get(stored.shape[1:])


def _check_column(table: str, column: str, stored: StoredColumn) -> None:
    """Raises an error unless a column has the dimensions and the type of its values in our rows."""
    shape = "[rows, dim]" if column == "weight" else "[rows]"
    if len(stored.shape) != (2 if column == "weight" else 1):
        raise InputError(f"table {table!r}: {column} has shape {list(stored.shape)} and needs {shape}")
    if column not in METADATA:
        wanted = np.dtype(np.int64 if column == "id" else np.float32)
        if stored.dtype != wanted:
            raise UnsupportedError(f"table {table!r}: {column} is {stored.dtype}: only {wanted} is read")
    # Otherwise the conversion would silently change values.
    elif getattr(stored.dtype, "kind", "") not in ("iu" if column in _WHOLE_METADATA else "f"):
        raise InputError(
            f"table {table!r}: {column} is {stored.dtype} and needs {'integers' if column in _WHOLE_METADATA else 'float32'}: "
            f"leave all of {', '.join(METADATA)} out, and the rows count as never used"
        )


def _check_range(table: str, column: str, values: NDArray[Any] | None, greatest: int) -> None:
    if values is not None and len(values):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > greatest:
            raise InputError(f"table {table!r}: {column} has {low if low < 0 else high}, and 0 to {greatest} fit")


class CheckpointLayout(ABC):
    """A format that `convert` reads, and writes if `is_writable`. `name` is its name on the command line.

    A directory is in the format if it has a file that matches one of `marks`. `import_options` and `export_options`: the fields of
    `ConvertSettings` that reading and writing use. `omitted`: the properties of a checkpoint that the format does not have.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    is_writable: ClassVar[bool] = False
    import_options: ClassVar[tuple[str, ...]] = ("module", "optimizer", "step", "total_num_buckets", "rename", "skip")
    export_options: ClassVar[tuple[str, ...]] = ()
    omitted: ClassVar[str] = ""

    @abstractmethod
    def read(self, path: Path) -> tuple[list[StoredTable], list[str]]:
        """Returns the tables in a directory, and the names of all tensors that belong to no table."""

    def write(self, opened: OpenCheckpoint, target: DirectoryHandle, settings: ConvertSettings) -> list[dict[str, Any]]:
        """Writes every table of a checkpoint to an empty directory. Returns a summary of each."""
        raise NotImplementedError(f"{self.name} is not among the formats of --to")


@contextlib.contextmanager
def regular_file(path: Path) -> Iterator[Path]:
    """Opens a regular file. The yielded path refers to it even if it is renamed. Raises like `open_regular_file`."""
    fd = open_regular_file(path)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
