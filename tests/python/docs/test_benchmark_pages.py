"""`benches/python/document.py` makes the figures of docs/benchmarks.md and README.md from results."""

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from project_paths import ROOT

SCRIPTS = ROOT / "benches" / "python"


def row(name, value, better="higher", limit=None, commit="abc1234", **rivals):
    return {
        "name": name,
        "unit": "rows/s",
        "better": better,
        "value": value,
        "low": value / 2,
        "high": value * 2,
        "limit": limit and {"what": "a plain loop", "value": limit},
        "rivals": [{"what": what, "value": other} for what, other in rivals.items()],
        "rounds": 7,
        "run": {"cpu_us_per_row": 2.5},
        "setting": {"cpu": "some processor", "cores": "4", "memory": "24 GiB", "torch": "2.0", "commit": commit},
    }


def made(rows, folder):
    results = folder / "results.json"
    results.write_text(json.dumps(rows))
    (folder / "README.md").write_text((ROOT / "README.md").read_text())
    command = [sys.executable, str(SCRIPTS / "document.py"), str(results), "--root", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_timed_out_program_is_reported_with_its_results(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    served = importlib.import_module("served")
    for read in (True, False):
        child = served.Child([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)

        def ask(child=child, read=read):
            while True:  # what is written fills a pipe until the program has ended
                if read:
                    child.read()
                child.write("again")

        with pytest.raises(RuntimeError, match="its 0 s were over: measure it again"):
            ask()
        child.close()


def test_tables_show_spread_and_ratios_and_plots_are_complete(tmp_path):
    rows = [
        row("ssd_fetch_uniform_1m", 4e6),
        row("ssd_fetch_uniform_100m", 1e5),
        row("dedupe_zipf105", 3e6, limit=4e6, torch=1e6),
        row("ssd_writeback", 3e5, commit="def5678", **{"RocksDB 1.2 (with these settings)": 1e5}),
        row("ssd_fetch_cpu_us_per_row", 2.0, better="lower", limit=3.0),
        row("a_bench_that_the_catalog_lacks", 5.0),
    ]
    done = made(rows, tmp_path)
    assert done.returncode == 0, done.stderr
    document = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "| `dedupe_zipf105` |" in document
    assert "3 M rows/s [1.5 M .. 6 M] | 0.75 | 3.00 \N{MULTIPLICATION SIGN} torch |" in document
    assert "2 rows/s [1 .. 4] | 1.50 |" in document, "of a cost less is ahead"
    assert "| `a_bench_that_the_catalog_lacks` |" in document
    assert "3.00 \N{MULTIPLICATION SIGN} RocksDB 1.2 | def5678 |" in document, "each row says where it was measured"
    assert "- RocksDB 1.2 (with these settings): `ssd_writeback`." in document
    assert "some processor" in document
    assert "cpu_us_per_row 2.5" in document
    for plot in ("benchmarks-ratios.svg", "benchmarks-growth.svg"):
        assert plot in document
        texts = [element.text for element in ET.parse(tmp_path / "docs" / plot).iter() if element.tag.endswith("text")]
        assert ("dedupe_zipf105" in texts) == (plot == "benchmarks-ratios.svg")
        assert ("fetch, uniform (SSD)" in texts) == (plot == "benchmarks-growth.svg")


def test_partial_run_keeps_other_and_newer_results(tmp_path):
    def of_day(name, value, day):
        measured = row(name, value)
        measured["setting"]["date"] = day
        return measured

    runs = [
        [of_day("dedupe_zipf105", 1e6, "2026-01-01"), of_day("ssd_writeback", 2e6, "2026-01-01")],
        [of_day("ssd_writeback", 3e6, "2026-01-02"), of_day("births_uniform", 4e6, "2026-01-02")],
        [of_day("ssd_writeback", 5e6, "2026-01-01"), of_day("births_uniform", 6e6, "2026-01-02")],
    ]
    for run in runs:
        done = made(run, tmp_path)
        assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "docs" / "benchmarks.json").read_text())
    assert {each["name"]: each["value"] for each in kept} == {
        "dedupe_zipf105": 1e6,
        "ssd_writeback": 3e6,
        "births_uniform": 6e6,
    }
    assert all(f"`{each['name']}` |" in (tmp_path / "docs" / "benchmarks.md").read_text() for each in kept)


def test_readme_figures_come_from_results(tmp_path):
    old = (ROOT / "README.md").read_text()
    for value in (3e6, 5e6):
        slow = row("ssd_writeback", 1.0)
        slow["setting"]["disk"] = "busy with a backup"
        done = made([row("dedupe_zipf105", value, limit=4e6, torch=1e6), row("births_uniform", 1.0), slow], tmp_path)
        assert done.returncode == 0, done.stderr
    new = (tmp_path / "README.md").read_text()
    assert "5 M rows/s | 1.25 | 5.00 \N{MULTIPLICATION SIGN} torch |" in new
    assert "births_uniform" not in new, "it is no key path"
    assert "some processor, 4 cores, 24 GiB of RAM, at abc1234." in new
    assert "During `ssd_writeback` the disk was busy with a backup." in new
    for part in (0, -1):
        assert old.split("make bench-docs writes from here")[part][:-1].split("to here")[part] in new


def test_without_results_nothing_is_written(tmp_path):
    done = made([], tmp_path)
    assert done.returncode == 2
    assert "run make bench first" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "results.json"]
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_comparison_row_has_ratios_above_one_if_ours_is_faster(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    results = importlib.import_module("results")
    ours, theirs = [4.0, 6.0, 9.0], [2.0, 6.0, 6.0]
    faster = results.against(row("a_rate", 6.0), "abc1234", ours, theirs)["against"]
    # In the order of rounds 0 and 2 the median is 1.75, in that of round 1 it is 1.
    assert faster == {"tree": "abc1234", "ratio": pytest.approx(1.75**0.5), "low": 1.0, "high": 2.0, "pairs": 3}
    dearer = results.against(row("a_cost", 6.0, better="lower"), "abc1234", ours, theirs)["against"]
    assert dearer["ratio"] == pytest.approx((7 / 12) ** 0.5)
    assert "; 1.32 [1.00 .. 2.00] x abc1234 (3 pairs)" in results.describe(row("a_rate", 6.0) | {"against": faster})
    # The second turn is twice as fast as the first: that makes neither tree faster.
    first, second = [1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]
    assert results.against(row("a_rate", 1.5), "abc1234", first, second)["against"]["ratio"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("cuda.py", ["cuda_forward_pooled", "cuda_train_rowwise_adagrad", "cuda_table_step_cache10pct_zipf105"]),
        ("cuda_dlrm.py", ["cuda_step_cache10pct_zipf105", "cuda_step_ssd_zipf105", "cuda_exposed_wait_share"]),
    ],
)
def test_the_benches_of_a_gpu_run_in_tritons_interpreter(script: str, names: list[str]):
    command = [sys.executable, str(SCRIPTS / script), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == names
    assert all(row["value"] > 0 for row in rows if row["unit"] != "share")
