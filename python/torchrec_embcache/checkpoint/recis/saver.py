"""Saving of RecIS-format checkpoints, with RecIS' signature."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from torchrec_embcache._dist.ranks import Ranks, SingleRank, all_ranks
from torchrec_embcache._paths import CheckpointDirectory, check_path, open_to_save
from torchrec_embcache.config import check_int
from torchrec_embcache.exceptions import InputError
from torchrec_embcache.model._evict import sweep_before_save
from torchrec_embcache.table.cache_table import CacheTable

from ._arguments import check_distinct_names, check_hashtables, check_tensors, table_names, tables_of
from ._schema import DTYPES, ID, WriteBlock, table_columns
from ._session import RecisSession
from ._writer import write_shard

__all__ = ["BlockSaver"]

_log = logging.getLogger("torchrec_embcache.serialize")


class BlockSaver:
    """Saves tables and dense tensors as blocks, one shard at a time.

    Every shard creates a `BlockSaver` with its `shard_index` and the same `shard_num` and `path`, and calls `save()`. When the last
    of them has finished, the checkpoint is published and replaces the previous one. If `torch.distributed` has `shard_num` ranks,
    the call is collective: it returns when all ranks have finished, and an error of one rank is raised on all. Otherwise shards, in
    one process or several, may save one after another in any order; none waits.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.serialize import BlockSaver
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> saver = BlockSaver(path="ckpt", hashtables={"item": item})
        >>> [block.tensor_name() for block in saver.make_write_blocks()][:2]
        ['item@id', 'item@embedding']
        >>> saver.save()
    """

    def __init__(
        self,
        shard_index: int = 0,
        shard_num: int = 1,
        parallel: int = 8,
        path: str = ".",
        hashtables: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        filter_func: Callable[[list[WriteBlock]], list[WriteBlock]] = lambda blocks: blocks,
    ) -> None:
        """`hashtables`: tables (`module.tables["item"]`), `EmbCacheEmbedding(Bag)`s or entire cache modules, by name. The tables of
        a module are named `<name>.<table>`. `tensors`: a dict of dense tensors by name, which only shard 0 saves.
        `split_sparse_dense_state_dict(model)` returns both for a model. `parallel`: number of writing threads, and maximum number
        of files with blocks per shard; one more file contains checksums. `filter_func` is called with the blocks and returns those
        to save. Raises `ConfigError` and `InputError`; the latter also if `tensors` contains a table's entries of a state dict.
        """
        self.shard_num: int = check_int("shard_num", shard_num, 1, 1 << 20)
        self.shard_index: int = check_int("shard_index", shard_index, 0, self.shard_num - 1)
        self.parallel: int = check_int("parallel", parallel, 1, 1024)
        self.path: str = check_path("path", path)
        self._modules = check_hashtables(hashtables)
        self._tensors = check_tensors(tensors)
        check_distinct_names(table_names(self._modules), self._tensors)
        self.filter_func = filter_func

    def make_write_blocks(self) -> list[WriteBlock]:
        """Returns the blocks that `save()` passes to the filter: all blocks of all tables of this shard, and on shard 0 the dense
        tensors.
        """
        blocks = []
        for name, table in tables_of(self._modules).items():
            rows = len(table)
            for slot, entry in table_columns(table).items():
                blocks.append(WriteBlock(name, slot, entry.dtype, (rows, *entry.shape), table))
        for name, tensor in self._tensors.items() if self.shard_index == 0 else ():
            blocks.append(WriteBlock(name, None, DTYPES[tensor.dtype], tuple(tensor.shape), tensor))
        return blocks

    def save(self) -> None:
        """Writes the blocks selected by the filter. Tables must not be trained during the save (`StateError`).

        Tables with `eviction=Policy(..., every_steps=None)` are swept first, before the filter receives their blocks.

        Until every shard has saved, and after any failure, a load finds the previous checkpoint. Raises `PathError`,
        `StoragePermissionError`, `StorageError`, `MismatchError` (shards that do not form one table), and `InputError` if the
        filter does not return a list of blocks or drops a table's "id" but not its other slots.
        """
        ranks = all_ranks()
        if ranks.world_size == self.shard_num > 1:
            self._save_on_all_ranks(ranks)
            return
        sweep_before_save(tables_of(self._modules), SingleRank())
        blocks = self._selected_blocks()
        with self._session(open_to_save(self.path), _steps(blocks)) as session:
            session.begin()
            last = write_shard(session, self.parallel, blocks)
        _log.info(
            "shard %d of %d is saved in %s%s",
            self.shard_index,
            self.shard_num,
            self.path,
            "" if last else ", others wait",
        )

    def _save_on_all_ranks(self, ranks: Ranks) -> None:
        """Saves collectively: the ranks agree on the save, then all write, then all report success."""
        ranks.agree_on_arguments("BlockSaver.save", lambda: {"path": self.path, "shard_num": self.shard_num})
        shards = ranks.all_gather(self.shard_index)
        if sorted(shards) != list(range(self.shard_num)):
            raise InputError(f"shard_index is {shards} on the ranks: give each shard to one of them")
        sweep_before_save(ranks.run(lambda: tables_of(self._modules)), ranks)
        blocks = ranks.run(self._selected_blocks)
        steps = {name: step for each in ranks.gather(lambda: _steps(blocks)) for name, step in each.items()}
        directory = ranks.run(lambda: open_to_save(self.path))
        with self._session(directory, steps) as session:
            session.begin_on_all_ranks(ranks)
            ranks.run(lambda: write_shard(session, self.parallel, blocks))

    def _session(self, directory: CheckpointDirectory, steps: dict[str, int]) -> RecisSession:
        return RecisSession(directory, self.shard_index, self.shard_num, steps)

    def _selected_blocks(self) -> list[WriteBlock]:
        given = self.make_write_blocks()
        picked: object = self.filter_func(list(given))
        if not isinstance(picked, list) or not all(isinstance(block, WriteBlock) for block in picked):
            raise InputError("filter_func did not return a list of the blocks that it was given: return those to save")
        names = {block.tensor_name() for block in given}
        kept = [block.tensor_name() for block in picked]
        if len(set(kept)) != len(kept) or not names.issuperset(kept):
            raise InputError(
                "filter_func returned a block twice, or one that it was not given: return those to save, once"
            )
        for block in picked:
            if not block.dense and f"{block.name}@{ID}" not in kept:
                raise InputError(
                    f'filter_func left table {block.name!r} without its "id": keep it, or drop the whole table'
                )
        return picked


def _steps(blocks: list[WriteBlock]) -> dict[str, int]:
    return {block.name: block.source._native_table.step() for block in blocks if isinstance(block.source, CacheTable)}
