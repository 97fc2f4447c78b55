"""Lengths of files and functions."""

import ast
import re
import sys
from collections.abc import Iterator

from sources import files, name_of, product_files, report

FILE_LINES = 1_000
FUNCTION_LINES = 60


def rust_functions(source: str) -> Iterator[tuple[str, int]]:
    """The name of each function of a formatted source, and how many lines it has."""
    lines = source.splitlines()
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
            doc = node.body[0] if ast.get_docstring(node) is not None else None
            lines = doc.end_lineno - doc.lineno + 1 if doc is not None and doc.end_lineno is not None else 0
            assert node.end_lineno is not None, "the parser sets it"
            yield node.name, node.end_lineno - node.lineno + 1 - lines


def long_files() -> Iterator[str]:
    """Files have at most 1,000 lines."""
    for path in sorted(files(".rs", ".py", ".pyi")):
        lines = path.read_text().count("\n")
        if lines > FILE_LINES:
            yield f"{name_of(path)}: {lines} lines"


def long_functions() -> Iterator[str]:
    """Functions of the product have at most 60 lines, without their docstrings."""
    for path in sorted(product_files()):
        for name, lines in (rust_functions if path.suffix == ".rs" else python_functions)(path.read_text()):
            if lines > FUNCTION_LINES:
                yield f"{name_of(path)}: {name} has {lines} lines"


def inline_tests() -> Iterator[str]:
    """Unit tests of a Rust source `a.rs` are in `a/tests.rs`."""
    for path in sorted(product_files()):
        if path.suffix == ".rs" and re.search(
            r"^#\[cfg\((?:test|all\(test,.*)\)\]\nmod \w+ \{", path.read_text(), re.M
        ):
            yield name_of(path)


RULES = (inline_tests, long_files, long_functions)

if __name__ == "__main__":
    sys.exit(report(*RULES) > 0)
