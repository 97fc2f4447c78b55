"""All errors and warnings of the package.

Errors derive from `EmbCacheError` and from the built-in exception that fits, so that code without knowledge of this package can
catch them. A message names the field or argument, its value and the remedy.
"""

from typing import Any

import torch

__all__ = [
    "CapacityError",
    "ConfigError",
    "CorruptionError",
    "DeviceMemoryError",
    "EmbCacheError",
    "EmbCacheWarning",
    "EvictionHookError",
    "HostMemoryError",
    "InUseError",
    "InputError",
    "MismatchError",
    "PathError",
    "ReadOnlyError",
    "StaleError",
    "StateError",
    "StorageError",
    "StoragePermissionError",
    "UnsupportedError",
]


class EmbCacheError(Exception):
    """Base class of all errors of the package.

    `errno` (a number of the module `errno`) and `filename` are set if the operating system reported the error, else None.

    Examples:
        >>> from torchrec_embcache import EmbCacheError, TierBudgets
        >>> try:
        ...     TierBudgets(host_bytes=0)
        ... except EmbCacheError as error:
        ...     print(type(error).__name__, error.errno)
        ConfigError None
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
    """A configuration value is out of range or contradicts another.

    Examples:
        >>> from torchrec_embcache import TierBudgets
        >>> TierBudgets(host_bytes=0)
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.ConfigError: TierBudgets.host_bytes=0: the host tier is mandatory, give it at least a few MiB
    """


class EvictionHookError(EmbCacheError, RuntimeError):
    """`on_evict` raised. On the rank where it did, `__cause__` is its exception.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, eviction, optimizers
        >>> def archive(rows):
        ...     raise OSError("the archive is full")
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5),
        ...     eviction=eviction.Policy([eviction.Ttl(steps=1)], every_steps=1), on_evict=archive,
        ... )
        >>> for id in (7, 8):
        ...     item(torch.tensor([id])).sum().backward()
        >>> item.close()
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.EvictionHookError: on_evict of table 'item' raised OSError: the archive is full ...
    """


class InputError(EmbCacheError, ValueError):
    """An argument of a call (ids, offsets, rows) is malformed.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item(torch.tensor([1.5]))
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.InputError: input has dtype torch.float32: give int64 or int32
    """


class CapacityError(EmbCacheError, RuntimeError):
    """The last tier is full, so that a row does not fit. No rows are lost.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="64KiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item(torch.arange(5000)).sum().backward()
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.CapacityError: table "item" is full: it has no SSD tier, and RAM (host_bytes=65536) holds ...
    """


class HostMemoryError(EmbCacheError, MemoryError):
    """Host memory allocation failed. Nothing has changed: the rows are as the previous steps left them.

    Examples:
        >>> import resource
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> before = resource.getrlimit(resource.RLIMIT_AS)
        >>> resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))  # 1 TiB of address space, as `ulimit -v` sets it
        >>> tiers, sgd = TierBudgets(host_bytes="2TiB"), optimizers.SGD(lr=0.5)
        >>> EmbCacheEmbedding(name="item", embedding_dim=256, tiers=tiers, optimizer=sgd).table.open()
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.HostMemoryError: cannot map rows: the system refuses ... bytes of memory ...
        >>> resource.setrlimit(resource.RLIMIT_AS, before)
    """


class DeviceMemoryError(EmbCacheError, torch.OutOfMemoryError, MemoryError):
    """The device of a table has no memory for a step, or for rows that move off it. Tables are unchanged or poisoned.

    The device may be the CPU. The class also derives from torch's error and from Python's, for code that catches only these.

    Examples:
        >>> import torch
        >>> from torchrec_embcache.exceptions import DeviceMemoryError
        >>> issubclass(DeviceMemoryError, torch.OutOfMemoryError)
        True
    """


class CorruptionError(EmbCacheError, OSError):
    """Data read from disk is corrupted. The message contains the path, the offset, and the expected and actual values.

    Examples:
        >>> from pathlib import Path
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> [file] = Path("ckpt").rglob("*.safetensors")
        >>> stored = bytearray(file.read_bytes())
        >>> stored[-1] ^= 1  # one bit
        >>> written = file.write_bytes(stored)
        >>> Saver(0).load(item, "ckpt")
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.CorruptionError: ...safetensors is damaged at byte ...
    """


class StorageError(EmbCacheError, OSError):
    """A file operation failed; see `errno`.

    Examples:
        >>> from pathlib import Path
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> for file in Path("ckpt").rglob("*.safetensors"):
        ...     file.unlink()
        >>> Saver(0).load(item, "ckpt")
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.StorageError: cannot open ...safetensors: No such file or directory (os error 2)
    """


class PathError(EmbCacheError, ValueError):
    """A path is rejected.

    It does not exist or is too long, has a scheme such as "s3://", or contains a symbolic link, a sensitive word or a system
    directory.

    Examples:
        >>> from torchrec_embcache import TierBudgets
        >>> TierBudgets(host_bytes="1GiB", ssd_bytes="10GiB", ssd_dir="~/cache")
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.PathError: TierBudgets.ssd_dir '~/cache' begins with '~', which only a shell replaces ...
    """


class StoragePermissionError(EmbCacheError, PermissionError):
    """A file or directory has the wrong owner or mode, or cannot be accessed.

    Examples:
        >>> import os
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> os.mkdir("cache")
        >>> os.chmod("cache", 0o777)  # all users may write to it
        >>> tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache")
        >>> CacheTable(name="item", dim=2, tiers=tiers, initializer=initializers.Constant(0.0), optimizer=None).open()
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.StoragePermissionError: ssd_dir .../cache has mode 0777, which allows more than 0755: chmod ...
    """


class InUseError(EmbCacheError, OSError):
    """Another process or table uses the directory.

    Examples:
        >>> import os
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers
        >>> os.mkdir("cache", mode=0o750)
        >>> tiers, zeros = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache"), initializers.Constant(0.0)
        >>> first, second = (CacheTable(name="item", dim=2, tiers=tiers, initializer=zeros, optimizer=None) for _ in range(2))
        >>> first.open()
        >>> second.open()
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.InUseError: .../cache/item/item/0-of-1 is in use by pid ... (this process): ...
    """


class StaleError(EmbCacheError, RuntimeError):
    """The served checkpoint is older than `max_staleness_seconds` allows, and `on_stale` is "raise".

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> follow = serving.Follow(max_staleness_seconds=0, on_stale="raise")  # no checkpoint is as young as that
        >>> with serving.open("ckpt", follow=follow) as tables:
        ...     tables.pin()
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.StaleError: ...
    """


class StateError(EmbCacheError, RuntimeError):
    """The call does not fit the object's state: it is closed or consumed, has rows in use, or belongs to another process.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.close()
        >>> item(torch.tensor([7]))
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.StateError: table "item" is closed
    """


class MismatchError(EmbCacheError, ValueError):
    """A checkpoint or an SSD directory belongs to another table or configuration.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> wider = EmbCacheEmbedding(name="item", embedding_dim=3, tiers=tiers, optimizer=sgd)
        >>> Saver(0).load(wider, "ckpt")
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.MismatchError: table "item" of module "" has embedding_dim 3 and the checkpoint 2: make ...
    """


class ReadOnlyError(StorageError):
    """A previous write failed, and the SSD tier is read-only until it is opened again. Its rows can still be saved elsewhere.

    Examples:
        >>> import os, resource, torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> os.mkdir("cache", mode=0o750)
        >>> tiers, sgd = TierBudgets(host_bytes="8MiB", ssd_bytes="1GiB", ssd_dir="cache"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=256, tiers=tiers, optimizer=sgd)
        >>> item(torch.arange(2000)).sum().backward()
        >>> before = resource.getrlimit(resource.RLIMIT_FSIZE)
        >>> resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # a disk that is full after 1 MiB
        >>> item.table.flush()
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.ReadOnlyError: table "item": the SSD tier only reads since an earlier write failed ...
        >>> resource.setrlimit(resource.RLIMIT_FSIZE, before)
        >>> item.read_rows([7]).found  # every row can be read, and saved elsewhere
        tensor([True])
    """


class UnsupportedError(EmbCacheError, NotImplementedError):
    """The requested operation is not supported.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> EmbCacheEmbeddingBag(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd, mode="max")
        Traceback (most recent call last):
            ...
        torchrec_embcache.exceptions.UnsupportedError: mode='max': the fused backward sums; use mode='sum' or 'mean'
    """


class EmbCacheWarning(UserWarning):
    """An operation is slower or behaves differently than requested. The message contains the remedy.

    Examples:
        >>> import torch, warnings
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item(torch.tensor([7])).sum().backward()
        >>> with warnings.catch_warnings(record=True, action="always") as told:
        ...     torch.save(item.state_dict(), "item.pt")
        >>> str(told[0].message).split(": ")[0]
        "state_dict() holds no rows of tables 'item' (1), and nothing has saved them"
    """
