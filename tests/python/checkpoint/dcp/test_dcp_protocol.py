"""Requirements of DCP on a storage beyond its signatures: the order of calls, the kinds of futures, and which data is sent and held
at which time.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from dcp_cases import Model, load, rows, same, save
from torchrec_embcache import EmbCacheStorageReader, EmbCacheStorageWriter
from torchrec_embcache.checkpoint._tensor_bytes import WINDOW_BYTES, byte_windows
from torchrec_embcache.checkpoint.dcp._metadata import DenseExtent
from torchrec_embcache.exceptions import StateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

STATE = {"a": torch.arange(5.0), "b": {"c": [torch.ones(2, 3), "text"]}}


def blanks() -> dict[str, Any]:
    return {"a": torch.zeros(5), "b": {"c": [torch.zeros(2, 3), ""]}}


class Recorder:
    """Note the names of the storage's methods as they are called, and the keywords that DCP passes."""

    calls: list[str]

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in vars(StorageWriter) | vars(StorageReader) and callable(found):
            # DCP passes these keywords to every method that takes kwargs.
            def noted(*args: Any, **kwargs: Any) -> Any:
                super(Recorder, self).__getattribute__("calls").append(
                    " ".join([name, *sorted(kwargs.keys() & {"rank", "use_collectives"})])
                )
                return found(*args, **kwargs)

            return noted
        return found


class RecordedWriter(Recorder, EmbCacheStorageWriter):
    pass


class RecordedReader(Recorder, EmbCacheStorageReader):
    pass


def test_dcp_makes_its_calls_in_the_order_that_the_storage_is_made_for(tmp_path: Path) -> None:
    writer, reader = RecordedWriter(tmp_path / "ckpt"), RecordedReader(tmp_path / "ckpt")
    for given in ({}, {"checkpoint_id": str(tmp_path / "other")}):
        writer.calls, reader.calls = [], []
        dcp.save(STATE, storage_writer=writer, **given)
        dcp.load(state := blanks(), storage_reader=reader, **given)
        assert same(state, STATE)
        reset = ["reset"] if given else []
        # Each is called once. The writer itself asks for storage_meta again when it publishes.
        assert list(dict.fromkeys(writer.calls)) == [
            *reset,
            "storage_meta",
            "set_up_storage_writer rank use_collectives",
            "prepare_local_plan",
            "prepare_global_plan",
            "write_data",
            "finish",
        ]
        assert reader.calls == [
            *reset,
            "read_metadata",
            "set_up_storage_reader rank use_collectives",
            "prepare_local_plan",
            "prepare_global_plan",
            "read_data",
        ]


def test_calls_out_of_order_say_so(tmp_path: Path) -> None:
    writer, reader = EmbCacheStorageWriter(tmp_path / "ckpt"), EmbCacheStorageReader(tmp_path / "ckpt")
    for call in (
        lambda: writer.prepare_global_plan([]),
        lambda: writer.write_data(SavePlan([]), DefaultSavePlanner()),
        lambda: writer.finish(dcp.Metadata({}), []),
        lambda: reader.prepare_local_plan(LoadPlan([])),
        lambda: reader.read_data(LoadPlan([]), DefaultLoadPlanner()),
    ):
        with pytest.raises(StateError, match="comes before the other calls"):
            call()


def test_both_are_what_dcp_takes_for_a_storage_and_a_stager(tmp_path: Path) -> None:
    writer, reader = EmbCacheStorageWriter(tmp_path / "ckpt"), EmbCacheStorageReader(tmp_path / "ckpt")
    assert isinstance(writer, StorageWriter)
    assert isinstance(writer, AsyncStager)
    assert isinstance(reader, StorageReader)
    # A false one counts as not given.
    assert writer
    assert reader
    for place, is_path in ((tmp_path, True), (str(tmp_path), True), ("s3://bucket/ckpt", False), ("", False)):
        assert writer.validate_checkpoint_id(place) is reader.validate_checkpoint_id(place) is is_path
    assert writer.checkpoint_id == reader.checkpoint_id == str(tmp_path / "ckpt")
    ids = [writer.save_id, reader.load_id]
    writer.reset(tmp_path / "b")
    reader.reset(tmp_path / "b")
    assert ids[0] != writer.save_id
    assert ids[1] != reader.load_id
    assert isinstance(writer.storage_meta(), StorageMeta)
    assert writer.storage_meta().checkpoint_id == str(tmp_path / "b")
    dcp.save(STATE, storage_writer=writer)
    metadata = reader.read_metadata()
    assert (metadata.storage_meta.save_id, metadata.storage_meta.load_id) == (writer.save_id, reader.load_id)
    assert metadata.version == "1.0.0"


def test_data_comes_with_futures_of_torch(tmp_path: Path) -> None:
    given: list[object] = []

    class Writer(EmbCacheStorageWriter):
        def write_data(self, *args: Any) -> Any:
            given.append(super().write_data(*args))
            return given[-1]

    class Reader(EmbCacheStorageReader):
        def read_data(self, *args: Any) -> Any:
            given.append(super().read_data(*args))
            return given[-1]

    dcp.save(STATE, storage_writer=Writer(tmp_path / "ckpt"))
    dcp.load(blanks(), storage_reader=Reader(tmp_path / "ckpt"))
    assert [type(future) for future in given] == [Future, Future]


def test_what_travels_is_small_and_names_no_checkpoint(tmp_path: Path) -> None:
    state = {"large": torch.zeros(1 << 20), "small": torch.ones(3), "object": "x"}
    model = Model(salt=1)
    found = []
    for path in ("a", "a", "b"):
        metadata = save(state, tmp_path / path, model)
        assert len(pickle.dumps(metadata)) < 5000
        found.append(metadata.storage_data)
        assert all(type(extent) is DenseExtent for extent in metadata.storage_data.values())
    # With cached plans a save gets those of an earlier one, which are still right.
    assert found[0] == found[1] == found[2]


def test_a_pickled_writer_does_not_carry_what_it_saves(tmp_path: Path) -> None:
    writer = EmbCacheStorageWriter(tmp_path / "ckpt", Model(salt=1))
    staged = writer.stage({"large": torch.zeros(1 << 22)})
    assert len(pickle.dumps(writer)) < 2000
    assert staged["large"].nbytes == 1 << 24
    writer.close()


def peeks(view: torch.Tensor) -> Iterator[int]:
    yield from (len(window) for window in byte_windows(view))


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(1).expand(24 << 20),
        torch.zeros(1, 3).expand(7 << 20, 3)[:, 1:],
        torch.zeros(1).expand(2, 2, 6 << 20),
        torch.zeros(16 << 20, dtype=torch.uint8)[::2].view(8, -1).t(),
    ],
)
def test_views_are_copied_in_windows_and_never_whole(view: torch.Tensor) -> None:
    sizes = list(peeks(view))
    assert sum(sizes) == view.nbytes
    assert max(sizes) <= WINDOW_BYTES


def test_memory_in_row_major_order_is_not_copied() -> None:
    tensor = torch.arange(10 << 20, dtype=torch.int32)
    (window,) = byte_windows(tensor[1 << 20 :])
    assert np.shares_memory(window, tensor.numpy())


class Watched(DefaultLoadPlanner):
    """A planner that gives out copies, so that what is not committed is lost. It notes the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.order.append("resolve")
        return super().resolve_tensor(read_item).clone()

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.order.append("commit")
        super().resolve_tensor(read_item).copy_(tensor)


def test_each_tensor_is_committed_before_the_next_is_resolved(tmp_path: Path) -> None:
    saved = {str(n): torch.randn(n + 1, 3) for n in range(6)}
    save(saved, tmp_path / "ckpt")
    planner = Watched()
    loaded = load({key: torch.zeros_like(value) for key, value in saved.items()}, tmp_path / "ckpt", planner=planner)
    assert same(loaded, saved)
    assert planner.order == ["resolve", "commit"] * 6


class Changing(DefaultSavePlanner):
    """A planner that gives other data than the state dict holds: in another layout, or as bytes."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return io.BytesIO(data.getvalue()) if isinstance(data, io.BytesIO) else data.t().contiguous().t() * 2


def test_what_the_planner_gives_is_what_is_saved(tmp_path: Path) -> None:
    save({"a": torch.arange(6.0).view(2, 3), "object": [1]}, tmp_path / "ckpt", planner=Changing())
    loaded = load({"a": torch.zeros(2, 3), "object": None}, tmp_path / "ckpt")
    assert same(loaded, {"a": 2 * torch.arange(6.0).view(2, 3), "object": [1]})


class Own:
    """An object with a state of its own. DCP asks it for its tensors, and gives them back."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((3,), value)
        self.times = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "log": io.BytesIO(b"log")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.times = state["value"], self.times + 1
        assert state["log"].getvalue() == b"log"


def test_states_with_a_state_dict_of_their_own_are_loaded_in_place(tmp_path: Path) -> None:
    saved, loaded = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save({"model": saved, "own": Own(7.0), "empty": {}}, tmp_path / "ckpt")
    state = load({"model": loaded, "own": Own(0.0), "empty": {}}, tmp_path / "ckpt")
    assert state["model"] is loaded
    assert same(loaded.state_dict(), saved.state_dict())
    assert torch.equal(state["own"].value, torch.full((3,), 7.0))
    assert state["own"].times == 1


def test_containers_are_filled_and_not_replaced(tmp_path: Path) -> None:
    save(STATE, tmp_path / "ckpt")
    state = blanks()
    kept = state["a"], state["b"]["c"][0]
    load(state, tmp_path / "ckpt")
    assert state["a"] is kept[0]
    assert state["b"]["c"][0] is kept[1]


def test_nothing_is_saved_and_loaded_too(tmp_path: Path) -> None:
    metadata = save({}, tmp_path / "ckpt")
    assert metadata.state_dict_metadata == {}
    assert load({}, tmp_path / "ckpt") == {}


def test_a_part_of_what_was_saved_is_loaded_into_a_part_of_the_state(tmp_path: Path) -> None:
    save(STATE, tmp_path / "ckpt")
    assert same(load({"a": torch.zeros(5)}, tmp_path / "ckpt"), {"a": STATE["a"]})
    more = {"a": torch.zeros(5), "new": torch.full((2,), 3.0)}
    with pytest.raises(CheckpointException, match="Missing key"):
        load(more, tmp_path / "ckpt")
    load(more, tmp_path / "ckpt", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(more, {"a": STATE["a"], "new": torch.full((2,), 3.0)})


def test_the_metadata_says_what_was_saved(tmp_path: Path) -> None:
    save(STATE, tmp_path / "ckpt")
    metadata = EmbCacheStorageReader(tmp_path / "ckpt").read_metadata()
    items = metadata.state_dict_metadata
    assert items.keys() == {"a", "b.c.0", "b.c.1"}
    assert items["a"].size == torch.Size([5])
    assert items["a"].properties.dtype == torch.float32
    assert isinstance(items["b.c.1"], BytesStorageMetadata)
    assert metadata.planner_data["b.c.0"] == ("b", "c", 0)


@pytest.mark.slow
def test_tables_staged_for_a_failed_save_are_not_in_the_next(tmp_path: Path) -> None:
    class Refused:
        def __deepcopy__(self, _memo: Any) -> "Refused":
            return self

        def __reduce__(self) -> Any:
            raise TypeError("not for pickling")

    writer = EmbCacheStorageWriter(tmp_path / "ckpt", model := Model(salt=1))
    future = dcp.async_save({"a": torch.ones(1), "b": Refused()}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="not for pickling"):
        future.result()
    model.fill(2)
    dcp.save({"a": torch.ones(1)}, storage_writer=writer)
    load({"a": torch.zeros(1)}, tmp_path / "ckpt", loaded := Model())
    assert sorted(loaded.contents()) == rows(2)
    assert sorted(path.name for path in (tmp_path / "ckpt").glob("part-*")) == []
