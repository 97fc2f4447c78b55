"""`inspect` of SSD directories: shows the tables and their last flush, without opening or changing them."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_embcache import _native
from torchrec_embcache.exceptions import CorruptionError, MismatchError

from .report import CommandReport, ReportTable, date_of
from .rules import count_step_times

__all__ = ["EXTRA_STATE", "find_shards", "inspect_tiers"]

#: State of a table other than rows, with its column title.
EXTRA_STATE = {"oov_row": "OOV row", "step_times": "step times"}

_SHARD = re.compile(r"\d+-of-\d+")
_STATE = re.compile(r"[0-9a-f]{16}\.state")
_TITLE, _FORMAT = "embcache-ssd-state", "1"
_MAX_STATE_BYTES = 256 << 20
# Prefixes of the parts of a metadata blob.
_OOV_ROW, _CLOCK_HEADER = b"oov row 1\n", b"clock 1\n"
#: The columns of a shard in `inspect`.
_COLUMNS = ("table", "shard", "rows", "dim", "optimizer", "step", "flushed", "bytes")


def find_shards(directory: Path) -> list[Path]:
    """Returns the shard directories in `directory`: an `ssd_dir`, a directory of a module or a table in it, or a shard.

    A shard has a lock file, which the user may have removed, or a state.
    """

    def is_shard(path: Path) -> bool:
        return (path / "lock").is_file() or any(_STATE.fullmatch(entry.name) for entry in path.glob("*.state"))

    found = [directory] if _SHARD.fullmatch(directory.name) else []
    for depth in range(1, 4):
        found += [path for path in directory.glob("/".join("*" * depth)) if _SHARD.fullmatch(path.name)]
    return sorted(path for path in found if not path.is_symlink() and is_shard(path))


def inspect_tiers(directory: Path, shards: list[Path]) -> CommandReport:
    """Shows each shard with the latest state that it published. For an unreadable state only the reason is shown."""
    entries = [_read_shard(directory, shard) for shard in shards]
    beside = [name for name in EXTRA_STATE if any(entry.get(name) for entry in entries)]
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
            *(entry.get(name) or "" for name in beside),
            "" if "error" not in entry else "DAMAGED" if entry["is_damaged"] else "ANOTHER FORMAT",
        )
        for entry in entries
    ]
    notes = [f"{entry['directory']}: {entry['error']}" for entry in entries if "error" in entry]
    columns = (*_COLUMNS, *(EXTRA_STATE[name] for name in beside), "")
    return CommandReport(
        {"path": str(directory), "ssd": entries},
        [ReportTable(f"Tables on SSD in {directory}", columns, rows)],
        notes=notes,
    )


def _read_shard(directory: Path, shard: Path) -> dict[str, Any]:
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
        state, beside = _read_state(newest)
    except (CorruptionError, MismatchError) as error:
        return found | {"error": str(error), "is_damaged": isinstance(error, CorruptionError)}
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
        **beside,
    }


def _read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the JSON of a state file, and the other state in its metadata blob. A header line contains the checksum of both."""

    def damaged(what: str) -> CorruptionError:
        return CorruptionError(f"{path} is damaged: {what}")

    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        data = file.read(_MAX_STATE_BYTES)
    line, _, body = data.partition(b"\n")
    words = line[:200].decode("ascii", "replace").split(" ")
    if len(words) != 5 or words[0] != _TITLE:
        raise damaged("its first line is not that of a state")
    if words[1] != _FORMAT:
        raise MismatchError(
            f"{path} has format {words[1]} and this release reads {_FORMAT}: open it with the release that wrote it"
        )
    (checksum,) = _native.chunk_checksums(np.frombuffer(body, np.uint8), max(len(body), 1)) if body else (0,)
    if f"{int(checksum):08x}" != words[2]:
        raise damaged(f"its checksum should be {words[2]} and is {int(checksum):08x}")
    try:
        state: dict[str, Any] = json.loads(body[: int(words[3])])
        beside = _extra_state(body[int(words[3]) :])
    except (ValueError, RecursionError) as cause:
        raise damaged(str(cause)) from cause
    return state, beside


def _extra_state(metadata_blob: bytes) -> dict[str, Any]:
    """Returns the `EXTRA_STATE` of a metadata blob. Raises `ValueError` if its clock cannot be parsed."""
    has_oov_row = metadata_blob.startswith(_OOV_ROW)
    if has_oov_row:
        numbers, metadata_blob = _parse_number(metadata_blob, len(_OOV_ROW), 4)
        metadata_blob = metadata_blob[4 * numbers :]
    clock = ""
    if metadata_blob.startswith(_CLOCK_HEADER):
        length, metadata_blob = _parse_number(metadata_blob, len(_CLOCK_HEADER), 8)
        clock = json.loads(metadata_blob[:length])
    # Only its presence is shown: its values would fill pages.
    return {"oov_row": "yes" if has_oov_row else None, "step_times": count_step_times(clock)}


def _parse_number(data: bytes, offset: int, width: int) -> tuple[int, bytes]:
    """Returns the little-endian integer of `width` bytes at `offset`, and the data after it."""
    return int.from_bytes(data[offset : offset + width], "little"), data[offset + width :]
