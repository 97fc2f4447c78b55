"""Fixtures that several test files share."""

import pytest

from tables import AMPLE
from torchrec_embcache import TierBudgets


@pytest.fixture(params=["in_place", "device_tier", "torch_kernels"])
def backend(request, monkeypatch):
    """Settings of a table, for each way that kernels can run on the CPU."""
    if request.param == "torch_kernels":
        monkeypatch.setenv("EMBCACHE_KERNELS", "torch")
    if request.param == "in_place":
        return {"tiers": AMPLE}
    return {"tiers": TierBudgets(host_bytes="16MiB", device_bytes="64KiB")}
