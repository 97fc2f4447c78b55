"""LookupGroup: several tables and features at once, compared with torch's own ops on dense copies of the tables."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import embedding_bag

from torchrec_embcache import CacheTable, TierBudgets, initializers, optimizers
from torchrec_embcache._lookup.group import LookupGroup
from torchrec_embcache.exceptions import InputError, StateError, UnsupportedError

ROWS = 12
# Features 0 and 1 share a table.
FEATURE_TABLES = [0, 0, 1]


def make_tables(dims, specs, backend):
    return [
        CacheTable(
            name=f"t{place}",
            dim=dim,
            tiers=backend["tiers"],
            initializer=initializers.Uniform(-0.5, 0.5),
            optimizer=spec,
            seed=3,
        )
        for place, (dim, spec) in enumerate(zip(dims, specs, strict=True))
    ]


def dense(tables):
    """The first rows of every table as torch parameters."""
    return [torch.nn.Parameter(table.read_rows(torch.arange(ROWS)).weights) for table in tables]


# Gradients of one row may cancel to almost nothing, which two orders of summation round differently. Adagrad divides a gradient by
# its own size at the first step: `eps` keeps that difference small.
SPECS = [optimizers.SGD(lr=0.5), optimizers.Adagrad(lr=0.5, eps=0.1)]
anchor = torch.zeros(0, requires_grad=True)


def features_of(bags):
    """Three features of `bags` bags each."""
    bag = st.lists(st.integers(0, ROWS - 1), max_size=3)
    return st.lists(st.lists(bag, min_size=bags, max_size=bags), min_size=3, max_size=3)


@pytest.mark.slow
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    features=st.integers(0, 3).flatmap(features_of),
    mean=st.lists(st.booleans(), min_size=3, max_size=3),
    weighted=st.booleans(),
)
def test_features_of_several_tables_pool_and_train_as_in_torch(features, mean, weighted, backend):
    mean = [False] * 3 if weighted else mean
    tables = make_tables([4, 8], SPECS, backend)
    groups = [spec.param_group() for spec in SPECS]
    group = LookupGroup(list(tables), FEATURE_TABLES, lambda: groups)
    parameters = dense(tables)
    bags = [bag for feature in features for bag in feature]
    ids = np.array([i for bag in bags for i in bag], np.int64)
    offsets = np.cumsum([0, *(len(bag) for bag in bags)])
    weights = torch.linspace(-1, 2, len(ids)).requires_grad_() if weighted else None

    out = group.pooled(ids, offsets, mean, weights, train=True, anchor=anchor)
    count = len(features[0])
    expected = []
    for feature, table in enumerate(FEATURE_TABLES):
        begin, end = offsets[feature * count], offsets[(feature + 1) * count]
        part = embedding_bag(
            torch.from_numpy(ids[begin:end]),
            parameters[table],
            torch.from_numpy(offsets[feature * count : (feature + 1) * count + 1] - begin),
            mode="mean" if mean[feature] else "sum",
            per_sample_weights=weights[begin:end] if weighted else None,
            include_last_offset=True,
        )
        expected.append(part)
    reference = torch.cat(expected, 1)
    assert out.shape == reference.shape == (count, 16)
    torch.testing.assert_close(out, reference)

    scale = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out * scale).sum().backward()
    got = weights.grad if weighted else None
    if weighted:
        weights.grad = None
    (reference * scale).sum().backward()
    if weighted and len(ids):
        torch.testing.assert_close(got, weights.grad)
    for parameter, spec in zip(parameters, SPECS, strict=True):
        torchs = (
            torch.optim.SGD([parameter], lr=spec.lr)
            if spec.kind == "sgd"
            else torch.optim.Adagrad([parameter], lr=spec.lr, eps=spec.eps)
        )
        torchs.step()
    for table, parameter in zip(tables, dense(tables), strict=True):
        torch.testing.assert_close(parameter, parameters[tables.index(table)])
        assert table.stats().step == 1
        assert table.stats().pinned_rows == 0
    seen = [
        sorted({i for f, t in enumerate(FEATURE_TABLES) if t == place for bag in features[f] for i in bag})
        for place in (0, 1)
    ]
    assert [len(table) for table in tables] == [len(ids) for ids in seen]


def test_sequences_of_several_tables_are_in_order_and_train(backend):
    tables = make_tables([4, 4], SPECS, backend)
    groups = [spec.param_group() for spec in SPECS]
    group = LookupGroup(list(tables), FEATURE_TABLES, lambda: groups)
    parameters = dense(tables)
    ids, splits = np.array([1, 2, 1, 5, 1, 5, 5], np.int64), np.array([0, 2, 4, 7], np.int64)
    out = group.sequence(ids, splits, train=True, anchor=anchor)
    reference = torch.cat([parameters[0][ids[:4]], parameters[1][ids[4:]]])
    assert torch.equal(out, reference)
    scale = torch.linspace(-1, 1, out.numel()).view_as(out)
    for result in (out, reference):
        (result * scale).sum().backward()
    torch.optim.SGD([parameters[0]], lr=0.5).step()
    torch.optim.Adagrad([parameters[1]], lr=0.5, eps=0.1).step()
    for got, expected in zip(dense(tables), parameters, strict=True):
        torch.testing.assert_close(got, expected)
    assert [len(table) for table in tables] == [3, 2]
    assert group.sequence(ids[:0], np.zeros(4, np.int64), train=True, anchor=anchor).shape == (0, 4)


def test_a_table_without_ids_in_the_batch_counts_the_step_too(backend):
    tables = make_tables([4, 4], SPECS, backend)
    group = LookupGroup(list(tables), FEATURE_TABLES, lambda: [spec.param_group() for spec in SPECS])
    group.sequence(np.array([1]), np.array([0, 1, 1, 1]), train=True, anchor=anchor).sum().backward()
    assert [(table.stats().step, len(table)) for table in tables] == [(1, 1), (1, 0)]


def test_training_without_an_optimizer_is_refused_naming_both_ways():
    tables = make_tables([4], [None], {"tiers": TierBudgets(host_bytes="1MiB")})
    group = LookupGroup(list(tables), [0], list)
    out = group.sequence(np.array([1]), np.array([0, 1]), train=True, anchor=anchor)
    with pytest.raises(StateError, match="apply_optimizer_in_backward.*fused_params"):
        out.sum().backward()
    del out
    assert tables[0].stats().pinned_rows == 0
    assert group.sequence(np.array([1]), np.array([0, 1]), train=False, anchor=anchor).shape == (1, 4)


def test_malformed_offsets_and_averages_of_weighted_bags_are_refused():
    tables = make_tables([4, 8], SPECS, {"tiers": TierBudgets(host_bytes="1MiB")})
    group = LookupGroup(list(tables), FEATURE_TABLES, lambda: [spec.param_group() for spec in SPECS])
    ids = np.array([1, 2], np.int64)
    for offsets, words in [
        ([], "offsets has 0 entries"),
        ([0, 1, 2], r"offsets has 3 entries: give bags \* 3 \+ 1"),
        ([0, 1, 1, 1], "ends where the ids end"),
        ([0, 2, 1, 2], r"offsets\[2\]=1 is below"),
    ]:
        with pytest.raises(InputError, match=words):
            group.pooled(ids, np.array(offsets, np.int64), [False] * 3, train=True, anchor=anchor)
    with pytest.raises(UnsupportedError, match="mean"):
        group.pooled(ids, np.array([0, 1, 1, 2]), [False, True, False], torch.ones(2), train=True, anchor=anchor)
    assert [table.stats().pinned_rows for table in tables] == [0, 0]


def test_hyperparameter_error_leaves_the_backward_retryable():
    tables = make_tables([4], SPECS[:1], {"tiers": TierBudgets(host_bytes="1MiB")})
    groups = [{"lr": -1.0}]
    group = LookupGroup(list(tables), [0], lambda: groups)
    out = group.sequence(np.array([1]), np.array([0, 1]), train=True, anchor=anchor)
    with pytest.raises(ValueError, match="lr=-1.0"):
        out.sum().backward(retain_graph=True)
    assert len(tables[0]) == 0
    groups[0]["lr"] = 1.0
    out.sum().backward()
    assert len(tables[0]) == 1
