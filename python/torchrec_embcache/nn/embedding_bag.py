"""A drop-in replacement of `torch.nn.EmbeddingBag` over a table larger than memory.

Shapes: N ids, B bags, L ids per bag, n rows, D the embedding's width.
"""

from typing import Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache._lookup.offsets import bag_offsets
from torchrec_embcache._lookup.prefetch import IdBatch
from torchrec_embcache.admission import Admission, NotAdmitted
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
from torchrec_embcache.optimizers import OptimizerSpec
from torchrec_embcache.table._evict_callback import OnEvict
from torchrec_embcache.table._lifecycle import DEFAULT_SCORE_HALF_LIFE_STEPS
from torchrec_embcache.table.cache_table import IdsLike, ValuesLike
from torchrec_embcache.table.rows import check_float32, ids_array

from ._base import TableModule, check_torch_arguments, import_pretrained, optimizer_of, single_feature_splits, width_of
from ._fx import trace_as_call

__all__ = ["EmbCacheEmbeddingBag"]

I64 = NDArray[np.int64]
PoolingMode = Literal["sum", "mean", "max"]


class EmbCacheEmbeddingBag(TableModule):
    """`torch.nn.EmbeddingBag` without `num_embeddings`: ids are any 64-bit integers, and rows are inserted when first trained.

    It takes ids in bags and returns the sum or the mean of each bag's rows, float32 [B, D]. The ids are [N] with `offsets`, the
    start of each bag, or [B, L], one row per bag. `loss.backward()` updates the rows of the batch with `optimizer`, each row once.
    After `eval()`, under `torch.no_grad()` or with a frozen `weight` nothing is updated, and an id without a row reads its initial
    value and is not inserted.

    Args:
        name: the table's name, which also names its SSD directory. 1 to 200 bytes of UTF-8.
        embedding_dim: the width D of a row, from 1 to 65,536.
        tiers: the budgets in bytes of the device, host and SSD tier.
        optimizer: one of `torchrec_embcache.optimizers`. Its update runs in the backward.
        mode: "mean" (as in torch) or "sum". "max" raises `UnsupportedError`.
        include_last_offset: `offsets` also contains the end of the last bag: [B + 1] instead of [B].
        initializer: the initializer of new rows. By default `Uniform(-1/sqrt(D), 1/sqrt(D))`.
        seed: the seed of the rows' initial values. The same seed, name and id give the same row everywhere.
        padding_idx: an id that is excluded from its bags, and from a mean's divisor; None: no padding id.
        policy: the replacement policy of a full tier: "s3fifo", "lru" or "lfu".
        on_full: behavior when the last tier is full: "error" raises `CapacityError` and loses no rows, "evict" drops rows.
        missing: value that evaluation reads for an id without a row: its "initial" value or "zeros". None: the same as in training.
        admission: the admission rule; one of `torchrec_embcache.admission`. None: every id is admitted.
        not_admitted: value that training reads for an id that is not admitted: "zeros", its "initial" value, a number for every
            column, or "oov": one row of the table (the OOV row), which the gradients of all such ids train. Requires `admission`.
        score_half_life_steps: half-life in steps of a row's score, which is the decayed sum of its occurrences.
        eviction: the rules that expire rows, and when they run; a `torchrec_embcache.eviction.Policy`. None: no rows expire.
        on_evict: receiver of evicted rows: a callable, which a thread calls with `EvictedRows`, or "keep", to queue them for
            `drain_evicted`. None: no receiver.
        total_num_buckets: number of buckets into which ids are hashed, and which ranks share; from 1 to 2^20, and fixed for the
            table's lifetime.
        device: the device of results, such as "cpu" or "cuda:0". Tables on another device than the CPU need a device tier.
        replicated: with several ranks in `torch.distributed` each rank trains a separate table, which causes a warning. True
            confirms that this is intended. To share one table, use a collection with its sharder.

    `dtype`, `max_norm`, `norm_type`, `scale_grad_by_freq` and `sparse` are arguments of `torch.nn.EmbeddingBag`. The constructor
    raises `UnsupportedError` for another dtype than float32, and for values of the others that would change an update.

    Raises the errors of `EmbCacheEmbedding`.

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
        del norm_type  # without effect unless max_norm is set
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
        """Creates a module with pretrained rows, `ids` [n] with `weights` [n, D]; see `EmbCacheEmbedding.from_pretrained`.

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
        """Returns the text of `print(module)`: settings, rows, budgets, the optimizer's learning rate and the mode."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        clicks: Tensor | None = None,
    ) -> Tensor:
        """Returns the sum or mean of each bag's rows.

        Args:
            input: int64 or int32 ids, [N] with `offsets`, or [B, L] without, one bag per row.
            offsets: [B], the start of each bag in `input`; [B + 1] with `include_last_offset`.
            per_sample_weights: float32 of the shape of `input`, which multiply the rows. Mode "sum" only. They get a gradient, from
                the rows before the update.
            clicks: the clicks of each id, integers of the shape of `input`, for a table with admission `ShowClick`. None: no
                clicks.

        Returns:
            float32 [B, D], on the table's device. An empty bag returns zeros.

        Raises `InputError` for malformed arguments, `UnsupportedError` for `per_sample_weights` with mode "mean", and
        `CapacityError` if the last tier is full and `on_full` is "error". The backward raises torch's `RuntimeError` if `offsets`
        or `per_sample_weights` were changed in place after the forward.
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
        """Starts loading the rows of a later forward with these arguments; see `EmbCacheEmbedding.prefetch`.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
            >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
            >>> item = EmbCacheEmbeddingBag(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
            >>> item.prefetch(torch.tensor([[7, 8]]))
            True
            >>> item(torch.tensor([[7, 8]])).sum().backward()
        """
        del per_sample_weights  # the rows do not depend on their weights
        batch, _, _ = self._split_bags(input, offsets, clicks)
        return self._group.prefetch(batch, train=self._trains)

    def _split_bags(
        self, input: Tensor, offsets: object, clicks: Tensor | None
    ) -> tuple[IdBatch, I64, NDArray[np.bool_] | None]:
        """Returns the ids [n] without padding, the bounds of the bags in them [B + 1], and a mask of them in the input [N].

        The mask is None if there is no padding id.
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
