"""Missing ids in every kernel backend: the values that bags and sequences read for them, and their gradients."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from admission_cases import Expected
from lifecycle_cases import embedding, ids_of, random_ids, update
from tables import jagged
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, admission, optimizers

DIM = 4


def bag(backend: dict[str, Any], **settings: Any) -> EmbCacheEmbeddingBag:
    return EmbCacheEmbeddingBag(
        **{
            "name": "bag",
            "embedding_dim": DIM,
            "optimizer": optimizers.SGD(lr=0.5),
            "admission": admission.ReadOnly(),
            "not_admitted": 0.25,
            **backend,
            **settings,
        }
    )


@pytest.mark.slow
def test_ids_get_rows_when_a_dict_of_counts_says_so(backend):
    dice = random.Random(3)
    model = Expected(3, **backend)
    with embedding(admission=admission.Count(3), **backend) as table:
        for step in range(40):
            ids = random_ids(dice, 12)
            if step == 0:
                ids = list(range(100, 112))  # none of the first batch has a row, nor gets one
            out = table(torch.tensor(ids))
            update(out)
            torch.testing.assert_close(out.detach(), model.train(ids), msg=str(step))
        assert set(ids_of(table)) == model.rows
        stats = table.stats().admission
        assert (stats.pending, stats.admitted) == (len(model.counts), len(model.rows))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("training", [True, False])
def test_bags_sum_what_ids_without_a_row_read(backend, mode, training):
    rows = {1: [1.0] * DIM, 2: [2.0] * DIM}
    bags = [[1, 9, 9], [], [8], [2, 1], [7, 2]]
    with bag(backend, mode=mode) as table:
        table.import_rows(list(rows), np.array(list(rows.values()), np.float32))
        table.train(training)
        out = table(*jagged(bags))
        want = torch.zeros(len(bags), DIM)
        for place, ids in enumerate(bags):
            read = [torch.tensor(rows.get(row_id, [0.25] * DIM)) for row_id in ids]
            if read:
                want[place] = torch.stack(read).sum(0) / (len(read) if mode == "mean" else 1)
        torch.testing.assert_close(out.detach(), want)
        if training:
            out.sum().backward()
            share = {1: 1 + 1, 2: 1 + 1} if mode == "sum" else {1: 1 / 3 + 1 / 2, 2: 1 / 2 + 1 / 2}
            left = table.read_rows([1, 2]).weights
            torch.testing.assert_close(left, torch.tensor([[n - 0.5 * share[n]] * DIM for n in (1, 2)]))
            assert len(table) == 2


@pytest.mark.parametrize("training", [True, False])
def test_weights_of_missing_ids_scale_values_and_get_gradients(backend, training):
    bags, given = [[1, 9], [8, 1, 1], [9]], [0.5, 2.0, 3.0, 4.0, 1.0, -1.0]
    with bag(backend, mode="sum") as table:
        table.import_rows([1], np.ones((1, DIM), np.float32))
        table.train(training)
        ids, offsets = jagged(bags)
        weights = torch.tensor(given, requires_grad=True)
        out = table(ids, offsets, per_sample_weights=weights)
        torch.testing.assert_close(out.detach(), torch.tensor([[1.0] * DIM, [5.75] * DIM, [-0.25] * DIM]))
        (out * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
        torch.testing.assert_close(weights.grad, torch.tensor([4.0, 1.0, 2.0, 8.0, 8.0, 3.0]))
        left = 1 - 0.5 * (0.5 + 2 * 5.0) if training else 1.0
        torch.testing.assert_close(table.read_rows([1]).weights, torch.full((1, DIM), left))
        assert ids_of(table) == [1]


def test_batches_of_which_no_id_has_a_row_train_nothing(backend):
    with bag(backend, mode="sum") as table, embedding(admission=admission.ReadOnly(), **backend) as rows:
        for _ in range(3):
            out = table(torch.tensor([[5, 6], [6, 7]]))
            assert torch.equal(out, torch.full((2, DIM), 0.5))
            update(out)
            out = rows(torch.tensor([5, 6]))
            assert not out.any()
            update(out)
        assert len(table) == len(rows) == 0
        assert table.stats().step == rows.stats().step == 3


def test_initial_values_are_read_and_not_trained(backend):
    with embedding(admission=admission.ReadOnly(), not_admitted="initial", **backend) as table:
        want = table.read_rows([5, 6]).weights
        for _ in range(2):
            out = table(torch.tensor([5, 6]))
            assert torch.equal(out, want)
            update(out)
        assert len(table) == 0


def test_a_device_tier_of_few_rows_has_no_slot_for_ids_without_a_row():
    with embedding(admission=admission.Count(2), tiers=TierBudgets(host_bytes="1MiB", device_bytes="1KiB")) as table:
        many = torch.arange(10_000)
        assert not table(many).any()
        assert table.stats().overflow_plans == 0
