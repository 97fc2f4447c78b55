"""`embcache convert --to torchrec-dcp`: tables of ours that TorchRec's own modules load through `torch.distributed.checkpoint`."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrec
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig
from torchrec import KeyedJaggedTensor as Kjt
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from cli_cases import refused, run
from saver_cases import make_bag
from torchrec_dcp_cases import ROWS, save_trained
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    TierBudgets,
    initializers,
    optimizers,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli.convert import torchrec_dcp_writer
from torchrec_embcache.cli.convert.torchrec_dcp import read_tables

CPU = torch.device("cpu")
#: Some ids that are trained, and 90, which has no row.
IDS = torch.tensor([3, 4, 90, 7, 8, 3, 20, 21, 30])
LENGTHS = torch.tensor([3, 2, 4])


def configs(bag: Any, sequence: Any, **more: Any) -> tuple[list[Any], list[Any]]:
    bags = [bag(name="item", embedding_dim=8, num_embeddings=100, feature_names=["i"], **more)]
    words = [sequence(name="words", embedding_dim=8, num_embeddings=64, feature_names=["t"], **more)]
    return bags, words


class Ours(nn.Module):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        bags, words = configs(
            EmbCacheEmbeddingBagConfig, EmbCacheEmbeddingConfig, initializer=initializers.Uniform(-0.1, 0.1)
        )
        tiers = TierBudgets(host_bytes="1MiB")
        self.bags = EmbCacheEmbeddingBagCollection(bags, tiers=tiers, name="bags", seed=5)
        self.sequence = EmbCacheEmbeddingCollection(words, tiers=tiers, name="sequence", seed=6)
        for module in (self.bags, self.sequence):
            apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})


class Theirs(nn.Module):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        bags, words = configs(EmbeddingBagConfig, EmbeddingConfig)
        self.bags = EmbeddingBagCollection(tables=bags, device=torch.device("meta"))
        self.sequence = EmbeddingCollection(tables=words, device=torch.device("meta"))
        for module in (self.bags, self.sequence):
            apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})


KINDS = {"rowwise": torchrec.optim.RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def outputs(model: Any) -> list[torch.Tensor]:
    bags = model.bags(Kjt(["i"], IDS, lengths=LENGTHS))
    words = model.sequence(Kjt(["t"], IDS[IDS < 64], lengths=torch.tensor([2, 2, 4])))
    return [bags.values() if hasattr(bags, "values") else bags, words["t"].values()]


def trained(optimizer: str) -> Ours:
    model = Ours(KINDS[optimizer])
    for begin in (3, 20):
        ids = torch.arange(begin, begin + 12)
        lengths = torch.full((4,), 3)
        bags, words = model.bags(Kjt(["i"], ids, lengths=lengths)), model.sequence(Kjt(["t"], ids, lengths=lengths))
        (bags.values().square().sum() + words["t"].values().square().sum()).backward()
    return model


def loaded_by_torchrec(_rank: int, size: int, path: str, optimizer: str, sharding: str) -> list[torch.Tensor]:
    """Returns the outputs of TorchRec's own sharded model after it loaded `path`, before and after another step."""
    torch.manual_seed(1)
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    constraints = {
        "item": ParameterConstraints(sharding_types=[sharding], min_partition=4),
        "words": ParameterConstraints(sharding_types=["row_wise"]),
    }
    planner = EmbeddingShardingPlanner(topology=Topology(size, "cpu"), constraints=constraints)
    plan = planner.collective_plan(Theirs(KINDS[optimizer]), sharders, torch.distributed.group.WORLD)
    model = DistributedModelParallel(Theirs(KINDS[optimizer]), device=CPU, plan=plan, sharders=sharders)
    state = {"model": model.state_dict()}
    if optimizer != "sgd":  # which has no state, so that there is nothing of it in a checkpoint
        state["optim"] = model.fused_optimizer.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    if optimizer != "sgd":
        model.fused_optimizer.load_state_dict(state["optim"])
    before = [out.detach().clone() for out in outputs(model.module)]
    outs = outputs(model.module)
    # Both ranks train this batch, and TorchRec divides the sum of their gradients by two.
    (outs[0].square().sum() + outs[1].square().sum()).backward()
    return before + [out.detach() for out in outputs(model.module)]


@pytest.mark.parametrize(
    ("optimizer", "sharding"), [("rowwise", "table_wise"), ("adagrad", "column_wise"), ("sgd", "table_wise")]
)
def test_torchrec_loads_our_rows_and_trains_with_the_same_bits(
    two_ranks: Any, tmp_path: Path, optimizer: str, sharding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained(optimizer)
    Saver(0).save(model, str(tmp_path / "ours"))
    options = ["--to", "torchrec-dcp", "--rows", "item=100", "--rows", "words=64", "--model-key", "model"]
    code, found = run(capsys, "convert", tmp_path / "ours", tmp_path / "theirs", *options, "--sequence", "sequence")
    assert code == 0, found
    assert {table["table"]: table["rows"] for table in found["tables"]} == {"item": 100, "words": 64}
    theirs = two_ranks.run(loaded_by_torchrec, str(tmp_path / "theirs"), optimizer, sharding)
    model.eval()
    before = [out.detach() for out in outputs(model)]
    for rank in theirs:
        for ours, other in zip(before, rank[:2], strict=True):
            assert torch.equal(ours, other)
    model.train()
    outs = outputs(model)
    (outs[0].square().sum() + outs[1].square().sum()).backward()
    model.eval()
    for ours, other, earlier in zip(outputs(model), theirs[0][2:], before, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)
        assert not torch.equal(ours, earlier), "the step has changed rows"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a DCP checkpoint, loaded by torch."""
    listed = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state = {
        name: torch.full(entry.size, torch.nan)
        for name, entry in listed.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def test_torchrec_checkpoint_round_trips_with_names_and_bits(
    two_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks.run(save_trained, str(tmp_path / "theirs"), "rowwise", "table_wise")
    keys = ["--model-key", "model"]
    assert run(capsys, "convert", tmp_path / "theirs", tmp_path / "ours", *keys)[0] == 0
    assert {table["module"] for table in run(capsys, "inspect", tmp_path / "ours")[1]["tables"]} == {"bags", "sequence"}
    # Parts of a few rows, so that each tensor has several chunks, and several runs of rows.
    monkeypatch.setattr(torchrec_dcp_writer, "_PART_BYTES", 1_000)
    rows = [word for name, count in ROWS.items() for word in ("--rows", f"{name}={count}")]
    back = [*keys, "--to", "torchrec-dcp", "--sequence", "sequence", *rows]
    assert run(capsys, "convert", tmp_path / "ours", tmp_path / "back", *back)[0] == 0
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "back")
    assert set(theirs) - set(ours) == {"model.over.weight", "model.over.bias"}
    assert set(ours) < set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    stored = FileSystemReader(tmp_path / "back").read_metadata().state_dict_metadata
    assert min(len(entry.chunks) for entry in stored.values()) > 1


def test_untrained_row_is_exported_as_initialized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are zeros."""
    monkeypatch.setattr(torchrec_dcp_writer, "_INIT_CHUNK_ROWS", 7)
    model = trained("adagrad")
    Saver(0).save(model, str(tmp_path / "ours"))
    options = ["--to", "torchrec-dcp", "--rows", "item=100", "--rows", "sequence/words=64", "--rename", "words=text"]
    assert run(capsys, "convert", tmp_path / "ours", tmp_path / "theirs", *options)[0] == 0
    tensors = tensors_of(tmp_path / "theirs")
    weight = tensors["bags.embedding_bags.item.weight"]
    slot = tensors["optim.state.bags.embedding_bags.item.weight.item.momentum1"]
    found = model.bags.tables["item"].read_rows(torch.arange(100))
    assert torch.equal(weight, found.weights)
    assert weight[~found.found].abs().min() > 0, "the initializer gives no zeros"
    assert torch.equal(slot, found.slots["sum"])
    assert not slot[~found.found].any()
    assert "optim.state.sequence.embedding_bags.text.weight.text.momentum1" in tensors


@pytest.mark.parametrize("kind", [optimizers.Adam, optimizers.PartialRowWiseAdam])
def test_slots_of_adam_have_torchrecs_names_and_come_back(
    tmp_path: Path, kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = make_bag(embedding_dim=4, optimizer=kind(lr=0.1))
    for _ in range(2):
        bag(torch.arange(12).reshape(3, 4)).square().sum().backward()
    Saver(0).save(nn.ModuleDict({"bag": bag}), str(tmp_path / "ours"))
    assert (
        run(capsys, "convert", tmp_path / "ours", tmp_path / "theirs", "--to", "torchrec-dcp", "--rows", "item=12")[0]
        == 0
    )
    slots = {name.rpartition(".")[2] for name in tensors_of(tmp_path / "theirs")}
    # `EmbeddingFusedOptimizer` renames the first state of FBGEMM's `get_optimizer_state` to momentum1. Others keep their names.
    assert slots == {"weight", "momentum1", "exp_avg_sq"}
    back = ["--optimizer", bag.table.optimizer.kind, "--step", "2"]
    assert run(capsys, "convert", tmp_path / "theirs", tmp_path / "back", *back)[0] == 0
    again = make_bag(embedding_dim=4, optimizer=kind(lr=0.1))
    Saver(0).load(nn.ModuleDict({"bag": again}), str(tmp_path / "back"))
    for model in (bag, again):
        model(torch.arange(12).reshape(3, 4)).square().sum().backward()
    assert torch.equal(bag.table.read_rows(torch.arange(12)).weights, again.table.read_rows(torch.arange(12)).weights)


def saved(path: Path, ids: list[int], **changes: Any) -> Path:
    bag = make_bag(**{"embedding_dim": 4, "tiers": TierBudgets(host_bytes="8MiB")} | changes)
    bag.import_rows(torch.tensor(ids), torch.ones(len(ids), 4))
    Saver(0).save(nn.ModuleDict({"bag": bag}), str(path))
    return path


@pytest.mark.parametrize(
    ("ids", "options", "kind", "words"),
    [
        ([0, 10], ["--rows", "item=10"], "InputError", "a row of the id 10"),
        ([0, -1], ["--rows", "item=10"], "InputError", "a row of the id -1"),
        ([0], [], "InputError", "--rows item=NUM_EMBEDDINGS"),
        ([0], ["--rows", "item=0"], "InputError", "give 1 to"),
        ([0], ["--rows", "item=10", "--rows", "items=10"], "InputError", "--rows items: the checkpoint has"),
        ([0], ["--rows", "item=10", "--sequence", "bags"], "InputError", "--sequence bags: the checkpoint has"),
    ],
)
def test_unsupported_tables_are_rejected_by_name(
    tmp_path: Path, ids: list[int], options: list[str], kind: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the conversion is left."""
    source = saved(tmp_path / "ours", ids)
    found, message = refused(capsys, source, tmp_path / "theirs", "--to", "torchrec-dcp", *options)
    assert found == kind
    assert words in message
    assert not (tmp_path / "theirs").exists()


def test_unknown_optimizer_is_rejected_unless_slots_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "ours", [0, 3], optimizer=optimizers.FTRL(lr=0.1))
    options = ["--to", "torchrec-dcp", "--rows", "item=5"]
    kind, message = refused(capsys, source, tmp_path / "theirs", *options)
    assert kind == "UnsupportedError"
    skips = message.partition("leave them out with ")[2].split()
    assert run(capsys, "convert", source, tmp_path / "theirs", *options, *skips)[0] == 0
    assert list(tensors_of(tmp_path / "theirs")) == ["bag.embedding_bags.item.weight"]


def test_a_key_that_a_torchrec_checkpoint_has_not_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"embedding_bags.t.weight": torch.ones(3, 2)}, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    kind, message = refused(capsys, tmp_path / "theirs", tmp_path / "ours", "--model-key", "model")
    assert (kind, "not below --model-key model" in message) == ("InputError", True)


PEAK = """
import sys
from torchrec_embcache.cli import main
from torchrec_embcache.cli.convert import torchrec_dcp_writer

def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1])

torchrec_dcp_writer._PART_BYTES = int(sys.argv[4])
before = peak()
assert main(["convert", sys.argv[1], sys.argv[2], "--to", "torchrec-dcp", "--rows", "item=" + sys.argv[3]]) == 0
print("grew", peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    count = 1_000_000  # 128 MB of numbers, in parts of 4 MiB
    bag = make_bag(embedding_dim=32, optimizer=optimizers.SGD(lr=0.1), tiers=TierBudgets(host_bytes="400MiB"))
    bag.import_rows(torch.arange(count), (torch.arange(32 * count) % 65_521).float().reshape(count, 32))
    Saver(0).save(nn.ModuleDict({"bag": bag}), str(tmp_path / "ours"))
    bag.close()
    grew = {}
    for part_bytes, target in ((4 << 20, "theirs"), (1 << 30, "at_once")):
        command = [sys.executable, "-c", PEAK, tmp_path / "ours", tmp_path / target, count, part_bytes]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        grew[target] = int(done.stdout.split()[-1]) >> 10
    # Reading a checkpoint, and the modules that are imported on the way, take some 110 MiB for any table.
    assert grew["theirs"] < 160, f"{grew} MiB more than before"
    assert grew["at_once"] > grew["theirs"] + 100, f"{grew}: a table of one part lies in RAM, and this shows it"
    (table,) = read_tables(tmp_path / "theirs")[0]
    for columns in table.chunks(100_000):
        expected = np.arange(32 * columns["id"][0], 32 * (columns["id"][-1] + 1)) % 65_521
        np.testing.assert_array_equal(columns["weight"].reshape(-1), expected)


@pytest.mark.slow
def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path / "ours", list(range(20_000)))
    command = [sys.executable, "-m", "torchrec_embcache", "convert", str(source), str(tmp_path / "theirs")]
    for most in (
        100_000,
        700_000,
    ):  # the file of rows that wait fails, and the checkpoint's own: it has rows without ids, but more
        done = subprocess.run(
            [*command, "--to", "torchrec-dcp", "--rows", "item=60000"],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        )
        assert (done.returncode, "StorageError" in done.stderr) == (3, True), done.stderr
        assert not (tmp_path / "theirs").exists()
