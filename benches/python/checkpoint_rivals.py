"""Rivals of saving and loading a table. The same columns as torch tensors are saved and synced, or loaded into existing tensors
with a cold page cache.

A rival is created from (ids, R) for R rows of D = 64 columns. It ignores the ids. A round returns bytes of tensors per second.
"""

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rivals import DIM, Rival, Round
from served import ROOT

__all__ = ["CHECKPOINT_RIVALS"]

Tensors = dict[str, torch.Tensor]
Save = Callable[[Tensors, Path], None]


@cache
def tensors(rows: int) -> Tensors:
    """Returns a table under rowwise Adagrad: the weights, the sum, and the row metadata of this project, 288 bytes per row."""
    random = torch.Generator().manual_seed(3)
    return {
        "id": torch.randint(-(1 << 62), 1 << 62, (rows,), generator=random),
        "last_step": torch.randint(0, 1000, (rows,), generator=random),
        "weight": torch.rand(rows, DIM, generator=random),
        "sum": torch.rand(rows, generator=random),
        "count": torch.randint(0, 100, (rows,), generator=random, dtype=torch.int32),
        "score": torch.rand(rows, generator=random),
        "modified_epoch": torch.zeros(rows, dtype=torch.int32),
    }


def bytes_of(state: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


@contextmanager
def folder() -> Iterator[Path]:
    """Creates a folder on the disk under test, and removes it at the end of the block."""
    parent = Path(os.environ.get("EMBCACHE_BENCH_DIR") or ROOT / "target")
    path = Path(tempfile.mkdtemp(prefix="bench-rival-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def sync(path: Path, forget: bool = False) -> None:
    """Makes a file durable. With `forget`, also removes it from the page cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        if forget:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def save_with_dcp(threads: int) -> Save:
    def save(state: Tensors, path: Path) -> None:
        # DCP syncs its own files.
        writer = FileSystemWriter(path, thread_count=threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about a single process
            dcp_save(dict(state), storage_writer=writer)

    return save


def save_with_torch(state: Tensors, path: Path) -> None:
    torch.save(state, path / "table.pt")
    sync(path / "table.pt")


def save_with_safetensors(state: Tensors, path: Path) -> None:
    save_file(state, path / "table.safetensors")
    sync(path / "table.safetensors")


def saved(save: Save) -> Rival:
    def make(_ids: torch.Tensor, rows: int) -> Round:
        state = tensors(rows)

        def run() -> float:
            with folder() as path:
                begin = time.perf_counter()
                save(state, path)
                return bytes_of(state) / (time.perf_counter() - begin)

        return run

    return make


def loaded_by_dcp(_ids: torch.Tensor, rows: int) -> Round:
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors(rows).items()}

    def run() -> float:
        with folder() as path:
            save_with_dcp(1)(tensors(rows), path)
            for file in path.rglob("*"):
                if file.is_file():
                    sync(file, forget=True)
            begin = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp_load(dict(state), storage_reader=FileSystemReader(path))
            return bytes_of(state) / (time.perf_counter() - begin)

    return run


# The rivals of each bench.
CHECKPOINT_RIVALS: dict[str, dict[str, Rival]] = {
    "save_full": {
        "dcp.save": saved(save_with_dcp(1)),
        "dcp.save (4 threads)": saved(save_with_dcp(4)),
        "torch.save": saved(save_with_torch),
        "safetensors": saved(save_with_safetensors),
    },
    "load_full": {"dcp.load": loaded_by_dcp},
}
