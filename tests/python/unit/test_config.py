"""Budgets, names, buckets, initializers and optimizers: rejected values, and the words of the errors."""

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_embcache import TierBudgets, exceptions, initializers, optimizers
from torchrec_embcache.config import bucket_range, parse_bytes
from torchrec_embcache.exceptions import ConfigError, EmbCacheError, UnsupportedError
from torchrec_embcache.optimizers import FusedOptimizer, native_hyperparameters


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("8GiB", 8 << 30),
        ("64MiB", 64 << 20),
        ("512KiB", 512 << 10),
        ("1.5 GiB", 3 << 29),
        ("77", 77),
        ("3B", 3),
    ],
)
def test_a_size_is_an_int_or_a_number_with_a_binary_unit(value, size):
    assert parse_bytes("host_bytes", value) == size


@pytest.mark.parametrize("value", [-1, 1 << 63, "8GB", "GiB", "", "-1KiB", True, 1.5, None, "9999999TiB"])
def test_other_sizes_are_refused_naming_field_and_value(value):
    with pytest.raises(ConfigError, match="TierBudgets.ssd_bytes=") as caught:
        TierBudgets(host_bytes="1MiB", ssd_bytes=value)
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_budgets_are_in_bytes_and_ssd_needs_a_directory(tmp_path):
    budgets = TierBudgets(device_bytes="1KiB", host_bytes="2KiB", ssd_bytes="4KiB", ssd_dir=tmp_path)
    assert (budgets.device, budgets.host, budgets.ssd) == (1024, 2048, 4096)
    assert TierBudgets(host_bytes="2KiB").ssd == 0
    assert TierBudgets(host_bytes="2KiB", ssd_bytes=0).ssd == 0


@pytest.mark.parametrize("half", [{"ssd_bytes": "4KiB"}, {"ssd_dir": "x"}, {"ssd_dir": Path("x"), "ssd_bytes": 0}])
def test_half_an_ssd_tier_is_refused_naming_both_fields(half):
    with pytest.raises(ConfigError, match=r"ssd_bytes=.*ssd_dir|ssd_dir=.*ssd_bytes"):
        TierBudgets(host_bytes="2KiB", **half)


@pytest.mark.parametrize(
    ("given", "interval"), [(1, 1), (500, 500), ("30s", 30.0), ("10min", 600.0), ("1.5 h", 5400.0), ("1d", 86_400.0)]
)
def test_an_interval_is_steps_or_a_duration(given, interval):
    budgets = TierBudgets(host_bytes="2KiB", ssd_bytes="4KiB", ssd_dir="x", flush_every=given)
    assert budgets.flush_interval == interval
    assert type(budgets.flush_interval) is type(interval)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "10", "0s", "-1min", "10 minutes", "10 m", "min", "", b"1s"])
def test_what_is_no_interval_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"TierBudgets\.flush_every=.*10min") as caught:
        TierBudgets(host_bytes="2KiB", ssd_bytes="4KiB", ssd_dir="x", flush_every=wrong)
    assert repr(wrong) in str(caught.value)


def test_an_interval_needs_an_ssd_tier():
    with pytest.raises(ConfigError, match=r"flush_every=10.*ssd_dir"):
        TierBudgets(host_bytes="2KiB", flush_every=10)


@pytest.mark.parametrize(
    ("field", "value"),
    [("host_bytes", 0), ("reopen", "yes"), ("ssd_dir", 3), ("ssd_dir", ""), ("ssd_dir", "a\0b"), ("ssd_dir", b"x")],
)
def test_other_budget_fields_are_checked(field, value):
    with pytest.raises(ConfigError, match=f"TierBudgets.{field}="):
        TierBudgets(**{"host_bytes": 1024, field: value})


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_buckets_split_into_ranges_with_the_first_larger(world):
    ranges = [bucket_range(rank, world, 4093) for rank in range(world)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 4093
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("make", "native"),
    [
        (lambda: initializers.Constant(2), "Constant { value: 2.0 }"),
        (lambda: initializers.Uniform(-1, 1), "Uniform { low: -1.0, high: 1.0 }"),
        (lambda: initializers.Normal(), "Normal { mean: 0.0, std: 1.0 }"),
        (lambda: initializers.TruncatedNormal(0.5, 0.25), "TruncatedNormal { mean: 0.5, std: 0.25 }"),
        (lambda: initializers.Linear(0.5, 3), "Linear { low: 0.5, high: 3.0 }"),
    ],
)
def test_initializers_render_for_the_core(make, native):
    assert repr(make().native()) == native


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: initializers.Uniform(1, -1), "Uniform.low=1.0"),
        (lambda: initializers.Normal(0, -1), "Normal.std=-1.0"),
        (lambda: initializers.TruncatedNormal(0, -1), "TruncatedNormal.std"),
        (lambda: initializers.Constant(float("nan")), "Constant.value=nan"),
        (lambda: initializers.Constant(1e39), "finite float32"),
        (lambda: initializers.Linear("1", 0), "Linear.low='1'"),
        (lambda: optimizers.SGD(lr=-1), "SGD.lr=-1"),
        (lambda: optimizers.Adam(betas=(0.9, 1.0)), r"Adam.betas\[1\]=1.0"),
        (lambda: optimizers.Adam(betas=0.9), "Adam.betas=0.9"),
        (lambda: optimizers.Adagrad(eps=float("inf")), "Adagrad.eps=inf"),
        (lambda: optimizers.AdamW(weight_decay=None), "AdamW.weight_decay=None"),
        (lambda: optimizers.PartialRowWiseAdam(betas=(-0.1, 0.9)), r"PartialRowWiseAdam.betas\[0\]=-0.1"),
        (lambda: optimizers.LAMB(eps=-1e-8), "LAMB.eps=-1e-08"),
        (lambda: optimizers.FTRL(lr=0), "FTRL.lr=0 .*above 0"),
        (lambda: optimizers.FTRL(beta=-1.0), "FTRL.beta=-1.0"),
        (lambda: optimizers.FTRL(l1="1"), "FTRL.l1='1'"),
        (lambda: optimizers.FTRL(l2=float("nan")), "FTRL.l2=nan"),
    ],
)
def test_numbers_out_of_range_are_refused_naming_the_field(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("spec", "reference"),
    [
        (optimizers.SGD, torch.optim.SGD),
        (optimizers.Adagrad, torch.optim.Adagrad),
        (optimizers.Adam, torch.optim.Adam),
        (optimizers.AdamW, torch.optim.AdamW),
    ],
)
def test_hyperparameters_default_to_those_of_torch(spec, reference):
    defaults = reference([torch.nn.Parameter(torch.zeros(1))]).defaults
    group = spec().param_group()
    assert group == {name: defaults[name] for name in group}


def test_a_scheduler_changes_what_the_next_backward_reads(recwarn):
    spec = optimizers.Adam(lr=0.5, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.25)
    optimizer = FusedOptimizer([torch.nn.Parameter(torch.empty(0, 2))], [spec])
    np.testing.assert_array_equal(
        native_hyperparameters(optimizer.param_groups), [[0.5, 1e-3, 0.5, 0.75, 0.25, 0, 0, 0]]
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scheduler.step()
    assert native_hyperparameters(optimizer.param_groups)[0, 0] == 0.25
    assert not recwarn.list
    optimizer.param_groups[0]["lr"] = -1
    with pytest.raises(ConfigError, match=r"param_groups\[0\].lr=-1"):
        native_hyperparameters(optimizer.param_groups)
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: 0.0)
    ftrl = FusedOptimizer([torch.nn.Parameter(torch.empty(0, 2))], [optimizers.FTRL(lr=0.5, beta=2.0, l1=3.0, l2=4.0)])
    np.testing.assert_array_equal(native_hyperparameters(ftrl.param_groups), [[0.5, 0, 0, 0, 0, 2, 3, 4]])
    ftrl.param_groups[0]["lr"] = 0.0  # as a schedule that warms up from 0 has it
    with pytest.raises(ConfigError, match=r"param_groups\[0\].lr=0.0 .*above 0"):
        native_hyperparameters(ftrl.param_groups)


@pytest.mark.parametrize("name", [name for name in exceptions.__all__ if name.endswith("Error")])
def test_errors_travel_between_processes_with_errno_and_file(name):
    error = getattr(exceptions, name)("what to do")
    assert isinstance(error, EmbCacheError)
    assert (error.errno, error.filename) == (None, None)
    error.errno, error.filename = 28, "/disk"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.errno, copy.filename) == (type(error), "what to do", 28, "/disk")
