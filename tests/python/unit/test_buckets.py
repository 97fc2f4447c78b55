"""The bucket of an id is the same in the core and in torch, pinned by golden values."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from processes import World
from project_paths import FIXTURES
from tables import EXTREME_IDS, bucket_of
from torchrec_embcache import CacheTable, TierBudgets, _buckets, initializers, optimizers
from torchrec_embcache.config import bucket_range
from torchrec_embcache.distributed._sharding import BucketFeaturesDist
from torchrec_embcache.exceptions import ConfigError


def many_ids() -> torch.Tensor:
    near = [bound + off for bound in (0, 1 << 31, 1 << 32, 1 << 62) for off in (-1, 0, 1)]
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (10_000,), generator=torch.Generator().manual_seed(5))
    return torch.cat([torch.tensor([*EXTREME_IDS, *near, *(1 << bit for bit in range(63))]), drawn, torch.arange(5000)])


def golden() -> Iterator[list[int]]:
    for line in (FIXTURES / "v1" / "buckets.txt").read_text().splitlines():
        if not line.startswith("#"):
            yield [int(number) for number in line.split()]


def test_buckets_are_those_of_the_golden_values() -> None:
    rows = list(golden())
    ids = np.array([row[0] for row in rows], np.int64)
    hashes = _buckets.hash_ids_(torch.from_numpy(ids.copy())).numpy().view(np.uint64)
    assert hashes.tolist() == [row[1] for row in rows]
    for place, total in enumerate((4093, 11, 1 << 20), start=2):
        expected = [row[place] for row in rows]
        assert _buckets.buckets_of(ids, total).tolist() == expected
        assert [bucket_of(row[0], total) for row in rows] == expected


def test_torch_and_the_core_hash_alike_and_back() -> None:
    ids = many_ids()
    hashes = _buckets.hash_ids_(ids.clone())
    assert hashes.tolist() == [
        bucket_of(row_id, 1 << 64) - (bucket_of(row_id, 1 << 64) >> 63 << 64) for row_id in ids.tolist()
    ]
    assert torch.equal(_buckets.unhash_ids_(hashes.clone()), ids)

    # This is the code for other devices, which runs on the CPU here.
    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    there = ids.clone().as_subclass(Elsewhere)
    assert torch.equal(_buckets.hash_ids_(there).as_subclass(torch.Tensor), hashes)
    assert torch.equal(_buckets.unhash_ids_(there).as_subclass(torch.Tensor), ids)


def exchange(rank: int, size: int, features: int, pipelined: bool) -> list[list[int]]:
    """The ids that arrive of each feature when every rank sends all ids. With `pipelined` TorchRec's pipelines make the
    exchange.
    """
    del rank, size
    counts = [4093, 11][:features]
    module = BucketFeaturesDist(dist.group.WORLD, counts, [False] * len(counts), torch.device("cpu"), is_sequence=False)
    ids = many_ids()
    sent = KeyedJaggedTensor(
        keys=[f"f{at}" for at in range(len(counts))],
        values=torch.cat([ids] * len(counts)),
        lengths=torch.tensor([len(ids) - 7, 7] * len(counts)),
    )
    if pipelined:
        module._dist.forward = KJTAllToAllForward(module._dist._pg, module._dist._splits)
        handed_over = module(sent)._input
        assert handed_over.values().unique().tolist() == ids.unique().tolist(), "ids, and not their hashes"
        return [[] for _ in counts]
    arrived = module(sent).wait().wait()
    assert torch.equal(sent.values(), torch.cat([ids] * len(counts))), "the batch itself is left alone"
    ends = arrived.offset_per_key()
    return [arrived.values()[ends[at] : ends[at + 1]].tolist() for at in range(len(counts))]


@pytest.mark.parametrize("features", [1, 2])
def test_each_id_is_sent_to_the_owner_of_its_bucket_as_the_core_says(features: int, three_ranks: World) -> None:
    ids = many_ids().numpy()
    assert three_ranks.run(exchange, features, True)
    for rank, arrived in enumerate(three_ranks.run(exchange, features, False)):
        for total, found in zip((4093, 11), arrived, strict=False):
            begin, end = bucket_range(rank, 3, total)
            places = _buckets.buckets_of(ids, total)
            assert sorted(found) == sorted(ids[(places >= begin) & (places < end)].tolist() * 3)


@pytest.mark.parametrize(
    "pattern", [range(2000), range(0, 2_000_000, 1000), range(-1000, 1000), [n << 32 for n in range(2000)]]
)
def test_ids_of_any_pattern_spread_over_ranks(pattern: Any) -> None:
    ids = np.array(list(pattern), np.int64)
    for size in (2, 3, 4):
        shards = [CacheTable(**settings(rank, size)) for rank in range(size)]
        shares = [int(shard._owns(ids).sum()) for shard in shards]
        assert sum(shares) == len(ids)
        assert max(shares) <= 1.25 * min(shares), shares


def settings(rank: int, size: int, **more: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "name": "spread",
        "module": "shards",
        "dim": 3,
        "tiers": TierBudgets(host_bytes="1MiB"),
        "initializer": initializers.Constant(0.0),
        "optimizer": optimizers.RowWiseAdagrad(lr=0.1),
    }
    return {**common, "rank": rank, "world_size": size, **more}


def test_more_buckets_than_a_file_of_rows_can_bear_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"total_num_buckets=2147483647.*1048576"):
        CacheTable(**settings(0, 1, total_num_buckets=(1 << 31) - 1))
