"""Directories of checkpoints as users give them, and the rules that they are held to."""

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
]

PathChecks = Literal["strict", "basic", "trusted"]

# A directory that passed the checks, held by its descriptor.
CheckpointDirectory = _native.CheckpointDirectory

# The checks of directories that are opened without others. The command line sets them for one command.
_default_checks: ContextVar[PathChecks] = ContextVar("path_checks", default="basic")


def default_checks() -> PathChecks:
    """The checks of directories that are opened without others: basic ones, unless `override_default_checks` has set others."""
    return _default_checks.get()


@contextlib.contextmanager
def override_default_checks(checks: PathChecks) -> Iterator[None]:
    """Open directories by these checks, where no others are given, until the block is left."""
    before = _default_checks.set(checks)
    try:
        yield
    finally:
        _default_checks.reset(before)


class CheckedPath(str):
    """An absolute path whose text was checked when the user gave it, or that was made of such a path and may be longer."""

    __slots__ = ()


def check_path(field: str, path: object) -> CheckedPath:
    """Return a user's path as an absolute path, from the current directory of the process: it means the same when that changes.

    `PathError` names `field` where the path is no text, has not 1 to 1,024 characters, begins with "~", or has a scheme such as
    "s3://"; and where it is relative and the current directory is gone.
    """
    if isinstance(path, CheckedPath):
        return path
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise PathError(f"{field}={path!r} is not text: give a str")
    return CheckedPath(_native.check_path(field, text))


def open_to_save(path: object, checks: PathChecks | None = None) -> CheckpointDirectory:
    """Check the directory at a user's path, make it when it is missing, and hold it. `PathError`, `StoragePermissionError`.

    The links in `path` are followed, now and not again, except with strict checks. `default_checks` are the default.
    """
    return _native.CheckpointDirectory.open_to_save(check_path("path", path), checks or default_checks())


def open_to_load(path: object, checks: PathChecks | None = None) -> CheckpointDirectory:
    """Check the directory at a user's path, which need not be writable, and hold it. `PathError`, `StoragePermissionError`."""
    return _native.CheckpointDirectory.open_to_load(check_path("path", path), checks or default_checks())


def path_exists(path: str | os.PathLike[str]) -> bool:
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
