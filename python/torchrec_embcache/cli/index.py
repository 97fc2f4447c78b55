"""`index`: the file by which processes that serve a checkpoint find its rows, made ahead."""

import os

from torchrec_embcache import _native
from torchrec_embcache.paths import GivenPath, open_to_load, open_to_save

from .checkpoints import CHECKPOINT_NAME
from .report import Report

__all__ = ["index"]


def index(path: str, at: str | None = None) -> Report:
    """Make the index of a checkpoint: of the newest, of the one that `at` names or numbers, or of the one that `path` is."""
    directory = open_to_load(path)
    name = os.path.basename(directory.path)
    root = GivenPath(directory.path)
    if at is None and CHECKPOINT_NAME.fullmatch(name) and not directory.has("LATEST"):
        root, at = GivenPath(os.path.dirname(root)), name
    made = _native.make_serving_index(open_to_save(root), at)
    data = {
        "path": root,
        "checkpoint": made.checkpoint,
        "rows": made.rows,
        "bytes": made.bytes,
        "was_there": made.was_there,
    }
    what = "is indexed already" if made.was_there else "is indexed"
    return Report(data, lines=[f"{made.checkpoint} in {root} {what}: {made.rows:,} rows, {made.bytes:,} bytes"])
