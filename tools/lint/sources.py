"""The sources that the rules are about, and what they import."""

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "torchrec_embcache"
CRATE = ROOT / "rust" / "core" / "src"
SKIPPED = {
    *(".git", ".venv", "target", "dist", "__pycache__", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache"),
}


def report(*rules: Callable[[], Iterable[str]]) -> int:
    """Prints the violations of each rule below its docstring. Returns the number of violations."""
    count = 0
    for rule in rules:
        found = list(rule())
        if found:
            assert rule.__doc__ is not None
            print(f"{Path(rule.__code__.co_filename).stem}: {rule.__doc__.splitlines()[0]}", file=sys.stderr)
            print(*(f"    {line}" for line in found), sep="\n", file=sys.stderr)
        count += len(found)
    return count


def name_of(path: Path) -> str:
    """The path in the project, for messages."""
    return path.relative_to(ROOT).as_posix()


def files(*suffixes: str) -> Iterator[Path]:
    """The files of the project whose names end with one of `suffixes`, without build outputs and caches."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(folder, name) for name in names if name.endswith(suffixes))


def product_files() -> Iterator[Path]:
    """The sources of the package, of the core and of the binding, without stubs and without files that contain only tests."""
    yield from PACKAGE.rglob("*.py")
    for path in (ROOT / "rust").glob("*/src/**/*.rs"):
        if not {"tests", "models", "loom"} & {*path.parts, path.stem}:
            yield path


def without_comments(source: str) -> str:
    """A Rust source without its comments."""
    return re.sub(r"//[^\n]*", "", source)


def rust_imports(source: str) -> set[str]:
    """The top modules of the crate that a source names, without those in comments."""
    source = without_comments(source)
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
