"""Every error and warning of the package.

Errors derive from `EmbCacheError` and from the built-in exception that fits, so that code which does not know this package catches
them, too. A message names the field or argument, its value, and what to do.
"""

from typing import Any

__all__ = [
    "CapacityError",
    "ConfigError",
    "CorruptionError",
    "EmbCacheError",
    "EmbCacheWarning",
    "EvictionHookError",
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

    `errno`, a number of the module `errno`, and `filename` are set where the operating system reported the error, else None.
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


class EvictionHookError(EmbCacheError, RuntimeError):
    """`on_evict` raised. On the rank where it did, its own exception is the `__cause__` of this one."""


class InputError(EmbCacheError, ValueError):
    """An argument of a call (ids, offsets, rows) is malformed."""


class CapacityError(EmbCacheError, RuntimeError):
    """The last tier is full, so that a row fits no budget. Nothing is lost."""


class HostMemoryError(EmbCacheError, MemoryError):
    """The system refuses memory. Nothing has changed: the rows are as the steps before left them."""


class CorruptionError(EmbCacheError, OSError):
    """Bytes from disk are not what was written. The message says the path, the offset, what was expected and what was found."""


class StorageError(EmbCacheError, OSError):
    """An operation on a file failed. `errno` says how."""


class PathError(EmbCacheError, ValueError):
    """A path is refused: it is not there or too long, or has a symbolic link, a sensitive word or a system directory in it."""


class StoragePermissionError(EmbCacheError, PermissionError):
    """A file or directory has the wrong owner or mode, or cannot be accessed."""


class InUseError(EmbCacheError, OSError):
    """Another process or table holds the directory."""


class StateError(EmbCacheError, RuntimeError):
    """The call does not fit the state of the object: it is closed or used up, has rows in use, or is another process's."""


class MismatchError(EmbCacheError, ValueError):
    """A checkpoint or an SSD directory belongs to another table or configuration."""


class ReadOnlyError(StorageError):
    """A write failed before, so that the SSD tier only reads until it is opened again. Its rows can still be saved elsewhere."""


class UnsupportedError(EmbCacheError, NotImplementedError):
    """The call asks for something that is not supported."""


class EmbCacheWarning(UserWarning):
    """Something works slower or otherwise than asked for. The message says what to change."""
