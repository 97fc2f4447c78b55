"""`inspect` of the directories of SSD tiers: which tables are there, what their last flush holds. Nothing is opened or changed."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_embcache import _native
from torchrec_embcache.exceptions import CorruptionError

from .report import Grid, Report, date_of

__all__ = ["inspect_tiers", "shards_below"]

_SHARD = re.compile(r"\d+-of-\d+")
_STATE = re.compile(r"[0-9a-f]{16}\.state")
_TITLE = "embcache-ssd-state"
_MAX_STATE_BYTES = 256 << 20
#: What `inspect` shows of a shard.
_COLUMNS = ("table", "shard", "rows", "dim", "optimizer", "step", "flushed", "bytes", "")


def shards_below(directory: Path) -> list[Path]:
    """The directories of shards in `directory`: an `ssd_dir`, a module's or a table's directory in it, or that of a shard.

    A shard has a lock file, which somebody may have removed, or a state.
    """

    def is_shard(path: Path) -> bool:
        return (path / "lock").is_file() or any(_STATE.fullmatch(entry.name) for entry in path.glob("*.state"))

    found = [directory] if _SHARD.fullmatch(directory.name) else []
    for depth in range(1, 4):
        found += [path for path in directory.glob("/".join("*" * depth)) if _SHARD.fullmatch(path.name)]
    return sorted(path for path in found if not path.is_symlink() and is_shard(path))


def inspect_tiers(directory: Path, shards: list[Path]) -> Report:
    """Each shard with the newest state that it published. Of a damaged state only the damage is shown."""
    entries = [_shard(directory, shard) for shard in shards]
    rows = [
        (
            entry["directory"],
            entry["shard"],
            entry.get("rows", 0),
            entry.get("dim", 0),
            entry.get("optimizer", ""),
            entry.get("step", 0),
            entry.get("flushed", "never"),
            entry["bytes"],
            "DAMAGED" if "error" in entry else "",
        )
        for entry in entries
    ]
    notes = [f"{entry['directory']}: {entry['error']}" for entry in entries if "error" in entry]
    return Report(
        {"path": str(directory), "ssd": entries}, [Grid(f"Tables on SSD in {directory}", _COLUMNS, rows)], notes=notes
    )


def _shard(directory: Path, shard: Path) -> dict[str, Any]:
    files = [entry for entry in os.scandir(shard) if entry.is_file(follow_symlinks=False)]
    states = sorted(entry.name for entry in files if _STATE.fullmatch(entry.name))
    found: dict[str, Any] = {
        "directory": str(shard.relative_to(directory)),
        "shard": shard.name,
        "bytes": sum(entry.stat(follow_symlinks=False).st_size for entry in files),
        "states": [int(name.split(".")[0], 16) for name in states],
    }
    if not states:
        return found
    newest = shard / states[-1]
    try:
        state = _state(newest)
    except CorruptionError as error:
        return found | {"error": str(error)}
    identity = state["identity"]
    return found | {
        "table": identity["table"],
        "rows": state["rows"],
        "dim": identity["dim"],
        "optimizer": identity["optimizer"],
        "step": state["counters"]["step"],
        "total_num_buckets": identity["total_num_buckets"],
        "buckets": [identity["bucket_begin"], identity["bucket_end"]],
        "segments": len(state["segments"]),
        "flushed": date_of(newest),
    }


def _state(path: Path) -> dict[str, Any]:
    """A state file: a line with its checksum, JSON, and a note of the table's."""

    def damaged(what: str) -> CorruptionError:
        return CorruptionError(f"{path} is damaged: {what}")

    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        data = file.read(_MAX_STATE_BYTES)
    line, _, body = data.partition(b"\n")
    words = line[:200].decode("ascii", "replace").split(" ")
    if len(words) != 5 or words[0] != _TITLE:
        raise damaged("its first line is not that of a state")
    (checksum,) = _native.chunk_checksums(np.frombuffer(body, np.uint8), max(len(body), 1)) if body else (0,)
    if f"{int(checksum):08x}" != words[2]:
        raise damaged(f"its checksum should be {words[2]} and is {int(checksum):08x}")
    try:
        state: dict[str, Any] = json.loads(body[: int(words[3])])
    except ValueError as cause:
        raise damaged(str(cause)) from cause
    return state
