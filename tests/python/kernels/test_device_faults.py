"""Allocations of torch that fail between a plan and its commit: both tables are unchanged, or poisoned."""

import threading

import numpy as np
import pytest
import torch

from tables import DEVICE, KERNELS, Contents, make_bag, ssd_tiers, train
from torchrec_embcache import TierBudgets, initializers, optimizers
from torchrec_embcache._device.tier import DeviceTier, TorchRowMover
from torchrec_embcache._lookup.group import LookupGroup
from torchrec_embcache.exceptions import DeviceMemoryError, StateError

# Two tables, each with fewer slots on the device than a batch has rows.
BATCHES = [np.arange(start, start + 14, dtype=np.int64) * 7 % 40 for start in (0, 9)]
GIVEN_UP = np.array([0, 7, 14, 21, 3, 70, 71, 35, 28, 2, 9, 72, 5, 11], np.int64)


pytestmark = pytest.mark.usefixtures("one_thread_of_torch")


class Refusing:
    """A mode that makes one of torch's calls that change or make tensors fail, as where the device has no memory."""

    def __init__(self, monkeypatch) -> None:
        self.left: int | None = None
        self.failed = False
        for owner, name in (
            (torch, "cat"),
            (torch, "from_numpy"),
            (torch, "empty"),
            (torch, "zeros"),
            (torch.Tensor, "index_copy_"),
            (torch.Tensor, "index_select"),
            (torch.Tensor, "new_zeros"),
            (torch.Tensor, "sqrt"),
        ):
            self._wrap(monkeypatch, owner, name)

    def _wrap(self, monkeypatch, owner, name) -> None:
        real = getattr(owner, name)

        def call(*arguments, **more):
            if self.left is not None:
                if self.left == 0:
                    self.left, self.failed = None, True
                    raise torch.OutOfMemoryError(f"{name}: asked to fail")
                self.left -= 1
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, call)


class Pair:
    """Two tables under one lookup, with a feature each."""

    def __init__(self, directory, tiers) -> None:
        sizes = {"host_bytes": "2KiB" if tiers == "ssd" else "1MiB", "device_bytes": "1KiB"}
        self.bags = []
        for name in ("a", "b"):
            budgets = ssd_tiers(directory / name, **sizes) if tiers == "ssd" else TierBudgets(**sizes)
            self.bags.append(make_bag(name=name, tiers=budgets, optimizer=optimizers.Adam(lr=0.1)))
        self.anchor = torch.zeros(0, requires_grad=True, device=DEVICE)
        first = self.bags[0]._group
        second = self.bags[1]._group
        self.group = LookupGroup(
            [bag.table for bag in self.bags], [0, 1], lambda: [*first.param_groups(), *second.param_groups()]
        )

    def train(self, ids) -> None:
        offsets = np.arange(2 * len(ids) + 1, dtype=np.int64)
        out = self.group.pooled(np.concatenate([ids, ids + 1]), offsets, [False, False], train=True, anchor=self.anchor)
        (out * out + out).sum().backward()

    def contents(self) -> list[Contents]:
        return [Contents.of(bag) for bag in self.bags]

    def trained(self) -> "Pair":
        for ids in BATCHES:
            self.train(ids)
        return self

    def close(self) -> None:
        for bag in self.bags:
            bag.table._native_table.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:table '[ab]'.* did not fit")
@pytest.mark.parametrize("tiers", ["host", "ssd"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_step_without_memory_is_atomic_or_poisons_tables(kernels, tiers, tmp_path, monkeypatch):
    """The allocation fails at each call of torch in turn."""
    monkeypatch.setenv("EMBCACHE_KERNELS", kernels)
    refusing = Refusing(monkeypatch)
    expected = Pair(tmp_path / "expected", tiers).trained()
    before = expected.contents()
    expected.train(GIVEN_UP)
    after = expected.contents()
    outcomes = {"as before": 0, "refused": 0}
    # A step in Triton's interpreter takes seconds. Its stride has no divisor in common with the calls of a launch.
    every = 7 if kernels == "triton" else 1
    for passing in range(0, 1000, every):
        pair = Pair(tmp_path / str(passing), tiers).trained()
        refusing.left, refusing.failed = passing, False
        try:
            pair.train(GIVEN_UP)
        except DeviceMemoryError as error:
            assert refusing.failed
            said = str(error)
            assert "step of 'a', 'b'" in said or "reading rows of the device tier" in said
        refusing.left = None
        if not refusing.failed:
            assert pair.contents() == after
            break
        try:
            found = pair.contents()
        except StateError as error:
            assert "failed half-way" in str(error)  # noqa: PT017
            for bag in pair.bags:
                with pytest.raises(StateError, match="failed half-way"):
                    bag.read_rows(torch.tensor([0]))
            outcomes["refused"] += 1
        else:
            assert found == before, f"after {passing} calls"
            assert [bag.stats().pinned_rows for bag in pair.bags] == [0, 0]
            pair.train(GIVEN_UP)
            assert pair.contents() == after, f"after {passing} calls"
            outcomes["as before"] += 1
        pair.close()
    assert not refusing.failed, "the step has more calls than the test tries"
    assert outcomes["as before"] > (5 if kernels == "triton" else 10)
    # Three parts of each table change once the update has begun.
    assert outcomes["refused"] == (6 if kernels == "torch" else 0)


def test_a_device_tier_that_cannot_grow_is_as_before(monkeypatch):
    tier = DeviceTier(2, 2, True, 4, DEVICE, TorchRowMover())
    refusing = Refusing(monkeypatch)
    shapes = [part.shape for part in (tier.weights, *tier.vector_slots, tier.scalars)]
    for passing in range(8):
        refusing.left = passing
        with pytest.raises(torch.OutOfMemoryError):
            tier.ensure_capacity(9)
        assert [part.shape for part in (tier.weights, *tier.vector_slots, tier.scalars)] == shapes
    tier.ensure_capacity(9)
    assert tier.scalars is not None
    assert {part.shape[0] for part in (tier.weights, *tier.vector_slots, tier.scalars)} == {9}


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.parametrize("kernels", KERNELS)
def test_device_tier_opened_or_grown_in_inference_mode_trains(kernels, monkeypatch):
    monkeypatch.setenv("EMBCACHE_KERNELS", kernels)
    with make_bag(tiers=TierBudgets(host_bytes="1MiB", device_bytes="1KiB")) as bag:
        found: list[torch.Tensor] = []

        def evaluate():
            with torch.inference_mode():
                found.append(bag(torch.arange(40).view(-1, 1)))

        # On a thread of its own, the tensors are made where the mode is active.
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        assert len(found) == 1
        train(bag, [[list(range(40))]])
        assert len(bag) == 40


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the core's kernels run on the CPU")
def test_update_survives_concurrent_growth_of_the_device_tier(monkeypatch):
    """Let the other thread come when this one has looked the tensors up and has not updated them yet."""
    monkeypatch.setenv("EMBCACHE_KERNELS", "core")
    settings = {"optimizer": optimizers.SGD(lr=1.0), "initializer": initializers.Constant(1.0)}
    with make_bag(tiers=TierBudgets(host_bytes="1MiB", device_bytes="1KiB"), **settings) as bag:
        out = bag(torch.tensor([[1]]))
        growing = threading.Thread(target=lambda: bag.eval()(torch.arange(100, 160).view(-1, 1)))
        real = DeviceTier.arrays

        def arrays(tier):
            found = real(tier)
            if not growing.ident:
                growing.start()
                growing.join(timeout=0.3)  # otherwise it would be done by then
            return found

        monkeypatch.setattr(DeviceTier, "arrays", arrays)
        out.sum().backward()
        growing.join()
        assert growing.ident
        assert bag.table._tier.weights.shape[0] >= 60
        assert bag.read_rows(torch.tensor([1])).weights.tolist() == [[0.0] * 4]
