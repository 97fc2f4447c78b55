"""The programs of docs/monitoring.md run as shown. tools/lint/catalogs.py checks the lists of metrics."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from project_paths import ROOT

PAGE = (ROOT / "docs" / "monitoring.md").read_text()
PROGRAMS = [
    (part.split("\n", 1)[0], program)
    for part in PAGE.split("\n## ")[1:]
    for program in re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
]


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
