"""The base of the two unsharded collections: their tables, optimizers and lookups, under TorchRec's classes."""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache._lookup.group import LookupGroup
from torchrec_embcache._ssd.autoflush import FlushSchedule
from torchrec_embcache.config import TierBudgets, check_int, check_name
from torchrec_embcache.exceptions import ConfigError, StateError, UnsupportedError
from torchrec_embcache.model import CacheModule
from torchrec_embcache.optimizers import OptimizerSpec, check_one_optimizer
from torchrec_embcache.table.cache_table import CacheTable

from ._features import check_features, reorder_features
from ._from_torchrec import find_trained_state, import_torchrec
from ._optimizer import TableOptimizer
from ._optimizer_choice import OPTIMIZER_ATTRIBUTES, choose_optimizer, no_optimizer_error
from ._tables import ModuleTables, ShardPlacement, is_trainable, placeholder_parameter, table_weights, tables_text
from .configs import CacheConfig, as_cache_configs

__all__ = ["CacheCollection", "TrainingOptimizer", "match_configs", "placeholder_configs"]

#: The optimizer that trained a TorchRec module: an optimizer, the optimizers in its backward, or none.
TrainingOptimizer = torch.optim.Optimizer | Literal["in_backward"] | None


class CacheCollection(CacheModule, CloseOnExitMixin, FusedOptimizerModule):
    """A mixin over TorchRec's class, shared by both unsharded collections.

    The tables are checked by the constructor, and opened on first use.
    """

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
        """Completes construction after TorchRec's `__init__`, which ran on placeholder configs of one row each.

        Replaces them by the real configs and by zero-row weights, and checks the tables' settings.
        """
        if tiers is not None and not isinstance(tiers, TierBudgets):
            raise ConfigError(f"tiers={tiers!r}: give a TierBudgets")
        self.name: str = check_name("name", name)
        self._seed = check_int("seed", seed, 0, (1 << 64) - 1)
        self._tiers = tiers
        self._replicated = replicated
        self._configs = configs
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        # A module on "meta" is not used before it is sharded, and the sharder then sets the device.
        on = torch.device("cpu") if self._device.type == "meta" else self._device
        for config in configs:
            holder = self._holder()[config.name]
            del holder.weight
            holder.register_parameter("weight", placeholder_parameter(config.embedding_dim, on))
        shards = {config.name: ShardPlacement() for config in configs}
        self._tables = ModuleTables(
            configs,
            module=_ssd_module_name(name),
            tiers=tiers,
            seed=seed,
            device=on,
            shards=shards,
            specs=dict.fromkeys(shards),
        )
        self._counts_clicks = self._tables.counts_clicks
        self._flush_schedule = FlushSchedule(self._tables.flush_intervals, collective=False)
        self._features = [feature for config in configs for feature in config.feature_names]
        self._anchor = torch.zeros(0, dtype=torch.float32, device=on, requires_grad=True)
        self._lookup: tuple[TableOptimizer, LookupGroup] | None = None

    def _holder(self) -> nn.ModuleDict:
        holder = getattr(self, self._prefix)
        assert isinstance(holder, nn.ModuleDict), "TorchRec's attribute"
        return holder

    def table_configs(self) -> list[Any]:
        """Returns the configs of the tables."""
        return self._configs

    def weights(self) -> dict[str, nn.Parameter]:
        """Returns the zero-row parameter of each table."""
        return table_weights(self._holder())

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        """Each table by its name, with `stats`, `export`, `read_rows` and the rest of `CacheTable`."""
        return self._tables

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of all tables that have one, with one param group per table; learning-rate schedulers work on it."""
        return self._ready_lookup()[0]

    def sync_optimizers(self) -> None:
        """Assigns the optimizers of `apply_optimizer_in_backward` to the tables."""
        self._ready_lookup()

    def param_group(self, table: str) -> dict[str, Any] | None:
        """Returns the table's entry of `param_groups`; None if the table has no optimizer."""
        return self._ready_lookup()[0].groups.get(table)

    @property
    def device(self) -> torch.device:
        """The device of results."""
        return self._device

    def reset_parameters(self) -> None:
        """Does nothing. A row is initialized when it is first looked up."""

    def _ready_lookup(self, weights: Mapping[str, nn.Parameter] | None = None) -> tuple[TableOptimizer, LookupGroup]:
        """Returns the current optimizer, and the lookup over all tables. `weights`: the result of `weights()`, if known."""
        if not self._tables:
            raise StateError(f"module {self.name!r} was sharded and its tables went with it: use the sharded module")
        weights = self.weights() if weights is None else weights
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

    def _begin_forward(self, features: Any, *, weighted: bool) -> tuple[KeyedJaggedTensor, LookupGroup, bool]:
        """Returns the batch, checked and in the order of the tables' features, the lookup, and True if this forward trains."""
        owner = f"{type(self).__name__} {self.name!r}"
        features = check_features(
            features,
            self._features,
            weighted=weighted,
            clicks=self._counts_clicks,
            owner=owner,
            device=self._device,
        )
        weights = self.weights()
        train = self.training and torch.is_grad_enabled() and is_trainable(owner, weights)
        _, lookup = self._ready_lookup(weights)
        if train:
            self._check_single_rank(owner)
            if self._tables.untrainable:
                raise no_optimizer_error(self._tables.untrainable)
            for name, weight in weights.items():
                check_one_optimizer(name, weight)
            self._flush_schedule.flush_if_due()
        return reorder_features(features, self._features), lookup, train

    def _check_single_rank(self, owner: str) -> None:
        """Raises `StateError` if each of several ranks would train a separate table, unless `replicated` is set."""
        ranks = all_ranks().world_size
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
        self, shards: Mapping[str, ShardPlacement], fused_params: Mapping[str, Any] | None, device: torch.device
    ) -> ModuleTables:
        """Returns the tables of one rank, which adopt the rows of their buckets. The tables of this module are closed."""
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
        tables.import_rows_from(self._tables.release_tables())
        return tables

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns an independent module with equal rows, slots, steps, hyperparameters and hooks. `StateError` with an SSD tier."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        # The copy shares the hooks. A hook may reference objects that cannot be copied, such as a file or a lock.
        memo.update({id(config.on_evict): config.on_evict for config in self._configs})
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo) if name != "_lookup" else None
        for name, param in self.weights().items():
            # torch copies a parameter without its attributes, which here define a table's optimizer.
            chosen = {key: param.__dict__[key] for key in OPTIMIZER_ATTRIBUTES if key in param.__dict__}
            made.weights()[name].__dict__.update(chosen)
        if self._lookup is not None:
            # The hyperparameters may have changed, such as by a learning-rate scheduler.
            for now, group in zip(self.fused_optimizer.param_groups, made.fused_optimizer.param_groups, strict=True):
                group.update({key: value for key, value in now.items() if key != "params"})
        return made

    def __repr__(self) -> str:
        """Returns one line per table. TorchRec's inner modules are placeholders of one row and are not shown."""
        groups = self._lookup[0].groups if self._lookup is not None else {}
        return f"{type(self).__name__}(\n{tables_text(self._tables, groups, self._chosen_optimizers())}\n)"

    def _chosen_optimizers(self) -> dict[str, OptimizerSpec]:
        """Returns the optimizers of `apply_optimizer_in_backward` for tables without one. The first step reports invalid ones."""
        if not self._tables:
            return {}
        weights, chosen = self.weights(), {}
        for name in self._tables.untrainable:
            with contextlib.suppress(ConfigError, UnsupportedError):
                chosen[name] = choose_optimizer(name, weights[name], None)
        return {name: spec for name, spec in chosen.items() if spec is not None}

    def planner_rows(self, name: str) -> int:
        """Returns the planner's row count of a table: the rows that fit its budgets in RAM, at most `num_embeddings`."""
        table = self._tables[name]
        config = next(config for config in self._configs if config.name == name)
        budget = table.tiers.host + table.tiers.device
        rows: int = min(config.num_embeddings, budget // (4 * table._spec.record_floats(table.dim)))
        return max(rows, 1)

    def flush(self) -> None:
        """Writes every dirty row to the SSD tiers and commits a state of each table separately.

        `torchrec_embcache.flush(model)` commits one state of all tables.
        """
        for table in self._tables.values():
            table.flush()

    def close(self) -> None:
        """Drops prefetched batches, then flushes and closes every table."""
        if self._lookup is not None:
            self._lookup[1].drop_prefetched()
        self._tables.close()

    def import_from_torchrec(self, holder: nn.ModuleDict, optimizer: TrainingOptimizer) -> None:
        """Imports rows 0 to N - 1 of each table of TorchRec's module, with the state that `optimizer` has for them.

        Frozen weights stay frozen, and the training mode is copied.

        On an error the tables are closed without a flush, so that no directory stays in use, and no partial import is resumed.
        """
        sources = {name: holder.get_parameter(f"{name}.weight") for name in self._tables}
        trained = {name: find_trained_state(source, optimizer) for name, source in sources.items()}
        for name, weight in self.weights().items():
            if (by := trained[name]) is not None:
                by.annotate(weight)
        try:
            self.sync_optimizers()
            for name, table in self._tables.items():
                import_torchrec(table, sources[name].detach(), trained[name])
                self.weights()[name].requires_grad_(sources[name].requires_grad)
            self.train(holder.training)
        except BaseException as error:
            self._tables.close_unflushed(error)
            raise


def _ssd_module_name(name: str) -> str:
    """Returns the SSD directory name of an unsharded module. Every rank has all rows, so each needs a separate directory."""
    rank = all_ranks().rank
    return f"{name}-unsharded-{rank}" if rank else name


def _share_group(param: nn.Parameter, group: dict[str, Any]) -> None:
    """Shares the group with the optimizer of `apply_optimizer_in_backward`, so that a scheduler works on either."""
    for optimizer in getattr(param, "_in_backward_optimizers", []):
        groups = getattr(optimizer, "param_groups", None)
        if groups:
            for key, value in groups[0].items():
                group.setdefault(key, value)
            groups[0] = group


def placeholder_configs(configs: list[Any]) -> list[Any]:
    """Returns copies of `configs` with one row each, because TorchRec's allocation on meta overflows at 10^18 rows."""
    made = []
    for config in configs:
        stand_in = copy.copy(config)
        stand_in.num_embeddings = 1
        made.append(stand_in)
    return made


def match_configs(tables: Sequence[Any] | None, theirs: list[Any], kind: type[Any]) -> list[CacheConfig]:
    """Returns the configs of a module with the rows of TorchRec's, whose configs are `theirs`.

    `tables`, if not None, adds settings of each table. Raises `ConfigError` if it does not match `theirs`.
    """
    configs = as_cache_configs(theirs if tables is None else tables, kind)
    wanted = {config.name: (config.embedding_dim, config.feature_names) for config in theirs}
    have = {config.name: (config.embedding_dim, config.feature_names) for config in configs}
    if wanted != have:
        raise ConfigError(
            f"tables={have} do not match the collection's {wanted}: give the same names, dims and features"
        )
    return configs
