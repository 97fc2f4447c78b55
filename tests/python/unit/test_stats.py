"""A counter has one name, from the binding to the public class, and the objects of the binding are frozen."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from tables import make_bag, ssd_tiers, step
from torchrec_embcache import (
    AdmissionStats,
    EvictionStats,
    SsdStats,
    TableStats,
    TierStats,
    _native,
    admission,
    eviction,
    optimizers,
)
from torchrec_embcache.config import CachePolicy
from torchrec_embcache.exceptions import ConfigError

STUB = Path(_native.__file__).parent / "_native.pyi"


def in_stub(name: str) -> set[str]:
    """The attributes of a class in the stub."""
    (found,) = (
        node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        inner.target.id
        for inner in found.body
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
    }


def attributes(kind: type[Any]) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.isdatadescriptor(value)}


@pytest.mark.parametrize("kind", [AdmissionStats, EvictionStats, TierStats, SsdStats, TableStats])
def test_a_counter_has_one_name_everywhere(kind):
    native = getattr(_native, kind.__name__)
    ours = {field.name for field in fields(kind)}
    if kind is SsdStats:
        ours = ours - {field.name for field in fields(TierStats)} | {"tier"}
    if kind is TableStats:
        ours -= {"kernels"}  # which the core does not know
    assert attributes(native) == ours == in_stub(kind.__name__)


def test_the_policies_of_the_core_are_those_that_editors_show():
    with pytest.raises(ConfigError, match="policy") as refused:
        _native.row_bytes(4, "sgd", "random")  # type: ignore[arg-type]
    known = re.findall(r'"(\w+)"', str(refused.value).split("use one of")[1])
    assert tuple(known) == get_args(CachePolicy)
    assert f"Policy = Literal[{', '.join(f'{chr(34)}{name}{chr(34)}' for name in known)}]" in STUB.read_text()


def test_stats_are_what_the_binding_counts(tmp_path):
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", device_bytes="64KiB"), optimizer=optimizers.Adam(lr=0.1)) as bag:
        step(bag, [[1, 2], [2]])
        bag.flush()
        counted, stats = bag.table._native_table.stats(), bag.stats()
    assert stats.rows == counted.rows == 2
    assert stats.device.rows == counted.device.rows == 2
    assert stats.ssd.logical_written_bytes == counted.ssd.logical_written_bytes > 0
    assert stats.ssd.written_bytes == counted.ssd.tier.written_bytes > 0
    assert repr(counted).startswith("TableStats(rows=2, step=1, ")
    assert "io_engine=" in repr(counted.ssd)
    with pytest.raises(AttributeError):
        counted.rows = 3


@pytest.mark.parametrize(
    "name",
    [
        "AdmissionStats",
        "DeviceArrays",
        "EvictionStats",
        "FetchedRows",
        "FoundRows",
        "GatheredRows",
        "Histogram",
        "PlanMode",
        "RowBlock",
        "RowBytes",
        "RowMetadata",
        "SsdStats",
        "TableCounters",
        "TableStats",
        "TierStats",
        "RowOccurrences",
    ],
)
def test_what_the_stub_says_of_a_frozen_class_is_there(name):
    assert attributes(getattr(_native, name)) == in_stub(name)


def test_counters_print_in_ten_lines_at_most(tmp_path: Path) -> None:
    settings = {"admission": admission.Count(1), "eviction": eviction.Policy([eviction.Ttl(steps=8)])}
    tiers = ssd_tiers(tmp_path, host_bytes="64KiB", device_bytes="16KiB")
    with make_bag(tiers=tiers, **settings) as bag:
        for number in range(100):
            step(bag, [[number, number + 1]])
        shown = repr(bag.stats()).splitlines()
    assert shown[0].startswith("TableStats(rows=")
    parts = ("row_wait", "lock_held", "admission", "eviction", "device", "host", "ssd")
    assert [line.split(":")[0].strip() for line in shown[1:]] == list(parts)
    assert re.fullmatch(r"  row_wait: \d+ in [\d.]+ ms, p50 [\d.]+ ms, p99 [\d.]+ ms", shown[1])
