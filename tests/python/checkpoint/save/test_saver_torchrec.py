"""Checkpoints of TorchRec's collections, unsharded and sharded: each loads the other's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from processes import World
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.modules import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig
from torchrec_saver_cases import FEATURES, RAM, contents, make, merged


def batch_of(seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * 6,), generator=generator)
    values = torch.randint(-50, 50, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths)


def train(model: nn.Module, seed: int) -> float:
    """Do one step. Returns its loss on this rank."""
    loss = model(batch_of(seed))
    loss.backward()
    return float(loss.detach())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The `param_groups` of all cache modules."""
    from torchrec_embcache import cache_modules

    return [group for module in cache_modules(model).values() for group in module.fused_optimizer.param_groups]


def train_and_save(rank: int, size: int, path: str) -> Any:
    model = make(size, sharded=True)
    for step in range(4):
        train(model, 10 * step + rank)
    for group in groups(model):
        group["lr"] = 0.125
    Saver().save(model, path)
    return contents(model)


def load_and_go_on(rank: int, size: int, path: str, total_num_buckets: int) -> Any:
    model = make(size, sharded=True, total_num_buckets=total_num_buckets)
    train(model, 99)  # this makes the exchanges; its rows are replaced
    Saver().load(model, path)
    assert {group["lr"] for group in groups(model)} == {0.125}, "as it was saved"
    loaded = contents(model)
    losses = [train(model, 100 + 10 * step + rank) for step in range(3)]
    return loaded, contents(model), losses


def test_sharded_and_unsharded_load_each_others_checkpoints(two_ranks: World, tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    saved = merged(two_ranks.run(train_and_save, str(path)))
    assert {name for name, _ in saved} == {"spread", "whole", "rows"}
    model = make(1, sharded=False)
    Saver(0).load(model, path)  # before its optimizers were used at all
    assert {group["lr"] for group in groups(model)} == {0.125}
    assert contents(model) == saved
    unsharded = tmp_path / "unsharded"
    Saver(0).save(model, unsharded)
    loaded = two_ranks.run(load_and_go_on, str(unsharded), 11)
    assert merged([rows for rows, _, _ in loaded]) == saved


def test_a_sharded_model_goes_on_with_the_buckets_of_the_file(two_ranks: World, tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    saved = merged(two_ranks.run(train_and_save, str(path)))
    same = two_ranks.run(load_and_go_on, str(path), 11)
    other = two_ranks.run(load_and_go_on, str(path), 4093)
    for run in (same, other):
        assert merged([rows for rows, _, _ in run]) == saved
    # Ids go to the owners of the file's buckets. The runs train the same rows, each on one rank.
    assert merged([rows for _, rows, _ in other]) == merged([rows for _, rows, _ in same])
    assert [losses for _, _, losses in other] == [losses for _, _, losses in same]


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [
        (torch.optim.SGD, {"lr": 0.25, "foreach": None, "maximize": False, "fused": None}),
        (torch.optim.Adagrad, {"lr": 0.25, "foreach": None, "maximize": False, "differentiable": False}),
        (torch.optim.Adam, {"lr": 0.25, "betas": (0.8, 0.9), "foreach": None, "capturable": False, "fused": None}),
        (torch.optim.AdamW, {"lr": 0.25, "weight_decay": 0.125, "foreach": False, "maximize": False}),
    ],
)
def test_torch_optimizers_are_saved_with_none_hyperparameters(
    optimizer: type[torch.optim.Optimizer], numbers: dict[str, Any], tmp_path: Path
) -> None:
    def make_one() -> EmbCacheEmbeddingBagCollection:
        ebc = EmbCacheEmbeddingBagCollection(
            tables=[EmbCacheEmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=1000, feature_names=["a"])],
            tiers=RAM,
            device=torch.device("cpu"),
        )
        apply_optimizer_in_backward(optimizer, ebc.parameters(), numbers)
        return ebc

    def rows_of(ebc: EmbCacheEmbeddingBagCollection) -> list[Any]:
        found = ebc.tables["a"].read_rows(torch.arange(20))
        return [found.weights, *found.slots.values()]

    ebc, other = make_one(), make_one()
    batch = KeyedJaggedTensor(["a"], torch.arange(20), lengths=torch.full((5,), 4))
    ebc(batch)["a"].sum().backward()
    assert Saver(0).save(ebc, tmp_path / "ck").rows == 20
    Saver(0).load(other, tmp_path / "ck")
    assert all(torch.equal(a, b) for a, b in zip(rows_of(ebc), rows_of(other), strict=True))
    for each in (ebc, other):
        each(batch)["a"].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(rows_of(ebc), rows_of(other), strict=True))
