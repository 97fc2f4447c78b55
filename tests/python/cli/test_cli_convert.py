"""Errors of `embcache convert`: hostile layouts, names that no directory can have, a full file system."""

import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

from cli_cases import loaded, refused, run, save
from saver_cases import make_bag, rows, train
from torchrec_embcache import TierBudgets
from torchrec_embcache.checkpoint import Saver

IDS = np.arange(3)
WEIGHTS = np.ones((3, 4), np.float32)


def npy(folder: Path, description: bytes | None = None, **columns: Any) -> Path:
    """A table in the layout `npy`. Bytes are written as they are."""
    (folder / "item").mkdir(parents=True)
    for name, values in {"id": IDS, "weight": WEIGHTS, **columns}.items():
        if isinstance(values, bytes):
            (folder / "item" / f"{name}.npy").write_bytes(values)
        else:
            np.save(folder / "item" / f"{name}.npy", values)
    if description is not None:
        (folder / "item" / "table.json").write_bytes(description)
    return folder


@pytest.mark.parametrize(
    ("field", "description"),
    [
        ("optimizer", {"optimizer": ["x"]}),
        ("optimizer", {"optimizer": "adam"}),
        ("optimizer.name", {"optimizer": {"name": {"a": 1}}}),
        ("optimizer.name", {"optimizer": {}}),
        ("optimizer.hyperparameters", {"optimizer": {"name": "sgd", "hyperparameters": [1]}}),
        ("optimizer.hyperparameters.lr", {"optimizer": {"name": "sgd", "hyperparameters": {"lr": "x"}}}),
        ("optimizer.hyperparameters.lr", {"optimizer": {"name": "sgd", "hyperparameters": {"lr": float("nan")}}}),
        ("module", {"module": 5}),
        ("table", {"table": None}),
        ("table", {"table": [1]}),
        ("table", {"table": "\udc80"}),
        ("key", {"key": -1}),
        ("key", {"key": 1 << 64}),
        ("step", {"step": 1.5}),
        ("step", {"step": True}),
        ("seed", {"seed": "s"}),
        ("initializer", {"initializer": "x"}),
        ("total_num_buckets", {"total_num_buckets": 0}),
        ("total_num_buckets", {"total_num_buckets": -3}),
        ("total_num_buckets", {"total_num_buckets": "7"}),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40],
)
def test_each_field_of_a_table_json_is_checked_and_named(
    tmp_path: Path, field: str, description: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = npy(tmp_path / "theirs", json.dumps(description).encode())
    kind, message = refused(capsys, source, tmp_path / "ours")
    assert kind == "CorruptionError"
    assert f"table.json: offset 0: {field}: expected" in message


@pytest.mark.parametrize("description", [b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe{}", b"[]", b""])
def test_a_table_json_that_is_no_object_is_refused(
    tmp_path: Path, description: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, message = refused(capsys, npy(tmp_path / "theirs", description), tmp_path / "ours")
    assert kind == "CorruptionError"
    assert "the description" in message


def header(text: bytes) -> bytes:
    padded = text + b" " * (-(10 + len(text)) % 64)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"id": IDS.reshape(3, 1)}, "id has shape"),
        ({"id": np.array(5)}, "id has shape"),
        ({"weight": b""}, "weight.npy"),
        ({"weight": header(b"[" * 3000)}, "weight.npy"),
        ({"weight": header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 62, 4), }")}, "weight.npy"),
        ({"count": np.array(list("abc")), "last_step": IDS, "score": IDS, "modified_epoch": IDS}, "count is"),
        ({"count": np.ones(3), "last_step": IDS, "score": IDS, "modified_epoch": IDS}, "count is"),
        ({"count": np.ones((3, 2), np.int64)}, "count has shape"),
        ({"last_step": -IDS}, "last_step has -2"),
        ({"modified_epoch": np.full(3, (1 << 32) - 1)}, "modified_epoch has"),
        ({"score": np.array([1, 2, 3])}, "score is"),
        ({"sum": np.ones((3, 2, 2), np.float32)}, "the slot sum cannot be read: it is float32 [3, 2, 2]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_columns_of_a_wrong_shape_or_type_are_refused_by_name(
    tmp_path: Path, columns: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, message = refused(capsys, npy(tmp_path / "theirs", **columns), tmp_path / "ours")
    assert kind in ("InputError", "CorruptionError", "UnsupportedError")
    assert what in message


@pytest.mark.parametrize("layout", ["npy", "safetensors"])
def test_slot_of_another_type_can_be_left_out(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"id": IDS, "weight": WEIGHTS, "sum": np.ones((3, 4), np.float16)}
    if layout == "npy":
        npy(tmp_path / "theirs", sum=columns["sum"])
    else:
        (tmp_path / "theirs").mkdir()
        safetensors.numpy.save_file(columns, tmp_path / "theirs" / "a.safetensors")
    kind, message = refused(capsys, tmp_path / "theirs", tmp_path / "ours")
    assert (kind, "--skip sum" in message) == ("UnsupportedError", True)
    code, found = run(capsys, "convert", tmp_path / "theirs", tmp_path / "ours", "--skip", "sum")
    assert (code, found["tables"][0]["optimizer"]) == (0, "sgd")


@pytest.mark.parametrize(("rows_", "dim"), [(0, (1 << 63) - 1), (0, 0), (1 << 32, 1 << 32), (1 << 31, 1 << 31)])
def test_a_recsdk_attribute_whose_product_wraps_around_is_refused(
    tmp_path: Path, rows_: int, dim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for column, attribute in (("key", [8, rows_]), ("embedding", [4, rows_, dim])):
        folder = tmp_path / "theirs/item" / column
        folder.mkdir(parents=True)
        np.array(attribute, np.int64).tofile(folder / "slice.attribute")
        with (folder / "slice.data").open("wb") as file:
            file.truncate(8 * rows_ if column == "key" else 0)  # a sparse file
    kind, message = refused(capsys, tmp_path / "theirs", tmp_path / "ours")
    assert kind == "CorruptionError"
    assert "slice.attribute" in message or "slice.data" in message


def recis(folder: Path, files: dict[str, list[str]]) -> Path:
    folder.mkdir()
    for file, parts in files.items():
        tensors = {}
        for part in parts:
            tensors[f"item.id/{part}"] = IDS + 10 * len(file)
            tensors[f"item.embedding/{part}"] = WEIGHTS
        safetensors.numpy.save_file(tensors, folder / file)
    (folder / "index").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"a.safetensors": ["part_0_2"]}, "parts \\[0\\] of \\[2\\]"),
        ({"a.safetensors": ["part_0_1", "part_1_2"]}, "of \\[1, 2\\]"),
        ({"a.safetensors": ["part_0_2", "part_2_2"]}, "parts \\[0, 2\\]"),
        ({"a.safetensors": ["part_0_1"], "bb.safetensors": ["part_0_1"]}, "is in .*a.safetensors and in"),
    ],
    ids=["a part is missing", "parts of two saves", "a part past the last", "one part twice"],
)
def test_missing_or_duplicate_recis_parts_are_reported(
    tmp_path: Path, files: dict[str, list[str]], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, message = refused(capsys, recis(tmp_path / "theirs", files), tmp_path / "ours")
    assert re.search(what, message)


@pytest.mark.parametrize("layout", ["npy", "safetensors"])
@pytest.mark.parametrize("module", ["", "tower", "ü" * 100])
@pytest.mark.parametrize("name", [".", "..", "...", "a/b", ".x", "ü" * 100])
def test_a_table_of_any_name_goes_out_and_comes_back(
    tmp_path: Path, name: str, module: str, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = make_bag(name=name)
    train(bag)
    Saver(0).save(nn.ModuleDict({module: bag}) if module else bag, str(tmp_path / "ours"))
    assert run(capsys, "convert", tmp_path / "ours", tmp_path / "plain", "--to", layout)[0] == 0
    (folder,) = (tmp_path / "plain").iterdir()
    assert folder.is_dir()
    assert run(capsys, "convert", tmp_path / "plain", tmp_path / "back")[0] == 0
    assert run(capsys, "diff", tmp_path / "ours", tmp_path / "back")[1]["equal"]


def test_delta_after_a_conversion_has_only_later_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bag = save(tmp_path / "ours")
    for seed in (7, 8):
        train(bag, steps=1, seed=seed)
        Saver(0).save(nn.Sequential(bag), str(tmp_path / "ours"))
    assert run(capsys, "convert", tmp_path / "ours", tmp_path / "plain", "--to", "npy")[0] == 0
    assert run(capsys, "convert", tmp_path / "plain", tmp_path / "back")[0] == 0
    (tmp_path / "cache").mkdir(mode=0o750)
    back = loaded(
        tmp_path / "back", tiers=TierBudgets(host_bytes="8KiB", ssd_bytes="4MiB", ssd_dir=str(tmp_path / "cache"))
    )
    assert rows(back) == rows(bag)
    back(torch.tensor([[1]])).sum().backward()
    report = Saver(0).save(nn.Sequential(back), str(tmp_path / "back"), incremental=True)
    assert (report.kind, report.rows) == ("delta", 1)


def _convert_with_files_of(most_bytes: int, source: Path, target: Path, layout: str) -> tuple[int, str]:
    """The exit status and the standard error of `convert` in a process whose files may have at most `most_bytes` bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_embcache", "convert", str(source), str(target), "--to", layout],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
    )
    return done.returncode, done.stderr


def big(path: Path) -> None:
    bag = make_bag(embedding_dim=64, tiers=TierBudgets(host_bytes="32MiB"))
    bag.import_rows(torch.arange(20_000), torch.rand(20_000, 64))
    Saver(0).save(bag, str(path))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["npy", "safetensors"])
def test_a_write_that_fails_is_a_typed_error_and_leaves_nothing(tmp_path: Path, layout: str) -> None:
    big(tmp_path / "ours")
    code, message = _convert_with_files_of(1 << 20, tmp_path / "ours", tmp_path / "plain", layout)
    assert code == 3, message
    assert "StorageError" in message
    assert not (tmp_path / "plain").exists()
    (tmp_path / "kept").mkdir(mode=0o750)
    assert _convert_with_files_of(1 << 20, tmp_path / "ours", tmp_path / "kept", layout)[0] == 3
    assert not list((tmp_path / "kept").iterdir())


_IN_SMALL_FILE_SYSTEM = """
mount -t tmpfs -o size=4m,mode=750 tmpfs "$1" || exit 77
"$2" -m torchrec_embcache convert "$3" "$1/plain" --to $4
echo "status $?" && ls "$1"
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["npy", "safetensors", "torchrec-dcp"])
def test_full_file_system_fails_a_conversion_with_an_error(tmp_path: Path, layout: str) -> None:
    """The command ends with an exit status, not by a signal."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed, so no small file system can be mounted")
    big(tmp_path / "ours")
    (tmp_path / "small").mkdir(mode=0o750)
    spaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    to = f"{layout} --rows item=20000" if layout == "torchrec-dcp" else layout
    arguments = [str(tmp_path / "small"), sys.executable, str(tmp_path / "ours"), to]
    done = subprocess.run(
        [unshare, *spaces, "sh", "-c", _IN_SMALL_FILE_SYSTEM, "sh", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in (1, 77) and "status" not in done.stdout:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert f"status {128 + signal.SIGBUS}" not in done.stdout
    assert done.stdout.split() == ["status", "3"], done.stderr
    assert "StorageError" in done.stderr


OPTIONS = {
    "--module": "tower",
    "--optimizer": "sgd",
    "--step": "7",
    "--buckets": "9",
    "--rename": "item=user",
    "--skip": "sum",
    "--model-key": "model",
    "--optimizer-key": "adam",
    "--rows": "item=9",
    "--sequence": "0",
}
USED = {
    ("embcache", "npy"): set(),
    ("embcache", "safetensors"): set(),
    ("embcache", "serving"): set(),
    ("embcache", "torchrec-dcp"): {"--rename", "--skip", "--model-key", "--optimizer-key", "--rows", "--sequence"},
    ("npy", "embcache"): {"--module", "--optimizer", "--step", "--buckets", "--rename", "--skip"},
}


@pytest.mark.parametrize(("source", "target"), USED)
def test_an_option_that_a_conversion_does_not_use_is_refused(tmp_path, capsys, source, target):
    given = npy(tmp_path / "npy") if source == "npy" else tmp_path / "ckpt"
    if source == "embcache":
        save(given)
    needed = ("--rows", "item=99999") if target == "torchrec-dcp" else ()
    for option, value in OPTIONS.items():
        if option in USED[source, target]:
            continue
        code, found = run(capsys, "convert", given, tmp_path / "to", "--to", target, *needed, option, value)
        assert (code, found["error"]["type"]) == (3, "ConfigError"), option
        assert found["error"]["message"].startswith(f"{option}: a conversion "), option
        assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(("option", "has"), [(("--rename", "itme=user"), "item"), (("--skip", "summ"), "sum")])
def test_a_name_of_an_option_that_is_not_there_is_refused(tmp_path, capsys, option, has):
    source = npy(tmp_path / "npy", sum=np.ones(3, np.float32))
    kind, message = refused(capsys, source, tmp_path / "ckpt", *option)
    name = option[1].partition("=")[0]
    assert (kind, message) == ("InputError", f"{option[0]} {name}: {source} has {has}")
    code, _ = run(capsys, "convert", source, tmp_path / "ckpt", "--rename", "item=user", "--skip", "sum")
    assert code == 0
    dcp = ("--to", "torchrec-dcp", "--rows", "user=9", *option)
    code, found = run(capsys, "convert", tmp_path / "ckpt", tmp_path / "dcp", *dcp)
    assert (code, found["error"]["type"]) == (3, "InputError")
    assert f"{option[0]} {name}: the checkpoint has" in found["error"]["message"]
