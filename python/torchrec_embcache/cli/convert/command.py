"""`convert`: converts tables of other formats to a checkpoint, or a checkpoint to other formats."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import SingleRank
from torchrec_embcache._fs import DirectoryHandle
from torchrec_embcache._paths import CheckpointDirectory, check_path, open_to_save
from torchrec_embcache.checkpoint._save import RankPart, SaveSession
from torchrec_embcache.cli.checkpoints import OpenCheckpoint
from torchrec_embcache.cli.report import CommandReport, ReportTable
from torchrec_embcache.config import MAX_NUM_BUCKETS
from torchrec_embcache.exceptions import ConfigError, InputError, PathError, UnsupportedError
from torchrec_embcache.optimizers import BY_KIND, OptimizerSpec

from .layout import METADATA, CheckpointLayout, ConvertSettings, StoredTable, check_known_names
from .layouts import LAYOUTS, detect_layout

__all__ = ["check_unused_options", "convert"]

#: Slot names of layouts that do not name their slots, mapped to torch's names.
_UNNAMED = {
    ("momentum1",): ("sum",),
    ("momentum1", "momentum2"): ("exp_avg", "exp_avg_sq"),
    ("exp_avg_sq", "momentum1"): ("exp_avg_sq", "exp_avg"),  # TorchRec calls the first slot momentum1
}


#: The options of `ConvertSettings` whose names differ from their fields'.
_OPTIONS = {"total_num_buckets": "--buckets", "sequences": "--sequence"}


def check_unused_options(settings: ConvertSettings, used: Collection[str], conversion: str) -> None:
    """Raises `ConfigError` for an option that is not among the fields `used`: `conversion` would ignore it."""
    for each in dataclasses.fields(ConvertSettings):
        given, default = getattr(settings, each.name), getattr(ConvertSettings(), each.name)
        if each.name not in used and given != default:
            option = _OPTIONS.get(each.name, f"--{each.name.replace('_', '-')}")
            raise ConfigError(f"{option}: {conversion} does not use it: leave it out")


def convert(source: str, target: str, from_layout: str, to_layout: str, settings: ConvertSettings) -> CommandReport:
    """Writes the tables of `source` to the directory `target`.

    Args:
        source: A checkpoint, or a directory in another layout.
        target: Created if missing. A checkpoint becomes the latest there; another layout requires an empty directory.
        from_layout: "auto", "embcache", or a name in `layouts.LAYOUTS`.
        to_layout: "embcache", or the name of a writable one.
        settings: Settings that the source layout does not contain.
    """
    check_path("source", source)
    if from_layout == "auto":
        from_layout = detect_layout(Path(source))
    if (from_layout == "embcache") == (to_layout == "embcache"):
        raise UnsupportedError(
            f"from {from_layout} to {to_layout}: one side must be a checkpoint of ours, and one not "
            "(`reshard` and `compact` write a checkpoint again)"
        )
    layout = LAYOUTS[from_layout if to_layout == "embcache" else to_layout]
    used = layout.import_options if to_layout == "embcache" else layout.export_options
    check_unused_options(settings, used, f"a conversion from {from_layout} to {to_layout}")
    skipped: list[str] = []
    notes: list[str] = []
    if to_layout == "embcache":
        # Names and permissions of a foreign directory are not checked; its contents are.
        if not Path(source).is_dir():
            raise PathError(f"{source} is not a directory")
        tables, skipped = layout.read(Path(source))
        if not tables:
            raise InputError(f"{source} has no table in the layout {from_layout}")
        tables = [_strip_model_key(table, settings.model_key) for table in tables]
        check_known_names("--rename", settings.rename, [table.name for table in tables], source)
        slots = [slot for table in tables for slot in (*table.slots, *table.unread)]
        check_known_names("--skip", settings.skip, slots, source)
        written = _import_tables(tables, open_to_save(target), settings)
    else:
        opened = OpenCheckpoint.open(source)
        if opened.is_for_serving:
            raise UnsupportedError(
                f"{source} is a serving checkpoint, which has no optimizer state: convert the checkpoint that it was made from, "
                f"{opened.manifest['made_from']['name']}"
            )
        written = _export_to(target, opened, layout, settings)
        if any(opened.pending):
            notes.append(f"the counts of ids that wait for rows are not in {target}: {to_layout} files hold rows alone")
        if layout.omitted:
            notes.append(f"{layout.omitted}, are not in {target}")
    data = {
        "source": source,
        "target": target,
        "from": from_layout,
        "to": to_layout,
        "tables": written,
        "skipped": skipped,
    }
    columns = ("module", "table", "rows", "dim", "optimizer")
    grid = ReportTable(f"{source} → {target}", columns, [tuple(table[name] for name in columns) for table in written])
    return CommandReport(data, [grid], [f"not a table, left out: {name}" for name in skipped], notes=notes)


# ---- into a checkpoint


def _strip_model_key(table: StoredTable, key: str) -> StoredTable:
    """Returns the table with its module path relative to `key`."""
    if not key:
        return table
    module = table.description["module"]
    if module != key and not module.startswith(f"{key}."):
        raise InputError(f"table {table.name!r} is in {module!r}, which is not below --model-key {key}")
    return dataclasses.replace(table, description={"module": module[len(key) + 1 :]})


def _import_tables(
    tables: list[StoredTable], directory: CheckpointDirectory, settings: ConvertSettings
) -> list[dict[str, Any]]:
    if not 1 <= settings.total_num_buckets <= MAX_NUM_BUCKETS:
        raise InputError(f"--buckets {settings.total_num_buckets}: give 1 to {MAX_NUM_BUCKETS}")
    specs = [_table_spec(table, settings) for table in tables]
    names = [(spec["module"], spec["table"]) for spec, _ in specs]
    if len(set(names)) < len(names):
        raise InputError(f"tables {names}: two have one name; tell them apart with --rename")
    last_epoch = 0
    with SaveSession(directory, SingleRank()) as session:
        session.begin()
        writer = session.writer()
        for table, (spec, slots) in zip(tables, specs, strict=True):
            chunks = _ImportChunks(table, BY_KIND[spec["optimizer"]["name"]], slots)
            writer.write_rows(json.dumps(spec), 0, spec["total_num_buckets"], iter(chunks))
            last_epoch = max(last_epoch, chunks.last_epoch)
        session.write(lambda: RankPart(writer.finish()))
        # Rows that are trained later have a later epoch than all imported ones, so that the next delta contains only the former.
        session.publish(last_epoch + 1)
    return [
        {name: spec[name] for name in ("module", "table", "dim")}
        | {"rows": table.rows, "optimizer": spec["optimizer"]["name"]}
        for table, (spec, _) in zip(tables, specs, strict=True)
    ]


def _table_spec(table: StoredTable, settings: ConvertSettings) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a table's manifest entry, and the mapping of torch's slot names to the layout's."""
    if unread := {slot: why for slot, why in table.unread.items() if slot not in settings.skip}:
        raise UnsupportedError(
            f"table {table.name!r}: "
            + "; ".join(f"the slot {slot} cannot be read: {why}" for slot, why in unread.items())
            + f": leave it out with {' '.join(f'--skip {slot}' for slot in unread)}, and it starts at zero"
        )
    present = tuple(slot for slot in table.slots if slot not in settings.skip)
    names = _UNNAMED.get(present, present)
    of_a_row = {name for name, slot in zip(names, present, strict=True) if table.slots[slot] == 0}
    described = table.description
    kind = (
        settings.optimizer or described.get("optimizer", {}).get("name") or _guess_optimizer(table.dim, names, of_a_row)
    )
    if kind not in BY_KIND:
        raise InputError(f"optimizer {kind!r} is not known: use one of {sorted(BY_KIND)}")
    wanted = BY_KIND[kind]
    if set(names) != set(wanted.slot_names) or (
        table.dim > 1 and of_a_row != set(wanted.slot_names[wanted.vector_slots :])
    ):
        raise InputError(
            f"table {table.name!r} has the slots {dict(table.slots)} (0: one number a row) and {kind} needs "
            f"{list(wanted.slot_names)}: name another --optimizer, or leave slots out with --skip"
        )
    name = settings.rename.get(table.name, described.get("table", table.name))
    spec = {
        "module": settings.module or described.get("module", ""),
        "table": name,
        "key": described.get("key", _native.table_key(name)),
        "dim": table.dim,
        "dtype": "F32",
        "optimizer": {"name": kind, "hyperparameters": described.get("optimizer", {}).get("hyperparameters", {})},
        "step": settings.step or described.get("step", 0),
        "seed": described.get("seed", 0),
        "initializer": described.get("initializer", {"name": "constant", "value": 0.0}),
        "total_num_buckets": described.get("total_num_buckets", settings.total_num_buckets),
    }
    if "oov_row" in described:
        if described.get("dim") != table.dim:
            raise InputError(
                f"table {table.name!r} has dim {table.dim}, and its table.json has the oov_row of dim {described.get('dim')}: give "
                "both the same dim, or take oov_row and missing_read out of table.json"
            )
        spec["oov_row"] = _oov_row(described, wanted, table.dim)
    # A table with an OOV row reads it for missing ids, unless its settings state otherwise.
    spec["missing_read"] = described.get("missing_read", "oov_row" if "oov_row" in described else "initial")
    return spec, dict(zip(names, present, strict=True))


def _oov_row(described: Mapping[str, Any], optimizer: type[OptimizerSpec], dim: int) -> str:
    """Returns the encoded OOV row, eight digits per value. Its slots are zeros if they belong to another optimizer."""
    given: str = described["oov_row"]
    if described.get("optimizer", {}).get("name") == optimizer.kind:
        return given
    slots = len(optimizer.slot_names)
    floats = dim * (1 + optimizer.vector_slots) + slots - optimizer.vector_slots
    return given[: 8 * dim].ljust(8 * floats, "0")


def _guess_optimizer(dim: int, names: tuple[str, ...], of_a_row: set[str]) -> str:
    """Guesses the optimizer from the slots, of which some are one value per row; Adam if several optimizers have these slots."""
    if not names:
        return "sgd"
    if names == ("sum",):
        return "rowwise_adagrad" if of_a_row else "adagrad"
    if set(names) == {"z", "n"}:
        return "ftrl"
    return "partial_rowwise_adam" if of_a_row == {"exp_avg_sq"} and dim > 1 else "adam"


class _ImportChunks:
    """Rows in their native form. `last_epoch` is the greatest epoch of the rows yielded so far."""

    def __init__(self, table: StoredTable, optimizer: type[OptimizerSpec], slots: Mapping[str, str]) -> None:
        self._table = table
        self._optimizer = optimizer
        self._slots = slots
        self.last_epoch = 0

    def __iter__(self) -> Iterator[_native.RowWriteBatch]:
        for columns in self._table.chunks():
            vectors = [columns["weight"]]
            scalars = None
            for at, name in enumerate(self._optimizer.slot_names):
                values = columns[self._slots[name]]
                if at < self._optimizer.vector_slots:
                    vectors.append(values.reshape(len(values), self._table.dim))
                else:
                    scalars = np.ascontiguousarray(values.reshape(-1))
            metadata = None
            if METADATA.keys() <= columns.keys():
                metadata = _native.RowMetadata(
                    **{name: columns[name].astype(dtype, copy=False) for name, dtype in METADATA.items()}
                )
                self.last_epoch = max(self.last_epoch, int(columns["modified_epoch"].max(initial=0)))
            yield _native.RowWriteBatch(columns["id"], np.concatenate(vectors, axis=1), scalars, metadata)


# ---- out of a checkpoint


def _export_to(
    target: str, opened: OpenCheckpoint, layout: CheckpointLayout, settings: ConvertSettings
) -> list[dict[str, Any]]:
    """Exports to the directory `target`. After an error, removes the directory if it was created here."""
    made = not os.path.lexists(target)
    with DirectoryHandle.open_to_save(target) as empty:
        try:
            return _export_tables(opened, empty, layout, settings)
        except BaseException:
            if made:
                with contextlib.suppress(OSError):
                    os.rmdir(target)
            raise


def _export_tables(
    opened: OpenCheckpoint, target: DirectoryHandle, layout: CheckpointLayout, settings: ConvertSettings
) -> list[dict[str, Any]]:
    """Writes every table below `target`. After an error, removes all of them."""
    if target.list_names():
        raise PathError(f"{target.path} is not empty: give a new directory")
    try:
        return layout.write(opened, target, settings)
    except BaseException:
        for begun in target.list_names():
            target.remove(begun)
        raise
