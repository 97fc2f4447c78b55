"""Admission: the ids that get rows, in every kind of module, on one rank and on several."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from admission_cases import Expected
from lifecycle_cases import (
    DIM,
    DOORS,
    TIERS,
    Ahead,
    budgets,
    embedding,
    features,
    ids_of,
    load_by,
    random_ids,
    save_by,
    update,
)
from processes import process_group
from tables import Contents, ssd_tiers
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    admission,
    cache_modules,
    optimizers,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import ConfigError, InputError
from torchrec_models import (
    MIXED,
    ROW_WISE,
    TABLE_WISE,
    Batch,
    Model,
    Settings,
    assert_same_rows,
    batches,
    rows_of,
    sharded,
    together,
    train,
)

SHOW_CLICK = admission.ShowClick(alpha=0.25, beta=1.0, threshold=2.0)


@pytest.mark.parametrize("lookahead", [0, 1, 5])
@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_ids_get_rows_when_a_dict_of_counts_says_so(tmp_path, tiers, lookahead):
    dice = random.Random(lookahead)
    model = Expected(3)
    with embedding(tiers=budgets(tiers, tmp_path), admission=admission.Count(3)) as table:
        steps = [random_ids(dice, 12) for _ in range(40)]
        prefetches = Ahead(table, steps, lookahead)
        for place, ids in enumerate(steps):
            prefetches.of(place)
            if place % 5 == 4:  # neither a forward without a backward nor an evaluation counts
                with torch.no_grad():
                    other = random_ids(dice, 9)
                    seen = table(torch.tensor(other))
                    assert torch.equal(seen, model.read(other, lambda each: each in model.rows))
            out = table(torch.tensor(ids))
            update(out)
            assert torch.equal(out.detach(), model.train(ids)), place
        assert set(ids_of(table)) == model.rows
        stats = table.stats().admission
        assert stats is not None
        assert (stats.pending, stats.admitted) == (len(model.counts), len(model.rows))
        assert stats.not_admitted > stats.pending > 0
        assert stats.pending_bytes > 0


def test_a_forward_that_no_backward_follows_counts_nothing():
    table = embedding(admission=admission.Count(2))
    for _ in range(4):
        assert not table(torch.tensor([5])).any()
    assert table.stats().admission.pending == 0
    update(table(torch.tensor([5])))
    assert len(table) == 0
    out = table(torch.tensor([5]))
    assert out.any(), "the batch that reaches the threshold reads the row, and trains it"
    update(out)
    assert len(table) == 1


@pytest.mark.parametrize(("given", "expected"), [("zeros", 0.0), (0.5, 0.5), (-3, -3.0), ("initial", None)])
def test_missing_rows_read_the_configured_value(given, expected):
    """The same in training and in evaluation."""
    table = embedding(admission=admission.ReadOnly(), not_admitted=given)
    want = torch.full((1, DIM), expected) if expected is not None else table.read_rows([9]).weights
    for _ in range(2):
        out = table(torch.tensor([9]))
        assert torch.equal(out, want)
        update(out)
        with torch.no_grad():
            assert torch.equal(table(torch.tensor([9])), want)
    assert len(table) == 0
    bag = EmbCacheEmbeddingBag(
        name="b",
        embedding_dim=DIM,
        tiers=TIERS,
        optimizer=optimizers.SGD(lr=0.1),
        mode="mean",
        admission=admission.ReadOnly(),
        not_admitted=2.0,
    )
    bag.import_rows([1], np.ones((1, DIM), np.float32))
    assert torch.equal(bag(torch.tensor([[1, 8, 9, 9]])), torch.full((1, DIM), 7 / 4)), "a mean counts them"


def test_evaluation_can_read_something_else_than_training():
    table = embedding(admission=admission.ReadOnly(), not_admitted=2.0, missing="zeros")
    with torch.no_grad():
        assert not table(torch.tensor([9])).any()
    assert torch.equal(table(torch.tensor([9])), torch.full((1, DIM), 2.0))


# ---- clicks


def test_shows_and_clicks_of_a_plain_module_add_up():
    table = embedding(admission=SHOW_CLICK, padding_idx=0)
    bag = EmbCacheEmbeddingBag(
        name="b", embedding_dim=DIM, tiers=TIERS, optimizer=optimizers.SGD(lr=0.1), admission=SHOW_CLICK, padding_idx=0
    )

    def step(ids: list[int], clicks: Any) -> list[int]:
        given = None if clicks is None else torch.tensor(clicks)
        table.prefetch(torch.tensor(ids), given)
        update(table(torch.tensor(ids), given))
        update(bag(torch.tensor([ids]), clicks=None if given is None else given[None]))
        assert sorted(ids_of(table)) == sorted(ids_of(bag))
        return sorted(ids_of(table))

    assert step([1, 1, 2, 3, 0], [0, 1, 0, 2, 9]) == [3]
    assert step([1, 2], [False, True]) == [3], "1.75 and 1.5"
    assert step([1, 2], None) == [1, 3]
    assert step([2], [0.0]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("clicks", "what"),
    [([1.5, 0], "holds 1.5"), ([-1, 0], "holds -1"), ([float("nan"), 0], "holds nan"), ([1], "1 numbers for 2 ids")],
)
def test_invalid_clicks_are_rejected_and_change_nothing(clicks, what):
    table = embedding(admission=SHOW_CLICK)
    with pytest.raises(InputError, match=what):
        table(torch.tensor([1, 2]), torch.tensor(clicks))
    with pytest.raises(InputError, match="give a tensor"):
        table(torch.tensor([1, 2]), [1, 2])
    with pytest.raises(InputError, match="counts none"):
        embedding()(torch.tensor([1]), torch.tensor([1]))
    assert table.stats().step == 0


def test_clicks_of_a_collection_are_the_batchs_weights():
    bags = [
        EmbCacheEmbeddingBagConfig(
            name="clicked", embedding_dim=DIM, num_embeddings=9, feature_names=["f"], admission=SHOW_CLICK
        ),
        EmbCacheEmbeddingBagConfig(name="all", embedding_dim=DIM, num_embeddings=9, feature_names=["f"]),
    ]
    bags[1].missing = bags[0].missing = "zeros"
    sequence = EmbCacheEmbeddingConfig(
        name="s", embedding_dim=DIM, num_embeddings=9, feature_names=["f"], admission=SHOW_CLICK
    )
    made = [EmbCacheEmbeddingBagCollection(bags, tiers=TIERS), EmbCacheEmbeddingCollection([sequence], tiers=TIERS)]
    for module in made:
        for weight in module.parameters():
            apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})
    for ids, clicks in (([1, 1, 2, 3], [0.0, 1.0, 0.0, 2.0]), ([1, 2], None)):
        update(made[0](features(ids, clicks)).values())
        update(made[1](features(ids, clicks))["f"].values())
    tables = [made[0].tables["clicked"], made[0].tables["all"], made[1].tables["s"]]
    assert [sorted(ids_of(table)) for table in tables] == [[3], [1, 2, 3], [3]]
    with pytest.raises(InputError, match="weights, which are clicks, holds 0.5"):
        made[0](features([1], [0.5]))
    with pytest.raises(ConfigError, match="admission ShowClick"):
        EmbCacheEmbeddingBagCollection(bags, is_weighted=True, tiers=TIERS)


# ---- several ranks


def clicked(count: int, rank: int, world: int) -> Any:
    """Batches whose weights are clicks."""
    for batch in batches(count, rank, world, weighted=True):
        given = batch.features
        yield Batch(
            KeyedJaggedTensor(
                given.keys(), given.values(), weights=(given.weights() * 3).floor(), lengths=given.lengths()
            ),
            batch.target,
        )


def trained(rank: int, world: int, shardings: Any, settings: Settings, clicks: bool) -> Any:
    model = Model(settings)
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    model = sharded(model, shardings)
    losses = train(model, clicked(8, rank, world) if clicks else batches(8, rank, world))
    return rows_of(model), losses


@pytest.fixture
def one_rank(tmp_path):
    with process_group(0, 1, str(tmp_path / "store")):
        yield


@pytest.mark.parametrize(
    "rule", [admission.Count(3), admission.Probability(0.4), SHOW_CLICK], ids=lambda rule: type(rule).__name__
)
@pytest.mark.parametrize(
    ("shardings", "pooling"),
    [
        (ROW_WISE, PoolingType.MEAN),
        (ROW_WISE, PoolingType.SUM),
        (TABLE_WISE, PoolingType.MEAN),
        (MIXED, PoolingType.MEAN),
    ],
    ids=["row-wise mean", "row-wise sum", "table-wise", "mixed"],
)
@pytest.mark.usefixtures("one_rank")
def test_two_ranks_admit_the_ids_that_one_rank_admits(two_ranks, shardings, pooling, rule):
    settings = Settings(pooling=pooling, options={"admission": rule, "not_admitted": 0.25})
    clicks = isinstance(rule, admission.ShowClick)
    rows, losses = trained(0, 1, shardings, settings, clicks)
    everything, _ = trained(0, 1, shardings, Settings(pooling=pooling), False)
    results = two_ranks.run(trained, shardings, settings, clicks)
    assert 0 < len(rows) < len(everything)
    assert_same_rows(together([result[0] for result in results]), rows)
    torch.testing.assert_close(sum(result[1] for result in results) / 2, losses)


def refused(rank: int, world: int) -> Any:
    model = sharded(Model(Settings(options={"admission": SHOW_CLICK})), ROW_WISE, {"learning_rate": 0.1})
    good = next(clicked(1, rank, world))
    bad = Batch(
        KeyedJaggedTensor(
            good.features.keys(),
            good.features.values(),
            weights=good.features.weights() - (5 if rank == 1 else 0),
            lengths=good.features.lengths(),
        ),
        good.target,
    )
    try:
        model(bad)
    except InputError as error:
        said = str(error)
    loss, _ = model(good)
    loss.backward()
    return said


def test_clicks_rejected_on_one_rank_are_rejected_on_both(two_ranks):
    """Training continues after the error."""
    first, second = two_ranks.run(refused)
    assert "which are clicks, holds -" in second
    assert "rank 1" in first


# ---- bad settings


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: admission.Count(0), "threshold=0"),
        (lambda: admission.Count(1 << 24), "threshold"),
        (lambda: admission.Count(2, window_steps=0), "window_steps=0"),
        (lambda: admission.Count(2, memory=0), "memory=0"),
        (lambda: admission.Probability(0), "Probability.p=0"),
        (lambda: admission.Probability(1.01), "Probability.p=1.01"),
        (lambda: admission.Probability(float("nan")), "finite"),
        (lambda: admission.ShowClick(-1, 1, 1), "alpha=-1"),
        (lambda: admission.ShowClick(0, 0, 1), "admits no id"),
        (lambda: embedding(admission="Count"), "is not known"),
        (lambda: embedding(not_admitted="nothing"), "not_admitted='nothing'"),
        (lambda: embedding(not_admitted=float("nan")), "not_admitted=nan"),
        (lambda: embedding(not_admitted=0.5), "not_admitted=0.5 without admission has no effect"),
        (lambda: embedding(not_admitted="initial"), "not_admitted='initial' without admission has no effect"),
        (lambda: embedding(score_half_life_steps=0), "score_half_life_steps=0"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_made(make, what):
    with pytest.raises(ConfigError, match=what):
        make()


# ---- checkpoints


def counted(seed: int, steps: int, table: EmbCacheEmbedding) -> None:
    dice = random.Random(seed)
    for _ in range(steps):
        update(table(torch.tensor(random_ids(dice, 15) + [dice.randrange(6, 60) for _ in range(10)])))


def all_of(table: EmbCacheEmbedding) -> Any:
    stats = table.stats()
    return Contents.of(table), stats.admission.pending


@pytest.mark.parametrize("door", DOORS)
def test_counts_come_back_with_every_kind_of_checkpoint(tmp_path, door):
    def made(name: str) -> EmbCacheEmbedding:
        tiers = ssd_tiers(tmp_path / name, host_bytes="64KiB", ssd_bytes="64MiB")
        return embedding(tiers=tiers, admission=admission.Count(3, window_steps=40))

    path = tmp_path / "saved"
    with made("one") as one, made("two") as two:
        counted(1, 30, one)
        model, other = torch.nn.ModuleDict({"table": one}), torch.nn.ModuleDict({"table": two})
        if door in ("delta", "async delta", "compact"):
            save_by("full", model, path)
            counted(2, 25, one)
        expected = all_of(one)
        future = save_by(door, model, path)
        if future is not None:
            counted(4, 10, one)
            assert future.result().kind == ("delta" if door == "async delta" else "full")
        assert main(["verify", str(path)]) == 0
        counted(3, 5, two)
        load_by(door, other, path)
        assert all_of(two) == expected
        if not door.startswith("async"):
            for table in (one, two):
                counted(5, 30, table)
            assert all_of(two) == all_of(one), "training goes on as if nothing had happened"


def test_counts_can_be_left_out(tmp_path, capsys):
    table, other = embedding(admission=admission.Count(3)), embedding(admission=admission.Count(3))
    counted(1, 20, table)
    saver = Saver(0)
    saver.save(table, tmp_path / "without", counters=False)
    saver.save(table, tmp_path / "with")
    assert main(["inspect", str(tmp_path / "with")]) == 0
    assert "pending" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "without")]) == 0
    assert "pending" not in capsys.readouterr().out
    assert main(["reshard", str(tmp_path / "with"), str(tmp_path / "again"), "--world-size", "2", "--no-counters"]) == 0
    for name, pending in (("without", 0), ("with", table.stats().admission.pending), ("again", 0)):
        saver.load(other, tmp_path / name)
        assert other.stats().admission.pending == pending
        assert len(other) == len(table)


def test_a_resume_finds_the_counts_of_the_flush(tmp_path):
    def made(reopen: str | None) -> EmbCacheEmbedding:
        tiers = ssd_tiers(tmp_path, host_bytes="64KiB", ssd_bytes="1GiB", reopen=reopen)
        return embedding(tiers=tiers, admission=admission.Count(3))

    with made(None) as table:
        counted(1, 30, table)
        expected = all_of(table)
    with made("resume") as table:
        assert all_of(table) == expected


def test_a_copy_and_the_shards_of_a_module_take_its_counts_over():
    table = embedding(admission=admission.Count(3))
    counted(1, 20, table)
    twin = copy.deepcopy(table)
    assert all_of(twin) == all_of(table)
    for each in (table, twin):
        counted(2, 20, each)
    assert all_of(twin) == all_of(table)


def sharded_after_training(rank: int, world: int) -> Any:
    """Unsharded steps, then sharded ones. Every rank trains the whole batch unsharded."""
    model = Model(Settings(replicated=True, options={"admission": admission.Count(4)}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    train(model, batches(3))
    model = sharded(model, ROW_WISE)
    waiting = sum(table.stats().admission.pending for m in cache_modules(model).values() for table in m.tables.values())
    train(model, list(batches(8, rank, world))[3:])
    return rows_of(model), waiting


@pytest.mark.usefixtures("one_rank")
def test_sharding_a_module_moves_counts_to_the_owning_ranks(two_ranks):
    rows, waiting = sharded_after_training(0, 1)
    results = two_ranks.run(sharded_after_training)
    assert sum(result[1] for result in results) == waiting > 0
    assert_same_rows(together([result[0] for result in results]), rows)


def test_an_optimizer_that_is_set_after_a_load_leaves_the_counts(tmp_path):
    def collection() -> EmbCacheEmbeddingCollection:
        config = EmbCacheEmbeddingConfig(
            name="s", embedding_dim=DIM, num_embeddings=9, feature_names=["f"], admission=admission.Count(3)
        )
        return EmbCacheEmbeddingCollection([config], tiers=TIERS)

    first, second = collection(), collection()
    apply_optimizer_in_backward(torch.optim.SGD, first.parameters(), {"lr": 0.1})
    for ids in ([1, 1, 1, 2], [2, 3]):
        update(first(features(ids, None))["f"].values())
    Saver(0).save(first, tmp_path / "saved")
    Saver(0).load(second, tmp_path / "saved", slots=False)
    apply_optimizer_in_backward(torch.optim.Adagrad, second.parameters(), {"lr": 0.1})
    update(second(features([2], None))["f"].values())
    assert sorted(ids_of(second.tables["s"])) == [1, 2]
    assert second.tables["s"].stats().admission.pending == 1
