"""`torch.compile`, `torch.fx` and `copy.deepcopy` of modules that are not sharded."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec import fx as trec_fx
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import Adam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tables import jagged, make_bag, random_batches, step
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    EvictedRows,
    TierBudgets,
    initializers,
    optimizers,
)
from torchrec_embcache.eviction import Policy, Ttl
from torchrec_embcache.exceptions import StateError

TIERS = TierBudgets(host_bytes="1MiB")
COMMON = {"num_embeddings": 1000, "embedding_dim": 4}


def bags(**settings) -> EmbCacheEmbeddingBagCollection:
    common = {**COMMON, "initializer": initializers.Uniform(-0.5, 0.5)}
    made = EmbCacheEmbeddingBagCollection(
        [
            EmbCacheEmbeddingBagConfig(name="t1", feature_names=["f1"], pooling=PoolingType.MEAN, **common),
            EmbCacheEmbeddingBagConfig(name="t2", feature_names=["f2"], **common),
        ],
        **{"tiers": TIERS, **settings},
    )
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    return made


def sequences() -> EmbCacheEmbeddingCollection:
    made = EmbCacheEmbeddingCollection(
        [EmbCacheEmbeddingConfig(name="t1", feature_names=["f1", "f2"], **COMMON)], tiers=TIERS
    )
    apply_optimizer_in_backward(Adam, made.parameters(), {"lr": 0.1})
    return made


class OverBags(nn.Module):
    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.collection = collection
        self.linear = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.collection(features).values())


class OverSequences(nn.Module):
    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.collection = collection
        self.linear = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.collection(features)
        return self.linear(torch.cat([rows["f1"].values(), rows["f2"].values()]))


def batch(number: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (6,), generator=generator)
    values = torch.randint(-5, 20, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["f1", "f2"], values, lengths=lengths)


def train(model: nn.Module, first: int = 0, count: int = 3) -> list[torch.Tensor]:
    outs = []
    for number in range(first, first + count):
        out = model(batch(number))
        out.square().sum().backward()
        outs.append(out.detach())
    return outs


def rows(collection) -> dict[str, dict[int, list[float]]]:
    """The weights, slots and metadata of every row, by table and id."""
    found = {}
    for name, table in collection.tables.items():
        for chunk in table.export():
            columns = [chunk.weights, *(slot.view(len(chunk), -1) for slot in chunk.slots.values())]
            meta = [getattr(chunk.metadata, field).double()[:, None] for field in ("count", "last_step", "score")]
            values = torch.cat([*(column.double() for column in columns), *meta], 1).tolist()
            found[name] = dict(zip(chunk.ids.tolist(), values, strict=True))
    return found


# ---- torch.compile


@pytest.mark.parametrize(("over", "make"), [(OverBags, bags), (OverSequences, sequences)])
def test_a_fresh_collection_compiles_and_trains_the_same_bits(over, make):
    plain, compiled = over(make()), over(make())
    outs = train(plain)
    runs = train(torch.compile(compiled, backend="eager"))
    assert all(torch.equal(one, other) for one, other in zip(outs, runs, strict=True))
    assert rows(compiled.collection) == rows(plain.collection) != {}


@pytest.mark.slow
def test_a_fresh_bag_compiles_and_trains_the_same_bits():
    with make_bag() as plain, make_bag() as compiled:
        run = torch.compile(compiled, backend="eager")
        for bags_of_ids in random_batches(3, 4, 20):
            out = step(plain, bags_of_ids)
            ids, offsets = jagged(bags_of_ids)
            again = run(ids, offsets)
            scale = torch.arange(1, again.numel() + 1, dtype=torch.float32).view_as(again) / again.numel()
            (again * scale + again * again).sum().backward()
            assert torch.equal(again.detach(), out)


# ---- torch.fx


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, trec_fx.symbolic_trace], ids=["torch", "torchrec"])
@pytest.mark.parametrize(("over", "make"), [(OverBags, bags), (OverSequences, sequences)])
def test_a_model_over_a_collection_is_traced_and_trains_the_same_bits(trace, over, make):
    plain, model = over(make()), over(make())
    traced = trace(model)
    assert "collection" in [node.target for node in traced.graph.nodes if node.op == "call_module"]
    for one, other in zip(train(plain), train(traced), strict=True):
        assert torch.equal(one, other)
    assert rows(model.collection) == rows(plain.collection) != {}


def test_torchrecs_own_collections_are_traced_by_the_same_tracer():
    # This is what the test above is compared with.
    config = {"name": "t1", "feature_names": ["f1", "f2"], **COMMON}
    for model in (
        OverBags(EmbeddingBagCollection([EmbeddingBagConfig(**config)])),
        OverSequences(EmbeddingCollection([EmbeddingConfig(**config)])),
    ):
        features = KeyedJaggedTensor(["f1", "f2"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 0, 1]))
        assert trec_fx.symbolic_trace(model)(features).shape[1] == 1


def test_a_collection_is_traced_by_itself():
    collection = bags()
    traced = torch.fx.symbolic_trace(collection)
    assert torch.equal(traced(batch(1)).values(), collection(batch(1)).values())


def test_an_embedding_and_a_bag_are_traced():
    embedding = EmbCacheEmbedding(name="e", embedding_dim=2, tiers=TIERS, optimizer=optimizers.SGD(lr=0.1))
    with make_bag() as bag, embedding:
        ids = torch.tensor([[1, 2], [3, 3]])
        for module in (bag, embedding):
            traced = torch.fx.symbolic_trace(nn.Sequential(module, nn.Flatten()))
            assert torch.equal(traced(ids), module(ids).flatten(1))


# ---- copy.deepcopy


@pytest.mark.parametrize("make", [bags, sequences])
@pytest.mark.parametrize("trained", [True, False])
def test_copied_collection_trains_alike_and_shares_nothing(make, trained):
    over = OverBags if make is bags else OverSequences
    model = over(make())
    if trained:
        train(model)
        model.collection.fused_optimizer.param_groups[0]["lr"] = 0.03  # as a scheduler would do
    copied = copy.deepcopy(model)
    before = rows(model.collection)
    assert rows(copied.collection) == before
    outs = train(copied, first=3)
    assert rows(model.collection) == before
    assert rows(copied.collection) != before
    assert all(torch.equal(one, other) for one, other in zip(train(model, first=3), outs, strict=True))
    assert rows(copied.collection) == rows(model.collection)


class Archive:
    """A hook with a lock, which cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.ids = threading.Lock(), []

    def write(self, told: EvictedRows) -> None:
        with self.lock:
            self.ids += [(told.table, row_id) for row_id in told.ids.tolist()]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig),
        (EmbCacheEmbeddingCollection, EmbCacheEmbeddingConfig),
    ],
)
def test_a_copied_collection_tells_the_hooks_of_the_first(kind, config):
    archive = Archive()
    policy = Policy([Ttl(steps=1)], every_steps=1)
    model = kind(
        [
            config(name="t1", feature_names=["f1"], eviction=policy, on_evict=archive.write, **COMMON),
            config(name="t2", feature_names=["f2"], eviction=policy, on_evict=archive.ids.append, **COMMON),
        ],
        tiers=TIERS,
    )
    apply_optimizer_in_backward(Adam, model.parameters(), {"lr": 0.1})
    copied = copy.deepcopy(nn.Sequential(model))[0]
    hooks = [config.on_evict for config in copied.table_configs()]
    assert hooks[0].__self__ is archive
    assert hooks[1].__self__ is archive.ids
    for ids in ([7, 8], [9, 10]):
        out = copied(KeyedJaggedTensor(["f1", "f2"], torch.tensor(ids), lengths=torch.tensor([1, 1])))
        values = out.values() if config is EmbCacheEmbeddingBagConfig else torch.cat([out[key].values() for key in out])
        values.sum().backward()
    copied.close()
    model.close()
    assert ("t1", 7) in archive.ids
    (told,) = [each for each in archive.ids if isinstance(each, EvictedRows)]
    assert (told.table, told.ids.tolist()) == ("t2", [8])


@pytest.mark.parametrize("device_bytes", [0, "4KiB"])
def test_a_copied_bag_trains_on_as_the_first(device_bytes):
    tiers = TierBudgets(device_bytes=device_bytes, host_bytes="1MiB")
    steps = random_batches(6, 4, 60)
    with make_bag(optimizer=optimizers.Adam(lr=0.1), tiers=tiers) as bag:
        for bags_of_ids in steps[:3]:
            step(bag, bags_of_ids)
        bag.optimizer.param_groups[0]["lr"] = 0.02
        copied = copy.deepcopy(bag)
        assert copied.optimizer.param_groups[0]["params"][0] is copied.weight is not bag.weight
        ids = torch.cat([chunk.ids for chunk in bag.export()])
        before = copied.read_rows(ids).weights
        outs = [step(bag, bags_of_ids) for bags_of_ids in steps[3:]]
        assert torch.equal(copied.read_rows(ids).weights, before)
        for bags_of_ids, out in zip(steps[3:], outs, strict=True):
            assert torch.equal(step(copied, bags_of_ids), out)
        assert torch.equal(copied.read_rows(ids).slots["exp_avg_sq"], bag.read_rows(ids).slots["exp_avg_sq"])


def test_torchs_averaged_model_keeps_a_copy():
    model = OverBags(bags())
    train(model)
    averaged = AveragedModel(model)
    kept = rows(model.collection)
    train(model, first=3)
    averaged.update_parameters(model)
    assert rows(averaged.module.collection) == kept


def test_tables_with_files_cannot_be_copied(tmp_path):
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="32MiB", ssd_dir=str(tmp_path))
    with make_bag(tiers=tiers) as bag, pytest.raises(StateError, match=r"SSD tier.*Saver\(rank\).load"):
        copy.deepcopy(bag)
    with bags(tiers=tiers) as collection, pytest.raises(StateError, match=r"SSD tier.*Saver\(rank\).load"):
        copy.deepcopy(collection)
