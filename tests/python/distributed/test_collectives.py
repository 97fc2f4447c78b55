"""Ranks exchange control data between CPUs, also if their group exchanges only tensors of a device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchrec_embcache._dist import collective
from torchrec_embcache.exceptions import InputError
from torchrec_models import ROW_WISE, Model, sharded


def _device_group(ranks: list[int] | None = None) -> Any:
    """A group as NCCL's: it exchanges no tensors of the CPU. Every rank of the world makes it."""
    return dist.new_group(ranks, backend="cuda:gloo")


def _talk(rank: int, world: int) -> list[str]:
    group = _device_group()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(1), group=group)
    assert collective.all_gather(("rank", rank), group) == [("rank", other) for other in range(world)]
    collective.raise_on_every_rank(None, group)

    def work() -> int:
        if rank == 1:
            raise InputError("a bad batch")
        return rank

    said = []
    for _ in range(2):
        try:
            collective.gather_results(work, group)
        except InputError as error:
            said.append(str(error))
    assert collective.gather_results(lambda: rank * 10, group) == [other * 10 for other in range(world)]
    between = collective.cpu_group(group)
    assert between is not group
    assert between is collective.cpu_group(group), "it is made once"
    assert collective.cpu_group() is dist.group.WORLD, "the default group has gloo"
    return said


def test_ranks_of_a_group_without_cpu_tensors_agree_over_gloo(two_ranks: Any) -> None:
    assert two_ranks.run(_talk) == [["rank 1: a bad batch"] * 2, ["a bad batch"] * 2]


def _talk_in_part(rank: int, _world: int) -> list[int] | None:
    group = _device_group([0, 2])
    said = collective.gather_results(lambda: rank, group) if rank != 1 else None
    # Groups that all ranks make later have one name for all.
    later = torch.ones(1)
    dist.all_reduce(later, group=dist.new_group(backend="gloo"))
    assert later.item() == 3
    return said


def test_a_part_of_the_ranks_agrees_without_the_others(three_ranks: Any) -> None:
    assert three_ranks.run(_talk_in_part) == [[0, 2], None, [0, 2]]


def _agree_on_a_bad_batch(rank: int, _world: int) -> str:
    model = sharded(Model(), ROW_WISE)
    module = model.module.bags
    module._env.process_group = _device_group()
    try:
        module._raise_on_every_rank(InputError("no such feature") if rank == 0 else None)
    except InputError as error:
        sums = torch.tensor([rank + 1, 10])
        module._all_reduce(sums)
        return f"{error} {sums.tolist()}"
    return "no error"


def test_a_sharded_module_agrees_over_gloo(two_ranks: Any) -> None:
    assert two_ranks.run(_agree_on_a_bad_batch) == ["no such feature [3, 20]", "rank 0: no such feature [3, 20]"]
