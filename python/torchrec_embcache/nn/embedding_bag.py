"""A drop-in for `torch.nn.EmbeddingBag` over a table larger than memory.

Shapes: N ids, B bags, L ids a bag, n rows, D the embedding's width.
"""

from typing import Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache.admission import Admission, NotAdmitted
from torchrec_embcache.bags import bag_offsets
from torchrec_embcache.cache import IdsLike, ValuesLike
from torchrec_embcache.config import (
    DEFAULT_TOTAL_NUM_BUCKETS,
    CachePolicy,
    MissingRead,
    OnFull,
    TierBudgets,
    check_choice,
)
from torchrec_embcache.eviction import Policy as EvictionPolicy
from torchrec_embcache.exceptions import InputError, UnsupportedError
from torchrec_embcache.initializers import Initializer
from torchrec_embcache.lifecycle import DEFAULT_SCORE_HALF_LIFE_STEPS
from torchrec_embcache.lookahead import IdBatch
from torchrec_embcache.optimizers import OptimizerSpec
from torchrec_embcache.rows import check_float32, ids_array
from torchrec_embcache.table_module import (
    TableModule,
    check_torch_arguments,
    import_pretrained,
    optimizer_of,
    single_feature_splits,
    width_of,
)
from torchrec_embcache.telling import OnEvict
from torchrec_embcache.tracing import trace_as_call

__all__ = ["EmbCacheEmbeddingBag"]

I64 = NDArray[np.int64]
PoolingMode = Literal["sum", "mean", "max"]


class EmbCacheEmbeddingBag(TableModule):
    """`torch.nn.EmbeddingBag` without `num_embeddings`: any 64-bit integer is an id, and its row is born when it is first trained.

    It takes ids in bags and gives the sum or the mean of each bag's rows, float32 [B, D]. The ids are [N] with `offsets`, where
    each bag begins, or [B, L], a row for each bag. `loss.backward()` updates the rows of the batch with `optimizer`, each row once.
    After `eval()`, under `torch.no_grad()` or with a frozen `weight` nothing is updated, and an id that was never trained reads its
    initial value and is not inserted.

    Args:
        name: the table's name, which also names its SSD directory. 1 to 200 bytes of UTF-8.
        embedding_dim: the width D of a row, from 1 to 65,536.
        tiers: the budgets in bytes of the device, host and SSD tier.
        optimizer: one of `torchrec_embcache.optimizers`. Its update runs in the backward.
        mode: "mean" (as in torch) or "sum". `UnsupportedError` for "max".
        include_last_offset: `offsets` also says where the last bag ends: [B + 1] in place of [B].
        initializer: how rows are born. By default `Uniform(-1/sqrt(D), 1/sqrt(D))`.
        seed: of the rows' births. The same seed, name and id give the same row everywhere.
        padding_idx: an id that is left out of its bags, and of a mean's divisor; None: there is no such id.
        policy: which rows leave a full tier first: "s3fifo", "lru" or "lfu".
        on_full: what happens when the last tier is full: "error" raises `CapacityError` and loses nothing, "evict" drops rows.
        missing: what evaluation reads for an id without a row: its "initial" value or "zeros". None: what training reads.
        admission: which ids get a row when they are trained; one of `torchrec_embcache.admission`. None: all.
        not_admitted: what training reads for an id that gets none: "zeros", its "initial" value, a number for every column, or
            "oov": one row of the table, which the gradients of all such ids train. Only with `admission`.
        score_half_life_steps: the score of a row, the sum of its occurrences, halves over so many steps.
        eviction: which rows leave by rule, and when; a `torchrec_embcache.eviction.Policy`. None: none do.
        on_evict: who is told of evicted rows: a callable, which a thread calls with `EvictedRows`, or "keep", for `drain_evicted`.
            None: nobody.
        total_num_buckets: how many buckets ids are spread over, which ranks share; from 1 to 2^20, and fixed for the table's life.
        device: where the results are, such as "cpu" or "cuda:0". Tables on another device than the CPU need a device tier.
        replicated: where `torch.distributed` has several ranks, each trains a table of its own, and a warning says so.
            True says that this is meant. To share one table, use a collection with its sharder.

    `dtype`, `max_norm`, `norm_type`, `scale_grad_by_freq` and `sparse` are arguments of `torch.nn.EmbeddingBag`. It raises
    `UnsupportedError` for another dtype than float32, and for values of the others that change what an update does.

    It raises as `EmbCacheEmbedding` does.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers
        >>> item = EmbCacheEmbeddingBag(
        ...     name="item",
        ...     embedding_dim=3,
        ...     mode="sum",
        ...     tiers=TierBudgets(host_bytes="1MiB"),
        ...     optimizer=optimizers.SGD(lr=0.5),
        ...     initializer=initializers.Linear(0.0, 1.0),  # every row is born as 0.0, 0.5, 1.0
        ... )
        >>> ids = torch.tensor([7, -1, 2**40])  # [N], N = 3
        >>> offsets = torch.tensor([0, 2, 2])  # [B], B = 3: the bags are ids[0:2], ids[2:2], which is empty, and ids[2:3]
        >>> out = item(ids, offsets)  # [B, D]
        >>> out.detach()
        tensor([[0.0000, 1.0000, 2.0000],
                [0.0000, 0.0000, 0.0000],
                [0.0000, 0.5000, 1.0000]])
        >>> out.sum().backward()  # the update happens here
        >>> item.read_rows([7]).weights
        tensor([[-0.5000,  0.0000,  0.5000]])
        >>> item.close()
    """

    def __init__(
        self,
        *,
        name: str,
        embedding_dim: int,
        tiers: TierBudgets,
        optimizer: OptimizerSpec,
        mode: PoolingMode = "mean",
        include_last_offset: bool = False,
        initializer: Initializer | None = None,
        seed: int = 0,
        padding_idx: int | None = None,
        policy: CachePolicy = "s3fifo",
        on_full: OnFull = "error",
        missing: MissingRead | None = None,
        admission: Admission | None = None,
        not_admitted: NotAdmitted = "zeros",
        score_half_life_steps: int = DEFAULT_SCORE_HALF_LIFE_STEPS,
        eviction: EvictionPolicy | None = None,
        on_evict: OnEvict | None = None,
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        replicated: bool = False,
    ) -> None:
        if mode == "max":
            raise UnsupportedError("mode='max': the fused backward sums; use mode='sum' or 'mean'")
        check_choice("mode", mode, Literal["sum", "mean"])
        check_torch_arguments(dtype=dtype, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        del norm_type  # means nothing without max_norm
        super().__init__(
            name=name,
            embedding_dim=embedding_dim,
            tiers=tiers,
            optimizer=optimizer,
            initializer=initializer,
            seed=seed,
            padding_idx=padding_idx,
            policy=policy,
            on_full=on_full,
            missing=missing,
            admission=admission,
            not_admitted=not_admitted,
            score_half_life_steps=score_half_life_steps,
            eviction=eviction,
            on_evict=on_evict,
            total_num_buckets=total_num_buckets,
            device=device,
            replicated=replicated,
        )
        self.mode: PoolingMode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls,
        ids: IdsLike,
        weights: ValuesLike | None = None,
        *,
        name: str,
        tiers: TierBudgets,
        optimizer: OptimizerSpec | None = None,
        freeze: bool = True,
        mode: PoolingMode = "mean",
        include_last_offset: bool = False,
        initializer: Initializer | None = None,
        seed: int = 0,
        padding_idx: int | None = None,
        policy: CachePolicy = "s3fifo",
        on_full: OnFull = "error",
        missing: MissingRead | None = None,
        admission: Admission | None = None,
        not_admitted: NotAdmitted = "zeros",
        score_half_life_steps: int = DEFAULT_SCORE_HALF_LIFE_STEPS,
        eviction: EvictionPolicy | None = None,
        on_evict: OnEvict | None = None,
        total_num_buckets: int = DEFAULT_TOTAL_NUM_BUCKETS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        replicated: bool = False,
    ) -> Self:
        """A module with rows that were trained elsewhere, `ids` [n] with `weights` [n, D]; see `EmbCacheEmbedding`'s.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets
            >>> item = EmbCacheEmbeddingBag.from_pretrained(
            ...     [7, 9], [[1.0, 2.0], [3.0, 4.0]], name="item", tiers=TierBudgets(host_bytes="1MiB")
            ... )
            >>> item(torch.tensor([[7, 9]]))  # the mean of both
            tensor([[2., 3.]])
        """
        made = cls(
            name=name,
            embedding_dim=width_of(cls, weights),
            tiers=tiers,
            optimizer=optimizer_of(optimizer, freeze=freeze),
            mode=mode,
            include_last_offset=include_last_offset,
            initializer=initializer,
            seed=seed,
            padding_idx=padding_idx,
            policy=policy,
            on_full=on_full,
            missing=missing,
            admission=admission,
            not_admitted=not_admitted,
            score_half_life_steps=score_half_life_steps,
            eviction=eviction,
            on_evict=on_evict,
            total_num_buckets=total_num_buckets,
            device=device,
            dtype=dtype,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            replicated=replicated,
        )
        import_pretrained(made, ids, cast(ValuesLike, weights), freeze=freeze)
        return made

    def extra_repr(self) -> str:
        """What `print(module)` shows: settings, rows, budgets, the optimizer's learning rate and the mode."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        clicks: Tensor | None = None,
    ) -> Tensor:
        """The sum or mean of each bag's rows.

        Args:
            input: int64 or int32 ids, [N] with `offsets`, or [B, L] without, a bag in each row.
            offsets: [B], where each bag begins in `input`; [B + 1] with `include_last_offset`.
            per_sample_weights: float32 of the shape of `input`, which multiply the rows. Mode "sum" only. They get a gradient, from
                the rows as they are before the update.
            clicks: those of each id, integers of the shape of `input`, for a table with admission `ShowClick`. None: no clicks.

        Returns:
            float32 [B, D], on the table's device. An empty bag gives zeros.

        Raises `InputError` for malformed arguments, `UnsupportedError` for `per_sample_weights` with mode "mean", and
        `CapacityError` where the last tier is full and `on_full` is "error". The backward raises torch's `RuntimeError` where
        `offsets` or `per_sample_weights` were changed in place after the forward.
        """
        traced = trace_as_call(self, input, offsets, per_sample_weights, clicks)
        if traced is not None:
            return cast(Tensor, traced)
        batch, bounds, present = self._split_bags(input, offsets, clicks)
        weights = None
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise UnsupportedError(f"per_sample_weights with mode={self.mode!r}: as in torch, use mode='sum'")
            check_float32("per_sample_weights", per_sample_weights, tuple(input.shape))
            if per_sample_weights.device != self.table.device:
                raise InputError(
                    f"per_sample_weights is on {per_sample_weights.device} and the table on {self.table.device}: move one of them"
                )
            weights = per_sample_weights.reshape(-1)
            if present is not None:
                weights = weights[torch.from_numpy(present).to(weights.device)]
        lent = [offsets] if isinstance(offsets, Tensor) else []
        return self._group.pooled(
            batch.ids,
            bounds,
            [self.mode == "mean"],
            weights,
            train=self._begin_forward(),
            anchor=self.weight,
            clicks=batch.clicks,
            unchanged_inputs=lent,
        )

    def prefetch(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        clicks: Tensor | None = None,
    ) -> bool:
        """Begin to fetch the rows of a later forward of these arguments; see `EmbCacheEmbedding.prefetch`.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
            >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
            >>> item = EmbCacheEmbeddingBag(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
            >>> item.prefetch(torch.tensor([[7, 8]]))
            True
            >>> item(torch.tensor([[7, 8]])).sum().backward()
        """
        del per_sample_weights  # the same rows are needed, whatever their weights
        batch, _, _ = self._split_bags(input, offsets, clicks)
        return self._group.prefetch(batch, train=self._trains)

    def _split_bags(
        self, input: Tensor, offsets: object, clicks: Tensor | None
    ) -> tuple[IdBatch, I64, NDArray[np.bool_] | None]:
        """The ids [n] that are not padding, where each bag begins in them [B + 1], and where they are in the input [N].

        The last is None where all of the input are such ids.
        """
        ids = ids_array(input, "input", self.table.device)
        bounds = bag_offsets(
            input, ids, offsets, include_last_offset=self.include_last_offset, device=self.table.device
        )
        counted = self._clicks(clicks, len(ids))
        if self.padding_idx is None:
            return IdBatch(ids, single_feature_splits(ids), counted), bounds, None
        present = ids != self.padding_idx
        ids = ids[present]
        batch = IdBatch(ids, single_feature_splits(ids), None if counted is None else counted[present])
        return batch, np.concatenate([[0], np.cumsum(present)])[bounds], present
