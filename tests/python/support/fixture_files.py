"""Generates the files in `tests/fixtures/v1/ssd_tier` and `tests/fixtures/v1/checkpoints`.

`python tests/python/support/fixture_files.py FOLDER` creates both directories in an empty folder. Fixtures of a released format are
never regenerated. Rows, slots, metadata and steps are the same each time. Names of checkpoints, their times (`saved_unix_ms`) and
checksums are not. The `.txt` files next to them are golden vectors, which are never regenerated.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from tables import EXTREME_IDS
from torchrec_embcache import EmbCacheEmbedding, TierBudgets, admission, initializers, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main
from torchrec_embcache.eviction import Policy, Ttl
from torchrec_embcache.serialize import Saver as BlockSaver

DIM = 4
CHECKPOINTS = ("one_rank", "two_ranks", "serving", "blocks")
#: Rows 0 to 119 are trained once and flushed. Then each third is trained once more, each tenth removed, and the rest flushed.
TIER_ROWS = {row: 6.0 if row % 3 == 0 else 6.5 for row in range(120) if row % 10}
#: Ids of a chain of a full checkpoint and a delta. `SWEPT_IDS` are trained in step 1 and evicted by a sweep; the others stay.
SWEPT_IDS = range(1000, 1010)
CHAIN_IDS = [*EXTREME_IDS, *range(20, 60)]
#: Pending ids, with one occurrence.
WAITING_IDS = [5000, 5001]


def tier(root: Path, **settings: Any) -> EmbCacheEmbedding:
    """A table whose SSD tier is in `root`."""
    tiers = TierBudgets(host_bytes="64KiB", ssd_bytes="2MiB", ssd_dir=root, **settings)
    return EmbCacheEmbedding(
        name="item",
        embedding_dim=DIM,
        tiers=tiers,
        optimizer=optimizers.SGD(lr=0.5),
        initializer=initializers.Constant(7.0),
    )


def chained() -> EmbCacheEmbedding:
    """A table with an optimizer slot, an OOV row, admission counts and a step clock.

    It has no dense tensors, no shows and clicks, and one shard.
    """
    return EmbCacheEmbedding(
        name="item",
        embedding_dim=DIM,
        tiers=TierBudgets(host_bytes="1MiB"),
        optimizer=optimizers.RowWiseAdagrad(lr=0.1),
        initializer=initializers.Constant(1.0),
        admission=admission.Count(2),
        not_admitted="oov",
        eviction=Policy([Ttl(seconds=100)], every_steps=None),
    )


def train(table: EmbCacheEmbedding, ids: list[int]) -> None:
    """Does one training step."""
    table(torch.tensor(ids)).sum().backward()


def _make_tier(folder: Path) -> None:
    with tier(folder / "ssd") as table:
        train(table, list(range(120)))
        table.flush()
        train(table, list(range(0, 120, 3)))
        table.table.remove_rows(torch.arange(0, 120, 10))
        table.flush()
        Saver(0).save(table, folder / "linked", linked=True)


def _make_chain(folder: Path) -> None:
    table = chained()
    table.table.set_time(1_000_000.0)
    train(table, [*SWEPT_IDS, *SWEPT_IDS])
    Saver(0).save(table, folder / "one_rank")
    table.table.set_time(1_000_090.0)
    train(table, [*CHAIN_IDS, *CHAIN_IDS, *WAITING_IDS])
    table.table.set_time(1_000_150.0)
    Saver(0).save(table, folder / "one_rank", incremental=True, keep=2)
    for command in (
        ["reshard", str(folder / "one_rank"), str(folder / "two_ranks"), "--world-size", "2"],
        ["convert", str(folder / "one_rank"), str(folder / "serving"), "--to", "serving", "--precision", "int8"],
    ):
        if main(command) != 0:
            raise RuntimeError(f"{command} failed")
    BlockSaver(0, 1, 2, str(folder / "blocks"), {"item": table}).save()


def make(folder: Path) -> None:
    """Creates `ssd_tier` and `checkpoints` in `folder`."""
    os.umask(0o027)
    for name in ("ssd_tier/ssd", "ssd_tier/linked", *(f"checkpoints/{name}" for name in CHECKPOINTS)):
        (folder / name).mkdir(parents=True)
    _make_tier(folder / "ssd_tier")
    _make_chain(folder / "checkpoints")
    for lock in [*folder.rglob("lock"), *folder.rglob("*.lock")]:
        lock.unlink()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
