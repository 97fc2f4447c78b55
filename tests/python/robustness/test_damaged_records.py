"""Every way to read damaged records on SSD reports the damage."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ssd_records import ID_AT, place_of, records
from tables import make_bag, ssd_tiers, step
from torchrec_embcache import EmbCacheEmbeddingBag, _native
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint.dcp import EmbCacheStorageWriter
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import CorruptionError, EmbCacheError
from torchrec_embcache.serialize import Saver as BlockSaver


def crc32c(data: bytes) -> int:
    """The checksum of all of `data`."""
    return int(_native.chunk_checksums(np.frombuffer(data, np.uint8), len(data))[0])


def flip_id(root: Path, row: int) -> None:
    path, at, _ = place_of(root, row)
    at += ID_AT + 1
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


def weights(bag: EmbCacheEmbeddingBag) -> dict[int, float]:
    found = {}
    for chunk in bag.export():
        found.update(zip(chunk.ids.tolist(), chunk.weights[:, 3].tolist(), strict=True))
    return found


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


def test_a_linked_checkpoint_of_a_damaged_record_is_refused_by_verify(tmp_path, capsys):
    closed_tier(tmp_path / "ssd")
    flip_id(tmp_path / "ssd", 77)
    (tmp_path / "saved").mkdir(mode=0o700)
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="16KiB", reopen="resume")) as bag:
        Saver(0).save(bag, tmp_path / "saved", linked=True)
    assert main(["verify", str(tmp_path / "saved")]) != 0
    assert "is damaged at byte" in "".join(capsys.readouterr())


def rebound(record: bytes, place: bytes) -> bytes:
    """The record with the checksum that it would have in the place of another: it binds a record to its segment and number."""
    mask = int.from_bytes(place[:ID_AT], "little") ^ crc32c(place[ID_AT:])
    return (crc32c(record[ID_AT:]) ^ mask).to_bytes(4, "little") + record[ID_AT:]


def test_a_whole_record_of_another_id_is_no_row_that_was_never_trained(tmp_path):
    closed_tier(tmp_path / "ssd")
    path, at, length = place_of(tmp_path / "ssd", 77)
    other_at, other = next((start, id_) for start, _, id_ in records(path) if id_ != 77)
    data = bytearray(path.read_bytes())
    data[at : at + length] = rebound(bytes(data[other_at : other_at + length]), bytes(data[at : at + length]))
    path.write_bytes(data)
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="16KiB", reopen="resume")) as bag:
        with pytest.raises(CorruptionError, match=f"the record's id should be 77 and is {other}"):
            bag.read_rows(torch.tensor([77]))
        with pytest.raises(CorruptionError, match="the record's id"):
            bag(torch.tensor([[77]]))
        assert bag.read_rows(torch.tensor([other])).found.all()
        with pytest.raises(CorruptionError, match="the number of live records that can be found should be"):
            weights(bag)
        assert len(bag) == 2000
