"""A block-level checkpoint that is read: its manifests checked, then its blocks, verified as they arrive.

What manifests say is checked against the lengths of the files before anything is allocated by it.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.buckets import BucketHash, buckets_of
from torchrec_embcache.exceptions import EmbCacheError, UnsupportedError

from .files import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    BlockFile,
    Directory,
    TensorEntry,
    corruption,
    read_at,
    whole,
    whole_pages,
)
from .publication import newest
from .schema import ID
from .writer import bucket_hash_of, check_entry, check_file, data_file, layout_of, part_name

__all__ = ["SavedBlocks", "SavedRun", "SavedTable", "SavedTensor"]

_NUMPY = {"I64": np.int64, "U64": np.uint64, "F32": np.float32, "U32": np.uint32}
MAX_DIM = 65_536


@dataclass(frozen=True)
class _Stored:
    """A block in a file, open as `fd`; `start` is its first byte there."""

    path: str
    fd: int
    start: int
    entry: TensorEntry
    checks: NDArray[np.uint32]

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes [begin, end) of the block, verified."""
        if begin == end:
            return np.empty(0, np.uint8)
        low = begin // CHUNK_BYTES * CHUNK_BYTES
        high = min(-(-end // CHUNK_BYTES) * CHUNK_BYTES, whole_pages(self.entry.bytes))
        data = read_at(self.fd, self.path, self.start + low, high - low)
        found = _native.chunk_checksums(data, CHUNK_BYTES)
        first = low // CHUNK_BYTES
        expected = self.checks[first : first + len(found)]
        if not np.array_equal(found, expected):
            place = int(np.flatnonzero(found != expected)[0])
            offset = self.start + low + place * CHUNK_BYTES
            what = f"the checksum of {self.entry.name!r} at byte {offset}"
            raise corruption(self.path, what, int(expected[place]), int(found[place]))
        return data[begin - low : end - low]


@dataclass(frozen=True)
class SavedTensor:
    """A dense tensor of the checkpoint."""

    entry: TensorEntry
    stored: _Stored

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes [begin, end) of it, verified."""
        return self.stored.read(begin, end)


@dataclass(frozen=True)
class _Share:
    """A shard's rows of a table. `starts` [runs, buckets + 1]: where the rows of each bucket start in each run."""

    buckets: tuple[int, int]
    runs: list[int]
    starts: NDArray[np.int64]
    blocks: dict[str, _Stored]


@dataclass(frozen=True)
class SavedRun:
    """Rows [begin, end) of its share's blocks, of `buckets`."""

    table: "SavedTable"
    share: _Share
    begin: int
    end: int
    buckets: tuple[int, int]

    def submit(self, slots: list[str], pool: Executor) -> dict[str, Future[NDArray[Any]]]:
        """Start to read some slots."""
        return {slot: pool.submit(self._column, slot) for slot in slots}

    def _column(self, slot: str) -> NDArray[Any]:
        entry, stored = self.table.slots[slot], self.share.blocks[slot]
        data = stored.read(self.begin * entry.bytes, self.end * entry.bytes)
        values = np.ascontiguousarray(data).view(_NUMPY[entry.dtype]).reshape(self.end - self.begin, *entry.shape)
        if slot == ID:
            self._check_order(stored, values)
        return values

    def _check_order(self, stored: _Stored, ids: NDArray[np.int64]) -> None:
        """Whether the ids are those of the wanted buckets, sorted, each once."""
        unsigned = ids.view(np.uint64)
        buckets = buckets_of(ids, self.table.total_num_buckets, self.table.bucket_hash)
        later = (buckets[1:] > buckets[:-1]) | ((buckets[1:] == buckets[:-1]) & (unsigned[1:] > unsigned[:-1]))
        if not later.all() or int(buckets[0]) < self.buckets[0] or int(buckets[-1]) >= self.buckets[1]:
            what = f"the ids of {stored.entry.name!r} from row {self.begin} on"
            raise corruption(stored.path, what, f"of buckets {self.buckets}, in order", "others")


@dataclass
class SavedTable:
    """A table of the checkpoint. `slots`: what it has, ids first, each with the shape of one row."""

    name: str
    dim: int
    key: int
    step: int
    epoch: int
    total_num_buckets: int
    bucket_hash: BucketHash
    slots: dict[str, TensorEntry]
    shares: list[_Share]

    def runs(self, total_num_buckets: int, bucket_hash: BucketHash, buckets: tuple[int, int]) -> Iterator[SavedRun]:
        """What holds the rows whose buckets (of `total_num_buckets`) are in [begin, end): where the checkpoint has the same buckets
        only those, else all.
        """
        same = (total_num_buckets, bucket_hash) == (self.total_num_buckets, self.bucket_hash)
        for share in self.shares:
            low, high = share.buckets
            if same:
                low, high = max(buckets[0], low), min(buckets[1], high)
            if low >= high:
                continue
            first = 0
            for starts, rows in zip(share.starts, share.runs, strict=True):
                begin, end = (int(starts[bucket - share.buckets[0]]) for bucket in (low, high))
                if begin < end:
                    yield SavedRun(self, share, first + begin, first + end, (low, high))
                first += rows


def chunks(length: int) -> int:
    """Checksums of a block of that many bytes."""
    return -(-whole_pages(length) // CHUNK_BYTES)


class SavedBlocks:
    """The newest complete save in a directory: `tables` and `tensors` by name. It stays there for as long as this is open."""

    def __init__(self, root: Directory) -> None:
        self.tables: dict[str, SavedTable] = {}
        self.tensors: dict[str, SavedTensor] = {}
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            self.folder, manifests, held = newest(root)
            undo.enter_context(self.folder)
            undo.callback(held.release)
            for shard, manifest in enumerate(manifests):
                path = self.folder.at(f"manifest of shard {shard}")
                try:
                    self._open_shard(shard, len(manifests), manifest, undo)
                except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as cause:
                    if isinstance(cause, EmbCacheError):
                        raise
                    raise corruption(
                        path, "the manifest", "consistent", f"not: {type(cause).__name__}: {cause}"
                    ) from cause
            for table in self.tables.values():
                self._check_whole(table)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _open_shard(self, shard: int, shards: int, manifest: dict[str, Any], undo: contextlib.ExitStack) -> None:
        where = self.folder.at(f"shard {shard}")
        parallel = whole(manifest["parallel"], 1, 1024)
        if (manifest["shard"], manifest["shards"]) != (shard, shards):
            raise corruption(where, "the shard", (shard, shards), (manifest["shard"], manifest["shards"]))
        tables = {str(table["name"]): table for table in manifest["tables"]}
        entries: list[tuple[str, str | None, int, TensorEntry]] = []
        for block in manifest["blocks"]:
            name, slot, dtype = str(block["name"]), block["slot"], block["dtype"]
            if dtype not in DTYPE_BYTES or not isinstance(slot, str | None):
                raise corruption(where, "a block", "of a type that is known", block)
            shape = tuple(whole(length, 0, 1 << 62) for length in block["shape"])
            part = name if slot is None else part_name(name, slot, shard, shards)
            entries.append((name, slot, whole(block["file"], 0, parallel - 1), TensorEntry(part, dtype, shape)))
        files = {}
        for file in sorted({file for _, _, file, _ in entries}):
            layout = layout_of([entry for _, _, of, entry in entries if of == file])
            path = data_file(shard, file, parallel, shards)
            fd = layout.open(self.folder, path)
            undo.callback(os.close, fd)
            files[file] = (path, fd, layout)
        # From here on shapes are those of files that are there: nothing larger is allocated.
        pieces = {name: [whole(rows, 1, 1 << 62) for rows in table["runs"]] for name, table in tables.items()}
        checks = self._checks(shard, shards, whole(manifest["check"], 0, (1 << 32) - 1), entries, tables, pieces)
        stored: dict[str, dict[str, _Stored]] = {name: {} for name in tables}
        for name, slot, file, entry in entries:
            path, fd, layout = files[file]
            found = _Stored(self.folder.at(path), fd, layout.starts[entry.name], entry, checks[entry.name + ".crc32c"])
            if slot is None:
                self.tensors[name] = SavedTensor(entry, found)
            else:
                stored[name][slot] = found
        for name, about in tables.items():
            self._add_share(name, about, pieces[name], checks[f"{name}.bucket_offsets"], stored[name], where)

    def _checks(
        self,
        shard: int,
        shards: int,
        expected: int,
        entries: list[tuple[str, str | None, int, TensorEntry]],
        tables: dict[str, Any],
        pieces: dict[str, list[int]],
    ) -> dict[str, NDArray[Any]]:
        """The checksums of a shard's blocks, and where its buckets start."""
        wanted = [check_entry(entry.name + ".crc32c", (chunks(entry.bytes),)) for *_, entry in entries]
        for name, about in tables.items():
            begin, end = (whole(bucket, 0, (1 << 31) - 1) for bucket in about["buckets"])
            wanted.append(check_entry(f"{name}.bucket_offsets", (len(pieces[name]), end - begin + 1)))
        layout, file = BlockFile(wanted), check_file(shard, shards)
        fd, length = self.folder.open(file)
        os.close(fd)
        if length != layout.bytes:
            raise corruption(self.folder.at(file), "the file's length", layout.bytes, length)
        data = np.frombuffer(self.folder.read(file, length, expected), np.uint8)
        if data[: len(layout.header)].tobytes() != layout.header:
            raise corruption(self.folder.at(file), "the header", "that of the manifest's counts", "another")
        found = {}
        for entry in wanted:
            start = layout.starts[entry.name]
            found[entry.name] = data[start : start + entry.bytes].view(_NUMPY[entry.dtype]).reshape(entry.shape)
        return found

    def _add_share(
        self,
        name: str,
        about: dict[str, Any],
        runs: list[int],
        starts: NDArray[np.int64],
        blocks: dict[str, _Stored],
        where: str,
    ) -> None:
        total = whole(about["total_num_buckets"], 1, (1 << 31) - 1)
        begin, end = about["buckets"]
        dim = whole(about["dim"], 1, MAX_DIM)
        slots = {slot: TensorEntry(slot, stored.entry.dtype, stored.entry.shape[1:]) for slot, stored in blocks.items()}
        rows = {stored.entry.shape[0] for stored in blocks.values()}
        ascending = len(starts) == 0 or bool((np.diff(starts, axis=1) >= 0).all() and (starts[:, 0] == 0).all())
        if (
            not 0 <= begin <= end <= total
            or ID not in slots
            or any(entry.dtype not in _NUMPY or entry.shape not in ((), (dim,)) for entry in slots.values())
            or (slots[ID].dtype, slots[ID].shape) != ("I64", ())
            or rows != {sum(runs)}
            or not ascending
            or [int(last) for last in starts[:, -1]] != runs
        ):
            raise corruption(where, f"the counts of table {name!r}", "consistent", "others")
        # The last ones of their kinds cannot go on.
        step, epoch = whole(about["step"], 0, (1 << 63) - 1), whole(about["epoch"], 0, (1 << 32) - 2)
        key = whole(about["key"], 0, (1 << 64) - 1)
        hashed = bucket_hash_of(about)
        if hashed not in ("plain", "splitmix64"):
            raise UnsupportedError(f"{where}: bucket_hash {hashed!r} is not known: load it with a newer release")
        table = self.tables.setdefault(name, SavedTable(name, dim, key, step, epoch, total, hashed, slots, []))
        if replace(table, epoch=epoch, shares=[]) != SavedTable(name, dim, key, step, epoch, total, hashed, slots, []):
            raise corruption(where, f"table {name!r}", "as on the other shards", "another")
        table.epoch = max(table.epoch, epoch)
        table.shares.append(_Share((begin, end), runs, starts, blocks))

    def _check_whole(self, table: SavedTable) -> None:
        at = 0
        for share in sorted(table.shares, key=lambda share: share.buckets):
            if share.buckets[0] != at:
                raise corruption(self.folder.path, f"the buckets of table {table.name!r}", at, share.buckets[0])
            at = share.buckets[1]
        if at != table.total_num_buckets:
            raise corruption(self.folder.path, f"the buckets of table {table.name!r}", table.total_num_buckets, at)
