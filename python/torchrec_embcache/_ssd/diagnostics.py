"""Warnings about SSD directories: free space, unused files, superseded shards. Also logs how tables are opened."""

import logging
import os
import re
import warnings
from collections.abc import Sequence

from torchrec_embcache import _native
from torchrec_embcache.config import SsdRoot, bytes_text
from torchrec_embcache.exceptions import EmbCacheError, EmbCacheWarning

from . import commit
from .table import SsdTable

__all__ = ["check_opened_table", "log_unflushed", "remove_superseded"]

_log = logging.getLogger(__name__)

_SHARD = re.compile(r"(\d{1,7})-of-(\d{1,7})")


def check_opened_table(table: SsdTable, tables: Sequence[SsdTable], *, resumed: int | None) -> bool:
    """Logs and warns about a table that was just opened, and removes files of runs with another number of ranks.

    `tables` are all open tables with an SSD tier, including this one. `resumed` is the commit id of the state that the table
    resumed.

    The files are removed with `reopen="discard"`. With "auto" they are removed if the resumed state contains the entire table.
    Returns True if they are kept until a flush, after which `remove_superseded` is to remove them.
    """
    _log_opened(table, resumed=resumed is not None)
    if table.directory is None:
        return False
    whole = resumed is not None and (not table._is_sharded or commit.is_multi_table(resumed))
    remove = table.tiers.reopen == "discard" or (table.tiers.reopen == "auto" and whole)
    left = _check_other_shards(table, table.directory, remove=remove)
    _warn_of_space(str(table.tiers.ssd_dir), tables)
    return left and table.tiers.reopen == "auto"


def remove_superseded(table: SsdTable, *, by_all_ranks: bool) -> bool:
    """After a flush, removes the files of runs with another number of ranks. Until then their rows can be resumed after a crash.

    Returns True if only this shard was flushed and other ranks own the rest of the table: call this function again after the next
    flush.
    """
    if table.directory is None or (table._is_sharded and not by_all_ranks):
        return True
    _check_other_shards(table, table.directory, remove=True, log=False)
    return False


def _log_opened(table: SsdTable, *, resumed: bool) -> None:
    if table.directory is None:
        _log.info("table %r: opened with %s", table.name, table.tiers.describe())
        return
    if resumed:
        rows, step = len(table), table.step()
        _log.info("table %r: resumed %d rows at step %d from %s", table.name, rows, step, table.directory)
    else:
        _log.info("table %r: opened without rows, with %s", table.name, table.tiers.describe())


# Roots for which a warning was issued.
_warned_roots: set[str] = set()


def _warn_of_space(ssd_dir: str, tables: Sequence[SsdTable]) -> None:
    """Warns once per root (`ssd_dir`) if its file system has less free space than the open tables' budgets on it still allow."""
    try:
        device, system = os.stat(ssd_dir).st_dev, os.statvfs(ssd_dir)
    except OSError:
        return  # opening the table raises the error
    free = system.f_bavail * system.f_frsize
    if ssd_dir in _warned_roots:
        return
    budgets = held = 0
    for table in tables:
        try:
            if os.stat(str(table.tiers.ssd_dir)).st_dev == device:
                bytes_held = table._ssd_bytes_held
                budgets, held = budgets + table.tiers.ssd, held + bytes_held
        except (OSError, EmbCacheError):
            pass  # closed, unusable or without its directory; using the table raises the error
    if budgets - held <= free:
        return
    _warned_roots.add(ssd_dir)
    warnings.warn(
        f"TierBudgets.ssd_bytes of the open tables on the file system of {ssd_dir} are {bytes_text(budgets)} together, of which "
        f"they hold {bytes_text(held)}, and {bytes_text(free)} are free there: writing will fail before the budgets are full; "
        "lower ssd_bytes, or give ssd_dir a larger file system",
        EmbCacheWarning,
        stacklevel=5,
    )


def log_unflushed(directory: str) -> None:
    """Logs that the files of a shard, if any, are removed because they contain no flush that can be resumed."""
    files = [name for name in os.listdir(directory) if name != "lock"] if os.path.isdir(directory) else []
    if files:
        _log.warning(
            "%s has %d files of a run that ended before its first flush was complete: nothing in them can be resumed, and they are "
            "removed",
            directory,
            len(files),
        )


def _check_other_shards(table: SsdTable, directory: str, *, remove: bool, log: bool = True) -> bool:
    """Reports files that other runs left next to a shard's `directory`. With `remove`, removes those of another number of ranks.

    Returns True if files of another number of ranks are left for a flush to remove.

    Each rank handles a part of these directories, and the only rank of a table handles all of them. Directories that another
    process has open are kept, and also directories that contain other files than a table's.
    """
    parent, own = os.path.split(directory)
    only_rank = not table._is_sharded
    kept: list[str] = []
    later: list[str] = []
    for name in sorted(_shard_names(parent)):
        rank, ranks = (int(part) for part in name.split("-of-"))
        if name == own or not (only_rank or rank % table.world_size == table.rank):
            continue
        if ranks != table.world_size and remove:
            _remove(os.path.join(parent, name), table.tiers.ssd_root)
        elif ranks != table.world_size and table.tiers.reopen == "auto":
            later.append(name)
        elif ranks != table.world_size or only_rank:
            kept.append(name)
    if later and log:
        what = "flush" if only_rank else "flush of all ranks (flush(model) or flush_every=)"
        _log.warning(
            "%s in %s were left by runs with another number of ranks: they are not read, and ssd_bytes does not count them; the "
            "first %s of table %r removes them. To keep their rows end this run now, and bring them over by a checkpoint of Saver",
            ", ".join(later),
            parent,
            what,
            table.name,
        )
    if kept and log:
        _log.warning(
            "%s in %s were left by runs with other ranks: they are not read, and ssd_bytes does not count them; their rows come "
            "back by a checkpoint that Saver made; remove them by rm -r, or those of another number of ranks by "
            'TierBudgets(reopen="discard") or "auto"',
            ", ".join(kept),
            parent,
        )
    return bool(later)


def _shard_names(parent: str) -> list[str]:
    """Returns the names of the directories of one table's shards."""
    try:
        with os.scandir(parent) as entries:
            return [
                entry.name for entry in entries if _SHARD.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _remove(path: str, root: SsdRoot) -> None:
    try:
        published = bool(_native.Table.commit_ids(path, *root))
        _native.Table.remove_shard(path, *root)
    except EmbCacheError as error:
        if os.path.isdir(path):  # else another process has removed it
            _log.warning("%s was left by a run with another number of ranks, and stays: %s", path, error)
    else:
        what = "the rows that it flushed last are gone" if published else "nothing in it could be resumed"
        _log.warning("removed %s, which a run with another number of ranks left: %s", path, what)
