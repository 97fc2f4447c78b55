"""The steps of docs/erasing.md leave no byte of a removed row in any file; before them some bytes exist."""

import struct
from pathlib import Path

import pytest
import torch

from lifecycle_cases import embedding
from tables import ssd_tiers
from torchrec_embcache import Saver, admission
from torchrec_embcache.exceptions import StateError

WEIGHTS = [1234.5, -77.25, 3.125, 0.5]
PATTERN = struct.pack("<4f", *WEIGHTS)


def files_with_the_row(folder: Path) -> set[str]:
    """The parts of `folder` in which a file has the weights of the row."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).parts[0] for path in files if PATTERN in path.read_bytes()}


@pytest.mark.parametrize("way", ["compact", "full"])
def test_no_file_has_the_bytes_of_an_erased_row(way: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    saver, ckpt = Saver(0), tmp_path / "ckpt"
    user = embedding(tiers=ssd_tiers(tmp_path / "rows"))
    user.import_rows([7, 42], [[1.0] * 4, WEIGHTS])
    user.flush()
    saver.save(user, ckpt)
    assert user.remove_rows([42]) == 1
    user.flush()
    if way == "compact":
        saver.save(user, ckpt, incremental=True)
        assert files_with_the_row(tmp_path) == {"rows", "ckpt"}, "a delta leaves its parent"
        saver.compact(ckpt)
    else:
        saver.save(user, ckpt, keep=1)
    user.close()
    assert files_with_the_row(tmp_path) == {"rows"}, "the SSD tier leaves the bytes until it uses their room"
    with embedding(tiers=ssd_tiers(tmp_path / "rows", reopen="discard")) as again:
        saver.load(again, ckpt)
        assert again.read_rows([7, 42]).found.tolist() == [True, False]
        assert files_with_the_row(tmp_path) == set()


def test_a_row_that_a_batch_uses_is_not_removed() -> None:
    with embedding() as user:
        user(torch.tensor([42])).sum().backward()
        out = user(torch.tensor([42]))
        with pytest.raises(StateError):
            user.remove_rows([42])
        assert user.read_rows([42]).found.tolist() == [True]
        out.sum().backward()
        assert user.remove_rows([42]) == 1


def test_admission_counts_an_erased_id_from_its_beginning() -> None:
    with embedding(admission=admission.Count(2)) as user:
        for _ in range(2):
            user(torch.tensor([42])).sum().backward()
        assert user.remove_rows([42]) == 1
        user(torch.tensor([42])).sum().backward()
        assert user.read_rows([42]).found.tolist() == [False]
