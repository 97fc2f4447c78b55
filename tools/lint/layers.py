"""The tree's rules: who imports whom, how long files and functions are, and that nothing names the machine it was written on."""

import ast
import itertools
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "torchrec_embcache"
CRATE = ROOT / "rust" / "core" / "src"

# A module imports from the layers below its own, never from its own or above.
RUST_LAYERS = [
    {"error", "types", "sync", "prefetch"},
    {"budget", "mapping", "memory", "process", "simd"},
    {"logical_thread", "signals"},
    {"paths", "stats", "io", "rows"},
    {"config"},
    {"kernels", "index", "policy"},
    {"lifecycle", "sizing", "slots"},
    {"device", "host", "ssd"},
    {"cache"},
    {"checkpoint"},
    {"serve"},
]
# Module: the modules of the package it may import, those that these import included.
_BASE = {
    "exceptions",
    "closing",
    "buckets",
    "config",
    "paths",
    "initializers",
    "admission",
    "agreement",
    "cuts",
    "eviction",
    "lifecycle",
    "hyperparameters",
    "optimizers",
    "stats",
    "miss_ratios",
    "publish",
    "collective",
    "tracing",
    "shared_rows",
    "flushing",
    "lifetime",
    "disk",
    "host_memory",
    "gradients",
    "under_way",
    "resuming",
}
_DEVICE = {"device_tier", "pinned_memory", "stream_order"}
_SHARD = _BASE | {
    *_DEVICE,
    "torch_updates",
    "kernels",
    "backends",
    "rows",
    "telling",
    "owners",
    "table_settings",
    "table_shard",
}
_TABLE = _SHARD | {"sweeping", "table_copy", "table_warnings", "row_notes", "cache"}
_CACHE = _TABLE | {"bags", "host_copies", "lookahead", "lookup", "profiling", "whole_model", "state_dicts"}
_SHARDS = _TABLE | {"whole_model", "shards", "progress", "table_names", "reports"}
_SAVER = _SHARDS | {"beside", "saving", "sessions", "folder"}
PYTHON_IMPORTS: dict[str, set[str]] = {
    **{name: set() for name in ("agreement", "pinned_memory", "profiling", "reports", "stream_order", "tracing")},
    "lookahead": {"profiling"},
    **{name: {"exceptions"} for name in ("collective", "gradients", "hyperparameters", "stats")},
    **{name: {"exceptions"} for name in ("shared_rows", "under_way")},
    "device_tier": {"exceptions", "pinned_memory", "stream_order"},
    "host_copies": {"pinned_memory", "stream_order"},
    **{name: set() for name in ("exceptions", "closing", "buckets", "tensor_bytes")},
    "config": {"exceptions", "paths"},
    "paths": {"exceptions"},
    "miss_ratios": {"exceptions", "config", "closing"},
    "publish": {"exceptions", "config"},
    "flushing": {"exceptions", "config", "collective", "publish"},
    "lifetime": {"exceptions", "config", "collective", "publish", "flushing", "disk"},
    "disk": {"exceptions", "config", "publish"},
    "resuming": {"exceptions", "config", "publish", "disk"},
    **{name: {"exceptions", "config"} for name in ("admission", "host_memory", "initializers")},
    "cuts": {"exceptions", "agreement"},
    "eviction": {"exceptions", "config", "agreement", "cuts"},
    "lifecycle": {"exceptions", "config", "admission", "agreement", "cuts", "eviction"},
    "lifecycle_configs": {"exceptions", "config", "admission", "agreement", "cuts", "eviction"},
    "optimizers": {"exceptions", "config", "hyperparameters"},
    "torch_updates": _DEVICE | {"exceptions", "config", "hyperparameters", "optimizers"},
    "kernels": _BASE | _DEVICE | {"torch_updates"},
    "triton_kernels": _DEVICE | {"exceptions", "hyperparameters"},
    "triton_backend": _BASE | _DEVICE | {"torch_updates", "kernels", "triton_kernels"},
    "backends": _BASE | _DEVICE | {"torch_updates", "kernels", "triton_backend", "triton_kernels"},
    "rows": {"exceptions", "config", "optimizers"},
    "owners": {"exceptions", "config", "optimizers", "collective", "buckets", "rows"},
    "table_settings": {
        "exceptions",
        "buckets",
        "config",
        "initializers",
        "admission",
        "agreement",
        "cuts",
        "eviction",
        "lifecycle",
        "optimizers",
        "rows",
        "telling",
    },
    "telling": {"exceptions", "config", "optimizers", "rows"},
    "table_shard": _SHARD,
    "sweeping": _SHARD,
    "table_copy": _SHARD,
    **dict.fromkeys(("row_notes", "table_warnings"), _SHARD),
    "cache": _TABLE,
    "progress": {"exceptions"},
    "lookup": _TABLE | {"bags", "lookahead", "profiling"},
    "whole_model": _TABLE,
    "state_dicts": _TABLE | {"whole_model"},
    "bags": {"exceptions", "rows", "config", "optimizers"},
    "table_module": _CACHE,
    "nn": _CACHE | {"table_module"},
    "modules": _CACHE | {"nn", "lifecycle_configs"},
    "sizing": _TABLE | {"whole_model"},
    "sharded": _CACHE | {"nn", "lifecycle_configs", "modules", "sizing"},
    "train_pipeline": _CACHE | {"nn", "lifecycle_configs", "modules", "sharded", "sizing"},
    "beside": _TABLE,
    "table_names": {"exceptions"},
    "save_log": {"collective", "reports"},
    "shards": _TABLE | {"whole_model"},
    "saving": _SHARDS,
    "sessions": _SHARDS | {"beside", "saving", "folder"},
    "saver": _SAVER | {"save_log"},
    "folder": {"exceptions", "paths"},
    "blocks": _CACHE | _SAVER | {"nn", "tensor_bytes"},
    "serialize": _CACHE | _SAVER | {"nn", "blocks", "tensor_bytes"},
    "dcp": _SAVER | {"tensor_bytes"},
    "lightning": _CACHE | _SAVER | {"saver", "save_log", "monitoring"},
    "serving": _CACHE | {"nn", "lifecycle_configs", "modules", "table_names"},
    "monitoring": _CACHE | {"nn", "lifecycle_configs", "modules", "table_names", "serving"},
    "plotting": _CACHE | {"table_names", "monitoring", "sizing"},
    "megatron": _SAVER | {"saver", "save_log"},
}
# Package or module of it: who alone may import it.
RESERVED = {
    "torchrec": {"modules", "serving", "sharded", "train_pipeline"},
    "torchrec_embcache._native": {
        "__init__",  # the version
        "buckets",
        "table_settings",
        "table_shard",
        "table_warnings",
        "telling",
        "rows",
        "stats",
        "miss_ratios",
        "initializers",
        "admission",
        "agreement",
        "cuts",
        "eviction",
        "lifecycle",
        "sweeping",
        "owners",
        "device_tier",
        "kernels",
        "triton_backend",
        "lookahead",
        "lookup",
        "publish",
        "disk",
        "paths",
        "beside",
        "saving",
        "sessions",
        "blocks",
        "dcp",
        "serving",
        "cli",
    },
    "torch.distributed.checkpoint": {"dcp", "cli"},
    "triton": {"triton_kernels"},
    "megatron": {"megatron"},
    "lightning": {"lightning"},
    "prometheus_client": {"monitoring", "cli"},
    "tensorboard": set(),
    "matplotlib": {"plotting"},
}
SKIPPED = {
    *(".git", ".venv", "target", "dist", "__pycache__", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache"),
}


def files(*suffixes: str) -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(folder, name) for name in names if name.endswith(suffixes))


def rust_imports(source: str) -> set[str]:
    """The crate's top modules that a source names, comments and literals apart."""
    source = re.sub(r"//[^\n]*", "", source)
    found = set(re.findall(r"\bcrate::([a-z_]+)", source))
    for group in re.finditer(r"\bcrate::\{", source):
        depth, item, at = 1, "", group.end()
        while depth:
            char = source[at]
            depth += (char == "{") - (char == "}")
            if (depth == 1 and char == ",") or depth == 0:
                found.update(re.findall(r"^\s*([a-z_]+)", item))
                item = ""
            else:
                item += char
            at += 1
    return found


def python_imports(source: str, package: str = "torchrec_embcache") -> set[str]:
    """Every module that a source in `package` imports, by absolute name, `from a import b` as both `a` and `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def package_modules() -> Iterator[tuple[Path, str, set[str]]]:
    """Each Python source of the package, the top module it belongs to, and what it imports."""
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        package = ".".join(["torchrec_embcache", *inside.parts[:-1]])
        yield inside, inside.parts[0].removesuffix(".py"), python_imports(path.read_text(), package)


def test_rust_modules_import_downward_only() -> None:
    level = {name: number for number, layer in enumerate(RUST_LAYERS) for name in layer}
    upward = []
    for path in CRATE.rglob("*.rs"):
        module = path.relative_to(CRATE).parts[0].removesuffix(".rs")
        if module == "lib":
            continue
        assert module in level, f"{path}: module {module!r} has no layer in this test"
        upward += [
            f"{path.relative_to(ROOT)}: {module} imports {other}"
            for other in sorted(rust_imports(path.read_text()))
            if other != module and level.get(other, -1) >= level[module]
        ]
    assert not upward


def file_imports(layer: Path) -> dict[str, set[str]]:
    """For each file of a layer of the core, by its path in the layer, the others that it imports, tests apart."""
    names = {path.relative_to(layer).with_suffix("").as_posix(): path for path in layer.rglob("*.rs")}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        parts = name.split("/")
        if parts[-1] == "mod" or {"tests", "models", "loom"} & set(parts):
            continue
        source = re.sub(r"//[^\n]*", "", path.read_text()).split("#[cfg(test)]\nmod tests {")[0]
        above = parts[:-1]
        named: list[tuple[list[str], str]] = [
            ([], inner) for inner in re.findall(rf"\bcrate::{layer.name}::([a-z_:]+)", source)
        ]
        named += [(above, inner) for inner in re.findall(r"(?<!super::)\bsuper::([a-z_:]+)", source)]
        if above:
            named += [(above[:-1], inner) for inner in re.findall(r"\bsuper::super::([a-z_:]+)", source)]
        graph[name] = set()
        for base, inner in named:
            # What is named may be a file, or something in one.
            steps = [*base, *filter(None, inner.split("::"))]
            candidates = ("/".join(steps[:count]) for count in range(len(steps), 0, -1))
            graph[name].update(itertools.islice((other for other in candidates if other in names), 1))
        graph[name].discard(name)
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The members of circles of imports; empty where there is none."""
    left = {name: others & graph.keys() for name, others in graph.items()}
    while True:
        imported = set().union(*left.values())
        free = {name for name, others in left.items() if not others or name not in imported}
        if not free:
            return sorted(left)
        left = {name: others - free for name, others in left.items() if name not in free}


@pytest.mark.parametrize("layer", sorted({path.parent.name for path in CRATE.glob("*/mod.rs")}))
def test_no_files_of_a_layer_import_each_other_in_a_circle(layer: str) -> None:
    files = file_imports(CRATE / layer)
    assert not circle(files)
    folders: dict[str, set[str]] = {}
    for name, others in files.items():
        folder = name.rpartition("/")[0]
        folders.setdefault(folder, set()).update(other.rpartition("/")[0] for other in others)
    between = {folder: others - {folder, ""} for folder, others in folders.items() if folder}
    assert not circle(between)


def test_only_the_host_tier_and_the_residency_name_slots_that_are_idle() -> None:
    """A slot is idle until the table's lock is given up, which no lifetime says. An operation of the residency ends before that."""
    named = {
        path.relative_to(CRATE).as_posix()
        for path in CRATE.rglob("*.rs")
        if re.search(r"\bIdle\b", re.sub(r"//[^\n]*", "", path.read_text()))
    }
    assert named
    assert all(name.startswith(("host/", "cache/residency/")) for name in named), named


def python_files() -> dict[str, Path]:
    """The Python files of the package by their path in it, without suffix. The package's own `__init__` is not among them."""
    names = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {name: path for name, path in names.items() if name != "__init__"}


def imported_files(source: str, package: str, names: Collection[str]) -> set[str]:
    """The files, of `names`, that a source in `package` imports: anywhere in it, so in functions and under `TYPE_CHECKING` too."""

    def file_of(module: str) -> str | None:
        inner = module.removeprefix("torchrec_embcache").lstrip(".").replace(".", "/")
        return next((name for name in (inner, f"{inner}/__init__") if name in names), None)

    found: set[str | None] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(file_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.update(file_of(f"{base}.{alias.name}") or file_of(base) for alias in node.names)
    return {name for name in found if name is not None}


def test_no_python_files_import_each_other_in_a_circle() -> None:
    names = python_files()
    graph = {}
    for name, path in names.items():
        package = ".".join(["torchrec_embcache", *name.split("/")[:-1]])
        graph[name] = imported_files(path.read_text(), package, names) - {name}
    assert not circle(graph)


def test_the_core_knows_no_python_and_prints_nothing() -> None:
    bad = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in CRATE.rglob("*.rs")
        for match in re.finditer(r"\bpyo3\b|\be?println!|\be?print!|\bdbg!", re.sub(r"//[^\n]*", "", path.read_text()))
    ]
    assert not bad


def test_checkpoints_are_reached_by_a_checked_directory_only() -> None:
    """Public functions take a `Directory`, no path and no engine. `Directory::in_engine`, which checks nothing, is for tests."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in product_files() if path.suffix == ".rs"}
    takes = r"pub fn (\w+)(?:<[^(]*>)?\([^{;]*?(?:IoEngine|: &Path|PathBuf)[^{;]*?\) *(?:->|\{)"
    handle = sources.pop("rust/core/src/checkpoint/directory.rs")
    assert re.findall(takes, handle) == ["to_save", "to_load", "in_engine"]
    assert not [name for name, source in sources.items() if "in_engine(" in source]
    inside = [source for name, source in sources.items() if name.startswith("rust/core/src/checkpoint/")]
    # This one checks the path that it takes.
    assert [name for source in inside for name in re.findall(takes, source)] == ["directory_of_parts"]


def test_each_module_of_the_core_that_logs_has_a_logger_in_python() -> None:
    """Without one it would follow the level of the whole package, and its records would have that name."""
    logs = {
        path.relative_to(CRATE).parts[0].removesuffix(".rs")
        for path in CRATE.rglob("*.rs")
        if re.search(r"\btracing::(?:event|error|warn|info|debug|trace)!", path.read_text())
    }
    source = (ROOT / "rust" / "pyext" / "src" / "logging.rs").read_text()
    assert logs
    assert logs <= set(re.findall(r'Module::new\("([a-z_]+)"\)', source))


def test_python_modules_import_downward_only() -> None:
    bad = []
    for path, module, names in package_modules():
        if module in {"__init__", "cli", "__main__"}:
            continue
        assert module in PYTHON_IMPORTS, f"{path}: module {module!r} has no rule in this test"
        others = {name.split(".")[1] for name in names if name.startswith("torchrec_embcache.")} & PYTHON_IMPORTS.keys()
        bad += [f"{path} imports {other}" for other in sorted(others - PYTHON_IMPORTS[module] - {module})]
    assert not bad


@pytest.mark.parametrize(("package", "importers"), RESERVED.items())
def test_a_heavy_package_is_imported_in_its_own_modules_only(package: str, importers: set[str]) -> None:
    bad = [
        f"{path} imports {name}"
        for path, module, names in package_modules()
        if module not in importers
        for name in names
        if name == package or name.startswith(package + ".")
    ]
    assert not bad


def test_no_file_passes_600_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in files(".rs", ".py", ".pyi")
        if (lines := path.read_text().count("\n")) > 600
    }
    assert not long


def product_files() -> Iterator[Path]:
    """The sources of the package, of the core and of the binding.

    Files that hold tests alone are not among them, nor is the binding's stub: a module has one, which lists all that is in it.
    """
    yield from PACKAGE.rglob("*.py")
    for path in (ROOT / "rust").glob("*/src/**/*.rs"):
        if not {"tests", "models", "loom"} & {*path.parts, path.stem}:
            yield path


def without_tests(source: str) -> str:
    """A Rust source up to its module of tests."""
    return source.split("#[cfg(test)]\nmod tests {")[0]


def rust_functions(source: str) -> Iterator[tuple[str, int]]:
    """The name of each function of a formatted source, and how many lines it has."""
    lines = without_tests(source).splitlines()
    for first, line in enumerate(lines):
        begins = re.match(r"( *)(?:pub(?:\([^)]*\))? )?(?:const )?(?:unsafe )?(?:extern \"C\" )?fn (\w+)", line)
        if begins is None:
            continue
        indent, name = begins.groups()
        last = next(at for at in range(first, len(lines)) if lines[at].rstrip().endswith(("{", "}", ";")))
        if lines[last].endswith("{"):
            last = next(at for at in range(last, len(lines)) if lines[at] == indent + "}")
        yield name, last - first + 1


def python_functions(source: str) -> Iterator[tuple[str, int]]:
    """The name of each function, and how many lines it has without its docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = node.body[0] if ast.get_docstring(node) is not None else None
            about = said.end_lineno - said.lineno + 1 if said is not None and said.end_lineno is not None else 0
            assert node.end_lineno is not None, "the parser sets it"
            yield node.name, node.end_lineno - node.lineno + 1 - about


def test_product_files_end_at_450_lines() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in product_files()
        if (lines := without_tests(path.read_text()).count("\n")) > 450
    }
    assert not long


def test_functions_end_at_60_lines() -> None:
    long = {
        f"{path.relative_to(ROOT).as_posix()}::{name}": lines
        for path in product_files()
        for name, lines in (rust_functions if path.suffix == ".rs" else python_functions)(path.read_text())
        if lines > 60
    }
    assert not long


def positional_booleans(source: str) -> Iterator[str]:
    """Each parameter of a function or method of a stub that is a `bool` and can be given by position."""
    owners: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while owners:
        owner, node = owners.pop()
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.ClassDef):
                owners.append((f"{inner.name}.", inner))
            elif isinstance(inner, ast.FunctionDef):
                for parameter in (*inner.args.posonlyargs, *inner.args.args):
                    kind = ast.unparse(parameter.annotation) if parameter.annotation is not None else ""
                    if "bool" in kind.split(" | "):
                        yield f"{owner}{inner.name}({parameter.arg})"


def test_booleans_cross_the_language_border_by_name() -> None:
    """A reader of a call cannot tell what a `True` by position says."""
    assert not {name for stub in PACKAGE.glob("_native*.pyi") for name in positional_booleans(stub.read_text())}


def types_without_names(source: str) -> Iterator[str]:
    """Each place in a stub whose type does not say what its parts are: a tuple, a dict, or `Any`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in {"tuple", "dict", "Any"}:
            yield f"line {node.lineno}: {node.id}"


def test_what_crosses_the_language_border_has_named_fields() -> None:
    """Nothing but its place tells what a part of a tuple is. `Mapping` is for names that are data, such as hyperparameters."""
    assert not {name for stub in PACKAGE.glob("_native*.pyi") for name in types_without_names(stub.read_text())}


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    machine = re.compile(r"(?<![\w.])/(?:work|farm|root)/[\w.]")
    bad = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files(".rs", ".py", ".pyi", ".toml", ".txt", ".md", ".lock", "Makefile", "run", ".yml", ".yaml")
        for line in path.read_text().splitlines()
        if machine.search(line)
    ]
    assert not bad


def doc_comments(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each documentation comment (Rust) or docstring (Python) of a source."""
    source = path.read_text()
    if path.suffix == ".rs":
        for found in re.finditer(
            r"(?:^[ \t]*(?P<mark>//[/!])(?!/).*\n)(?:^[ \t]*(?P=mark)(?!/).*\n)*", source, re.MULTILINE
        ):
            text = re.sub(r"^[ \t]*//[/!]", "", found.group(), flags=re.MULTILINE)
            yield source.count("\n", 0, found.start()) + 1, " ".join(text.split())
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), " ".join(text.split())


def is_fragment(text: str) -> bool:
    """Whether a text begins amid a sentence or ends amid one, as where it goes on at the next item."""
    return text[:1].islower() or text.endswith((",", ";"))


def test_documentation_comments_are_sentences_of_their_own() -> None:
    """An editor shows the comment of one item without those of its neighbours."""
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files(".rs", ".py")
        for line, text in doc_comments(path)
        if is_fragment(text)
    ]
    assert not bad


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    for name, source in (
        ("a.rs", "/// Bytes of a block,\nconst A: u8 = 1;\n    /// and of\n    /// two.\n"),
        ("a.py", '"""and so on"""\n'),
    ):
        (tmp_path / name).write_text(source)
        texts = list(doc_comments(tmp_path / name))
        assert all(is_fragment(text) for _, text in texts), texts
        assert len(texts) == name.endswith("rs") + 1
    source = "use crate::{cache::Table, rows::{a, b}};\nfn f() { crate::ssd::g() } // crate::host"
    assert rust_imports(source) == {"cache", "rows", "ssd"}
    assert python_imports("from .cache import Lookup\nimport torchrec.sparse") >= {
        "torchrec_embcache.cache",
        "torchrec.sparse",
    }
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "one.rs").write_text("use crate::layer::two::Two;\n#[cfg(test)]\nmod tests {\nuse super::four::Four;\n}\n")
    (layer / "two.rs").write_text("use super::three::{Three, THREE};")
    (layer / "three.rs").write_text("fn f() { super::one::g() }")
    (layer / "four.rs").write_text("use crate::layer::one;")
    assert file_imports(layer) == {"one": {"two"}, "two": {"three"}, "three": {"one"}, "four": {"one"}}
    assert circle(file_imports(layer)) == ["one", "three", "two"]
    names = {"cache", "rows", "modules/__init__", "modules/tables"}
    source = (
        "from . import rows, _native\nif a:\n    from .cache import A\ndef f():\n    from .modules import tables, B\n"
    )
    assert imported_files(source, "torchrec_embcache", names) == names
    source = "fn a(\n    b: u8,\n) {\n    c();\n}\ntrait T {\n    fn d();\n    fn e() {}\n}\n"
    source += "#[cfg(test)]\nmod tests {\n    fn f() {\n    }"
    assert list(rust_functions(source)) == [("a", 5), ("d", 1), ("e", 1)]
    assert list(python_functions('def a(b):\n    """Say.\n\n    More.\n    """\n    return b\n')) == [("a", 2)]
    source = "def f(a: bool, b: int): ...\nclass C:\n    def g(self, c: bool | None = None, *, d: bool): ...\n"
    assert set(positional_booleans(source)) == {"f(a)", "C.g(c)"}
    source = "A = tuple[int, int]\nclass B:\n    c: list[dict[str, int]]\n    def d(self, e: Any) -> list[int]: ...\n"
    assert set(types_without_names(source)) == {"line 1: tuple", "line 3: dict", "line 4: Any"}
    below = "torchrec_embcache.sharded"
    assert python_imports("from ..cache import Lookup", below) == {
        "torchrec_embcache.cache",
        "torchrec_embcache.cache.Lookup",
    }
    assert python_imports("from . import lookup", below) == {below, below + ".lookup"}
