"""A folder on the disk under test. It is removed with its process, even if that is killed. benches/src/scratch.rs does the same in
Rust.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from served import ROOT

__all__ = ["die_with_parent", "scratch"]

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Makes the OS kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def scratch(wanted_bytes: int) -> Iterator[Path]:
    """Creates a folder under `EMBCACHE_BENCH_DIR` (by default target/) on a disk with at least `wanted_bytes` free. Exits with a
    message if there is not enough space.
    """
    parent = Path(os.environ.get("EMBCACHE_BENCH_DIR") or ROOT / "target")
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < wanted_bytes:
        sys.exit(
            f"{parent} has {free / 1e9:.1f} GB free and this bench takes {wanted_bytes / 1e9:.1f} GB: free some, or set "
            "EMBCACHE_BENCH_DIR to a folder on a larger disk"
        )
    path = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    # The janitor reads until this process's end of the pipe is closed. Its own process group keeps Ctrl-C of a terminal from it.
    janitor = subprocess.Popen(
        ["sh", "-c", 'read -r _; rm -rf -- "$0"', str(path)], stdin=subprocess.PIPE, process_group=0
    )
    try:
        yield path
    finally:
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait()
