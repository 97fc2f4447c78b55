"""Fixtures that several test files share."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

# The same as in the Makefile. Without byte code every process that is started would compile torch again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Triton decides when it is imported. Its kernels run in its interpreter, on CPU tensors, but for `make test-cuda`.
if os.environ.get("EMBCACHE_TEST_CUDA") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
# A shell makes background processes ignore Ctrl-C, and the processes that tests start inherit that. Some tests end these by Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tables import AMPLE  # noqa: E402
from torchrec_embcache import TierBudgets  # noqa: E402
from world import World  # noqa: E402

#: The files that take longest. Where processes share the files, these come first, so that no process is left with one at the end.
LONGEST = [
    "test_examples.py",
    "test_triton_compiled.py",
    "test_interrupted_saves.py",
    "test_newcomer.py",
    "test_documents.py",
    "test_wheel.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first, and leave the others in their order."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """Let collections of garbage look only at what tests make. Torch and what needs it have a million objects, which stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["in_place", "device_tier", "torch_kernels", "triton_kernels"])
def backend(request, monkeypatch):
    """The settings of a table, for each way in which kernels run on the CPU."""
    if request.param in ("torch_kernels", "triton_kernels"):
        monkeypatch.setenv("EMBCACHE_KERNELS", request.param.removesuffix("_kernels"))
    if request.param == "in_place":
        return {"tiers": AMPLE}
    return {"tiers": TierBudgets(host_bytes="16MiB", device_bytes="64KiB")}


@pytest.fixture(scope="module")
def one_thread_of_torch() -> Iterator[None]:
    """One thread of torch, for tests that have no work for more."""
    import torch  # not before what is set above

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    """Two processes. The first test that runs something on them starts them, because importing torchrec takes each of them
    seconds.
    """
    world = World(2)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[World]:
    """Three processes; see `two_ranks`."""
    world = World(3)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[World]:
    """Four processes; see `two_ranks`."""
    world = World(4)
    yield world
    world.stop()


@pytest.fixture
def small_disk() -> Iterator[str]:
    """A file system of 6 MiB. Skips the test where none may be mounted."""
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
