"""Filters, reports and optimizers of RecIS-format saves and loads, and a model's two parts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from serialize_cases import saved_folder, trained
from tables import make_bag
from torchrec_embcache import optimizers
from torchrec_embcache.exceptions import InputError, MismatchError
from torchrec_embcache.serialize import Loader, LoadInfo, Saver, split_sparse_dense_state_dict


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def test_slots_of_another_optimizer_are_refused_as_saver_refuses_them(path: Path) -> None:
    saved = trained(optimizer=optimizers.Adam(lr=0.1))
    Saver(path=str(path), hashtables={"item": saved}).save()
    for wrong in (optimizers.SGD(lr=0.1), optimizers.Adagrad(lr=0.1)):
        bag = make_bag(optimizer=wrong)
        with pytest.raises(MismatchError, match="slots=False|has no item@sum"):
            Loader(str(path), {"item": bag}).load()
        assert len(bag) == 0
        Loader(str(path), {"item": bag}, slots=False).load()
        assert len(bag) == len(saved)
    sgd = optimizers.SGD(lr=0.1)
    with pytest.raises(MismatchError, match=r"optimizers\.SGD, .*the slots exp_avg, exp_avg_sq too.*slots=False"):
        Loader(str(path), {"item": make_bag(optimizer=sgd)}).load()
    # It was asked for by name, or by strict=False.
    for how in ({"strict": False}, {"filter_func": lambda _: {"item": {"item": ["id", "embedding"]}}}):
        bag = make_bag(optimizer=sgd)
        Loader(str(path), {"item": bag}, **how).load()  # type: ignore[arg-type]
        assert len(bag) == len(saved)


def test_the_report_of_a_load_lists_what_was_loaded_by_destination(path: Path) -> None:
    tensors = {"w": torch.ones(2), "b": torch.full((2,), 2.0)}
    Saver(path=str(path), hashtables={"item": trained()}, tensors=tensors).save()

    def load(info: LoadInfo) -> Any:
        into = {name: torch.zeros(2) for name in info if name != "t"}
        tables = {"t": make_bag()} if "t" in info else None
        return Loader(str(path), tables, into, strict=False, filter_func=lambda _: info).load(), into

    report, into = load({"x": {"nope": []}, "w": {"w": []}})
    assert (report.tensors, report.missing, into["x"].any()) == (["w"], ["nope"], torch.tensor(False))
    report, into = load({"w": {"nope": []}, "nope": {"w": []}})
    assert (report.tensors, report.missing) == (["nope"], ["nope"])
    assert torch.equal(into["nope"], torch.ones(2))
    report, _ = load({"t": {"nope": ["id"]}, "b": {"b": []}})
    assert (report.tables, report.tensors, report.missing) == ({}, ["b"], ["nope"])


@pytest.mark.parametrize("buckets", [{}, {"total_num_buckets": 1}])
def test_a_filter_that_was_written_for_recis_runs(buckets: dict[str, int], path: Path) -> None:
    seen = []

    def recis(blocks: list[Any]) -> list[Any]:
        seen.extend(f"{block.tensor_name()}^{block.slice_info()}" for block in blocks)
        return [block for block in blocks if not block.tensor_name().endswith("@sum")]

    Saver(
        path=str(path), hashtables={"item": trained(**buckets)}, tensors={"w": torch.ones(1)}, filter_func=recis
    ).save()
    names = json.loads((saved_folder(path) / "tensorkey.json").read_text())
    index = json.loads((saved_folder(path) / "index").read_text())["block_index"]
    assert {name for name in seen if "@sum" not in name} == {names.get(part, part) for part in index}


def test_a_model_is_split_into_its_tables_and_its_dense_part(path: Path) -> None:
    item, dense = trained(), nn.Linear(3, 2)
    model = nn.ModuleDict({"item": item, "over": dense})
    tables, tensors = split_sparse_dense_state_dict(nn.DataParallel(model))
    assert tables == {"item": item}
    assert set(tensors) == {"module.over.weight", "module.over.bias"}
    tables, tensors = split_sparse_dense_state_dict(model)
    Saver(path=str(path), hashtables=tables, tensors=tensors).save()
    again = nn.ModuleDict({"item": make_bag(), "over": nn.Linear(3, 2)})
    loaded = Loader(str(path), *split_sparse_dense_state_dict(again)).load()
    assert (loaded.tables, loaded.tensors) == ({"item": len(item)}, ["over.bias", "over.weight"])
    assert torch.equal(again["over"].weight, dense.weight)
    assert split_sparse_dense_state_dict(item) == ({"item": item.table}, {})
    with pytest.raises(InputError, match="give an nn.Module"):
        split_sparse_dense_state_dict({})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:state_dict:torchrec_embcache.EmbCacheWarning")
def test_what_a_state_dict_has_of_tables_is_refused_among_the_tensors(path: Path) -> None:
    model = nn.ModuleDict({"item": trained(), "over": nn.Linear(3, 2)})
    with pytest.raises(InputError, match=r"item\._extra_state.*hold no rows.*split_sparse_dense_state_dict\(model\)"):
        Saver(path=str(path), tensors=model.state_dict())
    with pytest.raises(InputError, match=r"item\.weight.*\[0, D\] weight.*split_sparse_dense_state_dict\(model\)"):
        Loader(str(path), None, dict(model.named_parameters()))
