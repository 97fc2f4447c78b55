"""Ranks exchange control data between CPUs, also if their group exchanges only tensors of a device."""

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from torchrec_embcache import Saver, evict, set_time
from torchrec_embcache._dist import ranks
from torchrec_embcache._dist.collective import cpu_group
from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache.checkpoint import _background
from torchrec_embcache.exceptions import InputError
from torchrec_models import ROW_WISE, Model, batches, sharded


def _device_group(ranks: list[int] | None = None) -> Any:
    """A group as NCCL's: it exchanges no tensors of the CPU. Every rank of the world makes it."""
    return dist.new_group(ranks, backend="cuda:gloo")


def _talk(rank: int, world: int) -> list[str]:
    group = _device_group()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(1), group=group)
    assert all_ranks(group).all_gather(("rank", rank)) == [("rank", other) for other in range(world)]
    all_ranks(group).raise_on_every_rank(None)

    def work() -> int:
        if rank == 1:
            raise InputError("a bad batch")
        return rank

    said = []
    for _ in range(2):
        try:
            all_ranks(group).gather(work)
        except InputError as error:
            said.append(str(error))
    assert all_ranks(group).gather(lambda: rank * 10) == [other * 10 for other in range(world)]
    between = cpu_group(group)
    assert between is not group
    assert between is cpu_group(group), "it is made once"
    assert cpu_group() is dist.group.WORLD, "the default group has gloo"
    return said


def test_ranks_of_a_group_without_cpu_tensors_agree_over_gloo(two_ranks: Any) -> None:
    assert two_ranks.run(_talk) == [["rank 1: a bad batch"] * 2, ["a bad batch"] * 2]


def _talk_in_part(rank: int, _world: int) -> list[int] | None:
    group = _device_group([0, 2])
    said = all_ranks(group).gather(lambda: rank) if rank != 1 else None
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
        module._ranks.raise_on_every_rank(InputError("no such feature") if rank == 0 else None)
    except InputError as error:
        sums = torch.tensor([rank + 1, 10])
        module._all_reduce(sums)
        return f"{error} {sums.tolist()}"
    return "no error"


class Held:
    """An object that the frames of a failed call hold."""


def errors_hold_nothing(rank: int, _world: int) -> None:
    """An error, of this rank or of the other, frees the objects of its call without the garbage collector."""
    group = all_ranks()
    for call in (group.run, group.gather, lambda work: group.agree_on_arguments("call", work)):
        for wrong in (0, 1) if group.world_size > 1 else (0,):
            held = Held()

            def fail(held: Held = held, wrong: int = wrong) -> dict[str, object]:
                if rank == wrong:
                    raise InputError(f"refused {type(held).__name__}")
                return {}

            seen, message = weakref.ref(held), ""
            del held
            gc.disable()
            try:
                try:
                    call(fail)
                except InputError as error:
                    message = str(error)
                del fail
                assert seen() is None, (call, wrong)
            finally:
                gc.enable()
            assert "refused Held" in message


def test_an_error_of_ranks_holds_nothing_of_its_call(two_ranks: Any) -> None:
    errors_hold_nothing(0, 1)
    two_ranks.run(errors_hold_nothing)


def save_after_a_break(rank: int, _world: int, path: str) -> list[str]:
    """Async saves whose group broke on one rank only before the second save."""
    model, kinds = sharded(Model(), ROW_WISE), []
    for _ in range(3):
        kinds.append(Saver().save_async(model, path, incremental=True).result().kind)
        if len(kinds) == 1 and rank == 1:
            assert _background._group is not None
            _background._group.is_broken = True
    return kinds


def test_a_group_that_broke_on_one_rank_is_created_again_on_all(two_ranks: Any, tmp_path: Path) -> None:
    assert two_ranks.run(save_after_a_break, str(tmp_path / "saved")) == [["full", "delta", "delta"]] * 2


def save_beside_own_groups(_rank: int, _world: int, path: str) -> str:
    """An async save after rank 0 alone has made a group, so that torch names the next group differently on the ranks."""
    model = sharded(Model(), ROW_WISE)
    dist.new_group([0], use_local_synchronization=True)
    _background._group = None
    return Saver().save_async(model, path).result().kind


def test_groups_of_a_part_of_the_ranks_do_not_stop_async_saves(two_ranks: Any, tmp_path: Path) -> None:
    assert two_ranks.run(save_beside_own_groups, str(tmp_path / "saved")) == ["full", "full"]


def test_a_sharded_module_agrees_over_gloo(two_ranks: Any) -> None:
    assert two_ranks.run(_agree_on_a_bad_batch) == ["no such feature [3, 20]", "rank 0: no such feature [3, 20]"]


class CountingRanks(ranks.ProcessGroupRanks):
    """Counts the exchanges."""

    exchanges: ClassVar[Counter[str]] = Counter()

    def all_gather(self, value: Any) -> list[Any]:
        self.exchanges["all_gather"] += 1
        return super().all_gather(value)

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        self.exchanges["all_reduce"] += 1
        super().all_reduce(values, op)


def _count_exchanges(rank: int, world: int, path: str) -> dict[str, dict[str, int]]:
    model = sharded(Model(), ROW_WISE, {"learning_rate": 0.1})
    first, second = batches(2, rank, world)
    model(first)[0].backward()  # the tables are opened, and their buckets compared
    calls = {
        "step": lambda: model(second)[0].backward(),
        "set_time": lambda: set_time(model, 1.0),
        "evict": lambda: evict(model),
        "save": lambda: Saver(path_checks="trusted").save(model, path),
    }
    counted = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "ProcessGroupRanks", CountingRanks)
        for name, call in calls.items():
            CountingRanks.exchanges.clear()
            call()
            counted[name] = dict(CountingRanks.exchanges)
    return counted


def test_numbers_of_exchanges(two_ranks: Any, tmp_path: Path) -> None:
    counted = two_ranks.run(_count_exchanges, str(tmp_path / "saved"))
    assert counted[0] == counted[1]
    # Two lookups, whose ranks reduce a flag in the forward and one in the backward.
    assert counted[0]["step"] == {"all_reduce": 4}
    assert counted[0]["set_time"] == {"all_reduce": 2, "all_gather": 2}
    assert counted[0]["evict"] == {"all_reduce": 4, "all_gather": 3}
    assert counted[0]["save"] == {"all_reduce": 11, "all_gather": 8}
