"""Training with lookahead: rows of the batches to come are fetched while this one computes.

In each step: plan the batch `lookahead` ahead (its ids arrived in the step before) on a thread beside, load one more batch and
start sending its ids, compute the current one. Every rank does these in the same order: the exchanges are collectives.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import TrainPipelineContext
from torchrec.distributed.types import NoWait

from .config import check_int
from .sharded.collections import ShardedCacheModule

__all__ = ["EmbCacheTrainPipelineSparseDist"]

MAX_LOOKAHEAD = 8

logger = logging.getLogger("torchrec_embcache")


class EmbCacheTrainPipelineSparseDist(TrainPipelineSparseDist):
    """TorchRec's `TrainPipelineSparseDist` with rows fetched `lookahead` (1 to 8) batches ahead; results are the same bits.

    `progress(iterator)` trains on the next batch and returns the model's output; StopIteration when they are used up. The model
    is as TorchRec wants it: it returns (loss, output), batches are `Pipelineable`, and each sharded module reads its features
    straight from the batch. Queued batches: lookahead + 2. An error drops the batch it comes from; the next `progress` goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        lookahead: int = 1,
        **options: Any,
    ) -> None:
        self._lookahead = check_int("lookahead", lookahead, 1, MAX_LOOKAHEAD)
        self._planned = 0  # batches at the head of the queue whose rows are on their way
        super().__init__(model, optimizer, device, **options)

    @property
    def lookahead(self) -> int:
        """How many batches ahead rows are fetched."""
        return self._lookahead

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Bring the queue to `lookahead + 1` batches, all of them planned, as far as there are batches."""
        while len(self.batches) <= self._lookahead and self._enqueue(dataloader_iter):
            pass
        while self._planned < min(len(self.batches), self._lookahead + 1):
            self._plan_next()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train (or, with the model in eval mode, run) one batch."""
        if not self._model_attached:
            self.attach()
        try:
            self.fill_pipeline(dataloader_iter)
            if not self.batches:
                raise StopIteration
            return self._step(dataloader_iter)
        finally:
            # Between steps nobody but the caller uses the tables.
            for module in self._cache_modules():
                module.settle_prefetched()

    def _cache_modules(self) -> list[ShardedCacheModule]:
        return [module for module in self._pipelined_modules if isinstance(module, ShardedCacheModule)]

    def _step(self, dataloader_iter: Iterator[Any]) -> Any:
        self._set_module_context(self.contexts[0])
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        self._wait_for_batch()
        arriving = self._enqueue(dataloader_iter)
        try:
            losses, output = self._model_fwd(self.batches[0])
            if arriving:
                self.wait_sparse_data_dist(self.contexts[-1])
            if training:
                self._backward(losses)
                self._optimizer_step()
        finally:
            self._planned -= 1
            self.dequeue_batch()
        return output

    def reset(self) -> None:
        """Forget the queued batches and unpin their rows."""
        super().reset()
        for module in self._cache_modules():
            module.forget_prefetched()
        self._planned = 0

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = False) -> None:
        """Take the model (again) after `detach`. Queued batches, whose ids have arrived, go on where they were."""
        del sparse_dist  # would send the ids of a queued batch again
        super().attach(model, sparse_dist=False)

    def _enqueue(self, dataloader_iter: Iterator[Any]) -> bool:
        """Load one batch, if there is one, and start sending its ids."""
        if not self.enqueue_batch(dataloader_iter):
            return False
        if self._pipelined_modules:
            self.start_sparse_data_dist(self.batches[-1], self.contexts[-1])
        else:
            self._init_pipelined_modules(self.batches[-1], self.contexts[-1], self._pipelined_forward_type)
        return True

    def _plan_next(self) -> None:
        context: TrainPipelineContext = self.contexts[self._planned]
        if context.fused_splits_awaitables:
            self.wait_sparse_data_dist(context)
        for module in self._pipelined_modules:
            name = module.forward.name
            data = context.input_dist_tensors_requests.pop(name).wait()
            beside = {"beside": True} if isinstance(module, ShardedCacheModule) else {}
            module.prefetch(data, ctx=context.module_contexts[name], **beside)
            context.input_dist_tensors_requests[name] = NoWait(data)
        self._planned += 1
