"""`ls`, `copy` and `prune`: lists the checkpoints of a directory, copies them to another one, and removes all but the latest."""

from torchrec_embcache import _native
from torchrec_embcache._paths import open_to_load, open_to_save
from torchrec_embcache.exceptions import ConfigError

from .checkpoints import OpenCheckpoint, checkpoints_grid, list_checkpoints, open_other_directory
from .report import AddCommand, CommandReport

__all__ = ["add_backup"]


def add_backup(command: AddCommand, checkpoint: str) -> None:
    """Adds the commands to the parser."""
    made = command("ls", "list the checkpoints of a directory", lambda a: ls(a.path))
    made.add_argument("path", help="a directory of checkpoints")

    made = command(
        "copy",
        "copy a checkpoint and all it builds on to another directory, byte for byte, and verify the copy",
        lambda a: copy(a.source, a.target),
    )
    made.add_argument("source", help=checkpoint)
    made.add_argument("target", help="another directory; made when missing. What is there already is not copied again")

    made = command(
        "prune",
        "remove all checkpoints of a directory but the newest and what they build on",
        lambda a: prune(a.path, a.keep),
    )
    made.add_argument("path", help="a directory of checkpoints")
    made.add_argument("--keep", type=int, required=True, metavar="N", help="checkpoints that stay")


def ls(path: str) -> CommandReport:
    """Lists the checkpoints of a directory, oldest first, including unfinished ones. Raises `PathError` if there is none."""
    directory = open_to_load(path)
    found = list(list_checkpoints(directory))
    if not found:
        _native.latest_checkpoint(directory)  # raises what is missing
    notes = [f"{entry['name']}: {entry['error']}" for entry in found if "error" in entry]
    data = {"path": directory.path, "checkpoints": found}
    return CommandReport(data, [checkpoints_grid(directory.path, found)], notes=notes)


def copy(source: str, target: str) -> CommandReport:
    """Copies a checkpoint and its base checkpoints to the directory `target`, and verifies every byte of the copy against its
    checksums.

    The source is pinned during the copy, so that no save removes it. The copy becomes the latest checkpoint in `target`, unless one
    with a higher number exists.
    """
    opened = OpenCheckpoint.open(source)
    directory = open_other_directory(target, opened)
    copied = opened.rows.copy(directory)
    data = {
        "source": opened.root,
        "target": directory.path,
        "checkpoint": opened.name,
        "copied": copied.names,
        "bytes": copied.bytes,
        "latest": copied.is_newest,
    }
    what = f"{len(copied.names)} of {len(opened.chain)} checkpoints copied, {copied.bytes:,} bytes; verified"
    notes = []
    if not copied.is_newest:
        newest = _native.latest_checkpoint(directory)
        notes.append(
            f"{newest} stays the newest in {directory.path}: load the copy by Saver.load(..., checkpoint={opened.name!r})"
        )
    return CommandReport(data, lines=[f"{opened.name} in {directory.path}: {what}"], notes=notes)


def prune(path: str, keep: int) -> CommandReport:
    """Removes the checkpoints of a directory except the latest `keep` and their base checkpoints, and files of unfinished saves.

    Files that a save is writing, or that a load or a server is reading, are kept.
    """
    if keep < 1:
        raise ConfigError(f"--keep {keep}: give 1 or more")
    directory = open_to_save(path)
    sizes = {entry["name"]: entry["bytes"] for entry in list_checkpoints(directory)}
    pruned = _native.prune_checkpoints(directory, keep)
    freed = sum(sizes.get(name, 0) for name in pruned.removed)
    data = {"path": directory.path, "removed": pruned.removed, "bytes": freed, "left": pruned.errors}
    line = f"{directory.path}: {len(pruned.removed)} checkpoints removed, {freed:,} bytes"
    return CommandReport(data, lines=[line], notes=[f"not removed: {why}" for why in pruned.errors])
