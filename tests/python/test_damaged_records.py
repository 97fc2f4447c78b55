"""Records on SSD that are not those that were written: every way to read them reports it. The formats before this one are still
read.
"""

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tables import make_bag, ssd_tiers, step
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers
from torchrec_embcache.cli import main
from torchrec_embcache.dcp import EmbCacheStorageWriter
from torchrec_embcache.exceptions import CorruptionError, EmbCacheError
from torchrec_embcache.saver import Saver
from torchrec_embcache.serialize import Saver as BlockSaver

FIXTURES = Path(__file__).parent.parent / "fixtures"
# The trailer is the last 48 bytes of a segment. It has the number of records at byte 8.
TRAILER_BYTES = 48


def id_at(data: bytes) -> int:
    """Where in a record of a segment with these bytes the id is."""
    return 4 if data[:8] == b"EMBCSEG4" else 8


def records(path: Path) -> Iterator[tuple[int, int, int]]:
    """The position, the length and the id of each record of a row in a segment."""
    data = path.read_bytes()
    header, content, length = struct.unpack_from("<I", data, 8)[0], data[12], struct.unpack_from("<I", data, 16)[0]
    count = struct.unpack_from("<I", data, len(data) - TRAILER_BYTES + 8)[0] & 0xFFFFFF
    for at in range(header, header + count * length, length) if content == 1 else ():
        yield at, length, struct.unpack_from("<q", data, at + id_at(data))[0]


def place_of(root: Path, row: int) -> tuple[Path, int, int]:
    """The file, the position and the length of the record of a row that was written once."""
    found = [
        (path, at, length) for path in sorted(root.rglob("*.seg")) for at, length, id_ in records(path) if id_ == row
    ]
    assert len(found) == 1
    return found[0]


def flip_id(root: Path, row: int) -> None:
    path, at, _ = place_of(root, row)
    at += id_at(path.read_bytes()) + 1
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def replace_by(root: Path, row: int, other: int) -> None:
    """Damage a file as a write to a wrong position does."""
    source, start, length = place_of(root, other)
    record = source.read_bytes()[start : start + length]
    path, at, _ = place_of(root, row)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(record)


def in_old_version(root: Path) -> EmbCacheEmbeddingBag:
    """The table whose files an earlier version wrote: see `test_a_directory_of_an_old_version_goes_on`."""
    return make_bag(
        embedding_dim=8,
        tiers=TierBudgets(host_bytes="64KiB", ssd_bytes="2MiB", ssd_dir=root / "ssd", reopen="resume"),
        optimizer=optimizers.SGD(lr=0.5),
        initializer=initializers.Constant(7.0),
    )


def copy_of(version: str, tmp_path: Path) -> Path:
    root = tmp_path / version
    shutil.copytree(FIXTURES / version / "ssd_tier", root)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return root


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    return copy_of("v1", tmp_path)


@pytest.fixture(params=["v1", "v2", "v3"])
def old_version(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return copy_of(request.param, tmp_path)


def weights(bag: EmbCacheEmbeddingBag) -> dict[int, float]:
    found = {}
    for chunk in bag.export():
        found.update(zip(chunk.ids.tolist(), chunk.weights[:, 3].tolist(), strict=True))
    return found


# Rows 0 to 119 were trained once and flushed. Then each third was trained once more, each tenth removed, and the rest flushed.
OF_OLD_VERSIONS = {row: 6.0 if row % 3 == 0 else 6.5 for row in range(120) if row % 10}


def test_a_directory_of_an_old_version_goes_on(old_version):
    with in_old_version(old_version) as bag:
        assert weights(bag) == OF_OLD_VERSIONS
        found = bag.read_rows(torch.arange(-5, 125))
        assert found.ids[found.found].tolist() == list(OF_OLD_VERSIONS)
        out = bag(torch.tensor([[1], [2], [200]]))
        out.sum().backward()
    # By now the rows lie in segments of the old version and of this one, and compaction moves the rest of the old ones.
    expected = {**OF_OLD_VERSIONS, 1: 6.0, 2: 6.0, 200: 6.5}
    with in_old_version(old_version) as bag:
        assert weights(bag) == expected
        for _ in range(20):
            ids = torch.arange(300, 1500)
            bag(ids.view(-1, 1)).sum().backward()
            bag.flush()
        assert {row: value for row, value in weights(bag).items() if row < 300} == expected


def test_a_snapshot_of_an_old_version_is_verified_and_loaded(old_version, tmp_path, capsys):
    assert main(["verify", str(old_version / "snapshot")]) == 0, capsys.readouterr()
    with make_bag(
        embedding_dim=8,
        tiers=ssd_tiers(tmp_path / "new", ssd_bytes="2MiB"),
        optimizer=optimizers.SGD(lr=0.5),
        initializer=initializers.Constant(7.0),
    ) as bag:
        Saver(0).load(bag, old_version / "snapshot")
        assert weights(bag) == OF_OLD_VERSIONS


def test_another_record_in_a_segment_of_version_1_is_no_row_that_was_never_trained(version_1):
    (version_1 / "snapshot").rename(version_1.parent / "kept")  # the names of its files
    replace_by(version_1, 11, 13)
    with in_old_version(version_1) as bag:
        with pytest.raises(CorruptionError, match="record's id should be 11 and is 13"):
            bag.read_rows(torch.tensor([11]))
        with pytest.raises(CorruptionError):
            bag(torch.tensor([[11]]))
        with pytest.raises(CorruptionError, match="live records"):
            weights(bag)
        assert bag.read_rows(torch.tensor([13])).found.all()
        assert len(bag) == len(OF_OLD_VERSIONS)


def closed_tier(root: Path) -> None:
    """A table with most rows on SSD alone, each written once."""
    with make_bag(tiers=ssd_tiers(root, host_bytes="16KiB")) as bag:
        for first in range(0, 2000, 200):
            step(bag, [list(range(first, first + 200))])


WAYS: dict[str, Callable[[EmbCacheEmbeddingBag, Path], Any]] = {
    "export": lambda bag, _: weights(bag),
    "save": lambda bag, path: Saver(0).save(bag, path),
    "save_async": lambda bag, path: Saver(0).save_async(bag, path).result(),
    "blocks": lambda bag, path: BlockSaver(0, 1, 2, str(path), {"item": bag}).save(),
    "dcp": lambda bag, path: dcp.save(
        {"x": torch.ones(3)}, storage_writer=EmbCacheStorageWriter(path, bag), no_dist=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("damage", [flip_id, lambda root, row: replace_by(root, row, 1999)], ids=["id", "record"])
def test_no_save_leaves_out_a_row_whose_record_is_damaged(way, damage, tmp_path):
    os.umask(0o077)
    closed_tier(tmp_path / "ssd")
    damage(tmp_path / "ssd", 77)
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="16KiB", reopen="resume")) as bag:
        with pytest.raises((EmbCacheError, CheckpointException)) as caught:
            WAYS[way](bag, tmp_path / "saved")
        causes = [caught.value]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        assert any("is damaged at byte" in str(cause) and ".seg" in str(cause) for cause in causes), causes
        assert main(["verify", str(tmp_path / "saved")]) != 0, "there is no checkpoint to be content with"


def test_a_linked_snapshot_of_a_damaged_record_is_refused_by_verify(tmp_path, capsys):
    closed_tier(tmp_path / "ssd")
    flip_id(tmp_path / "ssd", 77)
    (tmp_path / "saved").mkdir(mode=0o700)
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="16KiB", reopen="resume")) as bag:
        Saver(0).save(bag, tmp_path / "saved", snapshot=True)
    assert main(["verify", str(tmp_path / "saved")]) != 0
    assert "is damaged at byte" in "".join(capsys.readouterr())
