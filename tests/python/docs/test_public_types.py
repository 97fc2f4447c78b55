"""Types as a user's type checker sees them: pyright's strict mode over every public name and every public member of it."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from project_paths import ROOT

PYRIGHT = Path(sys.executable).parent / "basedpyright"
#: The modules that users import beside the package itself.
MODULES = [
    "torchrec_embcache.admission",
    "torchrec_embcache.checkpoint.dcp",
    "torchrec_embcache.eviction",
    "torchrec_embcache.exceptions",
    "torchrec_embcache.initializers",
    "torchrec_embcache.integrations.lightning",
    "torchrec_embcache.integrations.megatron",
    "torchrec_embcache.modules",
    "torchrec_embcache.nn",
    "torchrec_embcache.optimizers",
    "torchrec_embcache.checkpoint.saver",
    "torchrec_embcache.serialize",
    "torchrec_embcache.distributed",
    "torchrec_embcache.distributed.train_pipeline",
]


def strict(folder: Path, programs: dict[str, str]) -> dict[str, list[str]]:
    """Returns the errors of pyright for each program in strict mode, except those about libraries that have no types.

    One run checks all programs, because reading the types of torch takes most of its time.
    """
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    settings: dict[str, Any] = {
        "typeCheckingMode": "strict",
        "include": [f"{name}.py" for name in programs],
        "pythonVersion": "3.11",
        "extraPaths": [str(ROOT / "python")],
        "reportMissingTypeStubs": False,  # torchrec has none
        "reportUnusedExpression": False,  # a member alone is what is looked at
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [str(PYRIGHT), "--project", str(folder), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(programs), done.stderr
    said: dict[str, list[str]] = {name: [] for name in programs}
    for one in found["generalDiagnostics"]:
        name = Path(one["file"]).stem
        line = programs[name].splitlines()[one["range"]["start"]["line"]]
        said[name].append(f"{line.strip()}: {one['message']}")
    return said


def assigned(kind: type[Any]) -> set[str]:
    """The attributes that the methods of a class give its instances."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}


def members(kind: type[Any]) -> list[str]:
    """The public members that this package gives a class and its instances."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("torchrec_embcache.")]
    native = [base for base in ours if base.__module__.endswith("._native")]
    names = {name for base in ours for name in vars(base)} | {
        name for base in ours if base not in native for name in assigned(base)
    }
    return sorted(name for name in names if not name.startswith("_"))


def lines_of(place: str) -> list[str]:
    """A function for each class of a module, which looks at each member of it, and a line for each function."""
    module = importlib.import_module(place)
    called = place.replace(".", "_")
    lines = [f"import {place} as {called}"]
    for name in module.__all__:
        found = getattr(module, name)
        lines.append(f"{called}.{name}")
        if inspect.isclass(found):
            lines.append(f"def of_{called}_{name}(it: {called}.{name}) -> None:")
            lines += ["    assert it", *(f"    it.{member}" for member in members(found))]
    return lines


@pytest.fixture(scope="module")
def looked_at() -> list[str]:
    """The lines of a program that looks at everything public."""
    return [line for place in ("torchrec_embcache", *MODULES) for line in lines_of(place)]


@pytest.fixture(scope="module")
def said(looked_at: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Errors of pyright for a program that uses all public names, for README's programs, and for one that has an unknown type."""
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    programs = {
        "public": "\n".join(looked_at) + "\n",
        **{f"readme_{number}": program for number, program in enumerate(readme)},
        "unknown": "import torch\n\ntorch.manual_seed(0)\n",
    }
    return strict(tmp_path_factory.mktemp("strict"), programs)


def test_nothing_public_has_a_type_that_is_partly_unknown(looked_at: list[str], said: dict[str, list[str]]) -> None:
    assert len(looked_at) > 400
    assert "    it.save_async" in looked_at
    assert "    it.rank" in looked_at
    assert said["public"] == []


def test_readmes_programs_hold_in_strict_mode(said: dict[str, list[str]]) -> None:
    programs = [found for name, found in said.items() if name.startswith("readme_")]
    assert len(programs) == 2
    for found in programs:
        # torch has HashStore, and its types do not export it.
        assert [one for one in found if '"HashStore" is not exported' not in one] == []


def test_an_unknown_type_would_be_seen(said: dict[str, list[str]]) -> None:
    (found,) = said["unknown"]
    assert "partially unknown" in found
