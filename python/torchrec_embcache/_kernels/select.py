"""Selects the kernels of lookups and of row moves in device tiers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType

import torch

from torchrec_embcache._device.tier import DeviceTier, RowMover, TorchRowMover
from torchrec_embcache.exceptions import ConfigError
from torchrec_embcache.optimizers import OptimizerSpec

from .core import CoreBackend, KernelBackend, KernelTable, TorchBackend

__all__ = ["make_backend", "make_tier"]


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _select_kernels(device: torch.device, name: str | None) -> str:
    """Returns `name`, or else the value of `EMBCACHE_KERNELS`, or else the default kernels of the device."""
    name = name or os.environ.get("EMBCACHE_KERNELS") or _default_kernels(device)
    if name not in ("core", "triton", "torch"):
        raise ConfigError(f"EMBCACHE_KERNELS={name!r} is not known: use 'core', 'triton' or 'torch', or unset it")
    return name


def _default_kernels(device: torch.device) -> str:
    if device.type == "cpu":
        return "core"
    return "triton" if device.type == "cuda" and _has_triton() else "torch"


def _load_triton_backend(device: torch.device) -> ModuleType:
    """Returns the module with Triton's kernels. Raises `ConfigError` if they cannot run."""
    if not _has_triton():
        raise ConfigError(
            "the kernels 'triton' need triton, which is not installed: pip install triton, or use 'torch'"
        )
    # Imported lazily: triton takes a second to import and is optional.
    from . import triton_backend

    if device.type == "cpu" and not triton_backend.IS_INTERPRETED:
        raise ConfigError(
            "the kernels 'triton' run on the CPU in Triton's interpreter alone, which is for tests: set TRITON_INTERPRET=1 before "
            "Python starts, or use 'core'"
        )
    if device.type != "cpu" and triton_backend.IS_INTERPRETED:
        raise ConfigError(
            f"TRITON_INTERPRET=1 is set, and Triton's interpreter cannot read the memory of {device}: unset it before Python "
            "starts, or use 'torch'"
        )
    return triton_backend


def make_tier(dim: int, spec: OptimizerSpec, rows: int, device: torch.device) -> DeviceTier:
    """Creates a table's device tier of `rows` rows of width `dim`. Triton moves its rows if Triton's kernels are selected."""
    kernels = _select_kernels(device, None)
    if kernels == "triton" and rows >= 1 << 31:
        raise ConfigError(
            f"TierBudgets.device_bytes has room for {rows} rows of {dim} floats and Triton's kernels take fewer than 2^31: lower "
            "it, or set EMBCACHE_KERNELS=torch"
        )
    moves: RowMover = _load_triton_backend(device).TritonRowMover() if kernels == "triton" else TorchRowMover(kernels)
    return DeviceTier(dim, spec.vector_slots, spec.scalar_slot(), rows, device, moves)


def make_backend(
    tables: Sequence[KernelTable], feature_tables: Sequence[int], device: torch.device, name: str | None
) -> KernelBackend:
    """Creates the backend `name`: "core", "triton" or "torch".

    None selects the value of `EMBCACHE_KERNELS`. If that is unset, it selects "core" on the CPU, "triton" on CUDA if triton is
    installed, and "torch" otherwise. Raises `ConfigError` if the backend is unknown or cannot run these tables.
    """
    name = _select_kernels(device, name)
    if name == "core":
        if device.type != "cpu":
            raise ConfigError(f"the kernels 'core' run on the CPU and the device is {device}: use 'triton' or 'torch'")
        return CoreBackend(tables, feature_tables, device)
    if any(table._tier is None for table in tables):
        raise ConfigError(f"the kernels {name!r} need a device tier: set TierBudgets.device_bytes")
    if name == "torch":
        return TorchBackend(tables, feature_tables, device)
    backend: KernelBackend = _load_triton_backend(device).TritonBackend(tables, feature_tables, device)
    return backend
