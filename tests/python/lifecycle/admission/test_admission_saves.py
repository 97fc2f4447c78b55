"""Every way to save a table saves its admission counts exactly as they were at the call."""

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_cases
from admission_cases import IDS, Counted, counting, counts_of, train
from lifecycle_cases import ids_of, update
from processes import Child, process_group
from tables import Contents, ssd_tiers
from torchrec_embcache import EmbCacheEmbedding, EmbCacheStorageWriter, optimizers
from torchrec_embcache.checkpoint import Saver, _background
from torchrec_embcache.cli import main
from torchrec_embcache.integrations import megatron

SECONDS = 600.0
# The step of the save, and the last one.
SAVED, END = 30, 50
# DCP gives this warning in a group of one rank.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    megatron.register()
    with process_group(0, 1, str(tmp_path_factory.mktemp("group") / "store")):
        yield


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make saves beside training wait, before they write anything, until this is set."""
    go = threading.Event()
    monkeypatch.setattr(_background._native, "work_in_background", lambda: go.wait(SECONDS))
    yield go
    go.set()


def model_of(table: nn.Module) -> nn.Module:
    return nn.ModuleDict({"table": table})


# Functions that start a save, and return a function that ends it. Training continues in between.
def beside_training(model: nn.Module, path: Path, go: threading.Event) -> Callable[[], object]:
    future = Saver(0).save_async(model, path)
    return lambda: (go.set(), future.result(SECONDS))


def delta_beside_training(model: nn.Module, path: Path, go: threading.Event) -> Callable[[], object]:
    future = Saver(0).save_async(model, path, incremental=True)

    def end() -> None:
        go.set()
        assert future.result(SECONDS).kind == "delta"

    return end


def dcp_beside_training(model: nn.Module, path: Path, go: threading.Event) -> Callable[[], object]:
    class Held(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            assert go.wait(SECONDS)
            return super().create_local_plan()

    state = {"weight": torch.ones(3)}
    future = dcp.async_save(state, storage_writer=EmbCacheStorageWriter(path, model), planner=Held())
    return lambda: (go.set(), future.result(SECONDS))


def megatron_at_once(model: nn.Module, path: Path, go: threading.Event) -> Callable[[], object]:
    path.mkdir(mode=0o750)
    go.set()
    dist_checkpointing.save({"sparse": megatron.sharded_tables(model)}, str(path), megatron.STRATEGY)
    return lambda: None


def megatron_beside_training(model: nn.Module, path: Path, go: threading.Event) -> Callable[[], object]:
    path.mkdir(mode=0o750)
    state = {"sparse": megatron.sharded_tables(model)}
    request = dist_checkpointing.save(state, str(path), megatron.STRATEGY, async_sharded_save=True)

    def end() -> None:
        go.set()
        request.execute_sync()

    return end


def load_dcp(model: nn.Module, path: Path) -> None:
    dcp_cases.load({"weight": torch.zeros(3)}, path, model)


def load_megatron(model: nn.Module, path: Path) -> None:
    dist_checkpointing.load({"sparse": megatron.sharded_tables(model)}, str(path))


def load_saver(model: nn.Module, path: Path) -> None:
    Saver(0).load(model, path)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (beside_training, load_saver),
        (delta_beside_training, load_saver),
        (dcp_beside_training, load_dcp),
        (megatron_at_once, load_megatron),
        (megatron_beside_training, load_megatron),
    ],
    ids=["saver", "delta", "dcp", "megatron", "megatron beside training"],
)
def test_checkpoint_has_counts_of_the_call(tmp_path: Path, held: threading.Event, save: Any, load: Any) -> None:
    """Training continues from the same counts."""
    path, two = tmp_path / "saved", counting()
    assert len(Counted(SAVED).rows) > 20 < len(Counted(SAVED).counts), "the steps show something"
    with counting(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="2KiB")) as one:
        if save is delta_beside_training:
            train(one, range(SAVED // 2))
            Saver(0).save(model_of(one), path)
            train(one, range(SAVED // 2, SAVED))
        else:
            train(one, range(SAVED))
        end = save(model_of(one), path, held)
        train(one, range(SAVED, END))
        end()
        expected = Contents.of(one)
    train(two, range(70, 75))  # what a load replaces
    load(model_of(two), path)
    Counted(SAVED).check(two)
    train(two, range(SAVED, END))
    Counted(END).check(two)
    assert Contents.of(two) == expected


def test_without_the_counts_other_ids_get_rows(tmp_path: Path) -> None:
    """The other tests would have other results if counts were not loaded."""
    one, two = counting(), counting()
    train(one, range(SAVED))
    Saver(0).save(model_of(one), tmp_path / "saved", counters=False)
    Saver(0).load(model_of(two), tmp_path / "saved")
    for table in (one, two):
        train(table, range(SAVED, END))
    assert Contents.of(two) != Contents.of(one)
    assert set(ids_of(two)) < set(ids_of(one))


def _saved_by_a_process(say: Any, path: str, store: str) -> None:
    """Save by another process, and train meanwhile."""
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch, process_group(0, 1, store):
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        table = counting()
        train(table, range(SAVED))
        future = dcp.async_save(
            {"weight": torch.ones(3)},
            storage_writer=EmbCacheStorageWriter(path, model_of(table)),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        train(table, range(SAVED, END))
        future.result()
        say("saved")


@pytest.mark.slow
def test_a_save_of_dcp_by_another_process_has_the_counts_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    said, status = Child(_saved_by_a_process, str(path), str(tmp_path / "store"), daemon=False).ended()
    assert (said, status) == (["saved"], 0)
    table = counting()
    load_dcp(model_of(table), path)
    Counted(SAVED).check(table)
    assert main(["verify", str(path)]) == 0


def test_async_saves_each_have_counts_of_their_call(tmp_path: Path, held: threading.Event) -> None:
    """Saves that follow one another, each a delta of the one before, while training never waits for them."""
    one, path, saver = counting(), tmp_path / "saved", Saver(0)
    saver.save(model_of(one), path)
    names = {}
    for step in range(20, 50, 10):
        train(one, range(one.stats().step, step))
        held.clear()
        future = saver.save_async(model_of(one), path, incremental=True, keep=9)
        train(one, range(step, step + 5))
        held.set()
        report = future.result(SECONDS)
        assert report.kind == "delta"
        names[step] = report.checkpoint
    for step, name in names.items():
        table = counting()
        saver.load(model_of(table), path, checkpoint=name)
        Counted(step).check(table)


def test_async_save_has_counts_of_ids_that_expire_and_return(tmp_path: Path, held: threading.Event) -> None:
    """The snapshot has ids whose counts end during the save: they get rows, lose them, and start again at 0."""
    one, path = counting(), tmp_path / "saved"
    train(one, range(SAVED))
    expected = Counted(SAVED)
    future = Saver(0).save_async(model_of(one), path)
    waiting = sorted(expected.counts)
    update(one(torch.tensor(waiting * 5)))
    assert set(waiting) <= set(ids_of(one))
    one.remove_rows(torch.tensor([*waiting, *expected.rows]))
    update(one(torch.tensor(waiting)))
    held.set()
    future.result(SECONDS)
    two = counting()
    Saver(0).load(model_of(two), path)
    expected.check(two)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["save", "save beside training"])
def test_delta_never_mixes_bases_with_and_without_counts(tmp_path: Path, beside: bool) -> None:
    """Counts of ids that did not occur since would be missing, or those of ids that did would be old ones."""
    one, path, saver = counting(), tmp_path / "saved", Saver(0)
    said = []

    def save(counters: bool) -> str:
        train(one, range(one.stats().step, one.stats().step + 10))
        options = {"incremental": True, "keep": 9, "counters": counters}
        report = saver.save_async(one, path, **options).result(SECONDS) if beside else saver.save(one, path, **options)
        said.append(str(report.reason))
        two = counting()
        saver.load(two, path)
        if counters:
            Counted(one.stats().step).check(two)
        else:
            stats = two.stats().admission
            assert stats is not None
            assert stats.pending == 0
        return report.kind

    kinds = [save(counters) for counters in (True, True, False, False, True, True)]
    assert kinds == ["full", "delta", "full", "delta", "full", "delta"]
    assert "leaves them out" in said[2]
    assert "has no counts" in said[4]
    saver.compact(path, keep=9, counters=False)
    assert save(True) == "full"


@pytest.mark.parametrize("ssd_bytes", ["512MiB", "1MiB"], ids=["counts fit the flush", "counts do not fit the flush"])
def test_a_delta_after_a_resume_has_the_counts_of_the_table(tmp_path: Path, ssd_bytes: str) -> None:
    """Those that were counted between the parent and the flush; or none of them, where the flush had no room for counts."""

    def made(reopen: str | None) -> EmbCacheEmbedding:
        return counting(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="8KiB", ssd_bytes=ssd_bytes, reopen=reopen))

    saver = Saver(0)
    with made(None) as table:
        train(table, range(10))
        saver.save(table, tmp_path / "chain")
        train(table, range(10, 20))
    with made("resume") as table:
        train(table, range(20, 25))
        saver.save(table, tmp_path / "chain", incremental=True)
        saver.save(table, tmp_path / "full")
    found = []
    for name in ("chain", "full"):
        two = counting()
        saver.load(two, tmp_path / name)
        found.append((Contents.of(two), counts_of(two, IDS)))
    assert found[0] == found[1]


def test_counts_load_for_some_tables_renamed_and_without_slots(tmp_path: Path) -> None:
    one, other = counting(), counting(name="other")
    train(one, range(SAVED))
    train(other, range(5))
    saver, path = Saver(0), tmp_path / "saved"
    saver.save(nn.ModuleDict({"a": one, "b": other}), path)
    two = counting(optimizer=optimizers.Adagrad(lr=0.1))
    saver.load(nn.ModuleDict({"a": two}), path, tables=["item"], slots=False)
    Counted(SAVED).check(two)
    three = counting(name="third")
    saver.load(nn.ModuleDict({"c": three}), path, rename={"a/item": "c/third"}, strict=False)
    Counted(SAVED).check(three)


@pytest.mark.parametrize("beside_it", [False, True], ids=["save", "save beside training"])
def test_delta_after_failed_save_or_merge_has_all_counts(tmp_path: Path, beside_it: bool) -> None:
    one, path, saver = counting(), tmp_path / "saved", Saver(0)

    def save(**options: Any) -> str:
        if beside_it:
            return saver.save_async(one, path, incremental=True, **options).result(SECONDS).kind
        return saver.save(one, path, incremental=True, **options).kind

    def fail(_progress: object) -> None:
        raise ValueError("no more")

    train(one, range(10))
    assert save() == "full"
    train(one, range(10, 15))
    with pytest.raises(ValueError, match="no more"):
        save(progress=fail)
    train(one, range(15, 20))
    assert save() == "delta"
    train(one, range(20, 25))
    saver.compact(path)
    train(one, range(25, SAVED))
    assert save() == "delta"
    two = counting()
    saver.load(two, path)
    Counted(SAVED).check(two)


def test_saver_deltas_have_counts_across_saves_through_dcp(tmp_path: Path) -> None:
    one, saver = counting(), Saver(0)
    model = model_of(one)
    train(one, range(10))
    saver.save(model, tmp_path / "saver")
    train(one, range(10, 15))
    writer = EmbCacheStorageWriter(tmp_path / "dcp", model)
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer)
    train(one, range(15, 20))
    future = dcp.async_save({"weight": torch.ones(3)}, storage_writer=writer)
    train(one, range(20, 25))
    # It waits until nothing holds the tables any more.
    assert saver.save(model, tmp_path / "saver", incremental=True).kind == "delta"
    future.result()
    for load, name, step in ((load_saver, "saver", 25), (load_dcp, "dcp", 20)):
        two = counting()
        load(model_of(two), tmp_path / name)
        Counted(step).check(two)
