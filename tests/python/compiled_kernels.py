"""Compiles Triton's kernels for GPUs of two generations, without a driver, and prints what is in them as JSON.

test_triton_compiled.py runs it as a program of its own, because kernels are declared either for the interpreter or for a compiler.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.compiler import ASTSource

from torchrec_embcache.triton_kernels import launch
from torchrec_embcache.triton_kernels.gradients import gradient_places, gradient_sums
from torchrec_embcache.triton_kernels.lookups import pooled_rows, sequence_rows, weight_gradients
from torchrec_embcache.triton_kernels.moves import move_rows
from torchrec_embcache.triton_kernels.updates import update_by_columns, update_by_rows

GENERATIONS = {80: "sm_80", 90: "sm_90a"}
PTXAS = Path(nvidia).parent / "bin" / "ptxas"
POINTERS = {"f": "*fp32", "i": "*i32", "l": "*i64"}
KINDS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "ftrl", "lamb"]
ARITHMETIC = re.compile(r"\b((?:add|sub|mul|div|fma|mad|sqrt|rsqrt|rcp|ex2|lg2|sin|cos|tanh)\.[a-z0-9.]*f32)\b")
MOVES = re.compile(r"\b((?:ld|st)\.global[a-z0-9.:_]*)\b")


def kernels(dim: int) -> list[tuple[str, object, str, dict[str, object], int]]:
    """Each kernel as it is launched for rows of `dim` floats: its name, its arguments' types, its constants, and its warps."""
    columns = launch.Columns(dim)
    warps = columns.options["num_warps"]
    every = {
        "D": dim, "BLOCK": columns.block, "BLOCKS": columns.blocks, "ROWS": columns.rows, "AT_ONCE": columns.at_once,
        "ALIGNED": 4 if dim % 4 == 0 else 1, "POOLED": True, "SCALED": True, "WEIGHTED": True,
    }  # fmt: skip
    moved = {**every, "PARTS": 3, "HAS_SCALAR": True}
    updates = [
        (
            kind,
            update_by_rows if kind in launch.BY_ROWS else update_by_columns,
            "lfiiiiflf",
            {**every, "KIND": kind},
            warps,
        )
        for kind in KINDS
    ]
    return [
        ("pooled_rows", pooled_rows, "iliiffnn", every, warps),
        ("sequence_rows", sequence_rows, "liif", every, 4),
        ("weight_gradients", weight_gradients, "iliiffnn", every, warps),
        ("gradient_places", gradient_places, "liflfnn", {**every, "BLOCK": 32}, 1),
        ("gradient_sums", gradient_sums, "iiiflff", every, warps),
        ("gather", move_rows, "liffn", {**moved, "INTO_SLOTS": False}, 4),
        ("scatter", move_rows, "liffn", {**moved, "INTO_SLOTS": True}, 4),
        *updates,
    ]


def compiled(
    kernel, types: str, constants: dict[str, object], warps: int, generation: int, *, aligned: bool = True
) -> str:
    """The PTX of a kernel, as Triton compiles it where tensors are `aligned` to 16 bytes.

    Where they are not, the numbers among the arguments are 1, of which Triton makes constants.
    """
    names = kernel.arg_names
    given = {name: kind for name, kind in zip(names, types, strict=False) if aligned or kind != "n"}
    ones = {} if aligned else {name: 1 for name, kind in zip(names, types, strict=False) if kind == "n"}
    source = ASTSource(
        fn=kernel,
        signature={name: POINTERS.get(given[name], "i32") if name in given else "constexpr" for name in names},
        constexprs={name: {**constants, **ones}[name] for name in names if name not in given},
        attrs={(place,): [["tt.divisibility", 16]] for place, kind in enumerate(types) if aligned and kind != "n"},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", generation, 32), options={**launch.EXACT, "num_warps": warps}
    )
    return made.asm["ptx"]


def assembled(ptx: str, generation: int) -> dict[str, int]:
    """Bytes that the assembler spills and keeps on the stack, and the registers of a thread."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [PTXAS, "-v", f"--gpu-name={GENERATIONS[generation]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spilled is not None, said
    assert registers is not None, said
    return {"spilled": sum(map(int, spilled.groups())), "registers": int(registers[1])}


def main(dims: list[int]) -> None:
    """Print what is known of each kernel for each width and generation."""
    found = []
    for generation, dim in itertools.product(GENERATIONS, dims):
        for name, kernel, types, constants, warps in kernels(dim):
            # The widest one is also compiled in the other way, without weights and for sequences.
            for aligned in (True, False) if dim == max(dims) else (True,):
                flags = {} if aligned else {"ALIGNED": 1, "POOLED": False, "SCALED": False, "WEIGHTED": False}
                ptx = compiled(kernel, types, {**constants, **flags}, warps, generation, aligned=aligned)
                facts = {
                    "kernel": name,
                    "generation": generation,
                    "dim": dim,
                    "aligned": aligned,
                    "arithmetic": sorted(set(ARITHMETIC.findall(ptx))),
                    "moves": sorted(set(MOVES.findall(ptx))),
                    "atomics": sorted(set(re.findall(r"\b(?:atom|red)\.[a-z0-9.]+", ptx))),
                }
                found.append({**facts, **assembled(ptx, generation)})
    print(json.dumps(found))


if __name__ == "__main__":
    main([int(dim) for dim in sys.argv[1:]])
