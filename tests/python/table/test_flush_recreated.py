"""Data saved with a flush, and models that are created again in one process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from processes import Child
from tables import make_bag, ssd_tiers, step
from torchrec_embcache import close_all, flush
from torchrec_embcache._ssd import autoflush
from torchrec_embcache.exceptions import InUseError


def model_in(root: Path) -> nn.ModuleDict:
    return nn.ModuleDict({"item": make_bag(tiers=ssd_tiers(root, reopen="auto")), "over": nn.Linear(1, 1)})


def train_and_die(_say: Any, root: Path, amid: bool) -> None:
    """Flush with the dense part after each step; be killed after the third one's dense part was saved, or after its flush."""
    model = model_in(root / "ssd")

    def save(at: int) -> None:
        torch.save(at, root / f"dense-{at}.pt")
        if amid and at == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        step(model["item"], [[1, 2, 3]])
        flush(model, also=save)
    step(model["item"], [[1, 2, 3]])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("amid", [False, True])
def test_a_killed_run_finds_the_dense_part_of_the_step_that_it_resumes(tmp_path: Path, amid: bool) -> None:
    (tmp_path / "ssd").mkdir(mode=0o750)
    assert Child(train_and_die, tmp_path, amid).ended() == ([], -signal.SIGKILL)
    model = model_in(tmp_path / "ssd")
    resumed = model["item"].table.step()
    assert resumed == (2 if amid else 3)
    assert torch.load(tmp_path / f"dense-{resumed}.pt") == resumed
    model["item"].close()


def test_nothing_is_flushed_where_the_dense_part_cannot_be_saved(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    step(model["item"], [[1, 2, 3]])
    flush(model)
    states = model["item"].table.commit_ids()
    step(model["item"], [[1, 2, 3]])

    def full_disk(_at: int) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        flush(model, also=full_disk)
    assert model["item"].table.commit_ids() == states
    flush(model)
    assert model["item"].table.commit_ids() != states
    model["item"].close()


def test_a_cell_that_makes_a_model_again_closes_the_one_before(tmp_path: Path) -> None:
    first = model_in(tmp_path)
    step(first["item"], [[1, 2, 3]])
    with pytest.raises(InUseError, match=r"torchrec_embcache\.close_all\(\) closes every table of this process"):
        model_in(tmp_path)
    close_all()
    assert not autoflush.open_tables()
    again = model_in(tmp_path)
    assert (again["item"].table.step(), len(again["item"])) == (1, 3)
    close_all()
    close_all()


def test_close_all_closes_every_table_though_one_cannot_be_flushed(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "a").mkdir(mode=0o750)
    (tmp_path / "b").mkdir(mode=0o750)
    one, other = (make_bag(name=name, tiers=ssd_tiers(tmp_path / name)) for name in "ab")

    def fails() -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(autoflush.open_tables()[0], "flush", fails)
    with pytest.raises(OSError, match="the disk is full"):
        close_all()
    assert one.table._is_closed
    assert other.table._is_closed
