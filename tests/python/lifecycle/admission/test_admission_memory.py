"""Counts that are dropped because their memory is full, and counts that move to other buckets."""

import logging
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lifecycle_cases import DIM, TIERS, embedding, update
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    _native,
    admission,
    cache_modules,
)
from torchrec_models import Model, Settings, batches, sharded

#: Memory for four ids in each of two generations, of a table with one bucket.
FOUR = 17 * 8
LOGGER = "torchrec_embcache.core.cache"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the warnings of the tables' logger about the memory for counts."""
    _native.drain_log()
    said = [record for record in caplog.records if "memory of its admission" in record.getMessage()]
    assert all((record.name, record.levelno) == (LOGGER, logging.WARNING) for record in said)
    return [record.getMessage() for record in said]


def forgotten(table: EmbCacheEmbedding) -> int:
    stats = table.stats().admission
    assert stats is not None
    return stats.forgotten


def count(table: EmbCacheEmbedding, ids: range) -> None:
    update(table(torch.tensor(list(ids))))


def test_a_warning_says_once_that_counts_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    table = embedding(name="items", total_num_buckets=1, admission=admission.Count(9, memory=FOUR))
    count(table, range(5))
    assert (forgotten(table), warnings_of(caplog)) == (0, []), "the older generation was empty"
    count(table, range(10, 13))
    assert (forgotten(table), warnings_of(caplog)) == (0, []), "there is room"
    count(table, range(20, 24))
    (said,) = warnings_of(caplog)
    assert forgotten(table) == 5
    assert 'table "items": the memory of its admission, 136 bytes' in said
    assert "after step 3 ids are forgotten" in said
    for words in ("raise memory", "window_steps", "stats().admission.forgotten"):
        assert words in said
    for step in range(4, 9):
        count(table, range(10 * step, 10 * step + 8))
    assert forgotten(table) > 20
    assert len(warnings_of(caplog)) == 1
    # Each table says it for itself.
    other = embedding(name="users", total_num_buckets=1, admission=admission.ShowClick(1, 1, 99, memory=FOUR))
    for step in range(3):
        update(other(torch.arange(5) + 10 * step, torch.ones(5, dtype=torch.int64)))
    assert ['"items"' in said for said in warnings_of(caplog)] == [True, False]


def test_windows_that_end_are_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    table = embedding(total_num_buckets=1, admission=admission.Count(9, window_steps=2, memory="1MiB"))
    for step in range(8):
        count(table, range(10 * step, 10 * step + 8))
    assert forgotten(table) > 20
    assert warnings_of(caplog) == []


def _forgets(rank: int, _world: int) -> tuple[list[str], int]:
    """Two buckets, of which each rank has one, and ids of the second one alone."""
    config = EmbCacheEmbeddingConfig(
        name="item",
        embedding_dim=DIM,
        num_embeddings=9,
        feature_names=["f"],
        total_num_buckets=2,
        admission=admission.Count(9, memory=2 * FOUR),
        tiers=TIERS,
    )
    module = EmbCacheEmbeddingCollection([config])
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = sharded(module, {"item": "row_wise"})
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        ids = torch.arange(1000)
        second = ids[torch.from_numpy(_native.buckets_of(ids.numpy(), 2)) == 1]
        for step in range(4):
            here = second[20 * step + 10 * rank :][:10]
            features = KeyedJaggedTensor(["f"], here, lengths=torch.tensor([len(here)]))
            model(features)["f"].values().sum().backward()
        _native.drain_log()
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
    (table,) = (table for part in cache_modules(model).values() for table in part.tables.values())
    return [text for text in said if "memory of its admission" in text], forgotten(table)


def test_the_rank_that_forgets_says_it(two_ranks: Any) -> None:
    (first, none), (second, some) = two_ranks.run(_forgets)
    assert (first, none) == ([], 0)
    assert len(second) == 1
    assert some > 20


def _rebucketed(_rank: int, _world: int) -> tuple[int, int, set[int]]:
    """Train an unsharded model with the buckets of a checkpoint that it loaded, and shard it."""
    model = Model(Settings(replicated=True, buckets=7, options={"admission": admission.Count(99)}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.1})
    model.bags.sync_optimizers()
    for table in model.bags.tables.values():
        shard = table
        assert shard._adopt(13, shard._key), "as a load of such a checkpoint does"
    for batch in batches(3):
        loss, _ = model(batch)
        loss.backward()
    before = [table.stats().admission for table in model.bags.tables.values()]
    tables = cache_modules(sharded(model))["bags"].tables.values()
    after = [table.stats().admission for table in tables]
    buckets = {table.total_num_buckets for table in tables}
    return sum(stats.pending for stats in before), sum(stats.pending for stats in after), buckets


def test_counts_of_an_unsharded_module_move_to_other_buckets(two_ranks: Any) -> None:
    results = two_ranks.run(_rebucketed)
    (waiting,) = {result[0] for result in results}
    assert 0 < sum(result[1] for result in results) == waiting, results
    assert all(result[2] == {7} for result in results), "the model's own"
