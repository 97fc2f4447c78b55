"""A directory worked in by its descriptor, and safetensors files in it."""

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native, paths
from torchrec_embcache.exceptions import (
    CorruptionError,
    EmbCacheError,
    PathError,
    StorageError,
    StoragePermissionError,
)

__all__ = [
    "CHUNK_BYTES",
    "DTYPE_BYTES",
    "BlockFile",
    "Directory",
    "TensorEntry",
    "corruption",
    "crc32c",
    "parse_json",
    "read_at",
    "render_json",
    "sync",
    "whole",
    "whole_pages",
    "write_at",
]

# Bytes under one checksum.
CHUNK_BYTES = 256 << 10
# Data start at a multiple of this in a file, as direct I/O likes it.
ALIGNMENT = 4096
# What tensors of zeros are called, with a number behind; more "_" stand before it where a tensor is called so.
PAD = "__pad."
MAX_MANIFEST_BYTES = 256 << 20
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def crc32c(data: bytes) -> int:
    """CRC-32C of all of `data`."""
    found = _native.chunk_checksums(np.frombuffer(data, np.uint8), max(len(data), 1))
    return int(found[0]) if len(found) else 0


def corruption(path: str, what: str, expected: object, found: object) -> CorruptionError:
    """As the core words it."""
    error = CorruptionError(f"{path}: {what}: expected {expected}, found {found}")
    error.filename = path
    return error


@contextlib.contextmanager
def _named(what: str, path: str) -> Iterator[None]:
    """Errors of the system as typed ones, with what was done to what."""
    try:
        yield
    except OSError as cause:
        if isinstance(cause, EmbCacheError):
            raise
        if cause.errno == errno.ELOOP:
            error: EmbCacheError = PathError(
                f"cannot {what} {path}: it is a symbolic link; put the file itself in its place"
            )
        elif isinstance(cause, PermissionError):
            error = StoragePermissionError(f"cannot {what} {path}: {cause.strerror}")
        else:
            error = StorageError(f"cannot {what} {path}: {cause.strerror}")
        error.errno, error.filename = cause.errno, path
        raise error from cause


class Directory:
    """A directory held by its descriptor. What is below it is opened from there and never through a link, so that who changes the
    path meanwhile does not change what is read or written.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def to_save(cls, path: str) -> Self:
        """The user's directory, checked and made when missing. `PathError`, `StoragePermissionError`."""
        checked = paths.open_to_save(path)
        return cls(checked.path, checked.open_descriptor())

    @classmethod
    def to_load(cls, path: str) -> Self:
        """The user's directory, checked. `PathError`, `StoragePermissionError`."""
        checked = paths.open_to_load(path)
        return cls(checked.path, checked.open_descriptor())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)

    def at(self, name: str) -> str:
        """What messages call `name`."""
        return os.path.join(self.path, name)

    def below(self, name: str, *, make: bool = False) -> "Directory":
        """The directory `name`, made (0750) on demand, where none may be there yet."""
        with _named("make" if make else "open", self.at(name)):
            if make:
                os.mkdir(name, 0o750, dir_fd=self.fd)
                os.fsync(self.fd)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            return Directory(self.at(name), os.open(name, flags, dir_fd=self.fd))

    def names(self) -> list[str]:
        """What is there, sorted."""
        with _named("list", self.path):
            return sorted(os.listdir(self.fd))

    def has(self, name: str) -> bool:
        """Whether something is there under `name`, a dangling link included. `StorageError` where that cannot be told."""
        with _named("look at", self.at(name)):
            try:
                os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def create(self, name: str) -> int:
        """A new file, open to be written; what lay there under this name (of a save that was cut short) is removed."""
        with _named("make", self.at(name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, 0o640, dir_fd=self.fd)

    def open(self, name: str) -> tuple[int, int]:
        """A regular file, open to be read, and its length. `CorruptionError` where there is none or something else."""
        path = self.at(name)
        try:
            with _named("open", path):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(name, flags, dir_fd=self.fd)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                raise corruption(path, "what is there", "a file", "nothing") from error
            if error.errno == errno.ENXIO:
                raise corruption(path, "what is there", "a regular file", "a socket or a pipe") from error
            raise
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise corruption(path, "what is there", "a regular file", stat.filemode(found.st_mode))
        return fd, found.st_size

    def read(self, name: str, limit: int = MAX_MANIFEST_BYTES, expected: int | None = None) -> bytes:
        """A whole file of at most `limit` bytes; whose checksum is `expected` where one is given."""
        fd, length = self.open(name)
        try:
            if length > limit:
                raise corruption(self.at(name), "the file's length", f"at most {limit}", length)
            data = read_at(fd, self.at(name), 0, length).tobytes()
        finally:
            os.close(fd)
        if expected is not None and crc32c(data) != expected:
            raise corruption(self.at(name), "the checksum", expected, crc32c(data))
        return data

    def publish(self, name: str, data: bytes, temporary: str | None = None) -> None:
        """Write a file so that after a crash it is whole, the old one or the new."""
        temporary = temporary if temporary is not None else f"{name}.tmp"
        fd = self.create(temporary)
        try:
            write_at(fd, self.at(temporary), 0, np.frombuffer(data, np.uint8))
            sync(fd, self.at(temporary))
        finally:
            os.close(fd)
        with _named("rename", self.at(temporary)):
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def sync(self) -> None:
        """Make the entries durable."""
        with _named("sync the directory", self.path):
            os.fsync(self.fd)

    def remove(self, name: str) -> None:
        """A file, or a directory with all in it; never what a link points to."""
        with _named("remove", self.at(name)):
            if stat.S_ISDIR(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self.fd)
            else:
                os.unlink(name, dir_fd=self.fd)

    def lock(self, name: str | None = None, *, alone: bool) -> _native.EntryLock:
        """A lock on the directory itself, or on a lock file in it, which is made; shared with others, or `alone`."""
        return _native.EntryLock(self.path, self.fd, name, alone)

    def alone(self) -> _native.EntryLock:
        """For `with`: one process at a time joins, publishes and removes; waits for the others, who do so in moments."""
        return self.lock(alone=True)


def sync(fd: int, path: str) -> None:
    """Make a file's data and length durable."""
    with _named("sync", path):
        os.fsync(fd)


def write_at(fd: int, path: str, offset: int, data: NDArray[np.uint8]) -> None:
    """Write all of contiguous `data` at `offset`."""
    view = memoryview(data.data)
    with _named("write", path):
        while len(view):
            written = os.pwrite(fd, view[: 8 << 20], offset)
            view, offset = view[written:], offset + written


def read_at(fd: int, path: str, offset: int, length: int) -> NDArray[np.uint8]:
    """Exactly `length` bytes at `offset`; `CorruptionError` where the file ends before. `length` is checked by the caller."""
    data = np.empty(length, np.uint8)
    view = memoryview(data.data)
    with _named("read", path):
        while len(view):
            count = os.preadv(fd, [view[: 64 << 20]], offset)
            if count == 0:
                raise corruption(path, "the file's length", f"at least {offset + len(view)}", offset)
            view, offset = view[count:], offset + count
    return data


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file. `dtype` as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of its data."""
        size = DTYPE_BYTES[self.dtype]
        for length in self.shape:
            size *= length
        return size


def whole_pages(length: int) -> int:
    """The next multiple of a page."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class BlockFile:
    """The layout of a safetensors file: the widest types first, so that each tensor lies at a multiple of its own width; with
    `pages` each at a whole page, after tensors of zeros.
    """

    def __init__(self, tensors: Sequence[TensorEntry], *, pages: bool = False) -> None:
        ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])  # stable
        described: dict[str, Any] = {}
        at = 0
        starts: dict[str, int] = {}
        pad = PAD
        while any(tensor.name.startswith(pad) for tensor in ordered):
            pad = "_" + pad
        for number, tensor in enumerate(ordered):
            starts[tensor.name] = at
            described[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.bytes],
            }
            at += tensor.bytes
            if pages and (zeros := whole_pages(tensor.bytes) - tensor.bytes):
                described[f"{pad}{number}"] = {"dtype": "U8", "shape": [zeros], "data_offsets": [at, at + zeros]}
                at += zeros
        text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
        length = whole_pages(8 + len(text))
        self.header = (length - 8).to_bytes(8, "little") + text.ljust(length - 8)
        self.starts = {name: length + start for name, start in starts.items()}
        self.bytes = length + at

    def write(self, folder: Directory, name: str, arrays: dict[str, NDArray[Any]]) -> int:
        """Write a small file at once, durably; the checksum of all of it."""
        image = np.zeros(self.bytes, np.uint8)
        image[: len(self.header)] = np.frombuffer(self.header, np.uint8)
        for tensor, array in arrays.items():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            image[self.starts[tensor] : self.starts[tensor] + len(data)] = data
        folder.publish(name, image.tobytes())
        return crc32c(image.tobytes())

    def open(self, folder: Directory, name: str) -> int:
        """A file of exactly this layout, open to be read."""
        path = folder.at(name)
        fd, length = folder.open(name)
        try:
            if length != self.bytes:
                raise corruption(path, "the file's length", self.bytes, length)
            if read_at(fd, path, 0, len(self.header)).tobytes() != self.header:
                raise corruption(path, "the header", "that of the manifest's counts", "another")
        except BaseException:
            os.close(fd)
            raise
        return fd


def render_json(value: object) -> bytes:
    """As manifests are written."""
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def parse_json(data: bytes, path: str) -> Any:
    """What manifests hold, an object. `CorruptionError`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise corruption(path, "the manifest", "JSON", cause) from cause
    if not isinstance(value, dict):
        raise corruption(path, "the manifest", "an object", type(value).__name__)
    return value


def whole(value: object, low: int, high: int) -> int:
    """`value` as an int within bounds; `ValueError` for anything else that JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{value!r} is no integer from {low} to {high}")
    return value
