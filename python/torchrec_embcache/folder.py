"""A directory worked in by its descriptor, for files that are no checkpoints of ours: what `convert` writes, and Megatron's."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .exceptions import CorruptionError, EmbCacheError, PathError, StorageError, StoragePermissionError
from .paths import open_to_save

__all__ = ["DirectoryHandle", "sync", "write_at"]


@contextlib.contextmanager
def _convert_os_errors(action: str, path: str) -> Iterator[None]:
    """Raise errors of the system as typed ones, with what was done to what."""
    try:
        yield
    except OSError as cause:
        if isinstance(cause, EmbCacheError):
            raise
        if cause.errno == errno.ELOOP:
            error: EmbCacheError = PathError(
                f"cannot {action} {path}: it is a symbolic link; put the file itself in its place"
            )
        elif isinstance(cause, PermissionError):
            error = StoragePermissionError(f"cannot {action} {path}: {cause.strerror}")
        else:
            error = StorageError(f"cannot {action} {path}: {cause.strerror}")
        error.errno, error.filename = cause.errno, path
        raise error from cause


class DirectoryHandle:
    """A directory held by its descriptor.

    What lies below it is opened from there and never through a link. So whoever replaces a part of the path meanwhile does not
    change what is read or written.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open_to_save(cls, path: str) -> Self:
        """The user's directory, checked and made when missing. `PathError`, `StoragePermissionError`."""
        checked = open_to_save(path)
        return cls(checked.path, checked.open_descriptor())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)

    def path_of(self, name: str) -> str:
        """The path that messages give for `name`."""
        return os.path.join(self.path, name)

    def open_subdirectory(self, name: str, *, create: bool = False) -> "DirectoryHandle":
        """The directory `name`. With `create` it is made (mode 0750), and none may be there yet."""
        with _convert_os_errors("make" if create else "open", self.path_of(name)):
            if create:
                os.mkdir(name, 0o750, dir_fd=self.fd)
                os.fsync(self.fd)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            return DirectoryHandle(self.path_of(name), os.open(name, flags, dir_fd=self.fd))

    def list_names(self) -> list[str]:
        """What is there, sorted."""
        with _convert_os_errors("list", self.path):
            return sorted(os.listdir(self.fd))

    def create_file(self, name: str) -> int:
        """A new file, open to be written. A file that lay there under this name is removed."""
        with _convert_os_errors("make", self.path_of(name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, 0o640, dir_fd=self.fd)

    def open_file(self, name: str) -> int:
        """A regular file, open to be read. `CorruptionError` where something else lies there."""
        path = self.path_of(name)
        with _convert_os_errors("open", path):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=self.fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise CorruptionError(f"{path} is no regular file but {stat.filemode(found.st_mode)}")
        return fd

    def write_atomically(self, name: str, data: bytes) -> None:
        """Write a file so that after a crash it is whole: the old one or the new one."""
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
        """Make the entries durable."""
        with _convert_os_errors("sync the directory", self.path):
            os.fsync(self.fd)

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with all in it; never what a link points to."""
        with _convert_os_errors("remove", self.path_of(name)):
            if stat.S_ISDIR(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self.fd)
            else:
                os.unlink(name, dir_fd=self.fd)


def sync(fd: int, path: str) -> None:
    """Make a file's data and length durable."""
    with _convert_os_errors("sync", path):
        os.fsync(fd)


def write_at(fd: int, path: str, offset: int, data: NDArray[np.uint8]) -> None:
    """Write all of contiguous `data` at `offset`."""
    view = memoryview(data.data)
    with _convert_os_errors("write", path):
        while len(view):
            written = os.pwrite(fd, view[: 8 << 20], offset)
            view, offset = view[written:], offset + written
