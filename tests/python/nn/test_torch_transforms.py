"""Modules under recording and transforming tools of torch, and under hooks on every parameter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec import KeyedJaggedTensor as Kjt
from torchrec.distributed import DistributedModelParallel
from torchrec.fx import symbolic_trace
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from processes import process_group
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingCollection,
    TierBudgets,
    optimizers,
)
from torchrec_embcache.distributed import EmbCacheEmbeddingBagCollectionSharder
from torchrec_embcache.exceptions import UnsupportedError

TIERS = TierBudgets(host_bytes="1MiB")
IDS = torch.tensor([[1, 2], [3, 4]])


class OfCollection(nn.Module):
    """The rows of ids [B, L] by a collection."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: Tensor) -> Tensor:
        lengths = torch.full((2,), 2)
        found: Any = self.tables(Kjt(["f"], ids.reshape(-1), lengths=lengths))
        found = found.wait() if hasattr(found, "wait") else found
        return found.values() if hasattr(found, "values") and not isinstance(found, dict) else found["f"].values()


def plain(kind: Any, **settings: Any) -> Any:
    return kind(name="t", embedding_dim=4, tiers=TIERS, optimizer=optimizers.SGD(lr=1.0), **settings)


def collection(kind: Any, config: Any) -> nn.Module:
    table = config(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])
    made = kind([table], tiers=TIERS)
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 1.0})
    return OfCollection(made)


MAKE: dict[str, Callable[[], nn.Module]] = {
    "EmbCacheEmbedding": lambda: plain(EmbCacheEmbedding),
    "EmbCacheEmbeddingBag": lambda: plain(EmbCacheEmbeddingBag),
    "bag collection": lambda: collection(EmbCacheEmbeddingBagCollection, EmbeddingBagConfig),
    "collection": lambda: collection(EmbCacheEmbeddingCollection, EmbeddingConfig),
    "sharded": lambda: OfCollection(
        DistributedModelParallel(
            nn.ModuleDict({"c": collection(EmbCacheEmbeddingBagCollection, EmbeddingBagConfig)}),
            device=torch.device("cpu"),
            sharders=[EmbCacheEmbeddingBagCollectionSharder()],  # type: ignore[list-item]
        )
        .module["c"]
        .tables
    ),
}


@pytest.fixture(params=MAKE)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with process_group(0, 1, str(tmp_path / "store")):
        yield nn.Sequential(MAKE[request.param](), nn.Linear(4, 1))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("model", [name for name in MAKE if name != "sharded"], indirect=True)  # TorchRec refuses those
def test_torch_jit_trace_is_refused_and_leaves_the_rows(model: Any, train: bool) -> None:
    model.train(train)
    want = model(IDS)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace, which would record the rows"):
        torch.jit.trace(model, (IDS,), check_trace=False)
    assert torch.equal(model(IDS), want)


def test_torch_jit_script_is_refused(model: Any) -> None:
    for given in (model, model[0]):
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.script cannot compile lookups of "):
            torch.jit.script(given)


@pytest.mark.parametrize("kind", ["EmbCacheEmbedding", "collection"])
def test_torch_jit_script_of_a_graph_with_a_lookup_is_refused(kind: str) -> None:
    graph = symbolic_trace(nn.Sequential(MAKE[kind](), nn.Linear(4, 1)).eval(), leaf_modules=["OfCollection"])
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script cannot compile lookups of "):
        torch.jit.script(graph)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda model: torch.vmap(model[0])(IDS.view(2, 1, 2).expand(2, 2, 2)),
    "grad": lambda model: torch.func.grad(lambda weight: (model[0](IDS) * weight).sum())(torch.ones(4)),
    "jvp": lambda model: torch.func.jvp(lambda x: model[0](IDS) * x, (torch.ones(4),), (torch.ones(4),)),
    "functionalize": lambda model: torch.func.functionalize(model)(IDS),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_refused_and_leave_the_rows(model: Any, transform: str, train: bool) -> None:
    model.train(train)
    want = model(IDS)
    with pytest.raises(UnsupportedError, match=r"torch\.vmap or a transform of torch\.func"):
        TRANSFORMS[transform](model)
    assert torch.equal(model(IDS), want)


def test_torch_func_grad_of_rows_that_were_looked_up_before_works() -> None:
    table, dense = plain(EmbCacheEmbedding).eval(), nn.Linear(4, 1)
    rows = table(IDS)
    grad = torch.func.grad(lambda weight: nn.functional.linear(rows, weight).sum())(dense.weight.detach())
    assert torch.equal(grad, rows.sum((0, 1)).view(1, 4))


def test_a_hook_on_every_parameter_is_called_with_a_gradient(model: Any) -> None:
    """As `wandb.watch(model)` sets them, which reads `grad.data`."""
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: shapes.update({name: list(grad.data.shape)}))
    dense = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model(IDS)
    for _ in range(2):
        before = model(IDS)
        before.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        dense.step()
    assert shapes["1.weight"] == [1, 4]
    assert all(shape == [0, 4] for name, shape in shapes.items() if name.startswith("0."))
    assert [name for name in shapes if name.startswith("0.")] == (["0.weight"] if hasattr(model[0], "weight") else [])
    assert all(parameter.grad is None for parameter in model[0].parameters())
    assert not torch.equal(model(IDS), before)
