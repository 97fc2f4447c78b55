"""Train 2k steps, or train k, save, be killed, load elsewhere and train k. Every row, its slots and its metadata have the same
bits.
"""

import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from processes import Child, World, process_group
from tables import OPTIMIZERS, Contents, make_bag, random_batches, ssd_tiers, train
from torchrec_embcache import TierBudgets
from torchrec_embcache.checkpoint import Saver
from torchrec_saver_cases import FEATURES, contents, make, merged

K = 12
BATCHES = random_batches(2 * K, 6, 160, seed=8)
# From the working set of one batch up to every row, on every tier.
ELSEWHERE: dict[str, dict[str, str]] = {
    "ram": {"host_bytes": "1MiB"},
    "ssd": {"host_bytes": "3KiB", "ssd_bytes": "32MiB"},
    "device": {"host_bytes": "1MiB", "device_bytes": "3KiB"},
    "all in part": {"host_bytes": "2KiB", "device_bytes": "5KiB", "ssd_bytes": "32MiB"},
    "all in full": {"host_bytes": "1MiB", "device_bytes": "1MiB", "ssd_bytes": "16MiB"},
}
pytestmark = pytest.mark.filterwarnings("ignore:table .* did not fit", "ignore:table .* has no room for both")


def bag_in(root: Path, where: str, optimizer: str, **settings: Any) -> Any:
    sizes = ELSEWHERE[where]
    tiers = ssd_tiers(root / where, **sizes) if "ssd_bytes" in sizes else TierBudgets(**sizes)
    return make_bag(tiers=tiers, optimizer=OPTIMIZERS[optimizer], **settings)


def train_save_and_die(_say: Any, root: Path, where: str, optimizer: str) -> None:
    """Do a full save, a delta of k steps, and steps of which the checkpoint knows nothing."""
    warnings.simplefilter("ignore")
    bag = bag_in(root, where, optimizer)
    train(bag, BATCHES[: K // 2], lookahead=2)
    Saver(0).save(bag, root / "saved")
    train(bag, BATCHES[K // 2 : K])
    assert Saver(0).save(bag, root / "saved", incremental=True).kind == "delta"
    train(bag, BATCHES[K : K + 3], lookahead=1)
    bag.flush()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_killed_run_resumes_bit_for_bit_in_any_tiers(optimizer: str, tmp_path: Path) -> None:
    with make_bag(optimizer=OPTIMIZERS[optimizer]) as straight:
        train(straight, BATCHES[:K])
        half = Contents.of(straight)
        train(straight, BATCHES[K:])
        whole = Contents.of(straight)
    for before, policy in (("all in part", "s3fifo"), ("ram", "lfu")):
        root = tmp_path / before
        root.mkdir(mode=0o700)
        assert Child(train_save_and_die, root, before, optimizer).ended() == ([], -signal.SIGKILL)
        (root / "after").mkdir(mode=0o700)
        for lookahead, after in enumerate(ELSEWHERE):
            with bag_in(root / "after", after, optimizer, policy=policy) as bag:
                report = Saver(0).load(bag, root / "saved")
                assert report.rows == {"item": len(half.rows)}
                assert Contents.of(bag) == half, f"{before} to {after}"
                train(bag, BATCHES[K:], lookahead)
                assert Contents.of(bag) == whole, f"{before} to {after}"


def shared_batches(steps: range, rank: int, size: int) -> Iterator[KeyedJaggedTensor]:
    """A rank's share of the samples of each step. Features have one id, so no sum depends on the rank on which it is computed."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        lengths = (torch.rand(len(FEATURES), 8, generator=generator) < 0.9).long()
        ids = torch.randint(-50, 50, lengths.shape, generator=generator)
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        wanted = lengths[:, mine]
        yield KeyedJaggedTensor(keys=FEATURES, values=ids[:, mine][wanted.bool()], lengths=wanted.flatten())


def train_ranks(model: Any, steps: range, rank: int, size: int) -> None:
    """TorchRec divides gradients by the number of ranks. That is exact, because it is a power of two."""
    for batch in shared_batches(steps, rank, size):
        (model(batch) * size).backward()


def save_ranks_and_die(_say: Any, rank: int, size: int, root: Path) -> None:
    warnings.simplefilter("ignore")
    with process_group(rank, size, str(root / "store")):
        model = make(size, sharded=True, tiers=ssd_tiers(root / "ssd", host_bytes="2KiB", ssd_bytes="16MiB"))
        train_ranks(model, range(K // 2), rank, size)
        Saver().save(model, root / "saved")
        train_ranks(model, range(K // 2, K), rank, size)
        Saver().save(model, root / "saved", incremental=True)
        train_ranks(model, range(K, K + 3), rank, size)
        os.kill(os.getpid(), signal.SIGKILL)


def straight(rank: int, size: int, steps: int) -> Any:
    model = make(size, sharded=True)
    train_ranks(model, range(steps), rank, size)
    return contents(model)


def go_on(rank: int, size: int, root: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = root / f"ssd of {size}"
        model = make(
            size, sharded=True, tiers=ssd_tiers(place, host_bytes="1KiB", device_bytes="2KiB", ssd_bytes="16MiB")
        )
        Saver().load(model, root / "saved")
        half = contents(model)
        train_ranks(model, range(K, 2 * K), rank, size)
        return half, contents(model)


@pytest.mark.parametrize("before", [2, 4])
def test_killed_ranks_resume_bit_for_bit_as_more_or_fewer(
    before: int, two_ranks: World, four_ranks: World, tmp_path: Path
) -> None:
    children = [Child(save_ranks_and_die, rank, before, tmp_path) for rank in range(before)]
    assert [child.ended() for child in children] == [([], -signal.SIGKILL)] * before
    with process_group(0, 1, str(tmp_path / "alone")):
        half, whole = straight(0, 1, K), straight(0, 1, 2 * K)
        alone = [go_on(0, 1, tmp_path)]
    went_on = [alone, two_ranks.run(go_on, tmp_path), four_ranks.run(go_on, tmp_path)]
    for ranks, end in itertools.product(went_on, (0, 1)):
        assert merged([rank[end] for rank in ranks]) == (half, whole)[end], f"{before} to {len(ranks)} ranks"
