"""One shard's part of a block-level save."""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache import _native
from torchrec_embcache.cache import CacheTable
from torchrec_embcache.exceptions import MismatchError, StateError

from .files import CHUNK_BYTES, BlockFile, Directory, TensorEntry, render_json, sync, write_at
from .publication import Save, finish
from .schema import WriteBlock, columns_of, slots_of

__all__ = ["write_shard"]

# Rows of a run take at most this.
RUN_BYTES = 32 << 20
# Bytes of a dense tensor that are copied and written at a time, a multiple of CHUNK_BYTES.
WINDOW_BYTES = 8 << 20


def write_shard(root: Directory, save: Save, parallel: int, blocks: list[WriteBlock]) -> bool:
    """Write the blocks of a shard, durably, then its manifest; publish the save when it was the last. Whether it was."""
    with _ShardWriter(save, parallel, blocks) as writer:
        manifest = writer.write()
    return finish(root, save, manifest, lambda manifests: _indexes(manifests, save.shards))


def data_file(shard: int, file: int, parallel: int, shards: int) -> str:
    """The name that RecIS gives to the files of a shard."""
    return f"model-{shard * parallel + file:06d}-of-{parallel * shards:06d}.safetensors"


def part_name(name: str, slot: str, shard: int, shards: int) -> str:
    """The name of a table's block in its file, as RecIS has it."""
    return f"{name}.{slot}/part_{shard}_{shards}"


@dataclass
class _Block:
    """A block with its place. `pieces`: checksums of the runs, in order."""

    block: WriteBlock
    entry: TensorEntry
    file: int
    pieces: list[Future[NDArray[np.uint32]]] = field(default_factory=list)


class _ShardWriter:
    """Blocks go to `parallel` files in turn. One thread reads a table's rows, run after run; others cut them into columns, take the
    checksums and write. Two runs are held at most beside the one that is read.
    """

    def __init__(self, save: Save, parallel: int, blocks: list[WriteBlock]) -> None:
        self.save, self.parallel = save, parallel
        self.blocks: list[_Block] = []
        for number, block in enumerate(blocks):
            name = block.name if block.slot is None else part_name(block.name, block.slot, save.shard, save.shards)
            self.blocks.append(_Block(block, TensorEntry(name, block.dtype, block.shape), number % parallel))
        self.layouts = {
            file: BlockFile([block.entry for block in self.blocks if block.file == file])
            for file in sorted({block.file for block in self.blocks})
        }
        self.open: dict[int, int] = {}
        self.pool = ThreadPoolExecutor(parallel, "embcache-blocks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        for fd in self.open.values():
            os.close(fd)

    def _path(self, file: int) -> str:
        return self.save.folder.at(data_file(self.save.shard, file, self.parallel, self.save.shards))

    def write(self) -> dict[str, Any]:
        """Everything; the shard's manifest."""
        for file, layout in self.layouts.items():
            self.open[file] = self.save.folder.create(os.path.basename(self._path(file)))
            write_at(self.open[file], self._path(file), 0, np.frombuffer(layout.header, np.uint8))
        dense = [block for block in self.blocks if block.block.dense]
        for block in dense:
            block.pieces.append(self.pool.submit(self._write_dense, block))
        tables, offsets = [], {}
        for name in dict.fromkeys(block.block.name for block in self.blocks if not block.block.dense):
            mine = [block for block in self.blocks if block.block.name == name and not block.block.dense]
            about, starts = self._write_table(name, mine)
            tables.append(about)
            offsets[f"{name}.bucket_offsets"] = starts
        checks = {block.entry.name + ".crc32c": self._checks(block) for block in self.blocks} | offsets
        for future in [self.pool.submit(sync, fd, self._path(file)) for file, fd in self.open.items()]:
            future.result()
        layout = BlockFile([check_entry(name, array.shape) for name, array in checks.items()])
        check = check_file(self.save.shard, self.save.shards)
        return {
            "shard": self.save.shard,
            "shards": self.save.shards,
            "parallel": self.parallel,
            "tables": tables,
            "blocks": [
                {
                    "name": b.block.name,
                    "slot": b.block.slot,
                    "dtype": b.entry.dtype,
                    "shape": b.entry.shape,
                    "file": b.file,
                }
                for b in self.blocks
            ],
            "check": layout.write(self.save.folder, check, checks),
        }

    @staticmethod
    def _checks(block: _Block) -> NDArray[np.uint32]:
        pieces = [piece.result() for piece in block.pieces]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)

    def _put(self, block: _Block, at: int, data: NDArray[np.uint8]) -> NDArray[np.uint32]:
        checks = _native.chunk_checksums(data, CHUNK_BYTES)
        start = self.layouts[block.file].starts[block.entry.name]
        write_at(self.open[block.file], self._path(block.file), start + at, data)
        return checks

    def _write_dense(self, block: _Block) -> NDArray[np.uint32]:
        tensor = block.block.source
        assert isinstance(tensor, Tensor)
        # A view where it can be one; windows of it are what is copied from a device.
        flat = tensor.detach().reshape(-1)
        step = WINDOW_BYTES // flat.element_size()
        checks = [np.zeros(0, np.uint32)]
        for first in range(0, len(flat), step):
            data = flat[first : first + step].cpu().contiguous().view(torch.uint8).numpy()
            checks.append(self._put(block, first * flat.element_size(), data))
        return np.concatenate(checks)

    def _write_table(self, name: str, blocks: list[_Block]) -> tuple[dict[str, Any], NDArray[np.int64]]:
        table = blocks[0].block.source
        assert isinstance(table, CacheTable)
        native = table.native
        total = blocks[0].entry.shape[0]
        row_bytes = sum(entry.bytes for entry in slots_of(table).values())
        step, begin, end = native.step(), *table.buckets
        runs: list[int] = []
        starts = []
        waiting: deque[list[Future[NDArray[np.uint32]]]] = deque()
        done = 0
        for rows in native.export(max(RUN_BYTES // row_bytes, 1)):
            ids = rows[0]
            done += len(ids)
            if done > total:
                break
            unsigned = ids.view(np.uint64)
            buckets = unsigned % np.uint64(table.total_num_buckets)
            order = np.lexsort((unsigned, buckets))
            starts.append(np.searchsorted(buckets[order], np.arange(begin, end + 1, dtype=np.uint64)))
            columns = columns_of(table, rows)
            submitted = []
            for block in blocks:
                assert block.block.slot is not None
                column = columns[block.block.slot]
                submitted.append(self.pool.submit(self._put_sorted, block, done - len(ids), column, order))
                block.pieces.append(submitted[-1])
            runs.append(len(ids))
            waiting.append(submitted)
            if len(waiting) > 2:
                for future in waiting.popleft():
                    future.result()
        if done != total or native.step() != step:
            raise StateError(f"table {name!r} was trained or changed while it was saved: save between steps")
        about = {
            "name": name,
            "dim": table.dim,
            "optimizer": table.spec.kind,
            "key": native.key,
            "seed": table.seed,
            "step": step,
            "epoch": native.epoch(),
            "total_num_buckets": table.total_num_buckets,
            "buckets": [begin, end],
            "runs": runs,
        }
        return about, np.stack(starts).astype(np.int64) if starts else np.zeros((0, end - begin + 1), np.int64)

    def _put_sorted(
        self, block: _Block, first: int, column: NDArray[Any], order: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        data = np.take(column, order, axis=0)
        width = data.dtype.itemsize * int(np.prod(data.shape[1:], dtype=np.int64))
        return self._put(block, first * width, data.reshape(-1).view(np.uint8))


def check_file(shard: int, shards: int) -> str:
    """The name of the file with a shard's checksums."""
    return f"check-{shard:06d}-of-{shards:06d}.safetensors"


def check_entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    """A tensor of that file."""
    return TensorEntry(name, "U32" if name.endswith(".crc32c") else "I64", shape)


def _indexes(manifests: list[dict[str, Any]], shards: int) -> dict[str, bytes]:
    """The files that RecIS finds blocks by, after a check that the shards make whole tables."""
    _check_whole(manifests)
    names: dict[str, str] = {}
    files: dict[str, int] = {}
    places: dict[str, int] = {}
    for shard, manifest in enumerate(manifests):
        buckets = {table["name"]: (*table["buckets"], table["total_num_buckets"]) for table in manifest["tables"]}
        for block in manifest["blocks"]:
            name = data_file(shard, block["file"], manifest["parallel"], shards)
            file = files.setdefault(name, len(files))
            if block["slot"] is None:
                # The blank is what RecIS calls the slice of a whole tensor.
                part, full = block["name"], f"{block['name']}^ "
            else:
                begin, end, total = buckets[block["name"]]
                width = len(str(total))
                part = part_name(block["name"], block["slot"], shard, shards)
                full = f"{block['name']}@{block['slot']}^{begin:0{width}}@{end:0{width}}@{total}"
            names[part], places[part] = full, file
    return {
        "tensorkey.json": render_json(names),
        "index": render_json({"file_index": files, "block_index": places}),
    }


def _check_whole(manifests: list[dict[str, Any]]) -> None:
    """`MismatchError` unless the shards of each table agree and hold every bucket once, and names are names of one thing."""
    parts: dict[str, list[tuple[int, dict[str, Any], list[Any]]]] = {}
    dense: set[str] = set()
    for shard, manifest in enumerate(manifests):
        for table in manifest["tables"]:
            slots = [
                [b["slot"], b["shape"][1:]] for b in manifest["blocks"] if b["name"] == table["name"] and b["slot"]
            ]
            parts.setdefault(table["name"], []).append((shard, table, slots))
        for block in manifest["blocks"]:
            if block["slot"] is None:
                if block["name"] in dense:
                    raise MismatchError(f"tensor {block['name']!r} is saved by several shards: give it to one")
                dense.add(block["name"])
    if both := dense & parts.keys():
        raise MismatchError(f"{sorted(both)} are tables on one shard and tensors on another: rename one")
    for name, shares in parts.items():
        first = shares[0]
        fields = ("dim", "optimizer", "key", "seed", "step", "total_num_buckets")
        for shard, table, slots in shares:
            for what, mine, other in (
                *((what, table[what], first[1][what]) for what in fields),
                ("slots", slots, first[2]),
            ):
                if mine != other:
                    raise MismatchError(
                        f"table {name!r} has {what} {mine!r} on shard {shard} and {other!r} on shard {first[0]}: save the shards "
                        "of one table at one step, with the same filter"
                    )
        at = 0
        for shard, table, _ in sorted(shares, key=lambda share: share[1]["buckets"]):
            begin, end = table["buckets"]
            if begin != at:
                raise MismatchError(
                    f"table {name!r}: bucket {at} is followed by {begin} of shard {shard}: give each shard's table"
                )
            at = end
        if at != first[1]["total_num_buckets"]:
            raise MismatchError(f"table {name!r}: no shard has the buckets from {at} on: give each shard's table")
