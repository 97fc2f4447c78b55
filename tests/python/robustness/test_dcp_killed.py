"""Saves through DCP that are killed at random leave the previous or the new checkpoint, complete."""

import itertools
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_cases import Model, held, load, rows, save
from processes import Child, process_group
from torchrec_embcache import EmbCacheStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def save_until_killed(say: Callable[[int], None], path: str, how: str, rank: int, size: int) -> None:
    """Report the number of each save before it begins."""
    warnings.simplefilter("ignore")
    model = Model(rank, size)
    writer = EmbCacheStorageWriter(path, model)
    with process_group(rank, size, f"{path}.store"):
        group = dist.new_group(backend="gloo")
        for salt in itertools.count():
            say(salt)
            model.fill(salt)
            state = {"salt": salt, "a": torch.full((1 << 18,), float(salt))}
            if how == "thread":
                future = dcp.async_save(state, storage_writer=writer, process_group=group)
                # Training goes on, because the save that is killed runs beside it.
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
    # Let some saves end, and kill within one.
    for _ in range(rng.randrange(3, 6)):
        last = ranks[0].hear()
    time.sleep(rng.random() * 0.03)
    for rank in killed:
        ranks[rank].kill()
    last = max([last, *ranks[0].ended()[0]])
    for rank in ranks[1:]:
        rank.ended()
    # It is the last save that ended, or the one that was running.
    model = Model()
    state = load({"salt": -1, "a": torch.zeros(1 << 18)}, path, model)
    assert last - 1 <= state["salt"] <= last
    assert torch.equal(state["a"], torch.full((1 << 18,), float(state["salt"])))
    assert sorted(model.contents()) == rows(state["salt"])
    save({"salt": 99}, path)
    assert len(held(path)) == 2, "what the killed processes left is swept"


class Halting(EmbCacheStorageWriter):
    """Stop at a step of the save, in the process in which DCP saves, and report this by a file."""

    where = ""

    def _halt(self, where: str) -> None:
        if self.where == where:
            Path(f"{self.checkpoint_id}.halted").touch()
            signal.pause()

    def write_data(self, plan: Any, planner: Any) -> Any:
        resolve, left = planner.resolve_data, len(plan.items)

        def resolve_data(item: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                self._halt("amid its part")
            return resolve(item)

        planner.resolve_data = resolve_data
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self._halt("after it published")


def train_while_savers_are_killed(say: Callable[[Any], None], path: str) -> None:
    """Report, for each save whose process is killed, the error of its future and what a load then finds."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent))  # the process that saves imports this module
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    model = Model()
    writer, halted = Halting(path, model), Path(f"{path}.halted")
    state = {"salt": 0, "a": torch.zeros(1 << 18)}

    def fill(salt: int) -> None:
        model.fill(salt)
        state["salt"] = salt
        state["a"].fill_(salt)

    def begin(kind: AsyncCheckpointerType) -> Any:
        return dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)

    def found() -> int:
        loaded = load({"salt": -1, "a": torch.zeros(1 << 18)}, path, other := Model())
        assert torch.equal(loaded["a"], torch.full((1 << 18,), float(loaded["salt"])))
        assert sorted(other.contents()) == rows(loaded["salt"])
        return int(loaded["salt"])

    with process_group(0, 1, f"{path}.store"):
        fill(1)
        dcp.save(state, storage_writer=writer)
        for salt, writer.where in ((10, "amid its part"), (20, "after it published")):
            fill(salt)
            future = begin(AsyncCheckpointerType.PROCESS)
            fill(-salt)
            while not halted.exists():
                assert not future.done(), future.exception()
                time.sleep(0.01)
            halted.unlink()
            os.kill(_async_process_executor._CHECKPOINT_PROCESS._save_process.pid, signal.SIGKILL)
            writer.where = ""
            say((type(future.exception()).__name__, str(future.exception()), found()))
            # DCP does not start another process by itself. A save that runs in one fails with a typed error, and what it staged is
            # given back.
            fill(salt + 1)
            say(str(begin(AsyncCheckpointerType.PROCESS).exception()))
            begin(AsyncCheckpointerType.THREAD).result()
            assert found() == salt + 1
            fill(salt + 2)
            dcp.save(state, storage_writer=writer)
            assert found() == salt + 2
            say(held(path))
            _async_process_executor._CHECKPOINT_PROCESS = None


def test_killed_async_save_process_fails_only_the_future(tmp_path: Path) -> None:
    """The trainer can save again."""
    said, status = Child(train_while_savers_are_killed, str(tmp_path / "ckpt"), daemon=False).ended()
    assert status == 0
    deaths, refusals, left = said[::3], said[1::3], said[2::3]
    assert [found for _, _, found in deaths] == [1, 20], "the checkpoint before, until the new one is published"
    for kind, message, _ in deaths:
        assert (kind, "background process is dead" in message) == ("RuntimeError", True), message
    for message in refusals:
        assert "background process is dead" in message or "Broken pipe" in message, message
    for names in left:
        assert len(names) == 2, f"what the killed process left is swept: {names}"
