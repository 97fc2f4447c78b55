"""`embcache convert --to serving`: rows without slots, in float32, fp16, bf16, or FBGEMM's int8, which FBGEMM reads."""

import json
from pathlib import Path

import fbgemm_gpu  # noqa: F401  # it registers the operators
import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from safetensors import safe_open
from torch import Tensor, nn

from lifecycle_cases import embedding, update
from torchrec_embcache import _native, admission, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main
from torchrec_embcache.cli.checkpoints import OpenCheckpoint
from torchrec_embcache.exceptions import StateError, UnsupportedError

PRECISIONS = ["fp32", "fp16", "bf16", "int8"]
DIMS = [1, 3, 8, 65, 128]
OPTIMIZERS = [optimizers.Adam(lr=0.1), optimizers.SGD(lr=0.1)]


def model(dim: int, optimizer: optimizers.OptimizerSpec) -> nn.ModuleDict:
    return nn.ModuleDict({"item": embedding(name="item", embedding_dim=dim, optimizer=optimizer)})


def chain(dim: int, path: Path, optimizer: optimizers.OptimizerSpec = OPTIMIZERS[0]) -> nn.ModuleDict:
    """A model whose checkpoint is a delta on a full one: rows that stay, that were trained since, that left and that came."""
    made = model(dim, optimizer)
    update(made["item"](torch.arange(0, 400)))
    Saver(0).save(made, path)
    update(made["item"](torch.arange(300, 600)))
    made["item"].remove_rows([5, 6, 7, 399])
    special = np.zeros((4, dim), np.float32)
    special[1], special[2, 0], special[3] = 1.5, -70000.0 if dim == 3 else -3.0, 1e-8
    made["item"].import_rows([-1, -2, -3, -4], special if dim != 3 else np.minimum(special, 1.0).clip(-60000))
    assert Saver(0).save(made, path, incremental=True).kind == "delta"
    return made


def weights_of(table: nn.Module) -> dict[int, Tensor]:
    return {
        int(row_id): row
        for chunk in table.export()
        for row_id, row in zip(chunk.ids.tolist(), chunk.weights, strict=True)
    }


def stored(path: Path) -> tuple[list[int], Tensor, list[str]]:
    """The ids and the weights of the one table of a checkpoint, and the names of its columns, as safetensors reads them."""
    ids: list[int] = []
    weights, names = [], []
    for file in sorted(path.rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            ids += opened.get_tensor("id").tolist()
            weights.append(opened.get_tensor("weight"))
            names = list(opened.keys())
    return ids, torch.cat(weights), names


def read(path: Path) -> dict[int, Tensor]:
    """Every row as this package reads it."""
    opened = OpenCheckpoint.open(str(path))
    (table,) = opened.tables
    blocks: list[_native.RowBlock] = []
    opened.rows.read(table["module"], table["table"], 0, table["total_num_buckets"], blocks.append)
    return {
        int(row_id): torch.from_numpy(vector[: table["dim"]].copy())
        for block in blocks
        for row_id, vector in zip(block.ids, block.vectors, strict=True)
    }


def for_serving(source: Path, target: Path, *more: str) -> None:
    assert main(["convert", str(source), str(target), "--to", "serving", *more]) == 0


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(torch.int32).flatten().tolist()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_are_those_of_the_chain_as_torch_and_fbgemm_round_them(
    tmp_path: Path, precision: str, dim: int, optimizer: optimizers.OptimizerSpec
) -> None:
    expected = weights_of(chain(dim, tmp_path / "trained", optimizer)["item"])
    for_serving(tmp_path / "trained", tmp_path / "served", "--precision", precision)
    ids, column, names = stored(tmp_path / "served")
    assert sorted(ids) == sorted(expected)
    assert not {"exp_avg", "exp_avg_sq", "modified_epoch"} & set(names)
    rows = torch.stack([expected[row_id] for row_id in ids])
    found = read(tmp_path / "served")
    ours = torch.stack([found[row_id] for row_id in ids])
    if precision == "int8":
        assert (column.dtype, column.shape) == (torch.uint8, (len(ids), dim + 4))
        # FBGEMM takes rows of an even width, so that those of an odd one have their last weight, or its code, twice there.
        width = dim + dim % 2
        twice = [*range(dim), *[dim - 1] * (dim % 2)]
        quantised = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows[:, twice].contiguous(), 8)
        padded = torch.cat([column[:, twice], column[:, dim:]], dim=1)
        assert torch.equal(padded, quantised)
        theirs = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(padded, 8)
        assert theirs.shape == (len(ids), width)
        assert bits(ours) == bits(theirs[:, :dim])
    else:
        kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
        assert (column.dtype, column.shape) == (kind, (len(ids), dim))
        assert torch.equal(column, rows.to(kind))
        assert bits(ours) == bits(rows.to(kind).float())


@pytest.mark.parametrize("dim", [4, 8, 64, 128])
def test_fbgemms_inference_tables_read_the_rows_of_int8(tmp_path: Path, dim: int) -> None:
    chain(dim, tmp_path / "trained")
    for_serving(tmp_path / "trained", tmp_path / "served", "--precision", "int8")
    ids, column, _ = stored(tmp_path / "served")
    # Its tables have the scale and the bias of a row before the codes.
    turned = torch.cat([column[:, dim:], column[:, :dim]], dim=1)
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("item", len(ids), dim, SparseType.INT8, EmbeddingLocation.HOST)],
        device="cpu",
        pooling_mode=PoolingMode.SUM,
        output_dtype=SparseType.FP32,
        row_alignment=1,
    )
    tables.fill_random_weights()
    ((weights, _),) = tables.split_embedding_weights(split_scale_shifts=False)
    assert weights.shape == turned.shape
    weights.copy_(turned)
    out = tables(torch.arange(len(ids), dtype=torch.int32), torch.arange(len(ids) + 1, dtype=torch.int32))
    found = read(tmp_path / "served")
    assert bits(out) == bits(torch.stack([found[row_id] for row_id in ids]))


def test_random_rows_of_every_size_have_fbgemms_bytes(tmp_path: Path) -> None:
    dim = 16
    generator = torch.Generator().manual_seed(3)
    scales = 10.0 ** torch.randint(-9, 5, (3000, 1), generator=generator)
    rows = torch.randn(3000, dim, generator=generator) * scales + torch.randn(3000, 1, generator=generator)
    made = model(dim, OPTIMIZERS[1])
    made["item"].import_rows(torch.arange(3000), rows.clamp(-65000, 65000))
    Saver(0).save(made, tmp_path / "trained")
    for_serving(tmp_path / "trained", tmp_path / "served", "--precision", "int8")
    ids, column, _ = stored(tmp_path / "served")
    rows = rows.clamp(-65000, 65000)[torch.tensor(ids)]
    assert torch.equal(column, torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, 8))
    found = read(tmp_path / "served")
    theirs = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(column, 8)
    assert bits(torch.stack([found[row_id] for row_id in ids])) == bits(theirs)


def test_manifest_names_its_source_and_fewer_bytes_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain(64, tmp_path / "trained")
    source = OpenCheckpoint.open(str(tmp_path / "trained"))
    sizes = {}
    for precision in PRECISIONS:
        for_serving(tmp_path / "trained", tmp_path / precision, "--precision", precision)
        made = OpenCheckpoint.open(str(tmp_path / precision)).manifest
        assert (made["version"], made["kind"], made["parent"]) == (1, "serving", None)
        assert made["made_from"]["name"] == source.name
        (table,) = made["tables"]
        assert (table["spec"]["precision"], table["rows"]) == (precision, 600)
        sizes[precision] = sum(file.stat().st_size for file in (tmp_path / precision).rglob("*.safetensors"))
    assert sizes["int8"] < sizes["fp16"] == sizes["bf16"] < sizes["fp32"]
    assert sizes["int8"] < sum(file.stat().st_size for file in (tmp_path / "trained").rglob("*.safetensors")) / 5
    capsys.readouterr()
    for_serving(tmp_path / "trained", tmp_path / "plain", "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["precision"], told["made_from"]) == ("fp32", source.name)
    assert told["tables"] == [{"module": "item", "table": "item", "rows": 600, "dim": 64, "precision": "fp32"}]


def test_linked_and_two_rank_checkpoints_convert_to_one(tmp_path: Path) -> None:
    made = chain(8, tmp_path / "trained")
    expected = read(tmp_path / "trained")
    Saver(0).save(made, tmp_path / "linked", linked=True)
    assert main(["reshard", str(tmp_path / "trained"), str(tmp_path / "two"), "--world-size", "2"]) == 0
    for name in ("linked", "two"):
        for_serving(tmp_path / name, tmp_path / f"{name} served")
        found = read(tmp_path / f"{name} served")
        assert {row_id: bits(row) for row_id, row in found.items()} == {
            row_id: bits(row) for row_id, row in expected.items()
        }


def test_the_target_keeps_as_many_as_it_is_told(tmp_path: Path) -> None:
    chain(8, tmp_path / "trained")
    for keep, there in ((2, 1), (2, 2), (2, 2), (1, 1)):
        for_serving(tmp_path / "trained", tmp_path / "served", "--keep", str(keep))
        assert len(list((tmp_path / "served").glob("*/manifest.json"))) == there


# ---- what is done with one


def test_a_load_refuses_it_and_says_what_it_is_for(tmp_path: Path) -> None:
    chain(8, tmp_path / "trained")
    for_serving(tmp_path / "trained", tmp_path / "served", "--precision", "int8")
    name = OpenCheckpoint.open(str(tmp_path / "trained")).name
    table = model(8, OPTIMIZERS[0])
    update(table["item"](torch.arange(4)))
    before = weights_of(table["item"])
    for slots in (True, False):
        with pytest.raises(UnsupportedError, match=rf"kind serving, int8.*torchrec_embcache.serving.*{name}"):
            Saver(0).load(table, tmp_path / "served", slots=slots)
    assert torch.equal(torch.stack(list(weights_of(table["item"]).values())), torch.stack(list(before.values())))
    update(table["item"](torch.arange(4)))
    # A run that saves there begins anew, because nothing that trains descends from it.
    report = Saver(0).save(table, tmp_path / "served", incremental=True)
    assert report.kind == "full"


def test_verify_inspect_why_and_diff_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain(8, tmp_path / "trained")
    for precision in ("fp32", "int8"):
        for_serving(tmp_path / "trained", tmp_path / precision, "--precision", precision)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "int8")]) == 0
    assert main(["inspect", str(tmp_path / "int8")]) == 0
    shown = capsys.readouterr().out
    assert " serving " in shown
    assert " int8 " in shown
    assert "precision" in shown
    assert main(["inspect", str(tmp_path / "trained")]) == 0
    assert "precision" not in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "int8"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"][0]["made_from"] == OpenCheckpoint.open(str(tmp_path / "trained")).name
    assert main(["why", str(tmp_path / "int8"), "item", "350"]) == 0
    assert "serving" in capsys.readouterr().out
    (data,) = (tmp_path / "int8").rglob("*.safetensors")
    assert main(["diff", str(tmp_path / "trained"), str(tmp_path / "fp32"), "--json"]) == 1
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["settings"] == ["precision"]
    assert (table["weights"], table["slots"], table["metadata"], table["only_first"]) == (0, 0, 0, 0)
    assert main(["diff", str(tmp_path / "int8"), str(tmp_path / "trained")]) == 1
    assert "slots are not compared" in capsys.readouterr().out.replace("\n", " ")
    assert main(["diff", str(tmp_path / "int8"), str(tmp_path / "int8"), "--json"]) == 0
    data.write_bytes(data.read_bytes()[:-5000] + b"x" + data.read_bytes()[-4999:])
    assert main(["verify", str(tmp_path / "int8")]) == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["compact", "served"], "to merge deltas, use the checkpoint that it was made from"),
        (["reshard", "served", "other", "--world-size", "2"], "to divide rows between ranks, use"),
        (
            ["convert", "served", "other", "--to", "npy"],
            "has no optimizer state: convert the checkpoint that it was made",
        ),
        (["convert", "served", "other", "--to", "serving"], "to convert it to another precision, use"),
        (["convert", "trained", "trained", "--to", "serving"], "holds the checkpoint itself"),
        (["convert", "trained", "other", "--to", "serving", "--keep", "0"], "--keep 0: give 1 or more"),
        (
            ["convert", "trained", "other", "--to", "serving", "--skip", "sum"],
            "--skip: a conversion to serving, which takes the tables as they are, does not use it",
        ),
        (["convert", "trained", "other", "--to", "serving", "--from", "npy"], "convert --to embcache first"),
        (
            ["convert", "trained", "other", "--to", "npy", "--precision", "fp16"],
            "--precision and --keep are of --to serving",
        ),
        (["convert", "trained", "other", "--to", "npy", "--keep", "2"], "--precision and --keep are of --to serving"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    chain(8, tmp_path / "trained")
    for_serving(tmp_path / "trained", tmp_path / "served", "--precision", "int8")
    places = {name: str(tmp_path / name) for name in ("served", "trained", "other")}
    assert main([places.get(word, word) for word in command]) == 3
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "other" / "LATEST").exists()


@pytest.mark.parametrize(
    ("precision", "bad"), [("fp16", 70000.0), ("bf16", 3.4e38), ("int8", float("nan")), ("int8", float("inf"))]
)
def test_a_row_that_a_precision_cannot_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, bad: float
) -> None:
    made = chain(8, tmp_path / "trained")
    row = np.zeros((1, 8), np.float32)
    row[0, 3] = bad
    made["item"].import_rows([4711], row)
    Saver(0).save(made, tmp_path / "trained", incremental=True)
    arguments = ["convert", str(tmp_path / "trained"), str(tmp_path / "served"), "--to", "serving"]
    assert main([*arguments, "--precision", precision]) == 3
    assert f"{precision} cannot hold the weights of row 4711" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "served" / "LATEST").exists()
    for_serving(tmp_path / "trained", tmp_path / "served")


def test_pending_counts_are_left_out_and_missing_reads_kept(tmp_path: Path) -> None:
    table = embedding(admission=admission.Count(3), not_admitted="oov")
    for _ in range(4):
        update(table(torch.tensor([1, 2])))
    update(table(torch.tensor([3])))
    Saver(0).save(table, tmp_path / "trained")
    for_serving(tmp_path / "trained", tmp_path / "served", "--precision", "fp16")
    before, after = OpenCheckpoint.open(str(tmp_path / "trained")), OpenCheckpoint.open(str(tmp_path / "served"))
    assert before.pending == [1]
    assert after.pending == [None]
    assert after.tables[0]["oov_row"] == before.tables[0]["oov_row"]
    assert sorted(read(tmp_path / "served")) == [1, 2]


def test_a_precision_that_is_not_known_is_refused(tmp_path: Path) -> None:
    chain(8, tmp_path / "trained")
    with pytest.raises(SystemExit) as refused:
        main(["convert", str(tmp_path / "trained"), str(tmp_path / "served"), "--to", "serving", "--precision", "int4"])
    assert refused.value.code == 2
    opened = OpenCheckpoint.open(str(tmp_path / "trained"))
    with pytest.raises(Exception, match='precision="int4" is not known'):
        opened.rows.write_serving_checkpoint(opened.directory, 1, "int4", 1)


def test_a_table_that_is_closed_needs_no_model(tmp_path: Path) -> None:
    made = chain(8, tmp_path / "trained")
    made["item"].close()
    with pytest.raises(StateError):
        made["item"].read_rows([1])
    for_serving(tmp_path / "trained", tmp_path / "served", "--precision", "bf16")
    assert len(read(tmp_path / "served")) == 600
