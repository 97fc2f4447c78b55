"""Directories accessed by file descriptor, for files of other formats: output of `convert`, and Megatron's files."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ._paths import open_to_save, storage_error
from .exceptions import CorruptionError, EmbCacheError, PathError

__all__ = ["DirectoryHandle", "open_regular_file", "sync", "write_at"]


@contextlib.contextmanager
def _convert_os_errors(action: str, path: str) -> Iterator[None]:
    """Converts OS errors to typed ones, which state the action and the path."""
    try:
        yield
    except OSError as cause:
        if isinstance(cause, EmbCacheError):
            raise
        if cause.errno != errno.ELOOP:
            raise storage_error(action, path, cause) from cause
        link = PathError(f"cannot {action} {path}: it is a symbolic link; put the file itself in its place")
        link.errno, link.filename = cause.errno, path
        raise link from cause


class DirectoryHandle:
    """A directory held by its file descriptor.

    Files below it are opened relative to the descriptor and never through a symbolic link. Replacing a part of the path
    concurrently therefore does not redirect reads or writes.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open_to_save(cls, path: str) -> Self:
        """Opens the user's directory; checks it and creates it if missing. Raises `PathError`, `StoragePermissionError`."""
        checked = open_to_save(path)
        return cls(checked.path, checked.open_descriptor())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)

    def path_of(self, name: str) -> str:
        """Returns the path of `name` for messages."""
        return os.path.join(self.path, name)

    def open_subdirectory(self, name: str, *, create: bool = False) -> "DirectoryHandle":
        """Opens the directory `name`. With `create` it is created (mode 0750) and must not exist."""
        with _convert_os_errors("make" if create else "open", self.path_of(name)):
            if create:
                os.mkdir(name, 0o750, dir_fd=self.fd)
                os.fsync(self.fd)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            return DirectoryHandle(self.path_of(name), os.open(name, flags, dir_fd=self.fd))

    def list_names(self) -> list[str]:
        """Returns the sorted names of its entries."""
        with _convert_os_errors("list", self.path):
            return sorted(os.listdir(self.fd))

    def create_file(self, name: str) -> int:
        """Creates a file and opens it for writing. Replaces an existing file."""
        with _convert_os_errors("make", self.path_of(name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, 0o640, dir_fd=self.fd)

    def open_file(self, name: str) -> int:
        """Opens a regular file for reading. Raises `CorruptionError` if it is not a regular file."""
        with _convert_os_errors("open", self.path_of(name)):
            return open_regular_file(self.path_of(name), os.O_RDONLY | os.O_NOFOLLOW, name, self.fd)

    def write_atomically(self, name: str, data: bytes) -> None:
        """Writes a file atomically: after a crash it has either the old or the new content."""
        temporary = f"{name}.tmp"
        fd = self.create_file(temporary)
        try:
            write_at(fd, self.path_of(temporary), 0, np.frombuffer(data, np.uint8))
            sync(fd, self.path_of(temporary))
        finally:
            os.close(fd)
        with _convert_os_errors("rename", self.path_of(temporary)):
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def sync(self) -> None:
        """Makes the directory entries durable."""
        with _convert_os_errors("sync the directory", self.path):
            os.fsync(self.fd)

    def remove(self, name: str) -> None:
        """Removes a file or a directory tree. Does not follow symbolic links."""
        with _convert_os_errors("remove", self.path_of(name)):
            if stat.S_ISDIR(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self.fd)
            else:
                os.unlink(name, dir_fd=self.fd)


def open_regular_file(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, name: str | None = None, dir_fd: int | None = None
) -> int:
    """Opens the file `path`, or `name` below the directory `dir_fd`, without waiting for a writer.

    Raises `CorruptionError` if it is not a regular file: a read from a pipe or a device might never end.
    """
    fd = os.open(path if name is None else name, flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        error = CorruptionError(
            f"{path}: offset 0: what is there: expected a regular file, found {stat.filemode(mode)}"
        )
        error.filename = os.fspath(path)
        raise error
    return fd


def sync(fd: int, path: str) -> None:
    """Makes a file's data and length durable."""
    with _convert_os_errors("sync", path):
        os.fsync(fd)


def write_at(fd: int, path: str, offset: int, data: NDArray[np.uint8]) -> None:
    """Writes all of contiguous `data` at `offset`."""
    view = memoryview(data.data)
    with _convert_os_errors("write", path):
        while len(view):
            written = os.pwrite(fd, view[: 8 << 20], offset)
            view, offset = view[written:], offset + written
