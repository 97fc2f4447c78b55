"""`convert --to serving`: rewrites a checkpoint for serving, without optimizer slots and optionally with lower precision."""

import os
import secrets

from torchrec_embcache._paths import CheckedPath
from torchrec_embcache.cli.checkpoints import OpenCheckpoint, open_other_directory
from torchrec_embcache.cli.report import CommandReport, ReportTable
from torchrec_embcache.exceptions import ConfigError, UnsupportedError

from .command import check_unused_options
from .layout import ConvertSettings

__all__ = ["PRECISIONS", "check_serving_settings", "convert_to_serving"]

#: Precisions of stored weights.
PRECISIONS = ("fp32", "fp16", "bf16", "int8")


def check_serving_settings(settings: ConvertSettings, from_layout: str) -> None:
    """Raises `ConfigError` for settings that a serving checkpoint does not use. The source must be one of our checkpoints."""
    if from_layout not in ("auto", "embcache"):
        raise UnsupportedError(
            f"from {from_layout} to serving: a checkpoint for servers is made of one of ours; convert --to embcache first"
        )
    check_unused_options(settings, (), "a conversion to serving, which takes the tables as they are,")


def convert_to_serving(source: str, target: str, precision: str, keep: int) -> CommandReport:
    """Writes a checkpoint and its base checkpoints to the directory `target`, as one serving checkpoint.

    Args:
        source: A directory of checkpoints, or one checkpoint in it.
        target: Another directory, created if missing. The checkpoint becomes the latest there.
        precision: One of `PRECISIONS`.
        keep: Number of checkpoints to keep in `target`, including the new one.
    """
    if keep < 1:
        raise ConfigError(f"--keep {keep}: give 1 or more")
    opened = OpenCheckpoint.open(source)
    directory = open_other_directory(target, opened)
    root = directory.path
    published = opened.rows.write_serving_checkpoint(directory, secrets.randbits(64), precision, keep)
    made = OpenCheckpoint.open(CheckedPath(os.path.join(root, published.id.name)))
    notes = list(published.cleanup_errors)
    if opened.manifest.get("dense") is not None:
        notes.append("it does not contain the tensors and objects outside the tables that DCP saved")
    tables = [
        {field: table[field] for field in ("module", "table", "rows", "dim")} | {"precision": precision}
        for table in made.tables
    ]
    data = {
        "source": opened.root,
        "target": root,
        "checkpoint": published.id.name,
        "made_from": made.manifest["made_from"]["name"],
        "precision": precision,
        "tables": tables,
    }
    columns = ("module", "table", "rows", "dim", "precision")
    grid = ReportTable(
        f"{published.id.name} in {root}", columns, [tuple(table[name] for name in columns) for table in tables]
    )
    return CommandReport(data, [grid], notes=notes)
