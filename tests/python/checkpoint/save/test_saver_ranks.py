"""Checkpoints of several ranks: any number of ranks can load them, and an error on one rank is raised on all."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from processes import World
from saver_rank_cases import BUCKETS, IDS, Shards, weights_of
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import ConfigError, CorruptionError, MismatchError, PathError, StateError

EXPECTED = sorted(
    (name, row_id, weights_of(torch.tensor([row_id]))[0].tolist(), float(torch.tensor(row_id).to(torch.float32)))
    for name in ("spread", "whole")
    for row_id in IDS.tolist()
)


def save(rank: int, size: int, path: str) -> None:
    model = nn.ModuleDict({"shards": Shards(rank, size)})
    model["shards"].fill(IDS)  # type: ignore[operator]
    Saver().save(model, path)
    Saver(rank).save(model, path)  # again, over the first


def load(rank: int, size: int, path: str, total_num_buckets: int = BUCKETS) -> tuple[Any, int]:
    shards = Shards(rank, size, total_num_buckets)
    Saver(rank).load(nn.ModuleDict({"shards": shards}), path)
    assert all(table.step() == 42 for table in shards.tables.values())
    assert all(table.total_num_buckets == BUCKETS for table in shards.tables.values())
    return shards.contents(), shards.changed


@pytest.fixture(scope="module")
def saved(two_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "sparse"
    two_ranks.run(save, str(path))
    return path


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_two_ranks_save_and_any_number_loads(
    size: int, two_ranks: World, three_ranks: World, four_ranks: World, saved: Path
) -> None:
    worlds = {2: two_ranks, 3: three_ranks, 4: four_ranks}
    loaded = [load(0, 1, str(saved))] if size == 1 else worlds[size].run(load, str(saved))
    assert sorted(row for contents, _ in loaded for row in contents) == EXPECTED
    assert [len(list(saved.rglob(f"{rank}-of-2.json"))) for rank in range(2)] == [1, 1], "one checkpoint is left"


def test_ranks_take_the_number_of_buckets_of_the_file(two_ranks: World, saved: Path) -> None:
    loaded = two_ranks.run(load, str(saved), 4093)
    assert sorted(row for contents, _ in loaded for row in contents) == EXPECTED
    assert [changed for _, changed in loaded] == [1, 2], "the module hears of each table that changed"


def refusals(rank: int, size: int, path: str, damaged: str) -> None:
    model = nn.ModuleDict({"shards": Shards(rank, size)})
    shards = model["shards"]
    with pytest.raises(PathError, match="differs between ranks"):
        Saver().save(model, f"{path}-{rank}")
    with pytest.raises(PathError, match="differs between ranks"):
        Saver().load(model, f"{path}-{rank}")
    # An error that only one rank meets is raised on both.
    with pytest.raises(PathError):
        Saver().save(model, path if rank == 0 else b"bytes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="torch.distributed says"):
        Saver(rank + 1).save(model, path)
    other = nn.ModuleDict({"other" if rank == 1 else "shards": shards})
    with pytest.raises(MismatchError, match="'spread' of module 'other'"):
        Saver().load(other, path)
    shards.fill(IDS[:3])  # type: ignore[operator]
    before = shards.contents()  # type: ignore[operator]
    if rank == 1:
        shards.tables["spread"]._native_table.set_step(9)  # type: ignore[index, union-attr]
    with pytest.raises(StateError, match="different settings or steps"):
        Saver().save(model, path)
    assert shards.contents() == before  # type: ignore[operator]
    # Rows of the last bucket, which only the last rank reads, are damaged. Then no rank serves anything.
    with pytest.raises(CorruptionError):
        Saver().load(model, damaged)
    for table in shards.tables.values():  # type: ignore[union-attr]
        with pytest.raises(StateError, match="did not succeed"):
            len(table)
    Saver().load(model, path)
    dist.barrier()
    total = torch.tensor(len(shards.contents()))  # type: ignore[operator]
    dist.all_reduce(total)
    assert total == len(EXPECTED)


def test_error_on_one_rank_is_raised_on_both_and_loads_nothing(two_ranks: World, saved: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    two_ranks.run(save, str(damaged))
    (path,) = damaged.rglob("*+spread/1-of-2.0.safetensors")
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    data[8 + header] ^= 1  # the first id
    path.write_bytes(data)
    two_ranks.run(refusals, str(saved), str(damaged))
