"""The operations of the soak, a numpy model of the rows after each of them, and the process that does them until it is killed.

All operations follow from a seed, so the parent of a killed process knows the rows of each flush and each save.
"""

import contextlib
import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, flush, initializers, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import StorageError

DIM = 8
INITIAL = np.float32(1.0)
LEARNING_RATE = np.float32(0.5)
# Number of ids of each table. All columns of a row get the same gradient and stay equal, so two floats describe a row.
IDS = {"plain": 5000, "device": 3000, "ram": 1000}
BUDGETS = {
    "plain": {"host_bytes": "64KiB", "ssd_bytes": "8MiB"},
    "device": {"host_bytes": "64KiB", "device_bytes": "32KiB", "ssd_bytes": "8MiB"},
    "ram": {"host_bytes": "4MiB"},
}
# The operations and their relative frequencies.
OFTEN = {
    "train": 40,
    "prefetch": 5,
    "give up": 2,
    "evaluate": 6,
    "read": 4,
    "import": 4,
    "remove": 4,
    "export": 2,
    "flush": 6,
    "save": 2,
    "delta": 5,
    "async": 4,
    "linked": 2,
    "compact": 1,
    "fill": 2,
    "empty": 3,
    "end": 0.4,
}
SAVES = ("save", "delta", "async", "linked")
CHANGES = ("train", "prefetch", "import", "remove")

# For each table the weight and the sum of squares of each id: [ids, 2] float32, NaN for missing ids.
Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Operation:
    """One operation. `values` are gradients of occurrences, or weights to import, one per id."""

    number: int
    what: str
    table: str
    ids: np.ndarray
    values: np.ndarray
    keep: int


def operations(seed: int) -> Iterator[Operation]:
    """The infinite sequence of operations of a process with this seed."""
    draw = np.random.default_rng(seed)
    share = np.array(list(OFTEN.values())) / sum(OFTEN.values())
    for number in itertools.count():
        what, table = str(draw.choice(list(OFTEN), p=share)), str(draw.choice(list(IDS)))
        count = int(draw.choice([1, 5, 60, 300, 1500]))
        ids = (draw.random(count) ** 2 * IDS[table]).astype(np.int64)
        if what == "import":
            ids = np.unique(ids)
        yield Operation(
            number, what, table, ids, draw.integers(-3, 4, len(ids)).astype(np.float32), int(draw.integers(1, 4))
        )


def no_rows() -> Rows:
    return {table: np.full((ids, 2), np.nan, np.float32) for table, ids in IDS.items()}


def copied(rows: Rows) -> Rows:
    return {table: values.copy() for table, values in rows.items()}


def same(one: Rows, other: Rows, tables: tuple[str, ...] = tuple(IDS)) -> bool:
    return all(np.array_equal(one[table], other[table], equal_nan=True) for table in tables)


def apply(rows: Rows, operation: Operation) -> None:
    """Applies the operation to the model."""
    values = rows[operation.table]
    if operation.what == "import":
        values[operation.ids] = np.stack([operation.values, np.zeros_like(operation.values)], axis=1)
    elif operation.what == "remove":
        values[operation.ids] = np.nan
    elif operation.what in CHANGES:
        _step(values, operation)


def _step(values: np.ndarray, operation: Operation) -> None:
    gradients = np.zeros(len(values), np.float32)
    np.add.at(gradients, operation.ids, operation.values)
    touched = np.unique(operation.ids)
    gradients = gradients[touched]
    unborn = np.isnan(values[touched, 0])
    weight = np.where(unborn, INITIAL, values[touched, 0])
    squares = np.where(unborn, np.float32(0), values[touched, 1])
    if operation.table != "plain":
        squares = squares + gradients * gradients
    divisor = np.sqrt(squares) + np.float32(1e-10)
    if operation.table == "plain":
        weight = weight - LEARNING_RATE * gradients
    elif operation.table == "device":
        weight = weight - LEARNING_RATE * gradients / divisor
    else:
        weight = weight - LEARNING_RATE / divisor * gradients
    values[touched] = np.stack([weight, squares], axis=1)


class Tables(nn.Module):
    """One table on SSD, one with an additional device tier, and one in RAM, each with another optimizer."""

    def __init__(self, ssd: Path, reopen: str) -> None:
        super().__init__()
        ssd.mkdir(mode=0o700, exist_ok=True)
        wanted = {
            "plain": optimizers.SGD(lr=0.5),
            "device": optimizers.Adagrad(lr=0.5),
            "ram": optimizers.RowWiseAdagrad(lr=0.5),
        }
        for name, optimizer in wanted.items():
            place: dict[str, Any] = {"ssd_dir": ssd, "reopen": reopen} if "ssd_bytes" in BUDGETS[name] else {}
            bag = EmbCacheEmbeddingBag(
                name=name,
                embedding_dim=DIM,
                tiers=TierBudgets(**BUDGETS[name], **place),
                optimizer=optimizer,
                initializer=initializers.Constant(float(INITIAL)),
            )
            self.add_module(name, bag)

    def bag(self, table: str) -> EmbCacheEmbeddingBag:
        return getattr(self, table)

    def rows(self) -> Rows:
        """Every row. Asserts that each is consistent, exported once, and counted."""
        found = no_rows()
        for table, values in found.items():
            for chunk in self.bag(table).export(512):
                ids, weights = chunk.ids.numpy(), chunk.weights.numpy()
                assert np.isnan(values[ids, 0]).all(), f"{table}: a row is exported twice"
                assert (weights == weights[:, :1]).all(), f"{table}: a row is torn"
                squares = chunk.slots.get("sum")
                values[ids, 0] = weights[:, 0]
                values[ids, 1] = 0 if squares is None else squares.numpy().reshape(len(ids), -1)[:, 0]
            there = int((~np.isnan(values[:, 0])).sum())
            assert len(self.bag(table)) == there, f"{table}: {len(self.bag(table))} rows are counted, {there} exported"
        return found

    def close(self) -> None:
        for table in IDS:
            self.bag(table).close()


class Process:
    """The child process, which works below `folder`. The parent reads `notes`."""

    def __init__(self, say: Callable[[tuple[str, int, int]], None], folder: Path, notes: Path) -> None:
        self._say, self._folder, self._notes = say, folder, notes
        self._checkpoints = folder / "saved"
        self._compared = 0
        self._saving: tuple[Future[Any], int] | None = None

    def say(self, what: str, number: int = 0) -> None:
        """Sends a message to the parent, with the number of rows compared since the previous message."""
        self._say((what, number, self._compared))
        self._compared = 0

    def note(self, what: str, rows: Rows) -> None:
        """Sends all rows to the parent."""
        np.savez(self._notes / f"{what}.npz", **rows)
        self.say(what)

    def start(self, load: bool) -> None:
        """Reports the rows of a load, then the resumed rows. With `load` the tables start empty and load a checkpoint."""
        if (self._checkpoints / "LATEST").exists():
            self.note("loaded", self._load_beside(self._checkpoints))
            self.tables = Tables(self._folder / "ssd", "discard" if load else "auto")
            if load:
                Saver(0).load(self.tables, self._checkpoints)
        else:
            self.tables = Tables(self._folder / "ssd", "auto")
            load = False
        self.model = self.tables.rows()
        self.note("begun from the load" if load else "resumed", self.model)

    def _load_beside(self, checkpoints: Path) -> Rows:
        """The rows of a checkpoint, loaded into separate tables with an SSD tier, as linked checkpoints require."""
        beside = self._folder / "beside"
        shutil.rmtree(beside, ignore_errors=True)
        tables = Tables(beside, "discard")
        Saver(0).load(tables, checkpoints)
        rows = tables.rows()
        tables.close()
        shutil.rmtree(beside)
        return rows

    def run(self, seed: int, may_fill: bool) -> None:
        """Does operations until the operation "end", or until the disk is full."""
        for operation in operations(seed):
            if operation.what in ("fill", "empty"):
                if may_fill:
                    self._ballast(operation)
                continue
            try:
                self._do(operation)
            except StorageError:
                if not may_fill:
                    raise
                self._refused(operation)
            else:
                apply(self.model, operation)
                if operation.what == "end":
                    return

    def _do(self, operation: Operation) -> None:
        what, bag = operation.what, self.tables.bag(operation.table)
        ids = torch.from_numpy(operation.ids)
        if what in ("train", "prefetch"):
            if what == "prefetch":
                bag.prefetch(ids.view(-1, 1))
            gradients = torch.from_numpy(operation.values).view(-1, 1).expand(-1, DIM).contiguous()
            bag(ids.view(-1, 1)).backward(gradients)
        elif what == "give up":
            bag(ids.view(-1, 1))
        elif what in ("evaluate", "read"):
            self._read(operation)
        elif what == "import":
            bag.import_rows(ids, torch.from_numpy(operation.values).view(-1, 1).repeat(1, DIM))
        elif what == "remove":
            there = len(np.unique(operation.ids[~np.isnan(self.model[operation.table][operation.ids, 0])]))
            removed = bag.remove_rows(ids)
            assert removed == there, f"{removed} rows were removed of {there}"
        elif what == "export":
            self._compare("export")
        elif what == "flush":
            self._flush(operation.number)
        elif what in SAVES:
            self._save(operation)
        elif what == "compact" and (self._checkpoints / "LATEST").exists():
            self._finish()
            Saver(0).compact(self._checkpoints)
        elif what == "end":
            self._finish()
            self._compare("the end")
            self._flush(operation.number)
            # Nothing has changed since the flush, so closing publishes the same state of each table.
            self.tables.close()

    def _read(self, operation: Operation) -> None:
        ids, bag = torch.from_numpy(operation.ids), self.tables.bag(operation.table)
        rows = self.model[operation.table][operation.ids]
        unborn = np.isnan(rows[:, 0])
        if operation.what == "read":
            read = bag.read_rows(ids)
            found = read.weights.numpy()
            assert (read.found.numpy() == ~unborn).all(), "a row is missing, or there is one too many"
        else:
            with torch.no_grad():
                found = bag(ids.view(-1, 1)).numpy()
        expected = np.where(unborn, INITIAL, rows[:, 0])
        wrong = operation.ids[(found != expected[:, None]).any(axis=1)]
        assert not len(wrong), f"{operation.what} of table {operation.table}: the rows of ids {wrong[:5]} are wrong"
        self._compared += len(ids)

    def _compare(self, where: str) -> None:
        found = self.tables.rows()
        assert same(found, self.model), f"{where}: {difference(found, self.model)}"
        self._compared += sum(IDS.values())

    def _flush(self, number: int) -> None:
        self.say("flush begun", number)
        flush(self.tables)
        self.say("flush done", number)

    def _save(self, operation: Operation) -> None:
        self._finish()
        self.say("save begun", operation.number)
        if operation.what == "async":
            saving = Saver(0).save_async(self.tables, self._checkpoints, incremental=True, keep=operation.keep)
            self._saving = saving, operation.number
            return
        kind = {"incremental": operation.what == "delta", "linked": operation.what == "linked"}
        Saver(0).save(self.tables, self._checkpoints, keep=operation.keep, **kind)
        self.say("save done", operation.number)

    def _finish(self) -> None:
        """Waits for the asynchronous save, if one is running."""
        if self._saving is not None:
            (saving, number), self._saving = self._saving, None
            saving.result()
            self.say("save done", number)

    def _ballast(self, operation: Operation) -> None:
        """Fills the disk except for a few bytes, or frees the space."""
        ballast = self._folder / "ballast"
        if operation.what == "empty":
            ballast.unlink(missing_ok=True)
            return
        disk = os.statvfs(self._folder)
        spare = [0, 200_000, 1_000_000, 2_000_000][operation.keep]
        size = disk.f_bfree * disk.f_frsize - spare
        if size > 0:
            with ballast.open("ab") as file, contextlib.suppress(OSError):  # the disk is full
                os.posix_fallocate(file.fileno(), file.tell(), size)

    def _refused(self, operation: Operation) -> None:
        """Asserts, after an error of a full disk, that the operation was done completely or not at all.

        Ends the process if a table is read-only.
        """
        found = self.tables.rows()
        after = copied(self.model)
        apply(after, operation)
        done = not same(found, self.model)
        assert not done or same(found, after), f"{operation.what} half done: {difference(found, self.model)}"
        self._compared += sum(IDS.values())
        self.model = found
        self.say("refused and done" if done else "refused", operation.number)
        if not any(self.tables.bag(table).table._native_table.is_read_only() for table in IDS):
            return
        (self._folder / "ballast").unlink(missing_ok=True)
        with contextlib.suppress(StorageError):  # the disk was full for that save too
            self._finish()
        elsewhere = self._notes / "elsewhere"
        shutil.rmtree(elsewhere, ignore_errors=True)
        Saver(0).save(self.tables, elsewhere)
        saved = self._load_beside(elsewhere)
        assert same(saved, found), f"saved elsewhere: {difference(saved, found)}"
        # Exit without the flushes at process exit: writable tables would get ahead of the read-only ones.
        self.say("ended")
        os._exit(0)


def difference(found: Rows, expected: Rows) -> str:
    """Describes the first ids that differ."""
    said = []
    for table, values in found.items():
        other = expected[table]
        differ = ~((values == other) | (np.isnan(values) & np.isnan(other))).all(axis=1)
        first = [(int(at), values[at].tolist(), other[at].tolist()) for at in np.flatnonzero(differ)[:3]]
        if first:
            said.append(f"table {table}: {int(differ.sum())} rows differ, as (id, found, expected) {first}")
    return "; ".join(said)


def soak(
    say: Callable[[tuple[str, int, int]], None], folder: str, notes: str, seed: int, load: bool, may_fill: bool
) -> None:
    """Runs a process of the soak. It reports every failed assertion."""
    warnings.simplefilter("ignore")
    process = Process(say, Path(folder), Path(notes))
    try:
        process.start(load)
        if seed >= 0:
            process.run(seed, may_fill)
        process.say("ended")
    except AssertionError as error:
        process.say(f"wrong: {error}")
