"""Optimizers that torch does not have, compared with their formulas in float64; and all optimizers through DCP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tables import OPTIMIZERS, Contents, make_bag, random_batches, train
from torchrec_embcache import EmbCacheStorageReader, EmbCacheStorageWriter, initializers, optimizers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
IDS = torch.tensor([0, 1, 1, 2, 4, 3])
OFFSETS = torch.tensor([0, 2, 3])
#: How often each of the ids 0 to 4 occurs in each of the three bags.
OCCURRENCES = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.float64)
ROWS, DIM = 5, 20

Slots = dict[str, Tensor]


def partial_rowwise_adam(w: Tensor, g: Tensor, slots: Slots, spec: Any, step: int) -> Tensor:
    """FBGEMM's PARTIAL_ROWWISE_ADAM: one second moment a row, and weight decay apart from the gradient."""
    (b1, b2), m, v = spec.betas, slots["exp_avg"], slots["exp_avg_sq"]
    m.mul_(b1).add_(g, alpha=1 - b1)
    v.mul_(b2).add_(g.square().sum(1) / DIM, alpha=1 - b2)
    root = (v / (1 - b2**step)).sqrt() + spec.eps
    return w - spec.lr * (m / (1 - b1**step) / root[:, None] + spec.weight_decay * w)


def ftrl(w: Tensor, g: Tensor, slots: Slots, spec: Any, _step: int) -> Tensor:
    """FTRL-Proximal, algorithm 1 of McMahan et al. (2013), with weight decay in the gradient."""
    z, n = slots["z"], slots["n"]
    g = g + spec.weight_decay * w
    sigma = ((n + g**2).sqrt() - n.sqrt()) / spec.lr
    z += g - sigma * w
    n += g**2
    found = -(z - z.sign() * spec.l1) / ((spec.beta + n.sqrt()) / spec.lr + spec.l2)
    return torch.where(z.abs() <= spec.l1, 0.0, found)


def lamb(w: Tensor, g: Tensor, slots: Slots, spec: Any, step: int) -> Tensor:
    """FBGEMM's LAMB: the norms of a row."""
    (b1, b2), m, v = spec.betas, slots["exp_avg"], slots["exp_avg_sq"]
    m.mul_(b1).add_(g, alpha=1 - b1)
    v.mul_(b2).add_(g**2, alpha=1 - b2)
    r = m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + spec.eps) + spec.weight_decay * w
    return w - spec.lr * (w.norm(dim=1) / r.norm(dim=1))[:, None] * r


FORMULAS: dict[str, Callable[[Tensor, Tensor, Slots, Any, int], Tensor]] = {
    "partial_rowwise_adam": partial_rowwise_adam,
    "ftrl": ftrl,
    "lamb": lamb,
}
SPECS: dict[str, list[Any]] = {
    "partial_rowwise_adam": [
        optimizers.PartialRowWiseAdam(lr=0.05),
        optimizers.PartialRowWiseAdam(lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    ],
    "lamb": [
        optimizers.LAMB(lr=0.05),
        optimizers.LAMB(lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    ],
    "ftrl": [
        optimizers.FTRL(),
        optimizers.FTRL(lr=0.05, beta=0.0),
        optimizers.FTRL(lr=0.5, beta=0.5, l1=0.7, l2=0.1, weight_decay=0.1),
    ],
}


def slots_at_birth(spec: Any) -> Slots:
    return {
        name: torch.zeros((ROWS, DIM) if number < spec.vector_slots else (ROWS,), dtype=torch.float64)
        for number, name in enumerate(spec.slot_names)
    }


@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for specs in SPECS.values() for spec in specs], ids=str)
def test_training_follows_the_formula_with_weights_and_slots(spec, backend):
    with make_bag(embedding_dim=DIM, mode="sum", optimizer=spec, **backend) as bag:
        rows, slots = bag.read_rows(torch.arange(ROWS)).weights.double(), slots_at_birth(spec)
        for step in range(1, 7):
            scale = torch.randn(3, DIM, generator=torch.Generator().manual_seed(step))
            (bag(IDS, OFFSETS) * scale).sum().backward()
            rows = FORMULAS[spec.kind](rows, OCCURRENCES.T @ scale.double(), slots, spec, step)
            found = bag.read_rows(torch.arange(ROWS))
            torch.testing.assert_close(found.weights.double(), rows, rtol=2e-5, atol=2e-6)
        assert list(found.slots) == list(spec.slot_names)
        for name, slot in slots.items():
            assert found.slots[name].shape == slot.shape
            torch.testing.assert_close(found.slots[name].double(), slot, rtol=2e-5, atol=2e-6)


def first_update(spec: optimizers.FTRL, gradient: list[float], **settings: Any) -> tuple[Tensor, Tensor]:
    """The weights of a row before and after its first update."""
    with make_bag(embedding_dim=len(gradient), mode="sum", optimizer=spec, **settings) as bag:
        before = bag.read_rows(torch.tensor([7])).weights[0]
        (bag(torch.tensor([[7]])) * torch.tensor([gradient])).sum().backward()
        return before, bag.read_rows(torch.tensor([7])).weights[0]


def test_first_ftrl_update_weighs_initial_weights_with_beta(backend):
    gradient = torch.tensor([1.5, -0.25, 3.0, -4.0, 0.0])
    for beta in (0.0, 0.5, 100.0):
        before, after = first_update(optimizers.FTRL(lr=0.5, beta=beta), gradient.tolist(), **backend)
        expected = (gradient.abs() * before - 0.5 * gradient) / (beta + gradient.abs())
        expected[4] = 0.0  # with beta=0 this is 0 / 0
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)


def test_l1_of_ftrl_gives_exact_zeros(backend):
    settings = {"initializer": initializers.Constant(0.0), **backend}
    _, after = first_update(optimizers.FTRL(lr=0.5, l1=1.0), [3.0, 1.0, -1.0, 0.5, -2.0], **settings)
    assert after.tolist() == [-0.25, 0.0, 0.0, 0.0, pytest.approx(1 / 6)]
    assert not after[1:4].signbit().any()


def test_gradients_of_zeros_leave_rows_that_ftrl_has_updated_before(backend):
    zeros = torch.zeros(3, DIM)
    with make_bag(embedding_dim=DIM, mode="sum", optimizer=optimizers.FTRL(lr=0.5, l1=0.1), **backend) as bag:
        (bag(IDS, OFFSETS) * torch.randn(3, DIM, generator=torch.Generator().manual_seed(1))).sum().backward()
        before = bag.read_rows(torch.arange(ROWS + 1))
        (bag(IDS, OFFSETS) * zeros).sum().backward()
        (bag(torch.tensor([[ROWS]])) * zeros[:1]).sum().backward()
        after = bag.read_rows(torch.arange(ROWS + 1))
        assert torch.equal(after.weights[:ROWS], before.weights[:ROWS])
        assert before.weights[ROWS].all()
        assert not after.weights[ROWS].any()  # a first update by zeros
        assert all(torch.equal(after.slots[name][:ROWS], before.slots[name][:ROWS]) for name in ("z", "n"))


def test_lamb_moves_rows_of_zeros_and_leaves_rows_without_a_gradient(backend):
    settings = {"initializer": initializers.Constant(0.0), **backend}
    for eps in (0.0, 1e-8):  # 5 columns: what lies behind a row's end counts in no norm
        _, after = first_update(optimizers.LAMB(lr=0.5, eps=eps), [3.0, -1.0, 0.0, 2.0, 0.25], **settings)
        torch.testing.assert_close(after, torch.tensor([-0.5, 0.5, 0.0, -0.5, -0.5]))
        before, after = first_update(optimizers.LAMB(lr=0.5, eps=eps), [0.0] * 5, **backend)
        assert torch.equal(before, after)
        before, after = first_update(optimizers.LAMB(lr=0.5, eps=eps), [3.0, -1.0, 1.0, 2.0, 0.25], **backend)
        direction = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])
        torch.testing.assert_close(after, before - 0.5 * before.norm() / 5**0.5 * direction)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_dcp_restores_rows_and_slots_bit_for_bit(kind, tmp_path: Path, backend):
    batches = random_batches(6, 6, 90, seed=2)
    settings = {"optimizer": OPTIMIZERS[kind], **backend}
    with make_bag(**settings) as bag, make_bag(**settings) as other:
        train(bag, batches[:4])
        path = str(tmp_path / "ckpt")
        dcp.save({"model": bag.state_dict()}, storage_writer=EmbCacheStorageWriter(path, bag))
        state = {"model": other.state_dict()}
        dcp.load(state, storage_reader=EmbCacheStorageReader(path, other))
        other.load_state_dict(state["model"])
        assert Contents.of(other) == Contents.of(bag)
        for each in (bag, other):
            train(each, batches[4:])
        assert Contents.of(other) == Contents.of(bag)
