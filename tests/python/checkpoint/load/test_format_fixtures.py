"""Files of format 1, which this release and every later one read."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fixture_files import CHAIN_IDS, DIM, TIER_ROWS, WAITING_IDS, chained, tier, train
from project_paths import FIXTURES
from torchrec_embcache import EmbCacheEmbedding, serving
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main
from torchrec_embcache.cli.checkpoints import OpenCheckpoint
from torchrec_embcache.serialize import Loader


def copy_of(name: str, tmp_path: Path) -> Path:
    """A copy of a fixture, with the permissions of this package's directories."""
    root = tmp_path / name
    shutil.copytree(FIXTURES / "v1" / name, root)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return root


def weights(table: EmbCacheEmbedding) -> dict[int, float]:
    found = {}
    for chunk in table.export():
        assert (chunk.weights == chunk.weights[:, :1]).all()
        found.update(zip(chunk.ids.tolist(), chunk.weights[:, 0].tolist(), strict=True))
    return found


#: Results of `contents` for a row of `ssd_tier` by its weight, and for each row of `checkpoints`.
TIER_CONTENTS = {6.0: (6.0, None, 2, 2, 1.9993233680725098, 0), 6.5: (6.5, None, 1, 1, 1.0, 0)}
CHAIN_CONTENTS = (0.8999999761581421, 4.0, 2, 2, 2.0, 1)
#: The OOV row of `checkpoints`: four weights of -0.1, and the slot 4.
SHARED_ROW = "bdcccccd" * 4 + "40800000"


def contents(table: EmbCacheEmbedding) -> dict[int, tuple[float, float | None, int, int, float, int]]:
    """By id: the weight, the slot "sum" where there is one, the count, the last step, the score and the epoch."""
    found = {}
    for chunk in table.export():
        known, slot = chunk.metadata, chunk.slots.get("sum")
        slots = [None] * len(chunk) if slot is None else slot.tolist()
        columns = (known.count, known.last_step, known.score, known.modified_epoch)
        rows = zip(chunk.weights[:, 0].tolist(), slots, *(column.tolist() for column in columns), strict=True)
        found.update(zip(chunk.ids.tolist(), rows, strict=True))
    return found


def test_an_ssd_directory_is_resumed_and_goes_on(tmp_path: Path) -> None:
    root = copy_of("ssd_tier", tmp_path) / "ssd"
    with tier(root, reopen="resume") as table:
        assert weights(table) == TIER_ROWS
        assert contents(table) == {row: TIER_CONTENTS[weight] for row, weight in TIER_ROWS.items()}
        assert table.table.step() == 2
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
        assert contents(table) == {row: TIER_CONTENTS[weight] for row, weight in TIER_ROWS.items()}
        assert table.table.step() == 2


@pytest.mark.parametrize("name", ["one_rank", "two_ranks"])
def test_a_checkpoint_is_verified_and_loaded_with_all_that_it_has(name: str, tmp_path: Path) -> None:
    root = copy_of("checkpoints", tmp_path) / name
    assert main(["verify", str(root)]) == 0
    table = chained()
    Saver(0).load(table, root)
    assert len(weights(table)) == len(CHAIN_IDS)
    assert contents(table) == dict.fromkeys(CHAIN_IDS, CHAIN_CONTENTS)
    assert table.table.oov_row().tolist() == [float(np.float32(-0.1))] * DIM
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
    assert np.asarray(found)[-1].tolist() == table.table.oov_row().tolist()


def test_blocks_are_loaded(tmp_path: Path) -> None:
    root = copy_of("checkpoints", tmp_path)
    saved, table = chained(), chained()
    Saver(0).load(saved, root / "one_rank")
    Loader(str(root / "blocks"), {"item": table}).load()
    assert contents(table) == contents(saved) == dict.fromkeys(CHAIN_IDS, CHAIN_CONTENTS)


def test_a_manifest_says_format_1_and_names_the_row_of_ids_without_one() -> None:
    opened = OpenCheckpoint.open(str(FIXTURES / "v1" / "checkpoints" / "one_rank"))
    (table,) = opened.tables
    assert (opened.manifest["version"], opened.manifest["kind"], len(opened.chain)) == (1, "delta", 2)
    assert table["missing_read"] == "oov_row"
    assert table["oov_row"] == SHARED_ROW
    assert (table["step"], table["rows"], [link["next_epoch"] for link in opened.chain]) == (2, 48, [2, 1])
    assert "bucket_hash" not in table
