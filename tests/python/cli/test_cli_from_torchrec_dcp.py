"""`embcache convert --from torchrec-dcp`: tables that TorchRec trained and `torch.distributed.checkpoint` saved."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torchrec import EmbeddingBagConfig

from cli_cases import run
from torchrec_dcp_cases import ROWS, save_trained
from torchrec_embcache import EmbCacheEmbeddingBagCollection, TierBudgets
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli.convert.torchrec_dcp import read_tables
from torchrec_embcache.exceptions import CorruptionError, InputError, UnsupportedError


def whole(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors made of the shards of all ranks."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for tensors in ranks:
        for name, (size, shards) in tensors.items():
            tensor = found.setdefault(name, np.full(size, np.nan, np.float32))
            for begin, values in shards:
                tensor[tuple(slice(at, at + n) for at, n in zip(begin, values.shape, strict=True))] = values
    return found


@pytest.mark.parametrize(("optimizer", "wide"), [("rowwise", "table_wise"), ("adagrad", "column_wise")])
def test_two_rank_torchrec_checkpoint_converts_rows_and_slots(
    two_ranks: Any, tmp_path: Path, optimizer: str, wide: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = whole(two_ranks.run(save_trained, str(tmp_path / "theirs"), optimizer, wide))
    code, found = run(capsys, "convert", tmp_path / "theirs", tmp_path / "ours", "--step", 1)
    assert code == 0, found
    assert found["from"] == "torchrec-dcp"
    assert {(table["module"], table["table"], table["rows"]) for table in found["tables"]} == {
        ("model.bags", "user", 101),
        ("model.bags", "item", 37),
        ("model.bags", "wide", 20),
        ("model.sequence", "words", 64),
    }
    assert "model.over.weight" in found["skipped"]
    assert run(capsys, "convert", tmp_path / "ours", tmp_path / "plain", "--to", "npy")[0] == 0
    for folder in (tmp_path / "plain").iterdir():
        table = folder.name.rpartition(".")[2]
        order = np.argsort(np.load(folder / "id.npy"))
        assert np.load(folder / "id.npy")[order].tolist() == list(range(ROWS[table]))
        part = "sequence.embeddings" if table == "words" else "bags.embedding_bags"
        weight = expected[f"{part}.{table}.weight"]
        np.testing.assert_array_equal(np.load(folder / "weight.npy")[order], weight)
        slot = expected[f"{table}.momentum1"]
        assert slot.any()
        assert slot.ndim == (1 if optimizer == "rowwise" else 2)
        np.testing.assert_array_equal(np.load(folder / "sum.npy")[order], slot)


def test_unsupported_slot_is_named_and_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = save(
        tmp_path / "theirs",
        ebc__embedding_bags__t__weight=torch.ones(5, 4),
        optim__state__ebc__embedding_bags__t__weight__t__momentum1=torch.ones(10),
    )
    code, found = run(capsys, "convert", theirs, tmp_path / "ours")
    assert (code, found["error"]["type"]) == (3, "UnsupportedError")
    assert "sharded by columns" in found["error"]["message"]
    assert "--skip momentum1" in found["error"]["message"]
    code, found = run(capsys, "convert", theirs, tmp_path / "ours", "--skip", "momentum1")
    assert (code, found["tables"][0]["optimizer"]) == (0, "sgd")


def test_converted_rows_load_into_our_collection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.rand(30, 4)
    dcp.save(
        {"model": {"ebc.embedding_bags.item.weight": weight}}, checkpoint_id=str(tmp_path / "theirs"), no_dist=True
    )
    assert run(capsys, "convert", tmp_path / "theirs", tmp_path / "ours", "--module", "ebc")[0] == 0
    config = EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=30, feature_names=["i"])
    ebc = EmbCacheEmbeddingBagCollection([config], tiers=TierBudgets(host_bytes="1MiB"))
    Saver(0).load(nn.ModuleDict({"ebc": ebc}), str(tmp_path / "ours"))
    assert torch.equal(ebc.tables["item"].read_rows(torch.arange(30)).weights, weight)


def save(path: Path, **tensors: torch.Tensor) -> Path:
    dcp.save({name.replace("__", "."): value for name, value in tensors.items()}, checkpoint_id=str(path), no_dist=True)
    return path


def change(path: Path, edit: Any) -> None:
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_modules_with_tables_of_one_name_keep_their_own_slots(tmp_path: Path) -> None:
    tensors = {}
    for at, module in enumerate(("a", "b")):
        tensors[f"model__{module}__embedding_bags__t__weight"] = torch.full((3, 2), float(at))
        tensors[f"optim__state__{module}__embedding_bags__t__weight__t__momentum1"] = torch.full((3,), 10.0 + at)
    tables, _ = read_tables(save(tmp_path / "ckpt", **tensors))
    read = {table.description["module"]: next(table.chunks(100)) for table in tables}
    assert {module: (columns["weight"][0, 0], columns["momentum1"][0]) for module, columns in read.items()} == {
        "model.a": (0.0, 10.0),
        "model.b": (1.0, 11.0),
    }
    tensors["optim__state__c__embedding_bags__t__weight__t__momentum1"] = torch.zeros(3)
    with pytest.raises(InputError, match="may belong to any of"):
        read_tables(save(tmp_path / "other", **tensors))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (EVIDENCE,)


EVIDENCE = ""


def test_a_metadata_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "EVIDENCE", str(tmp_path / "evidence"))
    path = save(tmp_path / "ckpt", embedding_bags__t__weight=torch.zeros(3, 2))
    change(path, lambda metadata: metadata.storage_data.update({"x": Evil()}))
    with pytest.raises(UnsupportedError, match="mkdir"):
        read_tables(path)
    assert not (tmp_path / "evidence").exists()


def _entry(metadata: Metadata) -> Any:
    (entry,) = metadata.state_dict_metadata.values()
    return entry


def _place(metadata: Metadata) -> Any:
    (place,) = metadata.storage_data.values()
    return place


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.storage_data.clear(), "a location for each chunk"),
        (lambda m: _entry(m).chunks.append(_entry(m).chunks[0]), "adjacent chunks"),
        (lambda m: setattr(_entry(m), "size", torch.Size([4, 2])), "chunks with all 8 numbers"),
        (lambda m: setattr(_entry(m), "size", torch.Size([2, 2])), "adjacent chunks"),
        (lambda m: setattr(_entry(m), "size", (1 << 60, 2)), "non-negative integers"),
        (lambda m: setattr(_entry(m), "chunks", None), "Metadata"),
        (lambda m: setattr(_place(m), "relative_path", "../ckpt/__0_0.distcp"), "a name in the directory"),
        (lambda m: setattr(_place(m), "offset", 1 << 40), "the file's length"),
        (lambda m: setattr(_place(m), "length", 100), "a tensor of torch.save"),
        (lambda m: setattr(_place(m), "offset", "0"), "integers"),
    ],
)
def test_a_metadata_file_that_lies_is_refused(tmp_path: Path, edit: Any, words: str) -> None:
    path = save(tmp_path / "ckpt", embedding_bags__t__weight=torch.zeros(3, 2))
    change(path, edit)
    with pytest.raises(CorruptionError, match=words):
        [list(table.chunks(2)) for table in read_tables(path)[0]]


def test_damaged_files_and_what_is_not_read_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", embedding_bags__t__weight=torch.zeros(3, 2))
    (path / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CorruptionError, match="a pickle of torch"):
        read_tables(path)
    (path / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(CorruptionError, match="found dict"):
        read_tables(path)
    half = save(tmp_path / "half", embedding_bags__t__weight=torch.zeros(3, 2, dtype=torch.float16))
    with pytest.raises(UnsupportedError, match="only float32"):
        read_tables(half)
    cut = save(tmp_path / "cut", embedding_bags__t__weight=torch.zeros(3, 2))
    (file,) = cut.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptionError, match="length"):
        list(read_tables(cut)[0][0].chunks(2))


def test_strided_and_split_tensors_are_read_row_by_row(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(2, 12).t()  # in column-major order
    path = save(tmp_path / "ckpt", embedding_bags__t__weight=weight)
    (table,) = read_tables(path)[0]
    rows = np.concatenate([columns["weight"] for columns in table.chunks(5)])
    np.testing.assert_array_equal(rows, weight.numpy())
