"""Directories of checkpoints as users give them, and the rules that they are held to."""

import errno
import os
from typing import Literal

from . import _native
from .config import absolute_path
from .exceptions import PathError, StorageError, StoragePermissionError

__all__ = ["Directory", "PathChecks", "given_path", "is_there", "open_to_load", "open_to_save"]

PathChecks = Literal["strict", "basic"]

# A directory that passed the checks, held by its descriptor.
Directory = _native.Directory


def given_path(field: str, path: object) -> str:
    """A user's path as absolute text; `PathError` where it is no text, or begins with "~". The checks refuse the empty path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise PathError(f"{field}={path!r} is not text: give a str")
    return absolute_path(field, text) if text else ""


def open_to_save(path: object, checks: PathChecks = "basic") -> Directory:
    """Check the directory at a user's path, make it when it is missing, and hold it. `PathError`, `StoragePermissionError`.

    With basic checks the links in `path` are followed, now and not again. Basic checks are the default everywhere but in `Saver`.
    """
    return _native.Directory.to_save(given_path("path", path), checks)


def open_to_load(path: object, checks: PathChecks = "basic") -> Directory:
    """Check the directory at a user's path, which need not be writable, and hold it. `PathError`, `StoragePermissionError`."""
    return _native.Directory.to_load(given_path("path", path), checks)


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
