"""Budgets of host RAM beyond the memory of the machine or of the process's cgroup."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tables import make_bag
from torchrec_embcache import EmbCacheEmbeddingBag, EmbCacheWarning, TierBudgets
from torchrec_embcache.table import _host_memory

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
WARNING = (
    r"TierBudgets.host_bytes of the open tables are .* the system will end the process before the budgets are full"
)


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host_memory, "_warned_bytes", 0)
    # Tests before may have left tables open.
    monkeypatch.setattr(_host_memory, "_tables", weakref.WeakSet())


def bag(name: str, tiers: TierBudgets) -> EmbCacheEmbeddingBag:
    """A table of few rows for its budgets, so that what it keeps for each of them is little."""
    return make_bag(name=name, embedding_dim=4096, tiers=tiers)


def test_a_budget_past_the_memory_warns_once_until_it_doubles() -> None:
    tiers = TierBudgets(host_bytes=MACHINE + (1 << 30))
    with pytest.warns(EmbCacheWarning, match=WARNING) as caught:
        first = bag("first", tiers)
    assert len(caught) == 1
    # A warning would be an error here.
    with bag("small", TierBudgets(host_bytes="1MiB")):
        pass
    with pytest.warns(EmbCacheWarning, match=WARNING), bag("second", tiers):
        pass
    first.close()


def test_only_budgets_of_open_tables_are_added_up() -> None:
    half = TierBudgets(host_bytes=MACHINE // 2 - (1 << 20), device_bytes="2MiB")
    bag("closed", half).close()
    with bag("first", half):
        with pytest.warns(EmbCacheWarning, match="with device tiers on the CPU"):
            second = bag("second", half)
        second.close()


def limits(root: Path) -> list[int]:
    found: Iterator[int] = _host_memory._cgroup_limits(root)
    return sorted(found)


def test_the_limits_of_a_cgroup_and_of_those_above_it_count(tmp_path: Path) -> None:
    assert limits(tmp_path) == [], "a system without cgroups"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/kube/pod/app\n")
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "kube/pod/app").mkdir(parents=True)
    assert limits(tmp_path) == []
    for group, limit in (("kube", "4000"), ("kube/pod", "max"), ("kube/pod/app", "3000\n")):
        (groups / group / "memory.max").write_text(limit)
    assert limits(tmp_path) == [3000, 4000]


def test_container_limit_counts_under_the_host_path(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu:/docker/1f\n4:cpuset,memory:/docker/1f\n0::/\n")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("2000")
    (tmp_path / "sys/fs/cgroup/memory.limit_in_bytes").write_text("1")
    assert limits(tmp_path) == [2000]
