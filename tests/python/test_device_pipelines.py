"""Pipelines over a small device tier have the bits of a plain loop: on CPU tensors, and by `make test-cuda` on a GPU with NCCL."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    runtime_forwards,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheTrainPipelineSparseDist,
    TierBudgets,
    initializers,
)
from torchrec_embcache.sharded import lookup
from torchrec_models import Batch, dense_optimizer, drain, pinned_rows, rows_of, train

DEVICE = torch.device("cuda:0" if os.environ.get("EMBCACHE_TEST_CUDA") == "1" else "cpu")
STEPS = 14
IDS = 400


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A world of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Model(nn.Module):
    """Two tables of two widths, of which a tenth of the rows is on the device, and a loss that weighs what they give."""

    def __init__(self, ssd: Path | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        kept = {"ssd_bytes": "64MiB", "ssd_dir": ssd} if ssd is not None else {}
        born = initializers.Uniform(-0.1, 0.1)
        tables = [
            EmbCacheEmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=10**9, feature_names=[name], initializer=born
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


def made(ssd: Path | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    sharder = EmbCacheEmbeddingBagCollectionSharder({"learning_rate": 0.05})
    model = DistributedModelParallel(Model(ssd).to(DEVICE), device=DEVICE, sharders=[sharder])
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
    """What torch gives for a stream of the CPU, with the device that TorchRec asks for."""

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
def test_a_pipeline_over_a_small_device_tier_has_the_bits_of_the_plain_loop(
    kind: str, on_ssd: bool, tmp_path: Path
) -> None:
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


def test_a_pipeline_that_forwards_before_a_backward_trains_every_batch() -> None:
    model, optimizer = made()
    pipeline = TrainPipelineSemiSync(model, optimizer, DEVICE, start_batch=0)
    assert len(drain(pipeline, batches())) == STEPS
    assert {table.step() for table in model.module.bags.tables.values()} == {STEPS}
    assert pinned_rows(model) == 0


@pytest.mark.parametrize("kind", ["sparse", "prefetch", "ahead 1", "ahead 5"])
def test_the_ids_of_a_batch_are_copied_to_the_host_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = lookup.host_copies

    def counted(tensors: Any, arrived_on: Any) -> Any:
        copies.append(len(tensors))
        return copy(tensors, arrived_on)

    monkeypatch.setattr(lookup, "host_copies", counted)
    model, optimizer = made()
    pipeline = PIPELINES[kind](model, optimizer, DEVICE)
    drain(pipeline, batches())
    lookups = len(model.module.bags._lookups)
    assert len(copies) == STEPS * lookups
