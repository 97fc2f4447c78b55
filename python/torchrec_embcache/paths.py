"""Directories of checkpoints as users give them: made absolute, their links resolved once, and the rules that they are held to."""

import errno
import os
from typing import Literal

from . import _native
from .config import absolute_path
from .exceptions import PathError, StorageError, StoragePermissionError

__all__ = ["PathChecks", "Root", "basic_root", "given_path", "is_there"]

PathChecks = Literal["strict", "basic"]


def given_path(field: str, path: object) -> str:
    """A user's path as absolute text; `PathError` where it is no text, or begins with "~". The checks refuse the empty path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise PathError(f"{field}={path!r} is not text: give a str")
    return absolute_path(field, text) if text else ""


class Root(str):
    """An absolute path of a directory of checkpoints, and the rules that it is held to wherever it is opened."""

    __slots__ = ("checks",)
    checks: PathChecks

    @classmethod
    def of(cls, path: str, checks: PathChecks, *, to_save: bool) -> "Root":
        """With basic checks the links in `path` are followed, now and not again. `PathError`, `StoragePermissionError`."""
        root = cls(_native.resolve_dir(path, to_save) if checks == "basic" else path)
        root.checks = checks
        return root

    def to_save(self) -> str:
        """The directory, checked, and made when missing. `PathError`, `StoragePermissionError`."""
        return _native.check_save_dir(self, self.checks)

    def to_load(self) -> str:
        """The directory, checked; it need not be writable. `PathError`, `StoragePermissionError`."""
        return _native.check_load_dir(self, self.checks)


def basic_root(path: object, *, to_save: bool) -> Root:
    """A user's path under basic checks, for everything but `Saver`, where strict ones are the default."""
    return Root.of(given_path("path", path), "basic", to_save=to_save)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether something lies at `path`; a link there is not followed.

    What cannot be looked at is not taken for absent: `StoragePermissionError`, or `StorageError` with its `errno`.
    """
    try:
        os.lstat(path)
    except OSError as cause:
        if cause.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        kind = StoragePermissionError if isinstance(cause, PermissionError) else StorageError
        error = kind(f"cannot look at {os.fspath(path)}: {cause.strerror}")
        error.errno, error.filename = cause.errno, os.fspath(path)
        raise error from cause
    return True
