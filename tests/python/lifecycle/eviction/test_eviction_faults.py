"""Sweeps whose reads and writes fail: typed errors, rows that can be read and saved, and training that continues if it can."""

import contextlib
from collections.abc import Callable, Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lifecycle_cases import HALF_LIFE, Expected, budgets, embedding, ids_of, update
from ssd_records import place_of
from tables import Contents, ssd_tiers
from torchrec_embcache import evict
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import Policy, Score, Ttl
from torchrec_embcache.exceptions import CorruptionError, ReadOnlyError, StorageError


@contextlib.contextmanager
def filled(disk: str) -> Iterator[None]:
    """Meanwhile there is no room on this disk."""
    filler = Path(disk, "filler")
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    try:
        yield
    finally:
        filler.unlink()


def train(table: Any, steps: range) -> None:
    """Train 60 ids of its own in each step."""
    for step in steps:
        update(table(torch.arange(step * 60, step * 60 + 60)))


def test_call_for_several_tables_sweeps_none_if_one_cannot_write(tmp_path: Path, small_disk: str) -> None:
    policy = Policy([Ttl(steps=3)])
    model = nn.ModuleDict(
        {
            name: embedding(name=name, tiers=ssd_tiers(folder / "ssd"), eviction=policy)
            for name, folder in {"first": tmp_path, "second": Path(small_disk)}.items()
        }
    )
    for table in model.values():
        train(table, range(10))
        table.flush()
    with filled(small_disk), pytest.raises(StorageError) as failed:
        train(model["second"], range(10, 300))
    assert failed.value.errno == ENOSPC
    train(model["first"], range(10, 12))
    before = [Contents.of(table) for table in model.values()]
    with pytest.raises(ReadOnlyError, match="second") as refused:
        evict(model)
    assert refused.value.errno == ENOSPC
    assert [Contents.of(table) for table in model.values()] == before
    assert [table.stats().eviction.evicted for table in model.values()] == [0, 0]
    # A save is to rescue the rows of the second table, and sweeps the first.
    Saver(0).save(model, tmp_path / "saved")
    assert sorted(ids_of(model["first"])) == list(range(9 * 60, 12 * 60))
    loaded = nn.ModuleDict({name: embedding(name=name) for name in model})
    Saver(0).load(loaded, tmp_path / "saved")
    assert Contents.of(loaded["second"]) == before[1]
    assert Contents.of(loaded["first"]) == Contents.of(model["first"])
    evict(nn.ModuleDict({"first": model["first"]}))
    model["first"].close()
    with pytest.raises(ReadOnlyError):
        model["second"].close()


@pytest.mark.parametrize("rule", [Ttl(steps=6), Score(below=0.4)], ids=["time", "score"])
def test_a_sweep_whose_writes_fail_is_done_in_what_is_read_and_saved(
    tmp_path: Path, small_disk: str, rule: Any
) -> None:
    model = Expected(Policy([rule]))
    tiers = ssd_tiers(Path(small_disk, "ssd"))
    table = embedding(tiers=tiers, eviction=model.policy, score_half_life_steps=HALF_LIFE)
    for each in (table, model.table):
        train(each, range(20))
    table.flush()
    table.evict()
    model.sweep()
    with filled(small_disk), pytest.raises(StorageError) as failed:
        train(table, range(20, 300))
    assert failed.value.errno == ENOSPC
    steps = table.stats().step
    train(model.table, range(20, steps))
    # Ids whose rows died read what missing ones do.
    ids = [1, 75, 60 * steps - 1]
    with torch.no_grad():
        assert torch.equal(table(torch.tensor(ids)), model.read(ids))
    assert model.is_same(table)
    with pytest.raises(ReadOnlyError):
        table.evict()
    Saver(0).save(table, tmp_path / "saved")
    loaded = embedding()
    Saver(0).load(loaded, tmp_path / "saved")
    assert Contents.of(loaded) == Contents.of(model.table)
    with pytest.raises(ReadOnlyError):
        table.close()


def test_damaged_record_stops_only_the_sweep_that_reads_it(tmp_path: Path) -> None:
    model = Expected(Policy([Score(below=0.9)]))
    folder = tmp_path / "ssd"
    table = embedding(tiers=budgets("ssd", folder), eviction=model.policy, score_half_life_steps=HALF_LIFE)
    for each in (table, model.table):
        train(each, range(20))
    table.flush()
    segment, at, _ = place_of(folder, 3)
    flip(segment, at + 9)
    table.evict()
    model.sweep()
    for ids in ([1, 2, 1190], [10**6, 5], [1190, 1195]):
        out = table(torch.tensor(ids))
        update(out)
        assert torch.equal(out.detach(), model.train(ids)), ids
    assert table.stats().eviction.is_sweeping
    with pytest.raises(CorruptionError):
        update(table(torch.tensor([3])))
    stopped: dict[str, Callable[[], object]] = {
        "len": lambda: len(table),
        "flush": table.flush,
        "save": lambda: Saver(0).save(table, tmp_path / "saved"),
        "remove_rows": lambda: table.remove_rows([7]),
        "export": lambda: list(table.export()),
    }
    for name, call in stopped.items():
        with pytest.raises(CorruptionError, match="bring back the file as it was, or load a checkpoint") as raised:
            call()
        assert raised.value.filename == str(segment), name
        assert f"{segment} is damaged" in str(raised.value), name
    assert table.stats().pinned_rows == 0
    # The save has begun a sweep of its own. Where the disk was wrong for a while, it goes on.
    model.sweep()
    flip(segment, at + 9)
    assert model.is_same(table)
    assert not table.stats().eviction.is_sweeping
    table.close()


def test_a_load_ends_a_sweep_that_a_damaged_record_stops(tmp_path: Path) -> None:
    folder, policy = tmp_path / "ssd", Policy([Score(below=0.9)])
    table = embedding(tiers=budgets("ssd", folder), eviction=policy, score_half_life_steps=HALF_LIFE)
    train(table, range(2))
    Saver(0).save(table, tmp_path / "saved")
    saved = Contents.of(table)
    train(table, range(2, 20))
    table.flush()
    segment, at, _ = place_of(folder, 130)
    flip(segment, at + 9)
    table.evict()
    with pytest.raises(CorruptionError, match="is damaged"):
        len(table)
    Saver(0).load(table, tmp_path / "saved")
    assert Contents.of(table) == saved
    table.flush()
    train(table, range(20, 22))
    table.close()


def flip(path: Path, at: int) -> None:
    """Flip a bit of a byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
