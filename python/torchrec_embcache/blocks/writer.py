"""One shard's part of a block-level save."""

import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache import _native
from torchrec_embcache.cache import CacheTable
from torchrec_embcache.exceptions import MismatchError, StateError

from .files import CHUNK_BYTES, BlockFile, Directory, TensorEntry, render_json
from .helpers import Helpers
from .publication import Save, finish
from .schema import WriteBlock, columns_of, slots_of

__all__ = ["write_shard"]

# Rows of a run take at most this.
RUN_BYTES = 16 << 20
# Bytes of a dense tensor that are copied and written at a time.
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


@dataclass(frozen=True)
class _Block:
    """A block with its place: `number` in the writer, `file`."""

    number: int
    block: WriteBlock
    entry: TensorEntry
    file: int


class _ShardWriter:
    """Blocks go to `parallel` files in turn. One thread reads a table's rows, run after run; others put them in order into columns
    that the core writes. One run is held beside the one that is read.
    """

    def __init__(self, save: Save, parallel: int, blocks: list[WriteBlock]) -> None:
        self.save, self.parallel = save, parallel
        self.blocks: list[_Block] = []
        for number, block in enumerate(blocks):
            name = block.name if block.slot is None else part_name(block.name, block.slot, save.shard, save.shards)
            self.blocks.append(_Block(number, block, TensorEntry(name, block.dtype, block.shape), number % parallel))
        files = sorted({block.file for block in self.blocks})
        layouts = [layout_of([block.entry for block in self.blocks if block.file == file]) for file in files]
        names = [data_file(save.shard, file, parallel, save.shards) for file in files]
        for name in names:
            if save.folder.has(name):
                save.folder.remove(name)  # of this shard, which was cut short
        self.native = _native.BlockWriter(
            save.folder.path,
            save.folder.fd,
            [(name, layout.header, layout.bytes) for name, layout in zip(names, layouts, strict=True)],
            [
                (
                    block.file,
                    layouts[block.file].starts[block.entry.name],
                    block.entry.bytes,
                )  # files are numbered from 0 on
                for block in self.blocks
            ],
            CHUNK_BYTES,
            parallel,
        )
        self.pool = Helpers(parallel, "embcache-blocks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.native.close()

    def write(self) -> dict[str, Any]:
        """Everything; the shard's manifest."""
        dense = [self.pool.submit(self._write_dense, block) for block in self.blocks if block.block.dense]
        tables, offsets = [], {}
        for name in dict.fromkeys(block.block.name for block in self.blocks if not block.block.dense):
            mine = [block for block in self.blocks if block.block.name == name and not block.block.dense]
            about, starts = self._write_table(name, mine)
            tables.append(about)
            offsets[f"{name}.bucket_offsets"] = starts
        for future in dense:
            future.result()
        found = self.native.finish()
        checks = {block.entry.name + ".crc32c": found[block.number] for block in self.blocks} | offsets
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

    def _write_dense(self, block: _Block) -> None:
        tensor = block.block.source
        assert isinstance(tensor, Tensor)
        # A view where it can be one; windows of it are what is copied from a device.
        flat = tensor.detach().reshape(-1)
        step = WINDOW_BYTES // flat.element_size()
        for first in range(0, len(flat), step):
            window = flat[first : first + step].cpu().contiguous()
            self.native.append(block.number, window.view(torch.uint8).numpy())

    def _append(self, number: int, column: NDArray[Any], order: NDArray[np.int64]) -> None:
        if column.ndim == 1:
            self.native.append(number, np.take(column, order).view(np.uint8))
        else:
            self.native.append_rows(number, column.view(np.uint8), order)

    def _write_table(self, name: str, blocks: list[_Block]) -> tuple[dict[str, Any], NDArray[np.int64]]:
        table = blocks[0].block.source
        assert isinstance(table, CacheTable)
        native = table.native
        total = blocks[0].entry.shape[0]
        row_bytes = sum(entry.bytes for entry in slots_of(table).values())
        step, begin, end = native.step(), *table.buckets
        runs: list[int] = []
        starts = []
        done = 0
        under_way: list[Future[None]] = []
        for rows in native.export(max(RUN_BYTES // row_bytes, 1)):
            done += len(rows)
            if done > total:
                break
            order, offsets = _native.bucket_order(rows.ids, table.total_num_buckets, table.bucket_hash, begin, end)
            columns = columns_of(table, rows)
            # Of one block one run after the other.
            for future in under_way:
                future.result()
            under_way = [
                self.pool.submit(self._append, block.number, columns[str(block.block.slot)], order) for block in blocks
            ]
            runs.append(len(rows))
            starts.append(offsets)
        for future in under_way:
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
            "bucket_hash": table.bucket_hash,
            "buckets": [begin, end],
            "runs": runs,
        }
        return about, np.stack(starts) if starts else np.zeros((0, end - begin + 1), np.int64)


def layout_of(entries: list[TensorEntry]) -> BlockFile:
    """The layout of a data file."""
    return BlockFile(entries, pages=True)


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
        slices = {table["name"]: _slice(table, shard, shards) for table in manifest["tables"]}
        for block in manifest["blocks"]:
            name = data_file(shard, block["file"], manifest["parallel"], shards)
            file = files.setdefault(name, len(files))
            if block["slot"] is None:
                # The blank is what RecIS calls the slice of a whole tensor.
                part, full = block["name"], f"{block['name']}^ "
            else:
                part = part_name(block["name"], block["slot"], shard, shards)
                full = f"{block['name']}@{block['slot']}^{slices[block['name']]}"
            names[part], places[part] = full, file
    return {
        "tensorkey.json": render_json(names),
        "index": render_json({"file_index": files, "block_index": places}),
    }


def _slice(table: dict[str, Any], shard: int, shards: int) -> str:
    """RecIS' slice of a shard's block: "begin@end@total", the range of `uint64(id) mod total` that its ids are in.

    A shard that owns hashed buckets has ids of the whole range. RecIS finds blocks by names that differ in the slice alone, so
    those of several such shards differ in their leading zeros.
    """
    (begin, end), total = table["buckets"], table["total_num_buckets"]
    left = right = len(str(total))
    if bucket_hash_of(table) != "plain":
        if (begin, end) != (0, total):
            more, rest = divmod(shard, math.isqrt(shards - 1) + 1)
            left, right = left + more, right + rest
        begin, end = 0, total
    return f"{begin:0{left}}@{end:0{right}}@{total}"


def bucket_hash_of(table: dict[str, Any]) -> Any:
    """How the ids of a table in a shard's manifest fall into buckets; older manifests do not say."""
    return table.get("bucket_hash", "plain")


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
        fields = ("dim", "optimizer", "key", "seed", "step", "total_num_buckets", "bucket_hash")
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
