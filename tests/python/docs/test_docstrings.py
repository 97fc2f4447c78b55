"""The examples in the docstrings of the public names run and give the results that they show."""

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torchrec_embcache
from processes import process_group
from project_paths import ROOT


def reference() -> ModuleType:
    """The module that says which public names the reference of the docs has."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "site" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lightning and Megatron warn of themselves when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# The modules whose names are public as well as those of the package.
PUBLIC_MODULES = [
    "admission",
    "checkpoint",
    "checkpoint.dcp",
    "eviction",
    "exceptions",
    "initializers",
    "integrations.lightning",
    "integrations.megatron",
    "modules.recsdk",
    "monitoring",
    "optimizers",
    "plotting",
    "serialize",
    "serving",
    "sizing",
]
# Names in their `__all__` that other modules of this package use: no business of users.
INSIDE = {"check_not_admitted", "check_saved_optimizer", "gradient_limits", "native_hyperparameters"}
# Other names of a class that is there, types, and a constant, which have no docstrings.
OTHER_NAMES = {
    "Loader", "Saver", "LoadInfo", "NotAdmitted", "STRATEGY", "METRICS", "SERVING_METRICS", "MetricValue",
    "AsyncSaveShardedStrategy", "LoadStrategyBase", "SaveStrategyBase",  # megatron's
}  # fmt: skip


def public_objects() -> dict[str, object]:
    """Each public class and function by its name from the package on, such as `optimizers.SGD`."""
    found = {}
    for name in reference().names():
        module, _, last = name.rpartition(".")
        with quiet():
            holder = importlib.import_module(f"torchrec_embcache.{module}") if module else torchrec_embcache
        found[name] = getattr(holder, last)
    return found


# Classes whose methods take, as torch's interface of them does, whatever a later torch may give.
OPEN_IN_TORCH = {"EmbCacheStorageReader", "EmbCacheStorageWriter"} | {
    f"integrations.megatron.{name}"
    for name in (
        "ShardedTables",
        "SaveShardedStrategy",
        "LoadShardedStrategy",
        "SaveCommonStrategy",
        "LoadCommonStrategy",
    )
}
PUBLIC = public_objects()
EXAMPLES = {
    f"{name}: {example.name}": example
    for name, value in PUBLIC.items()
    for example in doctest.DocTestFinder(recurse=True).find(value, name)
    if example.examples
}
for module in PUBLIC_MODULES:
    with quiet():
        there = importlib.import_module(f"torchrec_embcache.{module}")
    found = doctest.DocTestFinder(recurse=False).find(there, module)
    EXAMPLES |= {f"{module}: {example.name}": example for example in found if example.examples}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_in_docstrings_give_what_they_say(name: str, tmp_path: Path, monkeypatch) -> None:
    """An example has `torch`, `nn` and an empty folder to work in, and no other name than it makes."""
    example = EXAMPLES[name]
    example.globs = {"torch": torch, "nn": torch.nn, "__name__": "__main__"}
    work = tmp_path / "work"
    work.mkdir(mode=0o700)
    monkeypatch.chdir(work)
    monkeypatch.setattr(logging.getLogger("torchrec_embcache"), "disabled", True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report: list[str] = []
    with process_group(0, 1, str(tmp_path / "store")), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(lightning|megatron|torchrec|torch)\.")
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_every_public_name_is_in_the_reference_once() -> None:
    listed = reference().names()
    assert len(listed) == len(set(listed))
    objects = [PUBLIC[name] for name in listed]
    assert len({id(value) for value in objects}) == len(objects)
    missing = [
        name
        for name in torchrec_embcache.__all__
        if name not in listed and not inspect.ismodule(getattr(torchrec_embcache, name))
    ]
    for module in PUBLIC_MODULES:
        with quiet():
            there = importlib.import_module(f"torchrec_embcache.{module}")
        missing += [
            f"{module}.{name}"
            for name in there.__all__
            if not any(getattr(there, name) is value for value in objects) and name not in INSIDE | OTHER_NAMES
        ]
    assert not missing
    modules = {name for name in torchrec_embcache.__all__ if inspect.ismodule(getattr(torchrec_embcache, name))}
    assert modules <= set(PUBLIC_MODULES)


def test_docstrings_have_no_code_that_nobody_runs() -> None:
    package = ROOT / "python" / "torchrec_embcache"
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    assert not [name for name, source in sources.items() if "```" in source or re.search(r"::\n\n +\w", source)]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_has_an_example(name: str) -> None:
    assert f"{name}: {name}" in EXAMPLES, f"{name} has no example in its docstring"


def own_methods(owner: type) -> list[str]:
    """The public methods that a class adds to what torch, TorchRec, Lightning or Megatron ask of it."""
    theirs = [base for base in owner.__mro__ if not base.__module__.startswith("torchrec_embcache")]
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod))
        and not any(hasattr(base, name) for base in theirs)
    ]


def test_methods_that_the_reference_leaves_out_are_there() -> None:
    members = {name for value in PUBLIC.values() if inspect.isclass(value) for name in dir(value)}
    assert set(reference().CALLED_BY_OTHERS) <= members


@pytest.mark.parametrize("name", sorted(name for name, value in PUBLIC.items() if inspect.isclass(value)))
def test_every_public_method_is_called_in_an_example(name: str) -> None:
    shown = "".join(one.source for example in EXAMPLES.values() for one in example.examples)
    silent = [method for method in own_methods(PUBLIC[name]) if not re.search(rf"\.{method}\b", shown)]
    assert not set(silent) - set(reference().CALLED_BY_OTHERS)


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


# The arguments of a call of an enumeration or a typed dictionary are Python's own.
@pytest.mark.parametrize(
    "name",
    sorted(
        PUBLIC.keys() - OPEN_IN_TORCH - {"EmbCacheWarning", "TableOptions", "modules.recsdk.AdmitAndEvictPolicyType"}
    ),
)
def test_signatures_of_public_names_list_every_argument(name: str) -> None:
    value = PUBLIC[name]
    members = [value] if inspect.isfunction(value) else [value, *vars(value).values()]
    callables = [member.__func__ if isinstance(member, classmethod) else member for member in members]
    for called in callables:
        if not (inspect.isfunction(called) or called is value) or getattr(called, "__name__", "__").startswith("_"):
            continue
        kinds = {parameter.kind for parameter in inspect.signature(called).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, called
