"""The base of the two sharded collections, and the exchange that raises an error of one rank on all ranks."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache._ssd.autoflush import FlushSchedule
from torchrec_embcache.exceptions import InputError, StateError, UnsupportedError
from torchrec_embcache.model import CacheModule
from torchrec_embcache.modules._features import check_features, copy_features, reorder_features
from torchrec_embcache.modules._optimizer_choice import no_optimizer_error, without_optimizer_attributes
from torchrec_embcache.modules._tables import (
    ModuleTables,
    ShardPlacement,
    is_trainable,
    placeholder_parameter,
    table_weights,
    tables_text,
)
from torchrec_embcache.modules.configs import lifecycle_of
from torchrec_embcache.table._import_rows import import_on_all_ranks
from torchrec_embcache.table.cache_table import CacheTable, IdsLike, RowMetadata, ValuesLike
from torchrec_embcache.table.rows import check_not_recording

from ._agreement import RankAgreementMixin, check_same_settings
from ._lookup import CacheLookup, PlannedFeatures

__all__ = ["ShardedCacheModule"]

logger = logging.getLogger("torchrec_embcache")


class ShardedCacheModule(RankAgreementMixin, CacheModule):
    """A mixin over TorchRec's class, shared by both sharded collections.

    The calls of a batch, in order:

    1. `input_dist` checks the batch and starts to send its ids to the ranks that own their rows.
    2. `prefetch`, which only a pipeline calls, plans the batch in advance, so that its rows are loaded early.
    3. `compute_and_output_dist` plans the batch, waits for its rows, checks that no rank has an error, and looks up.
    """

    _built = False
    _prefix: str
    _env: ShardingEnv
    _device: torch.device
    _lookups: list[CacheLookup]
    _input_dists: list[nn.Module]
    _has_uninitialized_input_dist: bool
    _create_input_dist: Callable[[list[str]], None]
    training: bool
    train: Callable[[bool], Any]

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        module_fqn: str | None = None,
    ) -> None:
        self._prepare(module, table_name_to_parameter_sharding, env, fused_params, device)
        given = module.weights()
        with without_optimizer_attributes(given):
            super().__init__(  # type: ignore[call-arg]
                module,
                table_name_to_parameter_sharding,
                env,
                fused_params=None,
                device=device,
                qcomm_codecs_registry=qcomm_codecs_registry,
                module_fqn=module_fqn,
            )
        self._finish()
        for name, weight in self.weights().items():
            weight.requires_grad_(given[name].requires_grad)
        self.train(module.training)

    def _prepare(
        self,
        module: Any,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None,
        device: torch.device | None,
    ) -> None:
        """Creates this rank's tables.

        TorchRec's `__init__`, which creates the lookups, needs them and runs later. Before it has run, `nn.Module` rejects
        attributes, so that they are stored in `__dict__`.
        """
        owner = f"{type(self).__name__} {module.name!r}"
        # First, because nothing is changed yet.
        lives = {config.name: lifecycle_of(config) for config in module.table_configs()}
        ranks = all_ranks(env.process_group)
        check_same_settings(owner, lives, ranks)
        shards = {}
        for config in module.table_configs():
            param = plan[config.name]
            if param.sharding_type == ShardingType.ROW_WISE.value:
                shards[config.name] = ShardPlacement(env.rank, env.world_size, is_sharded=True)
            elif param.ranks[0] == env.rank:
                shards[config.name] = ShardPlacement(env.rank, env.world_size, is_sharded=False)
        state = self.__dict__
        on = device or torch.device("cpu")
        error: Exception | None = None
        try:
            state["_module_tables"] = module.shard_tables(shards, fused_params, on)
        except Exception as caught:
            error = caught
        try:
            ranks.raise_on_every_rank(error)
        except BaseException as raised:
            if error is None:  # another rank has no tables
                state["_module_tables"].close_unflushed(raised)
            raise
        state["_features"] = list(
            dict.fromkeys(name for config in module.table_configs() for name in config.feature_names)
        )
        state["_has_checked_buckets"] = False
        state["_owner"] = owner
        state["_configs"] = {config.name: config for config in module.table_configs()}
        state["_weighted"] = module.is_weighted() if hasattr(module, "is_weighted") else False

    def _finish(self) -> None:
        """Registers a parameter of every table on every rank, so that state dicts have the same keys for any plan."""
        holder = getattr(self, self._prefix)
        for name, config in self._configs.items():
            if not hasattr(holder[name], "weight"):
                holder[name].register_parameter(
                    "weight", placeholder_parameter(config.embedding_dim, self._module_tables.device, optimized=True)
                )
        # The order in which TorchRec sends features. It does not depend on batches, so that TorchRec never has to change it.
        self._input_keys = [name for sharding in self._shardings() for name in sharding.feature_names()]
        self.__dict__["_flush_schedule"] = FlushSchedule(self._module_tables.flush_intervals, collective=True)
        self._built = True

    # Set by `_prepare`.
    _module_tables: ModuleTables
    _has_checked_buckets: bool
    _configs: dict[str, Any]
    _features: list[str]
    _input_keys: list[str]
    _free_features_storage_early: bool
    _owner: str
    _weighted: bool
    _flush_schedule: FlushSchedule

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        """This rank's shards by table name, with `stats`, `export`, `read_rows` and the rest of `CacheTable`."""
        return self._module_tables

    @property
    def table_names(self) -> Iterable[str]:
        """The names of all tables, including those on other ranks."""
        return self._configs

    def import_rows(
        self,
        table: str,
        ids: IdsLike,
        weights: ValuesLike,
        slots: Mapping[str, ValuesLike] | None = None,
        metadata: RowMetadata | None = None,
    ) -> None:
        """Inserts or overwrites rows of a table. Collective.

        Every rank calls this at the same time, with rows of any ids, or with none. Each row is sent to the rank that owns it.

        Args:
            table: the table's name.
            ids: [n] distinct 64-bit integers, as a tensor, a numpy array or a list.
            weights: [n, D] numbers, likewise.
            slots: the optimizer's slots by name, as in `RowChunk.slots`; None: zeros.
            metadata: None: the metadata of rows that were never used.

        Raises:
            InputError: on every rank, if the rows of one are malformed, if `table` is not the name of a table, or if the ranks name
                different tables or only some pass slots or metadata.
            StateError: no rank has the table.
            CapacityError: on every rank, if the rows do not fit on one. The call can be repeated once there is space.

        For example `sharded.import_rows("item", part_of_a_file["ids"], part_of_a_file["weights"])`.
        """

        def check() -> None:
            if table not in self._configs:
                raise InputError(f"{self._owner} has no table {table!r}: give one of {', '.join(self._configs)}")

        all_ranks().run(check)
        import_on_all_ranks(table, self._module_tables.get(table), ids, weights, slots, metadata)

    def param_group(self, table: str) -> dict[str, Any] | None:
        """Returns the table's entry of `param_groups`; None if the table has no optimizer."""
        groups = [lookup.fused_optimizer.groups for lookup in self._lookups]
        return next((group[table] for group in groups if table in group), None)

    def _create_lookups(self) -> None:
        for sharding in self._shardings():
            sharding.make_lookup = self._make_lookup
            self._lookups.append(sharding.create_lookup())

    def _shardings(self) -> list[Any]:
        """Returns TorchRec's shardings, in the order of their input exchanges."""
        raise NotImplementedError

    def refresh_buckets(self) -> None:
        """Makes ids be sent to the owners of the tables' current buckets."""
        for sharding in self._shardings():
            for table in sharding.sharded_tables():
                if table.name in self._module_tables:
                    table.total_num_buckets = self._module_tables[table.name].total_num_buckets
        if not self._has_uninitialized_input_dist:
            self._input_dists[:] = [sharding.create_input_dist() for sharding in self._shardings()]

    def weights(self) -> dict[str, nn.Parameter]:
        """Returns the zero-row parameter of every table of the module, including tables on other ranks."""
        return table_weights(getattr(self, self._prefix))

    def _make_lookup(self, tables: list[Any], spreads_bags: bool) -> CacheLookup:
        configs = [self._configs[table.name] for table in tables]
        pooled = self._prefix == "embedding_bags"
        return CacheLookup(
            self._module_tables,
            configs,
            spreads_bags=spreads_bags,
            pooled=pooled,
            after_backward=self._after_backward([self._module_tables[table.name] for table in tables]),
            all_reduce=self._all_reduce if spreads_bags and self._env.world_size > 1 else None,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise StateError(
            f"{self._owner} cannot be copied: its tables are shared by ranks that talk to each other. Make a second model, and "
            "give it the rows: Saver().save(model, path), then Saver().load(copy, path)"
        )

    def __repr__(self) -> str:
        """Returns one line per shard of this rank."""
        groups = {name: group for lookup in self._lookups for name, group in lookup.fused_optimizer.groups.items()}
        return f"{type(self).__name__}(\n{tables_text(self._module_tables, groups)}\n)"

    def reset_parameters(self) -> None:
        """Does nothing. A row is initialized when it is first looked up."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads like TorchRec. During construction there is nothing to load."""
        if not self._built:
            return _IncompatibleKeys([], [])
        return super().load_state_dict(state_dict, strict=strict, assign=assign)  # type: ignore[misc]

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Checks the batch and starts to send it.

        An invalid batch is sent as an empty one, so that the other ranks do not wait. The forward then raises its error on every
        rank.
        """
        check_not_recording(f"{self._owner}: the batch")
        try:
            checked = self._check(features)
            given = reorder_features(checked, self._input_keys)
            if self._free_features_storage_early:
                # TorchRec frees these once every module has started to send its input.
                ctx.early_releasable_inputs.append(checked)
                given = copy_features(checked) if given is checked else given
        except Exception as error:
            ctx.error = error
            given = self._empty_batch()
        if not self._has_checked_buckets:
            try:
                self._check_buckets_match()
            except Exception as error:
                ctx.error, given = error, self._empty_batch()
            if not self._has_uninitialized_input_dist:
                self.refresh_buckets()
        if self._has_uninitialized_input_dist:
            # TorchRec would also warn here of ids at or above num_embeddings, which are valid with these tables.
            self._create_input_dist(self._input_keys)
            self._has_uninitialized_input_dist = False
        return super().input_dist(ctx, given)  # type: ignore[misc]

    def _check(self, features: Any) -> KeyedJaggedTensor:
        return check_features(
            features,
            self._features,
            weighted=self._weighted,
            clicks=self._module_tables.counts_clicks,
            owner=self._owner,
            device=self._module_tables.device,
        )

    def _empty_batch(self) -> KeyedJaggedTensor:
        keys = self._input_keys
        device = self._module_tables.device
        weights = None
        if self._weighted or self._module_tables.counts_clicks:
            dtype = torch.float64 if self._module_tables.counts_clicks else torch.float32
            weights = torch.empty(0, dtype=dtype, device=device)
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.empty(0, dtype=torch.int64, device=device),
            lengths=torch.zeros(len(keys), dtype=torch.int64, device=device),
            weights=weights,
            stride=1,
        )

    def prefetch(
        self, dist_input: KJTList, forward_stream: Any = None, ctx: Any = None, *, in_background: bool = False
    ) -> None:
        """Plans a batch whose ids have arrived, and starts loading its rows.

        With `in_background` a thread plans it while the caller computes, until `wait_for_prefetch`. Does nothing without `ctx`, the
        batch's context, which stores the first error of a batch.
        """
        del forward_stream
        if ctx is None or ctx.error is not None:
            return
        try:
            train = self._is_training()
        except Exception as error:
            ctx.error = error
            return
        for lookup, features in zip(self._lookups, dist_input, strict=True):
            # In every pipeline that prefetches, the caller's stream is ordered after the ids.
            lookup.prefetch_batch(features, train=train, in_background=in_background, on_error=self._log_prefetch_error)

    def place_next(self, dist_input: KJTList, ctx: Any) -> None:
        """Moves the rows of the next, prefetched batch to the device while it computes queued work.

        `unplace_rows` undoes it. The ranks do not wait for each other here.
        """
        if ctx.error is None:
            for lookup, features in zip(self._lookups, dist_input, strict=True):
                lookup.place_next(features, self._log_prefetch_error)

    def unplace_rows(self) -> None:
        """Unpins the rows that `place_next` moved. Their batch stays prefetched."""
        for lookup in self._lookups:
            lookup.unplace()

    def _arrival_stream(self) -> Any:
        """Returns the stream on which a TorchRec pipeline sends batches; None if it is the forward's stream.

        A pipeline replaces `forward` by an object that has the stream. The forward's stream itself waits for the previous step, and
        the CPU would wait for it too.
        """
        forward = getattr(self, "forward", None)
        if getattr(forward, "_use_main_stream_for_dist_init", False):
            return None
        return getattr(forward, "_stream", None)

    def _log_prefetch_error(self, error: Exception) -> None:
        # The forward of the batch plans it again, and raises on every rank any error that persists.
        logger.warning("%s: rows could not be fetched or moved ahead of their forward: %s", self._owner, error)

    def wait_for_prefetch(self) -> None:
        """Waits until every prefetched batch is planned. Afterwards only the SSD tier works on other threads."""
        for lookup in self._lookups:
            lookup.wait_until_planned()

    def drop_prefetched(self) -> None:
        """Unpins the rows of prefetched batches whose forwards will not come."""
        for lookup in self._lookups:
            lookup.drop_prefetched()

    def _is_training(self) -> bool:
        train = self.training and torch.is_grad_enabled() and is_trainable(self._owner, self.weights())
        if train and self._module_tables.untrainable:
            raise no_optimizer_error(self._module_tables.untrainable)
        return train

    @contextmanager
    def _ready(self, ctx: Any, dist_input: KJTList) -> Iterator[None]:
        """Has every row of the batch in its slot within the block, on every rank; otherwise every rank raises.

        An error leaves no row pinned.
        """
        if self.training and torch.is_grad_enabled():
            # Every rank calls this, even with an invalid batch, because the ranks flush together.
            self._flush_schedule.flush_if_due()
        planned: list[PlannedFeatures] = []
        error = ctx.error
        try:
            try:
                if error is None:
                    train = self._is_training()
                    for lookup, features in zip(self._lookups, dist_input, strict=True):
                        planned.append(lookup.plan(features, train=train, arrival_stream=self._arrival_stream()))
            except Exception as caught:
                error = caught
            if self._drops_rows and self.training and torch.is_grad_enabled():
                # No rank drops rows for a batch that another rank rejects.
                self._ranks.raise_on_every_rank(error)
            try:
                if error is None:
                    for batch in planned:
                        batch.wait()
            except Exception as caught:
                error = caught
            self._ranks.raise_on_every_rank(error)
            for lookup, batch in zip(self._lookups, planned, strict=True):
                lookup.set_next(batch)
            yield
        except BaseException:
            for batch in planned:
                batch.release()
            raise

    def compute(self, ctx: Any, dist_input: KJTList) -> list[torch.Tensor]:
        """Returns the results of one batch's lookups."""
        with self._ready(ctx, dist_input):
            result: list[torch.Tensor] = super().compute(ctx, dist_input)  # type: ignore[misc]
        return result

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> Any:  # noqa: A002 - TorchRec's name
        """Returns awaitables of one batch's lookup results, sent to the ranks of their samples."""
        with self._ready(ctx, input):
            return super().compute_and_output_dist(ctx, input)  # type: ignore[misc]

    def update_shards(
        self,
        changed_sharding_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Raises `UnsupportedError`: the shards of an existing module cannot be moved."""
        del changed_sharding_params, env, device
        raise UnsupportedError(
            "update_shards is not supported yet: save with Saver and load into a model with the new plan"
        )
