"""The curves that `miss_ratio_curve` measures while a table trains, held against libCacheSim (CMU) on the same lookups."""

from pathlib import Path

import libcachesim
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from torchrec_embcache import CacheTable, EmbCacheEmbeddingBag, MissRatioCurve, TierBudgets, admission, optimizers
from torchrec_embcache.config import Policy
from torchrec_embcache.exceptions import ConfigError, CorruptionError, StateError

Ids = NDArray[np.int64]
BATCH = 8192


def bag_of(policy: Policy = "s3fifo", host: str = "64MiB", **more: object) -> EmbCacheEmbeddingBag:
    return EmbCacheEmbeddingBag(
        name="item",
        embedding_dim=4,
        tiers=TierBudgets(host_bytes=host, sizing=True),
        optimizer=optimizers.SGD(lr=0.1),
        policy=policy,
        **more,
    )


def zipf(numbers: np.random.Generator, lookups: int, ids: int, exponent: float) -> Ids:
    """Ids below `ids`, drawn by a zipf distribution. Which id has which rank is random."""
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


def simulated(policy: Policy, sizes: list[int], lookups: Ids, folder: Path) -> list[float]:
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


@pytest.mark.parametrize("name", ["zipf", "scan", "drift"])
def test_curves_of_a_sample_agree_with_simulations_of_every_lookup(name: str, tmp_path: Path) -> None:
    with bag_of() as bag:
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
