"""Checkpoint directories passed by users, and their path checks."""

import contextlib
import errno
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

from . import _native
from .exceptions import PathError, StorageError, StoragePermissionError

__all__ = [
    "CheckedPath",
    "CheckpointDirectory",
    "PathChecks",
    "check_path",
    "default_checks",
    "open_to_load",
    "open_to_save",
    "override_default_checks",
    "path_exists",
    "storage_error",
]

PathChecks = Literal["strict", "basic", "trusted"]

# A directory that passed the checks, held by its descriptor.
CheckpointDirectory = _native.CheckpointDirectory

# The default checks of directories. The command line sets them for one command.
_default_checks: ContextVar[PathChecks] = ContextVar("path_checks", default="basic")


def default_checks() -> PathChecks:
    """Returns the default checks of directories: "basic", unless `override_default_checks` has set others."""
    return _default_checks.get()


@contextlib.contextmanager
def override_default_checks(checks: PathChecks) -> Iterator[None]:
    """Sets the default checks of directories for the duration of the block."""
    before = _default_checks.set(checks)
    try:
        yield
    finally:
        _default_checks.reset(before)


class CheckedPath(str):
    """An absolute path whose text was checked when the user passed it, or one derived from such a path, which may be longer."""

    __slots__ = ()


def check_path(field: str, path: object) -> CheckedPath:
    """Returns a user's path as an absolute path, which stays valid when the current directory changes.

    Raises `PathError`, which names `field`, if the path is not text, has not 1 to 1,024 characters, begins with "~", or has a
    scheme such as "s3://", or if it is relative and the current directory does not exist.
    """
    if isinstance(path, CheckedPath):
        return path
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise PathError(f"{field}={path!r} is not text: give a str")
    return CheckedPath(_native.check_path(field, text))


def open_to_save(path: object, checks: PathChecks | None = None) -> CheckpointDirectory:
    """Checks the directory at a user's path, creates it if missing, and opens it. Raises `PathError`, `StoragePermissionError`.

    Symbolic links in `path` are resolved once, in this call; strict checks reject them. `default_checks` are the default.
    """
    return _native.CheckpointDirectory.open_to_save(check_path("path", path), checks or default_checks())


def open_to_load(path: object, checks: PathChecks | None = None) -> CheckpointDirectory:
    """Checks the directory at a user's path, which may be read-only, and opens it. Raises `PathError`, `StoragePermissionError`."""
    return _native.CheckpointDirectory.open_to_load(check_path("path", path), checks or default_checks())


def path_exists(path: str | os.PathLike[str]) -> bool:
    """True if there is a file, directory or symbolic link at `path`. Does not follow a link.

    Raises `StoragePermissionError`, or `StorageError` with its `errno`, if this cannot be determined.
    """
    try:
        os.lstat(path)
    except OSError as cause:
        if cause.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise storage_error("look at", os.fspath(path), cause) from cause
    return True


def storage_error(action: str, path: str, cause: OSError, remedy: str = "") -> StorageError | StoragePermissionError:
    """Returns the error of a failed file operation, with the action, the path, the reason and the `errno`."""
    kind = StoragePermissionError if isinstance(cause, PermissionError) else StorageError
    error = kind(f"cannot {action} {path}: {cause.strerror}{remedy}")
    error.errno, error.filename = cause.errno, path
    return error
