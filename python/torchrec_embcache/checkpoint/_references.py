"""Checkpoints that files of other programs, such as Lightning's, refer to. Such a checkpoint is kept as long as its file.

The file `REFERENCED_BY` in a checkpoint's directory names the file that refers to it.
"""

import os

from torchrec_embcache import _native
from torchrec_embcache._fs import DirectoryHandle
from torchrec_embcache._paths import open_to_save

from ._intact import CHECKPOINT_NAME

__all__ = ["add_reference", "remove_references"]

_REFERENCE = "REFERENCED_BY"


def add_reference(path: str, checkpoint: str, file: str) -> None:
    """Records that `file` refers to `checkpoint` in the directory `path`, which keeps it until `remove_references`.

    Raises like `DirectoryHandle`.
    """
    with DirectoryHandle.open_to_save(path) as folder, folder.open_subdirectory(checkpoint) as saved:
        saved.write_atomically(_REFERENCE, _relative_name(file, path).encode())


def remove_references(
    path: str, file: str, *, keep: int, except_checkpoint: str | None = None, keep_newest: bool = False
) -> list[str]:
    """Removes the references of `file` in the directory `path`. Returns the errors of checkpoints that could not be removed.

    Keeps the reference to `except_checkpoint`, and with `keep_newest` also to the latest other one. The `keep` latest checkpoints
    of the directory are kept in any case. Raises like `DirectoryHandle`.
    """
    if not os.path.isdir(path):
        return []
    with DirectoryHandle.open_to_save(path) as folder:
        named = _relative_name(file, path)
        old = [name for name, other in _references(folder).items() if other == named and name != except_checkpoint]
        for name in old[: -1 if keep_newest else None]:
            with folder.open_subdirectory(name) as saved:
                saved.remove(_REFERENCE)
    return _native.prune_checkpoints(open_to_save(path), keep).errors if old else []


def _references(folder: DirectoryHandle) -> dict[str, str]:
    """Returns the files that refer to checkpoints in `folder` by checkpoint name, oldest first."""
    names = [name for name in folder.list_names() if CHECKPOINT_NAME.fullmatch(name)]
    found = {}
    for name in sorted(names, key=lambda name: int(name.split("-")[0])):
        with folder.open_subdirectory(name) as saved:
            if _REFERENCE in saved.list_names():
                with os.fdopen(saved.open_file(_REFERENCE), "rb") as file:
                    found[name] = file.read(1 << 16).decode(errors="replace")
    return found


def _relative_name(file: str, path: str) -> str:
    """Returns `file` relative to the directory `path`, so that both can be moved together. A URL is returned unchanged."""
    if "://" in file:
        return file
    # A link is recorded by its own path: it may be removed while its target stays.
    folder, name = os.path.split(os.path.abspath(file))
    return os.path.relpath(os.path.join(os.path.realpath(folder), name), os.path.realpath(path))
