"""The OOV row on several ranks: it is equal on all of them, and trained as on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import dcp_cases
from oov_cases import FUSED, assert_same_shared, made, shared_of
from processes import process_group
from torchrec_embcache import EmbCacheEmbeddingCollection, EmbCacheEmbeddingConfig, admission, cache_modules
from torchrec_embcache._kernels import core
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import InputError
from torchrec_models import (
    MIXED,
    ROW_WISE,
    TABLE_WISE,
    TIERS,
    Model,
    Settings,
    assert_same_rows,
    batches,
    rows_of,
    sharded,
    together,
)

OPTIONS = {"admission": admission.Count(4), "not_admitted": "oov"}


def train(model: Any, rank: int, world: int, begin: int, end: int, **given: Any) -> None:
    """Train the tables alone. The linear layer stays as it is, so that no checkpoint needs it."""
    for batch in list(batches(end, rank, world, **given))[begin:]:
        loss, _ = model(batch)
        loss.backward()


def trained(rank: int, world: int, shardings: Any, settings: Settings) -> Any:
    model = made(settings, shardings)
    train(model, rank, world, 0, 8, weighted=settings.weighted)
    return rows_of(model), shared_of(model)


@pytest.fixture
def one_rank(tmp_path):
    with process_group(0, 1, str(tmp_path / "store")):
        yield


@pytest.mark.parametrize(
    ("shardings", "pooling", "weighted"),
    [
        (ROW_WISE, PoolingType.MEAN, False),
        (ROW_WISE, PoolingType.SUM, False),
        (ROW_WISE, PoolingType.SUM, True),
        (TABLE_WISE, PoolingType.MEAN, False),
        (MIXED, PoolingType.MEAN, False),
    ],
    ids=["row-wise mean", "row-wise sum", "row-wise weighted", "table-wise", "mixed"],
)
@pytest.mark.usefixtures("one_rank")
def test_two_ranks_train_what_one_rank_trains(two_ranks, shardings, pooling, weighted):
    settings = Settings(pooling=pooling, weighted=weighted, options=OPTIONS)
    rows, shared = trained(0, 1, shardings, settings)
    if weighted:  # its sequences take no part in the forward
        shared = {table: row for table, row in shared.items() if any(row)}
    results = two_ranks.run(trained, shardings, settings)
    assert rows
    assert_same_rows(together([result[0] for result in results]), rows)
    parts = [{table: row for table, row in result[1].items() if table in shared} for result in results]
    assert_same_shared(parts, shared)


def bits_of_sequences(rank: int, world: int) -> Any:
    """Train sequences, whose gradients hang on nothing that ranks add up: numbers of every size, which float32 would round."""
    config = EmbCacheEmbeddingConfig(
        name="tc", embedding_dim=8, num_embeddings=10**9, feature_names=["a"], total_num_buckets=7, **OPTIONS
    )
    model = sharded(EmbCacheEmbeddingCollection([config], tiers=TIERS, name="s"), {"tc": "row_wise"}, FUSED)
    for batch in batches(10, rank, world, size=64):
        lengths = batch.features.lengths()[: batch.features.stride()]
        ids = batch.features.values()[: int(lengths.sum())]
        rows = model(KeyedJaggedTensor(["a"], ids, lengths=lengths))["a"].values()
        size = torch.exp2((ids % 41 - 20).float())
        # Each rank's gradients are divided by the number of ranks.
        (((rows + 1) ** 2).sum(1) * size).sum().mul(world).backward()
    return {table: torch.tensor(row).numpy().tobytes() for table, row in shared_of(model).items()}


@pytest.mark.usefixtures("one_rank")
def test_two_ranks_have_the_bits_of_one_where_their_gradients_have(two_ranks):
    alone = bits_of_sequences(0, 1)
    assert two_ranks.run(bits_of_sequences) == [alone, alone]


def alone_refused(rank: int, world: int) -> Any:
    """One rank alone has refused ids, and then none has any."""
    rule = {"admission": admission.ReadOnly(), "not_admitted": "oov"}
    model = made(Settings(options=rule, pooling=PoolingType.SUM), ROW_WISE)
    found = []
    for ids in ([], [100]) if rank else ([], []):
        batch = next(batches(1, rank, world))
        features = type(batch.features)(
            ["a", "b", "c"], torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor([len(ids), 0, 0] + [0] * 9)
        )
        loss, _ = model(type(batch)(features, batch.target))
        loss.backward()
        found.append(shared_of(model))
    return found


def test_a_rank_without_refused_ids_takes_part(two_ranks):
    first, second = two_ranks.run(alone_refused)
    assert first == second
    assert not any(any(row) for row in first[0].values())
    assert any(any(row) for row in first[1].values())


def fails(rank: int, world: int, amid: bool) -> Any:
    """A backward that fails on one rank: before the ranks add their gradients up, or after it."""
    model = made(Settings(options=OPTIONS), ROW_WISE)
    train(model, rank, world, 0, 2)
    before = rows_of(model), shared_of(model)
    loss, _ = model(list(batches(3, rank, world))[2])

    def refuse(*_args: Any) -> None:
        raise InputError("made to fail")

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(core.CoreBackend, "_run" if amid else "_train_oov_row", refuse)
        try:
            loss.backward()
        except InputError as error:
            said = str(error)
    after = rows_of(model), shared_of(model)
    steps = [table.step() for module in cache_modules(model).values() for table in module.tables.values()]
    train(model, rank, world, 3, 6)
    return said, after == before, steps, after[1], shared_of(model)


def test_backward_error_before_the_sums_changes_no_row(two_ranks):
    """The backward fails on one of two ranks."""
    first, second = two_ranks.run(fails, False)
    assert "rank 1: made to fail" in first[0]
    assert "made to fail" in second[0]
    assert first[1]
    assert second[1]
    assert first[2:] == second[2:]


def test_backward_error_after_the_sums_leaves_equal_oov_rows(two_ranks):
    """The other rank has made its step by then."""
    first, second = two_ranks.run(fails, True)
    assert "rank 1: made to fail" in first[0]
    assert not first[1]
    assert first[2:] == second[2:]


# ---- checkpoints of another number of ranks


def save(rank: int, world: int, path: Path, door: str) -> Any:
    model = made(Settings(options=OPTIONS), ROW_WISE)
    train(model, rank, world, 0, 4)
    if door == "delta":
        Saver().save(model, path)
        train(model, rank, world, 4, 6)
    if door == "dcp":
        dcp_cases.save(dcp_cases.dense_state(1), path, model)
    else:
        Saver().save(model, path, incremental=door == "delta")
    return shared_of(model)


def load(rank: int, world: int, path: Path, door: str) -> Any:
    model = made(Settings(options=OPTIONS), ROW_WISE)
    train(model, rank, world, 6, 8)
    if door == "dcp":
        dcp_cases.load(dcp_cases.blank(dcp_cases.dense_state()), path, model)
    else:
        Saver().load(model, path)
    loaded = shared_of(model)
    train(model, rank, world, 8, 11)
    return loaded, rows_of(model), shared_of(model)


@pytest.mark.parametrize("door", ["full", "delta", "dcp"])
@pytest.mark.usefixtures("one_rank")
def test_any_number_of_ranks_loads_it(tmp_path, two_ranks, door):
    path = tmp_path / "saved"
    saved, other = two_ranks.run(save, path, door)
    assert saved == other
    loaded, rows, trained_on = load(0, 1, path, door)
    assert loaded == saved
    results = two_ranks.run(load, path, door)
    assert [result[0] for result in results] == [saved, saved]
    assert_same_rows(together([result[1] for result in results]), rows)
    assert_same_shared([result[2] for result in results], trained_on)


def sharded_after_training(rank: int, world: int) -> Any:
    """Unsharded steps, then sharded ones. Every rank trains the whole batch unsharded."""
    model = Model(Settings(replicated=True, options=OPTIONS))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.table_parameters(), {"lr": 0.1})
    train(model, 0, 1, 0, 3)
    before = shared_of(model)
    model = sharded(model, ROW_WISE)
    found = shared_of(model)
    train(model, rank, world, 3, 8)
    return list(before.values()) == list(found.values()), rows_of(model), shared_of(model)


@pytest.mark.usefixtures("one_rank")
def test_the_shards_of_a_module_take_its_shared_row_over(two_ranks):
    same, rows, shared = sharded_after_training(0, 1)
    results = two_ranks.run(sharded_after_training)
    assert same
    assert all(result[0] for result in results)
    assert_same_rows(together([result[1] for result in results]), rows)
    assert_same_shared([result[2] for result in results], shared)
