"""A directory of checkpoints served as read-only tables, which follow new checkpoints published there."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self

from torchrec_embcache import _native
from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache._paths import CheckedPath, PathChecks, open_to_load
from torchrec_embcache.admission import NotAdmitted, check_not_admitted
from torchrec_embcache.config import parse_bytes
from torchrec_embcache.exceptions import ConfigError, PathError, StateError

from ._follow import Follow
from .stats import ServingStats
from .version import Version

__all__ = ["Tables", "open"]


class Tables(CloseOnExitMixin):
    """A served directory of checkpoints, returned by `serving.open`. It is thread-safe.

    A forked child may use it too. Versions pinned before the fork stay unchanged. The first use in the child reopens the directory,
    so that the child serves the latest checkpoint and follows the directory with its own thread.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> saver = Saver(0)
        >>> first = saver.save(item, "ckpt")
        >>> tables = serving.open("ckpt")
        >>> item.import_rows([7], [[5.0, 6.0]])
        >>> second = saver.save(item, "ckpt", incremental=True)
        >>> before = tables.pin()
        >>> tables.poll() == second.checkpoint  # what a thread does where `follow` is given
        True
        >>> before["item"].lookup([7]).tolist(), tables.pin()["item"].lookup([7]).tolist()
        ([[1.0, 2.0]], [[5.0, 6.0]])
        >>> tables.rollback() == first.checkpoint
        True
        >>> tables.pin()["item"].lookup([7]).tolist(), tables.stats().swaps
        ([[1.0, 2.0]], ...)
        >>> tables.close()
    """

    def __init__(self, open_native: Callable[[], _native.TableServer], path: str, follow: Follow | None) -> None:
        self.path = path
        self.follow = follow
        self._open_native = open_native
        self._open_lock = threading.Lock()
        self._native: _native.TableServer | None = None
        self._is_opened_here = False  # True if this process opened it
        self._closed = False
        self._stop: Callable[[], object] = _no_op
        self._open_here()
        _open_servers.add(self)

    def pin(self) -> Version:
        """Pins the served version. It does not change until it is unpinned by `close()` or at the end of a `with` statement.

        Raises `StaleError` if the version is older than `max_staleness_seconds` and `on_stale` is "raise", and `StateError` if the
        tables are closed.
        """
        return Version(self, self._ready().pin())

    def poll(self) -> str | None:
        """Looks for a newer checkpoint. Returns its name if it is served after this call, and None if there is none.

        If the latest checkpoint cannot be served because it is corrupted, missing or linked, the error is raised, counted and
        logged, and the previous version continues to be served.
        """
        return self._ready().poll()

    def rollback(self) -> str:
        """Serves the previous version again. Returns its name.

        It is served until a checkpoint is published that is newer than the one rolled back from. A process that is forked later
        opens the latest checkpoint: call `rollback` there too, or open the tables with `at`. Raises `StateError` if no previous
        version is kept.
        """
        return self._ready().rollback()

    def stats(self) -> ServingStats:
        """Returns the current counters."""
        most = self.follow.max_staleness_seconds if self.follow is not None else None
        return ServingStats.from_native(self._ready().stats(), most)

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self._closed

    def close(self) -> None:
        """Stops following and serving. Idempotent. Pinned versions can be read until they are unpinned."""
        with self._open_lock:
            self._closed = True
            self._stop()
            self._native = None

    def _ready(self) -> _native.TableServer:
        native = self._native
        if native is None or not self._is_opened_here:
            native = self._open_here()
        return native

    def _open_here(self) -> _native.TableServer:
        """Opens the directory in this process and starts to follow it, unless this was done before."""
        with self._open_lock:
            if self._closed:
                raise StateError(f"the tables of {self.path} are closed: open them again by serving.open")
            if self._native is None or not self._is_opened_here:
                native = self._open_native()
                if self.follow is not None:
                    native.follow(float(self.follow.poll_seconds))
                self._stop = weakref.finalize(self, native.stop)
                self._native, self._is_opened_here = native, True
            return self._native

    def after_fork(self) -> None:
        """Called in a forked child, which has none of its parent's threads and must not use their state."""
        self._open_lock = threading.Lock()
        if isinstance(self._stop, weakref.finalize):
            self._stop.detach()  # it would keep the parent's versions
        self._stop, self._is_opened_here = _no_op, False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns the same tables: a copy of a model reads the same tables as the model."""
        return self

    def __reduce__(self) -> NoReturn:
        raise StateError(
            f"tables that are served from {self.path} cannot be pickled: open them by serving.open in the process that is to use "
            "them"
        )

    def __repr__(self) -> str:
        return f"Tables({self.path!r}{', closed' if self.is_closed else ''})"


def _no_op() -> None:
    """The stop function of tables that have no thread."""


_open_servers: weakref.WeakSet[Tables] = weakref.WeakSet()


def _after_fork() -> None:
    for tables in list(_open_servers):
        tables.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def open(  # noqa: A001  # the specification's name: serving.open
    path: str | os.PathLike[str],
    *,
    at: str | int | None = None,
    host_bytes: int | str | None = None,
    follow: Follow | None = None,
    path_checks: PathChecks = "basic",
    missing: NotAdmitted | None = None,
    preload: bool = False,
    verify: bool = False,
) -> Tables:
    """Serves the tables of a directory of checkpoints written by `Saver`, of any number of ranks.

    Serving needs nothing from the trainer. Rows are read from the checkpoint's own files, which processes of a machine share. An
    index of about 17 bytes per row is stored next to them. If it does not exist, one process builds it for all during this call;
    `embcache index` builds it in advance.

    Args:
        path: the directory. If it is not writable, the index is kept in memory.
        at: name or number of the only checkpoint to serve. None: the latest.
        host_bytes: limit for the private memory of this process, used by indexes that cannot be shared and by incremental
            checkpoints, such as "2GiB". None: no limit.
        follow: settings for following newer checkpoints. None: only `Tables.poll` looks for them.
        path_checks: the rules for the directories, as for `Saver`. "trusted" accepts volumes that other users may write to.
        missing: the value read for ids without a row: "zeros", a number for every column, "initial" (the initial value of a new
            row), or "oov" (the row shared by ids that were not admitted). None: the same as evaluation in training, as far as the
            checkpoint contains that setting.
        preload: reads the weights of all rows into memory before a checkpoint is served, in huge pages if the system has them. Use
            it if they fit: lookups are faster and never wait for the disk. False: rows are read on demand.
        verify: reads all rows and verifies them against their checksums before a checkpoint is served, like a load. False: only the
            process that builds an index verifies the rows, and incremental checkpoints that the index does not cover are verified;
            a checkpoint that has its index is served without reading all rows.

    Raises:
        PathError: `path` has a scheme such as "s3://" or is itself a checkpoint; or the directory, a checkpoint in it, or the
            checkpoint named by `at` does not exist.
        StoragePermissionError: the directory is not readable.
        MismatchError: the checkpoint is a linked checkpoint. The message contains the command that converts it into one that can be
            served.
        CorruptionError: the checkpoint is corrupted, as far as it is read (see `verify`).
        CapacityError: the required memory exceeds `host_bytes`.
        ConfigError: a setting is out of range or contradicts another.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> report = Saver(0).save(item, "ckpt")
        >>> with serving.open("ckpt", host_bytes="1GiB", follow=serving.Follow(poll_seconds=1)) as tables:
        ...     with tables.pin() as version:
        ...         rows = version["item"].lookup(torch.tensor([7]))
        >>> rows.tolist()
        [[1.0, 2.0]]
    """
    if not isinstance(follow, Follow | None):
        raise ConfigError(f"follow={follow!r}: give a serving.Follow, or None")
    if at is not None and follow is not None:
        raise ConfigError(f"at={at!r} serves one checkpoint, and follow= the newest: give one of them")
    if at is not None and not (isinstance(at, str) or (type(at) is int and at >= 0)):
        raise ConfigError(f"at={at!r} is not a checkpoint: give its name, as '0000000007-...', or its number")
    settings: dict[str, Any] = {"preload": preload, "verify": verify}
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: give True or False")
    if missing is not None:
        read = check_not_admitted("missing", missing)
        settings["missing"] = read if isinstance(read, str) else "value"
        settings["missing_value"] = 0.0 if isinstance(read, str) else float(read)
    if host_bytes is not None:
        settings["host_bytes"] = parse_bytes("host_bytes", host_bytes)
    if follow is not None:
        settings["max_staleness_seconds"] = follow.max_staleness_seconds
        settings["raise_when_stale"] = follow.on_stale == "raise"
    settings["at"] = None if at is None else str(at)
    root = CheckedPath(open_to_load(path, path_checks).path)
    _check_not_a_checkpoint(root)
    source = (
        None if follow is None or follow.source is None else CheckedPath(open_to_load(follow.source, path_checks).path)
    )

    def open_native() -> _native.TableServer:
        # A forked child reopens them: a directory handle opened before a fork belongs to the parent.
        trainer = None if source is None else open_to_load(source, path_checks)
        return _native.TableServer(open_to_load(root, path_checks), source=trainer, **settings)

    return Tables(open_native, root, follow)


def _check_not_a_checkpoint(path: str) -> None:
    """Raises `PathError` if `path` is a checkpoint rather than the directory that contains checkpoints."""
    above, name = os.path.split(path)
    if os.path.isfile(os.path.join(path, "manifest.json")) and not os.path.exists(os.path.join(path, "LATEST")):
        raise PathError(
            f"{path} is one checkpoint: give the directory that it lies in, as serving.open({above!r}, at={name!r})"
        )
