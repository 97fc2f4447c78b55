"""Chains of deltas: every one that a save publishes can be loaded."""

from pathlib import Path

import pytest
import torch

from tables import ssd_tiers
from test_saver import make_bag, root, rows
from torchrec_embcache import EmbCacheEmbeddingBag, Saver, TierBudgets

__all__ = ["root"]  # the fixture

LARGE = TierBudgets(host_bytes="8MiB")


def train(bag: EmbCacheEmbeddingBag, ids: range) -> None:
    bag(torch.tensor(ids).view(-1, 4)).sum().backward()


@pytest.mark.parametrize("kind", ["ram", "ssd"])
def test_a_full_table_that_drops_rows_of_a_checkpoint_descends_from_none(kind: str, root: Path, tmp_path: Path) -> None:
    saved = make_bag(tiers=LARGE)
    for first in range(0, 20_000, 4000):
        train(saved, range(first, first + 4000))
    Saver(0).save(saved, root)
    tiers = {"ram": TierBudgets(host_bytes="256KiB"), "ssd": ssd_tiers(tmp_path / "ssd", ssd_bytes="1MiB")}[kind]
    small = make_bag(tiers=tiers, on_full="evict")
    report = Saver(0).load(small, root)
    assert report.rows == {"item": len(small)}
    assert report.dropped == {"item": 20_000 - len(small)}
    assert len(small) < 20_000
    train(small, range(19_000, 19_400))
    again = Saver(0).save(small, root, incremental=True)
    assert again.kind == "full"
    assert "dropped rows while it was loaded" in str(again.reason)
    train(small, range(19_000, 19_040))
    assert Saver(0).save(small, root, incremental=True).kind == "delta"
    large = make_bag(tiers=LARGE)
    assert Saver(0).load(large, root).dropped == {}
    assert rows(large) == rows(small)
