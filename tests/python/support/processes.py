"""Processes for tests: groups of ranks that run functions of test files, and children that can be killed."""

import contextlib
import gc
import importlib.util
import inspect
import os
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Children are forked from one process that has imported these modules, because the imports take seconds.
IMPORTED_ONCE = [
    "torchrec_embcache.distributed",
    "torchrec_embcache.checkpoint.saver",
    "torchrec_embcache.distributed.train_pipeline",
]
# Generous limits, which only end a hang.
COLLECTIVE_TIMEOUT_S = 600
ANSWER_TIMEOUT_S = 900
# After a rank has failed, the others may wait for it in a collective. Their errors would say no more.
REST_TIMEOUT_S = 20


@contextlib.contextmanager
def process_group(rank: int, size: int, store: str) -> Iterator[None]:
    """Initializes a gloo group of `size` ranks through the file `store`, with the environment variables of torchrun."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if dist.is_initialized():  # left over from a failed test
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def processes() -> Any:
    """The multiprocessing context."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


def _load(file: str) -> Any:
    name = Path(file).stem  # no two test files have the same name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _serve(rank: int, size: int, store: str, tasks: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as in conftest.py
    with process_group(rank, size, store):
        while (task := tasks.get()) is not None:
            file, name, args = task
            try:
                result, failure = getattr(_load(file), name)(rank, size, *args), None
            except BaseException:
                result, failure = None, traceback.format_exc()
            # torch names the next group by the number of groups that this rank has made.
            answers.put((rank, result, failure, dist.distributed_c10d._world.group_count))


class Child:
    """Runs `function(say, *args)` in a separate process. `say` sends a small object to the parent, in one write.

    Only a process that is not a daemon can have child processes, which then end with it.
    """

    def __init__(self, function: Callable[..., None], *args: Any, daemon: bool = True) -> None:
        context = processes()
        self._said, say = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_tell, args=(inspect.getsourcefile(function), function.__name__, say, args), daemon=daemon
        )
        self._process.start()
        say.close()

    def hear(self) -> Any:
        """Receives the next object. Raises `EOFError` when the process has ended."""
        if not self._said.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError("the process says nothing")
        return self._said.recv()

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self._process.kill()

    def ended(self) -> tuple[list[Any], int]:
        """Waits for the end of the process. Returns the remaining objects, and the exit status or minus the killing signal."""
        rest = []
        with contextlib.suppress(EOFError):
            while True:
                rest.append(self.hear())
        self._said.close()
        self._process.join()
        return rest, self._process.exitcode


def _tell(file: str, name: str, say: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work = getattr(_load(file), name)
    gc.freeze()  # as in conftest.py
    work(say.send, *args)


class World:
    """`size` processes with a gloo group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = processes()
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._answers = context.Queue()
        self._tasks = [context.Queue() for _ in range(self.size)]
        self._processes = [
            context.Process(target=_serve, args=(rank, self.size, store, self._tasks[rank], self._answers), daemon=True)
            for rank in range(self.size)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(rank, size, *args)` on every rank. Returns the results by rank.

        Raises AssertionError if a rank raises.
        """
        if not self._processes:
            self._start()
        file = inspect.getsourcefile(function)
        for tasks in self._tasks:
            tasks.put((file, function.__name__, args))
        results: list[Any] = [None] * self.size
        failures, group_counts = [], set()
        for _ in range(self.size):
            try:
                rank, result, failure, group_count = self._answers.get(
                    timeout=REST_TIMEOUT_S if failures else ANSWER_TIMEOUT_S
                )
            except queue.Empty:
                failures.append("the other ranks have not answered")
                break
            results[rank] = result
            group_counts.add(group_count)
            if failure is not None:
                failures.append(f"rank {rank}:\n{failure}")
        if failures:
            self.stop()  # ranks may be at different steps
            raise AssertionError("\n".join(failures))
        if len(group_counts) > 1:
            self.stop()  # the ranks would wait for each other in the next group, under different names
        return results

    def stop(self) -> None:
        """Ends the processes."""
        if not self._processes:
            return
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(timeout=REST_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []
        self._folder.cleanup()
