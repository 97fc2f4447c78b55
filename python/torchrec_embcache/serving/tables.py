"""A directory of checkpoints as read-only tables, which follow what a trainer publishes there."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self

from torchrec_embcache import _native
from torchrec_embcache.admission import NotAdmitted, check_not_admitted
from torchrec_embcache.closing import CloseOnExitMixin
from torchrec_embcache.config import parse_bytes
from torchrec_embcache.exceptions import ConfigError, PathError, StateError
from torchrec_embcache.paths import CheckedPath, PathChecks, open_to_load

from .follow import Follow
from .stats import ServingStats
from .version import Version

__all__ = ["Tables", "open"]


class Tables(CloseOnExitMixin):
    """A directory of checkpoints that is served, as `serving.open` gives it. Any thread may use it.

    A forked child may use it too. Versions that were pinned before the fork are as they were. At its first use in the child the
    directory is opened anew, so that the child serves what is newest then, and follows it by a thread of its own.

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
        self._is_opened_here = False  # whether this process opened it
        self._closed = False
        self._stop: Callable[[], object] = _no_op
        self._open_here()
        _open_servers.add(self)

    def pin(self) -> Version:
        """The version that is served now. It stays as it is until it is let go, by `close()` or a `with` statement.

        Raises `StaleError` where it is older than `max_staleness_seconds` and `on_stale` is "raise", and `StateError` where the
        tables are closed.
        """
        return Version(self, self._ready().pin())

    def poll(self) -> str | None:
        """Look for a newer checkpoint now. Returns its name where it is served from now on, and None where there is none.

        Where the newest checkpoint cannot be served, because it is damaged, gone or linked, that is raised, counted and logged. The
        version of before serves on.
        """
        return self._ready().poll()

    def rollback(self) -> str:
        """Serve the version before the present one again. Returns its name.

        It stays until a newer checkpoint than the one that was left is published. A process that is forked later opens the newest
        one again: let it roll back, too, or open it with `at`. Raises `StateError` where no version before is kept.
        """
        return self._ready().rollback()

    def stats(self) -> ServingStats:
        """Its counters, as they are now."""
        most = self.follow.max_staleness_seconds if self.follow is not None else None
        return ServingStats.from_native(self._ready().stats(), most)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Follow and serve no longer; harmless twice. Versions that are pinned can be read until they are let go."""
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
        """Open the directory in this process, and follow it, where neither was done yet."""
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
        """Called in a forked child, which has none of its parent's threads, and may not use what they work with."""
        self._open_lock = threading.Lock()
        if isinstance(self._stop, weakref.finalize):
            self._stop.detach()  # it would keep the parent's versions
        self._stop, self._is_opened_here = _no_op, False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same tables: a copy of a model reads what the model reads."""
        return self

    def __reduce__(self) -> NoReturn:
        raise StateError(
            f"tables that are served from {self.path} cannot be pickled: open them by serving.open in the process that is to use "
            "them"
        )

    def __repr__(self) -> str:
        return f"Tables({self.path!r}{', closed' if self.is_closed else ''})"


def _no_op() -> None:
    """What ends the thread of tables that have none."""


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
    """Serve the tables of a directory of checkpoints, as `Saver` writes it, of any number of ranks.

    Nothing of a trainer is needed. Rows are read from the checkpoint's own files, which processes of a machine share. An index of
    about 17 bytes a row lies beside them. Where it is not there yet, it is made now, by one process for all; `embcache index` makes
    it ahead.

    Args:
        path: of the directory. Where it cannot be written, the index is kept in memory.
        at: the name or the number of one checkpoint, which is served for good. None: the newest.
        host_bytes: the most memory that this process may take of its own, for indexes that cannot be shared and for deltas, such as
            "2GiB". None: what it needs.
        follow: how newer checkpoints are taken up. None: only `Tables.poll` does.
        path_checks: the rules for the directories, as those of `Saver`. "trusted" accepts volumes that others may write to.
        missing: what ids without a row read: "zeros", a number for every column, "initial", the values that a row would be born
            with, or "oov", the row that ids share which were refused one. None: what evaluation reads in training, as far as the
            checkpoint says it.
        preload: read the weights of all rows into memory before a checkpoint is served, in huge pages where the system has them.
            Give it where they fit there: no lookup waits for the disk then, and lookups are faster. False: rows are read as they
            are asked for.
        verify: read all rows and hold them against their checksums before a checkpoint is served, as a load does. False: that is
            done by the process that makes an index, and for deltas that the index does not cover. What has its index is served
            unread.

    Raises:
        PathError: `path` has a scheme such as "s3://", or is a checkpoint itself; or there is no such directory, no checkpoint in
            it, or not the one that `at` names.
        StoragePermissionError: it may not be read.
        MismatchError: the checkpoint is a linked one. The message has the command that makes one that can be served.
        CorruptionError: the checkpoint is damaged, as far as it is read (see `verify`).
        CapacityError: what is needed passes `host_bytes`.
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
        raise ConfigError(f"at={at!r} is no checkpoint: give its name, as '0000000007-...', or its number")
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
        # A forked child opens them anew: a directory that was opened before a fork is its parent's.
        trainer = None if source is None else open_to_load(source, path_checks)
        return _native.TableServer(open_to_load(root, path_checks), source=trainer, **settings)

    return Tables(open_native, root, follow)


def _check_not_a_checkpoint(path: str) -> None:
    """`PathError` where `path` is one checkpoint, and not the directory that it lies in."""
    above, name = os.path.split(path)
    if os.path.isfile(os.path.join(path, "manifest.json")) and not os.path.exists(os.path.join(path, "LATEST")):
        raise PathError(
            f"{path} is one checkpoint: give the directory that it lies in, as serving.open({above!r}, at={name!r})"
        )
