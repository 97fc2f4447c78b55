"""What is in the machine code of Triton's kernels, which is compiled here without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DIMS = [37, 64, 1024, 8200]
#: IEEE operations, each of which rounds once.
EXACT = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
#: Kernels that only copy.
COPIES = {"sequence_rows", "gather", "scatter"}


@pytest.fixture(scope="module")
def kernels():
    """The facts of all kernels, by (kernel, generation, dim, aligned)."""
    program = Path(__file__).parent / "compiled_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(program), *map(str, DIMS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {(facts["kernel"], facts["generation"], facts["dim"], facts["aligned"]): facts for facts in found}


def test_every_operation_rounds_as_ieee_says_and_none_is_fused(kernels):
    for place, facts in kernels.items():
        assert set(facts["arithmetic"]) <= EXACT, place
        assert not facts["atomics"], place
        if facts["aligned"]:
            assert bool(facts["arithmetic"]) == (facts["kernel"] not in COPIES), place


def test_the_operations_of_each_optimizer_are_those_of_its_formula(kernels):
    roots = {name for (name, *_), facts in kernels.items() if "sqrt.rn.f32" in facts["arithmetic"]}
    assert roots == {"adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "ftrl", "lamb"}
    divisions = {name for (name, *_), facts in kernels.items() if "div.rn.f32" in facts["arithmetic"]}
    assert divisions == {*roots, "pooled_rows", "weight_gradients", "gradient_places"}


def test_no_kernel_spills_registers(kernels):
    assert {place: facts["spilled"] for place, facts in kernels.items() if facts["spilled"]} == {}
    assert max(facts["registers"] for facts in kernels.values()) <= 128


def test_rows_are_moved_many_bytes_at_a_time(kernels):
    for (name, generation, dim, aligned), facts in kernels.items():
        if name == "gradient_places" or dim % 4 or not aligned:
            continue
        # A row of 64 floats is that of one warp, two floats a thread, unless a program has several.
        wide = "v2" if dim == 64 and name not in COPIES else "v4"
        assert f"ld.global.{wide}.b32" in facts["moves"], (name, generation, dim)
        if name != "weight_gradients":  # which stores one float an occurrence
            assert f"st.global.{wide}.b32" in facts["moves"], (name, generation, dim)
