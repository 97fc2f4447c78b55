"""What makes a block-level save complete.

```
path/LATEST.blocks                          one line: the newest complete save and the checksum of its manifest
path/blocks-<seq>-<random>/begun.json       shards and steps of the tables: by it the other shards know the save they belong to
path/blocks-<seq>-<random>/model-<k>-of-<n>.safetensors      blocks, as RecIS names them
path/blocks-<seq>-<random>/check-<i>-of-<n>.safetensors      checksums of a shard's blocks, and where buckets start
path/blocks-<seq>-<random>/shard-<i>-of-<n>.json             a shard's tables, files and counts, written when they are durable
path/blocks-<seq>-<random>/index, tensorkey.json             which file has which block, as RecIS has it
path/blocks-<seq>-<random>/manifest.json                     the shards' checksums, written by the last shard of all
```

A save is complete when every shard has written its manifest; whichever shard is the last publishes. No shard waits for another.
"""

import contextlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrec_embcache._native import EntryLock
from torchrec_embcache.exceptions import (
    CorruptionError,
    EmbCacheError,
    InUseError,
    PathError,
    StateError,
    UnsupportedError,
)

from .files import Directory, corruption, crc32c, parse_json, render_json

__all__ = ["Save", "begin", "finish", "newest"]

LATEST = "LATEST.blocks"
MANIFEST = "manifest.json"
FORMAT = "torchrec-embcache blocks"
VERSION = 1
BEGUN = "begun.json"
# From the shards' manifests the other files of a save, by name.
Extras = Callable[[list[dict[str, Any]]], dict[str, bytes]]
_SAVE = re.compile(r"blocks-(\d{10,20})-([0-9a-f]{16})")


def shard_file(shard: int, shards: int) -> str:
    """The name of a shard's manifest."""
    return f"shard-{shard:06d}-of-{shards:06d}.json"


def _saves(root: Directory) -> list[tuple[int, str]]:
    """Saves in the directory, complete or not, by number."""
    return sorted((int(found[1]), name) for name in root.names() if (found := _SAVE.fullmatch(name)))


def _latest(root: Directory) -> tuple[str, int] | None:
    """The newest complete save and the checksum of its manifest."""
    if not root.has(LATEST):
        return None
    line = root.read(LATEST, 256)
    found = re.fullmatch(rb"(blocks-\d{10,20}-[0-9a-f]{16}) ([0-9a-f]{8})\n", line)
    if found is None:
        raise corruption(root.at(LATEST), "the line", "the name of a save and a checksum", line[:80])
    return found[1].decode(), int(found[2], 16)


@dataclass
class Save:
    """A save that a shard takes part in."""

    folder: Directory
    name: str
    shard: int
    shards: int


def begin(
    root: Directory,
    shard: int,
    shards: int,
    steps: dict[str, int],
    name: str | None = None,
    *,
    held_by: contextlib.ExitStack,
) -> Save:
    """Take part in a save, which nobody sweeps until `held_by` is closed.

    It is the one called `name` (`""`: a new one); without `name` the newest that waits for this shard and whose shards saw the
    tables at the same steps, else a new one. Steps tell saves apart where shards have no way to agree: a shard that was killed in
    one save and takes part in the next does not complete the first one with newer rows.
    """
    with root.alone():
        latest = _latest(root)
        saves = _saves(root)
        done = _number(latest[0]) if latest is not None else 0
        if name is None and shards > 1:
            for number, other in reversed(saves):
                joined = _join(root, other, shard, shards, steps, held_by) if number > done else None
                if joined is not None:
                    return joined
        if not name:
            name = f"blocks-{max([done, *(number for number, _ in saves)]) + 1:010d}-{secrets.randbits(64):016x}"
            with root.below(name, make=True) as folder:
                folder.publish(BEGUN, render_json({"shards": shards, "steps": steps}))
        joined = _join(root, name, shard, shards, steps, held_by)
        if joined is None:
            raise InUseError(
                f"shard {shard} of {shards} does not fit, or takes part already in, {root.at(name)}: save it once"
            )
        return joined


def _number(name: str) -> int:
    return int(name.split("-")[1])


def _join(
    root: Directory, name: str, shard: int, shards: int, steps: dict[str, int], held_by: contextlib.ExitStack
) -> Save | None:
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(root.below(name))
        if not folder.has(BEGUN):
            return None
        try:
            begun = parse_json(folder.read(BEGUN), folder.at(BEGUN))
        except CorruptionError:
            return None
        known = begun.get("steps")
        if begun.get("shards") != shards or not isinstance(known, dict) or folder.has(shard_file(shard, shards)):
            return None
        if any(known.get(table, step) != step for table, step in steps.items()):
            return None
        for lock in (folder.lock(alone=False), folder.lock(f"shard-{shard:06d}.lock", alone=True)):
            undo.callback(lock.release)
            if not lock.take_now():
                return None
        if steps.keys() - known.keys():
            folder.publish(BEGUN, render_json({"shards": shards, "steps": known | steps}))
        held_by.push(undo.pop_all())
        return Save(folder, name, shard, shards)


def finish(root: Directory, save: Save, manifest: dict[str, Any], extras: Extras) -> bool:
    """Write this shard's manifest. When it was the last one: `extras(manifests)` gives the other files, by name, or raises
    `MismatchError`; then the save is published, and those before it are removed. Whether it was the last.
    """
    folder = save.folder
    folder.publish(shard_file(save.shard, save.shards), render_json(manifest))
    with root.alone():
        if folder.has(MANIFEST) or not all(folder.has(shard_file(n, save.shards)) for n in range(save.shards)):
            return False
        latest = _latest(root)
        if latest is not None and _number(latest[0]) > _number(save.name):
            raise StateError(
                f"{root.at(save.name)} is older than {latest[0]}, which was completed meanwhile: save again"
            )
        texts = [folder.read(shard_file(n, save.shards)) for n in range(save.shards)]
        manifests = [parse_json(text, folder.path) for text in texts]
        for name, data in extras(manifests).items():
            folder.publish(name, data)
        text = render_json({"format": FORMAT, "version": VERSION, "shards": [crc32c(text) for text in texts]})
        folder.publish(MANIFEST, text)
        root.publish(LATEST, f"{save.name} {crc32c(text):08x}\n".encode(), f"{LATEST}.{save.name}.tmp")
        _sweep(root, save.name)
    return True


def _sweep(root: Directory, kept: str) -> None:
    """Remove the saves before `kept` that nobody writes or reads. What cannot be removed waits for the next save."""
    for number, name in _saves(root):
        if number < _number(kept):
            with contextlib.suppress(EmbCacheError, OSError), root.below(name) as folder:
                lock = folder.lock(alone=True)
                if lock.take_now():
                    try:
                        root.remove(name)
                    finally:
                        lock.release()


def newest(root: Directory) -> tuple[Directory, list[dict[str, Any]], EntryLock]:
    """The newest complete save, its shards' manifests, and the lock that keeps it from being removed until it is released."""
    with contextlib.ExitStack() as undo:
        with root.alone():
            latest = _latest(root)
            if latest is None:
                raise PathError(
                    f"there is no block-level checkpoint in {root.path}: {LATEST} is missing; save one first"
                )
            name, checksum = latest
            if not root.has(name):
                raise corruption(root.at(LATEST), "the name", "that of a save that is there", name)
            folder = undo.enter_context(root.below(name))
            held = undo.enter_context(folder.lock(alone=False))
        path = folder.at(MANIFEST)
        manifest = parse_json(folder.read(MANIFEST, expected=checksum), path)
        if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            raise UnsupportedError(f"{path} is of another format or version: load it with a newer release")
        shards = manifest.get("shards")
        if not isinstance(shards, list) or not shards:
            raise corruption(path, "the shards", "checksums", shards)
        manifests = []
        for number, expected in enumerate(shards):
            file = shard_file(number, len(shards))
            if isinstance(expected, bool) or not isinstance(expected, int):
                raise corruption(path, "the checksum of a shard", "a number", expected)
            manifests.append(parse_json(folder.read(file, expected=expected), folder.at(file)))
        undo.pop_all()
        return folder, manifests, held
