"""Files of format 1, as this release and every later one reads them."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fixture_files import CHAIN_IDS, DIM, SWEPT_IDS, TIER_ROWS, WAITING_IDS, chained, tier, train
from torchrec_embcache import EmbCacheEmbedding, serving
from torchrec_embcache.cli import main
from torchrec_embcache.cli.checkpoints import Opened
from torchrec_embcache.saver import Saver
from torchrec_embcache.serialize import Loader

FIXTURES = Path(__file__).parent.parent / "fixtures" / "v1"


def copy_of(name: str, tmp_path: Path) -> Path:
    """A copy of a fixture, with the permissions of this package's directories."""
    root = tmp_path / name
    shutil.copytree(FIXTURES / name, root)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return root


def weights(table: EmbCacheEmbedding) -> dict[int, float]:
    found = {}
    for chunk in table.export():
        assert (chunk.weights == chunk.weights[:, :1]).all()
        found.update(zip(chunk.ids.tolist(), chunk.weights[:, 0].tolist(), strict=True))
    return found


def test_an_ssd_directory_is_resumed_and_goes_on(tmp_path: Path) -> None:
    root = copy_of("ssd_tier", tmp_path) / "ssd"
    with tier(root, reopen="resume") as table:
        assert weights(table) == TIER_ROWS
        train(table, [1, 2, 200])
        table.flush()
    expected = {**TIER_ROWS, 1: 6.0, 2: 6.0, 200: 6.5}
    with tier(root, reopen="resume") as table:
        assert weights(table) == expected
        for _ in range(20):  # compaction moves all rows
            train(table, list(range(300, 1500)))
            table.flush()
        assert {row: value for row, value in weights(table).items() if row < 300} == expected


def test_a_linked_checkpoint_is_verified_and_loaded(tmp_path: Path) -> None:
    root = copy_of("ssd_tier", tmp_path) / "linked"
    assert main(["verify", str(root)]) == 0
    (tmp_path / "new").mkdir(mode=0o700)
    with tier(tmp_path / "new") as table:
        Saver(0).load(table, root)
        assert weights(table) == TIER_ROWS


@pytest.mark.parametrize("name", ["one_rank", "two_ranks"])
def test_a_checkpoint_is_verified_and_loaded_with_all_that_it_has(name: str, tmp_path: Path) -> None:
    root = copy_of("checkpoints", tmp_path) / name
    assert main(["verify", str(root)]) == 0
    table = chained()
    Saver(0).load(table, root)
    trained = chained()
    trained.table.set_time(1_000_000.0)
    train(trained, [*SWEPT_IDS, *SWEPT_IDS])
    trained.table.set_time(1_000_090.0)
    train(trained, [*CHAIN_IDS, *CHAIN_IDS, *WAITING_IDS])
    trained.table.set_time(1_000_150.0)
    trained.table.evict()
    assert sorted(weights(table)) == sorted(CHAIN_IDS)
    assert weights(table) == weights(trained)
    assert table.table.shared_row().tolist() == trained.table.shared_row().tolist() != [1.0] * DIM
    assert table.table.step() == 2
    table.table.set_time(1_000_150.0)
    train(table, WAITING_IDS)  # their second time
    assert sorted(weights(table)) == sorted([*CHAIN_IDS, *WAITING_IDS])
    table.table.set_time(1_000_190.0)
    table.table.evict()
    assert sorted(weights(table)) == WAITING_IDS


def test_a_serving_checkpoint_is_served(tmp_path: Path) -> None:
    root = copy_of("checkpoints", tmp_path)
    table = chained()
    Saver(0).load(table, root / "one_rank")
    with serving.open(root / "serving") as tables, tables.pin() as version:
        found = version.tables[0].lookup([*CHAIN_IDS, 99_999])
    assert found.found.tolist() == [*[True] * len(CHAIN_IDS), False]
    rows = weights(table)
    assert np.allclose(np.asarray(found)[:-1, 0], [rows[row] for row in CHAIN_IDS], rtol=1e-2)
    assert np.asarray(found)[-1].tolist() == table.table.shared_row().tolist()


def test_blocks_are_loaded(tmp_path: Path) -> None:
    root = copy_of("checkpoints", tmp_path)
    saved, table = chained(), chained()
    Saver(0).load(saved, root / "one_rank")
    Loader(str(root / "blocks"), {"item": table}).load()
    assert weights(table) == weights(saved)


def test_a_manifest_says_format_1_and_names_the_row_of_ids_without_one() -> None:
    opened = Opened.at(str(FIXTURES / "checkpoints" / "one_rank"))
    (table,) = opened.tables
    assert (opened.manifest["version"], opened.manifest["kind"], len(opened.links)) == (1, "delta", 2)
    assert table["missing_read"] == "oov_row"
    assert len(table["oov_row"]) == 8 * (DIM + 1)
    assert "bucket_hash" not in table
