"""Triton's kernels give the bits of the core's kernels: on CUDA in `make test-cuda`, else in Triton's interpreter.

The core's kernels run on the CPU beside them.
"""

import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tables import EXTREME_IDS, OPTIMIZERS, Contents, make_bag, random_batches, ssd_tiers, train
from torchrec_embcache import EmbCacheEmbedding, EmbCacheWarning, TierBudgets, initializers, optimizers
from torchrec_embcache._lookup.group import LookupGroup
from torchrec_embcache.exceptions import ConfigError, UnsupportedError

TIERS = TierBudgets(host_bytes="16MiB", device_bytes="1MiB")
DEVICE = "cuda" if os.environ.get("EMBCACHE_TEST_CUDA") == "1" else "cpu"
DECAYED = {
    **OPTIMIZERS,
    "adam": optimizers.Adam(lr=0.1, weight_decay=0.03),
    "adagrad": optimizers.Adagrad(lr=0.1, weight_decay=0.03),
    "rowwise_adagrad": optimizers.RowWiseAdagrad(lr=0.1, weight_decay=0.03),
}


pytestmark = pytest.mark.usefixtures("one_thread_of_torch")


def on_each(run):
    """Returns the results of `run` with the native kernels and with Triton's."""
    results = []
    for kernels in ("core", "triton"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EMBCACHE_KERNELS", kernels)
            results.append(run())
    return results


def bits(tensor: torch.Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.detach().cpu().numpy().tobytes()


def device() -> str:
    """The device of the tables: the core's kernels run on the CPU."""
    return "cpu" if os.environ["EMBCACHE_KERNELS"] == "core" else DEVICE


class Tables:
    """Tables of some widths under one lookup. Features 0 and 1 are of the first table."""

    def __init__(self, widths, specs, **more) -> None:
        self.bags = [
            make_bag(
                name=f"t{number}", embedding_dim=dim, optimizer=spec, **{"tiers": TIERS, "device": device(), **more}
            )
            for number, (dim, spec) in enumerate(zip(widths, specs, strict=True))
        ]
        self.features = [0, 0, *range(1, len(widths))]
        self.group = LookupGroup(
            [bag.table for bag in self.bags],
            self.features,
            lambda: [group for bag in self.bags for group in bag._group.param_groups()],
        )
        self.anchor = torch.zeros(0, requires_grad=True)
        self.outs: list[bytes | None] = []

    def pooled(self, bags, mean, weights=None, *, train=True, scale=None) -> None:
        """One lookup of `bags`, those of feature after feature, with its backward."""
        ids = np.array([i for bag in bags for i in bag], np.int64)
        offsets = np.cumsum([0, *(len(bag) for bag in bags)])
        weights = weights[: len(ids)].to(device(), copy=True).requires_grad_() if weights is not None else None
        out = self.group.pooled(ids, offsets, mean, weights, train=train, anchor=self.anchor)
        self.outs.append(bits(out))
        if train:
            (
                out * (torch.linspace(-1, 2, out.numel()).view(out.shape) if scale is None else scale).to(out.device)
            ).sum().backward()
            self.outs.append(bits(weights.grad) if weights is not None else None)

    def sequence(self, ids, splits) -> None:
        """One lookup of `ids` without pooling, those of feature after feature, with its backward."""
        given = np.array(ids, np.int64), np.array(splits, np.int64)
        out = self.group.sequence(*given, train=True, anchor=self.anchor)
        self.outs.append(bits(out))
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.device)).sum().backward()

    def everything(self):
        """Every output, every gradient of weights, and every bit of every row."""
        result = self.outs, [Contents.of(bag) for bag in self.bags]
        for bag in self.bags:
            assert bag.stats().pinned_rows == 0
            bag.close()
        return result


def equal_on_each(run) -> None:
    expected, found = on_each(run)
    assert found == expected
    assert expected[0], "something was looked up"


IDS = [*EXTREME_IDS, *range(2, 12)]


def bags_of(count):
    bag = st.lists(st.sampled_from(IDS), max_size=6)
    return st.lists(bag, min_size=count, max_size=count)


@pytest.mark.slow
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(st.integers(0, 3).flatmap(lambda bags: bags_of(4 * bags)), min_size=1, max_size=2),
    mean=st.lists(st.booleans(), min_size=4, max_size=4),
    weighted=st.booleans(),
    widths=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    kinds=st.lists(st.sampled_from(sorted(DECAYED)), min_size=3, max_size=3),
)
def test_any_batches_of_several_tables_have_the_bits_of_the_core(batches, mean, weighted, widths, kinds):
    mean = [False] * 4 if weighted else mean
    weights = torch.linspace(-2, 1, 100) if weighted else None

    def run():
        tables = Tables(widths, [DECAYED[kind] for kind in kinds])
        for bags in batches:
            tables.pooled(bags, mean, weights)
        return tables.everything()

    equal_on_each(run)


@pytest.mark.slow
@pytest.mark.parametrize("count", [255, 256, 257, 600])
def test_an_id_with_hundreds_of_occurrences_has_the_bits_of_the_core(count):
    """Its gradients are summed by parts, whose sums are then summed."""

    def run():
        tables = Tables([5, 9, 5], [DECAYED["adam"], DECAYED["lamb"], DECAYED["adam"]])
        long = [3, 7, *[9] * count, 7]
        tables.pooled([[1, 9], long[:40], [9], long, long, long[30:], [], [4]], [False, True, False, True])
        return tables.everything()

    equal_on_each(run)


@pytest.mark.parametrize("at_once", [4, 16])
def test_many_rows_at_once_as_on_a_gpu_have_the_bits_of_the_core(at_once, monkeypatch):
    """The interpreter is given 2, because it takes as long for what is masked."""
    from torchrec_embcache._kernels.triton import launch

    monkeypatch.setattr(launch.ColumnLayout, "rows_in_flight", at_once)

    def run():
        tables = Tables([5, 9, 5], [DECAYED["adam"], DECAYED["lamb"], DECAYED["sgd"]])
        bags = [[1, 9, 1], [9] * 17, [], [9] * 16, [9] * 5, [2], [9] * 4, [4, 4, 4, 9]]
        tables.pooled(bags, [False] * 4, torch.linspace(-2, 1, 100))
        return tables.everything()

    equal_on_each(run)


def test_what_reads_nothing_has_no_part_in_the_gradient_of_its_weight():
    """Also where its bag's gradient is infinite."""
    from torchrec_embcache import admission

    def run():
        more = {"admission": admission.ReadOnly(), "not_admitted": "zeros"}
        tables = Tables([6, 6], [DECAYED["adagrad"]] * 2, **more)
        tables.pooled([[1, 2], [3], [4]], [False] * 3, torch.linspace(-2, 1, 100), scale=torch.full((1, 18), torch.inf))
        assert tables.outs[1] == np.zeros(4, np.float32).tobytes()
        return tables.everything()

    equal_on_each(run)


@pytest.mark.parametrize("by", ["host", "columns", "rows"])
def test_an_optimizer_that_the_kernels_do_not_have_is_refused(by, monkeypatch):
    from torchrec_embcache._kernels.triton import launch

    if by != "host":
        name = f"BY_{by.upper()}"
        monkeypatch.setattr(launch, name, (*getattr(launch, name), "radam"))
    weights, slot = torch.ones(1, 4), torch.zeros(1, 4)
    tiers = torch.tensor([weights.data_ptr(), slot.data_ptr(), slot.data_ptr(), slot.data_ptr()], device=DEVICE)
    one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rows = launch.DistinctRows(one, one, torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), one)
    gradients = launch.DeviceGradients(torch.ones(1, 4, device=DEVICE))
    # The compiler wraps what a static assertion of a kernel raises.
    error, words = (UnsupportedError, "'radam': give one of sgd") if by == "host" else (Exception, "of this kind")
    with pytest.raises(error, match=words):
        launch.update_rows("radam", 4, tiers, torch.zeros(9, device=DEVICE), rows, gradients, count=1)
    assert (weights.tolist(), slot.tolist()) == ([[1.0] * 4], [[0.0] * 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_are_float32_whatever_torchs_default_is(dtype):
    def run():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            tables = Tables([6, 6], [DECAYED["adam"]] * 2)
            tables.pooled([[1, 2], [3], [4]], [False] * 3, torch.linspace(-2, 1, 100, dtype=torch.float32))
            tables.pooled([[1, 2], [3], [4]], [True, False, True])
            return tables.everything()
        finally:
            torch.set_default_dtype(before)

    equal_on_each(run)


def test_a_forward_holds_off_whoever_would_grow_the_tier(monkeypatch):
    """Its kernels are given the addresses of tensors, which nobody may replace before they are launched."""
    from torchrec_embcache._device.tier import DeviceTier
    from torchrec_embcache._kernels.triton import launch

    monkeypatch.setenv("EMBCACHE_KERNELS", "triton")
    with make_bag(tiers=TierBudgets(host_bytes="1MiB", device_bytes="1KiB"), device=device()) as bag:
        train(bag, [[[1, 2]]])
        grown = threading.Event()
        real_pool, real_ensure = launch.pool_rows, DeviceTier.ensure_capacity
        growing = threading.Thread(target=lambda: bag.eval()(torch.arange(100, 160).view(-1, 1)))
        found: list[bool] = []

        def ensure(tier, slots):
            grown.set()
            real_ensure(tier, slots)

        def pool(*arguments):
            if not found:
                grown.clear()  # this lookup has placed its own rows
                found.append(True)
                growing.start()
                found[0] = grown.wait(timeout=0.3)
            real_pool(*arguments)

        monkeypatch.setattr(launch, "pool_rows", pool)
        monkeypatch.setattr(DeviceTier, "ensure_capacity", ensure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmbCacheWarning)
            bag(torch.tensor([[1, 2]]))
            growing.join()
        assert found == [False]
        assert grown.is_set()


# Some are narrower than 16 lanes, and some end amid them.
WIDTHS = [
    1,
    2,
    3,
    5,
    8,
    13,
    15,
    16,
    17,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    255,
    256,
    300,
    511,
    512,
    777,
    1023,
    1024,
]
# These are wider than the widest block.
WIDER = [1025, 2100]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "dim"), list(enumerate(WIDTHS)))
def test_every_width_has_the_bits_of_the_core(number, dim):
    kinds = sorted(DECAYED)
    by_row = ["rowwise_adagrad", "partial_rowwise_adam", "lamb"]
    chosen = [kinds[number % len(kinds)], by_row[number % len(by_row)]]
    bags = [[1, 2, 1], [], [3], [2, 2], [4, 1], [1], [5, 6], [1, 1, 1, 7]]

    def run():
        tables = Tables([dim, dim], [DECAYED[kind] for kind in chosen])
        tables.pooled(bags[:6], [False] * 3, torch.linspace(-2, 1, 100))
        tables.pooled(bags[2:], [False, True, True])
        return tables.everything()

    equal_on_each(run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(DECAYED))
@pytest.mark.parametrize("dim", [1, 3, 16, 33, 64, 128, 300, *WIDER])
def test_optimizers_match_the_core_bit_for_bit_at_all_widths(kind, dim):
    def run():
        tables = Tables([dim], [DECAYED[kind]])
        tables.pooled([[1, 2, 1], [3]], [False] * 2, torch.linspace(-2, 1, 100))
        tables.pooled([[1], [3, 1]], [False, True])
        return tables.everything()

    equal_on_each(run)


@pytest.mark.parametrize("kind", sorted(DECAYED))
def test_many_steps_and_a_frequent_id_have_the_bits_of_the_core(kind):
    def run():
        tables = Tables([20], [DECAYED[kind]])
        for step in range(6):
            tables.pooled([[step, 9, *[7] * 30], [7, step]], [False, step % 2 == 1])
        return tables.everything()

    equal_on_each(run)


@pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered"
)  # of numpy, by which the interpreter computes
def test_gradients_at_the_edges_of_float32_have_the_bits_of_the_core():
    """Numbers below the normal ones are kept, zeros keep their signs, and what is past the range is infinite, in both."""
    edges = torch.tensor([0.0, -0.0, 1e-45, -1e-42, 1.2e-38, 3e38, -3e38, 1.0, -1.0, 1e-20, 1e20, 0.5])

    def run():
        tables = Tables([12, 12], [optimizers.SGD(lr=1e-3), optimizers.RowWiseAdagrad(lr=0.1)])
        scale = torch.stack([edges, edges.roll(1), edges.roll(2)], 1).reshape(1, 36)
        tables.pooled([[1], [2], [1]], [False] * 3, scale=scale)
        tables.pooled([[1, 1], [2], [1, 3]], [False] * 3, scale=scale)
        return tables.everything()

    equal_on_each(run)


def test_evaluations_of_ids_without_rows_have_the_bits_of_the_core():
    for missing in ("initial", "zeros"):

        def run(missing=missing):
            tables = Tables([6, 6], [optimizers.SGD(lr=0.1)] * 2, missing=missing)
            tables.pooled([[1, 2], [3], [4]], [False] * 3)
            tables.pooled([[1, 50], [51], [52, 4, 53]], [True, False, True], train=False)
            return tables.everything()

        equal_on_each(run)


@pytest.mark.parametrize(("number", "dim"), list(enumerate([*WIDTHS, *WIDER])))
def test_sequences_of_every_width_have_the_bits_of_the_core(number, dim):
    kinds = sorted(DECAYED)
    chosen = [kinds[number % len(kinds)], kinds[(number + 3) % len(kinds)]]

    def run():
        tables = Tables([dim, dim], [DECAYED[kind] for kind in chosen])
        for ids, splits in (([1, 2, 1, 5, 1, 5, 5], [0, 2, 4, 7]), ([3], [0, 0, 1, 1]), ([], [0, 0, 0, 0])):
            tables.sequence(ids, splits)
        return tables.everything()

    equal_on_each(run)


@pytest.mark.parametrize("kind", sorted(DECAYED))
def test_sequences_with_a_frequent_id_have_the_bits_of_the_core(kind):
    """Its gradients are summed by parts."""

    def run():
        tables = Tables([33], [DECAYED[kind]])
        tables.sequence([1, 2, 1, 5, *[9] * 260], [0, 2, 264])
        return tables.everything()

    equal_on_each(run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_rows_that_move_between_all_tiers_have_the_bits_of_the_core(kind, tmp_path):
    batches = random_batches(8, 5, 60, seed=3)

    def run():
        directory = tmp_path / os.environ["EMBCACHE_KERNELS"]
        tiers = ssd_tiers(directory, host_bytes="2KiB", device_bytes="3KiB")
        with make_bag(tiers=tiers, optimizer=OPTIMIZERS[kind], embedding_dim=5, device=device()) as bag:
            outs = [bits(out) for out in train(bag, batches, 2)]
            assert bag.stats().kernels == os.environ["EMBCACHE_KERNELS"]
            assert bag.stats().device.evictions > 10
            return outs, Contents.of(bag)

    equal_on_each(run)


@pytest.mark.slow
def test_a_row_that_refused_ids_share_has_the_bits_of_the_core():
    from torchrec_embcache import admission

    def run():
        table = EmbCacheEmbedding(
            name="item",
            embedding_dim=6,
            tiers=TIERS,
            device=device(),
            optimizer=DECAYED["rowwise_adagrad"],
            initializer=initializers.Uniform(-0.5, 0.5),
            admission=admission.Count(310),
            not_admitted="oov",
        )
        outs = []
        with table:
            for step in range(5):
                # One id is so frequent that its gradients are summed by parts. It gets a row in the second step.
                out = table(torch.tensor([1, 2, 1, 3 + step, 9, *[9] * 300, 3 + step]))
                outs.append(bits(out))
                (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.device)).sum().backward()
            return outs, (table.table.oov_row().tobytes(), Contents.of(table))

    equal_on_each(run)


# ---- which kernels run


@pytest.mark.slow
def test_triton_is_refused_on_the_cpu_outside_of_its_interpreter():
    program = """
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
from torchrec_embcache.exceptions import ConfigError, UnsupportedError
tiers = TierBudgets(host_bytes="1MiB", device_bytes="64KiB")
try:
    EmbCacheEmbeddingBag(name="a", embedding_dim=4, tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
except ConfigError as error:
    assert "TRITON_INTERPRET=1" in str(error)
    print("refused")
"""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**without, "EMBCACHE_KERNELS": "triton"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "refused\n", done.stderr


def test_without_triton_its_kernels_are_refused_and_torchs_serve(monkeypatch):
    from torchrec_embcache._kernels import select

    monkeypatch.setattr(select, "find_spec", lambda _name: None)
    assert select._default_kernels(torch.device("cuda")) == "torch"
    assert select._default_kernels(torch.device("cpu")) == "core"
    monkeypatch.setenv("EMBCACHE_KERNELS", "triton")
    with pytest.raises(ConfigError, match="triton, which is not installed"):
        make_bag(tiers=TIERS)


def test_with_triton_it_is_what_runs_on_cuda():
    from torchrec_embcache._kernels import select

    assert select._default_kernels(torch.device("cuda")) == "triton"
    assert select._default_kernels(torch.device("cpu")) == "core"
