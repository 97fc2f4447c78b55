"""Compiles every launch of Triton's kernels for one generation of GPUs, without a driver, and prints what is in them as JSON.

test_triton_compiled.py runs it as a program of its own, because kernels are declared either for the interpreter or for a compiler.
The launches are those of `launch` itself, for small tensors on the CPU. Triton compiles each of them as it would on such a GPU:
types, constants and options are those that the launch gives.

By default each batch has one kind of backward for each kernel, in turn, so that the batches of a generation cover every pair of a
kernel and a kind. With `EMBCACHE_EVERY_LAUNCH=1` each batch has all of them.
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

from torchrec_embcache.device_tier import DeviceTier, TorchRowMover
from torchrec_embcache.triton_kernels import launch

CUOBJDUMP = Path(nvidia).parent / "bin" / "cuobjdump"
KINDS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "ftrl", "lamb"]
#: What an optimizer has beside the weights: vector slots, and whether there is a scalar slot.
SLOTS = [(0, False), (1, False), (0, True), (2, False), (1, True)]
ARITHMETIC = re.compile(r"\b((?:add|sub|mul|div|fma|mad|sqrt|rsqrt|rcp|ex2|lg2|sin|cos|tanh)\.[a-z0-9.]*f32)\b")
MOVES = re.compile(r"\b((?:ld|st)\.global[a-z0-9.:_]*)\b")
USED = re.compile(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)")
FEATURES, OCCURRENCES = 2, 5
#: Bags that are weighted, averaged and summed, and sequences. `launch` compiles the first two alike.
BACKWARDS = [[(True, True), (False, True)], [(False, False)], [None]]


class Generation:
    """What Triton asks of a driver before it compiles a launch."""

    def __init__(self, generation: int) -> None:
        self._target = GPUTarget("cuda", generation, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Compiling:
    """Is in the place of a kernel in `launch`: Triton compiles each of its launches, which is kept, and nothing runs."""

    def __init__(self, kernel: triton.JITFunction, kept: list[tuple[str, dict[str, object], object]]) -> None:
        self._kernel, self._kept = kernel, kept

    def __getitem__(self, grid):
        def compile_and_keep(*arguments, **options) -> None:
            made = self._kernel.warmup(*arguments, grid=grid, **options)
            self._kept.append((self._kernel.__name__, options, made))

        return compile_and_keep


class Batch:
    """Tensors as `launch` is given them, all of zeros, for two features of `dim` columns.

    Where it is `ragged`, a table of another width keeps rows of the output from being aligned, the caller's tensors begin 4 bytes
    after what is, and the batch has one bag, of which Triton makes a constant.
    """

    def __init__(self, dim: int, *, ragged: bool) -> None:
        self.dim, self.ragged = dim, ragged
        self.bags, self.columns = (1, FEATURES * dim + 3) if ragged else (3, FEATURES * dim)
        self.members, self.slots = self.integers(FEATURES), self.integers(OCCURRENCES)
        self.features = torch.zeros(4 * FEATURES, dtype=torch.int64)

    def integers(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def floats(self, *shape: int) -> Tensor:
        """Numbers of the caller."""
        begin = int(self.ragged)
        return torch.zeros(begin + int(np.prod(shape)))[begin:].view(shape)

    def of_bags(self, *, weighted: bool) -> launch.DeviceBags:
        aligned = 4 if self.dim % 4 == 0 and not self.ragged else 1
        offsets = self.integers(FEATURES * self.bags + 1)
        return launch.DeviceBags(
            offsets, self.floats(OCCURRENCES) if weighted else None, self.bags, self.columns, aligned
        )


def launch_lookups(batch: Batch) -> None:
    """Launch each forward, and the gradient of weights."""
    given = batch.dim, batch.members, batch.features, batch.slots
    for weighted in (True, False):
        launch.pool_rows(*given, batch.of_bags(weighted=weighted), torch.zeros(batch.bags, batch.columns))
    grad, bags = batch.floats(batch.bags, batch.columns), batch.of_bags(weighted=True)
    launch.fill_weight_gradients(*given, bags, grad, torch.zeros(OCCURRENCES))
    starts, out = batch.integers(FEATURES + 1), torch.zeros(OCCURRENCES, batch.dim)
    launch.read_sequence(batch.dim, batch.features, batch.slots, starts, OCCURRENCES, out)


def launch_backwards(batch: Batch, number: int) -> None:
    """Launch each backward: of weighted, averaged and summed bags, of sequences, and of sums of parts, by every optimizer.

    Of the kinds of a backward, an optimizer has that of its turn in the batch of this number, or all.
    """
    grad = batch.floats(batch.bags, batch.columns)
    # Those of sums of parts are compiled as those of sequences are, if the latter are aligned.
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
    """Launch the moves of rows of each kind where rows have 64 columns, else of rows with 2 more vectors, or 1 and a scalar."""
    for vector_slots, scalar_slot in SLOTS if batch.dim == 64 else SLOTS[-2:]:
        tier = DeviceTier(batch.dim, vector_slots, scalar_slot, 4, torch.device("cpu"), TorchRowMover())
        slots = np.zeros(1 if batch.ragged else 3, np.int64)
        launch.scatter_rows(tier, slots, *launch.gather_rows(tier, slots))


def facts_of(name: str, given: dict[str, object], made) -> dict[str, object]:
    """What is in the machine code of a launch of the kernel `name`, whose constants and options were `given`.

    `spilled`: bytes of a thread that lie in memory. The assembler is that of the launch, with its options.
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
    """Print what is known of each launch for rows of `dims` floats, and for ragged batches of rows of others."""
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
        # What several launches have in common is compiled once.
        once = {id(made): (name, given, made) for name, given, made in kept}
        place = {"generation": generation, "dim": dim, "ragged": is_ragged}
        found += [{**place, **facts_of(*each)} for each in once.values()]
        kept.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
