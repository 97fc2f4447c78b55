"""Deltas contain all changes since the previous checkpoint, after any history."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from processes import World
from saver_cases import OPTIMIZERS, loaded, make_bag, root, rows, tiers, train
from saver_rank_cases import IDS, Shards, weights_of
from tables import bucket_of
from torchrec_embcache import TierBudgets, _native, initializers, optimizers
from torchrec_embcache.checkpoint import LoadReport, Progress, Saver
from torchrec_embcache.exceptions import ConfigError, CorruptionError, InputError, MismatchError, PathError, StateError

__all__ = ["root"]  # the fixture


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
@pytest.mark.parametrize("kind", ["ram", "ssd", "device"])
def test_deltas_hold_what_was_trained_imported_and_removed(
    kind: str, optimizer: optimizers.OptimizerSpec, root: Path, tmp_path: Path
) -> None:
    bag = make_bag(optimizer=optimizer, tiers=tiers(kind, tmp_path))
    train(bag, 20)
    everything = len(bag)
    assert Saver(0).save(bag, root).kind == "full"
    for step in range(1, 4):
        train(bag, 1, seed=step, ids=10 + step)
        gone = torch.tensor([step, -30 - step, 12345])
        bag.remove_rows(gone)
        bag.import_rows(torch.tensor([2000 + step, 40]), torch.full((2, 4), float(step)))
        report = Saver(0).save(bag, root, incremental=True)
        assert (report.kind, report.reason) == ("delta", None)
        assert 2 <= report.rows <= 26 < everything
        assert report.tombstones == 2
        assert loaded(root, optimizer=optimizer) == rows(bag)
    other = make_bag(optimizer=optimizer)
    found = Saver(0).load(other, root)
    assert (found.deltas, found.rows, found.checkpoint) == (3, {"item": len(bag)}, report.checkpoint)
    assert other.table.step() == bag.table.step() == 23
    # The model that loaded goes on with deltas, on the same chain.
    train(other, 1, seed=9)
    assert Saver(0).save(other, root, incremental=True).parent == report.checkpoint
    assert loaded(root, optimizer=optimizer) == rows(other)
    # So the chain belongs to the first model no more. That one saves everything, and says so.
    again = Saver(0).save(bag, root, incremental=True)
    assert again.kind == "full"
    assert "another run" in str(again.reason)
    assert loaded(root, optimizer=optimizer) == rows(bag)


def test_the_first_delta_is_full_and_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def levels() -> list[str]:
        return [record.levelname for record in caplog.records if "saved in full" in record.getMessage()]

    bag = make_bag()
    train(bag)
    with caplog.at_level(logging.INFO, "torchrec_embcache"):
        report = Saver(0).save(bag, root, incremental=True)
        assert report.kind == "full"
        assert report.reason == "there is no checkpoint yet"
        assert levels() == ["INFO"], "every run begins so"
        two = nn.ModuleDict({"a": bag, "b": make_bag("other")})
        Saver(0).save(nn.ModuleDict({"a": bag}), root)
        assert "other tables" in str(Saver(0).save(two, root, incremental=True).reason)
    assert levels() == ["INFO", "WARNING"]
    assert Saver(0).save(two, root, incremental=True).kind == "delta", "with nothing in it"
    (name,) = (path for path in root.iterdir() if path.is_dir() and path.name.startswith("0000000004"))
    (name / "manifest.json").write_text("damaged")
    assert "damaged" in str(Saver(0).save(two, root, incremental=True).reason)


@pytest.mark.parametrize("ssd", [False, True])
def test_rows_that_a_full_table_drops_are_not_brought_back(ssd: bool, root: Path, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir(mode=0o750)
    small: dict[str, Any] = {"ssd_bytes": 262144, "ssd_dir": str(tmp_path / "ssd")} if ssd else {}
    bag = make_bag(tiers=TierBudgets(host_bytes=8000, **small), on_full="evict")
    train(bag, 40, ids=3000)
    Saver(0).save(bag, root)
    dropped = bag.stats().dropped_rows
    train(bag, 300, seed=1, ids=3000)
    assert bag.stats().dropped_rows > dropped
    report = Saver(0).save(bag, root, incremental=True)
    if report.kind == "delta":
        assert report.tombstones > 0
    else:
        assert "remembered" in str(report.reason)
    assert loaded(root) == rows(bag)
    assert ssd or report.kind == "delta"


def test_a_save_that_fails_loses_nothing_for_the_next_delta(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bag = make_bag()
    train(bag)
    Saver(0).save(bag, root)
    train(bag, 1, seed=1)
    bag.remove_rows(torch.tensor([5]))

    def full(*_arguments: object, **_settings: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_native, "CheckpointWriter", full)
        with pytest.raises(OSError, match="No space left"):
            Saver(0).save(bag, root, incremental=True)
    with pytest.raises(RuntimeError, match="stopped"):
        Saver(0).save(bag, root, incremental=True, progress=stop)
    train(bag, 1, seed=2)
    assert Saver(0).save(bag, root, incremental=True).kind == "delta"
    assert loaded(root) == rows(bag)


def stop(_: Progress) -> None:
    raise RuntimeError("stopped")


def test_a_flush_keeps_what_a_delta_needs(root: Path, tmp_path: Path) -> None:
    settings = {"tiers": tiers("ssd", tmp_path)}
    with make_bag(**settings) as bag:
        train(bag, 20)
        Saver(0).save(bag, root)
        train(bag, 1, seed=1)
        bag.remove_rows(torch.tensor([7, 8]))
    bag = make_bag(**settings)
    train(bag, 1, seed=2)
    report = Saver(0).save(bag, root, incremental=True)
    assert (report.kind, report.tombstones) == ("delta", 2)
    assert loaded(root) == rows(bag)
    bag.flush()
    train(bag, 1, seed=3)
    Saver(0).save(bag, root, incremental=True)
    newest = rows(bag)
    bag.table._native_table.close()  # like a kill: the flush before the last save is resumed
    with make_bag(**settings) as bag:
        report = Saver(0).save(bag, root, incremental=True)
        assert report.kind == "full", "what the newest has is not known here"
        assert loaded(root) == rows(bag) != newest


def test_checkpoints_are_kept_with_what_they_build_on_and_can_be_named(root: Path) -> None:
    bag = make_bag()
    saved = {}
    for step, incremental in enumerate([False, True, True, False, True]):
        train(bag, 1, seed=step)
        report = Saver(0).save(bag, root, incremental=incremental, keep=2)
        saved[report.checkpoint] = rows(bag)
        assert (report.kind == "delta") == incremental
    there = {path.name for path in root.iterdir() if path.is_dir()}
    assert there == set(list(saved)[3:]), "the last two, the second on the first"
    for name in there:
        other = make_bag()
        assert Saver(0).load(other, root, checkpoint=name).checkpoint == name
        assert rows(other) == saved[name]
    with pytest.raises(InputError, match="checkpoint="):
        Saver(0).load(bag, root, checkpoint="../x")
    Saver(0).save(bag, root)
    before = rows(bag)
    with pytest.raises(PathError, match=f"no checkpoint {name} .*keep="):
        Saver(0).load(bag, root, checkpoint=name)
    assert rows(bag) == before
    with pytest.raises(ConfigError, match="keep"):
        Saver(0).save(bag, root, keep=0)


def test_a_run_goes_on_from_what_was_merged_meanwhile(root: Path) -> None:
    bag = make_bag()
    train(bag)
    Saver(0).save(bag, root)
    for seed in (1, 2):
        train(bag, 1, seed=seed)
        newest = Saver(0).save(bag, root, incremental=True)
    told: list[Progress] = []
    merged = Saver(0).compact(root, progress=told.append)
    assert (merged.kind, merged.rows) == ("full", len(bag))
    assert (told[-1].rows, told[-1].total_rows) == (len(bag), len(bag))
    assert [path.name for path in root.iterdir() if path.is_dir()] == [merged.checkpoint]
    assert merged.checkpoint > newest.checkpoint
    assert loaded(root) == rows(bag)
    assert Saver(0).compact(root).checkpoint == merged.checkpoint, "there is nothing to do"
    train(bag, 1, seed=3)
    report = Saver(0).save(bag, root, incremental=True)
    assert (report.kind, report.parent) == ("delta", merged.checkpoint)
    assert loaded(root) == rows(bag)


def test_chain_with_a_gap_or_foreign_link_is_rejected_untouched(root: Path, tmp_path: Path) -> None:
    names = []
    for path in (root, tmp_path / "other"):
        bag = make_bag()
        train(bag)
        names.append(Saver(0).save(bag, path).checkpoint)
        train(bag, 1, seed=1)
        Saver(0).save(bag, path, incremental=True)
    other = make_bag()
    train(other, seed=5)
    before = rows(other)
    os.rename(root / names[0], tmp_path / "aside")
    with pytest.raises(CorruptionError, match="builds on"):
        Saver(0).load(other, root)
    os.rename(tmp_path / "other" / names[1], root / names[0])
    with pytest.raises(CorruptionError):
        Saver(0).load(other, root)
    assert rows(other) == before
    os.rename(root / names[0], tmp_path / "foreign")
    os.rename(tmp_path / "aside", root / names[0])
    Saver(0).load(other, root)


def test_a_save_that_another_run_overtook_is_refused_and_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torchrec_embcache.checkpoint.saver as module

    bag, other = make_bag(), make_bag()
    train(bag)
    Saver(0).save(bag, root)
    Saver(0).load(other, root)
    train(bag, 1, seed=1)
    train(other, 1, seed=2)
    write = module.write_tables

    def overtaken(*arguments: Any, **named: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_tables", write)
            Saver(0).save(other, root, incremental=True)
        return write(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tables", overtaken)
        with caplog.at_level(logging.INFO), pytest.raises(StateError, match="save again"):
            Saver(0).save(bag, root, incremental=True)
    assert "unfinished" not in caplog.text
    assert len([entry for entry in root.iterdir() if entry.is_dir()]) == 2, (
        "the first one and the delta of the other run"
    )
    assert loaded(root) == rows(other)
    assert Saver(0).save(bag, root, incremental=True).kind == "full"
    assert loaded(root) == rows(bag)


# ---- what is loaded


def model(**bags: str) -> nn.ModuleDict:
    return nn.ModuleDict({module: make_bag(table) for module, table in bags.items()})


def test_loads_of_some_tables_under_other_names_report_what_they_did(root: Path) -> None:
    saved = model(a="one", b="two", c="three")
    for seed, bag in enumerate(saved.values()):
        train(bag, seed=seed)
    name = Saver(0).save(saved, root).checkpoint
    fresh = model(a="one", b="two", d="four")
    with pytest.raises(MismatchError, match="strict=False"):
        Saver(0).load(fresh, root)
    report = Saver(0).load(fresh, root, strict=False)
    counts = {pair: len(saved[pair[0]]) for pair in ("a/one", "b/two")}
    rates = {pair: {"lr": 0.1} for pair in counts}
    assert report == LoadReport(name, 0, counts, ("d/four",), ("c/three",), {}, hyperparameters=rates)
    assert len(fresh["d"]) == 0
    report = Saver(0).load(fresh, root, rename={"c/three": "four"})
    assert report.renamed == {"c/three": "d/four"}
    assert report.tables == ("a/one", "b/two", "d/four")
    assert rows(fresh["d"]) == rows(saved["c"])
    one = model(a="one", b="two")
    train(one["a"], seed=8)
    before = rows(one["a"])
    report = Saver(0).load(one, root, tables=["two"])
    assert (report.tables, report.missing, report.unexpected) == (("b/two",), (), ())
    assert rows(one["a"]) == before
    assert rows(one["b"]) == rows(saved["b"])
    assert Saver(0).save(one, root, incremental=True).kind == "full", "the tables are of different checkpoints"


def test_run_with_another_seed_and_initializer_adds_deltas(root: Path) -> None:
    bag = make_bag()
    train(bag)
    Saver(0).save(bag, root)
    changed = {"seed": 8, "initializer": initializers.Normal(0.0, 1.0)}
    other = make_bag(**changed)
    Saver(0).load(other, root)
    train(other, 1, seed=1, ids=90)
    assert Saver(0).save(other, root, incremental=True).kind == "delta"
    assert loaded(root) == loaded(root, **changed) == rows(other)
    Saver(0).compact(root)
    assert loaded(root) == rows(other)


def test_what_was_loaded_under_another_name_is_saved_in_full_and_loads(root: Path) -> None:
    saved = model(a="one", b="two", c="three")
    for seed, bag in enumerate(saved.values()):
        train(bag, seed=seed)
    Saver(0).save(saved, root)
    # The first and the second table are exchanged, and the rows of one are put a second time over those of a saved table.
    for model_, arguments in (
        (model(a="one", b="two", c="three"), {"rename": {"a/one": "b/two", "b/two": "a/one"}}),
        (saved, {"tables": ["c/three"], "rename": {"a/one": "c/three"}}),
    ):
        Saver(0).load(model_, root, **arguments)
        train(model_["c"], 1, seed=9)
        before = {name: rows(bag) for name, bag in model_.items()}
        report = Saver(0).save(model_, root, incremental=True)
        assert (report.kind, "is not known" in str(report.reason)) == ("full", True)
        again = model(a="one", b="two", c="three")
        Saver(0).load(again, root)
        assert {name: rows(bag) for name, bag in again.items()} == before
        train(again["a"], 1)
        assert Saver(0).save(again, root, incremental=True).kind == "delta"
        Saver(0).save(saved, root)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tables": "one"}, "collection"),
        ({"tables": ["none"]}, "'none' is not a table of the model: give one of a/one, b/one"),
        ({"tables": ["one"]}, "several tables"),
        ({"rename": {"none": "a/one"}}, "the checkpoint"),
        ({"rename": {"a/one": "c/one"}}, "the model"),
        ({"rename": {"a/one": "a/one", "b/one": "a/one"}}, "twice"),
        ({"rename": [("a/one", "b/one")]}, "rename is a list"),
        ({"progress": 3}, "progress"),
    ],
)
def test_bad_arguments_of_a_load_are_named(arguments: dict[str, Any], words: str, root: Path) -> None:
    bags = model(a="one", b="one")
    Saver(0).save(bags, root)
    with pytest.raises((InputError, ConfigError), match=words):
        Saver(0).load(bags, root, **arguments)


def test_progress_is_told_of_every_row_and_shown_as_a_bar(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bags = model(a="one", b="two")
    for bag in bags.values():
        train(bag)
    total = sum(len(bag) for bag in bags.values())
    for work in (Saver(0).save, Saver(0).load):
        told: list[Progress] = []
        work(bags, root, progress=told.append)
        assert (told[0].rows, told[-1].rows, told[-1].total_rows) == (0, total, total)
        assert {one.table for one in told} == {"a/one", "b/two"}
        assert sorted(one.rows for one in told) == [one.rows for one in told]
        capfd.readouterr()
        work(bags, root, progress=True)
        assert work.__name__ in capfd.readouterr().err


# ---- ranks


def save_in_steps(rank: int, size: int, path: str) -> list[str]:
    shards = Shards(rank, size)
    kinds = []
    for step in range(3):
        shards.fill(IDS if step == 0 else IDS[step::50])
        for table in shards.tables.values():
            if step > 0:
                begin, end = table.buckets
                gone = [
                    row_id
                    for row_id in range(step * 7, step * 7 + 5)
                    if begin <= bucket_of(row_id, table.total_num_buckets) < end
                ]
                table.remove_rows(torch.tensor(gone, dtype=torch.int64))
        kinds.append(Saver().save(nn.ModuleDict({"shards": shards}), path, incremental=True).kind)
    return kinds


def load_and_go_on(rank: int, size: int, path: str) -> tuple[Any, str]:
    shards = Shards(rank, size)
    model = nn.ModuleDict({"shards": shards})
    Saver().load(model, path)
    contents = shards.contents()
    return contents, Saver().save(model, path, incremental=True).kind


def merge(rank: int, size: int, path: str) -> str:
    assert rank < size
    return Saver(rank).compact(path).checkpoint


def save_on_a_damaged_chain(rank: int, size: int, path: str) -> list[str]:
    """Saves of two ranks, before the last of which a manifest of the chain that only rank 1 checks goes missing."""
    shards = Shards(rank, size)
    model, kinds = nn.ModuleDict({"shards": shards}), []
    for step in range(3):
        shards.fill(IDS if step == 0 else IDS[step::50])
        report = Saver().save(model, path, incremental=True)
        kinds.append(report.kind)
        if step == 1 and rank == 1:
            (manifest,) = Path(path).glob("0000000001-*/1-of-2.json")
            manifest.unlink()
        dist.barrier()
    return [*kinds, str(report.reason)]


def test_damage_that_one_rank_finds_in_a_chain_makes_the_save_of_all_full(two_ranks: World, tmp_path: Path) -> None:
    for *kinds, reason in two_ranks.run(save_on_a_damaged_chain, str(tmp_path / "sparse")):
        assert kinds == ["full", "delta", "full"]
        assert "1-of-2.json is damaged" in reason


@pytest.mark.parametrize("merging", [False, True])
def test_two_ranks_save_deltas_that_three_load_and_go_on_from(
    merging: bool, two_ranks: World, three_ranks: World, four_ranks: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "sparse")
    assert two_ranks.run(save_in_steps, path) == [["full", "delta", "delta"]] * 2
    gone = {row_id for step in (1, 2) for row_id in range(step * 7, step * 7 + 5)}
    back = set(IDS[2::50].tolist()) - set(range(14, 19))
    expected = sorted(
        (name, row_id, weights_of(torch.tensor([row_id]))[0].tolist(), float(torch.tensor(row_id).to(torch.float32)))
        for name in ("spread", "whole")
        for row_id in IDS.tolist()
        if row_id not in gone or row_id in back
    )
    if merging:
        assert len(set(four_ranks.run(merge, path))) == 1
    results = three_ranks.run(load_and_go_on, path)
    assert sorted(row for contents, _ in results for row in contents) == expected
    assert [kind for _, kind in results] == ["delta"] * 3
