"""`inspect`, `verify`, `reshard` and `compact`: shows the contents of a checkpoint, verifies it, and rewrites its rows."""

import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import SingleRank
from torchrec_embcache._paths import (
    CheckedPath,
    CheckpointDirectory,
    default_checks,
    open_to_load,
    open_to_save,
    path_exists,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint._intact import CHECKPOINT_NAME
from torchrec_embcache.checkpoint._load import open_newest
from torchrec_embcache.exceptions import CorruptionError, EmbCacheError, PathError

from .report import EXIT_FOUND, CommandReport, ReportTable, date_text
from .rules import count_step_times, table_sweeps
from .tiers import EXTRA_STATE, find_shards, inspect_tiers

__all__ = [
    "OpenCheckpoint",
    "checkpoints_grid",
    "compact",
    "inspect",
    "list_checkpoints",
    "open_other_directory",
    "reshard",
    "verify",
]

#: The columns of a table in `inspect`.
_COLUMNS = ("module", "table", "rows", "dim", "optimizer", "step", "total_num_buckets")
#: Column titles of a table's state other than rows.
_EXTRA_STATE = {**EXTRA_STATE, "missing_read": "ids without a row read", "precision": "precision"}
_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True)
class OpenCheckpoint:
    """One checkpoint of a directory, with validated manifests."""

    directory: CheckpointDirectory
    name: str
    rows: _native.CheckpointRows
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: str) -> "OpenCheckpoint":
        """Opens a checkpoint. `path` is a directory of checkpoints, whose `LATEST` is used, or one checkpoint in it.

        While this object exists, no save removes the checkpoint or its base checkpoints.
        """
        directory = open_to_load(path)
        name = os.path.basename(directory.path)
        if CHECKPOINT_NAME.fullmatch(name) and not directory.contains("LATEST"):
            directory = open_to_load(CheckedPath(os.path.dirname(directory.path)))
            rows = _native.CheckpointRows(directory, name)
        else:
            directory, name, rows = open_newest(
                SingleRank(), lambda: (directory, _native.latest_checkpoint(directory)), _native.CheckpointRows
            )
        return cls(directory, name, rows, json.loads(rows.manifest()))

    @property
    def root(self) -> str:
        """The path of the directory."""
        return self.directory.path

    @property
    def tables(self) -> list[dict[str, Any]]:
        """Each table's entry in the manifest: `module`, `table`, `dim` and so on, and `rows`, including the rows of base
        checkpoints.
        """
        return [{**entry["spec"], "rows": entry["total_rows"]} for entry in self.manifest["tables"]]

    @property
    def pending(self) -> list[int | None]:
        """Number of ids with admission counts and no row, for each table; None if counts were not saved.

        For a delta these are the ids that were counted since its parent.
        """
        return [entry.get("pending") for entry in self.manifest["tables"]]

    @property
    def step_times(self) -> list[int | None]:
        """Number of step times of each table, for rules in seconds; None if it has none."""
        return [count_step_times(entry.get("clock", "")) for entry in self.manifest["tables"]]

    @cached_property
    def chain(self) -> list[dict[str, Any]]:
        """The manifests of the checkpoint and of its base checkpoints, latest first."""
        return [json.loads(manifest) for manifest in self.rows.chain_manifests()]

    @property
    def is_delta(self) -> bool:
        """True if it is based on another checkpoint."""
        return self.manifest["parent"] is not None

    @property
    def is_for_serving(self) -> bool:
        """True for a serving checkpoint, whose rows have no slots."""
        return bool(self.manifest["kind"] == "serving")


def list_checkpoints(directory: CheckpointDirectory) -> Iterator[dict[str, Any]]:
    """Yields every checkpoint of a directory, oldest first, including unfinished ones."""
    root = directory.path
    try:
        latest = _native.latest_checkpoint(directory)
    except EmbCacheError:
        latest = None
    for name in sorted(name for name in os.listdir(root) if CHECKPOINT_NAME.fullmatch(name)):
        walked = [] if os.path.islink(os.path.join(root, name)) else os.walk(os.path.join(root, name))
        files = [Path(folder, file) for folder, _, files in walked for file in files]
        found: dict[str, Any] = {
            "name": name,
            "latest": name == latest,
            "bytes": sum(file.lstat().st_size for file in files),
            "files": len(files),
        }
        try:
            manifest = json.loads(_native.CheckpointRows(directory, name).manifest())
        except EmbCacheError as error:
            yield found | {"kind": None, "error": str(error)}
            continue
        yield found | {
            "saved": date_text(manifest["saved_unix_ms"] / 1000),
            "kind": manifest["kind"],
            "parent": manifest["parent"]["name"] if manifest["parent"] else None,
            "made_from": manifest["made_from"]["name"] if "made_from" in manifest else None,
            "ranks": len(manifest["ranks"]),
            "rows": sum(entry["rows"] for entry in manifest["tables"]),
        }


def checkpoints_grid(root: str, found: list[dict[str, Any]]) -> ReportTable:
    """Formats the result of `list_checkpoints` as a table."""
    return ReportTable(
        f"Checkpoints in {root}",
        ("name", "kind", "parent", "ranks", "rows", "bytes", "saved", ""),
        [
            (
                entry["name"],
                entry["kind"] or "not whole",
                entry.get("parent") or "",
                entry.get("ranks", 0),
                entry.get("rows", 0),
                entry["bytes"],
                entry.get("saved") or "",
                "LATEST" if entry["latest"] else "",
            )
            for entry in found
        ],
    )


def inspect(path: str) -> CommandReport:
    """Shows the checkpoints of a directory, and the tables of the latest (or of `path` itself); or the tables of an `ssd_dir`."""
    directory = Path(open_to_load(path).path)
    if not path_exists(directory / "LATEST") and (shards := find_shards(directory)):
        return inspect_tiers(directory, shards)
    opened = OpenCheckpoint.open(CheckedPath(directory))
    found = list(list_checkpoints(opened.directory))
    tables, links = opened.tables, opened.chain[::-1]
    for table, pending, times in zip(tables, opened.pending, opened.step_times, strict=True):
        table["pending"], table["step_times"] = pending, times
        table["sweeps"] = [sweep for link in links for sweep in table_sweeps(link, table["module"], table["table"])]
        # Only its presence is shown: its values would fill pages.
        table["oov_row"] = "yes" if "oov_row" in table else None
        table["missing_read"] = _format_missing_read(table["missing_read"])
        table.setdefault("precision", None)
        table["hyperparameters"] = table["optimizer"]["hyperparameters"]
        table["optimizer"] = table["optimizer"]["name"]
    counted = any(table["pending"] is not None for table in tables)
    columns = (*_COLUMNS, "pending") if counted else _COLUMNS
    columns = (*columns, *(name for name in _EXTRA_STATE if any(table[name] for table in tables)))
    titles = {"pending": "pending since parent" if opened.is_delta else "pending", **_EXTRA_STATE}
    shown = [titles.get(name, name) for name in columns]
    grids = [
        checkpoints_grid(opened.root, found),
        ReportTable(
            f"Tables of {opened.name}",
            shown,
            [tuple("" if table[name] is None else table[name] for name in columns) for table in tables],
        ),
    ]
    if any(table["sweeps"] for table in tables):
        grids.append(_sweeps_grid(opened, tables))
    manifest = {name: value for name, value in opened.manifest.items() if name not in ("ranks", "tables")}
    data = {
        "path": opened.root,
        "checkpoint": manifest | {"ranks": len(opened.manifest["ranks"])},
        "checkpoints": found,
        "tables": tables,
    }
    notes = [f"{entry['name']}: {entry['error']}" for entry in found if "error" in entry]
    return CommandReport(data, grids, notes=notes)


def _format_missing_read(manifest_value: str | dict[str, float]) -> str | float:
    """Returns the manifest's value for ids without a row."""
    return manifest_value["value"] if isinstance(manifest_value, dict) else manifest_value


def _sweeps_grid(opened: OpenCheckpoint, tables: list[dict[str, Any]]) -> ReportTable:
    """Lists the sweeps of every delta of the chain, oldest first."""
    return ReportTable(
        f"Sweeps in {opened.name} and what it builds on",
        ("module", "table", "checkpoint", "after step", "takes rows"),
        [
            (table["module"], table["table"], sweep["checkpoint"], sweep["step"], sweep["words"])
            for table in tables
            for sweep in table["sweeps"]
        ],
    )


def _dense_damage(opened: OpenCheckpoint) -> str | None:
    """Reads every byte of the tensors and objects stored besides the tables. Returns the corruption error, if any."""
    window = np.empty(_WINDOW_BYTES, np.uint8)
    try:
        reader = _native.CheckpointReader(opened.directory, opened.name)
        reader.dense_metadata()
        for rank, stream_bytes in enumerate(reader.stream_bytes()):
            for start in range(0, stream_bytes, _WINDOW_BYTES):
                reader.read_dense(rank, start, window[: min(_WINDOW_BYTES, stream_bytes - start)])
    except CorruptionError as error:
        return str(error)
    return None


def _check_index(opened: OpenCheckpoint) -> dict[str, Any] | None:
    """Checks the checkpoint's serving index. Returns its number of rows, and the error if it is corrupted.

    Returns None if there is no such file, or if servers would rebuild it.
    """
    try:
        rows = _native.check_serving_index(opened.directory, opened.name)
    except CorruptionError as error:
        return {"rows": None, "error": str(error)}
    return None if rows is None else {"rows": rows, "error": None}


def verify(path: str) -> CommandReport:
    """Reads every byte of a checkpoint and verifies it against its checksums. The exit status is 1 if it is corrupted.

    A serving index of the checkpoint is verified against the rows, which uses about 17 bytes of memory per row.
    """
    try:
        opened = OpenCheckpoint.open(path)
    except CorruptionError as error:
        damaged: dict[str, Any] = {"path": path, "checkpoint": None, "whole": False, "tables": [], "error": str(error)}
        return CommandReport(damaged, lines=[f"DAMAGED: {error}"], exit_code=EXIT_FOUND)
    results: list[dict[str, Any]] = []
    for table in opened.tables:
        result: dict[str, Any] = {
            "module": table["module"],
            "table": table["table"],
            "rows": table["rows"],
            "error": None,
        }
        try:
            opened.rows.read(table["module"], table["table"], 0, table["total_num_buckets"], None)
        except CorruptionError as error:
            result["error"] = str(error)
        results.append(result)
    damaged_rank: str | None = None
    try:
        opened.rows.check_ranks(0, 1)
    except CorruptionError as error:
        damaged_rank = str(error)
    dense = opened.manifest.get("dense")
    if dense is not None:
        dense = {"bytes": dense["bytes"], "error": _dense_damage(opened)}
    whole = all(result["error"] is None for result in results) and not damaged_rank and not (dense and dense["error"])
    notes, index = [], None
    try:
        index = _check_index(opened) if whole else None
    except EmbCacheError as error:
        # The result for the rows is still reported; the index can be rebuilt.
        notes.append(f"the index for servers was not checked: {error}")
    whole = whole and not (index and index["error"])
    grid = ReportTable(
        f"{opened.name} in {opened.root}",
        ("module", "table", "rows", ""),
        [(result["module"], result["table"], result["rows"], result["error"] or "whole") for result in results],
    )
    data = {"path": opened.root, "checkpoint": opened.name, "whole": whole, "tables": results, "error": damaged_rank}
    lines = ["whole" if whole else f"DAMAGED: {damaged_rank}" if damaged_rank else "DAMAGED"]
    if dense is not None:
        data["dense"] = dense
        lines.insert(
            0, f"{dense['bytes']} bytes of tensors and objects outside the tables: {dense['error'] or 'whole'}"
        )
    if index is not None:
        data["index"] = index
        lines.insert(0, f"the index for servers: {index['error'] or 'whole'}")
        if index["error"]:
            file = os.path.join(opened.root, opened.name, "serve.idx")
            notes.append(f"remove {file}: servers, or `embcache index`, build it again")
    return CommandReport(data, [grid], lines, 0 if whole else EXIT_FOUND, notes=notes)


def open_other_directory(target: str, opened: OpenCheckpoint) -> CheckpointDirectory:
    """Opens the directory `target` for saving. Raises `PathError` if it contains the checkpoint itself."""
    directory = open_to_save(target)
    if os.path.samefile(directory.path, opened.root):
        raise PathError(f"{target} holds the checkpoint itself: give another directory")
    return directory


def reshard(source: str, target: str, world_size: int, *, counters: bool = True) -> CommandReport:
    """Rewrites a checkpoint to the directory `target`, sharded as if `world_size` ranks had saved it.

    With `counters=False`, the admission counts are omitted.
    """
    opened = OpenCheckpoint.open(source)
    directory = open_other_directory(target, opened)
    root = directory.path
    published = opened.rows.reshard(directory, secrets.randbits(64), world_size, counters=counters)
    name, left = published.id.name, list(published.cleanup_errors)
    if opened.manifest.get("dense") is not None:
        left.append("it does not contain the tensors and objects outside the tables that DCP saved")
    data = {"source": opened.root, "target": root, "checkpoint": name, "ranks": world_size}
    return CommandReport(data, lines=[f"{name} in {root}: {world_size} ranks"], notes=left)


def compact(path: str, keep: int, *, counters: bool = True) -> CommandReport:
    """Merges the latest checkpoint of a directory and its base checkpoints into a full one; see `Saver.compact`."""
    done = Saver(path_checks=default_checks()).compact(path, keep=keep, counters=counters)
    rows = sum(entry["rows"] for entry in OpenCheckpoint.open(path).tables)
    data = {"path": path, "checkpoint": done.checkpoint, "rows": rows}
    return CommandReport(data, lines=[f"{done.checkpoint} in {path}: full, {rows:,} rows"])
