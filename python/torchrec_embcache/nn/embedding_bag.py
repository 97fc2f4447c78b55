"""A drop-in replacement of `torch.nn.EmbeddingBag` over a table larger than memory.

Shapes: N ids, B bags, L ids per bag, n rows, D the embedding's width.
"""

from typing import Literal, Self, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache._lookup.offsets import bag_offsets
from torchrec_embcache._lookup.prefetch import IdBatch
from torchrec_embcache.config import TierBudgets, check_choice
from torchrec_embcache.exceptions import InputError, UnsupportedError
from torchrec_embcache.optimizers import OptimizerSpec
from torchrec_embcache.table._settings import list_options
from torchrec_embcache.table.cache_table import IdsLike, ValuesLike
from torchrec_embcache.table.rows import check_float32, ids_array

from ._base import ModuleOptions, TableModule
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
        mode: "mean" (as in torch) or "sum". "max" raises `UnsupportedError`.
        include_last_offset: `offsets` also contains the end of the last bag: [B + 1] instead of [B].
        padding_idx: an id that is excluded from its bags, and from a mean's divisor; None: no padding id.

    The other arguments, and the errors, are those of `EmbCacheEmbedding`.

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

    @list_options(TableModule.__init__)
    def __init__(
        self,
        *,
        name: str,
        embedding_dim: int,
        tiers: TierBudgets,
        optimizer: OptimizerSpec,
        mode: PoolingMode = "mean",
        include_last_offset: bool = False,
        **options: Unpack[ModuleOptions],
    ) -> None:
        if mode == "max":
            raise UnsupportedError("mode='max': the fused backward sums; use mode='sum' or 'mean'")
        check_choice("mode", mode, Literal["sum", "mean"])
        super().__init__(name=name, embedding_dim=embedding_dim, tiers=tiers, optimizer=optimizer, **options)
        self.mode: PoolingMode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    @list_options(TableModule.__init__)
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
        **options: Unpack[ModuleOptions],
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
        settings = {"name": name, "tiers": tiers, "mode": mode, "include_last_offset": include_last_offset, **options}
        return cls._from_pretrained(ids, weights, optimizer, freeze=freeze, **settings)

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
        batch, present = self._id_batch(ids, clicks)
        if present is not None:
            bounds = np.concatenate([[0], np.cumsum(present)])[bounds]
        return batch, bounds, present
