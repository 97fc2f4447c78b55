"""Sharded training with ranks that differ: other batch sizes, an error on one rank, and the calls that work afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from processes import process_group
from tables import bucket_of, ssd_tiers
from torchrec_embcache import (
    CacheTable,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollectionSharder,
    EmbCacheTrainPipelineSparseDist,
    TierBudgets,
    cache_modules,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.config import bucket_range
from torchrec_embcache.exceptions import (
    CapacityError,
    ConfigError,
    EmbCacheError,
    InputError,
    InUseError,
    StateError,
    UnsupportedError,
)
from torchrec_models import (
    CPU,
    MIXED,
    ROW_WISE,
    TABLE_WISE,
    Batch,
    Model,
    Settings,
    assert_same_rows,
    batches,
    dense_optimizer,
    pinned_rows,
    rows_of,
    sharded,
    together,
    train,
)

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    with process_group(0, 1, str(tmp_path / "store")):
        yield


class SumModel(Model):
    """Bags only, and a sum over the samples for a loss, so that ranks may have any share of them."""

    def forward(self, batch: Batch) -> Any:
        pooled = self.bags(batch.features)
        columns = [pooled[key] for key in ("a", "b@ta", "b@tb", "c")]
        columns.append(torch.zeros(len(batch.target), 4))
        loss = (self.linear(torch.cat(columns, 1))[:, 0] * batch.target).sum()
        return loss, (loss.detach(), loss.detach())


def _share(batch: Batch, first: int, last: int) -> Batch:
    """Samples [first, last) of a batch."""
    parts = batch.features.to_dict()
    jagged = {key: parts[key].to_dense()[first:last] for key in parts}
    values = [row for rows in jagged.values() for row in rows]
    return Batch(
        KeyedJaggedTensor(
            list(jagged),
            torch.cat([torch.empty(0, dtype=torch.int64), *values]),
            lengths=torch.tensor([len(row) for row in values], dtype=torch.int64),
        ),
        batch.target[first:last],
    )


def _uneven(rank: int, world: int, shardings: dict[str, str] | None, cut: int) -> Any:
    """Rank 0 has the first `cut` samples of eight, rank 1 the others; the linear layer stays as it is."""
    model = sharded(SumModel(), shardings, SGD)
    for batch in batches(4):
        loss, _ = model(_share(batch, *((0, cut), (cut, 8))[rank] if world > 1 else (0, 8)))
        # Gradients are divided by the ranks, as mean losses want it.
        (loss * world).backward()
    return rows_of(model), pinned_rows(model)


@pytest.mark.parametrize("shardings", [ROW_WISE, MIXED, TABLE_WISE])
@pytest.mark.parametrize("cut", [5, 8])
@pytest.mark.usefixtures("one_rank")
def test_ranks_may_have_batches_of_different_sizes_and_none_at_all(two_ranks, shardings, cut):
    want, _ = _uneven(0, 1, ROW_WISE, cut)
    (mine, pinned), (theirs, others_pinned) = two_ranks.run(_uneven, shardings, cut)
    assert_same_rows(together([mine, theirs]), want)
    assert pinned == others_pinned == 0


def _no_samples(rank: int, world: int) -> Any:
    model = sharded(Model(), MIXED, SGD)
    first, second = batches(2, rank, world)
    try:
        train(model, iter([_share(first, 0, 0) if rank == 0 else first]))
    except InputError as error:
        caught = str(error)
    else:
        caught = ""
    return caught, bool(torch.isfinite(train(model, iter([second]))).all())


def test_a_batch_without_samples_is_refused_by_sequences_on_every_rank(two_ranks):
    for caught, trained in two_ranks.run(_no_samples):
        assert "the batch has 0 samples" in caught
        assert trained


def _after_error_in_backward(rank: int, world: int, shardings: dict[str, str], path: str) -> Any:
    model = sharded(Model(), shardings, SGD)
    steps = list(batches(4, rank, world))
    train(model, iter(steps[:1]))
    groups = [group for module in cache_modules(model).values() for group in module.fused_optimizer.param_groups]
    if rank == 0:
        for group in groups:
            group["lr"] = float("nan")
    try:
        train(model, iter(steps[1:2]))
    except ConfigError as error:
        caught = str(error)
    else:
        caught = ""
    for group in groups:
        group["lr"] = 0.1
    Saver(rank).save(model, path)
    saved = rows_of(model)
    counters = {
        name: table.stats().step for module in cache_modules(model).values() for name, table in module.tables.items()
    }
    train(model, iter(steps[2:]))
    trained = rows_of(model)
    Saver(rank).load(model, path)
    return caught, counters, rows_of(model) == saved, trained != saved, pinned_rows(model)


@pytest.mark.parametrize("shardings", [ROW_WISE, MIXED])
def test_backward_error_on_one_rank_lets_all_save_and_train(two_ranks, tmp_path, shardings):
    results = two_ranks.run(_after_error_in_backward, shardings, str(tmp_path / "checkpoint"))
    for caught, _, loaded, moved, pinned in results:
        assert "lr=nan" in caught
        assert loaded
        assert moved
        assert pinned == 0
    (_, mine, *_), (_, theirs, *_) = results
    for table in mine.keys() & theirs.keys():
        assert mine[table] == theirs[table], "the ranks of a table count the same steps"


def _failing_ahead(rank: int, world: int, lookahead: int, fail: bool) -> Any:
    """Fetching ahead fails on rank 1 for the third batch."""
    model = sharded(Model(), MIXED, SGD)
    pipeline = EmbCacheTrainPipelineSparseDist(model, dense_optimizer(model), CPU, lookahead=lookahead)
    if rank == 1 and fail:
        _break_third_announcement(model)
    steps = batches(8, rank, world)
    losses = []
    while True:
        try:
            losses.append(pipeline.progress(steps)[0])
        except StopIteration:
            break
    return torch.stack(losses).tolist(), rows_of(model), pinned_rows(model)


def _break_third_announcement(model: torch.nn.Module) -> None:
    for module in cache_modules(model).values():
        for lookup in module._lookups:
            if lookup._group is not None:
                group, calls = lookup._group, []
                native, backend = group._open()

                class Failing:
                    def plan(self, *args: Any, native: Any = native, calls: list[int] = calls) -> Any:
                        ahead = args[2].is_prefetch
                        calls.append(ahead)
                        if ahead and sum(calls) == 3:
                            raise CapacityError("no room ahead")
                        return native.plan(*args)

                group._native_lookup = (group._native_lookup[0], Failing(), backend)


@pytest.mark.filterwarnings("error::torchrec_embcache.exceptions.EmbCacheWarning")
@pytest.mark.parametrize("lookahead", [1, 4])
def test_rows_that_cannot_be_fetched_ahead_are_fetched_by_the_forward(two_ranks, lookahead):
    assert two_ranks.run(_failing_ahead, lookahead, True) == two_ranks.run(_failing_ahead, lookahead, False)


def _from_torchrec_on_ssd(_rank: int, _world: int, folder: str) -> Any:
    """A table trained with TorchRec, larger than its budget in RAM, then sharded."""
    config = EmbeddingBagConfig(name="t", embedding_dim=16, num_embeddings=2_000, feature_names=["f"])
    theirs = EmbeddingBagCollection([config])
    with torch.no_grad():
        theirs.embedding_bags["t"].weight.copy_(torch.arange(32_000.0).view(2_000, 16))
    tiers = TierBudgets(host_bytes="128KiB", ssd_bytes="64MiB", ssd_dir=folder)
    given = EmbCacheEmbeddingBagConfig(
        name="t", embedding_dim=16, num_embeddings=2_000, feature_names=["f"], total_num_buckets=7
    )
    ours = EmbCacheEmbeddingBagCollection.from_torchrec(theirs, tiers, tables=[given])
    model = sharded(torch.nn.Sequential(ours), {"t": "row_wise"}, SGD)
    rows = rows_of(model)
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table.close()
    return rows


def test_every_rank_brings_a_trained_module_whose_rows_are_on_ssd(two_ranks, tmp_path):
    rows = together(two_ranks.run(_from_torchrec_on_ssd, str(tmp_path)))
    assert len(rows) == 2_000
    assert all(row[:2] == [16.0 * id_, 16.0 * id_ + 1] for (_, _, id_), row in rows.items())


def _refused_when_opened(rank: int, _world: int) -> Any:
    """Rank 1 alone cannot take the rows of the unsharded module over."""
    model = Model()
    if rank == 1:
        model.bags.hidden = model.bags.shard_tables
        model.bags.shard_tables = _raise_capacity
    try:
        sharded(model, ROW_WISE, SGD)
    except CapacityError as error:
        return str(error)
    return None


def _raise_capacity(*_args: Any, **_kwargs: Any) -> Any:
    raise CapacityError("table 'ta' is full")


def test_tables_that_fail_on_one_rank_are_rejected_on_all(two_ranks):
    assert two_ranks.run(_refused_when_opened) == ["rank 1: table 'ta' is full", "table 'ta' is full"]


def test_an_environment_without_process_group_is_refused():
    model = Model()
    sharders = [EmbCacheEmbeddingBagCollectionSharder(SGD), EmbCacheEmbeddingCollectionSharder(SGD)]
    topology = Topology(world_size=1, local_world_size=1, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).plan(model, sharders)
    with pytest.raises(UnsupportedError, match="process group"):
        DistributedModelParallel(
            model,
            env=ShardingEnv.from_local(1, 0),
            device=CPU,
            sharders=sharders,
            plan=plan,
            init_data_parallel=False,
        )


def _sharded_over_a_part_of_the_ranks(rank: int, _world: int) -> str | None:
    group = torch.distributed.new_group([0, 1])
    if rank == 2:
        return None
    model = Model()
    sharders = [EmbCacheEmbeddingBagCollectionSharder(SGD), EmbCacheEmbeddingCollectionSharder(SGD)]
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(model, sharders, group)
    env = ShardingEnv.from_process_group(group)
    with pytest.raises(UnsupportedError) as refused:
        DistributedModelParallel(model, env=env, device=CPU, sharders=sharders, plan=plan)
    return str(refused.value)


def test_an_environment_of_a_part_of_the_ranks_is_refused(three_ranks):
    first, second, other = three_ranks.run(_sharded_over_a_part_of_the_ranks)
    assert first == second
    assert "2 of the 3 ranks" in first
    assert other is None


def _update_that_tears_a_table(rank: int, world: int) -> Any:
    """Returns the error of a backward in which torch has no memory for a part of rank 1's update, and which tables are poisoned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBCACHE_KERNELS", "torch")
        model = sharded(Model(Settings(tiers=TierBudgets(host_bytes="4MiB", device_bytes="64KiB"))), ROW_WISE, SGD)
        steps = list(batches(2, rank, world))
        train(model, iter(steps[:1]))
        loss, _ = model(steps[1])
        if rank == 1:
            patch.setattr(torch.Tensor, "index_copy_", _no_memory)
        with pytest.raises((torch.OutOfMemoryError, EmbCacheError)) as raised:
            loss.backward()
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    return str(raised.value), [_torn(table) for table in tables]


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("asked to fail")


def _torn(table: CacheTable) -> bool:
    try:
        return table.step() < 0
    except StateError as error:
        return "failed half-way" in str(error)


def test_a_table_that_one_rank_tears_does_not_keep_the_others_waiting(two_ranks):
    (first, sound), (second, torn) = two_ranks.run(_update_that_tears_a_table)
    assert first.startswith("rank 1: cpu has no memory for a step of 'tc': ")
    assert first.endswith("(asked to fail)")
    assert second == first.removeprefix("rank 1: ")
    assert not any(sound)
    assert any(torn)


@pytest.mark.usefixtures("one_rank")
def test_index_dedup_is_refused_before_a_module_gives_up_its_tables(monkeypatch):
    model = Model()
    model.sequences.tables["tc"].import_rows([7], torch.ones(1, 4))
    with monkeypatch.context() as patch:
        patch.setattr("torchrec.distributed.embedding.EC_INDEX_DEDUP", True)  # what set_ec_index_dedup(True) does
        with pytest.raises(UnsupportedError, match="set_ec_index_dedup"):
            sharded(model, ROW_WISE, SGD)
    assert len(model.sequences.tables["tc"]) == 1


def _sharding_fails_on_one_rank(rank: int, world: int, root: str) -> Any:
    """Train unsharded, fail to shard because rank 1 cannot open its share of the second table, and try again."""
    settings = Settings(replicated=True, tiers=ssd_tiers(Path(root) / "ssd", host_bytes="4MiB", reopen="auto"))
    model = Model(settings)
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    train(model, batches(2))
    before = rows_of(model)
    second = model.bags.tables["tb"]
    taken = CacheTable(
        name="tb",
        module="bags",
        dim=second.dim,
        tiers=second.tiers,
        initializer=second.initializer,
        optimizer=second.optimizer,
        rank=1,
        world_size=world,
    )
    if rank == 1:
        taken.open()
    with pytest.raises(InUseError) as kept:
        sharded(model, ROW_WISE)
    model.sequences.close()
    taken.close()
    torch.distributed.barrier()
    again = Model(settings)
    apply_optimizer_in_backward(torch.optim.SGD, again.table_parameters(), {"lr": 0.5})
    assert rows_of(again) == before  # opens the directories, though somebody keeps the error
    assert kept.tb is not None
    return before, rows_of(sharded(again, ROW_WISE))


def test_a_module_that_cannot_be_sharded_leaves_no_directory_in_use(two_ranks, tmp_path):
    results = two_ranks.run(_sharding_fails_on_one_rank, str(tmp_path))
    assert together([after for _, after in results]) == results[0][0] == results[1][0]


def _refused_by_one_rank(rank: int, world: int) -> Any:
    """A batch with a few new ids for rank 0, and more new ids for rank 1 than its shard holds."""
    buckets = 8
    config = EmbCacheEmbeddingBagConfig(
        name="t",
        embedding_dim=4,
        num_embeddings=10**9,
        feature_names=["f"],
        total_num_buckets=buckets,
        tiers=TierBudgets(host_bytes="16KiB"),
        on_full="evict",
    )
    module = EmbCacheEmbeddingBagCollection([config], name="bags")
    model = sharded(torch.nn.Sequential(module), {"t": "row_wise"}, SGD)

    def forward(ids: list[int]) -> torch.Tensor:
        features = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
        return model(features).wait().values()

    def of_rank(owner: int, count: int) -> list[int]:
        owned = range(*bucket_range(owner, world, buckets))
        return [id_ for id_ in range(10**6, 10**6 + 10 * count) if bucket_of(id_, buckets) in owned][:count]

    for first in range(0, 2000, 50):
        forward(list(range(first, first + 50))).sum().backward()
    (table,) = next(iter(cache_modules(model).values())).tables.values()
    before, dropped = rows_of(model), table.stats().dropped_rows
    assert dropped
    try:
        forward(of_rank(0, 5) + of_rank(1, 2000))
    except CapacityError as error:
        said = str(error)
    else:
        said = ""
    assert rows_of(model) == before, f"rank {rank} has dropped rows"
    assert (table.stats().dropped_rows, pinned_rows(model)) == (dropped, 0)
    forward(of_rank(0, 5)).sum().backward()
    return said, table.stats().dropped_rows - dropped


def test_no_rank_drops_rows_for_a_batch_that_another_rank_refuses(two_ranks):
    (first, dropped), (second, _) = two_ranks.run(_refused_by_one_rank)
    assert "this batch and others in flight use" in first
    assert "this batch and others in flight use" in second
    assert dropped == 5, "the few ids of rank 0 get their rows once they come alone"
