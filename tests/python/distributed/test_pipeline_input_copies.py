"""The ids of a batch are copied to the CPU on the stream on which a pipeline brings them. Streams are stubs."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import embedding_sharding
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    runtime_forwards,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)

from torchrec_embcache import EmbCacheTrainPipelineSparseDist
from torchrec_embcache.distributed import _lookup
from torchrec_embcache.distributed._lookup import CacheLookup
from torchrec_models import CPU, Model, batches, dense_optimizer, drain, sharded

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A world of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        if dist.is_initialized():  # left behind by a test before
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Stub:
    """A stream that queues nothing. It has a name, and knows the names of the streams that it was told to wait for."""

    device = CPU

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited_for: set[str] = set()

    def wait_stream(self, stream: "Stub") -> None:
        self.waited_for.add(stream.name)

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self) -> Any:
        return None


class Event:
    """An event of torch's that is done."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Streams:
    """The caller's stream, and the streams on which the batches of lookups were brought, copied and looked up."""

    def __init__(self) -> None:
        self.now = [Stub("forward")]
        self.brought: dict[int, tuple[KeyedJaggedTensor, Stub]] = {}
        self.reading: KeyedJaggedTensor | None = None
        self.copied: list[tuple[Stub, Stub]] = []  # on which a batch was brought, and on which it was copied
        self.looked_up: list[Stub] = []
        self.fails_at = 0  # the number of the copy that fails

    def current(self, *_: Any) -> Stub:
        return self.now[-1]

    def on(self, stream: Stub | None) -> AbstractContextManager[None]:
        return self._on(stream) if stream is not None else nullcontext()

    @contextmanager
    def _on(self, stream: Stub) -> Iterator[None]:
        self.now.append(stream)
        try:
            yield
        finally:
            self.now.pop()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    begin, arrive = runtime_forwards.BaseForward.__init__, embedding_sharding.KJTListAwaitable._wait_impl
    begin_to_read, copy, forward = _lookup.HostFeatures.__init__, _lookup.host_copies, CacheLookup.forward

    def on_cpu(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        self._device = CPU

    def brought(self: embedding_sharding.KJTListAwaitable) -> Any:
        """Note the caller's stream, on which the last work of the exchange of ids is queued."""
        found = arrive(self)
        for features in found:
            made.brought[id(features)] = features, made.current()
        return found

    def read(self: _lookup.HostFeatures, features: KeyedJaggedTensor, clicks: Any, arrived_on: Stub | None) -> None:
        made.reading = features
        begin_to_read(self, features, clicks, arrived_on)

    def copied(tensors: Any, arrived_on: Stub | None) -> Any:
        """Note the stream on which the copies of a device would be queued."""
        made.copied.append((made.brought[id(made.reading)][1], arrived_on or made.current()))
        if len(made.copied) == made.fails_at:
            raise MemoryError("asked to fail")
        return copy(tensors, None)

    def looked_up(self: CacheLookup, features: KeyedJaggedTensor) -> torch.Tensor:
        made.looked_up.append(made.current())
        return forward(self, features)

    monkeypatch.setattr(runtime_forwards.BaseForward, "__init__", on_cpu)
    monkeypatch.setattr(embedding_sharding.KJTListAwaitable, "_wait_impl", brought)
    monkeypatch.setattr(_lookup.HostFeatures, "__init__", read)
    monkeypatch.setattr(_lookup, "host_copies", copied)
    # A pipeline sets it for all pipelines of the process.
    monkeypatch.setattr(runtime_forwards.PipelinedForward, "_use_main_stream_for_dist_init", False)
    monkeypatch.setattr(CacheLookup, "forward", looked_up)
    monkeypatch.setattr(torch.cpu, "current_stream", made.current)
    monkeypatch.setattr(torch.cpu, "stream", made.on)
    monkeypatch.setattr(torch.cpu, "Event", Event, raising=False)
    for kind in (KeyedJaggedTensor, KeyedTensor, torch.Tensor):
        monkeypatch.setattr(kind, "record_stream", lambda *_: None)
    return made


def piped(kind: Any, streams: Streams, options: dict[str, Any]) -> Any:
    """A pipeline of the CPU, which has no streams, with those that it would have on a GPU."""
    model = sharded(Model(), fused_params={"learning_rate": 0.05})
    pipeline = kind(model, dense_optimizer(model), CPU, **options)
    for name in ("memcpy", "data_dist", "prefetch"):
        if hasattr(pipeline, f"_{name}_stream"):
            setattr(pipeline, f"_{name}_stream", Stub(name))
    if kind is TrainPipelineSparseDistLite:
        pipeline._data_dist_stream = None  # on a GPU, too
    if kind is TrainPipelineFusedSparseDist:
        lookups = {"data_dist": pipeline._data_dist_stream, "new": Stub("lookups"), "current": streams.current()}
        pipeline._emb_lookup_stream = lookups[options.get("emb_lookup_stream", "data_dist")]
    pipeline._stream_context = streams.on
    return pipeline


# For each pipeline the streams on which batches are brought, on which their ids are copied, and on which rows are looked up.
KINDS: dict[str, tuple[Any, dict[str, Any], tuple[str, str, str]]] = {
    "base": (TrainPipelineBase, {}, ("forward", "forward", "forward")),
    "lite": (TrainPipelineSparseDistLite, {}, ("forward", "forward", "forward")),
    "sparse": (TrainPipelineSparseDist, {}, ("data_dist", "data_dist", "forward")),
    "sparse-cleared": (TrainPipelineSparseDist, {"clear_data_dist_inputs": True}, ("forward", "forward", "forward")),
    "prefetch": (PrefetchTrainPipelineSparseDist, {}, ("data_dist", "prefetch", "forward")),
    "semi-sync": (TrainPipelineSemiSync, {"start_batch": 3}, ("data_dist", "data_dist", "forward")),
    "fused": (TrainPipelineFusedSparseDist, {}, ("data_dist", "data_dist", "data_dist")),
    "fused-new": (TrainPipelineFusedSparseDist, {"emb_lookup_stream": "new"}, ("data_dist", "data_dist", "lookups")),
    "fused-current": (
        TrainPipelineFusedSparseDist,
        {"emb_lookup_stream": "current"},
        ("data_dist", "data_dist", "forward"),
    ),
    "ours": (EmbCacheTrainPipelineSparseDist, {}, ("data_dist", "data_dist", "forward")),
    "ours-3": (EmbCacheTrainPipelineSparseDist, {"lookahead": 3}, ("data_dist", "data_dist", "forward")),
    "ours-cleared": (
        EmbCacheTrainPipelineSparseDist,
        {"clear_data_dist_inputs": True},
        ("data_dist", "data_dist", "forward"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_copied_where_the_pipeline_brings_them(kind: str, streams: Streams) -> None:
    pipeline, options, want = KINDS[kind]
    losses = drain(piped(pipeline, streams, options), batches(STEPS))
    assert len(losses) == STEPS
    assert len(streams.copied) == len(streams.looked_up) == STEPS * 2, "the model has two lookups"
    names = [(brought.name, copied.name) for brought, copied in streams.copied]
    assert set(names) == {want[:2]}
    assert {stream.name for stream in streams.looked_up} == {want[2]}
    for brought, copied in streams.copied:
        assert copied is brought or brought.name in copied.waited_for
        assert "forward" not in copied.waited_for


@pytest.mark.parametrize("kind", ["prefetch", "ours", "ours-3"])
def test_ids_not_copied_ahead_are_copied_on_their_stream(kind: str, streams: Streams) -> None:
    """The forward copies them, on the stream that brought them."""
    pipeline, options, _ = KINDS[kind]
    streams.fails_at = 4
    assert len(drain(piped(pipeline, streams, options), batches(STEPS))) == STEPS
    assert len(streams.copied) == STEPS * 2 + 1
    again = [copied for brought, copied in streams.copied if brought is copied]
    assert again
    assert "forward" not in {copied.name for _, copied in streams.copied}
