"""Ranks agree on the arguments of a collective call first, so that no rank waits for one that rejects them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn

from processes import World
from torchrec_embcache import EmbCacheStorageReader, EmbCacheStorageWriter, RowMetadata, Saver, evict, flush
from torchrec_embcache.exceptions import EmbCacheError
from torchrec_embcache.integrations import megatron
from torchrec_embcache.model._state_dict import TableState
from torchrec_embcache.serialize import BlockSaver
from torchrec_models import ROW_WISE, Model, batches, sharded, train

pytestmark = pytest.mark.slow

Call = Callable[[nn.Module, int, str], object]
STATE = {"x": torch.ones(2)}
NO_ROWS, NO_NUMBERS, NO_COUNTS = torch.zeros(0, 16), torch.zeros(0), torch.zeros(0, dtype=torch.int64)
NO_METADATA = RowMetadata(NO_COUNTS, NO_COUNTS, NO_NUMBERS, NO_COUNTS)


# The call of each rank, and the error that every rank raises.
CALLS: dict[str, tuple[Call, str]] = {
    "rank": (lambda m, _, p: Saver(0).save(m, p), "rank=0 and torch.distributed says 1"),
    "keep": (lambda m, r, p: Saver().save(m, p, keep=1 - r), "keep=0 is out of range"),
    "keep differs": (lambda m, r, p: Saver().save(m, p, keep=1 + r), r"keep differs between ranks \(rank 0: 1, rank 1: 2\)"),
    "incremental": (lambda m, r, p: Saver().save(m, p, incremental=r == 0), "incremental differs between ranks"),
    "linked": (lambda m, r, p: Saver().save(m, p, linked=r == 0), "linked differs between ranks"),
    "counters": (lambda m, r, p: Saver().save(m, p, counters=r == 0), "counters differs between ranks"),
    "both": (lambda m, r, p: Saver().save(m, p, True, linked=r == 1), "give one of them"),
    "rate": (lambda m, r, p: Saver().save_async(m, p, max_bytes_per_second=1 - r), "max_bytes_per_second=0"),
    "save_async": (lambda m, r, p: Saver().save_async(m, p, r == 0), "Saver.save_async: incremental differs"),
    "checkpoint": (lambda m, r, p: Saver().load(m, p, checkpoint="x" if r else None), "is not the name of one"),
    "tables": (lambda m, r, p: Saver().load(m, p, tables=["ta"] if r else []), "tables differs between ranks"),
    "rename": (lambda m, r, p: Saver().load(m, p, rename={"a": "b"} if r else None), "rename differs between ranks"),
    "slots": (lambda m, r, p: Saver().load(m, p, slots=r == 0), "slots differs between ranks"),
    "strict": (lambda m, r, p: Saver().load(m, p, strict=r == 0), "strict differs between ranks"),
    "compact": (lambda _, r, p: Saver().compact(p, keep=2 - 2 * r), "keep=0 is out of range"),
    "other calls": (
        lambda m, r, p: Saver().load(m, p) if r else Saver().save(m, p),
        r"rank 0: Saver.save, rank 1: Saver.load",
    ),
    "flush": (lambda m, r, _: flush(nn.Linear(1, 1) if r else m), "has no cache module"),
    "flush and evict": (lambda m, r, _: flush(m) if r else evict(m), "rank 0: evict, rank 1: flush"),
    "evict": (lambda m, r, _: evict(nn.Linear(1, 1) if r else m), "has no cache module"),
    "import table": (
        lambda m, r, _: m.module.bags.import_rows("ta" if r else "tx", [], torch.zeros(0, 16)),  # type: ignore[union-attr,operator]
        "has no table 'tx'",
    ),
    "import tables": (
        lambda m, r, _: m.module.bags.import_rows("tb" if r else "ta", [], torch.zeros(0, 8 if r else 16)),  # type: ignore[union-attr,operator]
        "import_rows: table differs between ranks",
    ),
    "import slots": (
        lambda m, r, _: m.module.bags.import_rows("ta", [], NO_ROWS, {"sum": NO_NUMBERS} if r else None),  # type: ignore[union-attr,operator]
        "import_rows: slots differs between ranks",
    ),
    "import metadata": (
        lambda m, r, _: m.module.bags.import_rows("ta", [], NO_ROWS, None, NO_METADATA if r else None),  # type: ignore[union-attr,operator]
        "import_rows: metadata differs between ranks",
    ),
    "blocks": (
        lambda m, r, p: BlockSaver(r, 2, path=p + "-b" * r, hashtables={"m": m.module.bags}).save(),  # type: ignore[union-attr]
        "BlockSaver.save: path differs between ranks",
    ),
    "note": (lambda m, r, _: TableState(None if r else m).state_dict(), "model is a NoneType"),  # type: ignore[arg-type]
    "megatron keys": (
        lambda m, r, p: megatron.SaveShardedStrategy().save(megatron.sharded_tables(m, "ab"[r]), Path(p)),
        "sharded_tables differs between ranks",
    ),
    "megatron slots": (
        lambda m, r, p: megatron.SaveCommonStrategy().save_sharded_objects(megatron.sharded_tables(m, slots=r == 0), p),
        "is for a load",
    ),
    "megatron load": (
        lambda m, r, p: megatron.LoadShardedStrategy().load(
            {"a": megatron.sharded_tables(m, "sparse" if r else "none")["sparse" if r else "none"]}, Path(p)
        ),
        "no tables of the key",
    ),
    "dcp model": (
        lambda m, r, p: dcp.save(STATE, storage_writer=EmbCacheStorageWriter(p, m if r else None)),
        "model differs between ranks",
    ),
    "dcp path": (
        lambda m, r, p: dcp.save(STATE, storage_writer=EmbCacheStorageWriter(p, m), checkpoint_id=5 if r else p),
        "path=5 is not text",
    ),
    "dcp load path": (
        lambda m, r, p: dcp.load(STATE, storage_reader=EmbCacheStorageReader(p, m), checkpoint_id=5 if r else p),
        "path=5 is not text",
    ),
    "dcp slots": (
        lambda m, r, p: dcp.load(STATE, storage_reader=EmbCacheStorageReader(f"{p}/dcp", m, slots=r == 0)),
        "slots differs between ranks",
    ),
    "dcp stage": (
        lambda m, r, p: dcp.async_save(
            STATE, storage_writer=EmbCacheStorageWriter(p, m), checkpoint_id=5 if r else p, process_group=_group()
        ).result(),
        "path=5 is not text",
    ),
}  # fmt: skip
_groups: list[Any] = []


def _group() -> Any:
    if not _groups:
        _groups.append(dist.new_group(backend="gloo"))
    return _groups[0]


def _refused(rank: int, world: int, folder: str, names: list[str]) -> list[str]:
    megatron.register()
    model = sharded(Model(), ROW_WISE, {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
    train(model, batches(1, rank, world))
    path = f"{folder}/saved"
    Saver().save(model, path)
    dcp.save(STATE, storage_writer=EmbCacheStorageWriter(f"{path}/dcp", model))
    found = []
    for name in names:
        try:
            CALLS[name][0](model, rank, path)
        except (EmbCacheError, dcp.api.CheckpointException) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing was raised")
    # Nothing was changed, and the ranks are in step.
    Saver().load(model, path)
    train(model, batches(1, rank, world))
    return found


def test_arguments_wrong_or_different_on_one_rank_fail_on_all(two_ranks: World, tmp_path: Path) -> None:
    names = list(CALLS)
    for found in two_ranks.run(_refused, str(tmp_path), names):
        for name, said in zip(names, found, strict=True):
            assert re.search(CALLS[name][1], said), (name, said)
