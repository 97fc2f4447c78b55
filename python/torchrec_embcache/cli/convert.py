"""`convert`: tables from other layouts into a checkpoint, and a checkpoint's into plain safetensors or npy files."""

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.blocks.files import Directory, render_json
from torchrec_embcache.exceptions import InputError, PathError, UnsupportedError
from torchrec_embcache.optimizers import SGD, Adagrad, Adam, AdamW, OptimizerSpec, RowWiseAdagrad
from torchrec_embcache.saver import abandon

from .checkpoints import Opened
from .layouts import DESCRIPTION, METADATA, READERS, Columns, StoredTable, recognise
from .report import Grid, Report

__all__ = ["Settings", "convert"]

_OPTIMIZERS: dict[str, type[OptimizerSpec]] = {kind.kind: kind for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW)}
_DEFAULT_BUCKETS = 65_536
#: Bytes of the rows in one safetensors file.
_PART_BYTES = 256 << 20
#: What layouts that do not name their slots call them, by how many there are.
_UNNAMED = {("momentum1",): ("sum",), ("momentum1", "momentum2"): ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class Settings:
    """What a foreign layout does not say of its tables."""

    module: str = ""
    optimizer: str | None = None
    step: int = 0
    total_num_buckets: int = _DEFAULT_BUCKETS
    rename: Mapping[str, str] = field(default_factory=dict)
    skip: Sequence[str] = ()


def convert(source: str, target: str, from_layout: str, to_layout: str, settings: Settings) -> Report:
    """Write the tables of `source` to the directory `target`.

    Args:
        source: A checkpoint, or a directory in another layout.
        target: Made when missing; a checkpoint becomes the newest there, another layout needs an empty directory.
        from_layout: "auto", "embcache", or a name in `layouts.READERS`.
        to_layout: "embcache", "safetensors" or "npy".
        settings: For layouts that do not say it.
    """
    if from_layout == "auto":
        from_layout = recognise(Path(source))
    if (from_layout == "embcache") == (to_layout == "embcache"):
        raise UnsupportedError(
            f"from {from_layout} to {to_layout}: one side must be a checkpoint of ours, and one not "
            "(`reshard` and `compact` write a checkpoint again)"
        )
    if from_layout == "embcache":
        opened = Opened.at(source)
        with Directory.to_save(target) as empty:
            written = _export(opened, empty, to_layout)
        skipped: list[str] = []
    else:
        # Its names and permissions are not ours to judge; what it holds is.
        if not Path(source).is_dir():
            raise PathError(f"{source} is not a directory")
        tables = list(READERS[from_layout](Path(source)))
        if not tables:
            raise InputError(f"{source} holds no table in the layout {from_layout}")
        skipped = [name for table in tables for name in table.skipped]
        written = _import(tables, _native.check_save_dir(target), settings)
    data = {
        "source": source,
        "target": target,
        "from": from_layout,
        "to": to_layout,
        "tables": written,
        "skipped": skipped,
    }
    columns = ("module", "table", "rows", "dim", "optimizer")
    grid = Grid(f"{source} → {target}", columns, [tuple(table[name] for name in columns) for table in written])
    return Report(data, [grid], [f"not a table, left out: {name}" for name in skipped])


# ---- into a checkpoint


def _import(tables: list[StoredTable], root: str, settings: Settings) -> list[dict[str, Any]]:
    specs = [_spec(table, settings) for table in tables]
    names = [(spec["module"], spec["table"]) for spec, _ in specs]
    if len(set(names)) < len(names):
        raise InputError(f"tables {names}: two have one name; tell them apart with --rename")
    begun = _native.CheckpointSave(root, secrets.randbits(64))
    try:
        writer = _native.CheckpointWriter(root, begun.name, 0, 1)
        for table, (spec, slots) in zip(tables, specs, strict=True):
            chunks = _chunks(table, _OPTIMIZERS[spec["optimizer"]["name"]], slots)
            writer.write_rows(json.dumps(spec), 0, spec["total_num_buckets"], chunks)
        # No row was modified after this: nothing has a later epoch.
        begun.publish([writer.finish()], 1)
    except BaseException:
        abandon(begun)
        raise
    return [
        {
            "module": spec["module"],
            "table": spec["table"],
            "rows": table.rows,
            "dim": table.dim,
            "optimizer": spec["optimizer"]["name"],
        }
        for table, (spec, _) in zip(tables, specs, strict=True)
    ]


def _spec(table: StoredTable, settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """A table as the manifest describes it, and its slots: torch's name to the layout's."""
    present = tuple(slot for slot in table.slots if slot not in settings.skip)
    names = _UNNAMED.get(present, present)
    described = table.description or {}
    kind = settings.optimizer or described.get("optimizer", {}).get("name") or _guess(table, present, names)
    if kind not in _OPTIMIZERS:
        raise InputError(f"optimizer {kind!r} is not known: use one of {sorted(_OPTIMIZERS)}")
    wanted = _OPTIMIZERS[kind]
    scalars = [name for name, slot in zip(names, present, strict=True) if table.slots[slot] == 0]
    if set(names) != set(wanted.slot_names) or (
        table.dim > 1 and bool(scalars) != (len(wanted.slot_names) > wanted.vector_slots)
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
    return spec, dict(zip(names, present, strict=True))


def _guess(table: StoredTable, present: tuple[str, ...], names: tuple[str, ...]) -> str:
    """The optimizer whose slots these are; Adam where it may be AdamW too."""
    if not names:
        return "sgd"
    if names == ("sum",):
        return "rowwise_adagrad" if table.slots[present[0]] == 0 else "adagrad"
    return "adam"


def _chunks(table: StoredTable, optimizer: type[OptimizerSpec], slots: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """Rows as the core takes them: ids, vectors, scalars, metadata."""
    for columns in table.chunks():
        vectors = [columns["weight"]]
        scalars = None
        for at, name in enumerate(optimizer.slot_names):
            values = columns[slots[name]]
            if at < optimizer.vector_slots:
                vectors.append(values.reshape(len(values), table.dim))
            else:
                scalars = np.ascontiguousarray(values.reshape(-1))
        meta = None
        if METADATA.keys() <= columns.keys():
            meta = tuple(columns[name].astype(dtype, copy=False) for name, dtype in METADATA.items())
        yield columns["id"], np.concatenate(vectors, axis=1), scalars, meta


# ---- out of a checkpoint


class _Sink(Protocol):
    def take(self, columns: Columns) -> None:
        """Some rows of the table."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _export(opened: Opened, target: Directory, layout: str) -> list[dict[str, Any]]:
    if target.names():
        raise PathError(f"{target.path} is not empty: give a new directory")
    written = []
    for entry in opened.tables:
        optimizer = _OPTIMIZERS[entry["optimizer"]["name"]]
        name = f"{entry['module']}.{entry['table']}".strip(".").replace("/", "_")
        if target.has(name):
            raise PathError(f"{target.at(name)}: two tables have names that are one directory's")
        with target.below(name, make=True) as folder:
            with _SINKS[layout](folder, entry, optimizer) as sink:

                def take(
                    ids: NDArray[np.int64],
                    vectors: NDArray[np.float32],
                    scalars: NDArray[np.float32],
                    meta: Any,
                    entry: dict[str, Any] = entry,
                    optimizer: type[OptimizerSpec] = optimizer,
                    sink: _Sink = sink,
                ) -> None:
                    dim = entry["dim"]
                    columns: Columns = {"id": ids, "weight": vectors[:, :dim]}
                    for at, name in enumerate(optimizer.slot_names):
                        begin = dim * (1 + at)
                        columns[name] = vectors[:, begin : begin + dim] if at < optimizer.vector_slots else scalars
                    sink.take(columns | dict(zip(METADATA, meta, strict=True)))

                opened.rows.read(entry["module"], entry["table"], 0, entry["total_num_buckets"], take)
            described = {name: value for name, value in entry.items() if name != "rows"}
            folder.publish(DESCRIPTION, render_json(described))
        written.append(
            {name: entry[name] for name in ("module", "table", "rows", "dim")} | {"optimizer": optimizer.kind}
        )
    return written


class _NpySink:
    """One file a column."""

    def __init__(self, folder: Directory, entry: dict[str, Any], optimizer: type[OptimizerSpec]) -> None:
        rows, dim = entry["rows"], entry["dim"]
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "id": (np.int64, (rows,)),
            "weight": (np.float32, (rows, dim)),
        }
        for at, name in enumerate(optimizer.slot_names):
            shapes[name] = (np.float32, (rows, dim) if at < optimizer.vector_slots else (rows,))
        shapes |= {name: (dtype, (rows,)) for name, dtype in METADATA.items()}
        self._at = 0
        self._columns: Columns = {}
        for name, (dtype, shape) in shapes.items():
            fd = folder.create(f"{name}.npy")
            try:
                self._columns[name] = np.lib.format.open_memmap(f"/proc/self/fd/{fd}", "w+", np.dtype(dtype), shape)
            finally:
                os.close(fd)

    def take(self, columns: Columns) -> None:
        end = self._at + len(columns["id"])
        for name, values in columns.items():
            self._columns[name][self._at : end] = values
        self._at = end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for values in self._columns.values():
            assert isinstance(values, np.memmap)
            values.flush()
        self._columns.clear()


class _SafetensorsSink:
    """Files of at most 256 MiB of rows."""

    def __init__(self, folder: Directory, entry: dict[str, Any], optimizer: type[OptimizerSpec]) -> None:
        try:
            from safetensors.numpy import save_file
        except ImportError as missing:
            raise UnsupportedError(
                'this layout needs the safetensors package: pip install "torchrec-embcache[cli]"'
            ) from missing
        self._save = save_file
        self._folder = folder
        self._rows = max(1, _PART_BYTES // (entry["dim"] * (1 + optimizer.vector_slots) * 4 + 32))
        self._waiting: list[Columns] = []
        self._count = 0
        self._parts = 0

    def take(self, columns: Columns) -> None:
        self._waiting.append(columns)
        self._count += len(columns["id"])
        if self._count >= self._rows:
            self._write()

    def _write(self) -> None:
        names = self._waiting[0].keys()
        whole = {name: np.concatenate([columns[name] for columns in self._waiting]) for name in names}
        # It makes a new file beside, and renames that.
        self._save(whole, f"/proc/self/fd/{self._folder.fd}/part-{self._parts:05}.safetensors")
        self._parts += 1
        self._waiting, self._count = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._waiting:
            self._write()


_SINKS: dict[str, type[_NpySink] | type[_SafetensorsSink]] = {"npy": _NpySink, "safetensors": _SafetensorsSink}
