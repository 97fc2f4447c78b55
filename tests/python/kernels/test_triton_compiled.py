"""The machine code of Triton's kernels, compiled without a GPU with the flags of `launch`."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import product

import pytest

from project_paths import SUPPORT

pytestmark = pytest.mark.slow  # compiles every launch of the kernels

#: The widths that are compiled for each generation: one for each block size, and odd ones. 1025 and 2100 are wider than the widest
#: block. All for both would take twice as long.
DIMS = {80: [16, 64, 256, 1024, 37, 2100], 90: [32, 64, 128, 512, 33, 1025, 2100]}
#: Widths of batches that are ragged (see `compiled_kernels.Batch`). Others are not crossed with it, which would take too long.
RAGGED = [64, 2100]
#: If true, a batch has every kind of backward of every kernel. Otherwise it has one kind of each in turn, so that each pair of them
#: is compiled.
EVERY_LAUNCH = os.environ.get("EMBCACHE_EVERY_LAUNCH") == "1"
#: IEEE operations, each of which rounds once.
EXACT = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
#: Kernels that only copy.
COPIES = {"sequence_rows", "move_rows"}
OPTIMIZERS = {"sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "ftrl", "lamb"}
#: POOLED and SCALED of a backward: only gradients of bags are scaled.
BACKWARDS = {(True, True), (True, False), (False, False)}
#: PARTS and HAS_SCALAR of rows, as optimizers have them. At widths other than 64 only the last two are compiled.
ROWS = [(1, False), (2, False), (1, True), (3, False), (2, True)]


@pytest.fixture(scope="module")
def launches():
    """The facts of all launches. Each generation is compiled by a program of its own."""
    program = SUPPORT / "compiled_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    running = [
        subprocess.Popen(
            [sys.executable, str(program), str(generation), json.dumps(dims), json.dumps(RAGGED)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for generation, dims in DIMS.items()
    ]
    found = []
    for process in running:
        said, errors = process.communicate()
        assert process.returncode == 0, errors
        found += json.loads(said.splitlines()[-1])
    return found


def place(facts):
    """Returns the values that identify the launch."""
    flags = {name: facts[name] for name in facts if name.isupper() and name != "KIND"}
    return facts["kernel"], f"sm_{facts['generation']}", facts["dim"], "ragged" if facts["ragged"] else "", str(flags)


@pytest.mark.slow
def test_every_combination_of_flags_that_is_launched_is_compiled(launches):
    flags = {
        **dict.fromkeys((*OPTIMIZERS, "gradient_sums"), ("POOLED", "SCALED")),
        "gradient_places": ("SCALED", "WEIGHTED"),
        "pooled_rows": ("WEIGHTED",),
        "move_rows": ("PARTS", "HAS_SCALAR", "INTO_SLOTS"),
    }
    found = defaultdict(set)
    for facts in launches:
        kernel = facts["kernel"]
        batch = facts["generation"], facts["dim"], facts["ragged"]
        found[batch].add((kernel, *(facts[name] for name in flags.get(kernel, ()))))
    aligned = {(generation, dim, False) for generation, dims in DIMS.items() for dim in dims}
    assert set(found) == aligned | set(product(DIMS, RAGGED, [True]))
    backwards = set(product((*OPTIMIZERS, "gradient_sums"), BACKWARDS))
    covered = defaultdict(set)
    for batch, of_batch in found.items():
        generation, dim, ragged = batch
        rows = ROWS if dim == 64 else ROWS[-2:]
        of_backwards = {
            (kernel, tuple(given)) for kernel, *given in of_batch if kernel in (*OPTIMIZERS, "gradient_sums")
        }
        covered[f"sm_{generation}"] |= of_backwards
        covered["ragged" if ragged else "aligned"] |= of_backwards
        if EVERY_LAUNCH:
            assert of_backwards == backwards, batch
        else:  # each kernel once
            assert sorted(kernel for kernel, _ in of_backwards) == sorted((*OPTIMIZERS, "gradient_sums")), batch
        assert of_batch - {(kernel, *given) for kernel, given in of_backwards} == {
            *(("gradient_places", *given) for given in ((True, True), (True, False), (False, False))),
            *(("pooled_rows", weighted) for weighted in (True, False)),
            *(("move_rows", *of_rows, into_slots) for of_rows in rows for into_slots in (True, False)),
            ("sequence_rows",),
            ("weight_gradients",),
        }, batch
    assert all(of_these == backwards for of_these in covered.values())


def test_every_operation_rounds_as_ieee_says_and_none_is_fused(launches):
    for facts in launches:
        assert set(facts["arithmetic"]) <= EXACT, place(facts)
        assert not facts["atomics"], place(facts)
        assert facts.get("enable_fp_fusion") is False, place(facts)


def test_the_operations_of_each_kernel_are_those_of_its_formula(launches):
    arithmetic = defaultdict(set)
    for facts in launches:
        arithmetic[facts["kernel"]] |= set(facts["arithmetic"])
    assert {kernel for kernel, found in arithmetic.items() if not found} == COPIES
    roots = {kernel for kernel, found in arithmetic.items() if "sqrt.rn.f32" in found}
    assert roots == OPTIMIZERS - {"sgd"}
    divisions = {kernel for kernel, found in arithmetic.items() if "div.rn.f32" in found}
    assert divisions == {*roots, "pooled_rows", "weight_gradients", "gradient_places"}


def test_no_kernel_spills_registers(launches):
    assert {place(facts): facts["spilled"] for facts in launches if facts["spilled"]} == {}
    assert max(facts["registers"] for facts in launches) <= 128


def test_rows_are_moved_many_bytes_at_a_time(launches):
    for facts in launches:
        kernel = facts["kernel"]
        if kernel == "gradient_places" or facts["dim"] % 4 or facts["ragged"]:
            continue
        # A program has one row, whose floats are shared out among its threads, but those that copy have several rows.
        floats = 4 if kernel in COPIES else min(4, facts["BLOCK"] // (32 * facts["num_warps"]))
        wide = f"v{floats}.b32" if floats > 1 else "b32"
        assert f"ld.global.{wide}" in facts["moves"], place(facts)
        if kernel != "weight_gradients":  # which stores one float an occurrence
            assert f"st.global.{wide}" in facts["moves"], place(facts)
