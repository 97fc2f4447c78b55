"""The curves of `miss_ratio_curve`, measured while a table trains, compared with libCacheSim (CMU) on the same lookups."""

from pathlib import Path

import libcachesim
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from torchrec_embcache import (
    CacheTable,
    EmbCacheEmbeddingBag,
    MissRatioCurve,
    TierBudgets,
    admission,
    initializers,
    optimizers,
)
from torchrec_embcache.config import CachePolicy
from torchrec_embcache.exceptions import ConfigError, CorruptionError, StateError

Ids = NDArray[np.int64]
BATCH = 8192


def bag_of(policy: CachePolicy = "s3fifo", host: str = "64MiB", **more: object) -> EmbCacheEmbeddingBag:
    return EmbCacheEmbeddingBag(
        name="item",
        embedding_dim=4,
        tiers=TierBudgets(host_bytes=host, sizing=True),
        optimizer=optimizers.SGD(lr=0.1),
        policy=policy,
        **more,
    )


def zipf(numbers: np.random.Generator, lookups: int, ids: int, exponent: float) -> Ids:
    """Returns ids below `ids`, drawn from a Zipf distribution. The rank of each id is random."""
    shares = 1.0 / np.arange(1, ids + 1) ** exponent
    ranks = np.searchsorted(np.cumsum(shares) / shares.sum(), numbers.random(lookups))
    return numbers.permutation(ids)[np.minimum(ranks, ids - 1)].astype(np.int64)


def trace_of(name: str, lookups: int = 1_500_000, ids: int = 300_000) -> Ids:
    numbers = np.random.default_rng(7)
    trace = zipf(numbers, lookups, ids, 0.9)
    if name == "scan":  # a third of the traffic runs once over ids that nobody else uses
        scanned = np.arange(lookups // 3)
        trace[: 3 * len(scanned) : 3] = ids + scanned
    if name == "drift":  # every 50,000 lookups, ids move on by a hundredth of all of them
        trace = trace + (np.arange(lookups) // 50_000) * (ids // 100)
    return trace


def train(bag: EmbCacheEmbeddingBag, trace: Ids) -> Ids:
    """Train on a trace batch by batch. Returns the lookups: the distinct ids of each batch, in the order of their first use."""
    lookups = []
    for batch in np.split(trace, range(BATCH, len(trace), BATCH)):
        _, first = np.unique(batch, return_index=True)
        lookups.append(batch[np.sort(first)])
        bag(torch.from_numpy(batch).view(1, -1)).sum().backward()
    return np.concatenate(lookups)


def simulated(policy: CachePolicy, sizes: list[int], lookups: Ids, folder: Path) -> list[float]:
    """The miss ratios of libCacheSim's caches of these sizes in rows."""
    path = folder / "lookups.oracleGeneral"
    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    records = np.zeros(len(lookups), record)
    records["id"], records["size"] = lookups + 1, 1
    records.tofile(path)
    made = {"lru": libcachesim.LRU, "s3fifo": libcachesim.S3FIFO}[policy]
    ratios = []
    for size in sizes:
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        ratios.append(made(size).process_trace(reader)[0])
    return ratios


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zipf", "scan", "drift"])
def test_curves_of_a_sample_agree_with_simulations_of_every_lookup(name: str, tmp_path: Path) -> None:
    with bag_of(host="8MiB", on_full="evict") as bag:
        lookups = train(bag, trace_of(name))
        for policy in ("s3fifo", "lru"):
            curve = bag.miss_ratio_curve(policy)
            assert curve.lookups == len(lookups)
            assert curve.sampling_rate < 0.25
            assert curve.distinct_ids == pytest.approx(len(np.unique(lookups)), rel=0.05)
            sizes = np.unique(np.geomspace(curve.rows[0], curve.distinct_ids, 8).astype(int)).tolist()
            exact = simulated(policy, sizes, lookups, tmp_path)
            errors = [abs(curve.at(size) - ratio) for size, ratio in zip(sizes, exact, strict=True)]
            print(name, policy, curve.sampling_rate, np.round(errors, 4), np.round(exact, 3), np.mean(errors))
            assert np.mean(errors) < 0.01, (policy, sizes, errors)


def test_a_curve_is_of_the_tables_policy_or_of_lru() -> None:
    with bag_of("lfu") as bag:
        train(bag, np.arange(10_000))
        assert bag.miss_ratio_curve().policy == "lfu"
        assert bag.miss_ratio_curve("lru").policy == "lru"
        with pytest.raises(ConfigError, match="policy='s3fifo' is not measured for table 'item': use 'lfu' or 'lru'"):
            bag.miss_ratio_curve("s3fifo")


def test_a_table_measures_only_where_it_is_told_to() -> None:
    bag = EmbCacheEmbeddingBag(
        name="item", embedding_dim=4, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.1)
    )
    with bag, pytest.raises(StateError, match=r"open it with TierBudgets\(sizing=True\)"):
        bag.miss_ratio_curve()
    with pytest.raises(ConfigError, match="sizing='yes' is not a bool"):
        TierBudgets(host_bytes="1MiB", sizing="yes")  # type: ignore[arg-type]
    table = CacheTable(
        name="closed",
        dim=4,
        tiers=TierBudgets(host_bytes="1MiB", sizing=True),
        initializer=initializers.Constant(0.0),
        optimizer=None,
    )
    table.close()
    with pytest.raises(StateError, match="is closed"):
        table.miss_ratio_curve()


def test_ids_that_get_no_row_are_no_lookups() -> None:
    with bag_of(admission=admission.Count(2)) as bag:
        train(bag, np.arange(1_000))  # the first time no id is admitted
        assert bag.miss_ratio_curve().lookups == 0
        train(bag, np.arange(1_000))
        assert bag.miss_ratio_curve().lookups == 1_000
        bag.eval()
        with torch.no_grad():
            bag(torch.arange(500, 1_500).view(1, -1))
        assert bag.miss_ratio_curve().lookups in {
            1_500,
            2_000,
        }  # by default an evaluation reads what missing ids would be born as


def test_measuring_changes_no_bit(tmp_path: Path) -> None:
    rows = []
    for sizing in (False, True):
        tiers = TierBudgets(host_bytes="96KiB", ssd_bytes="16MiB", ssd_dir=tmp_path, reopen="discard", sizing=sizing)
        bag = EmbCacheEmbeddingBag(
            name="item", embedding_dim=4, tiers=tiers, optimizer=optimizers.RowWiseAdagrad(lr=0.1), seed=3
        )
        with bag:
            train(bag, zipf(np.random.default_rng(2), 40_000, 3_000, 1.0))
            found = bag.read_rows(np.arange(3_000))
            rows.append((found.weights, found.slots["sum"], bag.stats().host.hits))
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][1], rows[1][1])
    assert rows[0][2] == rows[1][2]


def test_a_curve_begins_anew_with_warm_caches() -> None:
    with bag_of() as bag:
        train(bag, np.arange(20_000))
        first = bag.miss_ratio_curve(reset=True)
        assert first.first_use_ratio == pytest.approx(1.0, abs=0.05)
        assert first.new_row_ratio == 1.0
        train(bag, np.arange(20_000))
        again = bag.miss_ratio_curve()
        assert again.new_row_ratio == 0.0
        assert again.lookups == 20_000
        assert again.first_use_ratio == 0.0


def test_a_curve_goes_through_json() -> None:
    with bag_of() as bag:
        train(bag, np.arange(5_000))
        curve = bag.miss_ratio_curve()
    again = MissRatioCurve.from_dict(curve.as_dict())
    assert again.as_dict() == curve.as_dict()
    for field, value in (("rows", [2, 1]), ("miss_ratios", [2.0] * len(curve.rows)), ("lookups", None)):
        with pytest.raises(CorruptionError):
            MissRatioCurve.from_dict({**curve.as_dict(), field: value})
