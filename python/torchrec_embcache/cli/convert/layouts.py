"""The formats that `convert` knows, in the order in which they are recognised."""

from pathlib import Path

from torchrec_embcache.exceptions import InputError

from .layout import CheckpointLayout
from .npy import NpyLayout
from .recis import RecisLayout
from .recsdk import RecsdkLayout
from .safetensors import SafetensorsLayout
from .torchrec import TorchrecLayout

__all__ = ["LAYOUTS", "detect_layout"]

LAYOUTS: dict[str, CheckpointLayout] = {
    layout.name: layout
    for layout in (TorchrecLayout(), RecsdkLayout(), NpyLayout(), RecisLayout(), SafetensorsLayout())
}


def detect_layout(path: Path) -> str:
    """Detects the layout of the directory `path`. Raises `InputError` if it is unknown."""
    if (path / "LATEST").is_file() or (path / "manifest.json").is_file():
        return "embcache"
    for name, layout in LAYOUTS.items():
        if any(next(path.glob(mark), None) for mark in layout.marks):
            return name
    raise InputError(f"{path} is in no layout that is known: name it with --from {', '.join(LAYOUTS)}")
