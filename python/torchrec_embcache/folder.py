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

__all__ = ["Folder", "sync", "write_at"]


@contextlib.contextmanager
def _named(what: str, path: str) -> Iterator[None]:
    """Raise errors of the system as typed ones, with what was done to what."""
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


class Folder:
    """A directory held by its descriptor.

    What lies below it is opened from there and never through a link. So whoever replaces a part of the path meanwhile does not
    change what is read or written.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def to_save(cls, path: str) -> Self:
        """The user's directory, checked and made when missing. `PathError`, `StoragePermissionError`."""
        checked = open_to_save(path)
        return cls(checked.path, checked.open_descriptor())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)

    def at(self, name: str) -> str:
        """The path that messages give for `name`."""
        return os.path.join(self.path, name)

    def below(self, name: str, *, make: bool = False) -> "Folder":
        """The directory `name`. With `make` it is made (mode 0750), and none may be there yet."""
        with _named("make" if make else "open", self.at(name)):
            if make:
                os.mkdir(name, 0o750, dir_fd=self.fd)
                os.fsync(self.fd)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            return Folder(self.at(name), os.open(name, flags, dir_fd=self.fd))

    def names(self) -> list[str]:
        """What is there, sorted."""
        with _named("list", self.path):
            return sorted(os.listdir(self.fd))

    def create(self, name: str) -> int:
        """A new file, open to be written. A file that lay there under this name is removed."""
        with _named("make", self.at(name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, 0o640, dir_fd=self.fd)

    def open(self, name: str) -> int:
        """A regular file, open to be read. `CorruptionError` where something else lies there."""
        path = self.at(name)
        with _named("open", path):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=self.fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise CorruptionError(f"{path} is no regular file but {stat.filemode(found.st_mode)}")
        return fd

    def publish(self, name: str, data: bytes) -> None:
        """Write a file so that after a crash it is whole: the old one or the new one."""
        temporary = f"{name}.tmp"
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
        """Remove a file, or a directory with all in it; never what a link points to."""
        with _named("remove", self.at(name)):
            if stat.S_ISDIR(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self.fd)
            else:
                os.unlink(name, dir_fd=self.fd)


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
