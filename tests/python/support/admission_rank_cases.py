"""Models with admission on several ranks, and every pipeline that trains them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.train_pipeline import (
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDist,
    runtime_forwards,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync, TrainPipelineSparseDistLite
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_embcache import EmbCacheTrainPipelineSparseDist, admission, cache_modules
from torchrec_models import (
    CPU,
    Batch,
    Model,
    Rows,
    Settings,
    batches,
    rows_of,
    sharded,
)

FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
COUNTING = Settings(options={"admission": admission.Count(6)})


# A batch has a share for each rank.
SIZE = 12


def made(shardings: dict[str, str], settings: Settings = COUNTING) -> Any:
    return sharded(Model(settings), shardings, FUSED)


def train(model: Any, rank: int, world: int, steps: range) -> None:
    """Train the tables alone. The linear layer stays as it is, so that no checkpoint needs it."""
    for batch in list(batches(steps.stop, rank, world, size=SIZE))[steps.start :]:
        loss, _ = model(batch)
        loss.backward()


def pending(model: Any) -> list[int]:
    """How many ids of this rank wait for rows, table by table."""
    return [
        table.stats().admission.pending for module in cache_modules(model).values() for table in module.tables.values()
    ]


@contextlib.contextmanager
def pipelines_on_a_cpu() -> Iterator[None]:
    """Let pipelines of TorchRec that want streams of a GPU run without one."""
    begin = runtime_forwards.BaseForward.__init__

    def on_cpu(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        self._device = CPU

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_forwards.BaseForward, "__init__", on_cpu)
        patch.setattr(torch.cpu, "current_stream", lambda *_: None)
        patch.setattr(KeyedTensor, "record_stream", lambda *_: None)
        yield


PIPELINES: dict[str, Callable[[Any, Any], Any]] = {
    "base": lambda model, optimizer: TrainPipelineBase(model, optimizer, CPU),
    "sparse": lambda model, optimizer: TrainPipelineSparseDist(model, optimizer, CPU),
    "lite": lambda model, optimizer: TrainPipelineSparseDistLite(model, optimizer, CPU),
    "fused": lambda model, optimizer: TrainPipelineFusedSparseDist(model, optimizer, CPU),
    "semi-sync": lambda model, optimizer: TrainPipelineSemiSync(model, optimizer, CPU, start_batch=0),
    "ahead": lambda model, optimizer: EmbCacheTrainPipelineSparseDist(model, optimizer, CPU, lookahead=4),
}


def pipeline_of(kind: str, model: Any) -> Any:
    """A pipeline that trains the tables alone."""
    weights = [weight for name, weight in model.named_parameters() if "linear" in name]
    return PIPELINES[kind](model, torch.optim.SGD(weights, lr=0.0))


def drain(pipeline: Any, steps: Iterator[Batch]) -> None:
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(steps)


def state(model: Any) -> tuple[Rows, list[int]]:
    return rows_of(model), pending(model)
