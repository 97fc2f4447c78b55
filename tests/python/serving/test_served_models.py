"""Models with served tables give the results of the trainer's model."""

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from lifecycle_cases import embedding
from processes import process_group
from tables import make_bag
from torchrec_embcache import Saver, cache_modules, serving
from torchrec_embcache.exceptions import InputError, MismatchError, StateError, UnsupportedError
from torchrec_embcache.monitoring import ServingCollector
from torchrec_embcache.serving._modules import ServingModule
from torchrec_models import IDS, Model, Settings, batches, sharded

ROWS = 60


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "ckpt"


def filled(settings: Settings) -> Model:
    """A trainer's model, whose tables have rows of most ids of the batches."""
    model = Model(settings)
    torch.manual_seed(1)
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table.import_rows(IDS[3:], torch.rand(len(IDS) - 3, table.dim))
    return model.eval()


def meta(model: nn.Module, *, weighted: bool = False, need_indices: bool = False) -> nn.Module:
    """The same model with TorchRec's own collections, which have no weights."""
    other = copy.deepcopy(model)
    bags = [
        EmbeddingBagConfig(
            name=config.name,
            embedding_dim=config.embedding_dim,
            num_embeddings=10,
            feature_names=config.feature_names,
            pooling=config.pooling,
        )
        for config in model.bags.embedding_bag_configs()
    ]
    sequences = [
        EmbeddingConfig(
            name=config.name,
            embedding_dim=config.embedding_dim,
            num_embeddings=10,
            feature_names=config.feature_names,
        )
        for config in model.sequences.embedding_configs()
    ]
    device = torch.device("meta")
    other.bags = EmbeddingBagCollection(bags, is_weighted=weighted, device=device)
    other.sequences = EmbeddingCollection(sequences, device=device, need_indices=need_indices)
    return other.eval()


SETTINGS = {
    "sum": Settings(pooling=PoolingType.SUM),
    "mean": Settings(pooling=PoolingType.MEAN, need_indices=True),
    "weighted": Settings(weighted=True),
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "TorchRec's"])
def test_a_replaced_model_gives_what_the_trainers_gives_bit_for_bit(ckpt: Path, kind: str, theirs: bool) -> None:
    settings = SETTINGS[kind]
    trained = filled(settings)
    Saver(0).save(trained, ckpt)
    model: Any = meta(trained, weighted=settings.weighted, need_indices=settings.need_indices)
    if not theirs:
        model = filled(settings)
        for module in cache_modules(model).values():  # rows of its own, which are to be seen nowhere
            for table in module.tables.values():
                table.import_rows(IDS, torch.full((len(IDS), table.dim), 9.0))
    with serving.open(ckpt) as tables, torch.no_grad():
        assert serving.replace(model, tables) is model
        assert isinstance(model.bags, ServingModule)
        assert isinstance(model.sequences, ServingModule)
        assert not list(model.bags.parameters())
        for batch in batches(5, size=9, weighted=settings.weighted):
            want, got = trained.bags(batch.features), model.bags(batch.features)
            assert (got.keys(), got.length_per_key()) == (want.keys(), want.length_per_key())
            assert torch.equal(got.values(), want.values())
            if settings.weighted:
                continue
            want, got = trained.sequences(batch.features), model.sequences(batch.features)
            assert list(got) == list(want)
            for name, jagged in want.items():
                assert torch.equal(got[name].values(), jagged.values())
                assert torch.equal(got[name].lengths(), jagged.lengths())
                assert (jagged.weights_or_none() is None) == (got[name].weights_or_none() is None)
                if settings.need_indices:
                    assert torch.equal(got[name].weights(), jagged.weights())
            assert torch.equal(model(batch)[1][1], trained(batch)[1][1])


def test_results_are_those_of_torchrecs_own_module(ckpt: Path) -> None:
    """Per-feature order, shared features and tables, a feature in two tables, poolings: all as TorchRec has them."""
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=ROWS, feature_names=["y", "x"]),
        EmbeddingBagConfig(
            name="b", embedding_dim=8, num_embeddings=ROWS, feature_names=["x"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(name="c", embedding_dim=4, num_embeddings=ROWS, feature_names=["z"]),
    ]
    plain = EmbeddingBagCollection(configs)
    source = nn.ModuleDict({name: embedding(name=name, embedding_dim=d) for name, d in (("a", 4), ("b", 8), ("c", 4))})
    for name, table in source.items():
        table.import_rows(range(ROWS), plain.embedding_bags[name].weight.detach())
    Saver(0).save(source, ckpt)
    model = nn.ModuleDict({"over": nn.ModuleDict({"ebc": copy.deepcopy(plain)})})
    with serving.open(ckpt) as tables:
        with pytest.raises(MismatchError, match="no table 'over.ebc/a'; it has a/a, b/b, c/c: give replace"):
            serving.replace(model, tables)
        assert type(model["over"]["ebc"]) is EmbeddingBagCollection, "nothing is replaced then"
    together = plain_tables(configs, plain)
    Saver(0).save(together, ckpt)
    with serving.open(ckpt) as tables:
        model = serving.replace(model, tables, modules={"over.ebc": ""})
        for seed in range(5):
            features = random_features(["z", "other", "x", "y"], seed)
            want, got = plain(features), model["over"]["ebc"](features)
            assert got.keys() == want.keys() == ["y", "x@a", "x@b", "z"]
            assert got.length_per_key() == want.length_per_key()
            assert got.offset_per_key() == want.offset_per_key()
            torch.testing.assert_close(got.values(), want.values())
        with_weights = KeyedJaggedTensor(
            features.keys(), features.values(), weights=torch.rand(len(features.values())), lengths=features.lengths()
        )
        assert torch.equal(model["over"]["ebc"](with_weights).values(), got.values()), "as TorchRec, it ignores weights"
        empty = KeyedJaggedTensor(["x", "y", "z"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(9).int())
        assert torch.equal(model["over"]["ebc"](empty).values(), torch.zeros(3, 4 + 4 + 8 + 4))
        none = KeyedJaggedTensor(["x", "y", "z"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(0).int())
        assert model["over"]["ebc"](none).values().shape == (0, 20)


def plain_tables(configs: list[EmbeddingBagConfig], plain: EmbeddingBagCollection) -> Any:
    from torchrec_embcache import EmbCacheEmbeddingBagCollection, TierBudgets

    made = EmbCacheEmbeddingBagCollection(configs, tiers=TierBudgets(host_bytes="8MiB"))
    for name, table in made.tables.items():
        table.import_rows(range(ROWS), plain.embedding_bags[name].weight.detach())
    return made


def random_features(keys: list[str], seed: int, samples: int = 5) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * samples,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    if seed % 2:
        values, lengths = values.int(), lengths.int()
    return KeyedJaggedTensor(keys, values, lengths=lengths)


@pytest.mark.parametrize("padding", [None, 3])
def test_plain_modules_of_this_package_are_replaced_too(ckpt: Path, padding: int | None) -> None:
    def build() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "one": embedding(padding_idx=padding),
                "mean": make_bag(name="m", padding_idx=padding),
                "sum": make_bag(name="s", mode="sum", include_last_offset=True, padding_idx=padding),
                "dense": nn.Linear(4, 1),
            }
        ).eval()

    trained, model = build(), build()
    for name in ("one", "mean", "sum"):
        trained[name].import_rows(range(9), torch.rand(9, 4))
    Saver(0).save(trained, ckpt)
    grid = torch.tensor([[1, 3, 3], [4, 70, 8]])
    flat, offsets = grid.reshape(-1).int(), torch.tensor([0, 0, 4])
    with serving.open(ckpt) as tables, torch.no_grad():
        serving.replace(model, tables)
        asked: list[tuple[str, tuple[Any, ...]]] = [
            ("one", (grid,)),
            ("one", (torch.tensor(3),)),
            ("one", (torch.empty(0, 2, dtype=torch.int64),)),
            ("mean", (grid,)),
            ("mean", (flat, offsets)),
            ("sum", (flat, torch.tensor([0, 2, 6]))),
            ("sum", (grid, None, torch.rand(2, 3))),
        ]
        for name, arguments in asked:
            assert torch.equal(model[name](*arguments), trained[name](*arguments)), (name, arguments)
        for wrong in ((torch.tensor([1.0]),), ("1",), (torch.tensor([1], device="meta"),)):
            with pytest.raises(InputError):
                model["one"](*wrong)
        for wrong in ((flat,), (flat, torch.tensor([1, 2])), (flat, torch.tensor([0, 99]))):
            with pytest.raises(InputError):
                model["mean"](*wrong)


def test_a_model_that_is_a_module_itself_gives_way(ckpt: Path) -> None:
    trained = embedding().eval()
    trained.import_rows([1], [[1.0] * 4])
    Saver(0).save(trained, ckpt)
    with serving.open(ckpt) as tables:
        served = serving.replace(embedding(), tables)
        assert served(torch.tensor([1])).tolist() == [[1.0] * 4]
        assert "item, served from" in repr(served)
        with pytest.raises(InputError, match="no module to replace"):
            serving.replace(served, tables)


def test_one_module_at_two_places_stays_one(ckpt: Path) -> None:
    trained = embedding()
    trained.import_rows([1], [[1.0] * 4])
    Saver(0).save(nn.ModuleDict({"a": trained}), ckpt)
    model = nn.ModuleDict({"a": embedding()})
    model["b"] = model["a"]
    with serving.open(ckpt) as tables:
        serving.replace(model, tables)
        assert model["a"] is model["b"]
        assert isinstance(model["a"], ServingModule)


# ---- versions


class TwoTables(nn.Module):
    """Each row of both tables is the number of its version."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = embedding(name="a"), embedding(name="b")
        self.between: Any = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.a(ids)
        if self.between is not None:
            self.between()
        return torch.cat([first, self.b(ids)], 1)


def numbered(ckpt: Path) -> Iterator[TwoTables]:
    model, saver, number = TwoTables(), Saver(0), 0
    while True:
        for table in (model.a, model.b):
            table.import_rows([1, 2], [[float(number)] * 4] * 2)
        saver.save(model, ckpt, incremental=True, keep=3)
        yield model
        number += 1


def test_one_forward_reads_one_version_in_all_modules(ckpt: Path) -> None:
    saves = numbered(ckpt)
    next(saves)
    ids = torch.tensor([1, 2])
    with serving.open(ckpt) as tables:
        model = serving.replace(TwoTables(), tables)
        assert isinstance(model, TwoTables)

        def swap() -> None:
            next(saves)
            assert tables.poll() is not None

        model.between = swap
        assert model(ids).unique().tolist() == [0.0], "a version that comes amid a forward waits for the next one"
        assert model(ids).unique().tolist() == [1.0]
        with tables.pin():
            assert model(ids).unique().tolist() == [2.0]
            assert model(ids).unique().tolist() == [2.0], (
                "a request of several forwards reads the version that it pinned"
            )
        model.between = None
        assert model(ids).unique().tolist() == [4.0]

        def fail() -> None:
            raise ValueError("amid a forward")

        model.between = fail
        for _ in range(3):
            with pytest.raises(ValueError, match="amid"):
                model(ids)
        model.between = None
        swap()
        assert model(ids).unique().tolist() == [5.0], "a forward that failed has let its version go"


@pytest.mark.slow
def test_forwards_in_threads_read_one_version_each(ckpt: Path) -> None:
    saves = numbered(ckpt)
    next(saves)
    ids, wrong, ended = torch.tensor([1, 2]), [], threading.Event()
    with serving.open(ckpt) as tables:
        model = serving.replace(TwoTables(), tables)

        def ask() -> None:
            while not ended.is_set():
                try:
                    found = model(ids).unique().tolist()
                except Exception as error:
                    found = [repr(error)]
                if len(found) != 1 or isinstance(found[0], str):
                    wrong.append(found)
                    return

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        for _ in range(30):
            next(saves)
            tables.poll()
        ended.set()
        for asker in askers:
            asker.join()
        assert not wrong
        assert tables.stats().versions == 2


def test_a_table_that_leaves_a_later_checkpoint_is_told(ckpt: Path) -> None:
    saves = numbered(ckpt)
    next(saves)
    with serving.open(ckpt) as tables:
        model = serving.replace(TwoTables(), tables)
        wider = nn.ModuleDict({"a": embedding(name="a", embedding_dim=8), "b": embedding(name="b")})
        Saver(0).save(wider, ckpt)
        tables.poll()
        with pytest.raises(MismatchError, match="'a/a' has embedding_dim 4 in the model and 8 in checkpoint"):
            model(torch.tensor([1]))
        tables.rollback()
        assert model(torch.tensor([1])).unique().tolist() == [0.0]


def test_module_at_two_paths_is_found_under_either(ckpt: Path) -> None:
    next(numbered(ckpt))
    for path in ("one", "two"):
        shared = embedding(name="a")
        model = nn.ModuleDict({"one": shared, "two": shared})
        with serving.open(ckpt) as tables:
            model = serving.replace(model, tables, modules={path: "a"})
            assert model["one"] is model["two"]
            assert model["two"](torch.tensor([1])).unique().tolist() == [0.0]
    shared = embedding(name="a")
    model = nn.ModuleDict({"one": shared, "two": shared})
    with serving.open(ckpt) as tables, pytest.raises(InputError, match="'a', 'b' for one module"):
        serving.replace(model, tables, modules={"one": "a", "two": "b"})


def test_directory_opened_twice_by_a_model_has_two_labels(ckpt: Path) -> None:
    next(numbered(ckpt))
    with serving.open(ckpt) as first, serving.open(ckpt, at=1) as second:
        model = nn.ModuleList(serving.replace(TwoTables(), tables) for tables in (first, second))
        families = list(ServingCollector(model).collect())
    assert families
    for family in families:
        assert [sample.labels["path"] for sample in family.samples] == [str(ckpt), f"{ckpt}#2"]


# ---- what is refused


def test_models_that_do_not_fit_are_refused_with_what_to_do(ckpt: Path) -> None:
    next(numbered(ckpt))
    with serving.open(ckpt) as tables:
        with pytest.raises(InputError, match="no module to replace"):
            serving.replace(nn.Linear(2, 2), tables)
        with pytest.raises(InputError, match="nn.Module"):
            serving.replace("model", tables)  # type: ignore[type-var]
        with pytest.raises(InputError, match="serving.open"):
            serving.replace(TwoTables(), str(ckpt))  # type: ignore[arg-type]
        with pytest.raises(MismatchError, match="no table 'c/c'; it has a/a, b/b"):
            serving.replace(nn.ModuleDict({"c": embedding(name="c")}), tables)
        with pytest.raises(MismatchError, match="embedding_dim 8 in the model and 4"):
            serving.replace(nn.ModuleDict({"a": embedding(name="a", embedding_dim=8)}), tables)
        with pytest.raises(InputError, match="modules names 'c', and the modules with tables are 'a', 'b'"):
            serving.replace(TwoTables(), tables, modules={"c": "a"})
        with pytest.raises(InputError, match="modules is a list"):
            serving.replace(TwoTables(), tables, modules=["a"])  # type: ignore[arg-type]
        config = EmbeddingBagConfig(
            name="a", embedding_dim=4, num_embeddings=9, feature_names=["x"], pooling=PoolingType.MEAN
        )
        weighted = nn.ModuleDict({"a": EmbeddingBagCollection([config], is_weighted=True)})
        with pytest.raises(UnsupportedError, match="PoolingType.SUM"):
            serving.replace(weighted, tables)
    with pytest.raises(StateError, match="closed"):
        serving.replace(TwoTables(), tables)


def test_sharded_models_are_refused(ckpt: Path, tmp_path: Path) -> None:
    next(numbered(ckpt))
    with process_group(0, 1, str(tmp_path / "store")), serving.open(ckpt) as tables:
        model = sharded(Model())
        with pytest.raises(UnsupportedError, match="sharded"):
            serving.replace(model, tables)


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ("features", "KeyedJaggedTensor"),
        (KeyedJaggedTensor(["y"], torch.tensor([1]), lengths=torch.tensor([1])), "lacks"),
        (KeyedJaggedTensor(["x"], torch.tensor([1.0]), lengths=torch.tensor([1])), "dtype"),
        (KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([2])), "sum to 2"),
        (KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([2, -1])), "hold -1"),
        (KeyedJaggedTensor(["x"], torch.tensor([1], device="meta"), lengths=torch.tensor([1])), "meta"),
    ],
)
def test_batches_that_do_not_fit_are_refused(ckpt: Path, features: Any, told: str) -> None:
    next(numbered(ckpt))
    config = EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=9, feature_names=["x"])
    sequence = EmbeddingConfig(name="b", embedding_dim=4, num_embeddings=9, feature_names=["x"])
    with serving.open(ckpt) as tables:
        model = nn.ModuleDict({"a": EmbeddingBagCollection([config]), "b": EmbeddingCollection([sequence])})
        model = serving.replace(model, tables)
        for name in ("a", "b"):
            with pytest.raises(InputError, match=told):
                model[name](features)


def test_a_copy_of_a_model_reads_the_same_tables(ckpt: Path) -> None:
    saves = numbered(ckpt)
    next(saves)
    with serving.open(ckpt) as tables:
        model = serving.replace(TwoTables(), tables)
        other = copy.deepcopy(model)
        assert other.a is not model.a
        assert other.a.served is tables
        next(saves)
        tables.poll()
        assert other(torch.tensor([1])).unique().tolist() == [1.0]
        assert not model.state_dict()
