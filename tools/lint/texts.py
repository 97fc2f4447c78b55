"""Texts of sources: doc comments are sentences, and no file names a path of a machine."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import files, name_of, report


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
    """True if a text begins or ends within a sentence, such as one that continues at the next item."""
    return text[:1].islower() or text.endswith((",", ";"))


def whole_sentences() -> Iterator[str]:
    """A doc comment is a text of its own: an editor shows it without those of its neighbours."""
    for path in sorted(files(".rs", ".py")):
        yield from (f"{name_of(path)}:{line}: {text}" for line, text in doc_comments(path) if is_fragment(text))


def machine_paths() -> Iterator[str]:
    """No file names a path of the machine on which it was written."""
    machine = re.compile(r"(?<![\w.])/(?:work|farm|root)/[\w.]")
    suffixes = (".rs", ".py", ".pyi", ".toml", ".txt", ".md", ".lock", "Makefile", "run", ".yml", ".yaml")
    for path in sorted(files(*suffixes)):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if machine.search(line):
                yield f"{name_of(path)}:{number}: {line.strip()}"


RULES = (whole_sentences, machine_paths)

if __name__ == "__main__":
    sys.exit(report(*RULES) > 0)
