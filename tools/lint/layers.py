"""Import directions: the layers of the core and of the package, and the modules that alone may import a heavy package."""

import ast
import itertools
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from sources import (
    CRATE,
    PACKAGE,
    ROOT,
    name_of,
    package_modules,
    product_files,
    report,
    rust_imports,
    without_comments,
)

# A module imports from the layers below its own, never from its own or above.
RUST_LAYERS = [
    {"error", "types"},
    {"runtime"},
    {"paths", "stats", "io", "rows"},
    {"config"},
    {"kernels", "index", "policy"},
    {"lifecycle", "sizing", "slots"},
    {"tiers", "ssd"},
    {"cache"},
    {"checkpoint"},
    {"serve"},
]
PYTHON_LAYERS = [
    {"exceptions", "_buckets", "_closing"},
    {"stats", "initializers", "_autograd", "_device", "_dist", "_hyperparameters", "_paths", "_saves_in_flight"},
    {"config", "optimizers", "_fs"},
    {"admission", "eviction", "_kernels", "_ssd"},
    {"table"},
    {"model", "_lookup"},
    {"nn", "sizing"},
    {"modules", "checkpoint"},
    {"distributed", "serialize", "serving"},
    {"monitoring"},
    {"plotting", "integrations"},
    {"cli"},
    {"__main__"},
]
# Package or module of it: the modules that alone may import it.
RESERVED = {
    "torchrec": {"modules", "serving", "distributed"},
    "torchrec_embcache._native": {
        "__init__",  # the version
        "_buckets",
        "_device",
        "_kernels",
        "_lookup",
        "_paths",
        "_ssd",
        "admission",
        "checkpoint",
        "cli",
        "eviction",
        "initializers",
        "model",
        "serving",
        "stats",
        "table",
    },
    "torch.distributed.checkpoint": {"checkpoint", "cli"},
    "triton": {"_kernels"},
    "megatron": {"integrations"},
    "lightning": {"integrations"},
    "prometheus_client": {"monitoring", "cli"},
    "tensorboard": set(),
    "matplotlib": {"plotting"},
}


def rust_directions() -> Iterator[str]:
    """A module of the core imports only from layers below its own (RUST_LAYERS)."""
    level = {name: number for number, layer in enumerate(RUST_LAYERS) for name in layer}
    for path in sorted(CRATE.rglob("*.rs")):
        module = path.relative_to(CRATE).parts[0].removesuffix(".rs")
        if module == "lib":
            continue
        if module not in level:
            yield f"{name_of(path)}: add module {module!r} to RUST_LAYERS"
            continue
        for other in sorted(rust_imports(path.read_text())):
            if other != module and level.get(other, -1) >= level[module]:
                yield f"{name_of(path)}: {module} imports {other}"


def file_imports(layer: Path) -> dict[str, set[str]]:
    """The files that each file of a layer of the core imports from the same layer, without tests. Keys are paths in the layer."""
    names = {path.relative_to(layer).with_suffix("").as_posix(): path for path in layer.rglob("*.rs")}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        parts = name.split("/")
        if parts[-1] == "mod" or {"tests", "models", "loom"} & set(parts):
            continue
        source = without_comments(path.read_text())
        above = parts[:-1]
        named: list[tuple[list[str], str]] = [
            ([], inner) for inner in re.findall(rf"\bcrate::{layer.name}::([a-z_:]+)", source)
        ]
        named += [(above, inner) for inner in re.findall(r"(?<!super::)\bsuper::([a-z_:]+)", source)]
        if above:
            named += [(above[:-1], inner) for inner in re.findall(r"\bsuper::super::([a-z_:]+)", source)]
        graph[name] = set()
        for base, inner in named:
            # The name may be that of a file, or of an item in one.
            steps = [*base, *filter(None, inner.split("::"))]
            candidates = ("/".join(steps[:count]) for count in range(len(steps), 0, -1))
            graph[name].update(itertools.islice((other for other in candidates if other in names), 1))
        graph[name].discard(name)
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The members of circles of imports; empty if there is none."""
    left = {name: others & graph.keys() for name, others in graph.items()}
    while True:
        imported = set().union(*left.values())
        free = {name for name, others in left.items() if not others or name not in imported}
        if not free:
            return sorted(left)
        left = {name: others - free for name, others in left.items() if name not in free}


def rust_circles() -> Iterator[str]:
    """No files, and no folders, of a layer of the core import each other in a circle."""
    for layer in sorted({path.parent for path in CRATE.glob("*/mod.rs")}):
        graph = file_imports(layer)
        folders: dict[str, set[str]] = {}
        for name, others in graph.items():
            folder = name.rpartition("/")[0]
            folders.setdefault(folder, set()).update(other.rpartition("/")[0] for other in others)
        between = {folder: others - {folder, ""} for folder, others in folders.items() if folder}
        for members in (circle(graph), circle(between)):
            if members:
                yield f"{name_of(layer)}: {', '.join(members)}"


def write_access() -> Iterator[str]:
    """Only the host tier, and placement and expiry in the cache, name `WriteAccess`.

    It is valid until the table's lock is released, which no lifetime expresses. Their operations end before that.
    """
    for path in sorted(CRATE.rglob("*.rs")):
        named = re.search(r"\bWriteAccess\b", without_comments(path.read_text()))
        if named and not path.relative_to(CRATE).as_posix().startswith(
            ("tiers/", "cache/placement/", "cache/expiry/", "cache/residency/")
        ):
            yield name_of(path)


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


def python_circles() -> Iterator[str]:
    """No Python files of the package import each other in a circle."""
    names = python_files()
    graph = {}
    for name, path in names.items():
        package = ".".join(["torchrec_embcache", *name.split("/")[:-1]])
        graph[name] = imported_files(path.read_text(), package, names) - {name}
    yield from circle(graph)


def core_is_plain_rust() -> Iterator[str]:
    """The core does not use pyo3 and prints nothing."""
    for path in sorted(CRATE.rglob("*.rs")):
        for match in re.finditer(r"\bpyo3\b|\be?println!|\be?print!|\bdbg!", without_comments(path.read_text())):
            yield f"{name_of(path)}: {match.group()}"


def checked_directories() -> Iterator[str]:
    """Functions of checkpoints take a `CheckpointDirectory`, no path and no engine; its `with_engine` is for tests."""
    sources = {name_of(path): path.read_text() for path in product_files() if path.suffix == ".rs"}
    takes = r"pub fn (\w+)(?:<[^(]*>)?\([^{;]*?(?:IoEngine|: &Path|PathBuf)[^{;]*?\) *(?:->|\{)"
    handle = "rust/core/src/checkpoint/directory.rs"
    # The first two check the path, the third one checks nothing, and the last one checks the path.
    allowed = {"open_to_save", "open_to_load", "with_engine", "directory_of_parts"}
    for name, source in sorted(sources.items()):
        if name != handle and "with_engine(" in source:
            yield f"{name}: calls CheckpointDirectory::with_engine"
        if name.startswith("rust/core/src/checkpoint/"):
            yield from (f"{name}: {function}" for function in re.findall(takes, source) if function not in allowed)


def loggers() -> Iterator[str]:
    """Each module of the core that logs has a logger in Python; without one its records have the name of the package."""
    source = (ROOT / "rust" / "pyext" / "src" / "logging.rs").read_text()
    known = set(re.findall(r'Module::new\("([a-z_]+)"\)', source))
    for path in sorted(CRATE.rglob("*.rs")):
        module = path.relative_to(CRATE).parts[0].removesuffix(".rs")
        if module not in known and re.search(r"\btracing::(?:event|error|warn|info|debug|trace)!", path.read_text()):
            yield f"{name_of(path)}: add {module!r} to rust/pyext/src/logging.rs"


def python_directions() -> Iterator[str]:
    """A module of the package imports only from layers below its own (PYTHON_LAYERS)."""
    level = {name: number for number, layer in enumerate(PYTHON_LAYERS) for name in layer}
    for path, module, names in package_modules():
        if module == "__init__":
            continue
        if module not in level:
            yield f"{path}: add module {module!r} to PYTHON_LAYERS"
            continue
        others = {name.split(".")[1] for name in names if name.startswith("torchrec_embcache.")} - {module}
        yield from (f"{path} imports {other}" for other in sorted(others) if level.get(other, -1) >= level[module])


def heavy_packages() -> Iterator[str]:
    """A heavy package is imported only in the modules that RESERVED lists for it."""
    for path, module, names in package_modules():
        for package, importers in RESERVED.items():
            if module not in importers:
                yield from (
                    f"{path} imports {name}"
                    for name in sorted(names)
                    if name == package or name.startswith(package + ".")
                )


RULES = (
    rust_directions,
    rust_circles,
    write_access,
    python_circles,
    core_is_plain_rust,
    checked_directories,
    loggers,
    python_directions,
    heavy_packages,
)

if __name__ == "__main__":
    sys.exit(report(*RULES) > 0)
