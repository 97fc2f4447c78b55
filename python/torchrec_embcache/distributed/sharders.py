"""The sharders for `DistributedModelParallel` and TorchRec's planner."""

import copy
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.types import DataType

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache.exceptions import ConfigError, UnsupportedError
from torchrec_embcache.modules import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection
from torchrec_embcache.modules._optimizer_choice import choose_optimizer

from ._module import ShardedCacheModule
from ._sharding import SHARDING_TYPES
from .collections import EmbCacheShardedEmbeddingBagCollection, EmbCacheShardedEmbeddingCollection

__all__ = ["EmbCacheEmbeddingBagCollectionSharder", "EmbCacheEmbeddingCollectionSharder"]


if TYPE_CHECKING:
    # `DistributedModelParallel` takes a list of `ModuleSharder[nn.Module]`. A type checker rejects TorchRec's own sharders in it,
    # because they are `ModuleSharder[EmbeddingBagCollection]`. For it, ours are sharders of any module.
    from torchrec.distributed.embedding_types import BaseEmbeddingSharder

    _BagSharder: TypeAlias = BaseEmbeddingSharder[Any]
    _SequenceSharder: TypeAlias = BaseEmbeddingSharder[Any]
else:
    _BagSharder, _SequenceSharder = EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

# Settings of TorchRec's kernels in a plan, and the values that match this package's behavior. None and False match, too.
_KERNEL_SETTINGS: dict[str, tuple[Any, ...]] = {
    "enforce_hbm": (),
    "stochastic_rounding": (),
    "bounds_check_mode": (),
    "output_dtype": (DataType.FP32,),
    "key_value_params": (),
}
_CACHE_SETTINGS = ("algorithm", "reserved_memory", "precision", "prefetch_pipeline", "multipass_prefetch_config")

M = TypeVar("M")
S = TypeVar("S", bound=ShardedCacheModule)


class _CacheSharder(Generic[M, S]):
    """A mixin over TorchRec's class, shared by both sharders, from module `M` to sharded module `S`.

    The planner sizes a table by the rows that fit its budgets: the number of possible ids does not determine memory.
    """

    _module_type: type[M]
    _sharded_module_type: type[S]
    fused_params: dict[str, Any] | None
    qcomm_codecs_registry: dict[str, Any] | None

    def __init__(
        self, fused_params: dict[str, Any] | None = None, qcomm_codecs_registry: dict[str, Any] | None = None
    ) -> None:
        choose_optimizer("any", None, fused_params)
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)  # type: ignore[call-arg]

    @property
    def module_type(self) -> type[M]:
        """The class of the modules that it shards."""
        return self._module_type

    @property
    def sharded_module_type(self) -> type[S]:
        """The class of the modules that it creates."""
        return self._sharded_module_type

    def shard(
        self,
        module: M,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> S:
        """Creates the sharded module. Each rank adopts the rows of its buckets from `module`, which is closed.

        Raises `UnsupportedError` for unsupported features of TorchRec's sharder, and `ConfigError` for a plan that does not fit.
        """
        return self._sharded_module_type(
            module,
            self._check_params(module, params, env),
            env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns row-wise, by bucket, and table-wise, on any device.

        If a constraint of the planner allows neither for a table, also returns the types that it allows. The planner runs only on
        the first rank, and an error there would block the other ranks. `shard` then rejects the plan on every rank.
        """
        del compute_device_type
        return list(SHARDING_TYPES) + _required_sharding_types(sys._getframe(1).f_locals)  # noqa: SLF001

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns TorchRec's fused kernel, because the planner has no cost model of a customized one."""
        del sharding_type, compute_device_type
        return [EmbeddingComputeKernel.FUSED.value]

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Returns each table as a parameter on meta, with the number of rows that fit its budgets in RAM."""
        return {name: _meta_parameter(module, name, param) for name, param in module.weights().items()}

    def _check_params(
        self, module: Any, params: dict[str, ParameterSharding], env: ShardingEnv
    ) -> dict[str, ParameterSharding]:
        """Returns a copy of `params` with the kernel of this package. Raises for unsupported settings."""
        if isinstance(env, ShardingEnv2D):
            raise UnsupportedError("2D parallelism is not supported yet: use one ShardingEnv over all ranks")
        if env.process_group is None:
            raise UnsupportedError(
                "a ShardingEnv without process group (from_local) is not supported yet: use ShardingEnv.from_process_group, "
                "or the unsharded module"
            )
        if env.world_size != (size := all_ranks().world_size):
            raise UnsupportedError(
                f"env is of {env.world_size} of the {size} ranks, which is not supported yet, because saves, flushes and "
                "imports are of all ranks: use ShardingEnv.from_process_group(torch.distributed.group.WORLD)"
            )
        configs = {config.name: config for config in module.table_configs()}
        changed = {}
        for name, param in params.items():
            if name in configs:
                self._check_table(configs[name], param, env.world_size)
            changed[name] = copy.copy(param)
            changed[name].compute_kernel = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
        missing = sorted(configs.keys() - params.keys())
        if missing:
            raise ConfigError(f"the sharding plan has no entry for tables {missing}: plan every table of the module")
        return changed

    def _check_table(self, config: Any, param: ParameterSharding, world_size: int) -> None:
        if param.sharding_type not in SHARDING_TYPES:
            raise UnsupportedError(
                f"table {config.name!r}: sharding_type={param.sharding_type!r} is not supported yet: "
                f"use {' or '.join(map(repr, SHARDING_TYPES))}"
            )
        self._check_kernel_settings(config.name, param)
        if param.sharding_type == ShardingType.ROW_WISE.value and config.total_num_buckets < world_size:
            raise ConfigError(
                f"table {config.name!r}: total_num_buckets={config.total_num_buckets} is below the {world_size} ranks that share "
                "them: give at least one bucket a rank, or shard the table table-wise"
            )

    def _check_kernel_settings(self, table: str, param: ParameterSharding) -> None:
        """Raises `UnsupportedError` for settings of TorchRec's kernels, which are not used here. The load factor is allowed."""
        cache = param.cache_params
        given = {name: getattr(param, name) for name in _KERNEL_SETTINGS}
        given |= {f"cache_params.{name}": getattr(cache, name) for name in _CACHE_SETTINGS if cache is not None}
        for name, value in given.items():
            if value is not None and value is not False and value not in _KERNEL_SETTINGS.get(name, ()):
                raise UnsupportedError(
                    f"table {table!r}: the plan has {name}={value!r}, which is not supported: leave it out of its constraints"
                )

    def reshard(
        self,
        sharded_module: S,
        changed_shard_to_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> S:
        """Raises `UnsupportedError`: the shards of an existing module cannot be moved."""
        del sharded_module, changed_shard_to_params, env, device
        raise UnsupportedError(
            "moving the shards of a live module is not supported yet: save with Saver and load into the new plan"
        )


def _required_sharding_types(planner: Mapping[str, Any]) -> list[str]:
    """Returns the sharding types that a planner's constraint requires for a table, if it allows none of `SHARDING_TYPES`.

    `planner` has the variables of TorchRec's enumerator at its call: `self`, the enumerator, and `name`, the table's name. The
    enumerator passes neither to a sharder.
    """
    constraints = getattr(planner.get("self"), "_constraints", None) or {}
    demanded = getattr(constraints.get(planner.get("name")), "sharding_types", None) or []
    return [] if set(demanded) & set(SHARDING_TYPES) else list(demanded)


def _meta_parameter(module: Any, name: str, param: nn.Parameter) -> nn.Parameter:
    planned = nn.Parameter(torch.empty(module.planner_rows(name), param.shape[1], dtype=torch.float32, device="meta"))
    planned.__dict__.update(param.__dict__)  # has the optimizer in backward, by which the planner sizes the slots
    return planned


class EmbCacheEmbeddingBagCollectionSharder(
    _CacheSharder[EmbCacheEmbeddingBagCollection, EmbCacheShardedEmbeddingBagCollection], _BagSharder
):
    """Shards `EmbCacheEmbeddingBagCollection` for `DistributedModelParallel`, row-wise by bucket or table-wise.

    Args:
        fused_params: training settings, as for TorchRec's sharder: `optimizer` (an `EmbOptimType`), `learning_rate`, `eps`,
            `beta1`, `beta2`, `weight_decay`, `gradient_clipping` and `max_gradient`. An optimizer set by
            `apply_optimizer_in_backward` has priority.
        qcomm_codecs_registry: TorchRec's codecs for the exchanges between ranks.

    Raises `ConfigError` and `UnsupportedError` for `fused_params` that are out of range or not supported.

    Examples:
        In a world of one rank, with `torch.distributed` initialized, for example by torchrun:

        >>> import torch
        >>> from fbgemm_gpu.split_embedding_configs import EmbOptimType
        >>> from torchrec import KeyedJaggedTensor
        >>> from torchrec.distributed import DistributedModelParallel
        >>> from torchrec_embcache import (
        ...     EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagCollectionSharder, EmbCacheEmbeddingBagConfig, TierBudgets,
        ...     cache_modules,
        ...     initializers,
        ... )
        >>> item = EmbCacheEmbeddingBagConfig(
        ...     name="item", embedding_dim=3, num_embeddings=1000, feature_names=["item_id"],
        ...     initializer=initializers.Linear(0.0, 1.0),  # every row is born as 0.0, 0.5, 1.0
        ... )
        >>> model = torch.nn.Sequential(EmbCacheEmbeddingBagCollection(tables=[item], tiers=TierBudgets(host_bytes="1MiB")))
        >>> sharder = EmbCacheEmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5})
        >>> model = DistributedModelParallel(model, device=torch.device("cpu"), sharders=[sharder])
        >>> features = KeyedJaggedTensor(["item_id"], torch.tensor([7, -1, 7]), lengths=torch.tensor([2, 1]))
        >>> pooled = model(features).values()  # [B, C], B = 2, C = 3
        >>> pooled.detach()
        tensor([[0.0000, 1.0000, 2.0000],
                [0.0000, 0.5000, 1.0000]])
        >>> pooled.sum().backward()  # the update happens here, on the ranks that own the rows
        >>> cache_modules(model)["0"].tables["item"].read_rows([7, -1]).weights
        tensor([[-1.0000, -0.5000,  0.0000],
                [-0.5000,  0.0000,  0.5000]])
    """

    _module_type = EmbCacheEmbeddingBagCollection
    _sharded_module_type = EmbCacheShardedEmbeddingBagCollection


class EmbCacheEmbeddingCollectionSharder(
    _CacheSharder[EmbCacheEmbeddingCollection, EmbCacheShardedEmbeddingCollection], _SequenceSharder
):
    """Shards `EmbCacheEmbeddingCollection` for `DistributedModelParallel`, row-wise by bucket or table-wise.

    Args:
        fused_params: training settings, as for TorchRec's sharder: `optimizer` (an `EmbOptimType`), `learning_rate`, `eps`,
            `beta1`, `beta2`, `weight_decay`, `gradient_clipping` and `max_gradient`. An optimizer set by
            `apply_optimizer_in_backward` has priority.
        qcomm_codecs_registry: TorchRec's codecs for the exchanges between ranks.
        use_index_dedup: TorchRec's. True raises `UnsupportedError`: each rank removes duplicates before it looks up anyway.

    Examples:
        In a world of one rank, with `torch.distributed` initialized:

        >>> import torch
        >>> from torchrec import EmbeddingConfig, KeyedJaggedTensor
        >>> from torchrec.distributed import DistributedModelParallel
        >>> from torchrec_embcache import EmbCacheEmbeddingCollection, EmbCacheEmbeddingCollectionSharder, TierBudgets
        >>> word = EmbeddingConfig(name="word", embedding_dim=4, num_embeddings=1000, feature_names=["word"])
        >>> ec = EmbCacheEmbeddingCollection(tables=[word], tiers=TierBudgets(host_bytes="1MiB"))
        >>> sharder = EmbCacheEmbeddingCollectionSharder({"learning_rate": 0.1})
        >>> model = DistributedModelParallel(
        ...     torch.nn.ModuleDict({"words": ec}), device=torch.device("cpu"), sharders=[sharder]
        ... )
        >>> features = KeyedJaggedTensor(["word"], torch.tensor([7, -1, 7]), lengths=torch.tensor([2, 1]))
        >>> model.module["words"](features).wait()["word"].values().shape  # [N, D]
        torch.Size([3, 4])
    """

    _module_type = EmbCacheEmbeddingCollection
    _sharded_module_type = EmbCacheShardedEmbeddingCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        if use_index_dedup:
            raise UnsupportedError(
                "use_index_dedup=True is not supported yet: each rank removes duplicates before it looks up anyway"
            )
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
