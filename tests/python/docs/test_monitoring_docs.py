"""The pages docs/monitoring.md and metrics.md: programs run, the list matches the code, and every named metric exists."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from project_paths import ROOT
from torchrec_embcache.monitoring import METRICS, SERVING_METRICS, Metric

PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("monitoring.md", "metrics.md"))
SERVING = (ROOT / "docs" / "serving-operations.md").read_text()
PROGRAMS = [
    (part.split("\n", 1)[0], program)
    for part in PAGE.split("\n## ")[1:]
    for program in re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
]


def listed(metrics: Sequence[Metric]) -> str:
    """The list of metrics as a page has it."""
    kinds = {"text": "info"}
    rows = [
        f"| `{metric.name}`{f' (label `{metric.label}`)' if metric.label else ''} | {kinds.get(metric.kind, metric.kind)} "
        f"| `{metric.path}` | {metric.about} |"
        for metric in metrics
    ]
    return "\n".join(["| metric | kind | path | what it says |", "| --- | --- | --- | --- |", *rows])


@pytest.mark.parametrize(("page", "metrics"), [(PAGE, METRICS), (SERVING, SERVING_METRICS)])
def test_a_page_lists_every_metric_with_its_meaning(page: str, metrics: Sequence[Metric]) -> None:
    (found,) = re.findall(r"<!-- [^\n]*holds this list[^\n]* -->\n\n(.*?)\n\n<!-- to here -->", page, re.DOTALL)
    assert found == listed(metrics)


def test_queries_name_metrics_that_there_are() -> None:
    names = {metric.name for metric in METRICS}
    histograms = {metric.name for metric in METRICS if metric.kind == "histogram"}
    names |= {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    (queries,) = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)
    used = set(re.findall(r"\bembcache_\w+", queries))
    assert len(used) >= 5
    assert used <= names


def test_there_is_a_program_for_each_exporter() -> None:
    assert [title for title, _ in PROGRAMS] == ["Prometheus", "TensorBoard", "JSON lines", "Lightning"]


@pytest.mark.parametrize(("title", "program"), PROGRAMS, ids=[title for title, _ in PROGRAMS])
def test_the_programs_run_as_they_stand(title: str, program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if title == "Prometheus":
        assert re.fullmatch(r"http://127.0.0.1:\d+/metrics\n", done.stdout)
    elif title == "TensorBoard":
        assert list(tmp_path.glob("runs/events.out.tfevents.*"))
    elif title == "JSON lines":
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10


def test_loggers_that_the_page_names_are_those_of_the_core() -> None:
    modules = set(re.findall(r'Module::new\("([a-z_]+)"\)', (ROOT / "rust/pyext/src/logging.rs").read_text()))
    assert set(re.findall(r"torchrec_embcache\.core\.([a-z_]+)", PAGE)) <= modules
