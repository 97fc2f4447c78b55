"""Torch's default dtype and device change no result and fail no call."""

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from project_paths import ROOT
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    Saver,
    cache_modules,
    initializers,
    optimizers,
    serving,
)
from torchrec_models import MIXED, ROW_WISE, TABLE_WISE, Model, rows_of, sharded

CPU = torch.device("cpu")
PACKAGE = ROOT / "python" / "torchrec_embcache"
DEFAULTS = [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")]


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Torch's defaults within this context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _trained(backend: dict[str, Any], folder: Path) -> list[Tensor]:
    """Results of plain modules, of a collection, and of what is saved, loaded and served."""
    given = {"optimizer": optimizers.Adam(lr=0.5), "initializer": initializers.Uniform(-1.0, 1.0), **backend}
    item = EmbCacheEmbedding(name="item", embedding_dim=4, padding_idx=2, **given)
    bag = EmbCacheEmbeddingBag(name="bag", embedding_dim=4, mode="sum", **given)
    config = EmbCacheEmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"], initializer=initializers.Uniform(-1.0, 1.0)
    )
    model = nn.ModuleDict(
        {"item": item, "bag": bag, "bags": EmbCacheEmbeddingBagCollection([config], tiers=backend["tiers"])}
    )
    apply_optimizer_in_backward(torch.optim.Adagrad, model["bags"].parameters(), {"lr": 0.5})
    ids = torch.tensor([1, 2, 3, 2], device="cpu")
    weights = torch.rand(
        4, dtype=torch.float32, generator=torch.Generator("cpu").manual_seed(0), device="cpu"
    ).requires_grad_()
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([3, 1], device="cpu"))
    results = []
    for _ in range(2):
        outs = [item(ids), bag(ids, torch.tensor([0, 1], device="cpu"), weights), model["bags"](features).values()]
        for out in outs:
            out.square().sum().backward()
        results += [out.detach() for out in outs]
    model.to("cpu").share_memory()
    item.import_rows([7], [[1.0, 2.0, 3.0, 4.0]])
    Saver(0).save(model, folder)
    Saver(0).load(model, folder)
    found = [item.read_rows([1, 2, 7]), bag.read_rows([1, 2, 3]), model["bags"].tables["t"].read_rows([1, 2, 3])]
    results += [weights.grad, *(rows.weights for rows in found), *found[0].slots.values()]
    own = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"], pooling=PoolingType.MEAN
            )
        ],
        device=CPU,
    )
    with serving.open(folder) as tables:
        served = serving.replace(nn.ModuleDict({"bags": own}), tables)
        results.append(served["bags"](features).values())
        with tables.pin() as version:
            results += [
                version["item/item"].lookup(ids).as_subclass(Tensor),
                version["bag/bag"].lookup_pooled(ids, [0, 2, 4], "mean"),
            ]
    return results


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
def test_results_are_float32_on_the_table_device(
    backend: dict[str, Any], dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    want = _trained(backend, tmp_path / "plain")
    with defaults(dtype, device):
        got = _trained(backend, tmp_path / "other")
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        assert (one.dtype, one.device) == (torch.float32, CPU), place
        assert torch.equal(one, other), place


def _sharded(_rank: int, _world: int, shardings: dict[str, str], dtype: torch.dtype) -> Any:
    with defaults(dtype, "cpu"):
        model = sharded(Model(), shardings, {"learning_rate": 0.5})
        modules, results = cache_modules(model), []
        for ids in ([1, 2, 3, 4], [2, 2, 5, 6]):
            lengths = torch.tensor([1, 0, 1, 0, 2, 0])
            features = KeyedJaggedTensor(["a", "b", "c"], torch.tensor(ids), lengths=lengths)
            results += [modules["bags"](features).values(), modules["sequences"](features)["a"].values()]
            for out in results[-2:]:
                out.sum().backward()
    return [(str(out.dtype), out.tolist()) for out in results], rows_of(model)


@pytest.mark.parametrize("shardings", [ROW_WISE, TABLE_WISE, MIXED], ids=["row-wise", "table-wise", "mixed"])
def test_ranks_send_float32_whatever_the_default_dtype(two_ranks, shardings: dict[str, str]) -> None:
    want = two_ranks.run(_sharded, shardings, torch.float32)
    assert two_ranks.run(_sharded, shardings, torch.float64) == want


_FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
}
_FACTORIES |= {"randperm", "scalar_tensor", "tensor", "zeros"}


def unnamed_defaults(source: str) -> list[str]:
    """The calls that make a tensor without a dtype or a device. A `**` may have them."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        if (
            isinstance(call.func, ast.Attribute)
            and ast.unparse(call.func.value) == "torch"
            and call.func.attr in _FACTORIES
        ):
            named = {keyword.arg for keyword in call.keywords}
            if None not in named and not named >= {"dtype", "device"}:
                found.append(ast.unparse(call))
    return found


def test_calls_without_a_dtype_or_a_device_are_found() -> None:
    source = "torch.empty(1, dtype=x)\ntorch.tensor(1, dtype=x, device=y)\ntorch.zeros(1, **made)\nt.zeros(1)"
    assert unnamed_defaults(source) == ["torch.empty(1, dtype=x)"]


@pytest.mark.slow
def test_tensors_are_made_with_a_dtype_and_a_device() -> None:
    """Torch's defaults are the user's."""
    found = {str(file.relative_to(PACKAGE)): unnamed_defaults(file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert {file: calls for file, calls in found.items() if calls} == {}
