"""Chains of deltas: every published one can be loaded."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from saver_cases import make_bag, root, rows
from tables import ssd_tiers
from torchrec_embcache import EmbCacheEmbeddingBag, Saver, TierBudgets, evict, eviction
from torchrec_embcache.checkpoint import Progress, saver
from torchrec_embcache.exceptions import ConfigError, CorruptionError, StateError

__all__ = ["root"]  # the fixture

LARGE = TierBudgets(host_bytes="8MiB")


def train(bag: EmbCacheEmbeddingBag, ids: range) -> None:
    bag(torch.tensor(ids).view(-1, 4)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ram", "ssd"])
def test_full_table_that_drops_loaded_rows_starts_a_new_chain(kind: str, root: Path, tmp_path: Path) -> None:
    saved = make_bag(tiers=LARGE)
    for first in range(0, 20_000, 4000):
        train(saved, range(first, first + 4000))
    Saver(0).save(saved, root)
    tiers = {"ram": TierBudgets(host_bytes="256KiB"), "ssd": ssd_tiers(tmp_path / "ssd", ssd_bytes="1MiB")}[kind]
    small = make_bag(tiers=tiers, on_full="evict")
    report = Saver(0).load(small, root)
    assert report.rows == {"item": len(small)}
    assert report.dropped == {"item": 20_000 - len(small)}
    assert len(small) < 20_000
    train(small, range(19_000, 19_400))
    again = Saver(0).save(small, root, incremental=True)
    assert again.kind == "full"
    assert "dropped rows while it was loaded" in str(again.reason)
    train(small, range(19_000, 19_040))
    assert Saver(0).save(small, root, incremental=True).kind == "delta"
    large = make_bag(tiers=LARGE)
    assert Saver(0).load(large, root).dropped == {}
    assert rows(large) == rows(small)


def test_unloadable_delta_is_saved_in_full_with_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, other = make_bag(), make_bag()
    train(saved, range(400))
    report = Saver(0).save(saved, root)
    train(other, range(40))
    # An error in the bookkeeping: the table says that it descends from the checkpoint, and does not have most of its rows.
    native = other.table._native_table
    (ancestor,) = saved.table._native_table.base_checkpoints()
    native.set_epoch(ancestor.next_epoch)
    native.record_base(ancestor)
    train(other, range(4))
    counts = native.count_changes(ancestor)
    assert (counts.rows, counts.tombstones, counts.swept, counts.expiring) == (40, 0, 0, 0)
    with caplog.at_level(logging.WARNING, "torchrec_embcache"):
        again = Saver(0).save(other, root, incremental=True)
    assert again.kind == "full"
    assert again.reason in caplog.text
    assert f"would find 400 rows or more of table item, which has 40: {report.checkpoint} has 400" in caplog.text
    loaded = make_bag()
    Saver(0).load(loaded, root)
    assert rows(loaded) == rows(other)


@pytest.mark.slow
def test_rows_that_left_do_not_keep_a_save_from_being_a_delta(root: Path) -> None:
    bag = make_bag(eviction=eviction.Policy([eviction.Ttl(steps=3)]))
    for first in range(0, 80, 8):
        train(bag, range(first, first + 8))
        bag.remove_rows(torch.tensor([first]))
        Saver(0).save(bag, root, incremental=True)
        if first:
            (*_, ancestor) = bag.table._native_table.base_checkpoints()
            assert bag.table._native_table.count_changes(ancestor).tombstones == 0
    train(bag, range(80, 88))
    bag.remove_rows(torch.tensor([80, 81]))
    (*_, ancestor) = bag.table._native_table.base_checkpoints()
    evict(bag)
    counts = bag.table._native_table.count_changes(ancestor)
    assert (counts.rows, counts.tombstones, counts.swept, counts.expiring) == (len(bag), 2 + 7, 0, 0), (
        "rows of the last four are listed"
    )
    assert Saver(0).save(bag, root, incremental=True).kind == "delta"
    loaded = make_bag()
    Saver(0).load(loaded, root)
    assert rows(loaded) == rows(bag)


def chain_of(bag: EmbCacheEmbeddingBag, root: Path, saves: int, ids: int, **how: Any) -> tuple[str, str | None]:
    """Save deltas of `ids` rows each. Returns the kinds of the saves, a letter each, and the reason of the last one."""
    kinds = ""
    for save in range(saves):
        train(bag, range(4 * save, 4 * save + ids))
        report = Saver(0).save(bag, root, incremental=True, **how)
        kinds += report.kind[0]
    return kinds, report.reason


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_every_nth_incremental_save_is_full(how: str, root: Path) -> None:
    bag = make_bag()
    train(bag, range(400))
    kinds = ""
    for _ in range(8):
        train(bag, range(4))
        call = getattr(Saver(0), how)(bag, root, incremental=True, full_every=3, keep=9)
        report = call if how == "save" else call.result(60)
        kinds += report.kind[0]
    assert kinds == "fddfddfd"
    kinds, reason = chain_of(bag, root, 3, 4, full_every=1)
    assert kinds == "fff"
    assert re.fullmatch(r"0 deltas build on 00000000\d\d-.* \(full_every=1\)", str(reason))
    assert len([entry for entry in root.iterdir() if entry.is_dir()]) == 1


@pytest.mark.slow
def test_chain_larger_than_its_base_ends_and_small_one_continues(root: Path, tmp_path: Path) -> None:
    bag = make_bag()
    train(bag, range(400))
    kinds, reason = chain_of(bag, root, 16, 40)
    assert kinds == "f" + "d" * 10 + "f" + "d" * 4, "ten deltas of 40 rows are 400"
    assert reason is None
    small = make_bag(tiers=LARGE)
    train(small, range(4000))
    assert chain_of(small, tmp_path / "long", 67, 4)[0] == "f" + "d" * 64 + "fd"
    assert chain_of(small, tmp_path / "never", 3, 4, full_every=None)[0] == "fdd"
    loaded = make_bag(tiers=LARGE)
    Saver(0).load(loaded, tmp_path / "never")
    assert rows(loaded) == rows(small)


@pytest.mark.parametrize("refused", [0, -1, 1.5, True, "always"])
def test_a_number_that_cannot_be_is_refused(refused: Any, root: Path) -> None:
    bag = make_bag()
    for call in (Saver(0).save, Saver(0).save_async):
        with pytest.raises(ConfigError, match="full_every"):
            call(bag, root, incremental=True, full_every=refused)
    assert not root.exists()


@pytest.mark.parametrize("gap", ["checkpoint", "manifest of a rank"])
def test_a_chain_with_a_gap_is_built_on_no_more(gap: str, root: Path) -> None:
    bag = make_bag()
    train(bag, range(400))
    names = []
    for save in range(3):
        train(bag, range(4 * save, 4 * save + 4))
        names.append(Saver(0).save(bag, root, incremental=True, keep=9).checkpoint)
    if gap == "checkpoint":
        shutil.rmtree(root / names[0])
    else:
        (root / names[0] / "0-of-1.json").unlink()
    train(bag, range(8))
    report = Saver(0).save(bag, root, incremental=True, keep=9)
    assert report.kind == "full"
    assert "damaged" in str(report.reason)
    loaded = make_bag()
    Saver(0).load(loaded, root)
    assert rows(loaded) == rows(bag)


# ---- chains that are broken


@pytest.mark.parametrize("damage", ["rows", "manifest", "missing", "latest"])
def test_a_broken_chain_loads_up_to_its_last_intact_link(damage: str, root: Path) -> None:
    bag = make_bag()
    train(bag, range(400))
    saved: dict[str, Any] = {}
    for save in range(4):
        train(bag, range(4 * save, 4 * save + 40))
        saved[Saver(0).save(bag, root, incremental=True, keep=9).checkpoint] = rows(bag)
    names = list(saved)
    if damage == "rows":
        (file,) = (root / names[2]).rglob("*.safetensors")
        cut_byte(file)
    elif damage == "manifest":
        cut_byte(root / names[2] / "manifest.json")
    elif damage == "missing":
        shutil.rmtree(root / names[2])
    else:
        (root / "LATEST").write_text("damaged\n")
    other = make_bag()
    train(other, range(8))
    before = rows(other)
    with pytest.raises(CorruptionError):
        Saver(0).load(other, root)
    if damage != "rows":
        assert rows(other) == before
    report = Saver(0).load(other, root, last_intact=True)
    expected = names[3] if damage == "latest" else names[1]
    assert report.checkpoint == expected
    assert rows(other) == saved[expected]
    gone = {"rows": names[:1:-1], "manifest": names[:1:-1], "missing": [names[3]], "latest": ["LATEST"]}[damage]
    assert list(report.skipped) == gone
    assert all(report.skipped.values())
    # A run that goes on from there saves in full, and that loads.
    train(other, range(8))
    assert Saver(0).save(other, root, incremental=True).kind == "full"
    again = make_bag()
    assert Saver(0).load(again, root, last_intact=True).skipped == {}
    assert rows(again) == rows(other)


def cut_byte(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


def test_where_no_checkpoint_is_whole_none_is_loaded(root: Path) -> None:
    bag = make_bag()
    train(bag, range(400))
    name = Saver(0).save(bag, root).checkpoint
    cut_byte(root / name / "manifest.json")
    before = rows(bag)
    with pytest.raises(CorruptionError, match=f"no checkpoint in .* is whole: .*{name}"):
        Saver(0).load(bag, root, last_intact=True)
    assert rows(bag) == before


# ---- chains that are merged while a run saves


def test_a_delta_builds_on_what_its_parent_was_merged_into_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag = make_bag()
    train(bag, range(400))
    for _ in range(2):
        train(bag, range(40))
        Saver(0).save(bag, root, incremental=True)
    train(bag, range(20, 80))
    bag.remove_rows(torch.tensor([1, 2]))
    write, merged = saver.write_tables, []

    def merge_first(*arguments: Any, **named: Any) -> Any:
        merged.append(Saver(0).compact(root))
        return write(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_tables", merge_first)
        report = Saver(0).save(bag, root, incremental=True)
    assert (report.kind, report.parent) == ("delta", merged[0].checkpoint)
    loaded = make_bag()
    assert Saver(0).load(loaded, root).deltas == 1
    assert rows(loaded) == rows(bag)
    train(bag, range(4))
    assert Saver(0).save(bag, root, incremental=True).parent == report.checkpoint


def test_a_merge_that_a_delta_overtakes_begins_again_with_it(root: Path) -> None:
    bag = make_bag()
    train(bag, range(400))
    for _ in range(2):
        train(bag, range(40))
        Saver(0).save(bag, root, incremental=True)
    saves = 0

    def save_meanwhile(_: Progress) -> None:
        nonlocal saves
        if saves < most:
            saves += 1
            train(bag, range(8))
            Saver(0).save(bag, root, incremental=True, full_every=None)

    most = 2
    report = Saver(0).compact(root, progress=save_meanwhile)
    assert (report.kind, saves) == ("full", 2)
    loaded = make_bag()
    assert Saver(0).load(loaded, root).checkpoint == report.checkpoint
    assert rows(loaded) == rows(bag)
    train(bag, range(8))
    assert Saver(0).save(bag, root, incremental=True).parent == report.checkpoint
    most = 1000
    with pytest.raises(StateError, match="save again"):
        Saver(0).compact(root, progress=save_meanwhile)
    Saver(0).load(loaded, root)
    assert rows(loaded) == rows(bag), "the deltas are there"
