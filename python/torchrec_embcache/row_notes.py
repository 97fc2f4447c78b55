"""What a `state_dict` says of tables, whose rows it does not hold, and the refusal to load it where those rows are not.

A table's entry in a state dict is its empty `[0, D]` weight. Each cache module adds an extra state, as torch calls it: a note of
the rows and steps that its tables had, as JSON in a uint8 tensor. Every copy of a state dict has the note: those by `torch.save`,
safetensors, PyTorch's DCP, `.clone()` and `.cpu()`. The length of a module's note depends on the names of its tables alone, because
DCP loads into tensors of the same size.
"""

import json
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .exceptions import EmbCacheWarning, StateError
from .table_shard import TableShard

__all__ = [
    "NoteWatch",
    "Notes",
    "mark_as_stand_in",
    "name_checkpoint",
    "named_checkpoint",
    "note_of",
    "notes_in",
    "refuse_missing_rows",
    "stands_for_rows",
]

# The notes of a module's tables by their names. A rank of several notes its own tables.
Notes = dict[str, dict[str, Any]]
# The end of the key of an extra state.
_SUFFIX = "_extra_state"
_STANDS_FOR_ROWS = "_embcache_stand_in"
# Bytes of a table's note without its name, at most, and of what is around the notes.
_BYTES_A_TABLE, _BYTES_AROUND = 384, 16


def note_of(tables: Mapping[str, TableShard], names: Iterable[str]) -> Tensor:
    """The note of a module's tables, uint8 [n]. Opens nothing. `names` are those of all tables, also of those on other ranks."""
    notes = {
        name: _note(table) if table.is_open else _note_of_unopened(table)
        for name, table in tables.items()
        if not table.unusable
    }
    return _encoded(notes, _BYTES_AROUND + sum(_BYTES_A_TABLE + len(json.dumps(name)) for name in names))


def _note(table: TableShard) -> dict[str, Any]:
    return {
        "rows": len(table),
        "step": table.native.step(),
        "shard": [table.rank, table.world_size, *table.buckets],
        "contents": table.contents,
    }


def _note_of_unopened(table: TableShard) -> dict[str, Any]:
    """What is known without opening it: whose state dict this is. Files of its SSD tier may have rows."""
    return {"rows": 0, "contents": table.contents}


def _encoded(notes: Notes, least: int = 0) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(notes).encode().ljust(least)), dtype=torch.uint8)


def _decoded(entry: object) -> Notes:
    """The notes that are in the entry of a state dict; none where it is no note, or one without data."""
    if not isinstance(entry, Tensor) or entry.is_meta:
        return {}
    try:
        notes = json.loads(entry.detach().cpu().to(torch.uint8).numpy().tobytes())
        return {name: note for name, note in notes.items() if isinstance(note, dict)}
    except (ValueError, TypeError, AttributeError, RuntimeError):  # another version's, or made up
        return {}


def notes_in(state: Mapping[str, Any]) -> Iterator[tuple[str, Notes]]:
    """The notes of each module in a state dict, by their keys in it."""
    for key, entry in state.items():
        if key.endswith(_SUFFIX) and (notes := _decoded(entry)):
            yield key, notes


def name_checkpoint(state: dict[str, Any], path: str, name: str) -> None:
    """Say in the notes of a state dict which checkpoint has the rows: the one of this `name` in `path`."""
    for key, notes in list(notes_in(state)):
        state[key] = _encoded({table: {**note, "checkpoint": path, "name": name} for table, note in notes.items()})


def named_checkpoint(state: Mapping[str, Any]) -> str | None:
    """The name that `name_checkpoint` was given; None where it was not."""
    return next((note["name"] for _, notes in notes_in(state) for note in notes.values() if "name" in note), None)


def mark_as_stand_in(weight: nn.Parameter) -> nn.Parameter:
    """The `[0, D]` parameter of a table, marked so that nothing saves it in place of the rows."""
    weight.__dict__[_STANDS_FOR_ROWS] = True
    return weight


def stands_for_rows(value: object) -> bool:
    """True if this is the parameter of a table."""
    return hasattr(value, _STANDS_FOR_ROWS)


def refuse_missing_rows(
    entry: object, tables: Mapping[str, TableShard], key: str, missing_keys: list[str], *, strict: bool
) -> None:
    """`StateError` where a note says rows that the tables do not hold. `entry` is what the state dict has under the note's `key`.

    `strict` is what `_load_from_state_dict` was given. Where the user's call says `strict=False` the key is missing instead.
    """
    notes = _decoded(entry)
    if not strict or (wrong := _missing_rows(notes, tables)) is None:
        return
    if not _users_strict():
        missing_keys.append(key)
        return
    saver = "Saver(rank).load(model, path)"
    if path := next((note["checkpoint"] for note in notes.values() if "checkpoint" in note), None):
        saver += f", where path is {path}"
    raise StateError(
        f"load_state_dict(): the state dict is of a model whose {wrong}. A state dict does not hold rows: load them first, by "
        f"{saver} (or dcp.load with EmbCacheStorageReader(path, model)), then this. For the dense part alone: "
        "load_state_dict(..., strict=False)"
    )


def _missing_rows(notes: Notes, tables: Mapping[str, TableShard]) -> str | None:
    """Which rows the notes say that the tables do not hold; None where these hold all, as far as one rank can tell."""
    for name, table in tables.items():
        try:
            note = notes[name]
            wrong = _difference(note, table)
        except (KeyError, TypeError):  # another rank's table, another version's note, or made up
            continue
        if wrong is not None:
            return f"table {name!r} had {note['rows']} rows at step {note['step']}, and here it has {wrong}"
    # The notes of one rank stand for all in most checkpoints. The tables of the others had rows too, as a rule.
    elsewhere = [name for name in notes if name not in tables and notes[name].get("rows")]
    if elsewhere and tables and all(name not in notes and _never_had_rows(tables[name]) for name in tables):
        names = ", ".join(map(repr, tables))
        return f"table {elsewhere[0]!r} had rows, and here its tables ({names}) never had a row"
    return None


def _never_had_rows(table: TableShard) -> bool:
    if table.past_contents or table.loaded_step:
        return False
    if not table.is_open and table.tiers.ssd:
        table.open()  # it may resume rows
    return not table.is_open or (table.unusable is None and len(table) == 0 and table.native.step() == 0)


def _difference(note: Mapping[str, Any], table: TableShard) -> str | None:
    """What the table holds in place of the rows that were noted; None where it holds those, as far as one rank can tell."""
    if not note["rows"] or note["contents"] in table.past_contents:
        # The latter was taken of this very table before a load replaced its rows.
        return None
    table.open()
    if table.unusable is not None:
        return "none that can be used"
    rows, step = len(table), table.native.step()
    if step not in (note["step"], 0) or (step == 0 and note["step"] not in (0, table.loaded_step)):
        return f"{rows} at step {step}"
    # All ranks count the same steps of a table. Each rank counts its own rows.
    same_shard = note["shard"] == [table.rank, table.world_size, *table.buckets]
    if same_shard and rows != note["rows"] and (rows == 0 or table.on_full == "error"):
        return f"{rows} at step {step}"
    return None


def _users_strict() -> bool:
    """What `strict` the running `nn.Module.load_state_dict` was given: torch says True to its modules, whatever it was."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code is nn.Module.load_state_dict.__code__:
            return bool(frame.f_locals["strict"])
        frame = frame.f_back
    return True


@dataclass
class NoteWatch:
    """Warns once for a module whose state dict is dropped before anything of this package has saved or loaded its rows.

    What is done with a state dict is seen only afterwards: `dcp.save` is given it before the writer that saves the rows.
    """

    is_quiet: bool = False
    """True if the rows are in good hands, or the warning was given."""
    is_watching: bool = False
    """True if a note is alive whose end will be noticed."""

    def __deepcopy__(self, memo: object) -> "NoteWatch":
        """A watch of its own, for a copy of the module."""
        return NoteWatch()

    def watch(self, note: Tensor, tables: Mapping[str, TableShard]) -> None:
        """Warn when `note` is dropped, with the state dict that it is in, where the tables have rows by now."""
        rows = {name: len(table) for name, table in tables.items() if table.is_open and not table.unusable}
        if self.is_quiet or self.is_watching or not any(rows.values()):
            return
        named = ", ".join(f"{name!r} ({count})" for name, count in rows.items() if count)
        self.is_watching = True
        weakref.finalize(
            note, self._dropped, f"state_dict() holds no rows of tables {named}, and nothing has saved them: "
        )

    def _dropped(self, found: str) -> None:
        self.is_watching = False
        if not self.is_quiet:
            self.is_quiet = True
            message = (
                "save them with Saver(rank).save(model, path), or give dcp.save an EmbCacheStorageWriter(path, model)"
            )
            # It names the line that dropped the state dict: this method and the finalizer are between.
            warnings.warn(found + message, EmbCacheWarning, stacklevel=3)
