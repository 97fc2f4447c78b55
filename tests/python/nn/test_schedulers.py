"""Schedulers on the optimizers that run in the backward, and the step that Adam corrects by."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR
from torchrec import EmbeddingBagConfig
from torchrec import KeyedJaggedTensor as Kjt
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_embcache import EmbCacheEmbedding, EmbCacheEmbeddingBagCollection, Saver, TierBudgets, optimizers
from torchrec_embcache.exceptions import ConfigError, UnsupportedError

TIERS = TierBudgets(host_bytes="4MiB")


def plain(optimizer: optimizers.OptimizerSpec) -> EmbCacheEmbedding:
    return EmbCacheEmbedding(name="t", embedding_dim=2, tiers=TIERS, optimizer=optimizer)


def collection(*kinds: type[torch.optim.Optimizer]) -> EmbCacheEmbeddingBagCollection:
    """A collection with a table for each optimizer."""
    tables = [
        EmbeddingBagConfig(name=f"t{place}", embedding_dim=2, num_embeddings=9, feature_names=[f"f{place}"])
        for place in range(len(kinds))
    ]
    made = EmbCacheEmbeddingBagCollection(tables, tiers=TIERS)
    for kind, weight in zip(kinds, made.weights().values(), strict=True):
        apply_optimizer_in_backward(kind, [weight], {"lr": 0.1})
    return made


def step(module: EmbCacheEmbeddingBagCollection) -> None:
    count = len(module.tables)
    ones = torch.ones(count, dtype=torch.int64)
    module(Kjt([f"f{place}" for place in range(count)], ones, lengths=ones)).values().sum().backward()


@pytest.mark.parametrize(
    "schedule", [lambda by: OneCycleLR(by, 0.5, total_steps=9), lambda by: CyclicLR(by, 0.01, 0.1)]
)
def test_cycles_reach_the_rate_and_the_first_beta_of_adam_as_in_torch(schedule: Any) -> None:
    theirs = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.1)
    table, tables = plain(optimizers.Adam(lr=0.1)), collection(torch.optim.Adam, torch.optim.Adam)
    optimizers_of = [theirs, table.optimizer, tables.fused_optimizer]
    schedules: list[LRScheduler] = [schedule(by) for by in optimizers_of]
    seen = set()
    for _ in range(5):
        theirs.step()
        step(tables)
        table(torch.tensor([1])).sum().backward()
        for each in schedules:
            each.step()
        numbers = [(group["lr"], tuple(group["betas"])) for by in optimizers_of for group in by.param_groups]
        assert set(numbers) == {numbers[0]}
        seen.add(numbers[0])
    assert len(seen) == 5


def test_an_optimizer_without_betas_cycles_its_rate_alone() -> None:
    for by in (plain(optimizers.SGD(lr=0.1)).optimizer, collection(torch.optim.SGD, torch.optim.Adam).fused_optimizer):
        with pytest.raises(ValueError, match="momentum"):
            OneCycleLR(by, 0.5, total_steps=9)
        OneCycleLR(by, 0.5, total_steps=9, cycle_momentum=False)
        assert [group["lr"] for group in by.param_groups] == pytest.approx([0.02] * len(by.param_groups))


def test_a_step_that_is_set_is_the_one_that_adam_corrects_by() -> None:
    long_run, fresh = collection(torch.optim.Adam), collection(torch.optim.Adam)
    long_run.tables["t0"].import_rows([1], [[1.0, 1.0]])
    fresh.tables["t0"].import_rows([1], [[1.0, 1.0]])
    for _ in range(3):
        step(long_run)
    found = long_run.tables["t0"].read_rows([1])
    fresh.sync_optimizers()
    fresh.tables["t0"].import_rows([1], found.weights, found.slots)
    CombinedOptimizer([fresh.fused_optimizer]).set_optimizer_step(3)
    assert fresh.tables["t0"].step() == 3
    for module in (long_run, fresh):
        step(module)
    assert torch.equal(fresh.tables["t0"].read_rows([1]).weights, long_run.tables["t0"].read_rows([1]).weights)
    for bad in (-1, 1.5, 1 << 63):
        with pytest.raises(ConfigError, match="step="):
            fresh.fused_optimizer.set_optimizer_step(bad)
    assert fresh.tables["t0"].step() == 4


def test_the_step_that_a_table_has_already_leaves_its_deltas(tmp_path: Any) -> None:
    module, path = collection(torch.optim.Adam), tmp_path / "ckpt"
    tmp_path.chmod(0o700)
    step(module)
    Saver(0).save(module, path)
    module.fused_optimizer.set_optimizer_step(1)
    step(module)
    assert Saver(0).save(module, path, incremental=True).kind == "delta"


def test_table_with_an_optimizer_gets_no_second_in_backward() -> None:
    table = plain(optimizers.SGD(lr=0.1))
    apply_optimizer_in_backward(torch.optim.SGD, table.parameters(), {"lr": 0.1})
    with pytest.raises(UnsupportedError, match="table 't' has 2 optimizers in backward"):
        table(torch.tensor([1]))
    assert table.eval()(torch.tensor([1])).shape == (1, 2)
