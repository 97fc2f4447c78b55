"""A lookup makes one native call per phase, for any number of tables and features."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_embcache import TierBudgets, initializers, optimizers
from torchrec_embcache._lookup.group import LookupGroup
from torchrec_embcache.table.cache_table import CacheTable

PHASES = ("plan", "wait", "forward_pooled", "backward_pooled")


def native_calls(step: Any) -> Counter[str]:
    """How often `step()` calls each method of the core's plans and lookups."""
    calls: Counter[str] = Counter()

    def note(_frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and type(getattr(function, "__self__", None)).__module__ == "torchrec_embcache._native":
            calls[function.__name__] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("tables", [1, 5])
def test_a_step_is_one_call_a_phase_for_all_tables(tables):
    made = [
        CacheTable(
            name=f"t{number}",
            dim=4,
            tiers=TierBudgets(host_bytes="1MiB"),
            initializer=initializers.Uniform(-1.0, 1.0),
            optimizer=optimizers.SGD(lr=0.1),
        )
        for number in range(tables)
    ]
    features = [number for number in range(tables) for _ in range(2)]
    group = LookupGroup(list(made), features, lambda: [{"lr": 0.1}] * tables)
    anchor = torch.zeros(0, requires_grad=True)
    ids = np.arange(6 * len(features))
    offsets = np.arange(0, len(ids) + 1, 2)

    def step() -> None:
        out = group.pooled(ids, offsets, [False] * len(features), train=True, anchor=anchor)
        out.sum().backward()

    step()
    torch.autograd.set_multithreading_enabled(False)  # the profile sees this thread only
    try:
        calls = native_calls(step)
    finally:
        torch.autograd.set_multithreading_enabled(True)
    assert {phase: calls[phase] for phase in PHASES} == dict.fromkeys(PHASES, 1)
