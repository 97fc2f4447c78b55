# ruff: noqa: D100, E401, F401, I001
import re, glob, pathlib, os

fs = [
    f
    for p in ("rust", "python", "tests", "examples", "docs", "benches")
    for f in glob.glob(p + "/**/*", recursive=True)
    if f.endswith((".rs", ".py", ".pyi", ".md", ".ipynb", ".json")) and "/target/" not in f
] + ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
subs = [
    (r'not_admitted="shared"', 'not_admitted="oov"'),
    (r'missing_read="shared"', 'missing_read="oov"'),
    (r'missing="shared"', 'missing="oov"'),
    (r'"not_admitted": "shared"', '"not_admitted": "oov"'),
    (r"not_admitted='shared'", "not_admitted='oov'"),
    (r'"zeros", "initial", "shared"', '"zeros", "initial", "oov"'),
    (r'not_admitted=\\"shared\\"', 'not_admitted=\\\\"oov\\\\"'),
    (r"embcache_ssd_given_bytes_total", "embcache_ssd_logical_written_bytes_total"),
    (r"embcache_ssd_flush_given_up", "embcache_ssd_flush_lost"),
    (r"embcache_ssd_room_waits_total", "embcache_ssd_space_waits_total"),
    (r"embcache_admission_refused_ids_total", "embcache_admission_not_admitted_ids_total"),
    (r"embcache_eviction_under_way", "embcache_eviction_sweeping"),
    (r"embcache_eviction_untold_rows", "embcache_eviction_undelivered_rows"),
    (r"embcache_serving_far_rows_total", "embcache_serving_cold_rows_total"),
    (r"\bssd([./])row_bytes_given", "ssd\\1logical_written_bytes"),
    (r"\bssd([./])published_given_up", "ssd\\1has_lost_flush"),
    (r"\bssd([./])room_waits", "ssd\\1space_waits"),
    (r'\badmission([./])refused(?=["`_])', "admission\\1not_admitted"),
    (r"\beviction([./])under_way", "eviction\\1is_sweeping"),
    (r"\beviction([./])untold", "eviction\\1undelivered"),
    (r'(["`])far_rows(["`])', "\\1cold_rows\\2"),
    (r'(["`])birth_ratio(["`])', "\\1new_row_ratio\\2"),
    (r'(["`])unseen(["`])(?=:|`|"|,| )', "\\1missing\\2"),
    (r"\bunseen=", "missing="),
]
for f in fs:
    try:
        s = pathlib.Path(f).read_text()
    except UnicodeDecodeError:
        continue
    t = s
    for a, b in subs:
        t = re.sub(a, b, t)
    if f.endswith(("admission.py", "settings.rs", "serving.rs")) and ("python/torchrec_embcache" in f or "pyext" in f):
        t = (
            t.replace('== "shared"', '== "oov"')
            .replace('return "shared"', 'return "oov"')
            .replace('"shared" =>', '"oov" =>')
            .replace('"zeros", "initial", "shared" or', '"zeros", "initial", "oov" or')
            .replace('"initial", "shared"', '"initial", "oov"')
        )
    if f.endswith("lifecycle.py") and "torchrec_embcache" in f:
        t = t.replace('== "shared"', '== "oov"')
    if re.search(r"(nn/embedding|nn/embedding_bag|modules/configs|cache)\.py$", f) and "torchrec_embcache" in f:
        t = t.replace('            "shared": one row', '            "oov": one row').replace(
            'it is "shared", its', 'it is "oov", its'
        )
    if f.endswith("serving/tables.py"):
        t = t.replace('or, "shared",', 'or, "oov",').replace('"shared", the row', '"oov", the row')
    if f in ("docs/configuration.md", "docs/lifecycle.md", "docs/serving.md"):
        t = t.replace('`"shared"`', '`"oov"`')
    if f.endswith("test_missing_reads.py"):
        t = re.sub(r'(?m)^                "shared",$', '                "oov",', t)
    if f.endswith("test_shared_row.py"):
        t = t.replace('["initial", "shared"]', '["initial", "oov"]').replace('given == "shared"', 'given == "oov"')
    if f.endswith("test_serving.py"):
        t = t.replace('(None, "shared")', '(None, "oov")')
    if f.endswith("lifecycle/sweep.rs"):
        t = t.replace('=> "standing"', '=> "lowest"')
    if f.endswith(("metrics.py", "rows.py")) and "torchrec_embcache" in f:
        t = t.replace('"standing"', '"lowest"')
    if t != s:
        pathlib.Path(f).write_text(t)
