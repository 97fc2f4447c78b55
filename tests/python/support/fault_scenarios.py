"""Scenarios without memory, disk space, files, threads or io_uring, and the process that forks a child for each of them."""

import ctypes
import gc
import hashlib
import json
import logging
import os
import resource
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from errno import EMFILE, ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch

from tables import make_bag, ssd_tiers
from torchrec_embcache import TierBudgets, _native
from torchrec_embcache import serialize as blocks
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import EmbCacheError, ReadOnlyError, StorageError

MIB = 1 << 20


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(0, 1 << 40, (500, 4), generator=torch.Generator().manual_seed(step))


def a_bag(**settings: Any) -> Any:
    return make_bag(embedding_dim=64, **settings)


def train(bag: Any, steps: range) -> int:
    """The steps before the first error of the package, or of torch or Python where these have no memory."""
    for step in steps:
        try:
            bag(ids_of(step)).sum().backward()
        except (EmbCacheError, RuntimeError, MemoryError) as error:
            bag.failure = error
            return step
    return steps.stop


def contents(bag: Any) -> bytes:
    """Every bit of every row, and the step."""
    chunks = list(bag.export())
    order = torch.cat([chunk.ids for chunk in chunks]).argsort()
    assert len(order) == len(bag)
    digest = hashlib.sha256(str(bag.stats().step).encode())
    for column in (
        [chunk.ids for chunk in chunks],
        [chunk.weights for chunk in chunks],
        *([chunk.slots[name] for chunk in chunks] for name in chunks[0].slots),
        *([getattr(chunk.metadata, name) for chunk in chunks] for name in ("count", "last_step", "score")),
    ):
        digest.update(torch.cat(column)[order].numpy().tobytes())
    return digest.digest()


def straight(steps: int) -> bytes:
    with a_bag(tiers=TierBudgets(host_bytes="1GiB")) as bag:
        assert train(bag, range(steps)) == steps
        return contents(bag)


def loaded_from(path: str) -> bytes:
    with a_bag(tiers=TierBudgets(host_bytes="1GiB")) as bag:
        Saver(0).load(bag, path)
        return contents(bag)


# ---- scenarios: run in a child


def memory(root: str, tiers: str, extra: int) -> str:
    budgets = {
        "ram": TierBudgets(host_bytes="1GiB"),
        "ssd": ssd_tiers(Path(root, "ssd"), host_bytes="64MiB", ssd_bytes="1GiB"),
        "device": ssd_tiers(Path(root, "ssd"), host_bytes="64MiB", device_bytes="1MiB", ssd_bytes="1GiB"),
    }[tiers]
    bag = a_bag(tiers=budgets)
    assert train(bag, range(2)) == 2
    Saver(0).save(bag, f"{root}/before")
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + extra, resource.RLIM_INFINITY))
    done = train(bag, range(2, 40))
    try:
        Saver(0).save(bag, f"{root}/limited")
        saved = True
    except MemoryError:
        saved = False
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    expected = straight(done)
    assert contents(bag) == expected, "the step that failed changed something"
    if saved:
        assert loaded_from(f"{root}/limited") == expected
    Saver(0).save(bag, f"{root}/after")
    assert loaded_from(f"{root}/after") == expected
    assert train(bag, range(done, done + 2)) == done + 2
    assert contents(bag) == straight(done + 2)
    return type(getattr(bag, "failure", None)).__name__


def memory_for_the_index_on_ssd(root: str) -> str:
    bag = a_bag(tiers=ssd_tiers(Path(root, "ssd"), host_bytes="4MiB", ssd_bytes="1GiB"))
    assert train(bag, range(2)) == 2
    assert bag.stats().ssd.rows == 0
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 8 * MIB, resource.RLIM_INFINITY))
    done = train(bag, range(2, 40))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert contents(bag) == straight(done), "the step that failed changed something"
    assert train(bag, range(done, done + 8)) == done + 8
    assert bag.stats().ssd.rows > 0
    assert contents(bag) == straight(done + 8)
    return type(getattr(bag, "failure", None)).__name__


def memory_of_calls(root: str, device: str) -> str:
    """Make calls with hardly any memory left. Each is done, or raises and can be made again. None ends the process or hangs."""
    budgets = ssd_tiers(Path(root, "ssd"), host_bytes="2MiB", device_bytes=device, ssd_bytes="128MiB")
    bag = a_bag(tiers=budgets)
    train(bag, range(2))
    bag.flush()
    Saver(0).save(bag, f"{root}/whole")
    blocks.Saver(0, 1, 2, f"{root}/blocks", {"t": bag}).save()
    before = contents(bag)
    rows = torch.ones(20_000, bag.embedding_dim)
    calls: dict[str, Callable[[], object]] = {
        "import": lambda: bag.import_rows(torch.arange(1 << 40, (1 << 40) + len(rows)), rows),
        "remove": lambda: bag.remove_rows(torch.arange(1 << 40, (1 << 40) + len(rows))),
        "save": lambda: Saver(0).save(bag, f"{root}/limited"),
        "save_async": lambda: Saver(0).save_async(bag, f"{root}/limited").result(),
        "load": lambda: Saver(0).load(bag, f"{root}/whole"),
        "load blocks": lambda: blocks.Loader(f"{root}/blocks", {"t": bag}).load(),
    }
    raised = set()
    for name, call in calls.items():
        for extra in (0, MIB // 4, MIB, 3 * MIB, 9 * MIB, 40 * MIB):
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + extra, resource.RLIM_INFINITY))
            try:
                call()
            except (MemoryError, RuntimeError, EmbCacheError) as error:  # torch's own error is a RuntimeError
                raised.add(type(error).__name__)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            gc.collect()
        call()
        if name.startswith(("save", "load")):
            assert contents(bag) == before, name
    assert contents(bag) == before
    bag.close()
    return str(sorted(raised))


def disk_full(root: str, small: str) -> str:
    bag = a_bag(tiers=ssd_tiers(Path(small, "ssd"), host_bytes="1MiB", ssd_bytes="64MiB"))
    assert train(bag, range(2)) == 2
    bag.flush()
    done = train(bag, range(2, 200))
    assert isinstance(bag.failure, StorageError), bag.failure
    assert bag.failure.errno == ENOSPC
    expected = straight(done)
    with warnings.catch_warnings(), torch.no_grad():
        # The message does not ask for a larger host_bytes, which would not help.
        warnings.simplefilter("error")
        bag.eval()
        for step in range(done):
            bag(ids_of(step))
        bag.train()
    assert contents(bag) == expected
    for refused in (
        bag.flush,
        lambda: bag(ids_of(done)).sum().backward(),
        lambda: bag(torch.tensor([[1]])).sum().backward(),  # this row would need no write
        lambda: bag.import_rows(torch.tensor([1]), torch.zeros(1, 64)),
        lambda: bag.remove_rows(ids_of(0).flatten()[:1]),
    ):
        with pytest.raises(ReadOnlyError) as caught:
            refused()
        assert caught.value.errno == ENOSPC
    with pytest.raises(StorageError) as caught_save:
        Saver(0).save(bag, f"{small}/saved")
    assert caught_save.value.errno == ENOSPC
    Saver(0).save(bag, f"{root}/elsewhere")
    assert loaded_from(f"{root}/elsewhere") == expected
    with pytest.raises(ReadOnlyError):
        bag.close()
    with a_bag(tiers=ssd_tiers(Path(small, "ssd"), host_bytes="1MiB", ssd_bytes="64MiB", reopen="resume")) as bag:
        assert contents(bag) == straight(2)
    return f"{done}"


def save_on_full_disk(_root: str, small: str) -> str:
    with a_bag(tiers=TierBudgets(host_bytes="1GiB")) as bag:
        assert train(bag, range(1)) == 1
        Saver(0).save(bag, f"{small}/saved")
        first = contents(bag)
        assert train(bag, range(1, 8)) == 8
        for _ in range(2):
            with pytest.raises(StorageError) as caught:
                Saver(0).save(bag, f"{small}/saved")
            assert caught.value.errno == ENOSPC
            assert loaded_from(f"{small}/saved") == first
            assert len(os.listdir(f"{small}/saved")) == 3, (
                "what was written of the save is removed: LATEST, lock, one checkpoint"
            )
        assert train(bag, range(8, 9)) == 9
        assert contents(bag) == straight(9)
    return ""


def few_files(root: str) -> str:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, hard))
    with a_bag(tiers=ssd_tiers(Path(root, "first"), host_bytes="1MiB", ssd_bytes="64MiB")) as bag:
        assert train(bag, range(1)) == 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 48, "the limit is raised when an SSD tier is opened"
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    bag = a_bag(tiers=ssd_tiers(Path(root, "second"), host_bytes="1MiB", ssd_bytes="64MiB"))
    done = train(bag, range(60))
    assert isinstance(bag.failure, StorageError), bag.failure
    assert bag.failure.errno == EMFILE
    assert bag.failure.filename
    assert "may have 40 files open (RLIMIT_NOFILE)" in str(bag.failure)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    assert contents(bag) == straight(done)
    Saver(0).save(bag, f"{root}/elsewhere")
    assert loaded_from(f"{root}/elsewhere") == straight(done)
    return f"{done}"


def no_threads(root: str) -> str:
    if os.geteuid() == 0:  # its threads are not counted
        os.chown(root, 65_534, 65_534)
        os.setresgid(65_534, 65_534, 65_534)
        os.setresuid(65_534, 65_534, 65_534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    with pytest.raises(StorageError, match="thread"):
        a_bag(tiers=ssd_tiers(Path(root, "ssd"), host_bytes="1MiB")).table.open()
    with a_bag(tiers=TierBudgets(host_bytes="1GiB")) as bag:
        assert train(bag, range(3)) == 3
        expected = contents(bag) if can_start_a_thread() else None
        Saver(0).save(bag, f"{root}/saved")
        again = a_bag(tiers=TierBudgets(host_bytes="1GiB"))
        Saver(0).load(again, f"{root}/saved")
        found = again.read_rows(ids_of(2).flatten())
        assert bool(found.found.all())
        assert torch.equal(found.weights, bag.read_rows(ids_of(2).flatten()).weights)
    return "threads" if expected is not None else "none"


def no_locked_memory(root: str) -> str:
    if os.geteuid() == 0:  # may lock as much memory as there is
        os.chown(root, 65_534, 65_534)
        os.setresgid(65_534, 65_534, 65_534)
        os.setresuid(65_534, 65_534, 65_534)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    with a_bag(tiers=ssd_tiers(Path(root, "ssd"), host_bytes="1MiB", ssd_bytes="64MiB")) as bag:
        assert train(bag, range(6)) == 6
        bag.flush()
        assert contents(bag) == straight(6)
        engine: str = bag.stats().ssd.io_engine
    with a_bag(tiers=ssd_tiers(Path(root, "ssd"), host_bytes="1MiB", ssd_bytes="64MiB", reopen="resume")) as bag:
        assert contents(bag) == straight(6)
    return engine


def can_start_a_thread() -> bool:
    import threading

    try:
        thread = threading.Thread(target=lambda: None)
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True


IO_URING_SETUP, IO_URING_ENTER, SECCOMP = 425, 426, 317


def forbid(call: int, errno: int) -> None:
    """Let `call` fail with `errno` in every thread of this process from now on, as the rules of a container do."""
    libc = ctypes.CDLL(None, use_errno=True)
    load, equal, give = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (load, 0, 0, 0),
            (equal, 0, 1, call),
            (give, 0, 0, 0x0005_0000 | errno),
            (give, 0, 0, 0x7FFF_0000),
        )
    )
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    for_all_threads = 1
    done = libc.syscall(SECCOMP, 1, for_all_threads, ctypes.create_string_buffer(header))
    assert done == 0, os.strerror(ctypes.get_errno())


def uring_refused(root: str, when: str, errno: int) -> str:
    if when == "from the start":
        forbid(IO_URING_SETUP, errno)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchrec_embcache.core.io").addHandler(handler)
    bag = a_bag(tiers=ssd_tiers(Path(root, "ssd"), host_bytes="1MiB", ssd_bytes="64MiB"))
    assert train(bag, range(4)) == 4
    bag.flush()
    engine: str = bag.stats().ssd.io_engine
    if when == "later":
        forbid(IO_URING_SETUP, errno)
        forbid(IO_URING_ENTER, errno)
    assert train(bag, range(8)) == 8
    bag.flush()
    with a_bag(tiers=TierBudgets(host_bytes="1GiB")) as oracle:
        assert train(oracle, range(4)) == 4
        assert train(oracle, range(8)) == 8
        assert contents(bag) == contents(oracle)
    _native.drain_log()
    (line,) = said
    assert ("files are read by pread" if when == "from the start" else "reads go through pread as long as") in line
    assert os.strerror(errno) in line
    return engine


# ---- the process that forks them

SCENARIOS: dict[str, Callable[..., str]] = {
    scenario.__name__: scenario
    for scenario in (
        memory,
        memory_for_the_index_on_ssd,
        memory_of_calls,
        disk_full,
        save_on_full_disk,
        few_files,
        no_threads,
        no_locked_memory,
        uring_refused,
    )
}


def serve() -> None:
    """Run the scenarios whose names come in, one a line, each in a child. Answer with its status and its words."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.optim.SGD([torch.zeros(1)])  # torch imports more with the first optimizer
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                said = SCENARIOS[name](*arguments)
                failed = 0
            except BaseException:  # pytest's own too
                said, failed = traceback.format_exc()[-4000:], 1
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            os.write(write, said.encode())
            os._exit(failed)
        os.close(write)
        with os.fdopen(read) as words:
            said = words.read()
        print(json.dumps([os.waitpid(child, 0)[1], said]), flush=True)
