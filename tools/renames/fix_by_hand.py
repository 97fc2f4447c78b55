# ruff: noqa: D100, D103, E401, F401, F821, I001, SIM115, T201, UP031
import re, sys, pathlib


def sub(f, *prs):
    p = pathlib.Path(f)
    s = p.read_text()
    for a, b in prs:
        n = re.sub(a, b, s)
        if n == s:
            print("NO", f, a)
        s = n
    p.write_text(s)


# merged field/local edits
for f in (
    glob.glob("rust/**/*.rs", recursive=True)
    + glob.glob("tests/rust/**/*.rs", recursive=True)
    + glob.glob("benches/**/*.rs", recursive=True)
):
    s = pathlib.Path(f).read_text()
    n = re.sub(r"(?<=[{,(] )(\w+): (\w+): (\w+)(?=[ ,}])", lambda m: m[1] if m[1] == m[3] else f"{m[1]}: {m[3]}", s)
    n = re.sub(
        r"(?m)^(\s*)([a-z]\w+): ([a-z]\w+): ([a-z]\w+),$",
        lambda m: m[1] + (m[2] if m[2] == m[4] else f"{m[2]}: {m[4]}") + ",",
        n,
    )
    if n != s:
        pathlib.Path(f).write_text(n)
        print("merged", f)
R = "rust/pyext/src/"
for r in map(json.loads, open("tools/renames/python.jsonl")):
    if r["at"].startswith("rust/pyext") and r["kind"] == "type" and r.get("why", "").startswith("pyclass name"):
        for f in glob.glob(R + "**/*.rs", recursive=True):
            s = pathlib.Path(f).read_text()
            n = re.sub(r'name = "%s"' % re.escape(r["old"]), 'name = "%s"' % r["new"], s)
            if n != s:
                pathlib.Path(f).write_text(n)
sub(
    R + "plan.rs",
    (r"signature = \(lent = None\)", "signature = (staging = None)"),
    (r"\(table, lent = None\)", "(table, staging = None)"),
)
sub(R + "records.rs", (r"hyperparameters, ancestor=None", "hyperparameters, base=None"))
sub(
    R + "settings.rs",
    (r"\(\*, timed=false\)", "(*, needs_clock=false)"),
    (r"\(\*, train, ahead, unseen\)", "(*, train, is_prefetch, missing)"),
)
sub(R + "sizing.rs", (r"\(table, \*, anew\)", "(table, *, reset)"))
sub(
    R + "table.rs",
    (r"reopen, resume_token,", "reopen, resume_commit_id,"),
    (r"next_epoch, ancestor=None", "next_epoch, base=None"),
    (r"unfinished=None", "uncommitted=None"),
    (r"\(step, spans, version\)", "(step, ranges, version)"),
    (r"signature = \(token\)", "signature = (commit_id)"),
)
sub(
    R + "foreign.rs",
    (r"!\(collector_runs_in_child", "!(resume_collector_in_child"),
    (r"!\(interpreter_ends", "!(on_interpreter_exit"),
)
sub(R + "logging.rs", (r"!\(log_ends", "!(end_log"))
P = "python/torchrec_embcache/"
sub(
    P + "lookahead.py",
    (r"\bUnseenMode\b", "MissingMode"),
    (r"ahead=prefetch, unseen=missing", "is_prefetch=prefetch, missing=missing"),
    (r"batch.ids, ahead=True\)", "batch.ids, prefetch=True)"),
    ("With `ahead` it", "With `prefetch` it"),
)
sub(P + "lookup.py", (r"lookup, ids, ahead=False\)", "lookup, ids, prefetch=False)"))
sub(
    P + "cuts.py",
    (r"replace\(whole, below=below\)", "replace(whole, rows_below=below)"),
    (r"left\[target\]\.span,", "left[target].key_range,"),
    (r"now\.span for now", "now.key_range for now"),
)
sub(
    P + "lifecycle.py",
    (r"unseen=missing", "missing=missing"),
    (r'\{owner\}unseen"', '{owner}missing"'),
    (r'without a row is unseen"', 'without a row is missing"'),
    ("`unseen=None`", "`missing=None`"),
)
for f in ("nn/embedding.py", "nn/embedding_bag.py"):
    sub(P + f, (r"unseen=missing", "missing=missing"), (r"(?m)^        unseen: what", "        missing: what"))
sub(P + "table_shard.py", (r"resume_token=state", "resume_commit_id=state"), (r"unfinished=state", "uncommitted=state"))
sub(P + "train_pipeline.py", (r"beside=True", "in_background=True"))
sub(P + "eviction.py", (r"replace\(inputs, cuts=", "replace(inputs, thresholds="))
sub(
    P + "agreement.py",
    (
        r"(?m)^        cuts: what rules take of which the cuts are found already, by rule\.",
        "        thresholds: the thresholds that are known already, by rule.",
    ),
)
sub(P + "table_settings.py", (r"\bis_spread\b", "is_sharded"))
sub(
    P + "miss_ratios.py",
    (r'birth_ratio=float\(fields\["birth_ratio"', 'new_row_ratio=float(fields["new_row_ratio"'),
    (
        "`birth_ratio`: the share of lookups whose row was born with them",
        "`new_row_ratio`: the share of lookups that initialize their row",
    ),
    ("its misses but for births", "its misses without new rows"),
)

sub("rust/core/src/cache/plan/tensors.rs", (r"\$rows = &addresses\(", "$rows = &tensor_addresses("))
sub("rust/core/src/simd.rs", (r"impl \$trait for Lanes \{", "impl $trait for FloatLanes {"))
for f in ("benches/src/null_disk.rs", "benches/src/tier.rs"):
    sub(f, (r"\bHold\b(?!er)", "DirLockPurpose"))
sub(
    "rust/pyext/src/checkpoint_load.rs",
    (r"\bColumns\b", "LoadColumns"),
    (r"\bExtent\b", "DenseExtent"),
    (r"(?<!TableSource::)\bSegments\b", "LoadSegments"),
)
sub("rust/pyext/src/part.rs", (r"(?<![A-Za-z])Part\b", "CheckpointPart"))
sub("rust/pyext/src/paths.rs", (r"embcache::paths::(?:check_path|given_path)\(", "embcache::paths::checked_user_path("))

sub("benches/benches/all/kernels.rs", (r"\bArena\b", "RowArena"))
sub("tests/rust/tests/checkpoint/made.rs", (r"\bPublished\b", "PublishedCheckpoint"))
sub(
    "tests/rust/tests/stress.rs",
    (r"PlanMode \{ is_prefetch, \.\.", "PlanMode { is_prefetch: ahead, .."),
    (r"cache::Chunk\b", "cache::RowChunk"),
)
sub("tests/rust/tests/cache_plan.rs", (r"how: Hold\b", "how: DirLockPurpose"))
sub("tests/rust/tests/device_reads.rs", (r"PlanMode \{ is_prefetch, \.\.", "PlanMode { is_prefetch: ahead, .."))
sub("tests/rust/tests/eviction_held.rs", (r"queue\.hold\(\)", "queue.pause()"))
sub("rust/core/src/ssd/room/tests.rs", (r"(?m)^            ref_count,$", "            ref_count: names,"))
sub(
    "tests/rust/tests/checkpoint/serving_source_rules.rs",
    (r"Below \{ cut, ", "Below { threshold: cut, "),
    (r"Below \{ cut: ", "Below { threshold: "),
)
sub("rust/core/src/ssd/models.rs", (r"assert!\(next\(", "assert!(next_choice("))
sub(P + "table_shard.py", (r"settings\.is_spread", "settings.is_sharded"))
