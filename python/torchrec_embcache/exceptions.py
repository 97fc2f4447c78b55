"""Every error and warning of the package.

Errors derive from `EmbCacheError` and from the built-in exception that fits, so that code which knows nothing of this package
catches them too. Messages name the field or argument, its value and what to do.
"""

from typing import Any

__all__ = [
    "CapacityError",
    "ConfigError",
    "CorruptionError",
    "EmbCacheError",
    "EmbCacheWarning",
    "HostMemoryError",
    "InUseError",
    "InputError",
    "MismatchError",
    "PathError",
    "ReadOnlyError",
    "StateError",
    "StorageError",
    "StoragePermissionError",
    "UnsupportedError",
]


class EmbCacheError(Exception):
    """Base of all errors of the package.

    `errno` (an `errno` number) and `filename` are set where the operating system reported the error, else None.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.errno: int | None = None
        self.filename: str | None = None

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.message, self.errno, self.filename)


def _restore(cls: type[EmbCacheError], message: str, errno: int | None, filename: str | None) -> EmbCacheError:
    error = cls(message)
    error.errno = errno
    error.filename = filename
    return error


class ConfigError(EmbCacheError, ValueError):
    """A configuration value is out of range or contradicts another."""


class InputError(EmbCacheError, ValueError):
    """An argument of a call (ids, offsets, rows) is malformed."""


class CapacityError(EmbCacheError, RuntimeError):
    """The last tier is full: the row does not fit any budget. Nothing is lost."""


class HostMemoryError(EmbCacheError, MemoryError):
    """The system refuses memory. Nothing has changed: the rows stay as the steps before left them."""


class CorruptionError(EmbCacheError, OSError):
    """Bytes from disk are not what was written. The message says path, offset, what was expected and what was found."""


class StorageError(EmbCacheError, OSError):
    """An operation on a file failed; `errno` says how."""


class PathError(EmbCacheError, ValueError):
    """A path is refused: symbolic link, sensitive word, system directory, length, or not there."""


class StoragePermissionError(EmbCacheError, PermissionError):
    """A file or directory has the wrong owner or mode, or cannot be accessed."""


class InUseError(EmbCacheError, OSError):
    """Another process or table holds the directory."""


class StateError(EmbCacheError, RuntimeError):
    """The call does not fit the state of the object: closed, already used, rows in use, or used after a fork."""


class MismatchError(EmbCacheError, ValueError):
    """A checkpoint or an SSD directory belongs to another table or configuration."""


class ReadOnlyError(StorageError):
    """An earlier write failed: the store only reads until it is reopened. What it holds can still be saved elsewhere."""


class UnsupportedError(EmbCacheError, NotImplementedError):
    """What is asked for is not supported."""


class EmbCacheWarning(UserWarning):
    """Something works, slower or otherwise than asked for; the message says what to change."""
