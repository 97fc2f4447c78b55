"""The collections under DistributedModelParallel, on one, two and four ranks."""

import copy
import gc
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from processes import process_group
from tables import bucket_of
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollectionSharder,
    EmbCacheWarning,
    TierBudgets,
    cache_modules,
    flush,
    initializers,
)
from torchrec_embcache.config import bucket_range
from torchrec_embcache.exceptions import CapacityError, ConfigError, InputError, StateError, UnsupportedError
from torchrec_models import (
    CPU,
    MIXED,
    PLAIN,
    ROW_WISE,
    TABLE_WISE,
    TIERS,
    Batch,
    Model,
    Settings,
    assert_same_rows,
    batches,
    pinned_rows,
    rows_of,
    sharded,
    together,
    train,
)

FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-6}
STEPS = 5


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    with process_group(0, 1, str(tmp_path / "store")):
        yield


def trained(
    rank: int, world: int, shardings: Any, optimizer: Any, settings: Settings = PLAIN, fused: Any = None
) -> Any:
    model = Model(settings)
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer[0], model.table_parameters(), optimizer[1])
    model = sharded(model, shardings, fused)
    losses = train(model, batches(STEPS, rank, world, weighted=settings.weighted))
    assert pinned_rows(model) == 0
    kinds = {table: param.sharding_type for plan in model.plan.plan.values() for table, param in plan.items()}
    return rows_of(model), losses, kinds


SGD = (torch.optim.SGD, {"lr": 0.5})
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-6})
ROWWISE = (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-6})
ADAM = (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1})


@pytest.mark.parametrize(
    ("shardings", "optimizer", "settings"),
    [
        (None, SGD, Settings()),
        (ROW_WISE, SGD, Settings()),
        (ROW_WISE, ADAM, Settings(buckets=8)),
        (TABLE_WISE, ADAGRAD, Settings()),
        (MIXED, ROWWISE, Settings(buckets=4093)),
        (MIXED, SGD, Settings(weighted=True)),
        (ROW_WISE, SGD, Settings(pooling=PoolingType.SUM)),
        (MIXED, ADAGRAD, Settings(tiers=TierBudgets(host_bytes="4MiB", device_bytes="256KiB"))),
    ],
    ids=["planner", "row-wise", "row-wise even", "table-wise", "mixed", "weighted", "sum", "device tier"],
)
@pytest.mark.usefixtures("one_rank")
def test_two_ranks_train_the_rows_that_one_rank_trains(two_ranks, shardings, optimizer, settings):
    rows, losses, _ = trained(0, 1, shardings, optimizer, settings)
    results = two_ranks.run(trained, shardings, optimizer, settings)
    assert_same_rows(together([result[0] for result in results]), rows)
    torch.testing.assert_close(sum(result[1] for result in results) / 2, losses)
    if shardings is not None:
        assert results[0][2] == shardings
    assert all(result[0] for result in results), "each rank holds rows"


@pytest.mark.usefixtures("one_rank")
def test_four_ranks_train_the_rows_that_one_rank_trains(four_ranks):
    rows, losses, _ = trained(0, 1, MIXED, ROWWISE)
    results = four_ranks.run(trained, MIXED, ROWWISE)
    assert_same_rows(together([result[0] for result in results]), rows)
    torch.testing.assert_close(sum(result[1] for result in results) / 4, losses)


@pytest.mark.usefixtures("one_rank")
def test_unsharded_trains_the_rows_that_one_sharded_rank_trains():
    rows, losses, _ = trained(0, 1, ROW_WISE, ROWWISE)
    model = Model()
    apply_optimizer_in_backward(*[ROWWISE[0], model.table_parameters(), ROWWISE[1]])
    assert torch.allclose(train(model, batches(STEPS)), losses)
    assert_same_rows(rows_of(model), rows)


@pytest.mark.usefixtures("one_rank")
def test_fused_params_train_as_the_optimizer_in_the_backward_does():
    by_backward = trained(0, 1, ROW_WISE, ROWWISE)
    by_params = trained(0, 1, ROW_WISE, None, Settings(), FUSED)
    assert by_params[0] == by_backward[0]


def _buckets(rank: int, world: int) -> list[tuple[Any, ...]]:
    model = sharded(Model(Settings(buckets=7)), ROW_WISE, FUSED)
    train(model, batches(STEPS, rank, world))
    return [
        (table.buckets, [bucket_of(row_id, 7) for row_id in chunk.ids.tolist()])
        for module in cache_modules(model).values()
        for table in module.tables.values()
        for chunk in table.export()
    ]


def test_a_rank_holds_the_rows_of_its_buckets(two_ranks):
    for rank, tables in enumerate(two_ranks.run(_buckets)):
        begin, end = bucket_range(rank, 2, 7)
        assert len(tables) == 3
        for buckets, held in tables:
            assert buckets == (begin, end)
            assert held
            assert all(begin <= bucket < end for bucket in held)


def _mixed_mean(rank: int, world: int) -> Tensor:
    del world
    tables = [
        EmbCacheEmbeddingBagConfig(
            name=name,
            embedding_dim=2,
            num_embeddings=100,
            feature_names=[name],
            pooling=pooling,
            initializer=initializers.Constant(3.0),
        )
        for name, pooling in (("summed", PoolingType.SUM), ("averaged", PoolingType.MEAN))
    ]
    module = EmbCacheEmbeddingBagCollection(tables, tiers=TIERS)
    model = sharded(torch.nn.ModuleDict({"bags": module}), {"summed": "table_wise", "averaged": "row_wise"})
    model.eval()
    features = KeyedJaggedTensor(
        ["averaged", "summed"], torch.tensor([1, 2, 3, 1, 2, 3]) + rank, lengths=torch.tensor([3, 3])
    )
    out = model.module["bags"](features).wait()
    return torch.cat([out["summed"], out["averaged"]], 1)


def test_a_mean_over_ranks_beside_a_table_wise_sum_is_the_mean(two_ranks):
    for out in two_ranks.run(_mixed_mean):
        assert out.tolist() == [[9.0, 9.0, 3.0, 3.0]]


def _spoiled(rank: int, world: int, shardings: Any, spoil: str) -> Any:
    model = sharded(Model(), shardings, FUSED)
    good = list(batches(3, rank, world))
    train(model, iter(good[:1]))
    bad = good[1]
    if rank == 1:
        features = bad.features
        if spoil == "dtype":
            bad = Batch(
                KeyedJaggedTensor(features.keys(), features.values().float(), lengths=features.lengths()), bad.target
            )
        elif spoil == "lengths":
            bad = Batch(
                KeyedJaggedTensor(features.keys(), features.values()[1:], lengths=features.lengths()), bad.target
            )
        elif spoil == "missing":
            bad = Batch(features.permute([0, 1]), bad.target)
        elif spoil == "lookup":
            for module in cache_modules(model).values():
                for lookup in module._lookups:
                    lookup.plan = _raise_capacity
                    break
    try:
        train(model, iter([bad]))
    except Exception as error:
        caught: Any = (type(error).__name__, str(error))
    else:
        caught = None
    for module in cache_modules(model).values():
        for lookup in module._lookups:
            lookup.__dict__.pop("plan", None)
    assert pinned_rows(model) == 0
    loss = train(model, iter(good[2:]))
    return caught, len(rows_of(model)), bool(torch.isfinite(loss).all())


def _raise_capacity(*_args: Any, **_kwargs: Any) -> Any:
    raise CapacityError("table 'ta' is full")


@pytest.mark.parametrize(
    ("shardings", "spoil", "error", "words"),
    [
        (ROW_WISE, "dtype", InputError, "values have dtype torch.float32"),
        (TABLE_WISE, "lengths", InputError, "lengths sum to"),
        (MIXED, "missing", InputError, "lacks ['c']"),
        (TABLE_WISE, "lookup", CapacityError, "table 'ta' is full"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_every_rank_at_the_same_step(two_ranks, shardings, spoil, error, words):
    for rank, (caught, rows, finite) in enumerate(two_ranks.run(_spoiled, shardings, spoil)):
        assert caught is not None, f"rank {rank} did not raise"
        assert caught[0] == error.__name__
        assert words in caught[1]
        assert ("rank 1: " in caught[1]) == (rank == 0)
        assert rows
        assert finite, "training goes on"


def _filled(rank: int, world: int) -> Any:
    """Table "ta" is on one rank alone, and is soon full."""
    settings = Settings(tiers=TierBudgets(host_bytes="12KiB"))
    model = sharded(Model(settings), {**ROW_WISE, "ta": "table_wise"}, FUSED)
    steps = 0
    try:
        for batch in batches(40, rank, world):
            train(model, iter([batch]))
            steps += 1
    except CapacityError as error:
        return steps, str(error), rows_of(model), pinned_rows(model)
    return steps, None, rows_of(model), pinned_rows(model)


def test_table_full_on_one_rank_stops_all_and_keeps_its_rows(two_ranks):
    (steps, message, rows, pinned), other = two_ranks.run(_filled)
    assert message is not None
    assert other[1] is not None
    assert steps == other[0] > 0
    assert pinned == other[3] == 0
    assert together([rows, other[2]])
    assert ("rank 0: " in message + other[1]) or ("rank 1: " in message + other[1])


def _error_in_backward(rank: int, world: int) -> Any:
    model = sharded(Model(), TABLE_WISE, FUSED)
    batch = next(iter(batches(1, rank, world)))
    loss, _ = model(batch)
    if rank == 0:
        for module in cache_modules(model).values():
            for group in module.fused_optimizer.param_groups:
                group["lr"] = float("nan")
    try:
        loss.backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_an_error_in_the_backward_of_one_rank_is_raised_on_every_rank(two_ranks):
    for rank, caught in enumerate(two_ranks.run(_error_in_backward)):
        assert caught is not None, f"rank {rank} did not raise"
        assert caught[0] == ConfigError.__name__
        assert "lr=nan" in caught[1]


def _scheduled(rank: int, world: int) -> Any:
    model = sharded(Model(), MIXED, {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5})
    scheduler = StepLR(model.fused_optimizer, step_size=1, gamma=0.0)
    steps = list(batches(2, rank, world))
    before = rows_of(model)
    train(model, iter(steps[:1]))
    moved = rows_of(model)
    scheduler.step()
    train(model, iter(steps[:1]))
    names = sorted(model.fused_optimizer.params)
    return before, moved, rows_of(model), [group["lr"] for group in model.fused_optimizer.param_groups], names


def test_a_scheduler_on_the_fused_optimizer_reaches_the_next_backward(two_ranks):
    for before, moved, after, rates, _ in two_ranks.run(_scheduled):
        assert not before
        assert moved
        assert moved == after
        assert set(rates) == {0.0}


def _state(rank: int, world: int) -> Any:
    model = sharded(Model(), TABLE_WISE, {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.02})
    train(model, batches(1, rank, world))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = dict(model.state_dict())
        model.state_dict()
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        incompatible = model.load_state_dict(dict(state))
        del state
    told = [str(warning.message) for warning in caught if issubclass(warning.category, EmbCacheWarning)]
    optimizer = model.fused_optimizer.state_dict()
    model.fused_optimizer.load_state_dict(optimizer)
    names = [name for name, _ in in_backward_optimizer_filter(model.named_parameters())]
    return shapes, tuple(incompatible), optimizer["state"], names, told


def test_state_dicts_have_equal_keys_on_ranks_and_warn_once(two_ranks):
    results = two_ranks.run(_state)
    tables = {"bags.embedding_bags.ta": 16, "bags.embedding_bags.tb": 8, "sequences.embeddings.tc": 4}
    for shapes, (missing, unexpected), _, names, _ in results:
        assert {name.removeprefix("module."): shape for name, shape in shapes.items()} == {
            **{f"{table}.weight": (0, dim) for table, dim in tables.items()},
            "bags._extra_state": (792,),  # of two tables, wherever they are
            "sequences._extra_state": (404,),
            "linear.weight": (1, 52),
            "linear.bias": (1,),
        }
        assert not missing
        assert not unexpected
        assert sorted(names) == ["linear.bias", "linear.weight"]
    told = [message for *_, messages in results for message in messages]
    assert all("Saver" in message for message in told)
    assert sum("'ta'" in message for message in told) == 1
    slots = {name: list(state) for *_, states, _, _ in results for name, state in states.items()}
    assert slots == {f"{table}.weight": [f"{table[-2:]}.momentum1", f"{table[-2:]}.momentum2"] for table in tables}


def _handed_over(rank: int, world: int, world_shardings: Any) -> Any:
    model = Model(Settings(replicated=True))
    apply_optimizer_in_backward(ROWWISE[0], model.table_parameters(), ROWWISE[1])
    train(model, batches(2))  # the same global batches on every rank
    before = rows_of(model)
    steps = {name: table.step() for name, table in model.bags.tables.items()}
    old = model.bags
    model = sharded(model, world_shardings)
    after = rows_of(model)
    with pytest.raises(StateError, match="was sharded"):
        old(next(iter(batches(1))).features)
    kept = all(table.step() == steps[name] for name, table in cache_modules(model)["bags"].tables.items())
    return before, after, kept, train(model, batches(1, rank, world))


@pytest.mark.parametrize("shardings", [ROW_WISE, MIXED])
def test_rows_of_an_unsharded_module_go_to_the_ranks_of_their_buckets(two_ranks, shardings):
    results = two_ranks.run(_handed_over, shardings)
    assert results[0][0] == results[1][0]
    assert together([result[1] for result in results]) == results[0][0]
    assert all(result[2] for result in results)


@pytest.mark.usefixtures("one_rank")
def test_rows_of_an_unsharded_module_stay_where_one_rank_shards_it():
    before, after, kept, _ = _handed_over(0, 1, ROW_WISE)
    assert before == after
    assert kept


def _without_training(rank: int, world: int) -> Any:
    model = sharded(Model(), MIXED, FUSED)
    steps = list(batches(2, rank, world))
    with torch.no_grad():
        _, (_, first) = model(steps[0])
    nothing = len(rows_of(model))
    model.eval()
    _, (_, second) = model(steps[0])
    loss, _ = model(steps[0])
    loss.backward()  # only the dense part
    still = len(rows_of(model))
    model.train()
    model(steps[0])  # never trained on; the requests of TorchRec's exchange are cycles
    gc.collect()
    return torch.equal(first, second), nothing, still, len(rows_of(model)), pinned_rows(model)


def test_reading_and_abandoned_batches_insert_and_pin_nothing(two_ranks):
    for result in two_ranks.run(_without_training):
        assert result == (True, 0, 0, 0, 0)


def _untrained(rank: int, world: int) -> str:
    model = sharded(Model(), TABLE_WISE)
    batch = next(iter(batches(1, rank, world)))
    model.eval()
    model(batch)
    model.train()
    with pytest.raises(StateError) as caught:
        model(batch)
    return str(caught.value)


def test_training_without_an_optimizer_names_both_ways_to_set_one(two_ranks):
    for message in two_ranks.run(_untrained):
        assert "apply_optimizer_in_backward" in message
        assert "fused_params" in message


def _undivided(rank: int, world: int) -> Any:
    set_gradient_division(False)
    try:
        return trained(rank, world, MIXED, SGD)[0]
    finally:
        set_gradient_division(True)


def test_gradients_are_divided_by_the_ranks_as_torchrec_says(two_ranks):
    divided = together([result[0] for result in two_ranks.run(trained, MIXED, SGD)])
    undivided = together(two_ranks.run(_undivided))
    assert divided.keys() == undivided.keys()
    assert divided != undivided


def _reordered(rank: int, world: int) -> Any:
    model = sharded(Model(), MIXED, FUSED)
    shuffled = []
    for number, step in enumerate(batches(4, rank, world)):
        features, samples = step.features.permute([[2, 0, 1], [0, 1, 2]][number % 2]), step.features.stride()
        if number % 3 == rank:  # a feature that no table reads, on one rank alone
            unread = KeyedJaggedTensor(["x"], torch.arange(samples), lengths=torch.ones(samples, dtype=torch.int64))
            features = KeyedJaggedTensor.concat([unread, features])
        shuffled.append(Batch(features, step.target))
    train(model, iter(shuffled))
    return rows_of(model)


@pytest.mark.usefixtures("one_rank")
def test_features_are_found_by_name_in_every_batch(two_ranks):
    want = sharded(Model(), MIXED, FUSED)
    train(want, batches(4))
    assert_same_rows(together(two_ranks.run(_reordered)), rows_of(want))


def _resumed(rank: int, world: int, folder: str) -> Any:
    tiers = TierBudgets(host_bytes="256KiB", ssd_bytes="32MiB", ssd_dir=folder)
    model = sharded(Model(Settings(tiers=tiers)), MIXED, FUSED)
    steps = list(batches(4, rank, world))
    train(model, iter(steps[:2]))
    flush(model)
    rows = rows_of(model)
    dense = {name: value for name, value in model.state_dict().items() if "linear" in name}
    train(model, iter(steps[2:]))
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table._native_table.close()  # like a kill, without a flush
    del model
    again = Model(Settings(tiers=TierBudgets(host_bytes="256KiB", ssd_bytes="32MiB", ssd_dir=folder, reopen="resume")))
    again = sharded(again, MIXED, FUSED)
    again.load_state_dict({**again.state_dict(), **dense})
    return rows, rows_of(again), sorted(str(path.relative_to(folder)) for path in Path(folder).glob("*/*/*"))


def test_two_ranks_resume_from_the_state_that_they_flushed_together(two_ranks):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        results = two_ranks.run(_resumed, folder)
    for rows, again, _ in results:
        assert rows
        assert again == rows
    files = set(results[0][2]) | set(results[1][2])
    assert {"bags/tb/0-of-2", "bags/tb/1-of-2"} <= files


def test_a_sharded_model_is_not_copied_and_prints_its_shards(two_ranks):
    for refused, shown in two_ranks.run(_copied):
        assert "cannot be copied" in refused
        assert "'ta', embedding_dim=16, optimizer=RowWiseAdagrad(lr=0.02)" in shown


def _copied(_rank: int, _world: int) -> tuple[str, str]:
    model = sharded(Model(), ROW_WISE, {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02})
    with pytest.raises(StateError) as refused:
        copy.deepcopy(model)
    return str(refused.value), repr(model)


@pytest.mark.usefixtures("one_rank")
def test_what_is_not_supported_is_refused_with_its_reason():
    sharder = EmbCacheEmbeddingBagCollectionSharder(FUSED)
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    for kind in ("column_wise", "data_parallel", "table_row_wise", "table_column_wise", "grid_shard"):
        module = Model().bags
        plan = construct_module_sharding_plan(
            module, {"ta": table_wise(rank=0), "tb": row_wise()}, sharder, local_size=1, world_size=1, device_type="cpu"
        )
        plan["ta"].sharding_type = kind
        with pytest.raises(UnsupportedError, match=kind):
            sharder.shard(module, plan, env, CPU)
    with pytest.raises(UnsupportedError, match="use_index_dedup"):
        EmbCacheEmbeddingCollectionSharder(use_index_dedup=True)
    with pytest.raises(UnsupportedError, match="max_gradient=1.0"):
        EmbCacheEmbeddingBagCollectionSharder({**FUSED, "max_gradient": 1.0})
    with pytest.raises(UnsupportedError, match="optimizer=lars_sgd"):
        EmbCacheEmbeddingCollectionSharder({"optimizer": EmbOptimType.LARS_SGD})
    model = sharded(Model(), ROW_WISE, FUSED)
    with pytest.raises(UnsupportedError, match="update_shards"):
        model.module.bags.update_shards({}, env, CPU)
    with pytest.raises(UnsupportedError, match="live module"):
        sharder.reshard(model.module.bags, {}, env, CPU)
    varying = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [2], [1]],
    )
    with pytest.raises(UnsupportedError, match="varies by feature"):
        model.module.bags(varying)


@pytest.mark.usefixtures("one_rank")
def test_a_plan_that_leaves_a_table_out_is_refused():
    module = Model().bags
    sharder = EmbCacheEmbeddingBagCollectionSharder(FUSED)
    plan = construct_module_sharding_plan(
        module, {"ta": table_wise(rank=0), "tb": row_wise()}, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    del plan["tb"]
    with pytest.raises(ConfigError, match=r"\['tb'\]"):
        sharder.shard(module, plan, ShardingEnv.from_process_group(torch.distributed.group.WORLD), CPU)


@pytest.mark.usefixtures("one_rank")
def test_an_explicit_plan_is_followed():
    model = Model()
    sharders = [EmbCacheEmbeddingBagCollectionSharder(FUSED), EmbCacheEmbeddingCollectionSharder(FUSED)]
    where = {"local_size": 1, "world_size": 1, "device_type": "cpu"}
    bags = construct_module_sharding_plan(
        model.bags, {"ta": table_wise(rank=0), "tb": row_wise()}, sharders[0], **where
    )
    sequences = construct_module_sharding_plan(model.sequences, {"tc": table_wise(rank=0)}, sharders[1], **where)
    plan = ShardingPlan({"bags": bags, "sequences": sequences})
    made = DistributedModelParallel(model, device=CPU, sharders=sharders, plan=plan)
    assert list(cache_modules(made)) == ["bags", "sequences"]
    assert made.module.bags._sharding_types == ["table_wise", "row_wise"]
    train(made, batches(2))
    assert rows_of(made)


def _too_few_buckets(rank: int, world: int) -> str:
    del rank, world
    with pytest.raises((ConfigError, ValueError, RuntimeError)) as caught:
        sharded(Model(Settings(buckets=1)), ROW_WISE, FUSED)
    return str(caught.value)


def test_fewer_buckets_than_ranks_are_refused(two_ranks):
    for message in two_ranks.run(_too_few_buckets):
        assert "total_num_buckets" in message
