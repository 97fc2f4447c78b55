"""The worked examples in the docstrings of the public names run, and give what they say."""

import doctest
import inspect
from pathlib import Path

import pytest

import torchrec_embcache
from torchrec_embcache import lifecycle_configs, monitoring
from world import process_group


def public_objects() -> dict[str, object]:
    """Each public class and function by name, and those in the public modules."""
    found = {name: getattr(torchrec_embcache, name) for name in torchrec_embcache.__all__}
    e = torchrec_embcache
    for module in (e.admission, e.eviction, e.initializers, e.optimizers, e.exceptions, lifecycle_configs, monitoring):
        found |= {name: getattr(module, name) for name in module.__all__}
    return {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)}


# Classes whose methods take, as torch's interface of them does, whatever a later torch may give.
OPEN_IN_TORCH = {"EmbCacheStorageReader", "EmbCacheStorageWriter"}
PUBLIC = public_objects()
EXAMPLES = {
    f"{name}: {example.name}": example
    for name, value in PUBLIC.items()
    for example in doctest.DocTestFinder(recurse=True).find(value, name)
    if example.examples
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_in_docstrings_give_what_they_say(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    with process_group(0, 1, str(tmp_path / "store")):
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize(
    "name",
    [
        "CacheTable",
        "EmbCacheEmbedding",
        "EmbCacheEmbeddingBag",
        "EmbCacheEmbeddingBagCollection",
        "EmbCacheEmbeddingBagCollectionSharder",
        "EmbCacheEmbeddingCollection",
    ],
)
def test_a_class_that_takes_batches_has_a_worked_one(name: str) -> None:
    assert f"{name}: {name}" in EXAMPLES


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_says_what_it_is(name: str) -> None:
    value = PUBLIC[name]
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        silent = [
            f"{name}.{member}"
            for member, what in vars(value).items()
            if not member.startswith("_") and (inspect.isfunction(what) or isinstance(what, property | classmethod))
            if not inspect.getdoc(getattr(value, member))
        ]
        assert not silent


# What an enumeration takes when it is called is Python's.
@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - OPEN_IN_TORCH - {"EmbCacheWarning", "AdmitAndEvictPolicyType"}))
def test_signatures_of_public_names_list_every_argument(name: str) -> None:
    value = PUBLIC[name]
    members = [value] if inspect.isfunction(value) else [value, *vars(value).values()]
    callables = [member.__func__ if isinstance(member, classmethod) else member for member in members]
    for called in callables:
        if not (inspect.isfunction(called) or called is value) or getattr(called, "__name__", "__").startswith("_"):
            continue
        kinds = {parameter.kind for parameter in inspect.signature(called).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, called
