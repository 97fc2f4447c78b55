"""Reads files that can be plotted: detects their type and parses samples or traffic."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from torchrec_embcache._paths import check_path
from torchrec_embcache.exceptions import CorruptionError, InputError, StorageError
from torchrec_embcache.monitoring import Sample
from torchrec_embcache.monitoring._jsonl import sample_from_line
from torchrec_embcache.sizing import TableTraffic, read_traffic

from ._curves import curve_panels
from ._history import HistoryAxis, history_panels
from ._panels import Panel, matches_table

__all__ = ["read_panels"]

_log = logging.getLogger(__name__)
_EXPECTED = (
    "expected what sizing.write_traffic writes (an object with format and tables), or a file of JsonlLogger (in each line an "
    "object with time, step and tables)"
)


def read_panels(
    paths: Sequence[str | os.PathLike[str]], *, over: HistoryAxis = "auto", tables: Collection[str] = ()
) -> list[Panel]:
    """Returns the panels of files: miss ratio curves for files of `sizing.write_traffic`, and histories for files of a
    `JsonlLogger`.

    Several files are treated as several ranks and share the same plots.

    Args:
        paths: the files. The type of each file is detected.
        over: "step", "time" or "auto", as in `history_panels`.
        tables: the tables to show, by "<module>/<table>" or by name; all by default.

    Raises:
        CorruptionError: a file has neither of the two types, or is corrupted.
        StorageError: a file cannot be read.
        InputError: there is nothing to plot, or a name matches no table.

    Examples:
        >>> from torchrec_embcache import plotting, sizing
        >>> item = sizing.TableTraffic.assumed("item", rows=1_000_000, dim=64, ids_per_batch=65_536)
        >>> sizing.write_traffic([item], "traffic.json")
        >>> [panel.title for panel in plotting.read_panels(["traffic.json"])]
        ['Miss ratio by the share of rows in RAM', 'Miss ratio by the bytes of rows in RAM']
    """
    traffic: dict[str, list[TableTraffic]] = {}
    samples: dict[str, Iterator[Sample]] = {}
    names = _file_labels([os.fspath(path) for path in paths])
    for path, name in names.items():
        text = _read_text(path)
        if _is_traffic(text):
            traffic[name] = [table for table in _read_traffic(path) if matches_table(table.name, tables)]
        else:
            samples[name] = _read_samples(path, text)
    panels = []
    if any(traffic.values()):
        panels += curve_panels(traffic)
    if samples:
        panels += history_panels(samples, over=over, tables=tables)
    if not panels:
        raise InputError(
            f"none of {len(names)} files has a table to show" + (f" of {', '.join(tables)}" if tables else "")
        )
    return panels


def _file_labels(paths: Sequence[str]) -> dict[str, str]:
    """Returns a label for each file: the last part of its path if unique, else the path."""
    last = [os.path.basename(path) for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}


def _read_text(path: str) -> str:
    try:
        return Path(check_path("path", path)).read_bytes().decode("utf-8")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CorruptionError(f"{path}: {_EXPECTED}, found bytes that are not text") from error


def _is_traffic(text: str) -> bool:
    """True if the text starts like an object with `format`."""
    return text.lstrip()[:1] == "{" and text.lstrip()[1:].lstrip().startswith('"format"')


def _read_traffic(path: str) -> list[TableTraffic]:
    try:
        return read_traffic(path)
    except CorruptionError as error:
        said = str(error)
        raise CorruptionError(said if said.startswith(path) else f"{path}: {said}") from error


def _read_samples(path: str, text: str) -> Iterator[Sample]:
    """Yields the samples of a file. Skips a line truncated by a full disk and an incomplete last line."""
    lines = [line for line in text.split("\n") if line.strip()]
    cut = 0
    for line in lines:
        try:
            yield sample_from_line(line)
        except InputError:
            cut += 1
    if cut == len(lines):
        raise CorruptionError(f"{path}: {_EXPECTED}, found {text[:80]!r}")
    if cut:
        _log.warning("%s: %d of %d lines are incomplete samples, and are left out", path, cut, len(lines))
