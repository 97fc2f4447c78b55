"""The tables of one collection on this rank: their budgets, their optimizers and the source of their rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer

from torchrec_embcache._closing import first_error
from torchrec_embcache._lookup.group import LookupGroup
from torchrec_embcache.config import TierBudgets, bucket_range
from torchrec_embcache.exceptions import ConfigError, UnsupportedError
from torchrec_embcache.optimizers import SGD, OptimizerSpec
from torchrec_embcache.table._row_summary import mark_as_placeholder
from torchrec_embcache.table._settings import ModuleShare, SharedBudget, row_bytes
from torchrec_embcache.table.cache_table import CacheTable, RowChunk, RowMetadata, describe_table, inherited_step

from ._optimizer import TableOptimizer
from ._optimizer_choice import no_optimizer_error
from .configs import CacheConfig, lifecycle_of, num_buckets, table_initializer

__all__ = [
    "ModuleTables",
    "ShardPlacement",
    "is_trainable",
    "placeholder_parameter",
    "split_budgets",
    "table_weights",
    "tables_text",
]


@dataclass(frozen=True)
class ShardPlacement:
    """A rank's shard of a table: a range of the buckets if the table `is_sharded` over ranks, else all of them."""

    rank: int = 0
    world_size: int = 1
    is_sharded: bool = False

    def buckets(self, total_num_buckets: int) -> tuple[int, int]:
        """Returns the buckets [begin, end) of this rank."""
        return (
            bucket_range(self.rank, self.world_size, total_num_buckets) if self.is_sharded else (0, total_num_buckets)
        )

    def rows(self, num_embeddings: int) -> int:
        """Returns the expected number of rows on this rank, out of `num_embeddings`."""
        return -(-num_embeddings // self.world_size) if self.is_sharded else num_embeddings


def placeholder_parameter(dim: int, device: torch.device, *, optimized: bool = False) -> nn.Parameter:
    """Creates the placeholder parameter of an unbounded table, of shape [0, D].

    `optimized` marks it as a parameter that trains in the backward, in TorchRec's way. `in_backward_optimizer_filter` then omits
    it.
    """
    param = mark_as_placeholder(nn.Parameter(torch.empty(0, dim, dtype=torch.float32, device=device)))
    if optimized:
        param.__dict__["_in_backward_optimizers"] = [EmptyFusedOptimizer()]
    return param


def is_trainable(owner: str, weights: Mapping[str, nn.Parameter]) -> bool:
    """True if the tables are to be trained. They are frozen if every weight has `requires_grad_(False)`.

    Raises `UnsupportedError` if only some are frozen.
    """
    frozen = [name for name, weight in weights.items() if not weight.requires_grad]
    if frozen and len(frozen) < len(weights):
        raise UnsupportedError(
            f"{owner}: freezing some tables ({', '.join(frozen)}) is not supported yet: freeze all, or use two modules"
        )
    return not frozen


def split_budgets(
    tiers: TierBudgets | None,
    configs: Iterable[CacheConfig],
    shards: Mapping[str, ShardPlacement],
    specs: Mapping[str, OptimizerSpec | None],
) -> dict[str, tuple[TierBudgets, ModuleShare | None]]:
    """Returns the budgets of each table of `shards`: its own or a portion of the module's `tiers`, and its share of shared RAM.

    Every table gets a minimum of each budget: `_MIN_BYTES`, or half of an equal portion if that is less. The rest is divided in
    proportion to expected rows times bytes per row. Tables that share RAM have only the minimum of it fixed: see `_module_shares`.

    Raises `ConfigError` if a table has no budgets, or if its portion is too small for a row.
    """
    own: dict[str, tuple[TierBudgets, ModuleShare | None]] = {}
    sharing: dict[str, _BudgetShare] = {}
    for config in configs:
        if config.name not in shards:
            continue
        if config.tiers is not None:
            own[config.name] = config.tiers, None
        elif tiers is None:
            raise ConfigError(
                f"table {config.name!r} has no budgets: give tiers=TierBudgets(host_bytes=...) to it or to the module"
            )
        else:
            row = row_bytes(config.embedding_dim, (specs[config.name] or SGD()).kind, config.policy)
            rows = shards[config.name].rows(config.num_embeddings)
            sharing[config.name] = _BudgetShare(
                rows,
                {"device_bytes": row.device, "host_bytes": row.host, "ssd_bytes": row.ssd},
                shares_ram=config.on_full == "error" and not tiers.ssd,
            )
    if tiers is None or not sharing:
        return own
    parts = {field: _split_budget(field, budget, sharing) for field, budget in _byte_fields(tiers).items()}
    shares = _module_shares(tiers, sharing, parts["host_bytes"])
    for name in sharing:
        part: dict[str, Any] = {field: of_tables[name] for field, of_tables in parts.items()}
        own[name] = replace(tiers, **part), shares.get(name)
    return own


@dataclass(frozen=True)
class _BudgetShare:
    """A table that shares its module's budgets."""

    rows: int
    """Expected number of rows on this rank."""
    row_bytes: Mapping[str, int]
    """Bytes per row in each tier, by the field of its budget."""
    shares_ram: bool
    """True if it uses RAM that others leave free. False for a table that drops rows: other tables would affect the choice of rows.
    """

    def need(self, field: str) -> int:
        """Returns the bytes of a budget that its expected rows use."""
        return self.rows * self.row_bytes[field]


#: Minimum of each table of a module in each shared budget, if there is enough.
_MIN_BYTES = {"device_bytes": 1 << 20, "host_bytes": 1 << 20, "ssd_bytes": 8 << 20}


def _split_budget(field: str, budget: int, shares: Mapping[str, _BudgetShare]) -> dict[str, int]:
    """Splits one budget of a module among its tables."""
    minimum = min(_MIN_BYTES[field], budget // (2 * len(shares)))
    needs = {name: table.need(field) for name, table in shares.items()}
    rest, total = budget - minimum * len(shares), max(sum(needs.values()), 1)
    parts = {name: minimum + rest * need // total for name, need in needs.items()}
    for name, part in parts.items():
        row = shares[name].row_bytes[field]
        if budget and part < row and len(shares) > 1:
            needed = 2 * len(shares) * max(table.row_bytes[field] for table in shares.values())
            raise ConfigError(
                f"TierBudgets.{field}={budget} of the module is too small for its {len(shares)} tables: the share of table "
                f"{name!r} is {part} bytes, and a row takes {row}; give {needed} or more, or give the table tiers= of its own"
            )
    return parts


def _module_shares(
    tiers: TierBudgets, sharing: Mapping[str, _BudgetShare], parts: Mapping[str, int]
) -> dict[str, ModuleShare]:
    """Returns the shares of the tables that share RAM: a minimum each, and together the rest, without the others' `parts`."""
    names = [name for name, table in sharing.items() if table.shares_ram]
    if len(sharing) == 1 or not names:
        return {}
    total, minimum = tiers.host, min(_MIN_BYTES["host_bytes"], tiers.host // (2 * len(sharing)))
    own = {name: max(minimum, sharing[name].row_bytes["host_bytes"]) for name in names}
    fixed = sum(own.values()) + sum(part for name, part in parts.items() if name not in own)
    # The minimum portion, of each byte added to the budget, that is available to a sharing table. The rest goes to the parts of
    # others, and to all minima while these depend on the budget.
    needs = {name: table.need("host_bytes") for name, table in sharing.items()}
    gain = max(sum(needs[name] for name in names), 1) / max(sum(needs.values()), 1)
    if minimum < _MIN_BYTES["host_bytes"]:
        gain = min(gain, (1 / len(sharing) + gain) / 2)
    budget = SharedBudget(total - fixed, host_bytes=total, tables=len(sharing), gain=gain)
    return {name: ModuleShare(own_bytes=own[name], budget=budget) for name in names}


def _byte_fields(tiers: TierBudgets) -> dict[str, int]:
    return {"device_bytes": tiers.device, "host_bytes": tiers.host, "ssd_bytes": int(tiers.ssd_bytes)}


def table_weights(holder: nn.ModuleDict) -> dict[str, nn.Parameter]:
    """Returns the parameter of each table. TorchRec's `holder` has one module per table."""
    return {name: cast(nn.Parameter, child.weight) for name, child in holder.items()}


class ModuleTables(Mapping[str, CacheTable]):
    """This rank's tables of one collection by name, in the order of the configs."""

    def __init__(
        self,
        configs: Sequence[CacheConfig],
        *,
        module: str,
        tiers: TierBudgets | None,
        seed: int,
        device: torch.device,
        shards: Mapping[str, ShardPlacement],
        specs: Mapping[str, OptimizerSpec | None],
    ) -> None:
        """Validates the settings; opens nothing.

        `shards` has the tables of this rank; `specs` has their optimizers, if known.
        """
        self.device = device
        if any(config.missing != configs[0].missing for config in configs):
            raise UnsupportedError(
                f"module {module!r}: tables differ in missing, which is not supported yet: give all the same, or two modules"
            )
        lives = {config.name: lifecycle_of(config) for config in configs}
        #: True if the admission rule of any of them counts clicks.
        self.counts_clicks = any(life.counts_clicks for life in lives.values())
        #: True if any of them drops rows when it is full.
        self.drops_rows = any(config.on_full == "evict" for config in configs)
        self._shards = dict(shards)
        # Includes tables on other ranks: ranks flush together, even if they have different tables.
        self.flush_intervals = [
            given.flush_interval for config in configs if (given := config.tiers or tiers) is not None
        ]
        budgets = split_budgets(tiers, configs, shards, specs)
        self._tables = {
            config.name: CacheTable(
                name=config.name,
                dim=config.embedding_dim,
                tiers=budgets[config.name][0],
                initializer=table_initializer(config),
                optimizer=specs[config.name],
                seed=seed,
                module=module,
                policy=config.policy,
                on_full=config.on_full,
                on_evict=config.on_evict,
                **vars(lives[config.name]),
                total_num_buckets=num_buckets(config),
                buckets=shards[config.name].buckets(num_buckets(config)),
                rank=shards[config.name].rank,
                world_size=shards[config.name].world_size,
                device=device,
            )
            for config in configs
            if config.name in shards
        }
        for name, (_, share) in budgets.items():
            shard = self._tables[name]
            shard._settings = replace(shard._settings, share=share)

    def __getitem__(self, name: str) -> CacheTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def untrainable(self) -> list[str]:
        """The names of the tables that have no optimizer."""
        return [name for name, table in self._tables.items() if table.optimizer is None]

    def set_optimizer(self, name: str, spec: OptimizerSpec) -> None:
        """Sets the optimizer of a table. Previously imported rows keep their weights, and their slots start at zero.

        On an error, such as `CapacityError` if the rows with these slots do not fit the budgets, the table is unchanged. If its
        rows cannot be restored either, as after a second Ctrl-C, the table is poisoned.
        """
        table = self._tables[name]
        if not table.is_open or table._spec.kind == spec.kind or len(table) == 0:
            table.optimizer = spec
            return
        # Nothing is trained without an optimizer, so these rows were imported. They fit in memory.
        chunks = list(table.export())
        optimizer, before, step, epoch = table.optimizer, table._spec, table.step(), table._native_table.epoch()
        try:
            _replace_rows(table, spec, chunks, weights_only=True)
        except BaseException:
            try:
                _replace_rows(table, before, chunks, weights_only=False)
                table._native_table.set_step(step)
                table._native_table.set_epoch(epoch)
                table.optimizer = optimizer
            except BaseException:
                table._set_unusable(
                    "its optimizer could not be set, nor its rows put back: load them, or import them into a new module"
                )
                raise
            raise

    def release_tables(self) -> dict[str, CacheTable]:
        """Removes the tables from this object and returns them."""
        tables, self._tables = self._tables, {}
        return tables

    def import_rows_from(self, source: Mapping[str, CacheTable]) -> None:
        """Adopts the rows of this rank's buckets from the open tables of an unsharded module, and closes those tables.

        On an error all tables are closed, so that no directory stays in use. Tables with only a part of their rows are not flushed.
        """
        try:
            for name, table in source.items():
                target = self._tables.get(name)
                # Tables that move without a copy keep their shared budget.
                if target is not None and target.world_size == 1:
                    target._settings = replace(target._settings, share=table._settings.share)
                if table.is_open:
                    self._import_table(name, table)
        except BaseException as error:
            self.close_unflushed(error, complete_tables=list(source.values()))
            raise

    def _import_table(self, name: str, table: CacheTable) -> None:
        if name not in self._tables:
            table.close()
            return
        target = self._tables[name]
        if target.world_size == 1:  # the same buckets and files, so that the table itself moves
            self._tables[name] = table
            if target.optimizer is not None:
                self.set_optimizer(name, target.optimizer)
            return
        same_slots = table._spec.kind == target._spec.kind
        for chunk in table.export():
            mine = torch.from_numpy(target._owns(chunk.ids.numpy()))
            slots = {slot: values[mine] for slot, values in chunk.slots.items()} if same_slots else None
            columns = {field.name: getattr(chunk.metadata, field.name)[mine] for field in fields(RowMetadata)}
            target.import_rows(chunk.ids[mine], chunk.weights[mine], slots, RowMetadata(**columns))
        target._native_table.adopt_lifecycle(table._native_table)
        if same_slots:
            target._native_table.set_step(table.step())
            target._loaded_step = inherited_step(table)
        table.close()

    def optimizer(self, prefix: str, params: Mapping[str, nn.Parameter], names: Iterable[str]) -> TableOptimizer:
        """Returns the optimizer of those of the tables `names` that have one, with the keys `<prefix><table>.weight`."""
        specs = {name: spec for name in names if (spec := self._tables[name].optimizer) is not None}
        return TableOptimizer(prefix, params, specs, [self._tables[name] for name in specs])

    def group(
        self,
        configs: Sequence[CacheConfig],
        optimizer: TableOptimizer,
        after_backward: Callable[[Exception | None], None] | None = None,
        all_reduce: Callable[[torch.Tensor], None] | None = None,
    ) -> LookupGroup:
        """Creates a lookup over the features of `configs`, table after table. Every backward reads the groups of `optimizer`.

        See `LookupGroup` for `after_backward` and `all_reduce`.
        """
        names = [config.name for config in configs]

        def param_groups() -> list[Mapping[str, Any]]:
            missing = [name for name in names if name not in optimizer.groups]
            if missing:
                raise no_optimizer_error(missing)
            return [optimizer.groups[name] for name in names]

        features = [index for index, config in enumerate(configs) for _ in config.feature_names]
        tables = [self._tables[name] for name in names]
        return LookupGroup(tables, features, param_groups, after_backward=after_backward, all_reduce=all_reduce)

    def close(self) -> None:
        """Flushes and closes every table. The first error is raised after all are closed."""
        first = first_error(table.close for table in self._tables.values())
        if first is not None:
            raise first

    def close_unflushed(self, error: BaseException, complete_tables: Sequence[CacheTable] = ()) -> None:
        """Closes every table without a flush, because of `error` during the adoption of rows.

        `complete_tables` have all of their rows, and are flushed and closed too.
        """
        keep = {id(table) for table in complete_tables}
        tables = [*complete_tables, *(table for table in self._tables.values() if id(table) not in keep)]
        # Before any is closed: if Ctrl-C interrupts the closing, tables left open are not flushed at process exit.
        for table in tables[len(complete_tables) :]:
            table._set_unflushable()
        if (failure := first_error(table.close for table in tables)) is not None:
            error.add_note(f"closing the tables failed too: {failure}")


def _replace_rows(table: CacheTable, spec: OptimizerSpec, chunks: Iterable[RowChunk], *, weights_only: bool) -> None:
    """Replaces the rows of a table by those of `chunks`, with the slots of the optimizer `spec`."""
    table._native_table.clear_rows()
    table.optimizer = spec
    for chunk in chunks:
        rest = () if weights_only else (chunk.slots, chunk.metadata)
        table.import_rows(chunk.ids, chunk.weights, *rest)


def tables_text(
    tables: Mapping[str, CacheTable],
    groups: Mapping[str, Mapping[str, Any]],
    chosen: Mapping[str, OptimizerSpec] | None = None,
) -> str:
    """Returns one line per table, for `print(module)`.

    `groups` has the current hyperparameters of each table's optimizer, and `chosen` the optimizer that a table will get.
    """
    chosen = chosen or {}
    return "\n".join(f"  {describe_table(table, groups.get(name), chosen.get(name))}" for name, table in tables.items())
