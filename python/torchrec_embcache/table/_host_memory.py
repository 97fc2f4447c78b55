"""Warns if budgets in host RAM exceed the memory of the machine or of this process's cgroup."""

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

from torchrec_embcache._ssd.table import SsdTable
from torchrec_embcache.config import bytes_text
from torchrec_embcache.exceptions import EmbCacheWarning

__all__ = ["warn_if_over_memory"]


_tables: weakref.WeakSet[SsdTable] = weakref.WeakSet()
_lock = threading.Lock()
# The budgets in the last warning, in bytes.
_warned_bytes = 0


def warn_if_over_memory(table: SsdTable) -> None:
    """Warns if the budgets of all open tables, including `table`, exceed the memory available to this process.

    The warning is repeated only after the budgets have doubled.
    """
    global _warned_bytes
    with _lock:
        _tables.add(table)
        known = list(_tables)
    tables = [each for each in known if each.is_open and not each._is_closed]
    budgets = sum(each.tiers.host + (each.tiers.device if each.device.type == "cpu" else 0) for each in tables)
    limit, of = _available_memory()
    if budgets <= limit or budgets < 2 * _warned_bytes:
        return
    _warned_bytes = budgets
    warnings.warn(
        f"TierBudgets.host_bytes of the open tables are {bytes_text(budgets)} together, with device tiers on the CPU, and {of} is "
        f"{bytes_text(limit)}: the system will end the process before the budgets are full; lower host_bytes, or add an SSD tier",
        EmbCacheWarning,
        stacklevel=5,
    )


def _available_memory() -> tuple[int, str]:
    """Returns the memory available to this process and the name of the limit that applies."""
    limits = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the memory of this machine")]
    limits += [(limit, "the memory limit of this process's cgroup") for limit in _cgroup_limits(Path("/"))]
    return min(limits)


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yields the memory limits of this process's cgroups (v1 and v2) and their ancestors. `root` contains /proc and /sys."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # a system without cgroups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        # In a container the path may be the host's, and only the mount itself exists.
        for directory in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no limit, or no such file
                yield int((directory / name).read_text())
            if directory == mount:
                break
