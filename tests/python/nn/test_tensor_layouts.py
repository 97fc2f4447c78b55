"""For every memory layout of a tensor, each call gives the results of its contiguous copy, bit for bit."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tensor_layouts import Shape, array_shaper, placer, plain, shaper
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    EmbCacheStorageReader,
    EmbCacheStorageWriter,
    RowMetadata,
    Saver,
    TierBudgets,
    _native,
    admission,
    cache_modules,
    initializers,
    optimizers,
    serialize,
    serving,
)
from torchrec_embcache.exceptions import InputError
from torchrec_embcache.optimizers import native_hyperparameters
from torchrec_models import ROW_WISE, TABLE_WISE, rows_of, sharded

F32 = NDArray[np.float32]
DIM = 3
IDS = [-(2**63), 2**63 - 1, 2**40, *range(-4, 9)]
SEEDS = range(12)
TIERS = TierBudgets(host_bytes="1MiB")


def assert_same(got: list[Tensor], want: list[Tensor], seed: int) -> None:
    assert len(got) == len(want)
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), f"result {place} of seed {seed}: {one} is to be {other}"


def some_ids(dice: random.Random, count: int) -> Tensor:
    """IdsLike, small ones or any, and sometimes the same one only."""
    pool = dice.choice([IDS, IDS[3:], [dice.choice(IDS)]])
    return torch.tensor(dice.choices(pool, k=count), dtype=torch.int64)


def some_lengths(dice: random.Random, count: int) -> Tensor:
    """Lengths of bags, often all the same."""
    same = dice.randint(0, 3)
    pool = [same] if dice.random() < 0.5 else range(4)
    return torch.tensor(dice.choices(pool, k=count), dtype=torch.int64)


def some_weights(dice: random.Random, *size: int) -> Tensor:
    generator = torch.Generator().manual_seed(dice.randrange(2**32))
    drawn = torch.rand(size, generator=generator)
    return torch.full_like(drawn, 0.75) if dice.random() < 0.3 else drawn


def weighted_by(given: Tensor) -> Tensor:
    """The leaf that collects the gradient of a view."""
    return given.detach().requires_grad_()


# ---- plain modules


def _embedding(dice: random.Random, shape: Shape, backend: dict[str, Any]) -> list[Tensor]:
    rule = admission.ShowClick(alpha=1.0, beta=1.0, threshold=2.0, memory="1MiB") if dice.random() < 0.4 else None
    module = EmbCacheEmbedding(
        name="item", embedding_dim=DIM, optimizer=optimizers.Adagrad(lr=0.5), admission=rule, **backend,
        padding_idx=dice.choice([None, 3]),
    )  # fmt: skip
    results = []
    for _ in range(4):
        size = dice.choice([(0,), (1,), (5,), (2, 3), (1, 4), (2, 0)])
        ids = some_ids(dice, torch.Size(size).numel()).view(size)
        clicks = torch.tensor(dice.choices(range(3), k=ids.numel())).view(size) if rule is not None else None
        given = (shape(ids, narrow=True), None if clicks is None else shape(clicks, narrow=True))
        if dice.random() < 0.3:
            module.prefetch(*given)
        out = module(*given)
        out.backward(shape(some_weights(dice, *size, DIM)))
        results += [out.detach(), module.read_rows(IDS).weights, module.read_rows(IDS).slots["sum"]]
    return results


def _bag(dice: random.Random, shape: Shape, backend: dict[str, Any]) -> list[Tensor]:
    mode, last = dice.choice(["sum", "mean"]), dice.random() < 0.5
    module = EmbCacheEmbeddingBag(
        name="item", embedding_dim=DIM, optimizer=optimizers.Adam(lr=0.5), mode=mode, include_last_offset=last, **backend,
        padding_idx=dice.choice([None, 3]),
    )  # fmt: skip
    results = []
    for _ in range(4):
        lengths = some_lengths(dice, dice.randint(0, 4))
        offsets: Tensor | None = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = some_ids(dice, int(lengths.sum()))
        if dice.random() < 0.3:
            ids, offsets = some_ids(dice, 6).view(dice.choice([(2, 3), (6, 1), (1, 6)])), None
        elif not last:
            offsets = offsets[:-1] if len(lengths) else torch.zeros(1, dtype=torch.int64)
        weights = None
        if mode == "sum" and dice.random() < 0.7:
            weights = weighted_by(shape(some_weights(dice, *ids.shape)))
        given = shape(ids, narrow=True), None if offsets is None else shape(offsets, narrow=True), weights
        if dice.random() < 0.3:
            module.prefetch(*given)
        out = module(*given)
        out.backward(shape(some_weights(dice, *out.shape)))
        results += [out.detach(), module.read_rows(IDS).weights]
        if weights is not None:
            results.append(weights.grad)
            with torch.no_grad():
                results.append(module.eval()(*given))
            results.append(module(*given).detach())  # differentiable by the weights alone
            module.train()
    return results


@pytest.mark.parametrize("seed", SEEDS[:6])
@pytest.mark.parametrize("run", [_embedding, _bag])
def test_plain_modules_take_every_form(run: Callable[..., list[Tensor]], backend: dict[str, Any], seed: int) -> None:
    want = run(random.Random(seed), plain, backend)
    assert_same(run(random.Random(seed), shaper(random.Random(seed)), backend), want, seed)


# ---- collections


def features_of(dice: random.Random, shape: Shape, keys: list[str], *, weighted: bool) -> KeyedJaggedTensor:
    """A batch of these keys, with lengths or offsets."""
    samples = dice.randint(1, 4)
    lengths = some_lengths(dice, len(keys) * samples)
    values = some_ids(dice, int(lengths.sum()))
    weights = shape(some_weights(dice, len(values))) if weighted else None
    if dice.random() < 0.5:
        return KeyedJaggedTensor(keys, shape(values, narrow=True), weights, lengths=shape(lengths, narrow=True))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return KeyedJaggedTensor(keys, shape(values, narrow=True), weights, offsets=shape(offsets, narrow=True))


def _model(dice: random.Random, *, weighted: bool) -> nn.ModuleDict:
    """Bags and sequences. Where no feature is in two tables, TorchRec sends a batch as it comes."""
    fields = {"num_embeddings": 10, "total_num_buckets": 7, "initializer": initializers.Uniform(-1.0, 1.0)}
    features = {"ta": dice.choice([["a"], ["a", "b"]]), "tb": ["b", "c"]}
    pooling = PoolingType.SUM if weighted else dice.choice(list(PoolingType)[:2])
    bags = [
        EmbCacheEmbeddingBagConfig(
            name=name, embedding_dim=dim, feature_names=features[name], pooling=pooling, **fields
        )
        for name, dim in (("ta", DIM), ("tb", 5))
    ]
    words = [EmbCacheEmbeddingConfig(name="tc", embedding_dim=DIM, feature_names=["a"], **fields)]
    return nn.ModuleDict({
        "bags": EmbCacheEmbeddingBagCollection(bags, is_weighted=weighted, tiers=TIERS),
        "sequences": EmbCacheEmbeddingCollection(words, tiers=TIERS),
    })  # fmt: skip


def _collections(dice: random.Random, shape: Shape) -> list[Tensor]:
    model = _model(dice, weighted=(weighted := dice.random() < 0.5))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.5})
    return _trained(model, dice, shape, weighted=weighted)


def _trained(model: nn.Module, dice: random.Random, shape: Shape, *, weighted: bool) -> list[Tensor]:
    """Returns the outputs of forwards, and the rows after their backwards."""
    modules, results = cache_modules(model), []
    for _ in range(4):
        keys = dice.choice([["a", "b", "c"], ["b", "c", "a"], ["c", "unread", "a", "b"]])
        pooled = modules["bags"](features_of(dice, shape, keys, weighted=weighted)).values()
        pooled.backward(shape(some_weights(dice, *pooled.shape)))
        rows = modules["sequences"](features_of(dice, shape, keys, weighted=False))["a"].values()
        rows.backward(shape(some_weights(dice, *rows.shape)))
        results += [pooled.detach(), rows.detach()]
    found = rows_of(model)
    return [*results, *(torch.tensor(found[key]) for key in sorted(found))]


@pytest.mark.parametrize("seed", SEEDS)
def test_collections_take_every_form(seed: int) -> None:
    want = _collections(random.Random(seed), plain)
    assert_same(_collections(random.Random(seed), shaper(random.Random(seed))), want, seed)


def _sharded(rank: int, world: int, seed: int, shardings: dict[str, str], *, formed: bool) -> list[Tensor]:
    del world
    weighted = seed % 2 == 0
    model = sharded(_model(random.Random(seed), weighted=weighted), shardings, {"learning_rate": 0.5})
    dice = random.Random(seed * 100 + rank)
    shape = shaper(random.Random(seed * 100 + rank)) if formed else plain
    imported = torch.tensor([id_ for id_ in IDS if id_ % 2 == rank])
    cache_modules(model)["bags"].import_rows("ta", shape(imported), shape(some_weights(dice, len(imported), DIM)))
    return _trained(model, dice, shape, weighted=weighted)


@pytest.mark.parametrize("seed", SEEDS[:6])
@pytest.mark.parametrize("shardings", [ROW_WISE, TABLE_WISE], ids=["row-wise", "table-wise"])
def test_sharded_collections_take_every_form(two_ranks, shardings: dict[str, str], seed: int) -> None:
    want = two_ranks.run(_sharded_plain, seed, shardings)
    for rank, got in enumerate(two_ranks.run(_sharded_formed, seed, shardings)):
        assert_same(got, want[rank], seed)


def _sharded_plain(rank: int, world: int, seed: int, shardings: dict[str, str]) -> list[Tensor]:
    return _sharded(rank, world, seed, shardings, formed=False)


def _sharded_formed(rank: int, world: int, seed: int, shardings: dict[str, str]) -> list[Tensor]:
    return _sharded(rank, world, seed, shardings, formed=True)


# ---- rows by id


def _rows(dice: random.Random, shape: Callable[[Tensor], Any], tensors: Shape) -> list[Tensor]:
    module = EmbCacheEmbedding(
        name="item", embedding_dim=DIM, tiers=TIERS, optimizer=optimizers.PartialRowWiseAdam(lr=0.5)
    )
    results = []
    for _ in range(4):
        ids = torch.tensor(dice.sample(IDS, dice.choice([0, 1, 1, 5])), dtype=torch.int64)
        count = len(ids)
        slots, metadata = None, None
        if dice.random() < 0.5:
            slots = {"exp_avg": shape(some_weights(dice, count, DIM)), "exp_avg_sq": shape(some_weights(dice, count))}
        if dice.random() < 0.5:
            numbers = [torch.tensor(dice.choices(range(9), k=count), dtype=torch.int64) for _ in range(3)]
            metadata = RowMetadata(
                tensors(numbers[0], narrow=True), tensors(numbers[1], narrow=True), tensors(some_weights(dice, count)),
                tensors(numbers[2], narrow=True),
            )  # fmt: skip
        module.import_rows(shape(ids), shape(some_weights(dice, count, DIM)), slots, metadata)
        removed = module.remove_rows(shape(torch.tensor(dice.sample(IDS, 2))))
        found = module.read_rows(shape(torch.tensor(IDS)))
        known = found.metadata
        results += [torch.tensor(removed), found.weights, found.found, *found.slots.values()]
        results += [known.count, known.last_step, known.score, known.modified_epoch]
    return results


@pytest.mark.parametrize("seed", SEEDS)
def test_imports_reads_and_removals_of_rows_take_every_form(seed: int) -> None:
    want = _rows(random.Random(seed), plain, plain)
    form = random.Random(seed)
    assert_same(_rows(random.Random(seed), array_shaper(form), shaper(form)), want, seed)


# ---- serving


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables with rows of some of the ids: of plain modules, and of the collections of `_served`."""
    common = {"embedding_dim": DIM, "num_embeddings": 10, "initializer": initializers.Uniform(-1.0, 1.0)}
    model = nn.ModuleDict({
        "item": EmbCacheEmbedding(name="item", embedding_dim=DIM, tiers=TIERS, optimizer=optimizers.SGD(lr=0.5)),
        "bags": EmbCacheEmbeddingBagCollection(
            [EmbCacheEmbeddingBagConfig(name="t", feature_names=["a", "b"], **common)], is_weighted=False, tiers=TIERS
        ),
        "sequences": EmbCacheEmbeddingCollection(
            [EmbCacheEmbeddingConfig(name="s", feature_names=["a"], **common)], tiers=TIERS
        ),
    })  # fmt: skip
    weights = torch.rand(len(IDS), DIM, generator=torch.Generator().manual_seed(0))
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table.import_rows(IDS[::2], weights[::2])
    path = tmp_path_factory.mktemp("served") / "checkpoint"
    Saver(0).save(model, path)
    return path


def _served(dice: random.Random, shape: Shape, tables: serving.Tables, *, weighted: bool) -> list[Tensor]:
    replaced = serving.replace(
        nn.ModuleDict({
            "bags": EmbeddingBagCollection(
                [EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=10, feature_names=["a", "b"])], is_weighted=weighted
            ),
            "sequences": EmbeddingCollection(
                [EmbeddingConfig(name="s", embedding_dim=DIM, num_embeddings=10, feature_names=["a"])]
            ),
        }),
        tables,
    )  # fmt: skip
    results = []
    for _ in range(3):
        lengths = some_lengths(dice, 3)
        ids, offsets = (
            some_ids(dice, int(lengths.sum())),
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        )
        with tables.pin() as version:
            results.append(version["item/item"].lookup(shape(ids, narrow=True)))
            weights = shape(some_weights(dice, len(ids))) if weighted else None
            pooling = "sum" if weighted else dice.choice(["sum", "mean"])
            given = shape(ids, narrow=True), shape(offsets, narrow=True)
            results.append(version["item/item"].lookup_pooled(*given, pooling, weights))
        results.append(replaced["bags"](features_of(dice, shape, ["a", "b", "c"], weighted=weighted)).values())
        results.append(replaced["sequences"](features_of(dice, shape, ["a", "b"], weighted=False))["a"].values())
    return [result.as_subclass(Tensor) for result in results]


@pytest.mark.parametrize("seed", SEEDS)
def test_serving_takes_every_form(checkpoint: Path, seed: int) -> None:
    with serving.open(checkpoint) as tables:
        want = _served(random.Random(seed), plain, tables, weighted=seed % 2 == 0)
        assert_same(
            _served(random.Random(seed), shaper(random.Random(seed)), tables, weighted=seed % 2 == 0), want, seed
        )


# ---- checkpoints of tensors

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8)


def _state(dice: random.Random) -> dict[str, Tensor]:
    state = {}
    for number in range(16):
        size = dice.choices([0, 1, 1, 2, 3], k=dice.randint(0, 3))
        drawn = torch.tensor(dice.choices(range(100), k=torch.Size(size).numel()), dtype=torch.int64).view(size)
        state[f"x{number}"] = drawn.to(dice.choice(DTYPES))
    return state


def _save_with_dcp(path: Path, state: dict[str, Tensor]) -> None:
    dcp.save(state, storage_writer=EmbCacheStorageWriter(path))


def _load_with_dcp(path: Path, into: dict[str, Tensor]) -> None:
    dcp.load(into, storage_reader=EmbCacheStorageReader(path))


def _save_blocks(path: Path, state: dict[str, Tensor]) -> None:
    serialize.Saver(path=path, tensors=state).save()


def _load_blocks(path: Path, into: dict[str, Tensor]) -> None:
    serialize.Loader(path, tensors=into).load()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("save", "load"), [(_save_with_dcp, _load_with_dcp), (_save_blocks, _load_blocks)], ids=["dcp", "blocks"]
)
def test_checkpoints_of_tensors_take_every_form(
    save: Callable[[Path, dict[str, Tensor]], None],
    load: Callable[[Path, dict[str, Tensor]], None],
    tmp_path: Path,
    seed: int,
) -> None:
    dice = random.Random(seed)
    state, shape, place = _state(dice), shaper(dice), placer(dice)
    save(tmp_path / "saved", {name: shape(tensor) for name, tensor in state.items()})
    into = {name: place(torch.zeros_like(tensor)) for name, tensor in state.items()}
    load(tmp_path / "saved", into)
    assert_same(list(into.values()), list(state.values()), seed)


# ---- the native extension


def _native_calls(seed: int, shaped: int | None, shape: Callable[[F32], F32]) -> list[object]:
    """Returns the result of each call that takes a matrix with the rows after it, or None if the call is rejected.

    Call number `shaped` gets its matrix from `shape`.
    """
    dice = random.Random(seed)
    module = EmbCacheEmbedding(name="item", embedding_dim=DIM, tiers=TIERS, optimizer=optimizers.SGD(lr=0.5))
    native, ids = module.table._native_table, np.array(dice.sample(IDS[3:], dice.choice([1, 2, 5])))
    others = ids + 100  # no plan uses them
    rows, numbers = some_weights(dice, len(ids), DIM).numpy(), native_hyperparameters(module.optimizer.param_groups)
    mode = _native.PlanMode(train=True, is_prefetch=False, missing="initial")
    plan = _native.Lookup([native], [0]).plan(ids, np.array([0, len(ids)]), mode, 1, None)
    plan.wait()

    def read(out: F32) -> list[list[float]]:
        plan.forward_sequence(out, None, 1)
        return out.tolist()

    calls: list[Callable[[F32], object]] = [
        lambda given: native.import_rows(others, given, None, None),
        read,
        lambda given: plan.oov_gradient_sums_sequence(given, 1).tolist(),
        lambda given: plan.backward_sequence(given, numbers, None, 1),
    ]
    found: list[object] = []
    for place, call in enumerate(calls):
        given = shape(rows.copy()) if place == shaped else rows.copy()
        try:
            found.append(
                (call(given), native.read_rows(ids).vectors.tolist(), native.read_rows(others).vectors.tolist())
            )
        except InputError:
            found.append(None)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_the_native_extension_takes_or_refuses_each_order_of_a_matrix(seed: int) -> None:
    want = _native_calls(seed, None, np.ascontiguousarray)
    assert None not in want
    shapes = (np.asfortranarray, lambda matrix: np.repeat(matrix, 2, axis=1)[:, ::2], lambda matrix: matrix.T.copy())
    for place, expected in enumerate(want):
        for shape in shapes:
            got = _native_calls(seed, place, shape)[place]
            assert got in (expected, None), f"call {place} of seed {seed}"
