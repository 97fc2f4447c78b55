"""Other threads copy rows of a device tier while one thread trains. The copies are consistent for every kernel backend."""

import threading

import pytest
import torch

from tables import DEVICE, KERNELS, make_bag, ssd_tiers
from torchrec_embcache import initializers, optimizers
from torchrec_embcache._device.tier import DeviceTier
from torchrec_embcache._kernels.core import TorchBackend
from torchrec_embcache.exceptions import StateError

IDS = 120
STEPS = 80
# No id is trained more often than this in so many steps of 18 ids.
LIFE = 45


def made(directory, **budgets):
    """A batch in which every id has the gradient 1, so that a row is a function of its count."""
    return make_bag(
        tiers=ssd_tiers(directory, **{"host_bytes": "4KiB", "device_bytes": "3KiB", **budgets}),
        initializer=initializers.Constant(1.0),
        optimizer=optimizers.Adagrad(lr=0.1),
    )


def train(bag, ids):
    bag(ids.view(-1, 1)).sum().backward()


pytestmark = pytest.mark.usefixtures("one_thread_of_torch")


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """The weights and the slot after each number of steps."""
    with made(tmp_path_factory.mktemp("life")) as bag:
        rows = []
        for _ in range(LIFE):
            found = bag.read_rows(torch.tensor([0]))
            rows.append((found.weights[0].clone(), found.slots["sum"][0].clone()))
            train(bag, torch.tensor([0]))
    assert len({bytes(weights.numpy()) for weights, _ in rows}) == len(rows)
    return rows


def check(life, chunk):
    """Check that each row is as its count says, but for the last bits, which torch's ops may round otherwise than the core.

    The weights of two counts differ by 0.01 or more, so that a row of which a part is older is found all the same.
    """
    for at, count in enumerate(chunk.metadata.count.tolist()):
        weights, total = life[count]
        found = chunk.weights[at]
        assert torch.allclose(found, weights, rtol=0, atol=1e-5), (
            f"id {chunk.ids[at]}: {found} is not as after {count} steps"
        )
        assert torch.equal(chunk.slots["sum"][at], total), f"id {chunk.ids[at]}: another slot than after {count} steps"


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
    monkeypatch.setenv("EMBCACHE_KERNELS", request.param)
    return request.param


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
def test_concurrent_reads_exports_and_flushes_see_whole_rows(kernels, life, tmp_path):
    is_slow = kernels == "triton" and DEVICE.type == "cpu"  # a step in Triton's interpreter takes long
    steps = STEPS // 8 if is_slow else STEPS
    with made(tmp_path) as bag:
        train(bag, torch.arange(IDS))
        done = threading.Event()
        failures: list[BaseException] = []
        counts = {"read": 0, "exported": 0, "flushed": 0}

        def read():
            check(life, bag.read_rows(torch.randint(0, IDS, (40,)).unique()))
            counts["read"] += 1

        def export():
            try:
                for chunk in bag.export(chunk_rows=50):
                    check(life, chunk)
                counts["exported"] += 1
            except StateError as error:
                assert "export again" in str(error)  # noqa: PT017

        def flush():
            bag.flush()
            counts["flushed"] += 1

        def go_on(work):
            try:
                while not done.is_set():
                    work()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=go_on, args=(work,)) for work in (read, read, export, flush)]
        for thread in threads:
            thread.start()
        try:
            generator = torch.Generator().manual_seed(3)
            for _ in range(steps):
                train(bag, torch.randperm(IDS, generator=generator)[:18])
                if failures:
                    break
            while not failures and min(counts["read"], counts["flushed"]) < 2:
                pass
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not failures, failures[0]
        check(life, bag.read_rows(torch.arange(IDS)))
        assert bag.stats().device.evictions > 0
        assert bag.stats().pinned_rows == 0


@pytest.mark.parametrize(("owner", "name"), [(DeviceTier, "scatter"), (TorchBackend, "_update")])
def test_a_reader_waits_until_device_rows_are_placed_and_committed(owner, name, life, tmp_path, monkeypatch):
    """Let a thread come before the rows are scattered, or between their update and its commit."""
    monkeypatch.setenv("EMBCACHE_KERNELS", "torch")
    real = getattr(owner, name)
    found = []
    readers = []

    def amid(*arguments):
        if name == "_update":
            real(*arguments)
        reader = threading.Thread(target=lambda: found.append(bag.read_rows(torch.arange(4))))
        readers.append(reader)
        reader.start()
        reader.join(timeout=0.3)  # otherwise it would be done by then
        if name == "scatter":
            real(*arguments)

    with made(tmp_path) as bag:
        train(bag, torch.arange(4))
        train(bag, torch.arange(50, 110))  # the rows of before leave the device
        monkeypatch.setattr(owner, name, amid)
        train(bag, torch.arange(4))
        for reader in readers:
            reader.join()
        assert found
        for rows in found:
            check(life, rows)
