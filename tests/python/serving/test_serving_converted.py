"""A converted checkpoint is served with the trainer's later deltas, which read as if they were converted."""

import threading
from pathlib import Path

import pytest
import torch

from serving_cases import PRECISIONS, contents, convert, publish, served, two_saves, until
from torchrec_embcache import serving
from torchrec_embcache.exceptions import ConfigError, MismatchError, PathError


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "trained"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_deltas_read_as_if_they_were_converted(precision: str, ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, _ = two_saves(ckpt)
    target = convert(capsys, ckpt, precision)
    with serving.open(target, follow=serving.Follow(poll_seconds=0.01, source=ckpt)) as tables:
        assert tables.poll() is None
        for save in range(1, 5):
            table.import_rows([2, 90 + save], [[0.1 * save, 0.7, -3.3, 1.0]] * 2)
            table.table.remove_rows([save + 2])
            name = saver.save(table, ckpt, incremental=True, keep=5).checkpoint
            until(lambda name=name: tables.pin().name == name)  # type: ignore[misc]
            again = convert(capsys, ckpt, precision, f"again {save}")
            ids = [*range(1, 100)]
            with serving.open(again) as converted, tables.pin() as version, converted.pin() as wanted:
                assert served(version, ids) == served(wanted, ids)
                assert sorted(served(version, ids)) == sorted(contents(table))
                bags = torch.tensor([0, 3, 3, 9])
                pooled = [each["item"].lookup_pooled(ids[:9], bags, "mean") for each in (version, wanted)]
                assert torch.equal(*pooled)
        assert tables.stats().failed_polls == 0
        assert tables.stats().staleness_seconds < 3600


def test_a_new_chain_waits_for_its_conversion_and_is_served_then(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, saver, _ = two_saves(ckpt)
    target = convert(capsys, ckpt, "int8")
    with serving.open(target, follow=serving.Follow(poll_seconds=3600, source=str(ckpt))) as tables:
        name = publish(table, saver, ckpt, 5.0, full=True)
        with pytest.raises(MismatchError, match=f"checkpoint {name} does not build on .*embcache convert"):
            tables.poll()
        assert name in str(tables.stats().last_error)
        assert served(tables.pin(), [1])[1][0] == pytest.approx(1.0)
        convert(capsys, ckpt, "fp16")
        assert tables.poll() is not None
        assert served(tables.pin(), [1]) == {1: [5.0] * 4}
        assert tables.stats().last_error is None
        last = publish(table, saver, ckpt, 6.0)
        assert tables.poll() == last
        assert tables.rollback() != last
        assert served(tables.pin(), [1]) == {1: [5.0] * 4}


@pytest.mark.slow
def test_requests_see_whole_rows_while_deltas_come(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, _ = two_saves(ckpt)
    target = convert(capsys, ckpt, "fp16")
    wrong: list[list[float]] = []
    ended = threading.Event()
    with serving.open(target, follow=serving.Follow(poll_seconds=0.001, source=ckpt)) as tables:

        def ask() -> None:
            while not ended.is_set():
                rows = tables.pin()["item"].lookup([1, 1])
                if len(set(rows[:].flatten().tolist())) != 1:
                    wrong.append(rows[:].flatten().tolist())

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        for value in range(2, 40):
            name = publish(table, saver, ckpt, float(value))
        until(lambda: tables.pin().name == name)
        ended.set()
        for asker in askers:
            asker.join()
    assert wrong == []


def test_what_is_no_source_is_said(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_saves(ckpt)
    target = convert(capsys, ckpt, "fp16")
    with pytest.raises(ConfigError, match=r"Follow.source=7: give the path"):
        serving.Follow(source=7)  # type: ignore[arg-type]
    with pytest.raises(PathError, match="missing"):
        serving.open(target, follow=serving.Follow(source=ckpt / "elsewhere"))
    # Another trainer's checkpoints are no changes of it.
    other = ckpt.parent / "other"
    table, saver, _ = two_saves(other)
    publish(table, saver, other, 3.0)
    with serving.open(target, follow=serving.Follow(poll_seconds=3600, source=other)) as tables:
        assert "does not build on" in str(tables.stats().last_error)
        assert served(tables.pin(), [1]) == {1: [1.0] * 4}
