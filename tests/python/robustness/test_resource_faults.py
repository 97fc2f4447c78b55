"""The system refuses memory, disk, files, threads or io_uring. There are typed errors, the process lives on, and rows can be saved
elsewhere.

Each scenario runs in a child of its own, which one process that has imported everything forks. Limits hold for a whole process.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from errno import ENOSYS, EPERM
from pathlib import Path

import pytest

from fault_scenarios import MIB
from project_paths import SUPPORT
from torchrec_embcache.exceptions import DeviceMemoryError, HostMemoryError


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., str]]:
    server = subprocess.Popen(
        [sys.executable, "-c", "import fault_scenarios; fault_scenarios.serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}",
            "RUST_BACKTRACE": "0",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(name: str, *arguments: object) -> str:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([name, *arguments]) + "\n")
        server.stdin.flush()
        status, said = json.loads(server.stdout.readline())
        assert status == 0, f"{name}{arguments} ended with status {status}: {said}"
        return str(said)

    yield run
    server.stdin.close()
    server.stdout.close()
    server.wait()


@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_memory_that_is_refused_is_an_error_and_not_the_end(
    tiers: str, tmp_path: Path, run: Callable[..., str]
) -> None:
    met = run("memory", str(tmp_path), tiers, MIB)
    assert met in (HostMemoryError.__name__, DeviceMemoryError.__name__, "RuntimeError", "MemoryError"), (
        "no limit was met"
    )


def test_no_memory_for_first_ssd_rows_is_an_error(tmp_path: Path, run: Callable[..., str]) -> None:
    assert run("memory_for_the_index_on_ssd", str(tmp_path)) == HostMemoryError.__name__, "no limit was met"


@pytest.mark.parametrize("device", ["0", "256KiB"])
def test_calls_without_memory_raise_and_do_not_hang(device: str, tmp_path: Path, run: Callable[..., str]) -> None:
    assert HostMemoryError.__name__ in run("memory_of_calls", str(tmp_path), device), "no limit was met"


def test_a_full_disk_leaves_every_row_readable_and_savable(
    tmp_path: Path, small_disk: str, run: Callable[..., str]
) -> None:
    assert int(run("disk_full", str(tmp_path), small_disk)) > 2


def test_a_save_on_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, small_disk: str, run: Callable[..., str]
) -> None:
    run("save_on_full_disk", str(tmp_path), small_disk)


def test_too_many_open_files_are_an_error_that_names_the_file(tmp_path: Path, run: Callable[..., str]) -> None:
    assert int(run("few_files", str(tmp_path))) > 0


def test_without_threads_tables_in_ram_train_and_are_saved(run: Callable[..., str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        if run("no_threads", root) == "threads":
            pytest.skip("this system gives threads whatever RLIMIT_NPROC says")


def test_without_memory_that_may_be_locked_the_ssd_tier_works(run: Callable[..., str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        assert run("no_locked_memory", root)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the system calls are x86-64's")
@pytest.mark.parametrize("errno", [EPERM, ENOSYS])
@pytest.mark.parametrize("when", ["from the start", "later"])
def test_where_io_uring_is_refused_reads_are_plain_ones(
    when: str, errno: int, tmp_path: Path, run: Callable[..., str]
) -> None:
    engine = run("uring_refused", str(tmp_path), when, errno)
    if when == "from the start":
        assert engine.startswith("pread")
