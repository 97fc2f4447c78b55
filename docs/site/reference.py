"""The public names on each page of the reference, and the pages that are built from them.

`tests/python/docs/test_docstrings.py` checks that every name of `torchrec_embcache.__all__` and of the public modules is here once
and has an example that runs.
"""

PACKAGE = "torchrec_embcache"
# Where `make docs` puts the first page of rustdoc, in the site.
RUST = "rust/embcache/index.html"

# Methods that users do not call, by who does. The reference leaves them out.
_CALLED_BY: dict[str, list[str]] = {
    "the core and other modules": [
        "pool_array", "refresh_buckets", "by_pair", "suppress_state_dict_warning", "drop_prefetched", "after_fork",
        "display_name",
        "hyperparameters",
        "from_native", "is_collective", "needs_clock", "kind", "count_to_evict", "count_to_evict_alone", "native",
        "planner_rows", "resolve",
        "lookup_array",
        "scalar_slot", "with_display_name", "from_table",
        "sync_optimizers", "wait_for_prefetch", "table_configs", "import_from_torchrec",
        "has_fraction_rule", "vector_floats", "weights",
    ],
    "torch and TorchRec": [
        "attach", "compute", "compute_and_output_dist", "compute_kernels", "create_context",
        "create_embedding_bag_sharding", "create_embedding_sharding", "extra_repr", "fill_pipeline", "input_dist",
        "module_type", "reset_parameters", "reshard", "shard", "shard_tables", "shardable_parameters",
        "sharded_module_type", "sharding_types", "update_shards",
    ],
    "DCP": [
        "finish", "prepare_global_plan", "prepare_local_plan", "read_data", "read_metadata",
        "set_up_storage_reader", "set_up_storage_writer", "stage", "storage_meta", "write_data",
    ],
    "Lightning": [
        "on_save_checkpoint", "setup", "teardown",
    ],
    "Megatron": [
        "check_backend_compatibility", "check_version_compatibility",
    ],
}  # fmt: skip
CALLED_BY_OTHERS = [name for names in _CALLED_BY.values() for name in names]

# Page: its title, what it is about, and its names.
REFERENCE: dict[str, tuple[str, str, list[str]]] = {
    "pytorch": (
        "Plain PyTorch",
        "Modules that stand where `torch.nn.Embedding` and `torch.nn.EmbeddingBag` stood.",
        ["EmbCacheEmbedding", "EmbCacheEmbeddingBag"],
    ),
    "torchrec": (
        "TorchRec",
        "Collections, their configs and sharders, and the pipeline that fetches rows ahead.",
        [
            "EmbCacheEmbeddingBagCollection",
            "EmbCacheEmbeddingCollection",
            "EmbCacheEmbeddingBagConfig",
            "EmbCacheEmbeddingConfig",
            "EmbCacheEmbeddingBagCollectionSharder",
            "EmbCacheEmbeddingCollectionSharder",
            "EmbCacheShardedEmbeddingBagCollection",
            "EmbCacheShardedEmbeddingCollection",
            "EmbCacheTrainPipelineSparseDist",
        ],
    ),
    "tables": (
        "Budgets and tables",
        "What a table may take, the table itself, and its rows.",
        [
            "TierBudgets",
            "TableOptions",
            "CacheTable",
            "RowChunk",
            "FoundRows",
            "EvictedRows",
            "RowMetadata",
            "table.cache_table.RowExport",
            "cache_modules",
            "flush",
            "close_all",
        ],
    ),
    "stats": (
        "Counters",
        "What `table.stats()` gives.",
        ["TableStats", "TierStats", "SsdStats", "AdmissionStats", "EvictionStats", "Histogram"],
    ),
    "monitoring": (
        "Monitoring",
        "Counters in Prometheus, TensorBoard, JSON lines and Lightning. [The guide](../monitoring.md) describes the exporters.",
        [
            "monitoring.PrometheusExporter",
            "monitoring.TensorBoardLogger",
            "monitoring.JsonlLogger",
            "integrations.lightning.EmbCacheMonitor",
            "monitoring.Sampler",
            "monitoring.Sample",
            "monitoring.TableSample",
            "monitoring.scalars",
            "monitoring.Metric",
        ],
    ),
    "sizing": (
        "Sizing",
        "How the miss ratio depends on the budgets, and how to divide them. [The guide](../sizing.md) has worked examples.",
        [
            "MissRatioCurve",
            "sizing.advise",
            "sizing.BudgetAdvice",
            "sizing.TableAdvice",
            "sizing.TableTraffic",
            "sizing.traffic_of",
            "sizing.write_traffic",
            "sizing.read_traffic",
            "distributed.planner_constraints",
            "distributed.offload_stats",
        ],
    ),
    "plotting": (
        "Pictures",
        "Curves, hit rates, bytes and waits as diagrams. [`embcache plot`](../cli.md#embcache-plot) draws them in a terminal.",
        [
            "plotting.curve_panels",
            "plotting.history_panels",
            "plotting.read_panels",
            "plotting.draw",
            "plotting.svg",
            "plotting.Panel",
            "plotting.Line",
            "plotting.Mark",
        ],
    ),
    "optimizers": (
        "Optimizers and initializers",
        "How the backward updates rows, and how rows are born.",
        [
            "optimizers.SGD",
            "optimizers.Adagrad",
            "optimizers.RowWiseAdagrad",
            "optimizers.Adam",
            "optimizers.AdamW",
            "optimizers.PartialRowWiseAdam",
            "optimizers.LAMB",
            "optimizers.FTRL",
            "optimizers.OptimizerSpec",
            "optimizers.FusedOptimizer",
            "initializers.Constant",
            "initializers.Uniform",
            "initializers.Normal",
            "initializers.TruncatedNormal",
            "initializers.Linear",
            "initializers.Initializer",
        ],
    ),
    "lifecycle": (
        "Admission and eviction",
        "Which ids get a row, and which rows leave.",
        [
            "admission.Count",
            "admission.Probability",
            "admission.ShowClick",
            "admission.ReadOnly",
            "admission.Admission",
            "eviction.Policy",
            "eviction.Ttl",
            "eviction.Score",
            "eviction.L2Norm",
            "eviction.Keep",
            "eviction.Share",
            "eviction.All",
            "eviction.Rule",
            "evict",
            "set_time",
            "modules.recsdk.AdmitAndEvictConfig",
            "modules.recsdk.AdmitAndEvictPolicyType",
            "modules.recsdk.ShowClickParams",
            "modules.recsdk.TranslatedConfig",
        ],
    ),
    "checkpoints": (
        "Checkpoints",
        "`Saver`, and what puts tables into the checkpoints of other libraries.",
        [
            "Saver",
            "checkpoint.SaveReport",
            "checkpoint.LoadReport",
            "checkpoint.Progress",
            "EmbCacheStorageWriter",
            "EmbCacheStorageReader",
            "TableState",
            "integrations.lightning.EmbCacheCheckpoint",
            "integrations.megatron.register",
            "integrations.megatron.sharded_tables",
            "integrations.megatron.ShardedTables",
            "integrations.megatron.SaveShardedStrategy",
            "integrations.megatron.LoadShardedStrategy",
            "integrations.megatron.SaveCommonStrategy",
            "integrations.megatron.LoadCommonStrategy",
            "serialize.BlockSaver",
            "serialize.BlockLoader",
            "serialize.LoadedBlocks",
            "serialize.WriteBlock",
            "serialize.split_sparse_dense_state_dict",
        ],
    ),
    "serving": (
        "Serving",
        "Read-only tables out of checkpoints, kept up with a trainer. [The guide](../serving.md) has examples.",
        [
            "serving.open",
            "serving.Follow",
            "serving.Tables",
            "serving.Version",
            "serving.Table",
            "serving.Rows",
            "serving.ServingStats",
            "serving.replace",
            "monitoring.ServingCollector",
        ],
    ),
    "exceptions": (
        "Errors and warnings",
        "What is raised, and when. [The guide](../errors.md) has a section for each.",
        [
            "EmbCacheError",
            "exceptions.ConfigError",
            "exceptions.InputError",
            "exceptions.CapacityError",
            "exceptions.HostMemoryError",
            "exceptions.DeviceMemoryError",
            "exceptions.StateError",
            "exceptions.StaleError",
            "exceptions.MismatchError",
            "exceptions.PathError",
            "exceptions.StoragePermissionError",
            "exceptions.InUseError",
            "exceptions.StorageError",
            "exceptions.ReadOnlyError",
            "exceptions.CorruptionError",
            "exceptions.EvictionHookError",
            "exceptions.UnsupportedError",
            "EmbCacheWarning",
        ],
    ),
}


def names() -> list[str]:
    """Every public name, from the package on, such as `optimizers.SGD`."""
    return [name for _, _, listed in REFERENCE.values() for name in listed]


def page(key: str) -> str:
    """A page of the reference, as mkdocstrings takes it."""
    title, about, listed = REFERENCE[key]
    # Members that modules inherit from their common base are listed. Those that rules and optimizers inherit are not repeated.
    shared = str(key in ("pytorch", "torchrec", "tables")).lower()
    parts = [
        f"::: {PACKAGE}.{name}\n    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}\n"
        f"      inherited_members: {shared}\n      filters: ['!^_', '!^({'|'.join(CALLED_BY_OTHERS)})$']\n"
        for name in listed
    ]
    return f"# {title}\n\n{about}\n\n" + "\n".join(parts)


def index() -> str:
    """The page that lists the pages of the reference, and their names."""
    lines = ["# Reference\n", "Every public name, with its arguments, what it raises and an example.\n"]
    # An HTML link, because mkdocs does not know pages that `make docs` adds when the site is built.
    lines.append(f'For contributors: <a href="../{RUST}">the documentation of the Rust core</a>, by rustdoc.\n')
    for key, (title, about, listed) in REFERENCE.items():
        links = ", ".join(f"[`{name}`]({key}.md#{PACKAGE}.{name})" for name in listed)
        lines.append(f"## [{title}]({key}.md)\n\n{about}\n\n{links}\n")
    return "\n".join(lines)
