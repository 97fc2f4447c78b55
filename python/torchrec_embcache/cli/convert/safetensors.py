"""Layout `safetensors`: a directory for each table. The tensors in its `*.safetensors` files are `id`, `weight`, and one for each
slot.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache._fs import DirectoryHandle, sync
from torchrec_embcache.exceptions import CorruptionError, EmbCacheError, StorageError, UnsupportedError
from torchrec_embcache.optimizers import OptimizerSpec

from .layout import StoredColumn, TableColumns, regular_file
from .plain import ColumnWriter, PlainLayout

__all__ = ["SafetensorsLayout", "list_tensors"]

#: Bytes of rows per file.
_PART_BYTES = 256 << 20


class SafetensorsLayout(PlainLayout):
    """Reads files of any size, and writes files with at most 256 MiB of rows each."""

    name = "safetensors"
    marks = ("*.safetensors", "*/*.safetensors")
    mark = "*.safetensors"

    def read_parts(self, folder: Path) -> list[dict[str, StoredColumn]]:
        """Implements `PlainLayout`. Each file is a part."""
        parts: dict[Path, dict[str, StoredColumn]] = {}
        for file, name, column in list_tensors(sorted(folder.glob(self.mark))):
            parts.setdefault(file, {})[name] = column
        return list(parts.values())

    @contextlib.contextmanager
    def open_writer(
        self, folder: DirectoryHandle, entry: dict[str, Any], optimizer: type[OptimizerSpec]
    ) -> Iterator[ColumnWriter]:
        """Implements `PlainLayout`."""
        library = _library()
        rows = max(1, _PART_BYTES // (entry["dim"] * (1 + optimizer.vector_slots) * 4 + 32))
        buffered: list[TableColumns] = []
        parts = 0

        def write_file() -> None:
            nonlocal parts
            whole = {name: np.concatenate([columns[name] for columns in buffered]) for name in buffered[0]}
            name = f"part-{parts:05}.safetensors"
            path = folder.path_of(name)
            try:
                # The library writes a new file and renames it.
                library.numpy.save_file(whole, f"/proc/self/fd/{folder.fd}/{name}")
            except (library.SafetensorError, OSError) as cause:
                if isinstance(cause, EmbCacheError):
                    raise
                raise StorageError(f"cannot write {path}: {cause}") from cause
            fd = folder.open_file(name)
            try:
                sync(fd, path)
            finally:
                os.close(fd)
            parts += 1
            buffered.clear()

        def write(columns: TableColumns) -> None:
            buffered.append(columns)
            if sum(len(each["id"]) for each in buffered) >= rows:
                write_file()

        yield write
        if buffered:
            write_file()


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as missing:
        raise UnsupportedError(
            'this layout needs the safetensors package: pip install "torchrec-embcache[cli]"'
        ) from missing
    return safetensors


def list_tensors(files: Iterable[Path]) -> Iterator[tuple[Path, str, StoredColumn]]:
    """Yields the file, the name and the values of each tensor. Raises `CorruptionError` for a damaged header."""
    for path in files:
        with _open_file(path) as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                piece = file.get_slice(name)
                dtype, shape = _numpy_type(piece.get_dtype()), tuple(piece.get_shape())
                yield path, name, StoredColumn(dtype, shape, functools.partial(_open_tensor, path, name))


def _open_tensor(path: Path, name: str) -> Callable[[int, int], NDArray[Any]]:
    def read(begin: int, end: int) -> NDArray[Any]:
        with _open_file(path) as file:
            return np.ascontiguousarray(file.get_slice(name)[begin:end])

    return read


def _open_file(path: Path) -> Any:
    library = _library()
    try:
        with regular_file(path) as file:
            return library.safe_open(file, framework="numpy")
    except library.SafetensorError as error:
        raise CorruptionError(f"{path}: offset 0: the header: expected safetensors, found {error}") from error


def _numpy_type(name: str) -> np.dtype[Any] | str:
    """Returns the numpy type with a name such as "F32" or "U8", or the name if there is none."""
    try:
        return np.dtype(f"{name[0].lower()}{int(name[1:]) // 8}")
    except (TypeError, ValueError):
        return name
