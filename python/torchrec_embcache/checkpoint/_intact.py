"""Finds the latest intact checkpoint of a directory in which newer checkpoints may be corrupted."""

from __future__ import annotations

import json
import logging
import os
import re
from typing import Any

from torchrec_embcache import _native
from torchrec_embcache._paths import CheckpointDirectory
from torchrec_embcache.exceptions import CorruptionError, StorageError

__all__ = ["CHECKPOINT_NAME", "find_intact"]

_log = logging.getLogger("torchrec_embcache.checkpoint.saver")

CHECKPOINT_NAME = re.compile(r"\d{10,20}-[0-9a-f]{16}")


def find_intact(directory: CheckpointDirectory, newest: str | None) -> tuple[str, dict[str, str]]:
    """Returns the latest intact checkpoint, no newer than `newest` (default: the latest), and the reason for each skipped one.

    Reads all rows. Raises `CorruptionError` if no checkpoint is intact, and `PathError` if there is none.
    """
    skipped: dict[str, str] = {}
    below = None if newest is None else _base_names(directory, newest)
    if newest is None:
        try:
            newest = _native.latest_checkpoint(directory)
        except CorruptionError as error:
            skipped["LATEST"] = str(error)
    there = sorted(
        (name for name in os.listdir(directory.path) if _is_complete(directory, name)),
        key=_checkpoint_number,
        reverse=True,
    )
    for name in there if newest is None else [newest, *(name for name in there if name != newest)]:
        is_newer = newest is not None and _checkpoint_number(name) > _checkpoint_number(newest)
        try:
            rows = _native.CheckpointRows(directory, name)
            manifest = json.loads(rows.manifest())
            # A delta may be based on a merged checkpoint with a higher number. All others with higher numbers are newer.
            if is_newer and ("merged" not in manifest or (below is not None and name not in below)):
                continue
            _verify_rows(rows, manifest)
        except (CorruptionError, StorageError) as error:  # a missing file raises StorageError
            if not is_newer:
                skipped[name] = str(error)
            continue
        if skipped:
            _log.warning("loading %s of %s, the newest that is whole: %s", name, directory, skipped)
        return name, skipped
    raise CorruptionError(f"no checkpoint in {directory} is whole: {skipped}")


def _base_names(directory: CheckpointDirectory, name: str) -> set[str]:
    """Returns the names of the checkpoints that `name` is based on, as far as the manifests are readable."""
    found: set[str] = set()
    while _is_complete(directory, name):
        try:
            with open(os.path.join(directory.path, name, "manifest.json"), encoding="utf-8") as file:
                parent = json.load(file).get("parent")
        except (OSError, ValueError):
            break
        if not isinstance(parent, dict) or not isinstance(parent.get("name"), str) or parent["name"] in found:
            break
        name = parent["name"]
        found.add(name)
    return found


def _is_complete(directory: CheckpointDirectory, name: str) -> bool:
    """True if this is the name of a checkpoint that a save has completed."""
    return bool(CHECKPOINT_NAME.fullmatch(name)) and os.path.lexists(
        os.path.join(directory.path, name, "manifest.json")
    )


def _checkpoint_number(name: str) -> int:
    return int(name.partition("-")[0])


def _verify_rows(rows: _native.CheckpointRows, manifest: dict[str, Any]) -> None:
    """Reads all rows of a checkpoint and of its base checkpoints. Raises the same errors as a load."""
    for entry in manifest["tables"]:
        spec = entry["spec"]
        rows.read(spec["module"], spec["table"], 0, spec["total_num_buckets"], None)
