"""Settings that users made in TorchRec's objects are kept, or rejected by name."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import BoundsCheckMode, CacheParams, ShardingEnv
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.types import DataType

from processes import process_group
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingCollectionSharder,
    cache_modules,
)
from torchrec_embcache.exceptions import UnsupportedError
from torchrec_models import (
    CPU,
    MIXED,
    ROW_WISE,
    TABLE_WISE,
    TIERS,
    Model,
    Settings,
    batches,
    pinned_rows,
    rows_of,
    sharded,
    train,
)

FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-6}


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    with process_group(0, 1, str(tmp_path / "store")):
        yield


# ---- frozen weights and modes


def test_a_torchrec_module_that_is_frozen_or_in_eval_mode_stays_so():
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])
    theirs = EmbeddingBagCollection([config])
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    for frozen, training in ((False, True), (True, True), (False, False)):
        theirs.requires_grad_(not frozen).train(training)
        ours = EmbCacheEmbeddingBagCollection.from_torchrec(
            theirs, TIERS, optimizer=torch.optim.SGD(theirs.parameters(), lr=0.5)
        )
        before, pooled = ours.tables["t"].read_rows(range(10)).weights, ours(features).values()
        if pooled.requires_grad:
            pooled.sum().backward()
        assert pooled.requires_grad == (training and not frozen)
        assert torch.equal(ours.tables["t"].read_rows(range(10)).weights, before) == (frozen or not training)


def _frozen(rank: int, world: int, shardings: Any) -> Any:
    model = Model(Settings(replicated=True))
    apply_optimizer_in_backward(RowWiseAdagrad, model.table_parameters(), {"lr": 0.05, "eps": 1e-6})
    train(model, batches(2))
    model.bags.requires_grad_(False)
    model.sequences.eval()
    model = sharded(model, shardings)
    modules, before = cache_modules(model), rows_of(model)
    modes = [module.training for module in modules.values()]
    train(model, batches(2, rank, world))
    frozen = [weight.requires_grad for module in modules.values() for weight in module.weights().values()]
    still = rows_of(model) == before
    modules["bags"].requires_grad_(True)
    train(model, batches(2, rank, world))
    return modes, frozen, still, pinned_rows(model), rows_of(model) == before


@pytest.mark.parametrize("shardings", [ROW_WISE, TABLE_WISE, MIXED], ids=["row-wise", "table-wise", "mixed"])
def test_frozen_or_eval_module_stays_so_when_sharded(two_ranks, shardings):
    results = two_ranks.run(_frozen, shardings)
    for modes, frozen, still, pinned, _ in results:
        assert modes == [True, False]
        assert frozen == [False, False, True]
        assert still
        assert pinned == 0
    assert not all(thawed for *_, thawed in results)  # a rank may have no row


# ---- types, devices and initial values


@pytest.mark.parametrize(
    ("kind", "config"),
    [(EmbCacheEmbeddingBagCollection, EmbeddingBagConfig), (EmbCacheEmbeddingCollection, EmbeddingConfig)],
)
def test_a_collection_stays_in_its_type_and_on_its_device(kind, config):
    module = kind([config(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])], tiers=TIERS)
    for move, words in [(module.half, "float16"), (module.double, "float64"), (lambda: module.to("meta"), "meta")]:
        with pytest.raises(UnsupportedError, match=words):
            move()
    assert {(weight.dtype, weight.device.type) for weight in module.parameters()} == {(torch.float32, "cpu")}
    assert module.float().to("cpu") is module


@pytest.mark.parametrize(("low", "high"), [(5.0, 6.0), (-1.0, 0.0)])
@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_an_init_fn_of_uniform_numbers_is_followed(kind, low, high):
    made = partial(torch.nn.init.uniform_, a=low, b=high)
    config = kind(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"], init_fn=made)
    of = EmbCacheEmbeddingBagCollection if kind is EmbeddingBagConfig else EmbCacheEmbeddingCollection
    found = of([config], tiers=TIERS).tables["t"].read_rows(range(200)).weights
    assert low <= float(found.min()) < low + 0.1
    assert high - 0.1 < float(found.max()) <= high
    for other in (
        torch.nn.init.ones_,
        partial(torch.nn.init.normal_, std=0.1),
        partial(torch.nn.init.uniform_, generator=None),
    ):
        config = kind(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"], init_fn=other)
        with pytest.raises(UnsupportedError, match="init_fn="):
            of([config], tiers=TIERS)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_collection_stays_in_its_type_and_on_its_device():
    for module in cache_modules(sharded(Model(), MIXED, FUSED)).values():
        for move, words in [
            (module.half, "float16"),
            (module.double, "float64"),
            (lambda of=module: of.to("meta"), "meta"),
        ]:
            with pytest.raises(UnsupportedError, match=words):
                move()
        assert module.float().to("cpu") is module
        assert {weight.dtype for weight in module.parameters()} == {torch.float32}


# ---- plans


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"output_dtype": DataType.FP16}, "output_dtype="),
        ({"stochastic_rounding": True}, "stochastic_rounding=True"),
        ({"enforce_hbm": True}, "enforce_hbm=True"),
        ({"bounds_check_mode": BoundsCheckMode.FATAL}, "bounds_check_mode="),
        ({"cache_params": CacheParams(load_factor=0.2, reserved_memory=1.0)}, "cache_params.reserved_memory=1.0"),
        ({"cache_params": CacheParams(load_factor=0.2, precision=DataType.FP16)}, "cache_params.precision="),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_torchrec_kernel_settings_are_rejected_unchanged(kind, setting, words):
    model = Model()
    before = [module.tables for module in (model.bags, model.sequences)]
    sharders = [EmbCacheEmbeddingBagCollectionSharder(FUSED), EmbCacheEmbeddingCollectionSharder(FUSED)]
    constraints = {table: ParameterConstraints(sharding_types=[kind], **setting) for table in ("ta", "tb", "tc")}
    topology = Topology(world_size=1, local_world_size=1, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).collective_plan(
        model, sharders, torch.distributed.group.WORLD
    )
    with pytest.raises(UnsupportedError, match=words):
        DistributedModelParallel(model, device=CPU, sharders=sharders, plan=plan)
    assert [module.tables for module in (model.bags, model.sequences)] == before
    assert list(model.bags.tables) == ["ta", "tb"]


@pytest.mark.usefixtures("one_rank")
def test_kernel_settings_equivalent_to_ours_are_accepted():
    setting = {"output_dtype": DataType.FP32, "stochastic_rounding": False, "enforce_hbm": False}
    module, sharder = Model().bags, EmbCacheEmbeddingBagCollectionSharder(FUSED)
    plan = construct_module_sharding_plan(
        module, {"ta": table_wise(rank=0), "tb": row_wise()}, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    for param in plan.values():
        vars(param).update(setting, cache_params=CacheParams(load_factor=0.2))
    assert list(sharder.shard(module, plan, ShardingEnv.from_process_group(torch.distributed.group.WORLD), CPU).tables)
