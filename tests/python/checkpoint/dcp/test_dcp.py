"""DCP through this package's storage, in one process."""

import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_cases import IDS, Model, blank, dense_state, held, load, rows, same, save, stageable, weights_of
from processes import Child, process_group
from torchrec_embcache import EmbCacheStorageReader, EmbCacheStorageWriter
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint._save import SaveSession
from torchrec_embcache.cli.checkpoints import verify
from torchrec_embcache.exceptions import (
    CorruptionError,
    MismatchError,
    StateError,
    StoragePermissionError,
    UnsupportedError,
)

# DCP gives this warning whenever there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def causes(raised: pytest.ExceptionInfo[BaseException]) -> list[BaseException]:
    """The errors of the ranks, out of DCP's exception."""
    assert isinstance(raised.value, CheckpointException)
    return [error for error, _ in raised.value.failures.values()]


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    metadata = save(dense_state(1), tmp_path / "ckpt")
    assert metadata.storage_meta.checkpoint_id == str(tmp_path / "ckpt")
    assert metadata.storage_meta.save_id
    assert same(load(blank(dense_state()), tmp_path / "ckpt"), dense_state(1))


def test_the_writer_stands_in_for_torchs_by_its_name_alone(tmp_path: Path) -> None:
    settings = {"single_file_per_rank": False, "sync_files": False, "thread_count": 3, "per_thread_copy_ahead": 1 << 20}
    state = {"weight": torch.randn(7, 5), "step": 3}
    for number, writer in enumerate((dcp.FileSystemWriter, EmbCacheStorageWriter)):
        made = writer(tmp_path / str(number), **settings, overwrite=False, cache_staged_state_dict=True)
        dcp.save(state, storage_writer=made)
    assert same(load({"weight": torch.zeros(7, 5), "step": 0}, tmp_path / "1"), state)


def test_a_state_dict_that_is_not_flattened_comes_back(tmp_path: Path) -> None:
    state = {"a": torch.arange(5), "nested": {"b": torch.ones(2), "c": 3}}
    save(state, tmp_path / "ckpt", planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    loaded = load(
        {"a": torch.zeros(5, dtype=torch.int64), "nested": None},
        tmp_path / "ckpt",
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    assert same(loaded, state)


def test_a_state_dict_is_rebuilt_from_the_checkpoint_alone(tmp_path: Path) -> None:
    state = dense_state(1)
    del state["sparse"]  # DCP makes a strided tensor in its position
    save(state, tmp_path / "ckpt")
    reader = EmbCacheStorageReader(tmp_path / "ckpt")
    rebuilt = _load_state_dict_from_keys(storage_reader=reader)
    assert same({**rebuilt, "transposed": rebuilt["transposed"]}, state)
    only = _load_state_dict_from_keys({"weight", "optimizer"}, storage_reader=reader)
    assert same(only, {key: state[key] for key in ("weight", "optimizer")})


def test_tensors_are_cast_and_copied_into_any_strides(tmp_path: Path) -> None:
    weight, wide = torch.randn(300, 7), torch.randn(1500, 1600)
    save({"weight": weight, "wide": wide}, tmp_path / "ckpt")
    target = {
        "weight": torch.zeros(7, 300, dtype=torch.float64).t(),
        "wide": torch.zeros(1600, 1500, dtype=torch.bfloat16).t(),
    }
    loaded = load(target, tmp_path / "ckpt")
    assert torch.equal(loaded["weight"], weight.double())
    assert torch.equal(loaded["wide"], wide.bfloat16())


@pytest.mark.slow
def test_each_save_to_one_path_replaces_the_one_before(tmp_path: Path) -> None:
    writer = EmbCacheStorageWriter(tmp_path / "ckpt")
    for salt in range(3):
        dcp.save(dense_state(salt), storage_writer=writer)
        assert same(load(blank(dense_state()), tmp_path / "ckpt"), dense_state(salt))
    assert len(held(tmp_path / "ckpt")) == 2, "LATEST and one checkpoint"
    other = str(tmp_path / "other")
    metadata = dcp.save(dense_state(7), checkpoint_id=other, storage_writer=writer)
    assert metadata.storage_meta.checkpoint_id == writer.checkpoint_id == other
    reader = EmbCacheStorageReader(tmp_path / "ckpt")
    state = blank(dense_state())
    before = reader.load_id
    dcp.load(state, checkpoint_id=other, storage_reader=reader)
    assert same(state, dense_state(7))
    assert reader.checkpoint_id == other
    assert reader.load_id != before
    with pytest.raises(CheckpointException) as raised:
        dcp.save(dense_state(), storage_writer=EmbCacheStorageWriter(other, overwrite=False))
    assert [type(error) for error in causes(raised)] == [StateError]


@pytest.mark.slow
def test_cached_plans_save_what_is_in_the_state_now(tmp_path: Path) -> None:
    for cache in (
        "_cached_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
        "_cached_final_save_plan",
    ):
        getattr(SavePlanner, cache).clear()
    for salt, path in enumerate(["a", "b", "b", "a"]):
        state = dense_state(salt)
        save(state, tmp_path / path, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert same(load(blank(dense_state()), tmp_path / path), state)
    assert SavePlanner._cached_final_save_plan, "plans were cached"


def test_dense_and_tables_are_saved_and_loaded_together(tmp_path: Path) -> None:
    model = Model(salt=1)
    save(dense_state(1), tmp_path / "ckpt", model)
    loaded = Model()
    assert same(load(blank(dense_state()), tmp_path / "ckpt", loaded), dense_state(1))
    assert sorted(loaded.contents()) == rows(1)
    assert loaded.tables["spread"].step() == 43
    # Without the model the tables are not loaded. Saver reads the tables of such a checkpoint too.
    assert same(load(blank(dense_state()), tmp_path / "ckpt"), dense_state(1))
    alone = Model()
    Saver(0).load(alone, tmp_path / "ckpt")
    assert sorted(alone.contents()) == rows(1)
    # Rows that are trained from now on count as modified since this checkpoint.
    assert model.tables["spread"]._native_table.epoch() == loaded.tables["spread"]._native_table.epoch()


def test_a_path_that_is_no_utf8_is_saved_to_and_loaded_from(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"ckpt-\xff")
    save(dense_state(1), path, Model(salt=1))
    loaded = Model()
    assert same(load(blank(dense_state()), path, loaded), dense_state(1))
    assert sorted(loaded.contents()) == rows(1)


def test_a_checkpoint_without_what_is_asked_for_is_refused(tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointException, match="LATEST is missing|there is no"):
            load(dense_state(), missing)
    Saver(0).save(Model(salt=1), tmp_path / "tables")
    with pytest.raises(CheckpointException, match="tables only"):
        load(dense_state(), tmp_path / "tables")
    save({"a": torch.ones(2)}, tmp_path / "dense")
    with pytest.raises(CheckpointException) as raised:
        load({"a": torch.zeros(2)}, tmp_path / "dense", Model())
    assert [type(error) for error in causes(raised)] == [MismatchError]
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"b": torch.zeros(2)}, tmp_path / "dense")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(3)}, tmp_path / "dense")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CheckpointException) as raised:
        save({"a": torch.ones(2)}, tmp_path / "open")
    assert [type(error) for error in causes(raised)] == [StoragePermissionError]


def check_staged(path: Path) -> None:
    """Checks that the checkpoint has the state as of the call of an asynchronous save."""
    expected, loaded = stageable(dense_state(1)), Model()
    assert same(load(blank(expected), path, loaded), expected)
    assert sorted(loaded.contents()) == rows(1)


@pytest.mark.slow
def test_a_save_in_a_thread_is_the_state_at_the_call(tmp_path: Path) -> None:
    state, model = stageable(dense_state(1)), Model(salt=1)
    writer = EmbCacheStorageWriter(tmp_path / "ckpt", model)
    for _ in range(2):
        future = dcp.async_save(state, storage_writer=writer)
        state["weight"].zero_()
        model.fill(5)
        assert future.result().storage_meta.save_id == writer.save_id
        check_staged(tmp_path / "ckpt")
        state["weight"].copy_(dense_state(1)["weight"])
        model.fill(1)
    assert len(held(tmp_path / "ckpt")) == 2


def test_saver_deltas_hold_changes_across_saves_through_dcp(tmp_path: Path) -> None:
    model = Model(salt=1)
    Saver(0).save(model, tmp_path / "saver")
    table = model.tables["spread"]
    writer = EmbCacheStorageWriter(tmp_path / "ckpt", model)
    table.import_rows(IDS[:5], weights_of(IDS[:5], 7), {"sum": torch.zeros(5)})
    table.remove_rows(IDS[5:7])
    dcp.save({}, storage_writer=writer)
    table.import_rows(IDS[7:9], weights_of(IDS[7:9], 8), {"sum": torch.zeros(2)})
    future = dcp.async_save({}, storage_writer=writer)
    table.import_rows(IDS[8:12], weights_of(IDS[8:12], 9), {"sum": torch.zeros(4)})
    table.remove_rows(IDS[12:13])
    # It waits until nothing holds the tables any more.
    report = Saver(0).save(model, tmp_path / "saver", incremental=True)
    future.result()
    assert (report.kind, report.rows, report.tombstones) == ("delta", 10, 3)
    Saver(0).load(loaded := Model(), tmp_path / "saver")
    assert sorted(loaded.contents()) == sorted(model.contents())
    load({}, tmp_path / "ckpt", staged := Model())
    after = {row_id: (weights, total) for row_id, weights, total in staged.contents()}
    assert after[int(IDS[8])] == (weights_of(IDS[8:9], 8)[0].tolist(), 0.0)
    assert int(IDS[12]) in after


class Refusing(DefaultSavePlanner):
    """A planner that fails a save while that is planned."""

    def create_local_plan(self) -> Any:
        raise ValueError("no plan")


def save_in_processes(say: Any, path: str, store: str) -> None:
    """Train on while a process beside saves. A save fails first, and the last one is a blocking save by the same writer."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent))  # the process that saves imports this module
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with process_group(0, 1, store):
        writer = EmbCacheStorageWriter(path, model := Model(salt=1))
        state = stageable(dense_state(1))

        def begin(planner: Any = None) -> Any:
            kind = AsyncCheckpointerType.PROCESS
            return dcp.async_save(state, storage_writer=writer, planner=planner, async_checkpointer_type=kind)

        try:
            begin(Refusing()).result()
        except CheckpointException as error:
            say(str(error))
        for _ in range(2):
            future = begin()
            state["weight"].zero_()
            model.fill(5)
            future.result()
            check_staged(Path(path))
            state["weight"].copy_(dense_state(1)["weight"])
            model.fill(1)
        model.fill(2)
        dcp.save(state, storage_writer=writer)
        say("saved")


@pytest.mark.slow
def test_a_save_in_a_process_is_the_state_at_the_call(tmp_path: Path) -> None:
    said, status = Child(save_in_processes, str(tmp_path / "ckpt"), str(tmp_path / "store"), daemon=False).ended()
    assert status == 0
    assert len(said) == 2
    assert "no plan" in said[0]
    load({}, tmp_path / "ckpt", model := Model())
    assert sorted(model.contents()) == rows(2), "what was staged before is not in a later save"
    assert len(held(tmp_path / "ckpt")) == 2


def test_a_pickled_writer_is_its_configuration(tmp_path: Path) -> None:
    writer = EmbCacheStorageWriter(tmp_path / "ckpt", Model(salt=1), overwrite=False)
    copy = pickle.loads(pickle.dumps(writer))
    assert (copy.checkpoint_id, copy.overwrite, copy.save_id) == (writer.checkpoint_id, False, writer.save_id)
    # That process has no tables. It reports this instead of saving without them.
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": torch.ones(1)}, storage_writer=copy)
    assert [type(error) for error in causes(raised)] == [StateError]
    assert not os.path.exists(tmp_path / "ckpt" / "LATEST")


def test_a_save_without_collectives_loads_by_rank(tmp_path: Path) -> None:
    for salt in (1, 2):
        save(dense_state(salt), tmp_path / "ckpt", use_collectives=False)
        assert same(load(blank(dense_state()), tmp_path / "ckpt"), dense_state(salt))
    assert held(tmp_path / "ckpt") == ["rank-0"]
    save(dense_state(3), tmp_path / "ckpt")
    assert same(load(blank(dense_state()), tmp_path / "ckpt"), dense_state(3))
    with pytest.raises(StateError, match="a path of its own"):
        save(dense_state(4), tmp_path / "ckpt", use_collectives=False)


def test_lone_rank_saves_in_the_directory_it_checked(tmp_path: Path) -> None:
    own, aside = tmp_path / "ckpt" / "rank-0", tmp_path / "aside"

    class Swapped(EmbCacheStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            own.rename(aside)
            own.mkdir(mode=0o750)
            return written

    dcp.save(dense_state(1), storage_writer=Swapped(tmp_path / "ckpt"), use_collectives=False)
    assert os.listdir(own) == []
    assert "LATEST" in os.listdir(aside)


def test_a_flipped_bit_in_any_file_is_found(tmp_path: Path) -> None:
    state = {"a": torch.arange(100_000), "b": [1, "two"]}
    save(state, tmp_path / "ckpt", Model(salt=1))
    files = [path for path in (tmp_path / "ckpt").rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) >= 6
    for path in files:
        whole = path.read_bytes()
        for at in {0, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            damaged = bytearray(whole)
            damaged[at] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(CheckpointException):
                load(blank(state), tmp_path / "ckpt", Model())
        path.write_bytes(whole)
    model = Model()
    assert same(load(blank(state), tmp_path / "ckpt", model), state)
    assert verify(str(tmp_path / "ckpt")).data["whole"]
    (extents,) = (tmp_path / "ckpt").rglob("*.extents")
    damaged = bytearray(extents.read_bytes())
    damaged[4096] ^= 1
    extents.write_bytes(damaged)
    with pytest.raises(CheckpointException) as raised:
        load(blank(state), tmp_path / "ckpt", model)
    assert [type(error) for error in causes(raised)] == [CorruptionError]
    assert str(extents) in str(raised.value)
    damage = verify(str(tmp_path / "ckpt"))
    assert not damage.data["whole"]
    assert str(extents) in damage.data["dense"]["error"]
    assert sorted(model.contents()) == rows(1), "nothing was loaded into the tables"


class Unplain(DefaultSavePlanner):
    """A planner whose data fits no file."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = object()
        return plans, metadata


def test_failed_save_leaves_only_the_previous_checkpoint(tmp_path: Path) -> None:
    save(dense_state(1), tmp_path / "ckpt")
    before = held(tmp_path / "ckpt")
    with pytest.raises(CheckpointException) as raised:
        save(dense_state(2), tmp_path / "ckpt", planner=Unplain())
    assert [type(error) for error in causes(raised)] == [UnsupportedError]

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise TypeError("not for pickling")

    with pytest.raises(CheckpointException, match="not for pickling"):
        save({**dense_state(2), "z": Unpicklable()}, tmp_path / "ckpt")
    assert same(load(blank(dense_state()), tmp_path / "ckpt"), dense_state(1))
    save(dense_state(3), tmp_path / "ckpt")
    after = held(tmp_path / "ckpt")
    assert len(after) == len(before) == 2
    assert same(load(blank(dense_state()), tmp_path / "ckpt"), dense_state(3))


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["prepare_global_plan", "write_data", "_publish"])
def test_failed_async_save_removes_the_staged_tables(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(salt=1)
    save(dense_state(1), tmp_path / "ckpt", model)
    before = sorted(os.listdir(tmp_path / "ckpt"))
    writer = EmbCacheStorageWriter(tmp_path / "ckpt", model, overwrite=fails != "prepare_global_plan")

    def refused(*_arguments: object) -> None:
        raise StoragePermissionError("not today")

    if fails == "write_data":
        monkeypatch.setattr("torchrec_embcache.checkpoint.dcp.writer._write_item", refused)
    elif fails == "_publish":
        monkeypatch.setattr(SaveSession, "publish", refused)
    with pytest.raises(CheckpointException):
        dcp.async_save(stageable(dense_state(2)), storage_writer=writer).result()
    assert sorted(os.listdir(tmp_path / "ckpt")) == before


def test_failed_publication_after_moving_parts_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(salt=1)
    save(dense_state(1), tmp_path / "ckpt", model)
    before = sorted(os.listdir(tmp_path / "ckpt"))

    def refused(*_arguments: object) -> None:
        raise StoragePermissionError("LATEST cannot be replaced")

    with monkeypatch.context() as patch:
        patch.setattr(SaveSession, "publish", refused)
        with pytest.raises(CheckpointException, match="LATEST cannot be replaced"):
            save(dense_state(2), tmp_path / "ckpt", model)
    assert sorted(os.listdir(tmp_path / "ckpt")) == before
    assert same(load(blank(dense_state()), tmp_path / "ckpt"), dense_state(1))
    save(dense_state(3), tmp_path / "ckpt", model)
    loaded = Model()
    assert same(load(blank(dense_state()), tmp_path / "ckpt", loaded), dense_state(3))
    assert sorted(loaded.contents()) == rows(1)
