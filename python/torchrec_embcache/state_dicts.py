"""What a `state_dict` says of tables, whose rows it does not hold, and the refusal to load it where those rows are not.

A table's entry in a state dict is its empty `[0, D]` weight. The tensor carries a note (an attribute, which `torch.save` and
`copy.deepcopy` keep) of the rows and steps that the table had. No key is added, so that keys are those of TorchRec's own modules.
Checkpoints that keep no attributes, as those of PyTorch's DCP, lose the note: `EmbCacheStorageWriter` saves the rows themselves
there, and `TableState` is a note to put beside the model where rows are saved by `Saver`. Without either, `dcp.load` fills a state
dict of the model that loads: where its tables never had rows, `load_state_dict` of that very state dict is refused.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from .cache import internals
from .collective import gathered
from .exceptions import StateError
from .table_shard import TableShard
from .whole_model import cache_modules

__all__ = ["TableState", "check_rows_are_here", "note_rows", "notes_of"]

_NOTE = "_embcache_rows"


def note_rows(state: Mapping[str, Any], keys: Mapping[str, TableShard]) -> None:
    """Note in the entries `keys` of a state dict what their tables hold. Opens nothing; live parameters are left alone."""
    for key, table in keys.items():
        entry = state.get(key)
        if isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter) and not table.unusable:
            entry.__dict__[_NOTE] = _note(table) if table.is_open else _note_of_unopened(table)


def _note(table: TableShard) -> dict[str, Any]:
    """A note of plain values only, which `torch.load(weights_only=True)` accepts."""
    return {
        "table": table.name,
        "rows": len(table),
        "step": table.native.step(),
        "dim": table.dim,
        "optimizer": table.spec.kind,
        "shard": [table.rank, table.world_size, *table.buckets],
        "contents": table.contents,
    }


def _note_of_unopened(table: TableShard) -> dict[str, Any]:
    """What is known without opening it: whose state dict this is. Files of its SSD tier may have rows."""
    return {"table": table.name, "rows": 0, "contents": table.contents}


def notes_of(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The notes in a state dict, which may be written into."""
    for entry in state.values():
        note = getattr(entry, _NOTE, None)
        if isinstance(note, dict):
            yield note


def check_rows_are_here(state: Mapping[str, Any], keys: Mapping[str, TableShard], *, strict: bool) -> None:
    """`StateError` where an entry of `keys` notes rows that the table does not hold.

    `strict` is what `_load_from_state_dict` was given; nothing is refused where the user's call says `strict=False`.
    """
    noted = {key: note for key in keys if isinstance(note := getattr(state.get(key), _NOTE, None), dict)}
    if not noted or not (strict and _users_strict()):
        return
    _refuse_what_dcp_filled(noted, keys)
    for key, note in noted.items():
        try:
            wrong = _difference(note, keys[key])
        except (KeyError, TypeError):  # another version's, or made up
            continue
        if wrong is not None:
            saver = "Saver(rank).load(model, path)"
            if note.get("checkpoint"):
                saver += f", where path is {note['checkpoint']}"
            raise StateError(
                f"load_state_dict(): the state dict is of a model whose table {keys[key].name!r} had {note['rows']} rows at step "
                f"{note['step']}, and here it has {wrong}. A state dict does not hold rows: load them first, by {saver} (or "
                "dcp.load with EmbCacheStorageReader(path, model)), then this. For the dense part alone: load_state_dict(..., "
                "strict=False)"
            )


def _refuse_what_dcp_filled(noted: Mapping[str, Mapping[str, Any]], keys: Mapping[str, TableShard]) -> None:
    """`StateError` where the state dict is this very module's, and none of its tables ever had a row.

    Loading it makes sense only after `dcp.load` has filled it. What that read says nothing of rows.
    """
    if not all(
        keys[key].contents == note.get("contents") and _never_had_rows(keys[key]) for key, note in noted.items()
    ):
        return
    names = ", ".join(repr(keys[key].name) for key in noted)
    raise StateError(
        f"load_state_dict(): the state dict is of this very model, whose tables ({names}) never had a row. PyTorch's DCP fills it "
        "in place, and what it saves holds no rows: load them first, by Saver(rank).load(model, path) (or dcp.load with "
        "EmbCacheStorageReader(path, model)), then this. Where the tables were saved without rows, or for the dense part alone: "
        "load_state_dict(..., strict=False)"
    )


def _never_had_rows(table: TableShard) -> bool:
    if table.past_contents or table.loaded_step:
        return False
    if not table.is_open and table.tiers.ssd:
        table.open()  # it may resume rows
    return not table.is_open or (table.unusable is None and len(table) == 0 and table.native.step() == 0)


def _difference(note: Mapping[str, Any], table: TableShard) -> str | None:
    """What the table holds in place of the rows that were noted; None where it holds those, as far as one rank can tell."""
    if not note["rows"] or note["contents"] in table.past_contents:
        # The latter was taken of this very table before a load replaced its rows: DCP loads into such a state dict.
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


class TableState:
    """A note of all tables' rows for a checkpoint by PyTorch's DCP that does not hold them; a `Stateful` there.

    Put it beside the model: `dcp.save({"model": model.state_dict(), "tables": TableState(model)}, checkpoint_id=path)`. Then
    `dcp.load` raises `StateError` where the rows were not loaded before it, by `Saver().load(model, rows_path)`.

    Both methods are collective, as DCP calls them.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.state_dicts import TableState
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model(torch.tensor([7, 8])).sum().backward()
        >>> note = TableState(model).state_dict()
        >>> note
        {'tables': '{"/item": [2, 1]}'}
        >>> TableState(model).load_state_dict(note)  # the rows are here
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, str]:
        """Rows and step of every table that is open, over all ranks."""
        return {"tables": json.dumps(self._held(), sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """`StateError` where the model's tables hold other rows than those noted."""
        held = self._held()
        for name, [rows, step] in json.loads(state["tables"]).items():
            now = held.get(name, [0, 0])
            if rows and now != [rows, step]:
                raise StateError(
                    f"the checkpoint is of a model whose table {name!r} had {rows} rows at step {step}, and here it has {now[0]} "
                    f"at step {now[1]}. It does not hold rows: load them first, by Saver(rank).load(model, path), then this"
                )

    def _held(self) -> dict[str, list[int]]:
        def mine() -> dict[str, list[int]]:
            return {
                f"{path}/{name}": [len(table), table.step() or internals(table).loaded_step]
                for path, module in cache_modules(self._model).items()
                for name, table in module.tables.items()
                if table.is_open
            }

        total: dict[str, list[int]] = {}
        for of_rank in gathered(mine):
            for name, (rows, step) in of_rank.items():
                before = total.get(name, [0, 0])
                total[name] = [before[0] + rows, max(before[1], step)]
        return total
