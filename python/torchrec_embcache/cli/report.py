"""The result of a command: tables for users, JSON for programs."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from torchrec_embcache.exceptions import UnsupportedError

__all__ = ["EXIT_FAILED", "EXIT_FOUND", "EXIT_OK", "AddCommand", "CommandReport", "ReportTable", "date_of", "date_text"]

EXIT_OK = 0
#: Exit status if corruption (`verify`) or differences (`diff`) were found.
EXIT_FOUND = 1
#: Exit status if the command failed. (2 is argparse's, for wrong usage.)
EXIT_FAILED = 3

_MAX_WIDTH = 1_000  # characters


def date_of(file: str | os.PathLike[str]) -> str:
    """Returns the time of the last write to a file, in UTC, to the second."""
    return date_text(os.lstat(file).st_mtime)


def date_text(seconds: float) -> str:
    """Formats a time in seconds since 1970, in UTC, to the second; "unknown" if it is outside the calendar's range."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return "unknown"


@dataclass(frozen=True)
class ReportTable:
    """A table to print: a title, column names, and rows with one cell per column."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class CommandReport:
    """`data` is the complete result for JSON; `tables` and `lines` are printed for users; `exit_code` becomes the exit status."""

    data: dict[str, Any]
    tables: Sequence[ReportTable] = ()
    lines: Sequence[str] = ()
    exit_code: int = EXIT_OK
    notes: Sequence[str] = field(default=())  # written to standard error

    def write(self, as_json: bool) -> None:
        """Writes the report to standard output. Raises `UnsupportedError` if there are tables to print and rich is missing."""
        for note in self.notes:
            sys.stderr.write(f"embcache: {note}\n")
        if as_json:
            sys.stdout.write(json.dumps(self.data, indent=2, sort_keys=True) + "\n")
            return
        try:
            from rich import box
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Table
        except ImportError as missing:
            raise UnsupportedError(
                'tables need rich: pip install "torchrec-embcache[cli]", or ask for --json'
            ) from missing
        # A pipe or a file has no width. Programs read it, so each entry is on one line.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _MAX_WIDTH)
        for grid in self.tables:
            table = Table(title=grid.title, title_justify="left", box=box.SIMPLE_HEAD)
            for name, first in zip(grid.columns, grid.rows[0] if grid.rows else grid.columns, strict=True):
                table.add_column(
                    name,
                    justify="right" if isinstance(first, int | float) else "left",
                    overflow="fold",
                    min_width=max(map(len, name.split()), default=0),
                )
            for row in grid.rows:
                table.add_row(*(escape(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
            console.print(table)
        for line in self.lines:
            console.print(escape(line), soft_wrap=True)


#: Adds a command with a name, a description, and its implementation.
AddCommand = Callable[[str, str, Callable[[argparse.Namespace], CommandReport]], argparse.ArgumentParser]
