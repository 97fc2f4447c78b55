"""A drop-in replacement of `torch.nn.Embedding` over a table larger than memory.

Shapes: N ids, n rows, D the embedding's width.
"""

from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache._lookup.prefetch import IdBatch
from torchrec_embcache.admission import Admission, NotAdmitted
from torchrec_embcache.config import DEFAULT_TOTAL_NUM_BUCKETS, CachePolicy, MissingRead, OnFull, TierBudgets
from torchrec_embcache.eviction import Policy as EvictionPolicy
from torchrec_embcache.initializers import Initializer
from torchrec_embcache.optimizers import OptimizerSpec
from torchrec_embcache.table._evict_callback import OnEvict
from torchrec_embcache.table._lifecycle import DEFAULT_SCORE_HALF_LIFE_STEPS
from torchrec_embcache.table.cache_table import IdsLike, ValuesLike
from torchrec_embcache.table.rows import ids_array

from ._base import TableModule, check_torch_arguments, import_pretrained, optimizer_of, single_feature_splits, width_of
from ._fx import trace_as_call

__all__ = ["EmbCacheEmbedding"]


class EmbCacheEmbedding(TableModule):
    """`torch.nn.Embedding` without `num_embeddings`: ids are any 64-bit integers, and rows are inserted when first trained.

    It takes `input`, int64 or int32 of any shape `(*)`, and returns float32 of shape `(*, D)`: the row of each id.
    `loss.backward()` updates the rows of the batch with `optimizer`. Each row is updated once; the gradients of an id that occurs
    several times are summed first. After `eval()`, under `torch.no_grad()` or with a frozen `weight` nothing is updated, and an id
    without a row reads its initial value and is not inserted.

    Args:
        name: the table's name, which also names its SSD directory. 1 to 200 bytes of UTF-8.
        embedding_dim: the width D of a row, from 1 to 65,536.
        tiers: the budgets in bytes of the device, host and SSD tier.
        optimizer: one of `torchrec_embcache.optimizers`. Its update runs in the backward.
        initializer: the initializer of new rows. By default `Uniform(-1/sqrt(D), 1/sqrt(D))`.
        seed: the seed of the rows' initial values. The same seed, name and id give the same row everywhere.
        padding_idx: an id that reads zeros and is never trained; None: no padding id.
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

    `dtype`, `max_norm`, `norm_type`, `scale_grad_by_freq` and `sparse` are arguments of `torch.nn.Embedding`. The constructor
    raises `UnsupportedError` for another dtype than float32, and for values of the others that would change an update.

    Raises:
        ConfigError: a setting is out of range, is positional, or contradicts another.
        UnsupportedError: an argument of torch has an unsupported value.
        InUseError, PathError, StoragePermissionError, MismatchError, StorageError: from the SSD tier's directory.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, initializers, optimizers
        >>> item = EmbCacheEmbedding(
        ...     name="item",
        ...     embedding_dim=3,
        ...     tiers=TierBudgets(host_bytes="1MiB"),
        ...     optimizer=optimizers.SGD(lr=0.5),
        ...     initializer=initializers.Linear(0.0, 1.0),  # every row is born as 0.0, 0.5, 1.0
        ... )
        >>> ids = torch.tensor([[7, -1], [7, 2**40]])  # [2, 2]
        >>> out = item(ids)  # [2, 2, 3]
        >>> out.shape
        torch.Size([2, 2, 3])
        >>> out.sum().backward()  # the gradient is 1 for each occurrence, so it is 2 for the id 7, which occurs twice
        >>> item.read_rows([7, -1]).weights  # [2, 3]
        tensor([[-1.0000, -0.5000,  0.0000],
                [-0.5000,  0.0000,  0.5000]])
        >>> len(item)
        3
        >>> item.close()
    """

    def __init__(
        self,
        *,
        name: str,
        embedding_dim: int,
        tiers: TierBudgets,
        optimizer: OptimizerSpec,
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

    @classmethod
    def from_pretrained(  # noqa: D417 - the class says the rest
        cls,
        ids: IdsLike,
        weights: ValuesLike | None = None,
        *,
        name: str,
        tiers: TierBudgets,
        optimizer: OptimizerSpec | None = None,
        freeze: bool = True,
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
        """Creates a module with pretrained rows. Settings that are not listed below are those of the class.

        Args:
            ids: [n] distinct 64-bit integers, as a tensor, a numpy array or a list.
            weights: [n, D] numbers, likewise. D becomes the module's width. Optimizer slots start at zero.
            freeze: True, as in torch: the rows are not trained. False needs an `optimizer`.

        Raises the errors of the class and of `import_rows`, and `ConfigError` for `freeze=False` without an optimizer.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets
            >>> item = EmbCacheEmbedding.from_pretrained(
            ...     [7, 9], [[1.0, 2.0], [3.0, 4.0]], name="item", tiers=TierBudgets(host_bytes="1MiB")
            ... )
            >>> item(torch.tensor([9]))
            tensor([[3., 4.]])
            >>> item.close()
        """
        made = cls(
            name=name,
            embedding_dim=width_of(cls, weights),
            tiers=tiers,
            optimizer=optimizer_of(optimizer, freeze=freeze),
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

    def forward(self, input: Tensor, clicks: Tensor | None = None) -> Tensor:
        """Returns the row of each id.

        Args:
            input: int64 or int32 ids of any shape `(*)`, on the CPU or on the table's device.
            clicks: the clicks of each id, integers of the shape of `input`, for a table with admission `ShowClick`. None: no
                clicks.

        Returns:
            float32 of shape `(*, D)`, on the table's device.

        Raises `InputError` for an invalid `input` or `clicks`, and `CapacityError` if the last tier is full and `on_full` is
        "error".
        """
        traced = trace_as_call(self, input, clicks)
        if traced is not None:
            return cast(Tensor, traced)
        batch, present = self._batch(input, clicks)
        out = self._group.sequence(
            batch.ids, batch.splits, train=self._begin_forward(), anchor=self.weight, clicks=batch.clicks
        )
        if present is not None:
            mask = torch.from_numpy(present).to(out.device)
            out = out.new_zeros(len(present), self.embedding_dim).masked_scatter(mask[:, None], out)
        return out.view(*input.shape, self.embedding_dim)

    def prefetch(self, input: Tensor, clicks: Tensor | None = None) -> bool:
        """Starts loading the rows of a later `forward(input, clicks)`. Call it in the order of those forwards.

        Returns False if the budget ended before all rows were loaded; the forward loads the rest. A forward with other ids drops
        the batches prefetched before it, with an `EmbCacheWarning`. They are also dropped by a call that would keep more than 16
        batches, and, if prefetched for evaluation, by the 17th training forward afterwards.

        Examples:
            >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
            >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
            >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
            >>> batches = [torch.tensor([7, 8]), torch.tensor([8, 9])]
            >>> for batch in batches:
            ...     fetched = item.prefetch(batch)  # up to 8 batches ahead
            >>> for batch in batches:
            ...     item(batch).sum().backward()
        """
        batch, _ = self._batch(input, clicks)
        return self._group.prefetch(batch, train=self._trains)

    def _batch(self, input: Tensor, clicks: Tensor | None) -> tuple[IdBatch, NDArray[np.bool_] | None]:
        """Returns the ids [n] without padding, and a mask of them in the flat input [N], which is None without a padding id."""
        ids = ids_array(input, "input", self.table.device)
        counted = self._clicks(clicks, len(ids))
        if self.padding_idx is None:
            return IdBatch(ids, single_feature_splits(ids), counted), None
        present = ids != self.padding_idx
        ids = ids[present]
        return IdBatch(ids, single_feature_splits(ids), None if counted is None else counted[present]), present
