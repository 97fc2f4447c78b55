"""A drop-in replacement of `torch.nn.Embedding` over a table larger than memory.

Shapes: N ids, n rows, D the embedding's width.
"""

from typing import Self, Unpack, cast

import torch
from torch import Tensor

from torchrec_embcache.config import TierBudgets
from torchrec_embcache.optimizers import OptimizerSpec
from torchrec_embcache.table._settings import list_options
from torchrec_embcache.table.cache_table import IdsLike, ValuesLike
from torchrec_embcache.table.rows import ids_array

from ._base import ModuleOptions, TableModule
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
        total_num_buckets: number of buckets into which ids are hashed, and which ranks share; from 1 to 2^20, and fixed for the
            table's lifetime.
        device: the device of results, such as "cpu" or "cuda:0". Tables on another device than the CPU need a device tier.
        replicated: with several ranks in `torch.distributed` each rank trains a separate table, which causes a warning. True
            confirms that this is intended. To share one table, use a collection with its sharder.

    The other arguments are those of `TableOptions`, and `dtype`, `max_norm`, `norm_type`, `scale_grad_by_freq` and `sparse` of
    `torch.nn.Embedding`. The constructor raises `UnsupportedError` for another dtype than float32, and for values of the others
    that would change an update.

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

    @classmethod
    @list_options(TableModule.__init__)
    def from_pretrained(  # noqa: D417 - the class says the rest
        cls,
        ids: IdsLike,
        weights: ValuesLike | None = None,
        *,
        name: str,
        tiers: TierBudgets,
        optimizer: OptimizerSpec | None = None,
        freeze: bool = True,
        **options: Unpack[ModuleOptions],
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
        return cls._from_pretrained(ids, weights, optimizer, freeze=freeze, name=name, tiers=tiers, **options)

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
        batch, present = self._id_batch(ids_array(input, "input", self.table.device), clicks)
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
        batch, _ = self._id_batch(ids_array(input, "input", self.table.device), clicks)
        return self._group.prefetch(batch, train=self._trains)
