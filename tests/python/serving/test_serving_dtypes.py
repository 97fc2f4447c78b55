"""Rows in their stored dtype, the presence flags of a lookup, and verification before serving."""

import json
import resource
import threading
from pathlib import Path

import fbgemm_gpu  # noqa: F401  # it registers the operators
import pytest
import torch

from serving_cases import PRECISIONS, command, convert, publish, served, two_saves
from torchrec_embcache import serving
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import ConfigError, CorruptionError, InputError, StateError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "trained"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_come_as_they_are_stored(precision: str, ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a trainer's delta too, and what ids without a row read."""
    table, saver, _ = two_saves(ckpt)
    table.import_rows([50, 51], [[0.1, 0.7, -3.3, 1e-3], [5.0, 5.0, 5.0, 5.0]])
    saver.save(table, ckpt, incremental=True, keep=5)
    target = convert(capsys, ckpt, precision)
    with serving.open(target, follow=serving.Follow(poll_seconds=3600, source=ckpt), missing=0.3) as tables:
        table.import_rows([51, 60], [[0.2, 0.9, -1.7, 9.0], [0.25, 0.5, 7.0, 1.0]])
        saver.save(table, ckpt, incremental=True, keep=5)
        tables.poll()
        with tables.pin() as version:
            item, ids = version["item"], [1, 50, 51, 60, 777, 9, 1]
            assert item.dtype == DTYPES[precision]
            floats, stored = item.lookup(ids), item.lookup(ids, item.dtype)
            assert torch.equal(stored.found, floats.found)
            assert floats.found.tolist() == [True, True, True, True, False, True, True]
            has_row = floats.found
            if precision == "int8":
                assert (stored.dtype, stored.shape) == (torch.uint8, (7, 8))
                read = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(stored.as_subclass(torch.Tensor), 8)
            else:
                assert (stored.dtype, stored.shape) == (DTYPES[precision], (7, 4))
                read = stored.float()
            assert torch.equal(read[has_row], floats.as_subclass(torch.Tensor)[has_row])
            # An id without a row reads the same as far as the stored form can say it.
            assert torch.allclose(read[~has_row], floats[~has_row], rtol=1e-2)
            again = convert(capsys, ckpt, precision, "again")
            with serving.open(again) as converted, converted.pin() as wanted:
                same = wanted["item"].lookup(ids[:4], item.dtype)
                assert torch.equal(same.as_subclass(torch.Tensor), stored[:4])


def test_what_cannot_be_stored_or_is_no_dtype_is_refused(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_saves(ckpt)
    target = convert(capsys, ckpt, "fp16")
    with serving.open(target, missing=1e6) as tables, tables.pin() as version:
        item = version["item"]
        assert item.lookup([1, 777])[1, 0] == 1e6
        assert item.lookup([1], torch.float16).dtype == torch.float16
        with pytest.raises(InputError, match="fp16 cannot hold what id 777 reads"):
            item.lookup([1, 777], torch.float16)
        with pytest.raises(InputError, match=r"gives torch.float32 or torch.float16, as its rows are stored"):
            item.lookup([1], torch.bfloat16)
    with serving.open(ckpt) as tables, tables.pin() as version:
        assert version["item"].dtype == torch.float32
        with pytest.raises(InputError, match="gives torch.float32"):
            version["item"].lookup([1], torch.float16)
        with pytest.raises(InputError, match="dtype='fp16'"):
            version["item"].lookup([1], "fp16")  # type: ignore[arg-type]


def test_a_table_says_what_its_last_lookup_in_this_thread_found(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        with pytest.raises(StateError, match="call lookup before found"):
            _ = version["item"].found
        rows = version["item"].lookup([1, 99, 2])
        assert version["item"].found is rows.found
        assert version.tables[0].found is rows.found
        with pytest.raises(InputError):
            version["item"].lookup([[1]])
        with pytest.raises(StateError, match="call lookup before found"):
            _ = version["item"].found
        version["item"].lookup([1, 99, 2])
        others: list[list[bool]] = []

        def looks_up() -> None:
            version["item"].lookup([77, 5])
            others.append(version["item"].found.tolist())

        thread = threading.Thread(target=looks_up)
        thread.start()
        thread.join()
        assert others == [[False, True]]
        assert version["item"].found.tolist() == [True, False, True]


def flip_a_weight(checkpoint: Path) -> None:
    """Change the last weight of a checkpoint's one data file of rows, and nothing else."""
    (file,) = checkpoint.rglob("*.safetensors")
    whole = bytearray(file.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    whole[8 + length + header["weight"]["data_offsets"][1] - 1] ^= 0x55
    file.write_bytes(whole)


def test_indexed_checkpoint_is_verified_on_request(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, first = two_saves(ckpt)
    command(capsys, "index", ckpt)
    with serving.open(ckpt, verify=True) as tables:
        assert served(tables.pin(), [3]) == {3: [3.0] * 4}
        second = publish(table, saver, ckpt, 30.0, full=True)
        command(capsys, "index", ckpt)
        flip_a_weight(ckpt / second)
        with pytest.raises(CorruptionError):
            tables.poll()
        assert tables.pin().name == first
        assert tables.stats().failed_polls == 1
    with pytest.raises(CorruptionError):
        serving.open(ckpt, verify=True)
    # Without it the rows that are whole are served as they are.
    with serving.open(ckpt) as tables:
        assert served(tables.pin(), [1]) == {1: [30.0] * 4}
    with pytest.raises(ConfigError, match="verify='yes'"):
        serving.open(ckpt, verify="yes")  # type: ignore[arg-type]


def test_what_an_index_covers_is_verified_beneath_a_delta(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, first = two_saves(ckpt)
    command(capsys, "index", ckpt)
    publish(table, saver, ckpt, 30.0)
    with serving.open(ckpt, verify=True) as tables:
        assert served(tables.pin(), [1, 3]) == {1: [30.0] * 4, 3: [3.0] * 4}
    flip_a_weight(ckpt / first)
    with pytest.raises(CorruptionError):
        serving.open(ckpt, verify=True)
    with serving.open(ckpt) as tables:
        assert served(tables.pin(), [1]) == {1: [30.0] * 4}


def test_verify_holds_the_index_against_the_rows(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, _ = two_saves(ckpt)
    name = publish(table, saver, ckpt, 30.0)
    assert "index for servers" not in command(capsys, "verify", ckpt)
    command(capsys, "index", ckpt)
    assert "the index for servers: whole" in command(capsys, "verify", ckpt)
    index = ckpt / name / "serve.idx"
    whole = index.read_bytes()
    # The last bytes fill the last page.
    lines = next(at for at in range(4096, len(whole)) if whole[at])
    index.write_bytes(whole[:lines] + bytes([whole[lines] ^ 255]) + whole[lines + 1 :])
    said = command(capsys, "verify", ckpt, status=1)
    assert "is corrupted" in said
    assert f"remove {index}: servers, or `embcache index`, build it again" in said
    # One that is of another checkpoint is made anew by servers, and is no damage of this one.
    publish(table, saver, ckpt, 31.0)
    newest = (ckpt / "LATEST").read_text().split()[0]
    (ckpt / newest / "serve.idx").write_bytes(whole)
    assert "index for servers" not in command(capsys, "verify", ckpt)


def test_the_command_says_where_no_index_can_be_written(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest file that this process may write is too small for an index."""
    two_saves(ckpt)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        status = main(["index", str(ckpt)])
        with serving.open(ckpt) as tables:
            assert served(tables.pin(), [3]) == {3: [3.0] * 4}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr()
    assert status == 3
    assert "serve.idx of checkpoint" in said.err
    assert "was not written" in said.err
    assert not list(ckpt.rglob("serve.idx*"))
