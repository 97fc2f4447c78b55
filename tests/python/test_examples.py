"""Each example runs, briefly, and says by its exit status whether what it checks holds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_movielens_agrees_with_plain_torchrec_and_loads_into_two_processes() -> None:
    assert "all of it agrees" in run("examples/movielens_dlrm.py", "--ratings", 20_000, "--epochs", 1)


def test_plain_pytorch_trains_and_a_second_run_resumes(tmp_path: Path) -> None:
    first = run("examples/plain_pytorch.py", "--steps", 20, "--ids", 5_000, "--folder", tmp_path / "ssd")
    second = run("examples/plain_pytorch.py", "--steps", 20, "--ids", 5_000, "--folder", tmp_path / "ssd")
    rows = [[int(count) for count in re.findall(r"(\d+) rows", text)] for text in (first, second)]
    assert rows[1][0] >= rows[0][-1] > 0


def test_torchrun_trains_two_ranks_and_saves_one_checkpoint(tmp_path: Path) -> None:
    out = run("examples/torchrun_two_ranks.py", "--steps", 5, "--folder", tmp_path)
    for table in ("people", "things"):
        shares = [int(rows) for rows in re.findall(rf"rank \d, {table}: (\d+) rows", out)]
        assert len(shares) == 2
        assert max(shares) <= 1.1 * min(shares), f"the rows of {table!r} are spread over the ranks: {shares}"
    assert (tmp_path / "checkpoint" / "LATEST").is_file()


def test_zipf_over_a_tenth_of_the_ram_gives_the_same_bits() -> None:
    out = run("examples/synthetic_zipf.py", "--rows", 100_000, "--steps", 8, "--batch", 256)
    assert "the same losses and rows, bit for bit" in out


def test_the_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cache").mkdir(mode=0o750)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "README.md has an example"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
