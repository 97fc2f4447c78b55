"""Sweeps that fail within a backward: the step and the rest of the backward are completed."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lifecycle_cases import DIM, budgets, embedding, ids_of
from torchrec_embcache._ssd import autoflush
from torchrec_embcache.eviction import All, Keep, L2Norm, Policy, Share
from torchrec_embcache.exceptions import ConfigError

TWO = Policy([Keep(2)], every_steps=1)


@pytest.mark.parametrize("place", ["ram", "ssd"])
@pytest.mark.parametrize("policy", [TWO, Policy([Keep(2), All([Share(0.1), L2Norm(below=0.1)])], every_steps=1)])
def test_failed_sweep_does_not_stop_other_modules_of_the_loss(tmp_path, place, policy):
    tiers = budgets(place, tmp_path)
    first = embedding(name="first", tiers=tiers)
    swept = embedding(name="swept", tiers=tiers, eviction=policy)
    last = embedding(name="last", tiers=tiers)
    tables = (first, swept, last)
    top = torch.nn.Linear(DIM, 1)

    def step(ids: list[int]) -> None:
        top.zero_grad()
        # The later of the forwards comes first in the backward.
        top(sum(table(torch.tensor(ids)) for table in tables)).sum().backward()

    with pytest.raises(ConfigError, match="trained 5 rows"):
        step([1, 2, 3, 4, 5])
    assert [table.stats().step for table in tables] == [1, 1, 1]
    assert [len(table) for table in tables] == [5, 5, 5]
    assert top.weight.grad is not None
    assert not autoflush._is_step_incomplete(), "the end of the process would flush nothing"
    step([4, 5])
    assert [table.stats().step for table in tables] == [2, 2, 2]
    assert sorted(ids_of(swept)) == [4, 5]
    assert len(first) == len(last) == 5
    for table in tables:
        table.close()


class _Dense(torch.nn.Module):
    """A table of each rank's own beside weights that DDP averages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = embedding(eviction=TWO, replicated=True)
        self.bottom = torch.nn.Linear(DIM, DIM)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.bottom(torch.ones(len(ids), DIM)) + self.table(ids)


def _under_ddp(rank: int, _world: int) -> None:
    torch.manual_seed(3)
    inner = _Dense()
    model = DistributedDataParallel(inner)
    model(torch.tensor([1, 2])).sum().backward()
    if rank == 0:
        with pytest.raises(ConfigError, match="trained 4 rows"):
            model(torch.tensor([1, 2, 3, 4])).sum().backward()
    else:
        model(torch.tensor([1, 2])).sum().backward()
    for step in (3, 4):
        inner.zero_grad()
        model(torch.tensor([5 + rank, 7])).sum().backward()
        assert inner.table.stats().step == step
    assert len(inner.table) == 2


def test_a_sweep_that_fails_on_one_rank_leaves_ddp_its_later_steps(two_ranks):
    two_ranks.run(_under_ddp)
