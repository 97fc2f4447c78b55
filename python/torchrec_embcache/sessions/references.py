"""Checkpoints that files of other programs refer to, such as Lightning's. Such a checkpoint stays for as long as its file does.

The file `REFERENCED_BY` in a checkpoint's directory names the file that refers to it.
"""

import os
import re

from torchrec_embcache import _native
from torchrec_embcache.folder import Folder
from torchrec_embcache.paths import open_to_save

__all__ = ["refer", "release"]

_REFERENCE = "REFERENCED_BY"


def refer(path: str, checkpoint: str, file: str) -> None:
    """Note that `file` refers to `checkpoint` in the directory `path`, where it stays until `release`. Raises as `Folder` does."""
    with Folder.to_save(path) as folder, folder.below(checkpoint) as saved:
        saved.publish(_REFERENCE, _named(file, path).encode())


def release(path: str, file: str, *, keep: int, but: str | None = None, newest_stays: bool = False) -> list[str]:
    """Remove what `file` has referred to in the directory `path`, and return why some could not be removed.

    The checkpoint `but` stays, and with `newest_stays` the newest one besides it; so do the `keep` newest of the directory. Raises
    as `Folder` does.
    """
    if not os.path.isdir(path):
        return []
    with Folder.to_save(path) as folder:
        named = _named(file, path)
        old = [name for name, other in _references(folder).items() if other == named and name != but]
        for name in old[: -1 if newest_stays else None]:
            with folder.below(name) as saved:
                saved.remove(_REFERENCE)
    return _native.prune_checkpoints(open_to_save(path), keep).left if old else []


def _references(folder: Folder) -> dict[str, str]:
    """The files that refer to checkpoints in `folder`, by the checkpoints' names, the oldest first."""
    names = [name for name in folder.names() if re.fullmatch(r"\d{10,20}-[0-9a-f]{16}", name)]
    found = {}
    for name in sorted(names, key=lambda name: int(name.split("-")[0])):
        with folder.below(name) as saved:
            if _REFERENCE in saved.names():
                with os.fdopen(saved.open(_REFERENCE), "rb") as file:
                    found[name] = file.read(1 << 16).decode(errors="replace")
    return found


def _named(file: str, path: str) -> str:
    """`file` relative to the directory `path`, so that both can be moved together. A URL is left as it is."""
    if "://" in file:
        return file
    # A link is a file of its own: it may be removed while the file that it points to stays.
    folder, name = os.path.split(os.path.abspath(file))
    return os.path.relpath(os.path.join(os.path.realpath(folder), name), os.path.realpath(path))
