"""Training with lookahead: the rows of later batches are loaded while the current batch computes.

In each step the pipeline plans the batch `lookahead` steps ahead, whose ids arrived in the previous step, on a planner thread. It
loads one more batch and starts to send its ids. Then it computes the current batch, and moves the rows of the next one to the
device. The exchanges are collectives, so that every rank does all of this in the same order.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import TrainPipelineContext
from torchrec.distributed.types import NoWait

from torchrec_embcache.config import check_int

from ._module import ShardedCacheModule

__all__ = ["EmbCacheTrainPipelineSparseDist"]

MAX_LOOKAHEAD = 8

logger = logging.getLogger("torchrec_embcache")


class EmbCacheTrainPipelineSparseDist(TrainPipelineSparseDist):
    """TorchRec's `TrainPipelineSparseDist`, which also loads the rows of up to 8 later batches while one computes.

    The rows of the next batch move to a device tier while the device computes. Results are bitwise identical for any `lookahead`.
    `lookahead + 2` batches are queued.

    Args:
        model: returns `(loss, output)`, and each of its sharded modules reads its features directly from the batch, as TorchRec
            requires. Batches are `Pipelineable`.
        optimizer: the optimizer of the dense parameters. The rows' optimizer runs in the backward.
        device: the device to which batches are copied.
        lookahead: number of batches ahead for which rows are loaded, from 1 to 8.

    The other arguments are those of TorchRec's class. Raises `ConfigError` for a `lookahead` out of range. An error in a step drops
    the batch that caused it, and the next `progress` continues with the following batch.

    Examples:
        In a world of one rank, with `torch.distributed` initialized:

        >>> from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
        >>> from torchrec.datasets.utils import Batch
        >>> from torchrec.distributed import DistributedModelParallel
        >>> from torchrec_embcache import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagCollectionSharder
        >>> from torchrec_embcache import EmbCacheTrainPipelineSparseDist, TierBudgets
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         item = EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=1000, feature_names=["item"])
        ...         self.items = EmbCacheEmbeddingBagCollection(tables=[item], tiers=TierBudgets(host_bytes="1MiB"))
        ...         self.over = nn.Linear(4, 1)
        ...     def forward(self, batch):
        ...         logits = self.over(self.items(batch.sparse_features).values())[:, 0]  # [B]
        ...         return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()
        >>> cpu = torch.device("cpu")
        >>> sharder = EmbCacheEmbeddingBagCollectionSharder({"learning_rate": 0.1})
        >>> model = DistributedModelParallel(Model(), device=cpu, sharders=[sharder])
        >>> dense = torch.optim.SGD([value for name, value in model.named_parameters() if "over" in name], lr=0.1)
        >>> pipeline = EmbCacheTrainPipelineSparseDist(model, dense, cpu, lookahead=4)
        >>> features = KeyedJaggedTensor(["item"], torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 1]))
        >>> loader = iter([Batch(torch.empty(2, 0), features, torch.tensor([0.0, 1.0]))] * 3)
        >>> for _ in range(3):
        ...     logits = pipeline.progress(loader)
        >>> logits.shape
        torch.Size([2])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        lookahead: int = 1,
        *,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        async_inplace_copy: bool = False,
    ) -> None:
        self._lookahead = check_int("lookahead", lookahead, 1, MAX_LOOKAHEAD)
        self._planned = 0  # batches at the head of the queue that are planned
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches=execute_all_batches,
            apply_jit=apply_jit,
            context_type=context_type,
            pipeline_postproc=pipeline_postproc,
            custom_model_fwd=custom_model_fwd,
            dmp_collection_sync_interval_batches=dmp_collection_sync_interval_batches,
            enqueue_batch_after_forward=enqueue_batch_after_forward,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
            async_inplace_copy=async_inplace_copy,
        )

    @property
    def lookahead(self) -> int:
        """Number of batches ahead for which rows are loaded, from 1 to 8."""
        return self._lookahead

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Fills the queue to `lookahead + 1` planned batches, or as many as are available."""
        while len(self.batches) <= self._lookahead and self._enqueue(dataloader_iter):
            pass
        while self._planned < min(len(self.batches), self._lookahead + 1):
            self._plan_next()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains on the next batch of `dataloader_iter` and returns the model's output. With the model in eval mode, only runs it.

        Raises `StopIteration` when no batch is left.
        """
        if not self._model_attached:
            self.attach()
        try:
            self.fill_pipeline(dataloader_iter)
            if not self.batches:
                raise StopIteration
            return self._step(dataloader_iter)
        finally:
            # Between steps only the caller uses the tables.
            for module in self._cache_modules():
                module.wait_for_prefetch()

    def _cache_modules(self) -> list[ShardedCacheModule]:
        return [module for module in self._pipelined_modules if isinstance(module, ShardedCacheModule)]

    def _step(self, dataloader_iter: Iterator[Any]) -> Any:
        self._set_module_context(self.contexts[0])
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        self._wait_for_batch()
        arriving = not self._enqueue_batch_after_forward and self._enqueue(dataloader_iter)
        try:
            losses, output = self._model_fwd(self.batches[0])
            if self._enqueue_batch_after_forward:
                arriving = self._enqueue(dataloader_iter)
            if arriving:
                self.wait_sparse_data_dist(self.contexts[-1])
            if training:
                self._backward(losses)
                self._optimizer_step()
        finally:
            self._planned -= 1
            self.dequeue_batch()
        if training and self._planned:
            self._place_next()
        return output

    def _place_next(self) -> None:
        """Moves the rows of the next batch while the device still computes the queued step, before the caller may wait for it."""
        context = self.contexts[0]
        for module in self._cache_modules():
            name = module.forward.name  # type: ignore[attr-defined]
            module.place_next(context.input_dist_tensors_requests[name].wait(), context.module_contexts[name])

    def detach(self) -> nn.Module:
        """Returns the original model, for an evaluation or a save. Queued batches are kept, and continue after `attach`.

        Rows of the next batch that moved to the device are unpinned, so that the caller has the entire budget.
        """
        for module in self._cache_modules():
            module.unplace_rows()
        model: nn.Module = super().detach()
        return model

    def reset(self) -> None:
        """Drops the queued batches and unpins their rows."""
        super().reset()
        for module in self._cache_modules():
            module.drop_prefetched()
        self._planned = 0

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = False) -> None:
        """Attaches the model again after `detach`. Previously queued batches continue."""
        del sparse_dist  # True would send the ids of queued batches again
        super().attach(model, sparse_dist=False)

    def _enqueue(self, dataloader_iter: Iterator[Any]) -> bool:
        """Loads one batch and starts to send its ids. Returns False if there is none."""
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
        if self._clear_data_dist_inputs:
            self.clear_sparse_data_dist_inputs(context)
        for module in self._pipelined_modules:
            name = module.forward.name
            request, module_context = context.input_dist_tensors_requests.pop(name), context.module_contexts[name]
            if isinstance(module, ShardedCacheModule):
                # On this stream, because the stream of the forwards is still computing previous batches.
                with self._stream_context(self._data_dist_stream):
                    data = request.wait()
                    module.prefetch(data, ctx=module_context, in_background=True)
            else:
                # Work that TorchRec's own modules queue for this must come after the previous forwards.
                data = request.wait()
                module.prefetch(data, ctx=module_context)
            context.input_dist_tensors_requests[name] = NoWait(data)
        self._planned += 1
