"""A `state_dict` notes that it has no rows, and does not load silently where rows are missing."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from processes import World
from tables import make_bag, step
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheStorageReader,
    EmbCacheStorageWriter,
    EmbCacheWarning,
    Saver,
    TierBudgets,
    optimizers,
)
from torchrec_embcache.exceptions import StateError
from torchrec_embcache.model._state_dict import TableState
from torchrec_embcache.serialize import BlockSaver
from torchrec_models import ROW_WISE, TABLE_WISE, Model, batches, sharded
from torchrec_models import train as train_sharded

pytestmark = pytest.mark.filterwarnings("ignore:state_dict:torchrec_embcache.EmbCacheWarning")
ROWS_ARE_MISSING = (
    r"table 't'.*had 3 rows at step 1, and here it has 0 at step 0.*Saver\(rank\)\.load\(model, path\).*strict=False"
)


def collection() -> EmbCacheEmbeddingBagCollection:
    made = EmbCacheEmbeddingBagCollection(
        [EmbCacheEmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=100, feature_names=["f"])],
        tiers=TierBudgets(host_bytes="1MiB"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    return made


def model() -> nn.Module:
    return nn.ModuleDict({"tables": collection(), "dense": nn.Linear(4, 1)})


def trained(rows: int = 3) -> nn.Module:
    made = model()
    train(made, rows)
    return made


def train(made: nn.Module, rows: int = 3) -> None:
    features = KeyedJaggedTensor(["f"], torch.arange(rows), lengths=torch.tensor([rows]))
    made["dense"](made["tables"](features).values()).sum().backward()


def through_torch(state: Any, tmp_path: Path) -> Any:
    torch.save(state, tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=True)


def keys(made: nn.Module) -> set[str]:
    return set(made.state_dict())


def test_state_dict_of_trained_tables_is_not_loaded_without_rows(tmp_path):
    made = trained()
    state = through_torch(made.state_dict(), tmp_path)
    fresh = model()
    with pytest.raises(StateError, match=ROWS_ARE_MISSING):
        fresh.load_state_dict(state)
    with pytest.raises(StateError, match=ROWS_ARE_MISSING):
        fresh.load_state_dict(copy.deepcopy(made.state_dict()))
    with pytest.raises(StateError, match=ROWS_ARE_MISSING):
        fresh.load_state_dict({**state})
    # The error says what to do: load the rows first, or load the dense part alone.
    dense_alone = model()
    assert dense_alone.load_state_dict(state, strict=False).missing_keys == ["tables._extra_state"]
    assert torch.equal(dense_alone["dense"].weight, made["dense"].weight)
    Saver(0).save(made, tmp_path / "rows")
    Saver(0).load(fresh, tmp_path / "rows")
    fresh.load_state_dict(state)
    assert torch.equal(fresh["dense"].weight, made["dense"].weight)
    assert len(fresh["tables"].tables["t"]) == 3


def test_one_key_is_added_for_a_module_and_its_length_never_changes():
    made = model()
    before = made.state_dict()
    train(made)
    after = made.state_dict()
    assert set(before) == {"tables.embedding_bags.t.weight", "tables._extra_state", "dense.weight", "dense.bias"}
    assert keys(made) == set(before)
    assert before["tables._extra_state"].shape == after["tables._extra_state"].shape
    assert not [name for param in made.parameters() for name in param.__dict__ if "rows" in name]


def by_safetensors(state: Any, tmp_path: Path) -> Any:
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    return safetensors.torch.load_file(tmp_path / "model.safetensors")


def by_torchs_dcp(state: Any, tmp_path: Path) -> Any:
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    read = model().state_dict()
    dcp.load(read, checkpoint_id=tmp_path / "dcp")
    return read


def in_half(state: Any, _tmp_path: Path) -> Any:
    return {key: value.half() for key, value in state.items()}


COPIES = {
    "safetensors": by_safetensors,
    "dcp": by_torchs_dcp,
    "clone": lambda state, _: {key: value.clone() for key, value in state.items()},
    "cpu": lambda state, _: {key: value.detach().cpu() for key, value in state.items()},
    "numpy": lambda state, _: {key: torch.from_numpy(value.numpy()) for key, value in state.items()},
    "half": in_half,
}


@pytest.mark.parametrize("how", COPIES)
def test_every_copy_of_a_state_dict_has_the_note(how, tmp_path):
    copied = COPIES[how](trained().state_dict(), tmp_path)
    with pytest.raises(StateError, match=ROWS_ARE_MISSING):
        model().load_state_dict(copied)


def test_safetensors_model_functions_miss_the_rows_too(tmp_path):
    safetensors.torch.save_model(made := trained(), tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"tables\._extra_state"):
        safetensors.torch.load_model(model(), tmp_path / "model.safetensors")
    Saver(0).save(made, tmp_path / "rows")
    Saver(0).load(fresh := model(), tmp_path / "rows")
    safetensors.torch.load_model(fresh, tmp_path / "model.safetensors")


def test_a_state_dict_without_a_note_or_with_another_is_loaded():
    state = trained().state_dict()
    for note in (torch.zeros(0), torch.full((3,), -1.5), torch.frombuffer(bytearray(b"[1]"), dtype=torch.uint8), 7):
        model().load_state_dict({**state, "tables._extra_state": note})
    del state["tables._extra_state"]
    model().load_state_dict(state)


@pytest.mark.filterwarnings("error:state_dict:torchrec_embcache.EmbCacheWarning")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_writer_of_the_rows_silences_the_state_dict_warning(tmp_path):
    made = trained()
    dcp.save({"model": made.state_dict()}, storage_writer=EmbCacheStorageWriter(tmp_path / "dcp", made))
    dcp.save({"model": made.state_dict()}, checkpoint_id=tmp_path / "dense")
    made = trained()
    state = made.state_dict()
    Saver(0).save(made, tmp_path / "rows")
    del state
    made = trained()
    state = made.state_dict()
    Saver(0).save_async(made, tmp_path / "rows").result()
    del state
    made = trained()
    state = made.state_dict()
    BlockSaver(path=str(tmp_path / "blocks"), hashtables={"t": made["tables"]}).save()
    del state
    fresh = trained()
    state = {"model": fresh.state_dict()}
    dcp.load(state, storage_reader=EmbCacheStorageReader(tmp_path / "dcp", fresh))
    del state
    model().state_dict()  # without rows


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.filterwarnings("default:state_dict:torchrec_embcache.EmbCacheWarning")
def test_state_dict_saved_without_rows_warns_once_when_dropped(kind, tmp_path):
    made = trained()
    state = made.state_dict()
    with warnings.catch_warnings(record=True, action="always") as told:
        made.state_dict()  # one is watched at a time
        assert not told
        if kind == "torch":
            torch.save(state, tmp_path / "model.pt")
        else:
            dcp.save({"model": state}, checkpoint_id=tmp_path / "dense")
        ours = [str(each.message) for each in told if isinstance(each.message, EmbCacheWarning)]
        assert not ours
        del state
        made.state_dict()
    (said,) = [str(each.message) for each in told if isinstance(each.message, EmbCacheWarning)]
    assert "holds no rows of tables 't' (3)" in said
    assert "EmbCacheStorageWriter(path, model)" in said


def test_rows_of_another_step_are_refused():
    made = trained()
    state = made.state_dict()
    train(made, rows=2)
    with pytest.raises(StateError, match=r"had 3 rows at step 1, and here it has 3 at step 2"):
        made.load_state_dict(state)
    made.load_state_dict(made.state_dict())


def test_what_has_no_rows_on_either_side_is_loaded_in_silence(tmp_path):
    fresh, other = model(), model()
    assert not other["tables"].tables["t"].is_open
    other.load_state_dict(through_torch(fresh.state_dict(), tmp_path))
    assert not other["tables"].tables["t"].is_open
    # One of its tables has rows, and so the model has.
    with make_bag() as bag:
        state = bag.state_dict()
        step(bag, [[1, 2]])
        bag.load_state_dict(state)
    # It is loaded into a model that has rows too. Nothing of what was saved is lost.
    trained().load_state_dict(fresh.state_dict())


def test_imported_rows_are_noted_too(tmp_path):
    made = model()
    made["tables"].tables["t"].import_rows(torch.arange(5), torch.zeros(5, 4))
    with pytest.raises(StateError, match="had 5 rows at step 0, and here it has 0 at step 0"):
        model().load_state_dict(through_torch(made.state_dict(), tmp_path))


def test_an_embedding_bag_notes_its_rows(tmp_path):
    with make_bag() as bag, make_bag() as other:
        step(bag, [[1, 2]])
        state = through_torch(nn.Sequential(bag).state_dict(), tmp_path)
        with pytest.raises(StateError, match="table 'item'.*had 2 rows at step 1"):
            nn.Sequential(other).load_state_dict(state)
        nn.Sequential(other).load_state_dict(state, strict=False)
        Saver(0).save(bag, tmp_path / "rows")
        Saver(0).load(other, tmp_path / "rows")
        nn.Sequential(other).load_state_dict(state)


def test_a_state_dict_that_dcp_loads_into_is_taken_beside_the_tables(tmp_path):
    made = trained()
    path = str(tmp_path / "ckpt")
    dcp.save({"model": made.state_dict()}, storage_writer=EmbCacheStorageWriter(path, made))
    for loaded in (model(), trained(rows=7)):
        state = {"model": loaded.state_dict()}
        dcp.load(state, storage_reader=EmbCacheStorageReader(path, loaded))
        loaded.load_state_dict(state["model"])
        assert torch.equal(loaded["dense"].weight, made["dense"].weight)
        assert len(loaded["tables"].tables["t"]) == 3


def test_a_note_beside_the_model_is_checked_by_torchs_own_dcp(tmp_path):
    made = trained()
    Saver(0).save(made, tmp_path / "rows")
    dcp.save({"model": made.state_dict(), "tables": TableState(made)}, checkpoint_id=str(tmp_path / "dense"))
    fresh = model()
    state = {"model": fresh.state_dict(), "tables": TableState(fresh)}
    with pytest.raises(Exception, match=r"table 'tables/t' had 3 rows at step 1, and here it has 0.*Saver") as refused:
        dcp.load(state, checkpoint_id=str(tmp_path / "dense"))
    assert isinstance(refused.value, StateError)
    Saver(0).load(fresh, tmp_path / "rows")
    dcp.load(state, checkpoint_id=str(tmp_path / "dense"))
    fresh.load_state_dict(state["model"])
    assert torch.equal(fresh["dense"].weight, made["dense"].weight)


def test_torchs_own_dcp_saves_and_loads_the_same_keys(tmp_path):
    made = trained()
    dcp.save({"model": made.state_dict()}, checkpoint_id=str(tmp_path / "dense"))
    state = {"model": made.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dense"))
    made.load_state_dict(state["model"])


def wrapped(made: nn.Module) -> dict[str, Any]:
    """A model as torch's tutorial gives it to DCP: an object with `state_dict` and `load_state_dict`."""
    return {"app": made}


@pytest.mark.parametrize("give", [lambda made: {"model": made.state_dict()}, wrapped], ids=["state dict", "module"])
def test_state_loaded_by_torch_dcp_is_rejected_without_rows(give, tmp_path):
    made = trained()
    path = str(tmp_path / "dense")
    dcp.save(give(made), checkpoint_id=path)
    Saver(0).save(made, tmp_path / "rows")

    def load(fresh: nn.Module, **how: Any) -> None:
        state = give(fresh)
        dcp.load(state, checkpoint_id=path)
        if "model" in state:
            fresh.load_state_dict(state["model"], **how)

    fresh = model()
    with pytest.raises(StateError, match=ROWS_ARE_MISSING):
        load(fresh)
    if give is not wrapped:
        load(model(), strict=False)
    Saver(0).load(fresh, tmp_path / "rows")
    load(fresh)
    assert torch.equal(fresh["dense"].weight, made["dense"].weight)
    assert len(fresh["tables"].tables["t"]) == 3


def test_rows_that_an_ssd_tier_resumes_are_rows_for_dcp_too(tmp_path):
    (tmp_path / "ssd").mkdir(mode=0o750)
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="16MiB", ssd_dir=tmp_path / "ssd", reopen="resume")
    with make_bag(tiers=TierBudgets(host_bytes="1MiB", ssd_bytes="16MiB", ssd_dir=tmp_path / "ssd")) as bag:
        step(bag, [[1, 2]])
    with make_bag(tiers=tiers) as bag:
        state = bag.state_dict()
        bag.load_state_dict(state)


def _sharded(_rank: int, _world: int, folder: str) -> Any:
    told = []
    for number, shardings in enumerate((ROW_WISE, TABLE_WISE)):
        made = sharded(Model(), shardings, {"learning_rate": 0.1})
        train_sharded(made, batches(2, _rank, _world))
        path = f"{folder}/{number}-{_rank}.pt"
        torch.save(made.state_dict(), path)
        Saver().save(made, f"{folder}/rows-{number}")
        for other in (ROW_WISE, TABLE_WISE):
            fresh = sharded(Model(), other, {"learning_rate": 0.1})
            # Every rank loads what the first one saved, as is usual.
            state = torch.load(f"{folder}/{number}-0.pt", weights_only=True)
            try:
                fresh.load_state_dict(dict(state))
                told.append("loaded")
            except StateError as error:
                told.append(re.sub(r".*table '(t.)'.*", r"\1", str(error)))
            fresh.load_state_dict(dict(state), strict=False)
            Saver().load(fresh, f"{folder}/rows-{number}")
            fresh.load_state_dict(dict(state))
            train_sharded(fresh, batches(1, _rank, _world))
    return told


def test_sharded_tables_refuse_a_state_dict_without_their_rows(two_ranks: World, tmp_path: Path) -> None:
    results = two_ranks.run(_sharded, str(tmp_path))
    # A rank sees its own tables, and the state dict notes those of the rank that took it.
    assert all("loaded" not in told[:2] for told in results)
    assert any("loaded" not in told for told in results)


# ---- without the optimizer that trained the rows


def test_the_note_accepts_rows_that_were_loaded_without_slots(tmp_path):
    with make_bag(optimizer=optimizers.Adagrad(lr=0.1)) as bag, make_bag(optimizer=optimizers.Adam(lr=0.1)) as other:
        step(bag, [[1, 2]])
        state = bag.state_dict()
        Saver(0).save(bag, tmp_path / "rows")
        Saver(0).load(other, tmp_path / "rows", slots=False)
        other.load_state_dict(state)
