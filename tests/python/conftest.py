"""Fixtures that several test files share."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# As in Makefile: every process that is started would compile torch again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell lets what it starts in the background ignore Ctrl-C, and processes that tests start, to end them by it, inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tables import AMPLE  # noqa: E402
from torchrec_embcache import TierBudgets  # noqa: E402
from world import World  # noqa: E402


@pytest.fixture(params=["in_place", "device_tier", "torch_kernels"])
def backend(request, monkeypatch):
    """Settings of a table, for each way that kernels can run on the CPU."""
    if request.param == "torch_kernels":
        monkeypatch.setenv("EMBCACHE_KERNELS", "torch")
    if request.param == "in_place":
        return {"tiers": AMPLE}
    return {"tiers": TierBudgets(host_bytes="16MiB", device_bytes="64KiB")}


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    """Two processes, started by the first test that runs something on them: importing torchrec takes seconds a process."""
    world = World(2)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[World]:
    """Three processes, as `two_ranks`."""
    world = World(3)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[World]:
    """Four processes, as `two_ranks`."""
    world = World(4)
    yield world
    world.stop()
