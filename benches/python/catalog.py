"""What each bench measures, in the words of docs/benchmarks.md. Also the key benches of README.md, and those that show growth."""

__all__ = ["GROWTH", "KEY", "SECTIONS"]

# The benches of each section, each with what it measures.
SECTIONS: dict[str, dict[str, str]] = {
    "Ids, rows in RAM (one thread unless the name says more)": {
        "dedupe_zipf105": "distinct ids of a batch and the inverse",
        "dedupe_uniform": "the same, nearly all ids distinct",
        "index_lookup_zipf105_10m": "slots of a batch's ids, from the host tier's index",
        "index_lookup_uniform_10m": "the same, uniform ids",
        "index_lookup_zipf105_1m": "the same, 1M rows",
        "host_hit_zipf105_10m": "the whole path of a batch in RAM: dedupe, plan with pins and policy, gather",
        "host_hit_uniform_10m": "the same, uniform ids",
        "host_hit_zipf105_1m": "the same, 1M rows",
        "births_uniform": "new rows planned, born with uniform weights and committed",
        "births_uniform_two_threads": "the same, two threads",
        "births_normal_two_threads": "the same, normally distributed weights",
    },
    "Admission and eviction (one thread)": {
        "admission_all_known": "rate of training with `Count(5)`, every id known / without admission, rowwise Adagrad, 10M rows",
        "admission_half_pending": "dedupe, admission and gather, half of the occurrences of 10M ids that wait for a row",
        "pending_bytes_per_id": "growth of a process's resident bytes for each id that waits, worst from 1M to 10M ids",
        "sweep_ttl_in_ram_ns_per_row": "processor time a row of a sweep over 10M rows in RAM, of which a tenth leaves",
        "sweep_ttl_delta_bytes": "bytes that 1M rows on SSD which left by a sweep add to a delta",
        "sweep_ssd_step_slowdown": "median step while a sweep takes 1M rows on SSD and their space is taken back / before",
    },
    "Sizing (one thread)": {
        "train_with_sizing": "rate of training with `sizing=True` / without, rowwise Adagrad, 10M rows",
        "advised_reads_of_best_split": "rows that a DLRM's step reads, best of 12 splits of RAM / the split of `advise`",
        "advised_step_of_best_split": "the same of the median step, 2 threads",
    },
    "Kernels (one thread unless the name says more)": {
        "forward_pooled_zipf105_10m": "rows summed into bags",
        "forward_pooled_uniform_10m": "the same, uniform ids",
        "forward_pooled_zipf105_1m": "the same, 1M rows",
        "train_rowwise_adagrad_zipf105_10m": "forward, backward and update, rowwise Adagrad",
        "train_rowwise_adagrad_uniform_10m": "the same, uniform ids",
        "train_rowwise_adagrad_zipf105_1m": "the same, 1M rows",
        "train_adagrad_zipf105_10m": "the same, Adagrad",
        "train_adam_zipf105_4m": "the same, Adam, 4M rows",
        "train_rowwise_adagrad_two_threads": "rowwise Adagrad on two threads",
    },
    "SSD, reading": {
        "ssd_fetch_uniform": "random rows of a loaded, compacted, cold store",
        "ssd_fetch_cpu_us_per_row": "user and system time of a row there",
        "ssd_fetch_zipf105": "misses of zipf-drawn ids after the policy evicted, store half full, a batch ahead",
        "ssd_fetch_sessions": "the same of a trace with co-access: rows evicted together lie together",
        "io_read_uniform": "the I/O engine alone: random reads of one file",
        "io_read_cpu_us_per_read": "user and system time of a read there",
    },
    "SSD, writing": {
        "ssd_writeback": "dirty rows written, half the cap live",
        "ssd_writeback_65pct_full": "the cold tail of zipf 1.05 rewritten, 65% of the cap live, compaction keeping up",
        "ssd_writeback_80pct_full": "the same, 80% live",
        "ssd_write_amplification_65pct_full": "bytes written / bytes of rows given, 65% live",
        "ssd_write_amplification_80pct_full": "the same, 80% live",
        "io_write_sequential": "the I/O engine alone: one file written in order",
    },
    "Checkpoints": {
        "save_full": "a full checkpoint of 2 GiB of rows in RAM, written and synced",
        "save_full_cpu_seconds_per_gib": "user and system time of it",
        "load_full": "it loaded into a new table with nothing in the page cache",
        "load_4_to_3_bytes_read_per_owned": "bytes read by a rank of three of what four saved / bytes of its rows, the worst rank",
        "save_delta_1pct_of_full_time": "time of a delta with 1% of 7.5M rows in RAM modified / time of a full save of them",
        "save_linked_of_full_time": "time of a linked checkpoint of 4M rows, a tenth in RAM / time of a full save",
        "load_linked_of_full_time": "time of a restart from it, SSD tier linked back / time of a load of the full checkpoint",
    },
    "A model": {
        "dlrm_step_ram10pct_zipf105": "training of a DLRM, its tables' RAM budget 10% of their bytes, lookahead on, 2 threads",
    },
    "Saving beside training": {
        "save_async_step_slowdown": "median step of that DLRM, all rows in RAM, while `save_async` runs / while it does not",
        "save_extra_ram_bytes": "the most bytes resident while it or a blocking save runs, less those before; steps counted",
    },
    "100M rows": {
        "train_100m_rows_peak_rss_bytes": "most bytes resident in a process that trains a table of 100M rows from its first row on",
        "train_ssd_zipf105_1m": "that training on zipf-drawn ids at 1M rows (2.5 GiB for rows and indexes, 2 threads)",
        "train_ssd_zipf105_10m": "the same, 10M rows",
        "train_ssd_zipf105_100m": "the same, 100M rows",
        "ram_bytes_per_ssd_id": "growth of a process's resident bytes for each row on SSD, worst from 10M to 100M rows",
        "reopen_100m_rows_seconds": "from opening the store until the first batch is fetched",
        "sweep_100m_rows_seconds": "from a sweep that takes 100M small rows on SSD until all are gone, training beside it",
        "sweep_100m_rows_peak_ram_of_before": "most bytes resident in the process meanwhile / in as much training before",
        "sweep_100m_rows_disk_of_before": "bytes of disk that the store takes after it / before",
        "sweep_100m_rows_delta_bytes": "bytes that it adds to a delta",
        "ssd_append_1m": "new rows written to a store, the last tenth of 1M rows",
        "ssd_append_10m": "the same, 10M rows",
        "ssd_append_100m": "the same, 100M rows",
        "ssd_fetch_uniform_1m": "random rows of that store, as loaded, at 1M rows",
        "ssd_fetch_uniform_10m": "the same, 10M rows",
        "ssd_fetch_uniform_100m": "the same, 100M rows",
    },
}

# The benches of README.md's table.
KEY: dict[str, str] = {
    "dedupe_zipf105": "distinct ids of a batch and the inverse",
    "host_hit_zipf105_10m": "dedupe, plan, gather; all rows in RAM",
    "forward_pooled_zipf105_10m": "rows summed into bags",
    "train_rowwise_adagrad_zipf105_10m": "forward, backward, update: rowwise Adagrad",
    "train_adagrad_zipf105_10m": "the same, Adagrad",
    "train_adam_zipf105_4m": "the same, Adam, 4M rows",
    "train_rowwise_adagrad_two_threads": "rowwise Adagrad on 2 threads",
    "ssd_fetch_uniform": "random rows from SSD",
    "ssd_fetch_cpu_us_per_row": "CPU time of a row there",
    "ssd_fetch_sessions": "rows from SSD that are used together",
    "ssd_writeback": "dirty rows to SSD, half the cap live",
    "ssd_writeback_80pct_full": "the same, 80% live, compaction keeping up",
    "ssd_write_amplification_80pct_full": "bytes written / bytes given there",
    "save_full": "a full checkpoint of rows in RAM, synced",
    "load_full": "it loaded, nothing cached",
    "dlrm_step_ram10pct_zipf105": "a DLRM with a tenth of its tables in RAM, 2 threads",
    "save_async_step_slowdown": "a DLRM's step while a checkpoint is saved beside it",
    "train_ssd_zipf105_100m": "100M rows trained within 4 GiB of RAM, 2 threads",
    "ram_bytes_per_ssd_id": "RAM for a row on SSD",
    "reopen_100m_rows_seconds": "100M rows reopened, until the first batch",
}

# The benches of each path, by millions of rows.
GROWTH: dict[str, dict[int, str]] = {
    "index lookup (RAM)": {1: "index_lookup_zipf105_1m", 10: "index_lookup_zipf105_10m"},
    "hit path (RAM)": {1: "host_hit_zipf105_1m", 10: "host_hit_zipf105_10m"},
    "pooled forward (RAM)": {1: "forward_pooled_zipf105_1m", 10: "forward_pooled_zipf105_10m"},
    "train, rowwise Adagrad (RAM)": {1: "train_rowwise_adagrad_zipf105_1m", 10: "train_rowwise_adagrad_zipf105_10m"},
    "train, RAM + SSD": {1: "train_ssd_zipf105_1m", 10: "train_ssd_zipf105_10m", 100: "train_ssd_zipf105_100m"},
    "append (SSD)": {1: "ssd_append_1m", 10: "ssd_append_10m", 100: "ssd_append_100m"},
    "fetch, uniform (SSD)": {1: "ssd_fetch_uniform_1m", 10: "ssd_fetch_uniform_10m", 100: "ssd_fetch_uniform_100m"},
}
