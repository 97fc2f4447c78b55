"""Loads of weights without the optimizer's slots, for evaluation and for fine-tuning."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import KeyedJaggedTensor
from torchrec import optim as trec_optim
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tables import OPTIMIZERS, make_bag, random_batches, step
from torchrec_embcache import (
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheStorageReader,
    EmbCacheStorageWriter,
    Saver,
    TierBudgets,
    optimizers,
    serialize,
)
from torchrec_embcache.exceptions import CorruptionError, MismatchError
from torchrec_embcache.modules._optimizer_choice import choose_optimizer

BATCHES = random_batches(4, 6, 40)


def trained(**settings: Any) -> EmbCacheEmbeddingBag:
    bag = make_bag(**settings)
    for bags in BATCHES:
        step(bag, bags)
    return bag


def all_ids(bag: EmbCacheEmbeddingBag) -> torch.Tensor:
    return torch.cat([chunk.ids for chunk in bag.export()]).sort().values


def assert_weights_without_slots(loaded: EmbCacheEmbeddingBag, saved: EmbCacheEmbeddingBag) -> None:
    ids = all_ids(saved)
    assert torch.equal(all_ids(loaded), ids)
    got, want = loaded.read_rows(ids), saved.read_rows(ids)
    assert torch.equal(got.weights, want.weights)
    assert torch.equal(got.metadata.count, want.metadata.count)
    assert torch.equal(got.metadata.last_step, want.metadata.last_step)
    assert torch.equal(got.metadata.score, want.metadata.score)
    assert not any(slot.any() for slot in got.slots.values())


@pytest.mark.slow
@pytest.mark.parametrize("after", OPTIMIZERS)
@pytest.mark.parametrize("before", ["sgd", "rowwise_adagrad", "adam"])
def test_weights_load_under_any_optimizer_with_new_slots(before, after, tmp_path, backend):
    with (
        trained(optimizer=OPTIMIZERS[before], **backend) as bag,
        make_bag(optimizer=OPTIMIZERS[after], **backend) as other,
    ):
        step(other, [[1, 2]])  # what was there is replaced
        Saver(0).save(bag, tmp_path / "rows")
        report = Saver(0).load(other, tmp_path / "rows", slots=False)
        assert report.rows == {"item": len(bag)}
        assert_weights_without_slots(other, bag)
        # The moments of Adam and its kin are new, and so is the step that corrects them.
        assert other.table.step() == (0 if "exp_avg" in OPTIMIZERS[after].slot_names else len(BATCHES))


def test_dcp_loads_tables_without_slots_too(tmp_path):
    with trained() as bag, make_bag(optimizer=optimizers.Adam(lr=0.05)) as other:
        path = str(tmp_path / "ckpt")
        dcp.save({"model": bag.state_dict()}, storage_writer=EmbCacheStorageWriter(path, bag))
        state = {"model": other.state_dict()}
        with pytest.raises(CheckpointException, match="slots=False"):
            dcp.load(state, storage_reader=EmbCacheStorageReader(path, other))
        dcp.load(state, storage_reader=EmbCacheStorageReader(path, other, slots=False))
        assert_weights_without_slots(other, bag)
        assert other.table.step() == 0
        other.load_state_dict(state["model"])


def test_blocks_load_without_slots_too(tmp_path):
    with trained() as bag, make_bag(optimizer=optimizers.RowWiseAdagrad(lr=0.05)) as other:
        serialize.Saver(path=str(tmp_path / "blocks"), hashtables={"item": bag}).save()
        # Both optimizers call their slot "sum", but its widths differ.
        with pytest.raises(MismatchError, match="slots=False"):
            serialize.Loader(str(tmp_path / "blocks"), {"item": other}).load()
        loader = serialize.Loader(str(tmp_path / "blocks"), {"item": other}, slots=False)
        assert "sum" not in loader.default_load_info()["item"]["item"]
        assert loader.load().tables == {"item": len(bag)}
        assert_weights_without_slots(other, bag)
        assert other.table.step() == 0
        # Rows are loaded over existing ones, whose slots stay.
        step(other, BATCHES[0])
        before = other.read_rows(all_ids(bag))
        assert before.slots["sum"].any()
        loader.load()
        after = other.read_rows(all_ids(bag))
        assert torch.equal(after.slots["sum"], before.slots["sum"])
        assert torch.equal(after.weights, bag.read_rows(all_ids(bag)).weights)
        assert other.table.step() == 1


def test_fine_tuning_goes_on_as_from_imported_weights(tmp_path):
    fresh = optimizers.Adam(lr=0.05)
    with trained() as bag, make_bag(optimizer=fresh) as tuned, make_bag(optimizer=fresh) as imported:
        Saver(0).save(bag, tmp_path / "rows")
        Saver(0).load(tuned, tmp_path / "rows", slots=False)
        ids = all_ids(bag)
        imported.import_rows(ids, bag.read_rows(ids).weights)
        for bags in BATCHES[:2]:
            assert torch.equal(step(tuned, bags), step(imported, bags))
        assert torch.equal(tuned.read_rows(ids).weights, imported.read_rows(ids).weights)
        assert torch.equal(tuned.read_rows(ids).slots["exp_avg"], imported.read_rows(ids).slots["exp_avg"])


def test_deltas_are_read_without_slots_too(tmp_path):
    with trained() as bag, make_bag(optimizer=optimizers.SGD(lr=0.1)) as other:
        Saver(0).save(bag, tmp_path / "rows")
        for number in range(2):
            step(bag, [[1, 2, 3 + number], [10**9 + number]])
            bag.remove_rows(all_ids(bag)[:2])
            assert Saver(0).save(bag, tmp_path / "rows", incremental=True).kind == "delta"
        assert Saver(0).load(other, tmp_path / "rows", slots=False).deltas == 2
        assert_weights_without_slots(other, bag)


def test_linked_checkpoint_loads_by_rows_without_an_ssd_tier(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    tiers = TierBudgets(host_bytes="64KiB", ssd_bytes="32MiB", ssd_dir=str(tmp_path / "cache"))
    with trained(tiers=tiers) as bag, make_bag(optimizer=optimizers.RowWiseAdagrad()) as other:
        assert Saver(0).save(bag, tmp_path / "rows", linked=True).kind == "linked"
        Saver(0).load(other, tmp_path / "rows", slots=False)
        assert_weights_without_slots(other, bag)


def test_slots_are_not_even_read(tmp_path):
    """A damaged slot ends a load of slots, and does not matter to a load without slots."""
    ids = torch.arange(3000)
    with make_bag(embedding_dim=16, optimizer=optimizers.Adagrad(lr=0.1)) as bag, make_bag(embedding_dim=16) as other:
        bag.import_rows(ids, torch.rand(3000, 16), {"sum": torch.full((3000, 16), 7.25)})
        Saver(0).save(bag, tmp_path / "rows")
        (path,) = (tmp_path / "rows").glob("**/*.safetensors")
        content = bytearray(path.read_bytes())
        wanted = torch.full((64,), 7.25).numpy().tobytes()
        content[content.index(wanted) + 20_000] ^= 1
        path.write_bytes(content)
        with pytest.raises(CorruptionError, match="sum"):
            Saver(0).load(other, tmp_path / "rows")
        Saver(0).load(other, tmp_path / "rows", slots=False)
        assert torch.equal(other.read_rows(ids).weights, bag.read_rows(ids).weights)


def test_a_delta_does_not_build_on_what_was_loaded_without_slots(tmp_path):
    with trained() as bag, make_bag() as other:
        Saver(0).save(bag, tmp_path / "rows")
        Saver(0).load(other, tmp_path / "rows", slots=False)
        step(other, [[1]])
        assert Saver(0).save(other, tmp_path / "rows", incremental=True).kind == "full"


# ---- collections


def collection() -> EmbCacheEmbeddingBagCollection:
    return EmbCacheEmbeddingBagCollection(
        [EmbCacheEmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=100, feature_names=["f"])],
        tiers=TierBudgets(host_bytes="1MiB"),
    )


def saved_collection(path: Path, optimizer: type[Any] = trec_optim.RowWiseAdagrad) -> torch.Tensor:
    made = collection()
    apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": 0.1})
    out = made(FEATURES).values()
    out.sum().backward()
    Saver(0).save(nn.ModuleDict({"tables": made}), path)
    return made.eval()(FEATURES).values()


FEATURES = KeyedJaggedTensor(["f"], torch.tensor([5, -7, 5]), lengths=torch.tensor([2, 1]))


def test_a_collection_without_an_optimizer_evaluates(tmp_path):
    want = saved_collection(tmp_path / "rows")
    model = nn.ModuleDict({"tables": collection()}).eval()
    Saver(0).load(model, tmp_path / "rows", slots=False)
    assert torch.equal(model["tables"](FEATURES).values(), want)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (None, r"table 't' of module 'tables' has no optimizer"),
        (torch.optim.Adagrad, r"has the optimizer torch\.optim\.Adagrad"),
        (torch.optim.Adam, r"has the optimizer torch\.optim\.Adam,"),
    ],
)
def test_mismatched_optimizer_is_named_as_the_user_wrote_it(optimizer, words, tmp_path):
    saved_collection(tmp_path / "rows")
    made = collection()
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": 0.1})
    with pytest.raises(MismatchError, match=words + r".*torchrec\.optim\.RowWiseAdagrad.*slots=False"):
        Saver(0).load(nn.ModuleDict({"tables": made}), tmp_path / "rows")


def test_torch_and_fused_optimizers_are_named_as_given():
    chosen = choose_optimizer("t", None, {"optimizer": EmbOptimType.EXACT_ADAGRAD})
    assert chosen is not None
    assert chosen.display_name == "EmbOptimType.EXACT_ADAGRAD"
    assert chosen == optimizers.Adagrad(lr=0.01, eps=1e-8)
    assert optimizers.RowWiseAdagrad().display_name == "optimizers.RowWiseAdagrad"
