"""Signatures of the binding, as its stubs have them."""

import ast
import sys
from collections.abc import Iterator

from sources import PACKAGE, name_of, report


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


def types_without_names(source: str) -> Iterator[str]:
    """Each place in a stub with a type whose parts have no names: a tuple, a dict, or `Any`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in {"tuple", "dict", "Any"}:
            yield f"line {node.lineno}: {node.id}"


def booleans_by_name() -> Iterator[str]:
    """Booleans are passed to the binding by keyword, because a `True` by position does not show its meaning."""
    for stub in sorted(PACKAGE.glob("_native*.pyi")):
        yield from (f"{name_of(stub)}: {parameter}" for parameter in positional_booleans(stub.read_text()))


def named_fields() -> Iterator[str]:
    """Values of the binding have named fields. `Mapping` is for names that are data, such as hyperparameters."""
    for stub in sorted(PACKAGE.glob("_native*.pyi")):
        yield from (f"{name_of(stub)}: {place}" for place in types_without_names(stub.read_text()))


RULES = (booleans_by_name, named_fields)

if __name__ == "__main__":
    sys.exit(report(*RULES) > 0)
