"""Saves through DCP that are killed, at random: the checkpoint before, or the new one, is there whole."""

import itertools
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_cases import Model, held, load, rows, save
from torchrec_embcache import EmbCacheStorageWriter
from world import Child, process_group

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def save_until_killed(say: Callable[[int], None], path: str, how: str, rank: int, size: int) -> None:
    """Says the number of each save before it begins."""
    warnings.simplefilter("ignore")
    model = Model(rank, size)
    writer = EmbCacheStorageWriter(path, model)
    with process_group(rank, size, f"{path}.store"):
        for salt in itertools.count():
            say(salt)
            model.fill(salt)
            state = {"salt": salt, "a": torch.full((1 << 18,), float(salt))}
            if how == "thread":
                future = dcp.async_save(state, storage_writer=writer)
                # Training goes on: what is killed is a save beside it.
                model.fill(-salt)
                state["a"].zero_()
                future.result()
            else:
                save(state, path, model)
            dist.barrier()


@pytest.mark.parametrize(
    ("how", "killed"), [("blocking", [0]), ("thread", [0]), ("blocking", [1, 0]), ("thread", [0, 1])]
)
def test_a_kill_during_saves_leaves_a_whole_checkpoint(tmp_path: Path, how: str, killed: list[int]) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    path = tmp_path / "ckpt"
    ranks = [Child(save_until_killed, str(path), how, rank, len(killed)) for rank in range(len(killed))]
    # Some saves in, amid one.
    for _ in range(rng.randrange(3, 6)):
        last = ranks[0].hear()
    time.sleep(rng.random() * 0.03)
    for rank in killed:
        ranks[rank].kill()
    last = max([last, *ranks[0].ended()[0]])
    for rank in ranks[1:]:
        rank.ended()
    # The last save that was over, or the one that was under way.
    model = Model()
    state = load({"salt": -1, "a": torch.zeros(1 << 18)}, path, model)
    assert last - 1 <= state["salt"] <= last
    assert torch.equal(state["a"], torch.full((1 << 18,), float(state["salt"])))
    assert sorted(model.contents()) == rows(state["salt"])
    save({"salt": 99}, path)
    assert len(held(path)) == 2, "what the killed processes left is swept"
