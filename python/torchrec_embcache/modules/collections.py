"""The collections, unsharded: TorchRec's classes over tables larger than memory."""

import copy
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_embcache.cache import CacheTable
from torchrec_embcache.collective import is_distributed, world_size
from torchrec_embcache.config import TierBudgets, check_int, check_name
from torchrec_embcache.exceptions import ConfigError, StateError, UnsupportedError
from torchrec_embcache.lookup import LookupGroup
from torchrec_embcache.state_dicts import check_rows_are_here
from torchrec_embcache.tracing import as_one_call
from torchrec_embcache.whole_model import CacheModule

from .arrivals import import_torchrec, trained_by
from .configs import CacheConfig, EmbCacheEmbeddingBagConfig, EmbCacheEmbeddingConfig, as_cache_configs
from .features import check_features, in_order
from .optimizer import TableOptimizer
from .optimizer_choice import choose_optimizer, no_optimizer_error
from .tables import ModuleTables, Shard, table_weights, tables_text, trainable, zero_row_parameter

__all__ = ["EmbCacheEmbeddingBagCollection", "EmbCacheEmbeddingCollection"]

#: What trained a module of TorchRec's: an optimizer, the ones in its backward, or nothing that is to be kept.
Trainer = torch.optim.Optimizer | Literal["in_backward"] | None
# Where `apply_optimizer_in_backward` notes what it was given.
_OPTIMIZER_CHOICE = ("_optimizer_classes", "_optimizer_kwargs")


class _Collection(CacheModule, FusedOptimizerModule):
    """What both collections share. A mixin over TorchRec's class; tables are checked when made and opened at first use."""

    training: bool
    _prefix: str

    def _prepare(
        self,
        configs: list[Any],
        tiers: TierBudgets | None,
        name: str,
        seed: int,
        device: torch.device | str | None,
        replicated: bool,
    ) -> None:
        """After TorchRec's `__init__`, which ran on stand-ins of one row: the real configs, zero-row weights, checked tables."""
        if tiers is not None and not isinstance(tiers, TierBudgets):
            raise ConfigError(f"tiers={tiers!r}: give a TierBudgets")
        self.name = check_name("name", name)
        self._seed = check_int("seed", seed, 0, (1 << 64) - 1)
        self._tiers = tiers
        self._replicated = replicated
        self._configs = configs
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        # Of "meta" nothing is looked up before it is sharded, and the sharder names the device.
        on = torch.device("cpu") if self._device.type == "meta" else self._device
        for config in configs:
            holder = self._holder()[config.name]
            del holder.weight
            holder.register_parameter("weight", zero_row_parameter(config.embedding_dim, on))
        shards = {config.name: Shard() for config in configs}
        self._tables = ModuleTables(
            configs,
            module=_files_name(name),
            tiers=tiers,
            seed=seed,
            device=on,
            shards=shards,
            specs=dict.fromkeys(shards),
        )
        self._tables.warn_on_state_dict(self)
        self._flushes = self._tables.flush_schedule(collective=False)
        self._features = [feature for config in configs for feature in config.feature_names]
        self._anchor = torch.zeros(0, device=on, requires_grad=True)
        self._lookup: tuple[TableOptimizer, LookupGroup] | None = None

    def _holder(self) -> nn.ModuleDict:
        holder = getattr(self, self._prefix)
        assert isinstance(holder, nn.ModuleDict), "TorchRec's attribute"
        return holder

    def table_configs(self) -> list[Any]:
        """The tables' configs."""
        return self._configs

    def weights(self) -> dict[str, nn.Parameter]:
        """The zero-row parameter of each table."""
        return table_weights(self._holder())

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        """Each table by name: stats, export, read_rows and the rest of level 1."""
        return self._tables

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers of the tables that have one, a param group each; schedulers work on it."""
        return self._ready()[0]

    def settle(self) -> None:
        """Give the tables the optimizers that were set by now."""
        self._ready()

    def hyperparameters(self, table: str) -> dict[str, Any]:
        """The numbers of the table's param group, or of a table without optimizer none but its slots' kind."""
        return self._ready()[0].groups.get(table, super().hyperparameters(table))

    @property
    def device(self) -> torch.device:
        """Where results are."""
        return self._device

    def reset_parameters(self) -> None:
        """Nothing: rows are born one by one."""

    def _ready(self) -> tuple[TableOptimizer, LookupGroup]:
        """Optimizers as set by now, and the lookup over all tables."""
        if not self._tables:
            raise StateError(f"module {self.name!r} was sharded and its tables went with it: use the sharded module")
        weights = self.weights()
        chosen = {name: choose_optimizer(name, weights[name], None) for name in self._tables.untrainable}
        new = {name: spec for name, spec in chosen.items() if spec is not None}
        for name, spec in new.items():
            self._tables.set_optimizer(name, spec)
        if self._lookup is None or new:
            optimizer = self._tables.optimizer(f"{self._prefix}.", weights, weights)
            for name in optimizer.groups:
                _share_group(weights[name], optimizer.groups[name])
            self._lookup = optimizer, self._tables.group(self._configs, optimizer)
        return self._lookup

    def _start(self, features: Any, *, weighted: bool) -> tuple[KeyedJaggedTensor, LookupGroup, bool]:
        """The checked batch in the tables' order, the lookup, and whether it trains."""
        owner = f"{type(self).__name__} {self.name!r}"
        features = check_features(features, self._features, weighted=weighted, owner=owner, device=self._device)
        train = self.training and torch.is_grad_enabled() and trainable(owner, self.weights())
        _, lookup = self._ready()
        if train:
            self._check_alone(owner)
            if self._tables.untrainable:
                raise no_optimizer_error(self._tables.untrainable)
            self._flushes.before_forward()
        return in_order(features, self._features), lookup, train

    def _check_alone(self, owner: str) -> None:
        """`StateError` where each of several ranks would train a table of its own, and nobody said that this is meant."""
        ranks = world_size()
        if ranks > 1 and not self._replicated:
            sharder = "EmbCacheEmbeddingBagCollectionSharder"
            if self._prefix == "embeddings":
                sharder = "EmbCacheEmbeddingCollectionSharder"
            raise StateError(
                f"{owner} is not sharded and would train a table of its own on each of {ranks} ranks: give "
                f"DistributedModelParallel its sharder, sharders=[{sharder}()]; or make the module with replicated=True if every "
                "rank is to have rows of its own, which nothing averages"
            )

    def shard_tables(
        self, shards: Mapping[str, Shard], fused_params: Mapping[str, Any] | None, device: torch.device
    ) -> ModuleTables:
        """The tables of one rank, with the rows of their buckets that this module has; this module's are closed."""
        weights = self.weights()
        specs = {name: choose_optimizer(name, param, fused_params) for name, param in weights.items()}
        tables = ModuleTables(
            self._configs,
            module=self.name,
            tiers=self._tiers,
            seed=self._seed,
            device=device,
            shards=shards,
            specs=specs,
        )
        self._lookup = None
        tables.take_rows(self._tables.hand_over())
        return tables

    def tables_by_key(self, prefix: str) -> dict[str, CacheTable]:
        """The tables by their weights' keys in a state dict."""
        return {f"{prefix}{self._prefix}.{name}.weight": table for name, table in self._tables.items()}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: Any) -> None:
        check_rows_are_here(state_dict, self.tables_by_key(prefix), strict=strict)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module of its own, with the same rows, slots, steps and numbers. `StateError` where a table has an SSD tier."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo) if name != "_lookup" else None
        for name, param in self.weights().items():
            # torch copies a parameter without its attributes: here they say which optimizer a table is to have.
            chosen = {key: param.__dict__[key] for key in _OPTIMIZER_CHOICE if key in param.__dict__}
            made.weights()[name].__dict__.update(chosen)
        if self._lookup is not None:
            # Numbers that were changed since: a learning rate that a scheduler has lowered.
            for now, group in zip(self.fused_optimizer.param_groups, made.fused_optimizer.param_groups, strict=True):
                group.update({key: value for key, value in now.items() if key != "params"})
        return made

    def __repr__(self) -> str:
        """A line for each table. TorchRec's own modules within are stand-ins of one row, and say nothing."""
        groups = self._lookup[0].groups if self._lookup is not None else {}
        return f"{type(self).__name__}(\n{tables_text(self._tables, groups)}\n)"

    def planned_rows(self, name: str) -> int:
        """What the planner takes for the size of a table: the rows that its budgets in RAM hold, at most those expected."""
        table = self._tables[name]
        config = next(config for config in self._configs if config.name == name)
        budget = table.tiers.host + table.tiers.device
        rows: int = min(config.num_embeddings, budget // (4 * table.spec.record_floats(table.dim)))
        return max(rows, 1)

    def flush(self) -> None:
        """Write every dirty row to the SSD tiers, each table as a state of its own; `torchrec_embcache.flush` publishes one."""
        for table in self._tables.values():
            table.flush()

    def close(self) -> None:
        """Flush and close."""
        if self._lookup is not None:
            self._lookup[1].drop_prefetched()
        self._tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"closing module {self.name!r} failed too: {failure}")

    def _take_over(self, holder: nn.ModuleDict, optimizer: Trainer) -> None:
        """Rows 0 to N - 1 of each table from TorchRec's module, with what `optimizer` keeps of them."""
        sources = {name: holder.get_parameter(f"{name}.weight") for name in self._tables}
        trained = {name: trained_by(source, optimizer) for name, source in sources.items()}
        for name, weight in self.weights().items():
            if (by := trained[name]) is not None:
                by.mark(weight)
        self.settle()
        for name, table in self._tables.items():
            import_torchrec(table, sources[name].detach(), trained[name])


def _files_name(name: str) -> str:
    """What the SSD tier's files of an unsharded module go by: every rank has all its rows, so none may take another's directory."""
    rank = dist.get_rank() if is_distributed() else 0
    return f"{name}-unsharded-{rank}" if rank else name


def _share_group(param: nn.Parameter, group: dict[str, Any]) -> None:
    """Let the optimizer that `apply_optimizer_in_backward` made show the group that is read: a scheduler on either works."""
    for optimizer in getattr(param, "_in_backward_optimizers", []):
        groups = getattr(optimizer, "param_groups", None)
        if groups:
            for key, value in groups[0].items():
                group.setdefault(key, value)
            groups[0] = group


class EmbCacheEmbeddingBagCollection(_Collection, EmbeddingBagCollection):
    """TorchRec's `EmbeddingBagCollection` over tables larger than memory: a KeyedJaggedTensor in, a KeyedTensor [B, sum of D] out.

    - `tables`: `EmbCacheEmbeddingBagConfig`s (TorchRec's own are taken with default settings).
    - `tiers`: budgets for tables that name none, split between them by rows x bytes a row.
    - `is_weighted`: features carry weights, one a value; SUM tables only.
    - `name`: names the SSD tier's directory of the module. `seed`: of the rows' births.
    - `replicated`: unsharded, each of several ranks is to have rows of its own, which nothing averages. Without it training
      unsharded on several ranks is a `StateError`: the sharder was forgotten.

    The backward updates the rows, with the optimizer set by `apply_optimizer_in_backward` or, sharded, by the sharder's
    `fused_params`. With `eval()` or `no_grad()` nothing is updated or inserted.
    """

    _prefix = "embedding_bags"

    def __init__(
        self,
        tables: list[EmbCacheEmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        tiers: TierBudgets | None = None,
        name: str = "embeddings",
        seed: int = 0,
        replicated: bool = False,
    ) -> None:
        configs = as_cache_configs(tables, EmbCacheEmbeddingBagConfig)
        averaged = [config.name for config in configs if config.pooling == PoolingType.MEAN]
        if is_weighted and averaged:
            raise UnsupportedError(
                f"is_weighted=True with pooling MEAN (tables {', '.join(averaged)}): as in torch, use PoolingType.SUM"
            )
        EmbeddingBagCollection.__init__(self, _stand_ins(configs), is_weighted, torch.device("meta"))
        self._embedding_bag_configs = configs
        self._prepare(configs, tiers, name, seed, device, replicated)
        self._mean = [config.pooling == PoolingType.MEAN for config in configs for _ in config.feature_names]

    @classmethod
    def from_torchrec(
        cls,
        collection: EmbeddingBagCollection,
        tiers: TierBudgets | None = None,
        *,
        tables: list[EmbCacheEmbeddingBagConfig] | None = None,
        optimizer: Trainer = None,
        name: str = "embeddings",
        seed: int = 0,
        replicated: bool = False,
    ) -> Self:
        """A module with the rows of TorchRec's `collection`. `tables`, of the same names and dims, says more of each table.

        `optimizer` is what trained the collection: a torch optimizer that has its parameters, or "in_backward" for the one that
        `apply_optimizer_in_backward` put there. The tables then train on with its kind, its numbers, its slots and its step. None
        leaves all of that out. Rows are copied some at a time. Shard the module afterwards, if at all.

        For example `from_torchrec(ebc, TierBudgets(host_bytes="8GiB"), optimizer=torch.optim.Adagrad(ebc.parameters()))`.
        """
        configs = _matching(tables, collection.embedding_bag_configs(), EmbCacheEmbeddingBagConfig)
        made = cls(configs, collection.is_weighted(), tiers=tiers, name=name, seed=seed, replicated=replicated)
        made._take_over(collection.embedding_bags, optimizer)
        return made

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows, a column block for each feature of each table. `torch.compile` breaks its graph here."""
        traced = as_one_call(self, features)
        if traced is not None:
            return traced
        features, lookup, train = self._start(features, weighted=self._is_weighted)
        values = lookup.pooled(
            features.values().cpu().numpy(),
            features.offsets().cpu().numpy().astype(np.int64),
            self._mean,
            features.weights_or_none(),
            train=train,
            anchor=self._anchor,
        )
        return KeyedTensor(keys=self._embedding_names, values=values, length_per_key=self._lengths_per_embedding)


class EmbCacheEmbeddingCollection(_Collection, EmbeddingCollection):
    """TorchRec's `EmbeddingCollection` over tables larger than memory: a KeyedJaggedTensor in, a JaggedTensor for each feature out.

    Arguments as for `EmbCacheEmbeddingBagCollection`; tables have one width. `need_indices`: results carry their ids as weights.
    """

    _prefix = "embeddings"

    def __init__(
        self,
        tables: list[EmbCacheEmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        tiers: TierBudgets | None = None,
        name: str = "embeddings",
        seed: int = 0,
        replicated: bool = False,
    ) -> None:
        configs = as_cache_configs(tables, EmbCacheEmbeddingConfig)
        widths = {config.name: config.embedding_dim for config in configs}
        if len(set(widths.values())) > 1:
            raise ConfigError(
                f"embedding_dim differs between tables ({widths}): the tables of a sequence collection have one width"
            )
        EmbeddingCollection.__init__(self, _stand_ins(configs), torch.device("meta"), need_indices)
        self._embedding_configs = configs
        self._prepare(configs, tiers, name, seed, device, replicated)

    @classmethod
    def from_torchrec(
        cls,
        collection: EmbeddingCollection,
        tiers: TierBudgets | None = None,
        *,
        tables: list[EmbCacheEmbeddingConfig] | None = None,
        optimizer: Trainer = None,
        name: str = "embeddings",
        seed: int = 0,
        replicated: bool = False,
    ) -> Self:
        """A module with the rows of TorchRec's `collection`. `tables`, of the same names and dims, says more of each table.

        `optimizer` is what trained the collection: a torch optimizer that has its parameters, or "in_backward" for the one that
        `apply_optimizer_in_backward` put there. The tables then train on with its kind, its numbers, its slots and its step. None
        leaves all of that out. Rows are copied some at a time. Shard the module afterwards, if at all.

        For example `from_torchrec(ebc, TierBudgets(host_bytes="8GiB"), optimizer=torch.optim.Adagrad(ebc.parameters()))`.
        """
        configs = _matching(tables, collection.embedding_configs(), EmbCacheEmbeddingConfig)
        made = cls(
            configs, need_indices=collection.need_indices(), tiers=tiers, name=name, seed=seed, replicated=replicated
        )
        made._take_over(collection.embeddings, optimizer)
        return made

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The row of each id, by feature. `torch.compile` breaks its graph here."""
        traced = as_one_call(self, features)
        if traced is not None:
            return cast(dict[str, JaggedTensor], traced)
        features, lookup, train = self._start(features, weighted=False)
        counts = features.length_per_key()
        splits = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        ids = features.values()
        rows = lookup.sequence(ids.cpu().numpy(), splits, train=train, anchor=self._anchor)
        names = [name for names in self._embedding_names_by_table for name in names]
        lengths = features.lengths().view(len(counts), -1)
        return {
            name: JaggedTensor(values=part, lengths=lengths[place], weights=own if self._need_indices else None)
            for place, (name, part, own) in enumerate(
                zip(names, torch.split(rows, counts), torch.split(ids, counts), strict=True)
            )
        }


def _stand_ins(configs: list[Any]) -> list[Any]:
    """Configs of one row: TorchRec's constructors allocate (on meta, where 10^18 rows overflow) and fill weights."""
    stand_ins = []
    for config in configs:
        stand_in = copy.copy(config)
        stand_in.num_embeddings = 1
        stand_ins.append(stand_in)
    return stand_ins


def _matching(tables: list[Any] | None, given: list[Any], kind: type[Any]) -> list[CacheConfig]:
    configs = as_cache_configs(given if tables is None else tables, kind)
    wanted = {config.name: (config.embedding_dim, config.feature_names) for config in given}
    have = {config.name: (config.embedding_dim, config.feature_names) for config in configs}
    if wanted != have:
        raise ConfigError(
            f"tables={have} do not match the collection's {wanted}: give the same names, dims and features"
        )
    return configs
