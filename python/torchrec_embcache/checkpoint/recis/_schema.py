"""The blocks of a table, as columns of its rows.

Shapes: n rows, D the table's width, V = D * (1 + vector slots) floats of a row's vector part, weights first.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache import _native
from torchrec_embcache.table.cache_table import CacheTable

__all__ = [
    "DTYPES",
    "ID",
    "NUMPY_TYPES",
    "PAD",
    "ColumnArrays",
    "RecisColumn",
    "WriteBlock",
    "empty_rows",
    "metadata_of",
    "row_columns",
    "rows_with_ids",
    "table_columns",
]

# Values of rows by slot, one entry per row.
ColumnArrays = dict[str, NDArray[Any]]

# RecIS' names for the ids and weights of a table.
ID, WEIGHTS = "id", "embedding"
# Prefix of the padding tensors (zeros) between blocks in a file. A number follows, and more "_" may precede it.
PAD = "__pad."
# Names of types in safetensors.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}  # fmt: skip
# The types of a table's columns.
NUMPY_TYPES: dict[str, type[np.generic]] = {"I64": np.int64, "U64": np.uint64, "F32": np.float32, "U32": np.uint32}


@dataclass(frozen=True)
class WriteBlock:
    """A block to save: the ids or one slot of a table's shard, or a dense tensor.

    `name`: name of the table or the tensor. `slot`: None for a dense tensor. `dtype` is named as in safetensors.

    Examples:
        >>> import torch
        >>> from torchrec_embcache.serialize import BlockSaver
        >>> [block] = BlockSaver(path="ckpt", tensors={"over.bias": torch.zeros(2)}).make_write_blocks()
        >>> block.tensor_name(), block.slice_info(), block.dtype, block.shape, block.dense
        ('over.bias', ' ', 'F32', (2,), True)
    """

    name: str
    slot: str | None
    dtype: str
    shape: tuple[int, ...]
    source: CacheTable | Tensor = field(repr=False, compare=False)

    @property
    def dense(self) -> bool:
        """True for a dense tensor."""
        return self.slot is None

    def tensor_name(self) -> str:
        """Returns its name in RecIS: `table@slot`, or the tensor's name."""
        return self.name if self.slot is None else f"{self.name}@{self.slot}"

    def slice_info(self) -> str:
        """Returns its RecIS slice: "begin@end@total", the range of `uint64(id) mod total` of its ids; " " for a dense tensor.

        The range always covers all buckets, because rows are assigned to buckets by the hash of the id.
        """
        if not isinstance(self.source, CacheTable):
            return " "
        total = self.source.total_num_buckets
        width = len(str(total))
        return f"{0:0{width}}@{total}@{total}"


@dataclass(frozen=True)
class RecisColumn:
    """A column of a table's rows. `dtype` is named as in safetensors; `shape` is the shape of one row's entry."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one row's entry."""
        return math.prod(self.shape) * np.dtype(NUMPY_TYPES[self.dtype]).itemsize


def table_columns(table: CacheTable) -> dict[str, RecisColumn]:
    """Returns the columns of a table by slot, ids first."""
    spec = table._spec
    columns = {ID: RecisColumn("I64", ()), WEIGHTS: RecisColumn("F32", (table.dim,))}
    for number, name in enumerate(spec.slot_names):
        columns[name] = RecisColumn("F32", (table.dim,) if number < spec.vector_slots else ())
    metadata = {"last_step": "U64", "count": "U32", "score": "F32", "modified_epoch": "U32"}
    return columns | {name: RecisColumn(dtype, ()) for name, dtype in metadata.items()}


def row_columns(table: CacheTable, rows: _native.RowBlock) -> ColumnArrays:
    """Returns views of native rows by slot."""
    ids, vectors, scalars, metadata = rows.ids, rows.vectors, rows.scalars, rows.metadata
    spec = table._spec
    columns: ColumnArrays = {ID: ids}
    for number, name in enumerate((WEIGHTS, *spec.slot_names[: spec.vector_slots])):
        columns[name] = vectors[:, number * table.dim : (number + 1) * table.dim]
    if spec.scalar_slot():
        columns[spec.slot_names[-1]] = scalars
    return columns | {
        "last_step": metadata.last_step,
        "count": metadata.count,
        "score": metadata.score,
        "modified_epoch": metadata.modified_epoch,
    }


def rows_with_ids(ids: NDArray[np.int64], found: _native.FoundRows) -> _native.RowBlock:
    """Returns the rows found for `ids` [n], with a copy of these ids."""
    return _native.RowBlock(ids.copy(), found.vectors, found.scalars, found.metadata)


def metadata_of(rows: _native.RowBlock, part: slice) -> _native.RowMetadata:
    """Returns views of the metadata of some of the rows."""
    known = rows.metadata
    return _native.RowMetadata(known.count[part], known.last_step[part], known.score[part], known.modified_epoch[part])


def empty_rows(table: CacheTable, count: int) -> _native.RowBlock:
    """Returns rows of zeros, to be filled with `row_columns`."""
    zeros: Any = np.zeros
    return _native.RowBlock(
        zeros(count, np.int64),
        zeros((count, table._spec.vector_floats(table.dim)), np.float32),
        zeros(count, np.float32),
        _native.RowMetadata(
            zeros(count, np.uint32), zeros(count, np.uint64), zeros(count, np.float32), zeros(count, np.uint32)
        ),
    )
