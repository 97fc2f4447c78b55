"""`convert --to serving`: a checkpoint written again for servers, without optimizer slots and with weights in fewer bytes."""

import os
import secrets

from torchrec_embcache.exceptions import ConfigError, UnsupportedError
from torchrec_embcache.paths import GivenPath

from .checkpoints import Opened, another_directory
from .convert import Settings, refuse_unused
from .report import Grid, Report

__all__ = ["PRECISIONS", "for_serving", "refuse_settings"]

#: How weights can be stored.
PRECISIONS = ("fp32", "fp16", "bf16", "int8")


def refuse_settings(settings: Settings, from_layout: str) -> None:
    """`ConfigError` for settings of other layouts, which a checkpoint for servers does not take; the source must be one of ours."""
    if from_layout not in ("auto", "embcache"):
        raise UnsupportedError(
            f"from {from_layout} to serving: a checkpoint for servers is made of one of ours; convert --to embcache first"
        )
    refuse_unused(settings, (), "a conversion to serving, which takes the tables as they are,")


def for_serving(source: str, target: str, precision: str, keep: int) -> Report:
    """Write a checkpoint and all that it builds on to the directory `target`, as one checkpoint for servers.

    Args:
        source: A directory of checkpoints, or one checkpoint in it.
        target: Another directory, made when missing. The checkpoint becomes the newest there.
        precision: One of `PRECISIONS`.
        keep: How many checkpoints stay in `target`, the new one included.
    """
    if keep < 1:
        raise ConfigError(f"--keep {keep}: give 1 or more")
    opened = Opened.at(source)
    directory = another_directory(target, opened)
    root = directory.path
    published = opened.rows.make_for_serving(directory, secrets.randbits(64), precision, keep)
    made = Opened.at(GivenPath(os.path.join(root, published.id.name)))
    notes = list(published.left)
    if opened.manifest.get("dense") is not None:
        notes.append("the tensors and objects beside the tables, which DCP saved, are not in it")
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
    grid = Grid(f"{published.id.name} in {root}", columns, [tuple(table[name] for name in columns) for table in tables])
    return Report(data, [grid], notes=notes)
