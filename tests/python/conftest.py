"""Fixtures that several test files share."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# The same as in the Makefile. Without byte code every process that is started would compile torch again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Triton reads this at import. Except in `make test-cuda`, its kernels run in its interpreter, on CPU tensors.
if os.environ.get("EMBCACHE_TEST_CUDA") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
# Background processes of a shell ignore Ctrl-C, and child processes inherit that. Some tests end children by Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch.distributed as dist  # noqa: E402

from processes import World  # noqa: E402
from tables import AMPLE  # noqa: E402
from torchrec_embcache import TierBudgets  # noqa: E402

#: The slowest files. They run first, so that parallel test processes finish at about the same time.
LONGEST = [
    "test_examples.py",
    "test_triton_compiled.py",
    "test_interrupted_saves.py",
    "test_first_use.py",
    "test_documents.py",
    "test_wheel.py",
]
#: The marker of all tests of a folder. `make test` runs the tests without a marker of these.
MARKERS = {"robustness": "slow", "soak": "slow", "docs": "docs"}
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # -m selects by these markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of slow folders and of docs, and moves the tests of the slowest files to the front."""
    for item in items:
        if item.path.is_relative_to(HERE):
            marker = MARKERS.get(item.path.relative_to(HERE).parts[0])
            if marker is not None:
                item.add_marker(marker)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """Excludes the objects created by imports (torch has a million) from garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["in_place", "device_tier", "torch_kernels", "triton_kernels"])
def backend(request, monkeypatch):
    """Table settings for each kernel backend on the CPU."""
    if request.param in ("torch_kernels", "triton_kernels"):
        monkeypatch.setenv("EMBCACHE_KERNELS", request.param.removesuffix("_kernels"))
    if request.param == "in_place":
        return {"tiers": AMPLE}
    return {"tiers": TierBudgets(host_bytes="16MiB", device_bytes="64KiB")}


@pytest.fixture(scope="module")
def one_thread_of_torch() -> Iterator[None]:
    """Limits torch to one thread."""
    import torch  # after the environment is set above

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    """Two ranks in processes, which start at the first use, because importing torchrec takes seconds."""
    world = World(2)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[World]:
    """Three ranks; see `two_ranks`."""
    world = World(3)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[World]:
    """Four ranks; see `two_ranks`."""
    world = World(4)
    yield world
    world.stop()


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """Destroys a default process group that a test initialized and left to the tests after it."""
    had_group = dist.is_initialized()
    yield
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()


@pytest.fixture
def small_disk() -> Iterator[str]:
    """Mount point of a file system of 6 MiB. Skips the test if mounting is not permitted."""
    with tempfile.TemporaryDirectory() as place:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=6m,mode=700", "tmpfs", place], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {made.stderr.decode().strip()}")
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", place], check=True)
