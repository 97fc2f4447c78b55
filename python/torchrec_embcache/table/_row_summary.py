"""Row summaries in a `state_dict`, which contains no rows, and a check on load that the tables have these rows.

A table's entry in a state dict is its empty `[0, D]` weight. Each cache module adds an extra state, in torch's terms: a summary of
the rows and steps of its tables, as JSON in a uint8 tensor. Every copy of a state dict has it: those by `torch.save`, safetensors,
PyTorch's DCP, `.clone()` and `.cpu()`. The length of a module's summary depends only on the names of its tables, because DCP loads
into tensors of the same size.
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

from torchrec_embcache.exceptions import EmbCacheWarning, StateError

from .cache_table import CacheTable

__all__ = [
    "RowSummaries",
    "StateDictWatch",
    "check_missing_rows",
    "get_checkpoint_name",
    "is_placeholder",
    "mark_as_placeholder",
    "set_checkpoint_name",
    "summaries_in",
    "summarize_tables",
]

# Summaries of a module's tables by table name. In a multi-rank job each rank summarizes its own tables.
RowSummaries = dict[str, dict[str, Any]]
# Suffix of the key of an extra state.
_SUFFIX = "_extra_state"
_PLACEHOLDER_ATTRIBUTE = "_embcache_stand_in"
# Maximum bytes of a table's summary without its name, and of the surrounding JSON.
_BYTES_PER_TABLE, _BYTES_OVERHEAD = 384, 16


def summarize_tables(tables: Mapping[str, CacheTable], names: Iterable[str]) -> Tensor:
    """Returns the summary of a module's tables, uint8 [n]. Opens none. `names` are those of all tables, on all ranks."""
    notes = {
        name: _summarize_table(table) if table.is_open else _summarize_unopened(table)
        for name, table in tables.items()
        if not table._unusable
    }
    return _encode(notes, _BYTES_OVERHEAD + sum(_BYTES_PER_TABLE + len(json.dumps(name)) for name in names))


def _summarize_table(table: CacheTable) -> dict[str, Any]:
    return {
        "rows": len(table),
        "step": table._native_table.step(),
        "shard": [table.rank, table.world_size, *table.buckets],
        "contents": table._contents_id,
    }


def _summarize_unopened(table: CacheTable) -> dict[str, Any]:
    """Returns the part that is known without opening the table: its contents id. The files of its SSD tier may have rows."""
    return {"rows": 0, "contents": table._contents_id}


def _encode(summaries: RowSummaries, min_bytes: int = 0) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(summaries).encode().ljust(min_bytes)), dtype=torch.uint8)


def _decode(entry: object) -> RowSummaries:
    """Returns the summaries in an entry of a state dict; empty if the entry is not a summary or has no data."""
    if not isinstance(entry, Tensor) or entry.is_meta:
        return {}
    try:
        notes = json.loads(entry.detach().cpu().to(torch.uint8).numpy().tobytes())
        return {name: note for name, note in notes.items() if isinstance(note, dict)}
    except (ValueError, TypeError, AttributeError, RuntimeError):  # from another version, or forged
        return {}


def summaries_in(state: Mapping[str, Any]) -> Iterator[tuple[str, RowSummaries]]:
    """Yields the summaries of each module in a state dict, with their keys."""
    for key, entry in state.items():
        if key.endswith(_SUFFIX) and (notes := _decode(entry)):
            yield key, notes


def set_checkpoint_name(state: dict[str, Any], path: str, name: str) -> None:
    """Stores the name of the checkpoint with the rows, `name` in `path`, in the summaries of a state dict."""
    for key, notes in list(summaries_in(state)):
        state[key] = _encode({table: {**note, "checkpoint": path, "name": name} for table, note in notes.items()})


def get_checkpoint_name(state: Mapping[str, Any]) -> str | None:
    """Returns the name stored by `set_checkpoint_name`; None if there is none."""
    return next((note["name"] for _, notes in summaries_in(state) for note in notes.values() if "name" in note), None)


def mark_as_placeholder(weight: nn.Parameter) -> nn.Parameter:
    """Marks the `[0, D]` parameter of a table, so that it is never saved in place of the rows."""
    weight.__dict__[_PLACEHOLDER_ATTRIBUTE] = True
    return weight


def is_placeholder(value: object) -> bool:
    """True if `value` is the placeholder parameter of a table."""
    return hasattr(value, _PLACEHOLDER_ATTRIBUTE)


def check_missing_rows(
    entry: object, tables: Mapping[str, CacheTable], key: str, missing_keys: list[str], *, strict: bool
) -> None:
    """Raises `StateError` if a summary has rows that the tables do not have. `entry` is the state dict's value of `key`.

    `strict` is the argument of `_load_from_state_dict`. If the user's call has `strict=False`, the key is added to `missing_keys`
    instead.
    """
    notes = _decode(entry)
    if not strict or (wrong := _describe_missing_rows(notes, tables)) is None:
        return
    if not _user_strict():
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


def _describe_missing_rows(summaries: RowSummaries, tables: Mapping[str, CacheTable]) -> str | None:
    """Describes the rows of the summaries that the tables lack; None if they have all, as far as one rank can determine."""
    for name, table in tables.items():
        try:
            note = summaries[name]
            wrong = _difference(note, table)
        except (KeyError, TypeError):  # another rank's table, another version's summary, or a forged one
            continue
        if wrong is not None:
            return f"table {name!r} had {note['rows']} rows at step {note['step']}, and here it has {wrong}"
    # Most checkpoints contain the summaries of only one rank. The tables of other ranks usually had rows, too.
    elsewhere = [name for name in summaries if name not in tables and summaries[name].get("rows")]
    if elsewhere and tables and all(name not in summaries and _never_had_rows(tables[name]) for name in tables):
        names = ", ".join(map(repr, tables))
        return f"table {elsewhere[0]!r} had rows, and here its tables ({names}) never had a row"
    return None


def _never_had_rows(table: CacheTable) -> bool:
    if table._past_contents_ids or table._loaded_step:
        return False
    if not table.is_open and table.tiers.ssd:
        table.open()  # it may resume rows
    return not table.is_open or (table._unusable is None and len(table) == 0 and table._native_table.step() == 0)


def _difference(summary: Mapping[str, Any], table: CacheTable) -> str | None:
    """Describes the table's rows if they differ from the summary; None if they match, as far as one rank can determine."""
    if not summary["rows"] or summary["contents"] in table._past_contents_ids:
        # The second case: the summary is of this table, before a load replaced its rows.
        return None
    table.open()
    if table._unusable is not None:
        return "none that can be used"
    rows, step = len(table), table._native_table.step()
    if step not in (summary["step"], 0) or (step == 0 and summary["step"] not in (0, table._loaded_step)):
        return f"{rows} at step {step}"
    # All ranks count the same steps of a table. Each rank counts its own rows.
    same_shard = summary["shard"] == [table.rank, table.world_size, *table.buckets]
    if same_shard and rows != summary["rows"] and (rows == 0 or table.on_full == "error"):
        return f"{rows} at step {step}"
    return None


def _user_strict() -> bool:
    """Returns `strict` of the running `nn.Module.load_state_dict`: torch always passes True to its modules."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code is nn.Module.load_state_dict.__code__:
            return bool(frame.f_locals["strict"])
        frame = frame.f_back
    return True


@dataclass
class StateDictWatch:
    """Warns once per module if a state dict is freed before this package has saved or loaded the rows.

    The use of a state dict is only known afterwards: `dcp.save` gets it before the writer that saves the rows.
    """

    is_suppressed: bool = False
    """True if the rows were saved or loaded, or the warning was issued."""
    is_watching: bool = False
    """True while a finalizer watches a summary."""

    def __deepcopy__(self, memo: object) -> "StateDictWatch":
        """Returns a new watch for a copy of the module."""
        return StateDictWatch()

    def watch(self, summary: Tensor, tables: Mapping[str, CacheTable]) -> None:
        """Warns when `summary` is freed together with its state dict, if the tables have rows."""
        rows = {name: len(table) for name, table in tables.items() if table.is_open and not table._unusable}
        if self.is_suppressed or self.is_watching or not any(rows.values()):
            return
        named = ", ".join(f"{name!r} ({count})" for name, count in rows.items() if count)
        self.is_watching = True
        weakref.finalize(
            summary, self._dropped, f"state_dict() holds no rows of tables {named}, and nothing has saved them: "
        )

    def _dropped(self, tables: str) -> None:
        self.is_watching = False
        if not self.is_suppressed:
            self.is_suppressed = True
            message = (
                "save them with Saver(rank).save(model, path), or give dcp.save an EmbCacheStorageWriter(path, model)"
            )
            # The warning points to the line that freed the state dict: this method and the finalizer are in between.
            warnings.warn(tables + message, EmbCacheWarning, stacklevel=3)
