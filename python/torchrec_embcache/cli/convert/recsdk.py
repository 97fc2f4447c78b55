"""Layout `recsdk`: a directory for each table, as implemented in the sources of RecSDK's torchrec_embcache.

It has the files `key/slice.data` (ids, int64), `embedding/slice.data` (weights, fp32), and for optimizers that have them
`momentum1/slice.data` and `momentum2/slice.data` (fp32). Next to each file is a `slice.attribute` of int64 numbers: the bytes of an
element, the number of rows, and (not for ids) the width of a row. In older saves all of these are in a directory `rank<k>` for each
rank.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_embcache.exceptions import CorruptionError

from .layout import CheckpointLayout, StoredColumn, StoredTable, regular_file

__all__ = ["RecsdkLayout"]

#: Maximum width of an embedding.
_MAX_DIM = 65_536


class RecsdkLayout(CheckpointLayout):
    """Reads RecSDK's tables."""

    name = "recsdk"
    marks = ("*/key/slice.data", "*/rank*/key/slice.data")

    def read(self, path: Path) -> tuple[list[StoredTable], list[str]]:
        """Implements `CheckpointLayout`."""
        tables = []
        for folder in sorted(folder for folder in path.iterdir() if folder.is_dir()):
            parts = [folder] if (folder / "key/slice.data").is_file() else sorted(folder.glob("rank*"))
            found = [_read_part(part) for part in parts if (part / "key/slice.data").is_file()]
            if found:
                tables.append(StoredTable.from_parts(folder.name, found))
        return tables, []


def _read_part(part: Path) -> dict[str, StoredColumn]:
    _, rows = _read_attribute(part / "key/slice.attribute", 2)
    columns: dict[str, StoredColumn] = {"id": _map_column(part / "key/slice.data", np.int64, (rows,))}
    for name, folder in (("weight", "embedding"), ("momentum1", "momentum1"), ("momentum2", "momentum2")):
        if name != "weight" and not (part / folder / "slice.data").is_file():
            continue
        attribute = part / folder / "slice.attribute"
        size, count, dim = _read_attribute(attribute, 3)
        if size != 4 or count != rows:
            raise CorruptionError(
                f"{attribute}: offset 0: bytes an element and rows: expected 4 and {rows}, found {size} and {count}"
            )
        if not 1 <= dim <= _MAX_DIM:
            raise CorruptionError(f"{attribute}: offset 16: the width: expected 1 to {_MAX_DIM}, found {dim}")
        columns[name] = _map_column(part / folder / "slice.data", np.float32, (rows, dim))
    return columns


def _read_attribute(path: Path, count: int) -> list[int]:
    with regular_file(path) as file:
        numbers = np.fromfile(file, np.int64)
    if len(numbers) != count or (numbers < 0).any():
        raise CorruptionError(
            f"{path}: offset 0: the attribute: expected {count} numbers of 64 bits, found {numbers.tolist()}"
        )
    return [int(number) for number in numbers]


def _map_column(path: Path, dtype: Any, shape: tuple[int, ...]) -> StoredColumn:
    """Maps a file of numbers. Parts of the file are read when that part of the array is used."""
    wanted = math.prod(shape) * np.dtype(dtype).itemsize  # Python integers, which do not overflow.
    with regular_file(path) as file:
        if (found := file.stat().st_size) != wanted:
            raise CorruptionError(f"{path}: offset 0: the file's length: expected {wanted}, found {found}")
        return StoredColumn.of_array(np.memmap(file, dtype, "r", shape=shape) if wanted else np.empty(shape, dtype))
