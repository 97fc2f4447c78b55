"""Compiles every launch of the Triton kernels for one GPU generation, without a driver, and prints facts of the code as JSON.

test_triton_compiled.py runs it as a separate program, because kernels are declared either for the interpreter or for a compiler.
The launches are made by `launch`, for small tensors on the CPU. Triton compiles each with the types, constants and options of the
launch, as on such a GPU.

By default each batch has one kind of backward per kernel, in rotation, so that the batches of a generation cover every pair of
kernel and kind. With `EMBCACHE_EVERY_LAUNCH=1` each batch has all of them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.runtime.driver import driver

from torchrec_embcache._device.tier import DeviceTier, TorchRowMover
from torchrec_embcache._kernels.triton import launch

CUOBJDUMP = Path(nvidia).parent / "bin" / "cuobjdump"
KINDS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "ftrl", "lamb"]
#: Optimizer state besides the weights: number of vector slots, and True for a scalar slot.
SLOTS = [(0, False), (1, False), (0, True), (2, False), (1, True)]
ARITHMETIC = re.compile(r"\b((?:add|sub|mul|div|fma|mad|sqrt|rsqrt|rcp|ex2|lg2|sin|cos|tanh)\.[a-z0-9.]*f32)\b")
MOVES = re.compile(r"\b((?:ld|st)\.global[a-z0-9.:_]*)\b")
USED = re.compile(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)")
FEATURES, OCCURRENCES = 2, 5
#: Weighted, averaged and summed bags, and sequences. `launch` compiles the first two identically.
BACKWARDS = [[(True, True), (False, True)], [(False, False)], [None]]


class Generation:
    """A stand-in for the Triton driver, as far as compilation queries it."""

    def __init__(self, generation: int) -> None:
        self._target = GPUTarget("cuda", generation, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Compiling:
    """Replaces a kernel in `launch`: compiles and records each launch, and runs nothing."""

    def __init__(self, kernel: triton.JITFunction, kept: list[tuple[str, dict[str, object], object]]) -> None:
        self._kernel, self._kept = kernel, kept

    def __getitem__(self, grid):
        def compile_and_keep(*arguments, **options) -> None:
            made = self._kernel.warmup(*arguments, grid=grid, **options)
            self._kept.append((self._kernel.__name__, options, made))

        return compile_and_keep


class Batch:
    """Zero-filled arguments of `launch` for two features of `dim` columns.

    If `ragged`, output rows are unaligned because of a table of another width, the caller's tensors start 4 bytes past an aligned
    address, and the batch has one bag, which Triton turns into a constant.
    """

    def __init__(self, dim: int, *, ragged: bool) -> None:
        self.dim, self.ragged = dim, ragged
        self.bags, self.columns = (1, FEATURES * dim + 3) if ragged else (3, FEATURES * dim)
        self.members, self.slots = self.integers(FEATURES), self.integers(OCCURRENCES)
        self.features = torch.zeros(4 * FEATURES, dtype=torch.int64)

    def integers(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def floats(self, *shape: int) -> Tensor:
        """A float32 tensor of the caller."""
        begin = int(self.ragged)
        return torch.zeros(begin + int(np.prod(shape)))[begin:].view(shape)

    def of_bags(self, *, weighted: bool) -> launch.DeviceBags:
        aligned = 4 if self.dim % 4 == 0 and not self.ragged else 1
        offsets = self.integers(FEATURES * self.bags + 1)
        return launch.DeviceBags(
            offsets, self.floats(OCCURRENCES) if weighted else None, self.bags, self.columns, aligned
        )


def launch_lookups(batch: Batch) -> None:
    """Launches each forward, and the gradient of weights."""
    given = batch.dim, batch.members, batch.features, batch.slots
    for weighted in (True, False):
        launch.pool_rows(*given, batch.of_bags(weighted=weighted), torch.zeros(batch.bags, batch.columns))
    grad, bags = batch.floats(batch.bags, batch.columns), batch.of_bags(weighted=True)
    launch.fill_weight_gradients(*given, bags, grad, torch.zeros(OCCURRENCES))
    starts, out = batch.integers(FEATURES + 1), torch.zeros(OCCURRENCES, batch.dim)
    launch.read_sequence(batch.dim, batch.features, batch.slots, starts, OCCURRENCES, out)


def launch_backwards(batch: Batch, number: int) -> None:
    """Launches the backward of weighted, averaged and summed bags, of sequences, and of partial sums, for every optimizer.

    Each optimizer gets one kind of backward, selected by the batch number, or all of them.
    """
    grad = batch.floats(batch.bags, batch.columns)
    # Gradients of partial sums are compiled like those of sequences, if the latter are aligned.
    found = [
        [
            launch.find_gradients(batch.features, batch.of_bags(weighted=bags[0]), OCCURRENCES, grad, bags[1])
            if bags
            else launch.DeviceGradients(batch.floats(OCCURRENCES, batch.dim))
            for bags in alike
        ]
        for alike in BACKWARDS
    ]
    starts = batch.integers(4)
    rows = launch.DistinctRows(batch.integers(3), batch.integers(3), starts, batch.integers(OCCURRENCES))
    every = os.environ.get("EMBCACHE_EVERY_LAUNCH") == "1"
    for turn, kind in enumerate([None, *KINDS], number):
        for gradients in chain.from_iterable(found if every else [found[turn % len(found)]]):
            if kind is None:
                launch.sum_gradients(
                    batch.dim, launch.OccurrenceRanges(starts[:-1], starts[1:]), rows.occurrences, gradients
                )
            else:
                tiers, numbers = torch.zeros(4, dtype=torch.int64), torch.zeros(9)
                launch.update_rows(kind, batch.dim, tiers, numbers, rows, gradients, count=3)


def launch_moves(batch: Batch) -> None:
    """Launches the row moves for all `SLOTS` if rows have 64 columns, else for the last two."""
    for vector_slots, scalar_slot in SLOTS if batch.dim == 64 else SLOTS[-2:]:
        tier = DeviceTier(batch.dim, vector_slots, scalar_slot, 4, torch.device("cpu"), TorchRowMover())
        slots = np.zeros(1 if batch.ragged else 3, np.int64)
        launch.scatter_rows(tier, slots, *launch.gather_rows(tier, slots))


def facts_of(name: str, given: dict[str, object], made) -> dict[str, object]:
    """Facts of the machine code of a launch of the kernel `name`, with `given` constants and options.

    `spilled` is the number of bytes per thread in local memory. The launch selects the assembler and its options.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = USED.search(said)
    assert used is not None, said
    registers, *memory = map(int, used.groups())
    ptx = made.asm["ptx"]
    return {
        "kernel": given.get("KIND", name),
        **given,
        "registers": registers,
        "spilled": sum(memory),
        "arithmetic": sorted(set(ARITHMETIC.findall(ptx))),
        "moves": sorted(set(MOVES.findall(ptx))),
        "atomics": sorted(set(re.findall(r"\b(?:atom|red)\.[a-z0-9.]+", ptx))),
    }


def main(generation: int, dims: list[int], ragged: list[int]) -> None:
    """Prints the facts of each launch for rows of `dims` floats, and for ragged batches of rows of `ragged` floats."""
    driver.set_active(Generation(generation))
    kept: list[tuple[str, dict[str, object], object]] = []
    kernels = {name: kernel for name, kernel in vars(launch).items() if isinstance(kernel, triton.JITFunction)}
    for name, kernel in kernels.items():
        setattr(launch, name, Compiling(kernel, kept))
    found = []
    for number, (dim, is_ragged) in enumerate([*((dim, False) for dim in dims), *((dim, True) for dim in ragged)]):
        batch = Batch(dim, ragged=is_ragged)
        launch_lookups(batch)
        launch_backwards(batch, number)
        launch_moves(batch)
        assert {name for name, _, _ in kept} == set(kernels), "each kernel of `launch` is launched"
        # Identical launches are compiled once.
        once = {id(made): (name, given, made) for name, given, made in kept}
        place = {"generation": generation, "dim": dim, "ragged": is_ragged}
        found += [{**place, **facts_of(*each)} for each in once.values()]
        kept.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
