"""`index`: builds the serving index of a checkpoint in advance."""

import os

from torchrec_embcache import _native
from torchrec_embcache._paths import CheckedPath, open_to_load, open_to_save
from torchrec_embcache.checkpoint._intact import CHECKPOINT_NAME

from .report import CommandReport

__all__ = ["build_index"]


def build_index(path: str, checkpoint: str | None = None) -> CommandReport:
    """Builds the index of a checkpoint: the latest, the one named or numbered by `checkpoint`, or `path` itself."""
    directory = open_to_load(path)
    name = os.path.basename(directory.path)
    root = CheckedPath(directory.path)
    if checkpoint is None and CHECKPOINT_NAME.fullmatch(name) and not directory.contains("LATEST"):
        root, checkpoint = CheckedPath(os.path.dirname(root)), name
    made = _native.build_serving_index(open_to_save(root), checkpoint)
    data = {
        "path": root,
        "checkpoint": made.checkpoint,
        "rows": made.rows,
        "bytes": made.bytes,
        "was_there": made.existed,
    }
    what = "is indexed already" if made.existed else "is indexed"
    return CommandReport(data, lines=[f"{made.checkpoint} in {root} {what}: {made.rows:,} rows, {made.bytes:,} bytes"])
