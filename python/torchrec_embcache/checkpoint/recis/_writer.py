"""Writes one shard's rows and tensors as blocks: reads runs of rows, sorts them, and passes them to the native writer."""

from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache import _native
from torchrec_embcache.checkpoint._tensor_bytes import byte_windows
from torchrec_embcache.exceptions import StateError
from torchrec_embcache.table.cache_table import CacheTable

from ._schema import WriteBlock, row_columns, table_columns
from ._session import RecisSession
from ._threads import BoundedExecutor

__all__ = ["write_shard"]

# Maximum bytes of the rows of a run.
RUN_BYTES = 16 << 20


def write_shard(session: RecisSession, parallel: int, blocks: list[WriteBlock]) -> bool:
    """Writes the blocks of a shard and finishes its part of the save. Returns True if it was the last shard."""
    to_write = [_native.RecisBlockSpec(block.name, block.slot, block.dtype, block.shape) for block in blocks]
    session.open_files(parallel, to_write)
    helpers = BoundedExecutor(parallel, "embcache-blocks")
    try:
        tables = _ShardWriter(session, helpers, blocks).write()
    finally:
        helpers.shutdown(cancel_futures=True)
    return session.publish(tables)


class _ShardWriter:
    """One thread reads a table's rows run by run; helper threads sort them into columns and write them. At most one run is held in
    addition to the run being read.
    """

    def __init__(self, session: RecisSession, executor: BoundedExecutor, blocks: list[WriteBlock]) -> None:
        self._session, self._executor = session, executor
        self._blocks = list(enumerate(blocks))

    def write(self) -> list[_native.RecisWrittenTable]:
        """Writes all blocks. Returns the manifest entries of the tables."""
        dense = [self._executor.submit(self._write_dense, *block) for block in self._blocks if block[1].dense]
        names = dict.fromkeys(block.name for _, block in self._blocks if not block.dense)
        tables = [self._write_table(name) for name in names]
        for future in dense:
            future.result()
        return tables

    def _write_dense(self, number: int, block: WriteBlock) -> None:
        tensor = block.source
        assert isinstance(tensor, Tensor)
        for window in byte_windows(tensor.detach()):
            self._session.native.append(number, window)

    def _append(self, number: int, column: NDArray[Any], order: NDArray[np.int64]) -> None:
        if column.ndim == 1:
            self._session.native.append(number, np.take(column, order).view(np.uint8))
        else:
            self._session.native.append_rows(number, column.view(np.uint8), order)

    def _write_table(self, name: str) -> _native.RecisWrittenTable:
        blocks = [(number, block) for number, block in self._blocks if block.name == name and not block.dense]
        table = blocks[0][1].source
        assert isinstance(table, CacheTable)
        native, total = table._native_table, blocks[0][1].shape[0]
        row_bytes = sum(column.bytes for column in table_columns(table).values())
        step, begin, end = native.step(), *table.buckets
        runs: list[int] = []
        done = 0
        under_way: list[Future[None]] = []
        for rows in native.export(max(RUN_BYTES // row_bytes, 1)):
            done += len(rows)
            if done > total:
                break
            order = _native.bucket_order(rows.ids, table.total_num_buckets)
            columns = row_columns(table, rows)
            # The runs of one block must be written in order.
            for future in under_way:
                future.result()
            under_way = [
                self._executor.submit(self._append, number, columns[str(block.slot)], order) for number, block in blocks
            ]
            runs.append(len(rows))
        for future in under_way:
            future.result()
        if done != total or native.step() != step:
            raise StateError(f"table {name!r} was trained or changed while it was saved: save between steps")
        return _native.RecisWrittenTable(
            name=name,
            dim=table.dim,
            optimizer=table._spec.kind,
            key=native.key,
            seed=table.seed,
            step=step,
            epoch=native.epoch(),
            total_num_buckets=table.total_num_buckets,
            bucket_begin=begin,
            bucket_end=end,
            runs=runs,
        )
