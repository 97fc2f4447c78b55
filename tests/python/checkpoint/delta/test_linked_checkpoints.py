"""Linked checkpoints for a fast restart: SSD tiers are linked into the checkpoint, opened from it on the same ranks, and
converted for others.
"""

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from cli_cases import run
from processes import World
from saver_cases import OPTIMIZERS, data_files, loaded, make_bag, root, rows, tiers, train
from saver_rank_cases import IDS, Shards
from torchrec_embcache import EmbCacheStorageReader, TierBudgets, optimizers, serialize
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import ConfigError, CorruptionError, MismatchError, PathError, StateError

__all__ = ["root"]  # the fixture


def segments(place: Path) -> list[Path]:
    return sorted(place.rglob("*.seg"))


def links(place: Path) -> list[int]:
    return [path.stat().st_nlink for path in segments(place)]


def test_a_linked_save_links_the_segments_once_and_is_no_delta(root: Path, tmp_path: Path) -> None:
    bag = make_bag(tiers=tiers("ssd", tmp_path))
    train(bag)
    for _ in range(2):
        report = Saver(0).save(bag, root, linked=True)
        assert report.kind == "linked"
        assert report.linked_bytes > 0
        assert links(root) == [2] * len(segments(root))
    with pytest.raises(ConfigError, match="linked=True"):
        Saver(0).save(bag, root, incremental=True, linked=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
@pytest.mark.parametrize("kind", ["ssd", "device"])
def test_linked_restart_is_bit_for_bit_and_rewrites_no_row(
    kind: str, optimizer: optimizers.OptimizerSpec, root: Path, tmp_path: Path
) -> None:
    bag = make_bag(optimizer=optimizer, tiers=tiers(kind, tmp_path))
    train(bag, 10)
    report = Saver(0).save(bag, root, linked=True)
    before = rows(bag)
    assert (report.kind, report.parent, report.reason, report.rows) == ("linked", None, None, len(before))
    assert report.linked_bytes == sum(path.stat().st_size for path in segments(root)) > 0
    assert report.copied_bytes == 0
    assert data_files(root) == []
    files = {path: path.read_bytes() for path in segments(root)}
    # Training goes on, over flushes and a resume. The linked checkpoint does not change.
    for seed in range(1, 5):
        train(bag, 5, seed=seed, ids=200)
        bag.table.flush()
    straight_step = bag.table.step()
    bag.close()
    resumed = make_bag(optimizer=optimizer, tiers=tiers(kind, tmp_path))
    train(resumed, 10, seed=5, ids=200)
    assert resumed.table.step() == straight_step + 10
    resumed.close()
    assert {path: path.read_bytes() for path in segments(root)} == files
    (tmp_path / "restarted").mkdir()
    other = make_bag(optimizer=optimizer, tiers=tiers(kind, tmp_path / "restarted"))
    train(other, 3, seed=9)  # contents that the load replaces
    found = Saver(0).load(other, root)
    assert (found.checkpoint, found.rows) == (report.checkpoint, {"item": len(before)})
    assert rows(other) == before
    assert other.table.step() == 10
    assert set(links(tmp_path / "restarted")) <= {2, 3}
    straight = make_bag(optimizer=optimizer)
    train(straight, 10)
    straight.table._native_table.set_epoch(other.table._native_table.epoch())
    for module in (straight, other):
        train(module, 10, seed=1, ids=200)
    assert rows(other) == rows(straight)
    # The loaded rows are flushed and resumed like any others.
    after = rows(other)
    other.close()
    again = make_bag(optimizer=optimizer, tiers=tiers(kind, tmp_path / "restarted"))
    assert rows(again) == after
    assert {path: path.read_bytes() for path in segments(root)} == files


def test_deltas_do_not_build_on_a_retained_linked_checkpoint(root: Path, tmp_path: Path) -> None:
    bag = make_bag(tiers=tiers("ssd", tmp_path))
    train(bag)
    first = Saver(0).save(bag, root, keep=3)
    linked = Saver(0).save(bag, root, linked=True, keep=3)
    train(bag, seed=1)
    second = Saver(0).save(bag, root, incremental=True, keep=3)
    assert second.kind == "full"
    assert second.reason is not None
    assert linked.checkpoint in second.reason
    train(bag, seed=2)
    assert Saver(0).save(bag, root, incremental=True, keep=3).kind == "delta"
    assert loaded(root) == rows(bag)
    assert {first.checkpoint, linked.checkpoint} <= set(os.listdir(root)) | {first.checkpoint}
    with pytest.raises(ConfigError, match="linked=True"):
        Saver(0).save(bag, root, incremental=True, linked=True)
    # A linked checkpoint that was loaded is no ancestor. The sweep removes it with its own segments and without those of the tier.
    Saver(0).load(bag, root, checkpoint=linked.checkpoint)
    assert Saver(0).save(bag, root, incremental=True).kind == "full"
    assert segments(root) == []
    train(bag, seed=3)
    Saver(0).save(bag, root)
    assert loaded(root) == rows(bag)


def test_a_table_without_an_ssd_tier_beside_one_with(root: Path, tmp_path: Path) -> None:
    def model(place: Path) -> nn.ModuleDict:
        place.mkdir(exist_ok=True)
        return nn.ModuleDict({"ram": make_bag("a"), "ssd": make_bag("b", tiers=tiers("ssd", place))})

    saved = model(tmp_path / "one")
    for bag in saved.values():
        train(bag)
    report = Saver(0).save(saved, root, linked=True)
    assert report.rows == sum(len(bag) for bag in saved.values())
    assert report.linked_bytes > 0
    assert len(data_files(root)) > 0
    other = model(tmp_path / "two")
    Saver(0).load(other, root)
    assert all(rows(other[name]) == rows(saved[name]) for name in saved)
    # Only the table that was saved in files can be loaded anywhere.
    lone = nn.ModuleDict({"ram": make_bag("a", tiers=tiers("ssd", tmp_path)), "ssd": make_bag("b")})
    with pytest.raises(MismatchError, match="embcache compact"):
        Saver(0).load(lone, root)
    assert len(lone["ram"]) == len(lone["ssd"]) == 0
    Saver(0).load(lone, root, tables=["ram/a"])
    assert rows(lone["ram"]) == rows(saved["ram"])


def test_the_command_shows_checks_and_converts_a_linked_checkpoint(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = make_bag(tiers=tiers("ssd", tmp_path))
    train(bag)
    Saver(0).save(bag, root, linked=True)
    code, found = run(capsys, "inspect", root)
    assert (code, found["checkpoints"][0]["kind"], found["checkpoints"][0]["rows"]) == (0, "linked", len(bag))
    assert run(capsys, "verify", root)[0] == 0
    assert run(capsys, "reshard", root, tmp_path / "divided", "--world-size", 3)[0] == 0
    assert loaded(tmp_path / "divided") == rows(bag)
    assert run(capsys, "diff", root, tmp_path / "divided")[0] == 0
    assert run(capsys, "compact", root)[0] == 0
    assert segments(root) == []
    code, found = run(capsys, "inspect", root)
    assert (code, [entry["kind"] for entry in found["checkpoints"]]) == (0, ["full"])
    assert loaded(root) == rows(bag)


@pytest.mark.parametrize("layout", ["safetensors", "npy"])
def test_linked_checkpoint_converts_to_plain_files_and_back(
    layout: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = make_bag(tiers=tiers("ssd", tmp_path))
    train(bag)
    Saver(0).save(bag, root, linked=True)
    assert run(capsys, "convert", root, tmp_path / "plain", "--to", layout)[0] == 0
    assert run(capsys, "convert", tmp_path / "plain", tmp_path / "back", "--to", "embcache")[0] == 0
    assert loaded(tmp_path / "back") == rows(bag)
    # `convert` does not convert from this package's layout to the same.
    code, found = run(capsys, "convert", root, tmp_path / "again", "--to", "embcache")
    assert code == 3
    assert "`reshard` and `compact`" in found["error"]["message"]
    assert not (tmp_path / "again").exists()


def test_doors_that_do_not_take_linked_checkpoints_say_what_does(root: Path, tmp_path: Path) -> None:
    bag = make_bag(tiers=tiers("ssd", tmp_path))
    train(bag)
    Saver(0).save(bag, root, linked=True)
    (tmp_path / "other").mkdir()
    other = make_bag(tiers=tiers("ssd", tmp_path / "other"))
    train(other, seed=4)
    before = rows(other)
    with (
        pytest.warns(UserWarning, match=r"torch\.distributed"),
        pytest.raises(CheckpointException, match="tables only: load it with Saver"),
    ):
        dcp.load({}, storage_reader=EmbCacheStorageReader(root, other))
    with pytest.raises(PathError, match="no RecIS-format checkpoint"):
        serialize.Loader(str(root), hashtables={"item": other}).load()
    with pytest.raises(TypeError, match="linked"):
        Saver(0).save_async(bag, root, linked=True)  # type: ignore[call-arg]
    assert rows(other) == before
    Saver(0).load(other, root)
    assert rows(other) == rows(bag)


def test_damage_changes_nothing_or_is_found_by_verify(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = make_bag(tiers=tiers("ssd", tmp_path))
    train(bag)
    Saver(0).save(bag, root, linked=True)
    file = max(segments(root), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    (tmp_path / "other").mkdir()
    other = make_bag(tiers=tiers("ssd", tmp_path / "other"))
    train(other, seed=4)
    before = rows(other)
    file.unlink()  # The tier's own name keeps its bytes.
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-4096], b""):
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError):
            Saver(0).load(other, root)
        assert rows(other) == before
        assert run(capsys, "verify", root)[0] == 1
    file.write_bytes(whole[:400] + bytes([whole[400] ^ 1]) + whole[401:])
    assert run(capsys, "verify", root)[0] == 1
    file.write_bytes(whole)
    assert run(capsys, "verify", root)[0] == 0
    Saver(0).load(other, root)
    assert rows(other) == rows(bag)


def test_a_tier_that_is_too_small_is_refused_before_anything_changes(root: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir(mode=0o750)
    bag = make_bag(tiers=TierBudgets(host_bytes="1MiB", ssd_bytes="8MiB", ssd_dir=tmp_path / "large"))
    bag.import_rows(torch.arange(20_000), torch.ones(20_000, 4))
    Saver(0).save(bag, root, linked=True)
    (tmp_path / "small").mkdir(mode=0o750)
    small = TierBudgets(host_bytes="256KiB", ssd_bytes="512KiB", ssd_dir=tmp_path / "small")
    other = make_bag(tiers=small)
    train(other)
    before = rows(other)
    with pytest.raises(ConfigError, match="ssd_bytes"):
        Saver(0).load(other, root)
    assert rows(other) == before


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second file system")
def test_segments_are_copied_across_file_systems_and_reported(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        os.chmod(place, 0o700)
        bag = make_bag(tiers=TierBudgets(host_bytes=3000, ssd_bytes="4MiB", ssd_dir=place))
        train(bag)
        with caplog.at_level(logging.WARNING):
            report = Saver(0).save(bag, root, linked=True)
        assert report.linked_bytes == 0
        assert report.copied_bytes == sum(path.stat().st_size for path in segments(root)) > 0
        assert "copied" in caplog.text
        before = rows(bag)
        bag.close()
        other = make_bag(tiers=TierBudgets(host_bytes=3000, ssd_bytes="4MiB", ssd_dir=place, reopen="discard"))
        Saver(0).load(other, root)
        assert rows(other) == before
        other.close()


class OnSsd(Shards):
    """The same as `Shards`, with an SSD tier for each."""

    def __init__(self, rank: int, size: int, place: str) -> None:
        super().__init__(rank, size)
        for table in self._tables.values():
            tiers = TierBudgets(host_bytes="64KiB", ssd_bytes="4MiB", ssd_dir=place)
            table._settings = replace(table._settings, tiers=tiers)


def save_and_restart(rank: int, size: int, path: str, place: str) -> list[Any]:
    saved = OnSsd(rank, size, f"{place}/saved")
    saved.fill(IDS)
    report = Saver().save(saved, path, linked=True)
    assert report.linked_bytes > 0
    again = OnSsd(rank, size, f"{place}/again")
    Saver().load(again, path)
    assert {table.step() for table in again.tables.values()} == {42}
    assert sorted(again.contents()) == sorted(saved.contents())
    return sorted(again.contents())


def test_the_same_ranks_restart_and_others_are_told_how_to_convert(
    two_ranks: World, root: Path, tmp_path: Path
) -> None:
    for name in ("saved", "again", "alone"):
        (tmp_path / name).mkdir(mode=0o750)
    parts = two_ranks.run(save_and_restart, str(root), str(tmp_path))
    alone = OnSsd(0, 1, str(tmp_path / "alone"))
    with pytest.raises(MismatchError, match="embcache compact"):
        Saver(0).load(alone, root)
    assert alone.contents() == []
    Saver(0).compact(root)
    Saver(0).load(alone, root)
    assert sorted(alone.contents()) == sorted(row for part in parts for row in part)


def test_failed_linked_load_poisons_tables_until_one_succeeds(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag = make_bag(tiers=tiers("ssd", tmp_path))
    train(bag)
    Saver(0).save(bag, root, linked=True)
    (tmp_path / "other").mkdir()
    other = make_bag(tiers=tiers("ssd", tmp_path / "other"))
    train(other, seed=4)
    adopt = type(other.table)._adopt

    def fail(self: Any, *given: Any) -> bool:
        path = segments(root)[0]
        path.rename(path.with_suffix(".away"))
        try:
            return adopt(self, *given)
        finally:
            path.with_suffix(".away").rename(path)

    with monkeypatch.context() as patch:
        patch.setattr(type(other.table), "_adopt", fail)
        with pytest.raises(Exception, match="seg"):
            Saver(0).load(other, root)
    with pytest.raises(StateError, match="load one that is whole"):
        rows(other)
    Saver(0).load(other, root)
    assert rows(other) == rows(bag)
