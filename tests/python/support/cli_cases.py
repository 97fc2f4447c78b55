"""Runs the `embcache` command in this process, and saves and damages small checkpoints for it."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from saver_cases import make_bag, train
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main


def save(path: Path, **changes: Any) -> Any:
    bag = make_bag(**changes)
    train(bag)
    Saver(0).save(nn.Sequential(bag), str(path))
    return bag


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main([str(argument) for argument in arguments] + ["--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def flip(path: Path) -> None:
    file = max(path.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    # The flip is not in the header but in the columns.
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + (len(data) - header) // 8] ^= 1
    file.write_bytes(data)


def loaded(path: Path, **changes: Any) -> Any:
    bag = make_bag(**changes)
    Saver(0).load(nn.Sequential(bag), str(path))
    return bag


def refused(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *more: str) -> tuple[str, str]:
    """The type and the message of the error of a conversion that publishes nothing."""
    code, found = run(capsys, "convert", source, target, *more)
    assert code == 3, found
    assert not list(target.glob("LATEST"))
    assert not list(target.rglob("*.safetensors"))
    return found["error"]["type"], found["error"]["message"]
