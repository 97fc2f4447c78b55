"""Async saves: the checkpoint has the state of the call, deltas continue from it, and the future reports an error."""

import itertools
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from processes import Child, World
from saver_cases import OPTIMIZERS, loaded, make_bag, root, rows, tiers, train
from saver_rank_cases import IDS, Shards, weights_of
from tables import bucket_of
from torchrec_embcache import _native, _saves_in_flight, optimizers
from torchrec_embcache._dist.ranks import SingleRank
from torchrec_embcache._paths import open_to_save
from torchrec_embcache.checkpoint import Progress, Saver, SaveReport, _background
from torchrec_embcache.checkpoint._async import TableSnapshots
from torchrec_embcache.exceptions import ConfigError, EmbCacheError, InputError, PathError, StateError, StorageError

__all__ = ["root"]  # the fixture

SECONDS = 600.0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make saves beside training wait, before they write anything, until this is set."""
    go = threading.Event()
    monkeypatch.setattr(_background._native, "work_in_background", lambda: go.wait(SECONDS))
    yield go
    go.set()


def files(root: Path, report: SaveReport) -> dict[str, bytes]:
    """The contents of a checkpoint without its manifests, which contain its name."""
    return {path.name: path.read_bytes() for path in (root / report.checkpoint).rglob("*.safetensors")}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
@pytest.mark.parametrize(
    ("kind", "kernels"), [("ram", "core"), ("ssd", "core"), ("device", "core"), ("device", "torch")]
)
def test_checkpoint_is_the_state_at_the_call_and_deltas_follow(
    kind: str,
    kernels: str,
    optimizer: optimizers.OptimizerSpec,
    root: Path,
    tmp_path: Path,
    held: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EMBCACHE_KERNELS", kernels)
    bag = make_bag(optimizer=optimizer, tiers=tiers(kind, tmp_path))
    train(bag, 10)
    blocking = Saver(0).save(bag, tmp_path / "blocking", keep=9)
    before = rows(bag)
    future = Saver(0).save_async(bag, root, keep=9)
    train(bag, 10, seed=1, ids=90)
    bag.remove_rows(torch.tensor([3, -4, 5]))
    assert rows(bag) != before
    assert not future.done()
    held.set()
    report = future.result(SECONDS)
    assert (report.kind, report.parent, report.rows, report.tombstones) == ("full", None, len(before), 0)
    if kind == "ram":
        assert files(root, report) == files(tmp_path / "blocking", blocking), "the same bytes"
    other = make_bag(optimizer=optimizer)
    Saver(0).load(other, root)
    assert rows(other) == before
    assert other.table.step() == 10
    # Rows that were trained or removed since the call are in the next delta, which may be saved asynchronously too.
    bag.remove_rows(torch.tensor([7]))
    left = 4 - sum(row_id in rows(bag) for row_id in (3, -4, 5, 7))
    first = Saver(0).save(bag, root, incremental=True, keep=9)
    assert (first.kind, first.parent, first.reason) == ("delta", report.checkpoint, None)
    assert first.tombstones >= left > 0
    assert first.rows < len(before) + 180
    after = rows(bag)
    assert loaded(root, optimizer=optimizer) == after
    held.clear()
    train(bag, 2, seed=2, ids=20)
    bag.remove_rows(torch.tensor([11, -12]))
    changed = rows(bag)
    future = Saver(0).save_async(bag, root, incremental=True, keep=9)
    train(bag, 3, seed=3, ids=90)
    bag.remove_rows(torch.tensor([13]))
    held.set()
    second = future.result(SECONDS)
    assert (second.kind, second.parent) == ("delta", first.checkpoint)
    assert second.rows <= 48
    assert loaded(root, optimizer=optimizer) == changed
    third = Saver(0).save(bag, root, incremental=True, keep=9)
    assert (third.kind, third.parent) == ("delta", second.checkpoint)
    assert loaded(root, optimizer=optimizer) == rows(bag)
    assert not list(root.rglob("*.preimages"))


@pytest.mark.slow
def test_rows_beyond_memory_are_spilled_until_they_are_written(root: Path, held: threading.Event) -> None:
    bag = make_bag(embedding_dim=512, tiers=beside_ram())
    ids = torch.arange(40_000)
    bag.import_rows(ids, torch.arange(40_000.0)[:, None].expand(-1, 512))
    future = Saver(0).save_async(bag, root)
    bag.import_rows(ids, torch.zeros(40_000, 512))
    (spilled,) = root.rglob("*.preimages")
    assert spilled.stat().st_size > 30 << 20
    held.set()
    assert future.result(SECONDS).rows == 40_000
    assert not spilled.exists()
    again = make_bag(embedding_dim=512, tiers=beside_ram())
    Saver(0).load(again, root)
    found = again.read_rows(ids)
    assert torch.equal(found.weights, torch.arange(40_000.0)[:, None].expand(-1, 512))


def beside_ram() -> Any:
    from torchrec_embcache import TierBudgets

    return TierBudgets(host_bytes="128MiB")


def test_saves_loads_and_closing_wait_for_the_one_under_way(root: Path, held: threading.Event) -> None:
    bag, other = make_bag(), make_bag("other")
    train(bag)
    train(other)
    first = Saver(0).save_async(bag, root)
    train(bag, seed=1)
    assert Saver(0).save(other, root.parent / "elsewhere").kind == "full", "other tables go on"
    assert Saver(0).load(other, root.parent / "elsewhere").deltas == 0, "and from other paths"
    ended: list[tuple[str, bool]] = []

    def note(name: str, call: Any) -> threading.Thread:
        def run() -> None:
            call()
            ended.append((name, held.is_set()))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    calls = [
        note("save", lambda: Saver(0).save(bag, root)),
        note("save_async", lambda: Saver(0).save_async(other, root.parent / "elsewhere").result(SECONDS)),
        note("close", other.table._native_table.epoch),
    ]
    calls[2].join(SECONDS)
    assert ended == [("close", False)], "the others wait"
    held.set()
    for call in calls:
        call.join(SECONDS)
        assert not call.is_alive()
    assert sorted(ended[1:]) == [("save", True), ("save_async", True)]
    assert first.result(SECONDS).kind == "full"
    assert loaded(root) == rows(bag), "the later save is the newest"


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "later"])
def test_other_models_wait_for_the_save_to_their_path(earlier: bool, root: Path, held: threading.Event) -> None:
    bag = make_bag()
    if earlier:
        train(bag)
        Saver(0).save(bag, root)
    train(bag, seed=1)
    expected = rows(bag)
    first = Saver(0).save_async(bag, root)
    train(bag, seed=2)
    other, merged = make_bag(), []
    calls = [
        threading.Thread(target=lambda: Saver(0).load(other, root)),
        threading.Thread(target=lambda: merged.append(Saver(0).compact(root))),
    ]
    for call in calls:
        call.start()
        call.join(0.2)
        assert call.is_alive(), "it waits"
    assert not first.done()
    held.set()
    for call in calls:
        call.join(SECONDS)
        assert not call.is_alive()
    assert rows(other) == expected
    assert merged[0].checkpoint == first.result().checkpoint, "what is full is not merged again"


def test_a_table_that_is_closed_is_saved_first(root: Path, held: threading.Event) -> None:
    bag = make_bag()
    train(bag)
    before = rows(bag)
    future = Saver(0).save_async(bag, root)
    train(bag, seed=1)
    closing = threading.Thread(target=bag.close)
    closing.start()
    held.set()
    closing.join(SECONDS)
    assert not closing.is_alive()
    future.result(SECONDS)
    assert loaded(root) == before


def test_an_error_is_told_by_the_future_and_costs_nothing(root: Path, held: threading.Event) -> None:
    bag = make_bag()
    train(bag)
    Saver(0).save(bag, root)
    before = rows(bag)
    train(bag, 1, seed=4)
    future = Saver(0).save_async(bag, root, incremental=True)
    train(bag, 1, seed=1)
    bag.remove_rows(torch.tensor([5]))
    latest = (root / "LATEST").read_text().strip()
    (unfinished,) = (path for path in root.iterdir() if path.is_dir() and path.name != latest)
    shutil.rmtree(unfinished)
    unfinished.write_text("")
    held.set()
    assert isinstance(future.exception(SECONDS), StorageError | PathError)
    unfinished.unlink(missing_ok=True)
    assert loaded(root) == before
    # The rows that it would have contained, and the changes since, are in the next delta.
    report = Saver(0).save(bag, root, incremental=True)
    assert (report.kind, report.parent, report.tombstones) == ("delta", latest, 1)
    assert loaded(root) == rows(bag)


def test_tables_that_could_not_all_be_held_keep_nothing_for_a_delta(root: Path) -> None:
    one, two = make_bag(), make_bag("other")
    directory = open_to_save(root, "strict")
    begun = _native.CheckpointSave(directory, 1)
    both = [
        (bag.table, _native.AsyncSaveTable(name, bag.table._native_table, {}))
        for name, bag in (("one", one), ("two", two))
    ]
    first = TableSnapshots(directory, begun.name, SingleRank(), both[1:], 3)
    with pytest.raises(StateError, match="a save in the background"):
        TableSnapshots(directory, begun.name, SingleRank(), both, 4)
    for bag in (one, two):
        bag.import_rows(torch.tensor([7]), torch.ones(1, 4))
    # For a checkpoint that comes later, an import is a modification.
    epochs = [next(bag.table.export()).metadata.modified_epoch.tolist() for bag in (one, two)]
    assert epochs == [[0], [3]]
    first.discarded()


def test_another_process_that_saves_meanwhile_fails_a_delta(
    root: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag, other = make_bag(), make_bag()
    train(bag)
    Saver(0).save(bag, root)
    train(bag, 1, seed=1)
    future = Saver(0).save_async(bag, root, incremental=True)
    with monkeypatch.context() as patch:
        patch.setattr(_saves_in_flight, "_saves", [])  # those of another process
        newest = Saver(0).save(other, root)
    held.set()
    with pytest.raises(StateError, match="save again"):
        future.result(SECONDS)
    assert (root / "LATEST").read_text().strip() == newest.checkpoint
    assert loaded(root) == {}


def test_what_is_wrong_at_the_call_is_raised_there(root: Path) -> None:
    bag = make_bag()
    train(bag)
    for rate in (0, -1, "fast", 1.5):
        with pytest.raises(ConfigError, match="max_bytes_per_second"):
            Saver(0).save_async(bag, root, max_bytes_per_second=rate)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="progress"):
        Saver(0).save_async(bag, root, progress=3)  # type: ignore[arg-type]
    with pytest.raises(PathError):
        Saver(0).save_async(bag, root / ".." / "x")
    with pytest.raises(InputError):
        Saver(0).save_async(nn.Linear(1, 1), root)
    # None of them holds a table.
    assert Saver(0).save_async(bag, root, max_bytes_per_second="1GiB").result(SECONDS).rows == len(bag)
    assert sorted(path.name for path in root.iterdir() if not path.is_dir()) == ["LATEST", "lock"]
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
def test_progress_is_told_in_the_thread_and_can_end_the_save(root: Path) -> None:
    two = nn.ModuleDict({"a": make_bag(), "b": make_bag("other")})
    train(two["a"])  # type: ignore[arg-type]
    told: list[tuple[str, int, int | None]] = []
    Saver(0).save_async(two, root, progress=lambda p: told.append((p.table, p.rows, p.total_rows))).result(SECONDS)
    total = len(two["a"])  # type: ignore[arg-type]
    assert told == [
        ("a/item", 0, total),
        ("a/item", total, total),
        ("b/other", total, total),
        ("b/other", total, total),
    ]
    latest = (root / "LATEST").read_text()

    def stop(progress: Progress) -> None:
        if progress.table == "b/other":
            Saver(0).save(two, root)  # it would wait for itself

    future = Saver(0).save_async(two, root, progress=stop)
    with pytest.raises(StateError, match="waits for this call"):
        future.result(SECONDS)

    def refuse(_progress: Progress) -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        Saver(0).save_async(two, root, progress=refuse).result(SECONDS)
    assert (root / "LATEST").read_text() == latest
    # A callback of the future may save, because the save has ended.
    again: Future[SaveReport] = Future()
    future = Saver(0).save_async(two, root)
    future.add_done_callback(lambda _: again.set_result(Saver(0).save(two, root)))
    assert again.result(SECONDS).checkpoint > future.result().checkpoint


ENDS = """
import sys, torch
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
from torchrec_embcache.checkpoint import Saver
bag = EmbCacheEmbeddingBag(
    name="item", embedding_dim=4, mode="sum", tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.1)
)
bag(torch.arange(500).reshape(100, 5)).sum().backward()
Saver(0).save_async(bag, sys.argv[1], max_bytes_per_second=50_000)
del bag
if sys.argv[2] == "error":
    raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("error", 3)])
def test_a_process_ends_when_its_save_has_also_of_a_model_that_is_gone(how: str, code: int, root: Path) -> None:
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(ENDS), str(root), how], check=False, timeout=SECONDS)
    assert run.returncode == code
    assert len(loaded(root, optimizer=optimizers.SGD(lr=0.1))) == 500


def save_beside_training(rank: int, size: int, path: str) -> list[str]:
    go = threading.Event()
    behind, _background._native.work_in_background = _background._native.work_in_background, lambda: go.wait(SECONDS)  # type: ignore[assignment]
    try:
        shards = Shards(rank, size)
        model = nn.ModuleDict({"shards": shards})
        shards.fill(IDS)
        before = shards.contents()
        future = Saver().save_async(model, path, keep=9)
        # The collectives of training go on while no rank, or only one, has begun to write.
        for table in shards.tables.values():
            begin, end = table.buckets
            mine = torch.tensor([begin <= bucket_of(row_id, 11) < end for row_id in range(300)])
            table.import_rows(torch.arange(300)[mine], weights_of(torch.arange(300)[mine] + 1))
        dist.barrier()
        if rank == 0:
            go.set()
        for _ in range(20):
            total = torch.ones(())
            dist.all_reduce(total)
            assert total == size
        assert not future.done()
        dist.barrier()
        go.set()
        report = future.result(SECONDS)
        group = _background.save_ranks()
        # The changes of each rank are in the delta, which builds on a checkpoint that all ranks know.
        delta = Saver().save_async(model, path, incremental=True, keep=9).result(SECONDS)
        assert (delta.kind, delta.parent) == ("delta", report.checkpoint)
        assert _background.save_ranks() is group, "one process group for all saves"
        for checkpoint, expected in ((report.checkpoint, before), (delta.checkpoint, shards.contents())):
            again = Shards(rank, size)
            Saver().load(nn.ModuleDict({"shards": again}), path, checkpoint=checkpoint)
            assert sorted(again.contents()) == sorted(expected)
        # An error that only one rank meets is raised on all, in the call and by the future.
        with pytest.raises(EmbCacheError):
            Saver().save_async(model, path if rank == 0 else b"bytes")  # type: ignore[arg-type]

        def fail(_progress: Progress) -> None:
            if rank == 1:
                raise ValueError("on one rank")

        error = Saver().save_async(model, path, progress=fail).exception(SECONDS)
        assert isinstance(error, ValueError if rank == 1 else EmbCacheError)
        assert "on one rank" in str(error)
        return [report.checkpoint, delta.checkpoint]
    finally:
        _background._native.work_in_background = behind


def test_ranks_save_beside_training_and_tell_each_other_of_errors(two_ranks: World, root: Path) -> None:
    first, second = two_ranks.run(save_beside_training, str(root))
    assert first == second
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == sorted(first), "what failed is gone"


def outlive(say: Callable[[str], None], rank: int, store: str, path: str, how: str) -> None:
    """A save runs when the default group is destroyed, or when one rank is gone."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    shards = Shards(rank, 2)
    shards.fill(IDS)
    rate = 20_000 if rank == 0 else None
    future = Saver().save_async(nn.ModuleDict({"shards": shards}), path, max_bytes_per_second=rate)
    if how == "destroyed":
        dist.destroy_process_group()
        say(future.result(SECONDS).checkpoint)
    elif rank == 1:
        os._exit(9)
    else:
        say(type(future.exception(SECONDS)).__name__)
        os._exit(0)  # a broken group waits for nobody


@pytest.mark.slow
@pytest.mark.parametrize("how", ["destroyed", "gone"])
def test_save_outlives_the_default_group_and_notices_lost_ranks(how: str, root: Path, tmp_path: Path) -> None:
    root.mkdir(mode=0o750, exist_ok=True)
    ranks = [Child(outlive, rank, str(tmp_path / "store"), str(root), how) for rank in range(2)]
    said, status = zip(*(rank.ended() for rank in ranks), strict=True)
    if how == "destroyed":
        latest = (root / "LATEST").read_text().strip()
        assert (said, status) == (([latest], [latest]), (0, 0))
    else:
        assert (said, status) == ((["StateError"], []), (0, 9))
        assert not (root / "LATEST").exists()


def save_until_killed(say: Callable[[str], None], path: str) -> None:
    """Save, and do up to 15 steps beside each save, from the last checkpoint on, until somebody kills the process."""
    bag, saver = make_bag(), Saver(0)
    if (Path(path) / "LATEST").exists():
        saver.load(bag, path)
    for save in itertools.count():
        # A full save takes some 20 ms.
        future = saver.save_async(bag, path, save % 3 > 0, keep=2, max_bytes_per_second="1MiB")
        for _beside in range(15):
            train(bag, 1, seed=bag.table.step(), ids=400)
            if future.done():
                break
        say(future.result(SECONDS).kind)


@pytest.mark.slow
def test_latest_is_whole_after_a_kill_during_async_saves(root: Path) -> None:
    draw, said = random.Random(5), set()
    for _round in range(int(os.environ.get("EMBCACHE_PYTHON_KILLS", "2"))):
        child = Child(save_until_killed, str(root))
        said |= {child.hear() for _save in range(draw.randrange(4, 12))}
        time.sleep(draw.random() * 0.04)
        child.kill()
        rest, status = child.ended()
        assert status == -9, "it ended by itself"
        said |= set(rest)
        bag, straight = make_bag(), make_bag()
        Saver(0).load(bag, root)
        for step in range(bag.table.step()):
            train(straight, 1, seed=step, ids=400)
        found, expected = rows(bag), rows(straight)
        assert found.keys() == expected.keys()
        # Only the epoch differs, which depends on what was saved meanwhile.
        assert all(
            (*row[:-2], row[-1]) == (*expected[row_id][:-2], expected[row_id][-1]) for row_id, row in found.items()
        )
    assert said == {"full", "delta"}
