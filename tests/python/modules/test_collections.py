"""The collections without sharding: configs, outputs and training are those of TorchRec's, with budgets, and with errors for bad
input.
"""

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec import KeyedJaggedTensor as Kjt
from torchrec import optim as trec_optim
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.types import DataType

from collection_cases import TIERS, bag_tables, bags
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    EmbCacheWarning,
    RowMetadata,
    TierBudgets,
    cache_modules,
    flush,
    initializers,
)
from torchrec_embcache.exceptions import CapacityError, ConfigError, InputError, PathError, StateError, UnsupportedError
from torchrec_embcache.table.cache_table import CacheTable

FIELDS: dict[str, Any] = {"name": "t", "embedding_dim": 4, "num_embeddings": 10, "feature_names": ["f"]}


def features(weighted: bool = False, seed: int = 0) -> Kjt:
    """Features in another order than that of the tables, one that no table reads, empty bags and duplicate ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4, 5), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return Kjt(["c", "unread", "a", "b"], values, weights=weights, lengths=lengths.view(-1))


def rows(module: Any) -> dict[tuple[str, int], list[float]]:
    return {
        (name, id_): row
        for name, table in module.tables.items()
        for chunk in table.export()
        for id_, row in zip(chunk.ids.tolist(), chunk.weights.tolist(), strict=True)
    }


# ---- configs


@pytest.mark.parametrize("kind", [EmbCacheEmbeddingBagConfig, EmbCacheEmbeddingConfig])
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"name": ""}, ConfigError, "name=''"),
        ({"name": 7}, ConfigError, "name=7"),
        ({"name": "a.b"}, ConfigError, "dot"),
        ({"num_embeddings": 0}, ConfigError, "num_embeddings=0"),
        ({"num_embeddings": 1 << 63}, ConfigError, "num_embeddings="),
        ({"num_embeddings": 1.5}, ConfigError, "num_embeddings=1.5"),
        ({"embedding_dim": 0}, ConfigError, "embedding_dim=0"),
        ({"embedding_dim": 65_537}, ConfigError, "embedding_dim=65537"),
        ({"total_num_buckets": 0}, ConfigError, "total_num_buckets=0"),
        ({"feature_names": ["f", "f"]}, ConfigError, "names f twice"),
        ({"feature_names": ["f@t"]}, ConfigError, "feature_names"),
        ({"feature_names": "f"}, ConfigError, "feature_names='f'"),
        ({"initializer": "uniform"}, ConfigError, "initializer='uniform'"),
        ({"initializer": initializers.Constant(1), "weight_init_min": 0.0}, ConfigError, "contradict"),
        ({"weight_init_min": 1.0, "weight_init_max": 0.0}, ConfigError, "weight_init_min=1.0"),
        ({"tiers": "8GiB"}, ConfigError, "tiers='8GiB'"),
        ({"policy": "random"}, ConfigError, "policy='random'"),
        ({"on_full": "drop"}, ConfigError, "on_full='drop'"),
        ({"missing": "nan"}, ConfigError, "missing='nan'"),
        ({"data_type": DataType.FP16}, UnsupportedError, "float32"),
        ({"init_fn": torch.nn.init.ones_}, UnsupportedError, "initializer="),
        ({"need_pos": True}, UnsupportedError, "need_pos=True"),
        ({"use_virtual_table": True}, UnsupportedError, "use_virtual_table=True"),
        ({"num_embeddings_post_pruning": 5}, UnsupportedError, "num_embeddings_post_pruning=5"),
        ({"enable_embedding_update": True}, UnsupportedError, "import_rows"),
    ],
)
def test_a_config_out_of_range_is_refused_naming_table_field_and_value(kind, changes, error, words):
    with pytest.raises(error, match=words) as caught:
        kind(**{**FIELDS, **changes})
    if "name" not in changes:
        assert "'t'" in str(caught.value)


def test_limits_are_wider_than_recsdks():
    for dim, count in ((8, 1), (4096, 10**9), (1, 1), (65_536, 2**63 - 1)):
        module = bags([EmbCacheEmbeddingBagConfig(**{**FIELDS, "embedding_dim": dim, "num_embeddings": count})])
        assert module.tables["t"].dim == dim


def test_rows_are_born_as_torchrec_initialises_by_default():
    config = EmbCacheEmbeddingBagConfig(**{**FIELDS, "num_embeddings": 100, "embedding_dim": 1000})
    born = bags([config]).tables["t"].read_rows(torch.tensor([5])).weights
    bound = math.sqrt(1 / 100)
    assert -bound <= born.min() < -0.9 * bound
    assert 0.9 * bound < born.max() <= bound
    other = dataclasses.replace(config, weight_init_min=2.0, weight_init_max=3.0)
    born = bags([other]).tables["t"].read_rows(torch.tensor([5])).weights
    assert 2 <= born.min() < born.max() <= 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bags([]), "tables="),
        (lambda: bags(["t"]), "tables holds 't'"),
        (lambda: bags([EmbeddingConfig(**FIELDS)]), "EmbCacheEmbeddingBagConfig"),
        (lambda: bags([EmbeddingBagConfig(**FIELDS), EmbeddingBagConfig(**FIELDS)]), "names 't' twice"),
        (lambda: bags([EmbeddingBagConfig(**FIELDS)], tiers=None), "'t' has no budgets"),
        (lambda: bags(tiers="1MiB"), "tiers='1MiB'"),
        (lambda: bags(seed=-1), "seed=-1"),
        (lambda: bags(name=""), "name=''"),
        (
            lambda: bags(tiers=TierBudgets(host_bytes=64)),
            "TierBudgets.host_bytes=64 of the module is too small for its 2 tables",
        ),
        (
            lambda: EmbCacheEmbeddingCollection(
                [
                    EmbeddingConfig(**FIELDS),
                    EmbeddingConfig(**{**FIELDS, "name": "u", "embedding_dim": 8, "feature_names": ["g"]}),
                ],
                tiers=TIERS,
            ),
            "one width",
        ),
    ],
)
def test_a_collection_that_makes_no_sense_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_missing_ssd_directory_is_refused_when_the_module_is_made(tmp_path):
    with pytest.raises(PathError, match="nowhere"):
        bags(tiers=TierBudgets(host_bytes="1MiB", ssd_bytes="1MiB", ssd_dir=tmp_path / "nowhere"))
    assert not list(tmp_path.iterdir())


def test_weighted_means_and_mixed_missing_are_rejected():
    with pytest.raises(UnsupportedError, match="MEAN"):
        bags(is_weighted=True)
    tables = [
        EmbCacheEmbeddingBagConfig(**{**FIELDS, "name": name, "missing": missing})
        for name, missing in (("t", "zeros"), ("u", "initial"))
    ]
    with pytest.raises(UnsupportedError, match="missing"):
        bags(tables)


# ---- outputs


def same_weights(theirs: Any) -> Any:
    kind = EmbCacheEmbeddingBagCollection if isinstance(theirs, EmbeddingBagCollection) else EmbCacheEmbeddingCollection
    return kind.from_torchrec(theirs, TIERS)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_bags_are_torchrecs(weighted, dtype):
    tables = bag_tables()
    if weighted:
        tables[1].pooling = PoolingType.SUM
    theirs = EmbeddingBagCollection(tables, is_weighted=weighted)
    ours = same_weights(theirs).eval()
    batch = features(weighted)
    want = theirs(batch)
    got = ours(Kjt(batch.keys(), batch.values().to(dtype), batch.weights_or_none(), batch.lengths()))
    assert got.keys() == want.keys() == ["a", "b@t1", "b@t2", "c"]
    assert got.length_per_key() == want.length_per_key()
    torch.testing.assert_close(got.values(), want.values())
    assert ours.is_weighted() == weighted


@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences_are_torchrecs(need_indices):
    tables = [
        EmbeddingConfig(name="t1", embedding_dim=4, num_embeddings=20, feature_names=["a", "b"]),
        EmbeddingConfig(name="t2", embedding_dim=4, num_embeddings=30, feature_names=["b", "c"]),
    ]
    theirs = EmbeddingCollection(tables, need_indices=need_indices)
    want, got = theirs(features()), same_weights(theirs).eval()(features())
    assert list(got) == list(want) == ["a", "b@t1", "b@t2", "c"]
    for name, part in want.items():
        assert torch.equal(got[name].values(), part.values())
        assert torch.equal(got[name].lengths(), part.lengths())
        assert (got[name].weights_or_none() is None) == (not need_indices)
        if need_indices:
            assert torch.equal(got[name].weights(), part.weights())


def test_an_empty_batch_and_one_without_ids_give_their_shapes():
    module = bags().eval()
    for samples in (0, 3):
        batch = Kjt(
            ["a", "b", "c"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(3 * samples, dtype=torch.int64)
        )
        assert module(batch).values().shape == (samples, 6 + 6 + 4 + 4)


def test_any_64_bit_id_has_a_row():
    module = bags()
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    ids = [-1, -(2**63), 2**63 - 1]
    batch = Kjt(["a", "b", "c"], torch.tensor(ids), lengths=torch.tensor([3, 0, 0]))
    module(batch).values().sum().backward()
    assert sorted(id_ for _, id_ in rows(module)) == sorted(ids)


# ---- training


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        (torch.optim.SGD, {"lr": 0.5}),
        (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
        (trec_optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}),
    ],
)
def test_training_is_torchrecs(optimizer, kwargs):
    torch.manual_seed(0)
    theirs = EmbeddingBagCollection(bag_tables())
    ours = same_weights(theirs)
    apply_optimizer_in_backward(optimizer, ours.parameters(), kwargs)
    trained = optimizer(theirs.parameters(), **kwargs)
    for step in range(4):
        trained.zero_grad()
        theirs(features(seed=step)).values().square().mean().backward()
        trained.step()
        ours(features(seed=step)).values().square().mean().backward()
    for name, table in ours.tables.items():
        want = theirs.embedding_bags[name].weight
        torch.testing.assert_close(table.read_rows(torch.arange(len(want))).weights, want.detach())


def test_the_gradient_of_the_weights_is_torchrecs():
    tables = bag_tables()
    tables[1].pooling = PoolingType.SUM
    theirs = EmbeddingBagCollection(tables, is_weighted=True)
    ours = same_weights(theirs)
    apply_optimizer_in_backward(torch.optim.SGD, ours.parameters(), {"lr": 0.5})
    batch = features(weighted=True)
    grads = []
    for module in (theirs, ours):
        weights = batch.weights().clone().requires_grad_()
        module(Kjt(batch.keys(), batch.values(), weights, batch.lengths())).values().square().sum().backward()
        grads.append(weights.grad)
    torch.testing.assert_close(*grads)


def test_training_without_an_optimizer_names_both_ways_to_set_one():
    module = bags()
    module.eval()(features())
    with pytest.raises(StateError, match="apply_optimizer_in_backward.*fused_params"):
        module.train()(features())


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (trec_optim.Adam, "adamw"),
        (trec_optim.PartialRowWiseAdam, "partial_rowwise_adam"),
        (trec_optim.LAMB, "lamb"),
    ],
)
def test_an_optimizer_may_be_set_after_rows_were_read_or_imported(optimizer, kind):
    theirs = EmbeddingBagCollection(bag_tables())
    ours = same_weights(theirs)
    before = rows(ours)
    assert len(before) == 50
    ours.eval()(features())
    apply_optimizer_in_backward(optimizer, ours.parameters(), {"lr": 0.1})
    ours.train()(features()).values().sum().backward()
    after = rows(ours)
    assert after.keys() == before.keys()
    read = {("t1", id_) for id_ in features()["a"].values().tolist() + features()["b"].values().tolist()}
    assert all((after[key] != before[key]) == (key in read) for key in before if key[0] == "t1")
    assert ours.tables["t1"].optimizer.kind == kind


def test_optimizer_with_unfit_slots_keeps_imported_rows():
    module = bags(tiers=TierBudgets(host_bytes="256KiB"))
    table = module.tables["t1"]
    known = RowMetadata(*(torch.arange(1700) for _ in range(2)), torch.rand(1700), torch.ones(1700, dtype=torch.int64))
    table.import_rows(torch.arange(1700), torch.rand(1700, 6), metadata=known)
    table._native_table.set_step(5)
    before = table.export().to_numpy()
    apply_optimizer_in_backward(trec_optim.Adam, module.parameters(), {"lr": 0.1})
    for _ in range(2):  # the second time too: rows that were lost would be born anew without a word
        with pytest.raises(CapacityError, match="host_bytes"):
            module(features())
        after = table.export().to_numpy()
        order, was = np.argsort(after["ids"]), np.argsort(before["ids"])
        assert all(np.array_equal(after[name][order], before[name][was]) for name in before)
        assert after.keys() == before.keys()
        assert table.step() == 5
        assert table.optimizer is None


def test_rows_lost_after_a_failed_optimizer_poison_the_table(monkeypatch):
    module = bags()
    table = module.tables["t1"]
    table.import_rows(torch.arange(10), torch.rand(10, 6))
    apply_optimizer_in_backward(trec_optim.Adam, module.parameters(), {"lr": 0.1})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CacheTable, "import_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            module(features())
    for use in (lambda: module(features()), table.export):
        with pytest.raises(StateError, match="nor its rows put back: load them"):
            use()


def test_evaluation_no_grad_and_frozen_tables_change_nothing():
    module = bags()
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    module.eval()
    assert not module(features()).values().requires_grad
    module.train()
    with torch.no_grad():
        module(features())
    for param in module.parameters():
        param.requires_grad_(False)
    assert not module(features()).values().requires_grad
    assert not rows(module)
    next(module.parameters()).requires_grad_(True)
    with pytest.raises(UnsupportedError, match="freezing some"):
        module(features())


def test_missing_ids_read_zeros_on_demand():
    module = bags([EmbCacheEmbeddingBagConfig(**FIELDS, missing="zeros", initializer=initializers.Constant(1.0))])
    batch = Kjt(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
    assert module.eval()(batch).values().tolist() == [[0.0] * 4]


@pytest.mark.parametrize("handle", ["fused_optimizer", "in_backward"])
def test_a_scheduler_reaches_the_next_backward(handle):
    module = bags()
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    module(features()).values().sum().backward()
    moved = rows(module)
    if handle == "fused_optimizer":
        schedulers = [StepLR(module.fused_optimizer, 1, gamma=0.0)]
    else:
        schedulers = [StepLR(param._in_backward_optimizers[0], 1, gamma=0.0) for param in module.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch wants a step() before the scheduler's
        for scheduler in schedulers:
            scheduler.step()
    module(features()).values().sum().backward()
    assert rows(module) == moved


# ---- bad batches


def kjt(
    values: Tensor | None = None, lengths: Tensor | None = None, weights: Tensor | None = None, keys: str = "abc"
) -> Kjt:
    return Kjt(
        list(keys),
        torch.tensor([1, 2, 3]) if values is None else values,
        weights=weights,
        lengths=torch.tensor([1] * len(keys)) if lengths is None else lengths,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: torch.tensor([1]), "give a KeyedJaggedTensor"),
        (lambda w: kjt(keys="abx", weights=w), r"lacks \['c'\]"),
        (lambda w: kjt(torch.tensor([1.0, 2.0, 3.0]), weights=w), "values have dtype torch.float32"),
        (lambda w: kjt(torch.tensor([1, 2, 3], dtype=torch.int16), weights=w), "dtype torch.int16"),
        (lambda w: kjt(lengths=torch.tensor([1, 1, 2]), weights=w), "lengths sum to 4"),
        (lambda w: kjt(lengths=torch.tensor([1, 3, -1]), weights=w), "lengths hold -1"),
        (
            lambda w: Kjt(list("abc"), torch.tensor([1, 2, 3]), w, offsets=torch.tensor([1, 2, 3, 4])),
            "offsets begin with 1",
        ),
        (
            lambda w: Kjt(list("abc"), torch.tensor([1, 2, 3]), w, lengths=torch.ones(3).long(), stride=2),
            "a stride of 2",
        ),
        (lambda w: Kjt(list("abc"), torch.tensor([1, 2, 3]), w), "neither lengths nor offsets"),
        (lambda w: kjt(torch.ones(3, dtype=torch.int64, device="meta"), weights=w), "values is on the device meta"),
        (lambda w: kjt(weights=torch.ones(3) if w is None else None), "weight"),
        (lambda _: kjt(weights=torch.ones(3, dtype=torch.float64)), "weight"),
        (lambda _: kjt(weights=torch.ones(2)), "weight"),
    ],
)
def test_a_bad_batch_is_refused_naming_module_and_field(weighted, make, words):
    tables = bag_tables()
    tables[1].pooling = PoolingType.SUM
    module = bags(tables, is_weighted=weighted, name="shop")
    module.eval()
    module(kjt(weights=torch.ones(3) if weighted else None))
    with pytest.raises(InputError, match=words) as caught:
        module(make(torch.ones(3) if weighted else None))
    assert "EmbCacheEmbeddingBagCollection 'shop'" in str(caught.value)


def test_variable_batch_size_per_feature_is_rejected():
    batch = Kjt(
        ["a", "b", "c"],
        torch.tensor([1, 2, 3, 4]),
        lengths=torch.ones(4, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2], [1]],
    )
    with pytest.raises(UnsupportedError, match="varies by feature"):
        bags().eval()(batch)


# ---- whole modules


def test_state_dict_has_dense_keys_and_warns_once_about_rows():
    module = bags()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = module.state_dict()
    assert state.pop("_extra_state").dtype == torch.uint8
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "embedding_bags.t1.weight": (0, 6),
        "embedding_bags.t2.weight": (0, 4),
    }
    module.tables["t1"].import_rows(torch.tensor([1]), torch.zeros(1, 6))
    with pytest.warns(EmbCacheWarning, match=r"'t1' \(1\).*Saver"):
        module.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load_state_dict(module.state_dict())


@pytest.mark.parametrize("kind", [trec_optim.Adam, trec_optim.PartialRowWiseAdam])
def test_fused_optimizer_names_slots_as_fbgemm_does(kind):
    module = bags()
    apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
    optimizer = module.fused_optimizer
    state = optimizer.state_dict()["state"]
    assert {name: sorted(slots) for name, slots in state.items()} == {
        "embedding_bags.t1.weight": ["t1.momentum1", "t1.momentum2"],
        "embedding_bags.t2.weight": ["t2.momentum1", "t2.momentum2"],
    }
    of_a_row = kind is trec_optim.PartialRowWiseAdam
    assert state["embedding_bags.t1.weight"]["t1.momentum1"].shape == (0, 6)
    assert state["embedding_bags.t1.weight"]["t1.momentum2"].shape == ((0,) if of_a_row else (0, 6))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.save_param_groups(True)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.7
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_a_model_of_several_modules_is_found_and_flushed(tmp_path):
    tmp_path.chmod(0o700)
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="16MiB", ssd_dir=tmp_path)
    tables = [EmbeddingConfig(**FIELDS)]
    model = nn.ModuleDict(
        {
            "bags": bags(tiers=tiers, name="one"),
            "deep": nn.Sequential(EmbCacheEmbeddingCollection(tables, tiers=tiers, name="two")),
        }
    )
    assert list(cache_modules(model)) == ["bags", "deep.0"]
    model["bags"].tables["t1"].import_rows(torch.tensor([7]), torch.ones(1, 6))
    flush(model)
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table._native_table.close()  # like a kill, without a flush
    again = bags(tiers=dataclasses.replace(tiers, reopen="resume"), name="one")
    assert rows(again) == {("t1", 7): [1.0] * 6}
    again.close()


def test_a_trained_torchrec_module_must_match_the_tables_given_for_it():
    theirs = EmbeddingBagCollection(bag_tables())
    tables = [
        EmbCacheEmbeddingBagConfig(
            name=table.name,
            embedding_dim=table.embedding_dim,
            num_embeddings=10**9,
            feature_names=table.feature_names,
            pooling=table.pooling,
            policy="lru",
        )
        for table in bag_tables()
    ]
    ours = EmbCacheEmbeddingBagCollection.from_torchrec(theirs, TIERS, tables=tables)
    assert ours.tables["t2"].policy == "lru"
    assert len(rows(ours)) == 50
    with pytest.raises(ConfigError, match="do not match"):
        EmbCacheEmbeddingBagCollection.from_torchrec(theirs, TIERS, tables=tables[:1])
    half = EmbeddingBagCollection([EmbeddingBagConfig(**FIELDS, data_type=DataType.FP16)])
    with pytest.raises(UnsupportedError, match="float32"):
        EmbCacheEmbeddingBagCollection.from_torchrec(half, TIERS)


def test_a_closed_module_says_so():
    with bags() as module:
        module.eval()(features())
    with pytest.raises(StateError, match="closed"):
        module(features())
