"""Formats with a directory for each table: `<module>.<table>/` with its columns and `table.json`.

A format implements how the columns of a table are read from and written to its directory. The files of a single table may also be
in the given directory itself.
"""

import json
import os
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from torchrec_embcache import _native
from torchrec_embcache._fs import DirectoryHandle
from torchrec_embcache.cli.checkpoints import OpenCheckpoint
from torchrec_embcache.exceptions import PathError
from torchrec_embcache.optimizers import BY_KIND, OptimizerSpec

from .description import DESCRIPTION_FILE, parse_description
from .layout import METADATA, CheckpointLayout, ConvertSettings, StoredColumn, StoredTable, TableColumns, regular_file

__all__ = ["ColumnWriter", "PlainLayout"]

#: Writes some rows of a table: every column, of equal length.
ColumnWriter = Callable[[TableColumns], None]
#: Maximum length of a directory name in bytes, and the bytes of a longer name that are kept in front of its hash.
_MAX_FOLDER_BYTES = 255
_KEPT_FOLDER_BYTES = 200


class PlainLayout(CheckpointLayout):
    """A format with a directory for each table. A directory that matches `mark` is that of a table."""

    mark: ClassVar[str]
    is_writable = True

    @abstractmethod
    def read_parts(self, folder: Path) -> list[dict[str, StoredColumn]]:
        """Returns the columns in the directory of a table, in one or several parts."""

    @abstractmethod
    def open_writer(
        self, folder: DirectoryHandle, entry: dict[str, Any], optimizer: type[OptimizerSpec]
    ) -> AbstractContextManager[ColumnWriter]:
        """Returns a context with the writer of a table. Its files are complete and durable when it ends without an error."""

    def read(self, path: Path) -> tuple[list[StoredTable], list[str]]:
        """Implements `CheckpointLayout`."""
        alone = [path] if next(path.glob(self.mark), None) else []
        folders = alone or sorted(folder for folder in path.iterdir() if next(folder.glob(self.mark), None))
        return [
            StoredTable.from_parts(folder.name, self.read_parts(folder), _read_description(folder))
            for folder in folders
        ], []

    def write(
        self,
        opened: OpenCheckpoint,
        target: DirectoryHandle,
        settings: ConvertSettings,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """Implements `CheckpointLayout`."""
        names = [_folder_name(entry["module"], entry["table"]) for entry in opened.tables]
        if len(set(names)) < len(names):
            raise PathError(
                f"{target.path}: two tables would share one directory below it; their directories are {names}"
            )
        return [
            self._write_table(opened, target, name, entry) for name, entry in zip(names, opened.tables, strict=True)
        ]

    def _write_table(
        self, opened: OpenCheckpoint, target: DirectoryHandle, name: str, entry: dict[str, Any]
    ) -> dict[str, Any]:
        optimizer = BY_KIND[entry["optimizer"]["name"]]
        dim = entry["dim"]
        with target.open_subdirectory(name, create=True) as folder:
            with self.open_writer(folder, entry, optimizer) as write:

                def write_block(block: _native.RowBlock) -> None:
                    vectors = block.vectors
                    columns: TableColumns = {"id": block.ids, "weight": vectors[:, :dim]}
                    for at, slot in enumerate(optimizer.slot_names):
                        begin = dim * (1 + at)
                        columns[slot] = (
                            vectors[:, begin : begin + dim] if at < optimizer.vector_slots else block.scalars
                        )
                    write(columns | {name: getattr(block.metadata, name) for name in METADATA})

                opened.rows.read(entry["module"], entry["table"], 0, entry["total_num_buckets"], write_block)
            described = {field: value for field, value in entry.items() if field != "rows"}
            text = json.dumps(described, ensure_ascii=False, indent=1) + "\n"
            folder.write_atomically(DESCRIPTION_FILE, text.encode())
        return {field: entry[field] for field in ("module", "table", "rows", "dim")} | {"optimizer": optimizer.kind}


def _read_description(folder: Path) -> dict[str, Any] | None:
    path = folder / DESCRIPTION_FILE
    if not os.path.lexists(path):
        return None
    with regular_file(path) as file:
        return parse_description(file.read_bytes(), str(path))


def _folder_name(module: str, table: str) -> str:
    """Returns a directory name for a table: readable, and a single component that is neither `.` nor `..`."""
    name = (f"{module}.{table}" if module else table).replace("/", "_").replace("\0", "_")
    if not name.strip("."):
        return name.replace(".", "%2E")
    encoded = name.encode()
    if len(encoded) <= _MAX_FOLDER_BYTES:
        return name
    kept = encoded[:_KEPT_FOLDER_BYTES].decode(errors="ignore")
    return f"{kept}~{_native.table_key(name):016x}"
