"""Pipelines over a small device tier match a plain loop: on CPU tensors, and in `make test-cuda` on a GPU with NCCL."""

import random
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    runtime_forwards,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from tables import DEVICE, KERNELS
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheTrainPipelineSparseDist,
    Saver,
    TierBudgets,
    admission,
    eviction,
    flush,
    initializers,
)
from torchrec_embcache._device.tier import DeviceTier, TorchRowMover
from torchrec_embcache._kernels.triton import launch
from torchrec_embcache._kernels.triton_backend import TritonRowMover
from torchrec_embcache._lookup.prefetch import PrefetchQueue
from torchrec_embcache.distributed import _lookup
from torchrec_models import Batch, dense_optimizer, drain, pinned_rows, rows_of, train

STEPS = 14
IDS = 400


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A world of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        if dist.is_initialized():  # left behind by a test before
            dist.destroy_process_group()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Model(nn.Module):
    """Two tables of two widths, of which a tenth of the rows is on the device, and a loss that weighs what they give."""

    def __init__(self, ssd: Path | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        kept = {"ssd_bytes": "64MiB", "ssd_dir": ssd} if ssd is not None else {}
        born = initializers.Uniform(-0.1, 0.1)
        tables = [
            EmbCacheEmbeddingBagConfig(
                name=name,
                embedding_dim=dim,
                num_embeddings=10**9,
                feature_names=[name],
                initializer=born,
                **options,
            )
            for name, dim in (("a", 16), ("b", 8))
        ]
        tiers = TierBudgets(device_bytes="24KiB", host_bytes="30KiB" if ssd is not None else "4MiB", **kept)
        self.bags = EmbCacheEmbeddingBagCollection(tables, device=DEVICE, tiers=tiers, name="bags")
        self.linear = nn.Linear(24, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out = self.linear(self.bags(batch.features).values())[:, 0]
        loss = nn.functional.mse_loss(out, batch.target)
        return loss, (loss.detach(), out.detach())


def made(ssd: Path | None = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    sharder = EmbCacheEmbeddingBagCollectionSharder({"learning_rate": 0.05})
    model = DistributedModelParallel(Model(ssd, **options).to(DEVICE), device=DEVICE, sharders=[sharder])
    return model, dense_optimizer(model)


def batches() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        lengths = torch.randint(0, 5, (2 * 32,), generator=generator)
        # A few ids come often.
        drawn = torch.rand(int(lengths.sum()), generator=generator)
        features = KeyedJaggedTensor(["a", "b"], (drawn**3 * IDS).long(), lengths=lengths)
        yield Batch(features, torch.rand(32, generator=generator)).to(DEVICE)


class CpuStream(torch.cpu.Stream):
    """The CPU stream of torch, with the `device` attribute that TorchRec reads."""

    device = DEVICE


@pytest.fixture(autouse=True)
def streams_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pipelines of TorchRec that want streams of a GPU run without one."""
    if DEVICE.type == "cuda":
        return
    begin = runtime_forwards.BaseForward.__init__

    def on_cpu(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        self._device = DEVICE

    monkeypatch.setattr(runtime_forwards.BaseForward, "__init__", on_cpu)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda *_: CpuStream())
    for kind in (KeyedJaggedTensor, KeyedTensor):
        monkeypatch.setattr(kind, "record_stream", lambda *_: None)


def prefetching(*args: Any) -> Any:
    """TorchRec's pipeline that prefetches. Without streams it would prefetch nothing, and then miss it."""
    pipeline = PrefetchTrainPipelineSparseDist(*args)
    if DEVICE.type == "cpu":
        pipeline._data_dist_stream, pipeline._stream_context = CpuStream(), torch.cpu.stream
    return pipeline


PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse": TrainPipelineSparseDist,
    "prefetch": prefetching,
    "ahead 1": EmbCacheTrainPipelineSparseDist,
    "ahead 5": lambda *args: EmbCacheTrainPipelineSparseDist(*args, lookahead=5),
}


def close(model: nn.Module) -> None:
    for table in model.module.bags.tables.values():
        table.close()


@pytest.mark.parametrize("on_ssd", [False, True], ids=["ram", "ssd"])
@pytest.mark.parametrize("kind", PIPELINES)
def test_pipeline_over_small_device_tier_matches_plain_loop(kind: str, on_ssd: bool, tmp_path: Path) -> None:
    plain, _ = made()
    want = train(plain, batches())
    model, optimizer = made(tmp_path if on_ssd else None)
    got = drain(PIPELINES[kind](model, optimizer, DEVICE), batches())
    assert torch.equal(got, want)
    assert rows_of(model) == rows_of(plain)
    assert pinned_rows(model) == 0
    tables = model.module.bags.tables.values()
    assert all(table.stats().device.evictions > 0 for table in tables)
    assert not on_ssd or all(table.stats().host.evictions > 0 for table in tables)
    close(model)


def train_semi_synchronously(model: nn.Module, steps: list[Batch]) -> Tensor:
    """Look each batch up before the backward of the one before, as TorchRec's pipeline of this name does. Returns the losses."""
    optimizer, losses = dense_optimizer(model), []
    coming = model.module.bags(steps[0].features).values()
    for step, batch in enumerate(steps):
        looked_up, rows = coming, coming.detach().requires_grad_()
        loss = nn.functional.mse_loss(model.module.linear(rows)[:, 0], batch.target)
        if step + 1 < len(steps):
            coming = model.module.bags(steps[step + 1].features).values()
        loss.backward()
        looked_up.backward(rows.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_pipeline_with_forward_before_backward_matches_its_loop() -> None:
    plain, _ = made()
    want = train_semi_synchronously(plain, list(batches()))
    model, optimizer = made()
    got = drain(TrainPipelineSemiSync(model, optimizer, DEVICE, start_batch=0), batches())
    assert torch.equal(got, want)
    assert rows_of(model) == rows_of(plain)
    assert {table.step() for table in model.module.bags.tables.values()} == {STEPS}
    assert pinned_rows(model) == 0


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a linear layer has other bits on a GPU than on a CPU")
@pytest.mark.parametrize("kind", ["sparse", "ahead 5"])
def test_a_pipeline_over_tritons_kernels_has_the_bits_of_the_cores(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = made()
    want = train(plain, batches())
    monkeypatch.setenv("EMBCACHE_KERNELS", "triton")
    model, optimizer = made(tmp_path)
    got = drain(PIPELINES[kind](model, optimizer, DEVICE), batches())
    assert {table.stats().kernels for table in model.module.bags.tables.values()} == {"triton"}
    assert torch.equal(got, want)
    assert rows_of(model) == rows_of(plain)
    close(model)


@pytest.mark.parametrize("seed", range(8 if DEVICE.type == "cuda" else 2))
@pytest.mark.parametrize("kind", ["base", "ahead 1", "ahead 5"])
def test_streams_that_are_late_by_chance_change_no_bit(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no streams that could be late, so that this says there only that the program runs."""
    plain, _ = made()
    want = train(plain, batches())
    dice, wait = random.Random(seed), torch.cuda._sleep if DEVICE.type == "cuda" else int

    def late(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            wait(dice.choice([0, 10_000, 3_000_000]))
            done = real(*arguments, **named)
            wait(dice.choice([0, 10_000, 3_000_000]))
            return done

        monkeypatch.setattr(owner, name, call)

    for moves in (TorchRowMover, TritonRowMover):
        late(moves, "gather")
        late(moves, "scatter")
    for name in ("pool_rows", "find_gradients", "sum_gradients", "update_rows"):
        late(launch, name)
    model, optimizer = made(tmp_path if seed % 2 else None)
    got = drain(PIPELINES[kind](model, optimizer, DEVICE), batches())
    assert torch.equal(got, want)
    assert rows_of(model) == rows_of(plain)
    close(model)


class NumbersAskedFor(TorchDispatchMode):
    """Notes where the package asks a tensor for a number. On a device that waits for all that is queued."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.extract_stack()
            self.by += [f"{each.filename}:{each.lineno}" for each in frames if "/torchrec_embcache/" in each.filename]
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_asks_no_tensor_for_a_number(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBCACHE_KERNELS", kernels)
    model, _ = made()
    first, *others = batches()
    model(first)[0].backward()
    with NumbersAskedFor() as asked:
        model(others[0])[0].backward()
    assert asked.by == []


@pytest.mark.parametrize("kind", ["sparse", "prefetch", "ahead 1", "ahead 5"])
def test_the_ids_of_a_batch_are_copied_to_the_host_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = _lookup.host_copies

    def counted(tensors: Any, arrived_on: Any) -> Any:
        copies.append(len(tensors))
        return copy(tensors, arrived_on)

    monkeypatch.setattr(_lookup, "host_copies", counted)
    model, optimizer = made()
    pipeline = PIPELINES[kind](model, optimizer, DEVICE)
    drain(pipeline, batches())
    lookups = len(model.module.bags._lookups)
    assert len(copies) == STEPS * lookups


def looked_up(model: nn.Module) -> dict[str, int]:
    """For each table how many rows of the batches so far were found on the device, or brought there."""
    counts = {name: table.stats().device for name, table in model.module.bags.tables.items()}
    return {name: device.hits + device.misses for name, device in counts.items()}


def distinct_ids(steps: list[Batch]) -> dict[str, int]:
    """For each table the sum over batches of their distinct ids."""
    return {name: sum(len(step.features[name].values().unique()) for step in steps) for name in ("a", "b")}


@pytest.mark.parametrize("on_ssd", [False, True], ids=["ram", "ssd"])
@pytest.mark.parametrize("lookahead", [1, 5])
def test_a_step_leaves_the_rows_of_the_next_batch_on_the_device(lookahead: int, on_ssd: bool, tmp_path: Path) -> None:
    plain, plain_optimizer = made()
    model, optimizer = made(tmp_path if on_ssd else None)
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE, lookahead=lookahead)
    steps = list(batches())
    source, ahead = iter(steps), 0
    for done in range(1, STEPS + 1):
        loss, _ = pipeline.progress(source)
        least, found, most = distinct_ids(steps[:done]), looked_up(model), distinct_ids(steps[: done + 1])
        # Where RAM has no room for all rows of the next batch, those on SSD are left to its forward.
        assert found == most if not on_ssd else all(least[name] <= found[name] <= most[name] for name in found)
        ahead += found == most != least
        assert torch.equal(loss, train(plain, iter(steps[done - 1 : done]), plain_optimizer)[0])
        # Rows that are there for the next batch and that no batch has trained are not in the table yet.
        assert rows_of(model) == rows_of(plain)
    assert ahead > (STEPS // 2 if lookahead == 1 else 0)
    assert pinned_rows(model) == 0
    close(model)


def test_a_step_leaves_reads_from_ssd_to_the_forward_of_their_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so many batches ahead RAM has no room for all of their rows. Each row is born before, so that all can be read ahead."""
    read: list[int] = []
    place = PrefetchQueue.place

    def counted(self: PrefetchQueue, *arguments: Any) -> None:
        before = from_ssd()
        place(self, *arguments)
        read.append(from_ssd() - before)

    def from_ssd() -> int:
        found = [table.stats().ssd for table in model.module.bags.tables.values()]
        return sum(ssd.hits for ssd in found if ssd is not None)

    monkeypatch.setattr(PrefetchQueue, "place", counted)
    model, optimizer = made(tmp_path)
    for first in range(0, IDS, 32):
        ids, lengths = torch.arange(first, first + 32) % IDS, torch.ones(64, dtype=torch.int64)
        train(
            model,
            iter([Batch(KeyedJaggedTensor(["a", "b"], ids.repeat(2), lengths=lengths), torch.rand(32)).to(DEVICE)]),
        )
    before = from_ssd()
    drain(EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE, lookahead=8), batches())
    assert read == [0] * (STEPS - 1)
    assert from_ssd() - before > 100
    close(model)


@pytest.mark.parametrize(
    "options",
    [
        {"admission": admission.Count(2)},
        {"eviction": eviction.Policy([eviction.Ttl(steps=3)], every_steps=2)},
        {"on_full": "evict"},
    ],
    ids=["admission", "eviction", "full"],
)
def test_rows_do_not_move_ahead_where_a_rule_decides_which_there_are(options: dict[str, Any]) -> None:
    model, optimizer = made(**options)
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE)
    steps = list(batches())
    source = iter(steps)
    for done in range(1, STEPS + 1):
        pipeline.progress(source)
        assert looked_up(model) == distinct_ids(steps[:done])


def test_evaluation_and_reset_keep_prefetched_rows() -> None:
    plain, plain_optimizer = made()
    model, optimizer = made()
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE)
    steps = list(batches())
    source = iter(steps[:6])
    for _ in range(3):
        pipeline.progress(source)
    pipeline.detach()
    model.eval()
    with torch.no_grad():
        model(steps[9])
    model.train()
    pipeline.attach()
    pipeline.progress(source)
    trained = iter(steps[:4])
    train(plain, trained, plain_optimizer)
    assert rows_of(model) == rows_of(plain)
    pipeline.reset()
    assert pinned_rows(model) == 0
    assert rows_of(model) == rows_of(plain)
    drain(pipeline, iter(steps[6:]))
    train(plain, iter(steps[6:]), plain_optimizer)
    assert rows_of(model) == rows_of(plain)


def both_evaluate(models: list[nn.Module], batch: Batch) -> None:
    """The models read the same of a batch."""
    with torch.no_grad():
        got, want = (model.eval()(batch)[1][1] for model in models)
    assert torch.equal(got, want)
    for model in models:
        model.train()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_calls_between_steps_find_the_rows_of_the_plain_loop(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    plain, plain_optimizer = made()
    (tmp_path / "tiers").mkdir(mode=0o700)
    model, optimizer = made(tmp_path / "tiers")
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE, lookahead=dice.randint(1, 4))
    steps = list(batches())
    source, saved = iter(steps), tmp_path / "saved"
    done, beside = set(), None

    def check_saved() -> None:
        copy, _ = made()
        Saver().load(copy, saved)
        assert rows_of(copy) == saved_rows

    for step in range(STEPS):
        loss, _ = pipeline.progress(source)
        assert torch.equal(loss, train(plain, iter(steps[step : step + 1]), plain_optimizer)[0])
        if beside is not None:
            beside.result()
            beside = None
            check_saved()
        what = dice.choice(["save", "delta", "beside", "flush", "read", "import", "evaluate"])
        done.add(what)
        tables = model.module.bags.tables
        saved_rows = rows_of(plain)
        assert rows_of(model) == saved_rows, what
        if what in ("save", "delta"):
            Saver().save(model, saved, incremental=what == "delta")
            check_saved()
        elif what == "beside":
            beside = Saver().save_async(model, saved)
        elif what == "flush":
            flush(model)
        elif what == "read":
            ids = torch.arange(IDS)
            for name, table in tables.items():
                got, want = (rows.read_rows(ids) for rows in (table, plain.module.bags.tables[name]))
                assert torch.equal(got.weights, want.weights)
        elif what == "import":
            # Ids that no batch of the queue has.
            ids = torch.arange(10 * IDS + 40 * step, 10 * IDS + 40 * step + 40)
            for name, table in tables.items():
                for rows in (table, plain.module.bags.tables[name]):
                    rows.import_rows(ids, torch.full((40, rows.dim), float(step)))
        else:
            pipeline.detach()
            # Some rows of the next batch are already on the device although no batch has trained them.
            both_evaluate([model, plain], steps[min(step + 1, STEPS - 1)])
            pipeline.attach()
        assert rows_of(model) == rows_of(plain), what
    assert len(done) > 4
    assert pinned_rows(model) == 0
    close(model)


def test_model_detached_from_pipeline_has_full_device_budget() -> None:
    plain, plain_optimizer = made()
    model, optimizer = made()
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE)
    steps = list(batches())
    source = iter(steps)
    for step in range(6):
        pipeline.progress(source)
        train(plain, iter(steps[step : step + 1]), plain_optimizer)
        assert pinned_rows(model) > 0
        pipeline.detach()
        assert pinned_rows(model) == 0
        both_evaluate([model, plain], steps[10])
        pipeline.attach()
    overflows = [
        [table.stats().overflow_plans for table in each.module.bags.tables.values()] for each in (model, plain)
    ]
    assert overflows[0] == overflows[1]


@pytest.mark.parametrize("lookahead", [1, 3])
def test_the_batches_after_one_whose_ids_could_not_be_read_move_ahead(
    lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = made()
    want = train(plain, batches())
    calls, unread = [], 4
    copy = _lookup.host_copies

    def fails_once(tensors: Any, arrived_on: Any) -> Any:
        calls.append(arrived_on)
        if len(calls) == unread:
            raise MemoryError("no memory")
        return copy(tensors, arrived_on)

    monkeypatch.setattr(_lookup, "host_copies", fails_once)
    model, optimizer = made()
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE, lookahead=lookahead)
    steps = list(batches())
    source, losses = iter(steps), []
    for done in range(1, STEPS + 1):
        losses.append(pipeline.progress(source)[0])
        # The unread batch moves in its forward.
        ahead = done if done == unread - 1 else done + 1
        assert looked_up(model) == distinct_ids(steps[:ahead])
    assert torch.equal(torch.stack(losses), want)
    assert rows_of(model) == rows_of(plain)
    assert pinned_rows(model) == 0


def test_evaluation_in_the_pipeline_prefetches_no_other_batch() -> None:
    plain, plain_optimizer = made()
    model, optimizer = made()
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE, lookahead=2)
    steps = list(batches())
    source = iter(steps)
    for step, batch in enumerate(steps):
        evaluates = step in (4, 5)
        model.train(not evaluates)
        with torch.set_grad_enabled(not evaluates), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the evaluated batches were prefetched to be trained
            pipeline.progress(source)
        if not evaluates:
            train(plain, iter([batch]), plain_optimizer)
    assert rows_of(model) == rows_of(plain)
    model.train()
    pipeline.reset()
    assert pinned_rows(model) == 0


@pytest.mark.parametrize("fails_at", [5, 6, 7, 8])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "ctrl-c"])
@pytest.mark.parametrize("lookahead", [1, 5])
def test_a_batch_whose_rows_could_not_move_ahead_trains_all_the_same(
    lookahead: int,
    error: BaseException,
    fails_at: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []
    scatter = DeviceTier.scatter

    def fails_once(self: DeviceTier, *rows: Any) -> None:
        calls.append(self)
        if len(calls) == fails_at:
            raise error
        scatter(self, *rows)

    plain, _ = made()
    want = train(plain, batches())
    monkeypatch.setattr(DeviceTier, "scatter", fails_once)
    model, optimizer = made()
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE, lookahead=lookahead)
    losses, interrupted = [], 0
    source = batches()
    with caplog.at_level("WARNING", "torchrec_embcache"):
        while pipeline.batches or not losses:
            try:
                losses.append(pipeline.progress(source)[0])
            except KeyboardInterrupt:
                interrupted += 1
    # An interrupt comes after its step is done, whose output nobody gets.
    assert len(losses) == STEPS - interrupted
    assert interrupted == isinstance(error, KeyboardInterrupt)
    assert interrupted or torch.equal(torch.stack(losses), want)
    assert ("fetched or moved ahead" in caplog.text) is not bool(interrupted)
    # Rows that did not move are not counted.
    assert looked_up(model) == distinct_ids(list(batches()))
    assert rows_of(model) == rows_of(plain)
    assert pinned_rows(model) == 0


def test_a_profile_of_torchs_names_what_a_step_does() -> None:
    model, optimizer = made()
    with torch.profiler.profile() as profile:
        drain(EmbCacheTrainPipelineSparseDist(model, optimizer, DEVICE), batches())
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("embcache::")}
    lookups = len(model.module.bags._lookups)
    # The rows of all but the first batch are moved ahead, and looked for once more by their forward.
    assert counts == {
        "embcache::plan": STEPS * lookups,
        "embcache::rows": (2 * STEPS - 1) * lookups,
        "embcache::lookup": STEPS * lookups,
        "embcache::update": STEPS * lookups,
    }
