"""Tracing and compiling of models with served modules, as docs/serving-models.md describes them."""

import copy
import gc
import io
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lifecycle_cases import embedding
from project_paths import ROOT
from torchrec_embcache import Saver, serving
from torchrec_embcache.exceptions import MismatchError, StateError, UnsupportedError

PAGE = ROOT / "docs" / "serving-models.md"
ROWS, DIM = 100, 4
ARGUMENTS = torch.tensor([7, 8, 9]), torch.tensor([2, 1])
OTHERS = torch.tensor([7, 8, 9, 10, 99]), torch.tensor([0, 2, 3])  # another number of ids and of samples


class Bags(nn.Module):
    """A collection and a layer over it."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.dense = tables, nn.Linear(DIM, 1)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.dense(self.tables(KeyedJaggedTensor(["seen"], values, lengths=lengths)).values())


class Sequences(Bags):
    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.dense(self.tables(KeyedJaggedTensor(["seen"], values, lengths=lengths))["seen"].values())


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Tables]:
    place = tmp_path_factory.mktemp("traced")
    source = embedding(embedding_dim=DIM)
    torch.manual_seed(0)
    source.import_rows(range(ROWS), torch.rand(ROWS, DIM))
    Saver(0).save(nn.ModuleDict({"tables": source}), place / "ckpt")
    with serving.open(place / "ckpt") as opened:
        yield opened


def plain_bags() -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["seen"])
    return EmbeddingBagCollection([config])


def plain_sequences() -> EmbeddingCollection:
    config = EmbeddingConfig(name="item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["seen"])
    return EmbeddingCollection([config])


def quantised(model: nn.Module) -> nn.Module:
    from torchrec.inference.modules import quantize_embeddings

    return quantize_embeddings(model, torch.int8, inplace=True)


MODELS: dict[str, Callable[[serving.Tables], nn.Module]] = {
    "bags": lambda _: Bags(plain_bags()),
    "bags, quantised": lambda _: quantised(Bags(plain_bags())),
    "bags, served": lambda tables: serving.replace(Bags(plain_bags()), tables),
    "sequences": lambda _: Sequences(plain_sequences()),
    "sequences, quantised": lambda _: quantised(Sequences(plain_sequences())),
    "sequences, served": lambda tables: serving.replace(Sequences(plain_sequences()), tables),
}


def exported(model: nn.Module, *, strict: bool) -> Any:
    dynamic = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    return torch.export.export(model, ARGUMENTS, strict=strict, dynamic_shapes=dynamic)


def stored(program: Any) -> Any:
    """Saved, and loaded again."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def fx_traced(model: nn.Module) -> nn.Module:
    from torchrec.fx import symbolic_trace

    return symbolic_trace(model)


WAYS: dict[str, Callable[[Any], Any]] = {
    "called as it is": lambda model: model,
    "`torch.compile`": lambda model: torch.compile(model, backend="eager"),
    "`torch.compile(fullgraph=True)`": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "`torch.export.export(strict=True)`": lambda model: exported(model, strict=True).module(),
    "`torch.export.export(strict=False)`": lambda model: exported(model, strict=False).module(),
    "the same, saved and loaded": lambda model: stored(exported(model, strict=False)),
    "`torchrec.fx.symbolic_trace`": fx_traced,
    "the same, and `torch.jit.script`": lambda model: torch.jit.script(fx_traced(model)),
    "`torch.jit.script`": torch.jit.script,
    "`torch.jit.trace`": lambda model: torch.jit.trace(model, ARGUMENTS, check_trace=False),
}


def works(way: Callable[[Any], Any], model: nn.Module) -> bool:
    """Returns true if `way` works and its result equals that of the model, also for another number of ids."""
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = model(*OTHERS)
        try:
            got = way(copy.deepcopy(model))(*OTHERS)
        except Exception:
            return False
    return torch.equal(got, want)


def tried(tables: serving.Tables) -> str:
    lines = [f"| | {' | '.join(MODELS)} |", f"| --- |{' --- |' * len(MODELS)}"]
    for name, way in WAYS.items():
        found = ["yes" if works(way, make(tables).eval()) else "no" for make in MODELS.values()]
        lines.append(f"| {name} | {' | '.join(found)} |")
    return "\n".join(lines)


@pytest.mark.slow
def test_the_page_says_what_trials_gave(tables: serving.Tables) -> None:
    (said,) = re.findall(r"<!-- [^\n]*test_serving_compiled[^\n]* -->\n\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    assert said == tried(tables)


def test_graph_follows_checkpoints_and_reads_the_pinned_version(tmp_path: Path) -> None:
    source, saver = embedding(embedding_dim=DIM), Saver(0)
    model = nn.ModuleDict({"tables": source})

    def save(value: float) -> None:
        source.import_rows(range(ROWS), torch.full((ROWS, DIM), value))
        saver.save(model, tmp_path / "ckpt", keep=3)

    save(1.0)
    with serving.open(tmp_path / "ckpt") as opened:
        served = serving.replace(Bags(plain_bags()), opened)
        served.dense = nn.Identity()
        graph = exported(served, strict=False).module()
        with opened.pin():
            save(2.0)
            opened.poll()
            assert graph(*ARGUMENTS).unique().tolist() == [1.0, 2.0], "two ids pooled and one"
        assert graph(*ARGUMENTS).unique().tolist() == [2.0, 4.0]


def test_an_exported_graph_reads_the_model_that_was_replaced_last(tmp_path: Path) -> None:
    """As when a newer model takes the place of one, while that still answers requests."""
    opened = []
    for value in (1.0, 5.0):
        place = tmp_path / str(value)
        place.mkdir(mode=0o700)
        source = embedding(embedding_dim=DIM)
        source.import_rows(range(ROWS), torch.full((ROWS, DIM), value))
        Saver(0).save(nn.ModuleDict({"tables": source}), place / "ckpt")
        opened.append(serving.open(place / "ckpt"))
    with opened[0], opened[1]:
        models = [serving.replace(Bags(plain_bags()), tables) for tables in opened]
        models[1].dense = nn.Identity()
        graph = stored(exported(models[1], strict=False))
        assert graph(*ARGUMENTS).unique().tolist() == [5.0, 10.0]
        assert "tables#" not in str(graph.graph), "another process has other numbers"


def test_a_graph_of_another_table_is_refused(tables: serving.Tables) -> None:
    model = serving.replace(Bags(plain_bags()), tables)
    with pytest.raises(MismatchError, match=r"table 'item' of 3 columns .* 'item' of \d+ columns"):
        torch.ops.torchrec_embcache.served_rows(torch.tensor([1]), "tables", "item", 3)
    with pytest.raises(MismatchError, match="table 'other'"):
        torch.ops.torchrec_embcache.served_rows(torch.tensor([1]), "tables", "other", DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedError, match=r"torch\.export"):
            torch.jit.trace(model, ARGUMENTS, check_trace=False)


def test_a_graph_whose_module_is_gone_says_what_to_do(tables: serving.Tables) -> None:
    model = serving.replace(Bags(plain_bags()), tables)
    graph = exported(model, strict=False).module()
    del model
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(StateError, match="serving.replace"):
        graph(*ARGUMENTS)
