"""Where an update within the backward differs from an optimizer's step: clipping, scaled losses, accumulation,
`torch.autograd.grad`.

`docs/fused-updates.md` tells users about it, with the cures that are tested here.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from tables import OPTIMIZERS, jagged, make_bag, random_batches
from torchrec_embcache import CacheTable, EmbCacheEmbedding, Saver, TierBudgets, initializers, optimizers
from torchrec_embcache._lookup.group import LookupGroup
from torchrec_embcache.exceptions import ConfigError, UnsupportedError
from torchrec_embcache.modules._optimizer_choice import choose_optimizer

LIMIT = 0.25
TIERS = TierBudgets(host_bytes="1MiB")
ROWS, DIM = 12, 5
KINDS = {
    "sgd": (EmbOptimType.EXACT_SGD, optimizers.SGD(lr=0.5, max_gradient=LIMIT)),
    "rowwise_adagrad": (
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        optimizers.RowWiseAdagrad(lr=0.5, eps=1e-8, max_gradient=LIMIT),
    ),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, optimizers.Adagrad(lr=0.5, eps=1e-8, max_gradient=LIMIT)),
}


def scale(out: torch.Tensor) -> torch.Tensor:
    """Batches with gradients on both sides of the limit."""
    return torch.linspace(-1.0, 1.0, out.numel()).view_as(out)


# ---- max_gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_max_gradient_is_fbgemms_gradient_clipping(kind, mode, backend):
    theirs, spec = KINDS[kind]
    pooling = PoolingMode.MEAN if mode == "mean" else PoolingMode.SUM
    reference = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=theirs,
        learning_rate=0.5,
        eps=1e-8,
        pooling_mode=pooling,
        gradient_clipping=True,
        max_gradient=LIMIT,
    )
    with make_bag(embedding_dim=8, mode="sum" if mode == "weighted" else mode, optimizer=spec, **backend) as bag:
        start = torch.rand(ROWS, 8, generator=torch.Generator().manual_seed(1))
        reference.split_embedding_weights()[0].data.copy_(start)
        bag.import_rows(torch.arange(ROWS), start)
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, ROWS, (9,), generator=generator)
            weights = torch.rand(9, generator=generator) * 3 if mode == "weighted" else None
            mine, its = (weights.clone().requires_grad_() if weights is not None else None for _ in range(2))
            out = bag(ids, torch.tensor([0, 4, 4]), per_sample_weights=mine)
            want = reference(ids, torch.tensor([0, 4, 4, 9]), per_sample_weights=its)
            torch.testing.assert_close(out, want)
            (out * scale(out)).sum().backward()
            (want * scale(want)).sum().backward()
            if weights is not None:
                torch.testing.assert_close(mine.grad, its.grad)
        torch.testing.assert_close(bag.read_rows(torch.arange(ROWS)).weights, reference.split_embedding_weights()[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "adamw", "partial_rowwise_adam", "lamb", "ftrl"])
def test_max_gradient_clamps_what_reaches_the_output(kind, backend):
    """Compare with a clamp by a hook on the output, for optimizers that FBGEMM does not have on the CPU."""
    make = type(OPTIMIZERS[kind])
    with (
        make_bag(optimizer=make(lr=0.1, max_gradient=LIMIT), **backend) as bag,
        make_bag(optimizer=make(lr=0.1), **backend) as other,
    ):
        for bags in random_batches(4, 5, 20):
            ids, offsets = jagged(bags)
            outs = bag(ids, offsets), other(ids, offsets)
            outs[1].register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))
            for out in outs:
                (out * scale(out)).sum().backward()
        found = list(bag.export())
        assert all(torch.equal(other.read_rows(chunk.ids).weights, chunk.weights) for chunk in found)


def test_max_gradient_gives_the_same_bits_on_any_number_of_threads(monkeypatch):
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv("EMBCACHE_THREADS", threads)
        with make_bag(embedding_dim=33, optimizer=optimizers.Adagrad(lr=0.1, max_gradient=LIMIT)) as bag:
            for bags in random_batches(4, 64, 50):
                out = bag(*jagged(bags))
                (out * scale(out)).sum().backward()
            chunk = next(iter(bag.export()))
            found.append(dict(zip(chunk.ids.tolist(), chunk.weights.tolist(), strict=True)))
    assert found[0] == found[1]


def test_tables_of_one_lookup_have_limits_of_their_own(backend):
    """Bags and sequences. Features 0 and 1 read table 0, which has no limit."""

    def tables() -> list[CacheTable]:
        return [
            CacheTable(
                name=f"t{place}",
                dim=DIM,
                initializer=initializers.Constant(0.0),
                optimizer=optimizers.SGD(lr=1.0),
                **backend,
            )
            for place in range(2)
        ]

    groups = [{"lr": 1.0}, {"lr": 1.0, "max_gradient": LIMIT}]
    anchor = torch.zeros(0, requires_grad=True)
    ids = torch.arange(3).numpy()
    pooled, sequence = tables(), tables()
    for found, is_pooled in ((pooled, True), (sequence, False)):
        group = LookupGroup(list(found), [0, 0, 1], lambda: groups)
        splits = torch.arange(4).numpy()
        if is_pooled:
            out = group.pooled(ids, splits, [False] * 3, train=True, anchor=anchor)
        else:
            out = group.sequence(ids, splits, train=True, anchor=anchor)
        out.sum().backward()
        assert found[0].read_rows(torch.tensor([0, 1])).weights.eq(-1.0).all()
        assert found[1].read_rows(torch.tensor([2])).weights.eq(-LIMIT).all()


def test_max_gradient_may_change_while_training():
    with make_bag(optimizer=optimizers.SGD(lr=1.0), initializer=initializers.Constant(0.0)) as bag:
        for limit, moved in ((None, -1.0), (0.5, -1.5), (None, -2.5)):
            bag.optimizer.param_groups[0]["max_gradient"] = limit
            bag(torch.tensor([[1]])).sum().backward()
            assert bag.read_rows(torch.tensor([1])).weights.eq(moved).all()
        bag.optimizer.param_groups[0]["max_gradient"] = -1
        with pytest.raises(ConfigError, match="max_gradient=-1"):
            bag(torch.tensor([[1]])).sum().backward()


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), "much", True])
def test_a_max_gradient_out_of_range_is_refused(limit):
    with pytest.raises(ConfigError, match=r"SGD\.max_gradient="):
        optimizers.SGD(max_gradient=limit)


def test_max_gradient_is_in_a_checkpoint_as_other_hyperparameters(tmp_path: Path):
    with make_bag(optimizer=optimizers.SGD(lr=0.5, max_gradient=LIMIT)) as bag:
        bag(torch.tensor([[1]])).sum().backward()
        Saver(0).save(bag, tmp_path / "rows")
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "rows").glob("*/manifest.json")]
    numbers = manifests[0]["tables"][0]["spec"]["optimizer"]["hyperparameters"]
    assert numbers == {"lr": 0.5, "weight_decay": 0.0, "max_gradient": LIMIT}


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        ({"gradient_clipping": True, "max_gradient": 0.5}, 0.5),
        ({"gradient_clipping": True}, 1.0),  # the default of FBGEMM
        ({"gradient_clipping": False, "max_gradient": 0.5}, None),
        ({"max_gradient": None}, None),
        ({}, None),
    ],
)
def test_fused_params_clip_as_fbgemm_does(params, limit):
    chosen = choose_optimizer("t", None, {"optimizer": EmbOptimType.EXACT_SGD, **params})
    assert chosen is not None
    assert chosen.max_gradient == limit


def test_a_max_gradient_that_fbgemm_would_ignore_is_refused():
    with pytest.raises(UnsupportedError, match="max_gradient=1.0 without gradient_clipping=True"):
        choose_optimizer("t", None, {"optimizer": EmbOptimType.EXACT_SGD, "max_gradient": 1.0})
    with pytest.raises(ConfigError, match="gradient_clipping=1"):
        choose_optimizer("t", None, {"optimizer": EmbOptimType.EXACT_SGD, "gradient_clipping": 1})


# ---- what torch's own ways come to


def model() -> tuple[nn.Sequential, EmbCacheEmbedding]:
    torch.manual_seed(0)
    rows = EmbCacheEmbedding(
        name="e",
        embedding_dim=DIM,
        tiers=TIERS,
        initializer=initializers.Constant(1.0),
        optimizer=optimizers.SGD(lr=1.0),
    )
    return nn.Sequential(rows, nn.Linear(DIM, 1)), rows


def test_clip_grad_norm_does_not_reach_the_rows_and_max_gradient_does():
    net, rows = model()
    (net(torch.tensor([1])) * 1000).sum().backward()
    moved = rows.read_rows(torch.tensor([1])).weights - 1
    assert moved.abs().max() > 1
    assert float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)) > 1
    assert torch.equal(rows.read_rows(torch.tensor([1])).weights - 1, moved)
    rows.optimizer.param_groups[0]["max_gradient"] = 0.1
    (net(torch.tensor([2])) * 1000).sum().backward()
    assert (rows.read_rows(torch.tensor([2])).weights - 1).abs().max() <= 0.1 + 1e-6


def test_scaler_step_of_fused_optimizer_is_rejected_with_remedy():
    net, rows = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    dense = torch.optim.SGD(net[1].parameters(), lr=0.1)
    scaler.scale(net(torch.tensor([1])).sum()).backward()
    scaler.step(dense)
    with pytest.raises(UnsupportedError, match="register_hook"):
        scaler.step(rows.optimizer)


def test_a_hook_on_the_output_takes_the_scale_back():
    plain, scaled = model()[1], model()[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for ids in (torch.tensor([1, 2]), torch.tensor([2, 3])):
        plain(ids).square().sum().backward()
        out = scaled(ids)
        out.register_hook(lambda grad: torch.nan_to_num(grad / scaler.get_scale(), 0.0, 0.0, 0.0))
        scaler.scale(out.square().sum()).backward()
    ids = torch.tensor([1, 2, 3])
    assert torch.equal(scaled.read_rows(ids).weights, plain.read_rows(ids).weights)
    # The scale was too large. Torch skips the dense step, and the rows stay as they are.
    before = scaled.read_rows(ids).weights
    out = scaled(ids)
    out.register_hook(lambda grad: torch.nan_to_num(grad / scaler.get_scale(), 0.0, 0.0, 0.0))
    (out * float("inf")).sum().backward()
    assert torch.equal(scaled.read_rows(ids).weights, before)


def test_each_backward_of_an_accumulation_updates():
    rows = model()[1]
    for _ in range(2):
        (rows(torch.tensor([1])).sum() / 2).backward()
    assert rows.read_rows(torch.tensor([1])).metadata.last_step.tolist() == [2]
    # The page names this cure: one lookup of all micro-batches.
    once = model()[1]
    (once(torch.tensor([[1], [1]])).sum() / 2).backward()
    assert once.read_rows(torch.tensor([1])).metadata.last_step.tolist() == [1]


def test_gradients_of_other_tensors_alone_leave_the_rows_alone():
    net, rows = model()
    loss = net(torch.tensor([1])).square().sum()
    (gradient,) = torch.autograd.grad(loss, [net[1].weight])
    assert gradient.abs().sum() > 0
    assert len(rows) == 0


@pytest.mark.parametrize("how", ["grad", "inputs", "anchor"])
def test_gradients_through_lookup_are_rejected_except_in_eval(how):
    with make_bag(mode="sum", optimizer=optimizers.SGD(lr=1.0)) as bag:
        weights = torch.ones(1, 2, requires_grad=True)
        loss = bag(torch.tensor([[1, 2]]), per_sample_weights=weights).sum()
        ask = {
            "grad": lambda: torch.autograd.grad(loss, [weights]),
            "inputs": lambda: loss.backward(inputs=[weights]),
            "anchor": lambda: torch.autograd.grad(loss, [bag.weight]),
        }[how]
        with pytest.raises(UnsupportedError, match=r"loss\.backward\(\) to train"):
            ask()
        assert len(bag) == 0
        (gradient,) = torch.autograd.grad(
            bag.eval()(torch.tensor([[1, 2]]), per_sample_weights=weights).sum(), [weights]
        )
        torch.testing.assert_close(gradient[0], bag.read_rows(torch.tensor([1, 2])).weights.sum(1))
        assert len(bag) == 0
