"""The code blocks of the documentation, and their execution.

A page is README.md, CONTRIBUTING.md or a file of docs/. Its blocks run in order, in a separate folder:

- A `python` block continues the previous one. A block with `import torch` at its top is a complete program in a new namespace.
- A `bash` block has commands: `embcache ...` and `python FILE ...`.
- A `text` block is the output of the previous block. If it starts with the name of an error or a warning, the previous block
  raises or warns so. `...` matches any text.
- A `json`, `toml` or `yaml` block is a valid file.
- A `diff` block shows the names that a reader changes. The names and their arguments must exist.

An HTML comment before a block has content that readers need not see:

- `<!-- setup` and lines of Python, which run before the block in its namespace;
- `<!-- not run: why -->`, for a block that cannot run here. Its syntax is still checked.
"""

import ast
import contextlib
import doctest
import gc
import inspect
import io
import json
import logging
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
import torchrec.distributed
import yaml

import torchrec_embcache
from project_paths import ROOT
from torchrec_embcache import EmbCacheWarning
from torchrec_embcache.cli import main

PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
_FENCE = re.compile(r"( *)(`{3,})([a-z]*)\s*$")
_SETUP = re.compile(r"<!-- setup\n(.*?)-->", re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: ([^>]+?) -->\s*\Z")
_PROGRAM = re.compile(r"((import|from) [^\n]+\n|\n)*import torch\n")
_COMPLAINT = re.compile(r"(\w+(?:Error|Warning)): ")
# The budgets in the pages are those of real machines.
_LITTLE_ROOM = "free there: writing will fail"
# The parsers of the files that a page shows.
DATA: dict[str, Callable[[str], object]] = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    setup: str = ""
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, source: str) -> list[Block]:
    """The fenced blocks of a page, with the comments before them."""
    lines, found, number, prose = source.splitlines(), [], 0, 0
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number])
        if fence is None:
            number += 1
            continue
        end = next((at for at in range(number + 1, len(lines)) if lines[at].strip() == fence[2]), None)
        assert end is not None, f"{page}:{number + 1}: this block has no end"
        before = "\n".join(lines[prose:number])
        setup, not_run = _SETUP.search(before), _NOT_RUN.search(before)
        text = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
        found.append(
            Block(page, number + 1, fence[3], text, setup[1] if setup else "", not_run[1] if not_run else None)
        )
        number = prose = end + 1
    told = sum(bool(block.setup) + (block.not_run is not None) for block in found)
    assert told == source.count("<!-- setup") + source.count("<!-- not run"), (
        f"{page}: a comment stands before no block"
    )
    return found


def all_blocks() -> dict[str, list[Block]]:
    """The blocks of each page."""
    return {name: blocks_of(name, path.read_text()) for name, path in PAGES.items()}


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Restores logging and torch.distributed on exit."""
    names = ["", *(name for name in logging.root.manager.loggerDict if name.startswith("torchrec_embcache"))]
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = {name: list(logging.getLogger(name).handlers) for name in names}
    try:
        yield
    finally:
        for name in [*names, *logging.root.manager.loggerDict]:
            if name in levels:
                logging.getLogger(name).handlers[:] = handlers[name]
                logging.getLogger(name).setLevel(levels[name])
            elif name.startswith("torchrec_embcache"):
                logging.getLogger(name).handlers.clear()
                logging.getLogger(name).setLevel(logging.NOTSET)
        if dist.is_initialized():
            dist.destroy_process_group()


class Reader:
    """Executes the blocks of a page in order, with a shell and an interpreter in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {}

    def start_anew(self) -> None:
        """Ends the program, as the interpreter does."""
        self.names.clear()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def read(self, blocks: list[Block]) -> None:
        """Runs the blocks of a page, and compares their output, errors and warnings with the page."""
        with _as_before():
            try:
                for block, after in zip(blocks, [*blocks[1:], None], strict=True):
                    told = after.text if after is not None and after.language == "text" and not after.not_run else None
                    self.one(block, told)
            finally:
                self.start_anew()

    def one(self, block: Block, told: str | None) -> None:
        """Runs a block whose expected output is `told`."""
        if block.language == "diff":
            check_diff(block)
        elif block.language in DATA:
            DATA[block.language](block.text)
        elif block.language == "python":
            ast.parse(block.text, str(block))
            if block.not_run is None:
                self.python(block, told)
        elif block.language == "bash" and block.not_run is None:
            self.execute(block.setup, block, block.line - block.setup.count("\n") - 1)
            self.compare(block, told, "".join(map(self.command, commands(block.text))))

    def python(self, block: Block, told: str | None) -> None:
        if _PROGRAM.match(block.text):
            self.start_anew()
        expected = _COMPLAINT.match(told) if told is not None else None
        printed = io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            self.execute(block.setup, block, block.line - block.setup.count("\n") - 1)
            begun = len(caught)
            raised = None
            try:
                self.execute(block.text, block, block.line)
            except Exception as error:
                if expected is None or expected[1].endswith("Warning"):
                    raise
                raised = error
        warned = [
            one.message
            for one in caught[begun:]
            if isinstance(one.message, EmbCacheWarning) and _LITTLE_ROOM not in str(one.message)
        ]
        if expected is None:
            assert not warned, f"{block} warns, and the page does not show it: {warned}"
            self.compare(block, told, printed.getvalue())
            return
        complaints = [raised] if raised is not None else warned
        assert complaints, f"{block} gives no {expected[1]}"
        said = f"{type(complaints[0]).__name__}: {complaints[0]}\n"
        # A page breaks a message at its line length.
        self.compare(block, told, said)

    def execute(self, text: str, block: Block, line: int) -> None:
        """Runs lines of a page, so that a traceback shows their line numbers."""
        self.names.setdefault("__name__", "__main__")
        exec(compile("\n" * line + text, str(PAGES.get(block.page, block.page)), "exec"), self.names)

    def command(self, words: list[str]) -> str:
        """Runs a command and returns its output."""
        if words[0] == "embcache" or words[:3] == ["python", "-m", "torchrec_embcache"]:
            arguments = words[1:] if words[0] == "embcache" else words[3:]
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                try:
                    status = main(arguments)
                except SystemExit as end:  # as --version and --help end
                    status = int(end.code or 0)
            assert status == 0, printed.getvalue()
            return printed.getvalue()
        assert words[0] == "python", f"{shlex.join(words)} cannot be run: say why by <!-- not run: ... -->"
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def compare(self, block: Block, told: str | None, got: str) -> None:
        if told is None:
            return
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if not doctest.OutputChecker().check_output(told, got, flags):
            raise AssertionError(f"{block} gives\n{got}\nand its page says\n{told}")


def commands(text: str) -> list[list[str]]:
    """The commands of a `bash` block, as words. A backslash continues a line; " #" starts a comment."""
    return [words for line in text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


def check_diff(block: Block) -> None:
    """Asserts that the classes named in a `diff` block exist and accept the arguments shown."""
    modules = (torchrec_embcache, torchrec, torchrec.distributed, torchrec.distributed.embeddingbag, torch)
    for line in block.text.splitlines():
        for node in ast.walk(ast.parse(line[1:].strip() if line[:1] in "+- " else line)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            name = node.func.id
            called = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
            assert called is not None, f"{block}: there is no {name}"
            taken = inspect.signature(called).parameters
            assert {keyword.arg for keyword in node.keywords} <= taken.keys(), f"{block}: {line}"
