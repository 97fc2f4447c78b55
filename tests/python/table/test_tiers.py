"""Results are bitwise the same for all budgets, policies, lookaheads and numbers of threads."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tables import (
    AMPLE,
    OPTIMIZERS,
    Contents,
    bags_strategy,
    jagged,
    make_bag,
    random_batches,
    ssd_tiers,
    step,
    train,
)
from torchrec_embcache import EmbCacheWarning, TierBudgets
from torchrec_embcache._lookup.prefetch import MAX_PREFETCHED
from torchrec_embcache.exceptions import DeviceMemoryError

POLICIES = ["lru", "lfu", "s3fifo"]
BATCHES = random_batches(24, 6, 160, seed=1)
# Host and device budgets, from the working set of one batch (about 15 rows) up to every row.
BUDGETS = {
    "host": {"host_bytes": "1MiB"},
    "ssd_batch": {"host_bytes": "3KiB", "ssd_bytes": "64MiB"},
    "ssd_half": {"host_bytes": "8KiB", "ssd_bytes": "64MiB"},
    "ssd_all": {"host_bytes": "1MiB", "ssd_bytes": "64MiB"},
    "device_batch": {"host_bytes": "1MiB", "device_bytes": "3KiB"},
    "device_all": {"host_bytes": "1MiB", "device_bytes": "1MiB"},
    "three_batch": {"host_bytes": "2KiB", "device_bytes": "3KiB", "ssd_bytes": "64MiB"},
    "three_half": {"host_bytes": "2KiB", "device_bytes": "5KiB", "ssd_bytes": "64MiB"},
}


def budgets(name, directory):
    sizes = BUDGETS[name]
    return ssd_tiers(directory, **sizes) if "ssd_bytes" in sizes else TierBudgets(**sizes)


def trained(batches, lookahead=0, **settings):
    """The outputs and the final contents of a run, at whose end nothing is pinned."""
    with make_bag(**settings) as bag:
        outs = [out.numpy().tobytes() for out in train(bag, batches, lookahead)]
        assert bag.stats().pinned_rows == 0
        return outs, Contents.of(bag)


@pytest.fixture(scope="module")
def reference():
    return trained(BATCHES)


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_of_the_tests_move_rows_between_their_tiers(name, tmp_path):
    with make_bag(tiers=budgets(name, tmp_path / "d"), policy="lru") as bag:
        train(bag, BATCHES, 4)
        stats = bag.stats()
        small = name.endswith(("_batch", "_half"))
        if stats.device is not None:
            assert (stats.device.evictions > 50) == small
        if stats.ssd is not None:
            assert (stats.host.evictions > 20) == small
            assert (stats.ssd.hits > 0) == small


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_bits_are_independent_of_budget_policy_lookahead_threads(name, policy, reference, tmp_path, monkeypatch):
    for lookahead, threads in itertools.product(range(9), (1, 2)):
        monkeypatch.setenv("EMBCACHE_THREADS", str(threads))
        tiers = budgets(name, tmp_path / f"{lookahead}-{threads}")
        assert trained(BATCHES, lookahead, tiers=tiers, policy=policy) == reference


def test_no_memory_for_rows_leaving_the_device_changes_nothing(monkeypatch):
    def refuse(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with make_bag(tiers=TierBudgets(host_bytes="1MiB", device_bytes="1KiB")) as bag:
        train(bag, [[[1, 2, 3, 4]], [[5, 6, 7, 8]]])
        before = Contents.of(bag)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", refuse)
            with pytest.raises(
                DeviceMemoryError, match="cpu has no memory for .* rows that leave it.*can't allocate memory"
            ):
                train(bag, [[list(range(20, 30))]])
        assert Contents.of(bag) == before
        train(bag, [[list(range(20, 30))]])
        assert len(bag) == 18


@pytest.mark.parametrize(
    ("said", "is_memory"),
    [("CUDA out of memory. Tried to allocate 1.00 TiB", True), ("no kernel image is available", False)],
)
def test_a_device_tier_that_cannot_be_made_says_why(monkeypatch, said, is_memory):
    def refuse(*_, **__):
        raise RuntimeError(said)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        with pytest.raises(RuntimeError, match=said) as raised:
            make_bag(tiers=TierBudgets(host_bytes="1MiB", device_bytes="1KiB"))
    assert isinstance(raised.value, DeviceMemoryError) == is_memory
    assert ("device_bytes=1024 of table 'item' cannot be allocated on cpu" in str(raised.value)) == is_memory


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_slots_travel_with_their_rows_for_every_optimizer(kind, tmp_path):
    expected = trained(BATCHES, optimizer=OPTIMIZERS[kind])
    for name in BUDGETS:
        tiers = budgets(name, tmp_path / name)
        assert trained(BATCHES, 2, optimizer=OPTIMIZERS[kind], tiers=tiers) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(bags_strategy(), min_size=1, max_size=10),
    name=st.sampled_from(sorted(BUDGETS)),
    policy=st.sampled_from(POLICIES),
    lookahead=st.integers(0, 8),
    mode=st.sampled_from(["sum", "mean"]),
    kind=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_any_batches_give_the_bits_of_one_table_in_memory(
    batches, name, policy, lookahead, mode, kind, tmp_path_factory
):
    shared = {"mode": mode, "optimizer": OPTIMIZERS[kind]}
    tiers = budgets(name, tmp_path_factory.mktemp("ssd") / "d")
    assert trained(batches, lookahead, tiers=tiers, policy=policy, **shared) == trained(batches, **shared)


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_torch_kernels_agree_with_the_core_and_with_themselves(kind, mode, monkeypatch, tmp_path):
    shared = {"mode": mode, "optimizer": OPTIMIZERS[kind]}
    ids = torch.tensor(sorted({i for bags in BATCHES for ids in bags for i in ids}))
    with make_bag(**shared) as core:
        train(core, BATCHES)
        expected = core.read_rows(ids)
    monkeypatch.setenv("EMBCACHE_KERNELS", "torch")
    runs = []
    for name in ("device_all", "device_batch", "three_half"):
        with make_bag(tiers=budgets(name, tmp_path / name), **shared) as bag:
            train(bag, BATCHES, lookahead=2)
            got = bag.read_rows(ids)
            runs.append(Contents.of(bag))
        assert torch.equal(got.found, expected.found)
        assert torch.equal(got.metadata.count, expected.metadata.count)
        torch.testing.assert_close(got.weights, expected.weights, rtol=1e-4, atol=1e-5)
        for slot, values in got.slots.items():
            torch.testing.assert_close(values, expected.slots[slot], rtol=1e-4, atol=1e-5)
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("name", ["host_ssd", "device"])
def test_working_set_beyond_budget_warns_with_the_same_bits(name, tmp_path):
    wide = [[list(range(place, 100 + place))] for place in range(5)]
    if name == "device":
        tiers, words = (
            TierBudgets(host_bytes="1MiB", device_bytes="1KiB"),
            r"TierBudgets.device_bytes.*set it to \d+ or more",
        )
    else:
        tiers, words = ssd_tiers(tmp_path / "ssd", host_bytes="2KiB"), r"TierBudgets.host_bytes.*set it to \d+ or more"
    expected = trained(wide)
    with make_bag(tiers=tiers) as bag:
        with pytest.warns(EmbCacheWarning, match=f"table 'item'.*{words}"):
            first = step(bag, wide[0])
        outs = [first, *(step(bag, bags) for bags in wide[1:])]  # it warned once; warnings are errors here
        assert bag.stats().overflow_plans >= 1
        assert ([out.numpy().tobytes() for out in outs], Contents.of(bag)) == expected


def test_the_size_that_the_warning_names_is_enough(tmp_path):
    wide = [list(range(100))]
    for place, field in enumerate(("host_bytes", "device_bytes")):
        sizes = {"host_bytes": "2KiB"} if field == "host_bytes" else {"host_bytes": "64KiB", "device_bytes": "2KiB"}
        with make_bag(tiers=ssd_tiers(tmp_path / f"{place}a", **sizes)) as bag:
            with pytest.warns(EmbCacheWarning, match="set it to") as caught:
                step(bag, wide)
            size = int(str(caught[0].message).split("set it to ")[1].split()[0])
        with make_bag(tiers=ssd_tiers(tmp_path / f"{place}b", **{**sizes, field: size})) as bag:
            step(bag, wide)
            step(bag, wide)


def test_a_prefetched_batch_of_other_ids_is_dropped_with_a_warning():
    with make_bag() as bag:
        bag.prefetch(*jagged([[1, 2]]))
        bag.prefetch(*jagged([[3]]))
        bag.prefetch(*jagged([[4]]))
        with pytest.warns(EmbCacheWarning, match="1 prefetched batch"):
            step(bag, [[9]])
        with pytest.warns(EmbCacheWarning, match="1 prefetched batch"):
            step(bag, [[4]])
        assert bag.stats().pinned_rows == 0
        assert sorted(Contents.of(bag).rows) == [4, 9]


def test_evaluation_between_leaves_prefetched_training_batches_alone():
    with make_bag() as bag:
        bag.prefetch(*jagged([[1, 2]]))
        with torch.no_grad():
            bag(*jagged([[5]]))
        bag.eval()
        bag.prefetch(*jagged([[6]]))
        bag(*jagged([[6]]))
        bag.train()
        step(bag, [[1, 2]])
        assert bag.stats().pinned_rows == 0
        assert len(bag) == 2


@pytest.mark.parametrize("trained", [True, False])
def test_batch_read_in_another_mode_than_prefetched_is_released(trained, recwarn):
    with make_bag() as bag:
        step(bag, [list(range(200))])
        for first in range(100):
            ids = jagged([[first, first + 1]])
            bag.train(trained)
            bag.prefetch(*ids)
            bag.train(not trained)
            bag(*ids)
        assert bag.stats().pinned_rows == 0
        assert bag.remove_rows(list(range(200))) == 200
        assert len(bag._group.prefetch_queue._batches) <= MAX_PREFETCHED
        bag.train()
        bag(*jagged([[1]])).sum().backward()
    assert not recwarn.list


def test_unused_evaluation_prefetch_is_dropped_with_a_warning():
    with make_bag() as bag:
        bag.eval()
        bag.prefetch(*jagged([[1, 2]]))
        bag.train()
        for _ in range(MAX_PREFETCHED):
            step(bag, [[1]])
        assert bag.stats().pinned_rows == 2
        with pytest.warns(EmbCacheWarning, match="1 prefetched batch"):
            step(bag, [[1]])
        assert bag.remove_rows([1]) == 1


@pytest.mark.parametrize("trained", [True, False])
def test_more_prefetched_batches_than_come_are_dropped_with_a_warning(trained):
    with make_bag() as bag:
        step(bag, [list(range(100))])
        bag.train(trained)
        for first in range(MAX_PREFETCHED):
            bag.prefetch(*jagged([[first]]))
        for first in range(MAX_PREFETCHED, 90):
            with pytest.warns(EmbCacheWarning, match="1 prefetched batch"):
                bag.prefetch(*jagged([[first]]))
            assert bag.stats().pinned_rows == MAX_PREFETCHED
        bag(*jagged([[90 - MAX_PREFETCHED]])).sum()


def test_a_training_batch_that_was_evaluated_too_keeps_those_behind_it(recwarn):
    with make_bag() as bag:
        batches = [jagged([[number, number + 1]]) for number in range(4)]
        for ids in batches:
            bag.prefetch(*ids)
        bag.eval()
        bag(*batches[0])
        bag.train()
        for left, ids in zip([3, 2, 1, 0], batches, strict=True):
            bag(*ids).sum().backward()
            assert len(bag._group.prefetch_queue._batches) == left
    assert not recwarn.list


def test_changed_ids_are_not_taken_for_the_prefetched_ones():
    with make_bag() as bag:
        ids = torch.tensor([[1, 2]])
        bag.prefetch(ids)
        ids[0, 0] = 7
        with pytest.warns(EmbCacheWarning, match="prefetched"):
            bag(ids).sum().backward()
        assert sorted(Contents.of(bag).rows) == [2, 7]


def test_prefetching_past_the_budget_fetches_less_and_changes_nothing(tmp_path):
    batches = [[list(range(20 * place, 20 * place + 20))] for place in range(8)] * 2
    expected = trained(batches)
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="6KiB")) as bag:
        complete = [bag.prefetch(*jagged(bags)) for bags in batches]
        assert complete[0]
        assert not complete[-1]
        assert bag.stats().host.bytes - bag.stats().ssd.index_bytes <= 6 * 1024
        outs = [step(bag, bags).numpy().tobytes() for bags in batches]
        assert bag.stats().pinned_rows == 0
        assert (outs, Contents.of(bag)) == expected


@pytest.mark.parametrize("drop", ["close", "forget"])
def test_prefetched_batches_that_never_run_hold_nothing(drop):
    bag = make_bag()
    bag.prefetch(*jagged([[1, 2]]))
    assert bag.stats().pinned_rows == 2
    if drop == "close":
        bag.close()
    else:
        bag._group.drop_prefetched()
        assert bag.stats().pinned_rows == 0
        bag.close()


def test_kernel_settings_are_checked(monkeypatch):
    from torchrec_embcache.exceptions import ConfigError

    for name, value in [
        ("EMBCACHE_THREADS", "0"),
        ("EMBCACHE_THREADS", "two"),
        ("EMBCACHE_KERNELS", "cuda"),
        ("EMBCACHE_KERNELS", "torch"),
    ]:
        with monkeypatch.context() as patch, make_bag(tiers=AMPLE) as bag:
            patch.setenv(name, value)
            with pytest.raises(ConfigError, match=f"{name}|device_bytes"):
                bag(torch.tensor([[1]]))
            assert bag.stats().pinned_rows == 0
