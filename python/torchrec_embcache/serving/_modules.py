"""Base of the modules that read served tables, and the plain PyTorch modules.

Shapes: N ids, B bags, D a table's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_embcache._lookup.offsets import bag_offsets
from torchrec_embcache.exceptions import InputError, MismatchError, UnsupportedError
from torchrec_embcache.model._names import TablePath, display_name
from torchrec_embcache.table.rows import check_float32, contiguous, ids_array

from .tables import Tables
from .version import Pooling, Table, Version, current_version

__all__ = ["ServingEmbedding", "ServingEmbeddingBag", "ServingModule", "TableRef", "pinned", "tables_of"]


@contextmanager
def pinned(tables: Tables) -> Iterator[Version]:
    """Yields the version that the caller has pinned by a `with` statement, or else pins the latest one for this context.

    Raises `UnsupportedError` under torch.jit.trace, which would record the rows as constants instead of lookups.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise UnsupportedError(
            "torch.jit.trace cannot record lookups in tables that are served: use torch.export or torchrec.fx.symbolic_trace"
        )
    version = current_version(tables)
    if version is not None:
        yield version
        return
    with tables.pin() as version:
        yield version


@dataclass(frozen=True)
class TableRef:
    """Reference to a table that a module reads: its path in the checkpoint and its width."""

    pair: TablePath
    dim: int

    def in_version(self, version: Version) -> Table:
        """Returns this table of a version. Raises `MismatchError` if the version has no table of this name and width."""
        found = version.by_pair().get(self.pair)
        if found is None:
            listed = ", ".join(sorted(display_name(pair) for pair in version.by_pair())) or "none"
            raise MismatchError(
                f"checkpoint {version.name} has no table {display_name(self.pair)!r}; it has {listed}: give replace() "
                f"modules=, the path "
                "of a module in the checkpoint by its path in the model"
            )
        if found.dim != self.dim:
            raise MismatchError(
                f"table {display_name(self.pair)!r} has embedding_dim {self.dim} in the model and {found.dim} in checkpoint "
                f"{version.name}: make the model as the one that was trained"
            )
        return found


class ServingModule(nn.Module):
    """A module that reads served tables. It has no parameters and computes no gradients."""

    def __init__(self, served: Tables, tables: Sequence[TableRef]) -> None:
        super().__init__()
        self.served = served
        self._tables = tuple(tables)
        with pinned(served) as version:
            for table in self._tables:
                table.in_version(version)

    def extra_repr(self) -> str:
        """Returns the tables and the directory that they are served from."""
        return f"{', '.join(display_name(table.pair) for table in self._tables)}, served from {self.served.path!r}"


class ServingEmbedding(ServingModule):
    """`EmbCacheEmbedding` over a served table: ids of any shape in, float32 `(*, D)` out, on the device of the ids."""

    def __init__(self, served: Tables, table: TableRef, padding_idx: int | None) -> None:
        super().__init__(served, [table])
        self.padding_idx = padding_idx
        self.embedding_dim = table.dim

    def forward(self, input: Tensor, clicks: Tensor | None = None) -> Tensor:  # noqa: A002  # torch's name
        """Returns the row of each id, and zeros for `padding_idx`. `clicks` only affect training and are ignored."""
        del clicks
        ids = ids_array(input, "input", _device_of(input))
        with pinned(self.served) as version:
            rows = self._tables[0].in_version(version).lookup_array(ids).as_subclass(Tensor)
        if self.padding_idx is not None:
            rows[torch.from_numpy(ids == self.padding_idx)] = 0.0
        return rows.to(input.device).view(*input.shape, self.embedding_dim)


class ServingEmbeddingBag(ServingModule):
    """`EmbCacheEmbeddingBag` over a served table: the same arguments in, float32 `[B, D]` out."""

    def __init__(
        self, served: Tables, table: TableRef, padding_idx: int | None, mode: Pooling, include_last_offset: bool
    ) -> None:
        super().__init__(served, [table])
        self.padding_idx = padding_idx
        self.embedding_dim = table.dim
        self.mode: Pooling = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,  # noqa: A002  # torch's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        clicks: Tensor | None = None,
    ) -> Tensor:
        """Returns the sum or mean of the rows of each bag, without `padding_idx`. `clicks` only affect training and are ignored."""
        del clicks
        device = _device_of(input)
        ids = ids_array(input, "input", device)
        bounds = bag_offsets(input, ids, offsets, include_last_offset=self.include_last_offset, device=device)
        weights = None
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise UnsupportedError(f"per_sample_weights with mode={self.mode!r}: as in torch, use mode='sum'")
            check_float32("per_sample_weights", per_sample_weights, tuple(input.shape))
            weights = contiguous(per_sample_weights.detach().cpu().reshape(-1)).numpy()
        if self.padding_idx is not None:
            present = ids != self.padding_idx
            ids, bounds = ids[present], np.concatenate([[0], np.cumsum(present)])[bounds]
            weights = None if weights is None else weights[present]
        with pinned(self.served) as version:
            pooled = self._tables[0].in_version(version).pool_array(ids, bounds, self.mode, weights)
        return pooled.to(input.device)


def _device_of(value: object) -> torch.device:
    if not isinstance(value, Tensor):
        raise InputError(f"input is a {type(value).__name__}: give a tensor of int64 or int32 ids")
    return value.device


def tables_of(model: nn.Module) -> list[Tables]:
    """Returns the tables that the modules of a model read, without duplicates, in the order of the model."""
    served = [module.served for module in model.modules() if isinstance(module, ServingModule)]
    return list({id(tables): tables for tables in served}.values())
