"""Import of rows trained elsewhere: of TorchRec's modules with their optimizers, or by id from any arrays."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrec
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec import KeyedJaggedTensor as Kjt

from collection_cases import TIERS, bag_tables
from tables import ssd_tiers
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingCollection,
    TierBudgets,
    optimizers,
)
from torchrec_embcache._ssd import autoflush
from torchrec_embcache.exceptions import CapacityError, ConfigError, InputError, StorageError, UnsupportedError
from torchrec_embcache.modules._tables import ShardPlacement
from torchrec_embcache.table.cache_table import CacheTable

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-7}),
    "rowwise": (torchrec.optim.RowWiseAdagrad, {"lr": 0.05}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.9)}),
    "adam_decay": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.5}),
    "adam_decoupled": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.5, "decoupled_weight_decay": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.5}),
    "sgd_decay": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.5}),
    "adagrad_decay": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.5}),
    "rowwise_decay": (torchrec.optim.RowWiseAdagrad, {"lr": 0.05, "weight_decay": 0.5}),
}


def batch(seed: int) -> Kjt:
    """Every id of every table, once or more. Torch's dense optimizers train rows that are in no batch, and ours do not."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.cat([torch.randperm(20, generator=generator) for _ in "abc"])
    return Kjt.from_lengths_sync(["a", "b", "c"], values, torch.full((30,), 2))


def trained(optimizer: str, in_backward: bool) -> tuple[EmbeddingBagCollection, Any]:
    """TorchRec's collection after three steps, and its optimizer."""
    torch.manual_seed(3)
    tables = bag_tables()
    for table in tables:
        table.num_embeddings = 20
    collection = EmbeddingBagCollection(tables)
    kind, numbers = OPTIMIZERS[optimizer]
    if in_backward:
        apply_optimizer_in_backward(kind, collection.parameters(), numbers)
        by = None
    else:
        by = kind(collection.parameters(), **numbers)
    for seed in range(3):
        step(collection, seed, by)
    return collection, by


def step(collection: Any, seed: int, by: Any = None) -> None:
    collection(batch(seed)).values().square().sum().backward()
    if by is not None:
        by.step()
        by.zero_grad()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_torchrec_collection_trains_on_here_as_it_would_have_there(optimizer: str, in_backward: bool) -> None:
    theirs, by = trained(optimizer, in_backward)
    ours = EmbCacheEmbeddingBagCollection.from_torchrec(theirs, TIERS, optimizer="in_backward" if in_backward else by)
    for seed in (3, 4):
        step(theirs, seed, by)
        step(ours, seed)
    for name, table in ours.tables.items():
        rows = table.read_rows(torch.arange(20))
        torch.testing.assert_close(rows.weights, theirs.embedding_bags[name].weight.detach(), rtol=2e-5, atol=2e-6)
        assert table.step() == (5 if not optimizer.startswith("sgd") else 2)
    group = ours.fused_optimizer.param_groups[0]
    assert group["lr"] == 0.05


def test_sequences_come_over_with_their_slots_too() -> None:
    theirs = EmbeddingCollection(
        tables=[EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=70_000, feature_names=["f"])]
    )
    by = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    features = Kjt.from_lengths_sync(["f"], torch.tensor([0, 69_999, 65_536]), torch.ones(3, dtype=torch.int64))
    theirs(features)["f"].values().sum().backward()
    by.step()
    ours = EmbCacheEmbeddingCollection.from_torchrec(theirs, TierBudgets(host_bytes="16MiB"), optimizer=by)
    rows = ours.tables["t"].read_rows([0, 5, 65_536, 69_999])
    state = by.state[theirs.embeddings["t"].weight]["sum"]
    assert torch.equal(rows.slots["sum"], state[[0, 5, 65_536, 69_999]])
    assert rows.slots["sum"].any(1).tolist() == [True, False, True, True]
    assert len(ours.tables["t"]) == 70_000


def test_an_optimizer_that_did_not_train_the_collection_is_refused() -> None:
    theirs, by = trained("adagrad", in_backward=False)
    take = EmbCacheEmbeddingBagCollection.from_torchrec
    with pytest.raises(ConfigError, match="the weight has 0 of them"):
        take(theirs, TIERS, optimizer="in_backward")
    with pytest.raises(ConfigError, match="give the torch optimizer that trained"):
        take(theirs, TIERS, optimizer="adagrad")  # type: ignore[arg-type]
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigError, match="does not have the weights"):
        take(theirs, TIERS, optimizer=other)
    with pytest.raises(UnsupportedError, match="momentum=0.9"):
        take(theirs, TIERS, optimizer=torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9))
    by.state[theirs.embedding_bags["t1"].weight]["sum"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"'sum' of Adagrad is \[3\]"):
        take(theirs, TIERS, optimizer=by)


def test_collection_that_fails_to_convert_is_closed_unpublished(tmp_path: Path) -> None:
    theirs, _ = trained("adagrad", in_backward=False)
    second = theirs.embedding_bags["t2"].weight
    second.data = second.data.double()
    tiers = ssd_tiers(tmp_path, host_bytes="256KiB", ssd_bytes="256MiB")
    take = EmbCacheEmbeddingBagCollection.from_torchrec
    with pytest.raises(UnsupportedError, match="'t2' has torch.float64") as kept:
        take(theirs, tiers)
    assert not list(tmp_path.rglob("*.state"))
    second.data = second.data.float()
    with take(theirs, tiers) as ours:  # though somebody keeps the error
        assert [len(table) for table in ours.tables.values()] == [20, 20]
        assert kept.tb is not None


def test_table_that_fails_to_close_leaves_no_other_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, _ = trained("adagrad", in_backward=False)
    theirs.embedding_bags["t2"].weight.data = theirs.embedding_bags["t2"].weight.data.double()
    close = CacheTable.close

    def refuse(table: CacheTable) -> None:
        close(table)
        if table.name == "t1":
            raise StorageError("t1 cannot be closed")

    with monkeypatch.context() as patch:
        patch.setattr(CacheTable, "close", refuse)
        with pytest.raises(UnsupportedError, match="'t2' has torch.float64") as kept:
            EmbCacheEmbeddingBagCollection.from_torchrec(
                theirs, ssd_tiers(tmp_path, host_bytes="256KiB", ssd_bytes="256MiB")
            )
    assert kept.value.__notes__ == ["closing the tables failed too: t1 cannot be closed"]
    assert not autoflush.open_tables()


def interrupted(_: CacheTable) -> None:
    raise KeyboardInterrupt


def test_interrupted_close_after_an_error_never_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the close of the tables leaves none that a later flush writes."""
    theirs = EmbeddingBagCollection(
        [EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=20, feature_names=[name]) for name in "abc"]
    )
    theirs.embedding_bags["c"].weight.data = theirs.embedding_bags["c"].weight.data.double()
    with monkeypatch.context() as patch:
        patch.setattr(CacheTable, "close", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            EmbCacheEmbeddingBagCollection.from_torchrec(
                theirs, ssd_tiers(tmp_path, host_bytes="256KiB", ssd_bytes="256MiB")
            )
        left = [table for table in autoflush.open_tables() if isinstance(table, CacheTable)]
        assert sorted(table.name for table in left) == ["a", "b"]
        assert all(table._unusable for table in left)
    for table in left:
        table.close()
    assert not list(tmp_path.rglob("*.state"))
    assert kept.tb is not None  # the error kept the tables until here: where they are dropped, they are closed


def test_interrupted_close_after_failed_sharding_never_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = ssd_tiers(tmp_path, host_bytes="256KiB", ssd_bytes="256MiB")
    ours = EmbCacheEmbeddingBagCollection(bag_tables(), tiers=tiers)
    whole = list(ours.tables.values())
    for table in whole:
        table.import_rows(np.arange(20), np.ones((20, table.dim), np.float32))
    with monkeypatch.context() as patch:
        imported = CacheTable.import_rows

        def fail_in_the_second(table: CacheTable, *rows: Any) -> None:
            imported(table, *rows)
            if table.name == "t2":
                patch.setattr(CacheTable, "close", interrupted)
                raise StorageError("t2 cannot be written")

        patch.setattr(CacheTable, "import_rows", fail_in_the_second)
        with pytest.raises(KeyboardInterrupt) as kept:
            ours.shard_tables(
                {name: ShardPlacement(0, 2, is_sharded=True) for name in ("t1", "t2")}, None, torch.device("cpu")
            )
        left = [table for table in autoflush.open_tables() if isinstance(table, CacheTable) and table not in whole]
        assert sorted(table.name for table in left) == ["t1", "t2"]
        assert all(table._unusable for table in left)
        assert not any(table._unusable for table in whole)
    for table in (*left, *whole):
        table.close()
    assert kept.tb is not None


# ---- by id


def test_pretrained_rows_are_read_frozen_as_torchs_are() -> None:
    vectors = np.random.default_rng(0).random((3, 4))
    module = EmbCacheEmbedding.from_pretrained(
        [7, -2, 1 << 40], vectors, name="item", tiers=TierBudgets(host_bytes="1MiB")
    )
    theirs = torch.nn.Embedding.from_pretrained(torch.from_numpy(vectors).float())
    assert torch.equal(module(torch.tensor([-2, 7])), theirs(torch.tensor([1, 0])))
    assert not module.weight.requires_grad
    assert len(module) == 3
    module(torch.tensor([5]))
    assert len(module) == 3


def test_pretrained_rows_train_on_with_an_optimizer(tmp_path: Any) -> None:
    tiers = ssd_tiers(tmp_path, host_bytes="2KiB")
    with EmbCacheEmbeddingBag.from_pretrained(
        torch.arange(100),
        torch.ones(100, 4),
        name="item",
        tiers=tiers,
        optimizer=optimizers.SGD(lr=0.5),
        freeze=False,
        mode="sum",
    ) as bag:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bag(torch.tensor([[1, 1]])).sum().backward()
        assert bag.read_rows([0, 1]).weights.tolist() == [[1.0] * 4, [0.0] * 4]


def test_a_pretrained_table_that_cannot_be_made_says_why_and_is_closed(tmp_path: Any) -> None:
    make = EmbCacheEmbedding.from_pretrained
    tiers = TierBudgets(host_bytes="1MiB")
    with pytest.raises(InputError, match=r"from_pretrained\(ids, weights, \.\.\.\)"):
        make(torch.ones(3, 4), name="item", tiers=tiers)
    with pytest.raises(ConfigError, match="freeze=False without an optimizer"):
        make([1], [[1.0]], name="item", tiers=tiers, freeze=False)
    with pytest.raises(InputError, match=r"weights has shape \[2\]"):
        make([1, 2], [1.0, 2.0], name="item", tiers=tiers)
    with pytest.raises(InputError, match="not an array"):
        make([1, 2], [[1.0], [2.0, 3.0]], name="item", tiers=tiers)
    with pytest.raises(InputError, match="twice"):
        make([1, 1], [[1.0], [2.0]], name="item", tiers=tiers)
    full = ssd_tiers(tmp_path, host_bytes="2KiB", ssd_bytes="128KiB")
    with pytest.raises(CapacityError):
        make(np.arange(100_000), np.ones((100_000, 4)), name="item", tiers=full)
    assert not list(tmp_path.rglob("*.seg"))
    # Nothing was published, so that the same call with other rows is not told that there are files already.
    with make([1, 2], [[1.0], [2.0]], name="item", tiers=full) as item:
        assert len(item) == 2
