"""Each example runs briefly. Its exit status is 0 if all its checks hold."""

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from project_paths import ROOT

# Each process imports this as it starts. It notes which of gloo's threads live when the interpreter begins to shut down. A thread
# that lets go of a tensor after that aborts the process. A thread that was joined may be listed for a moment.
NOTE_THREADS_AT_EXIT = """
import atexit, contextlib, glob, os, time

def threads_of_gloo():
    names = []
    for task in glob.glob("/proc/self/task/*"):
        with contextlib.suppress(OSError), open(task + "/comm") as file:
            names.append(file.read().strip())
    return [name for name in names if "gloo" in name]

def note():
    deadline = time.monotonic() + 10
    while (left := threads_of_gloo()) and time.monotonic() < deadline:
        time.sleep(0.01)
    with open(os.path.join(os.path.dirname(__file__), "threads-" + os.environ["LOCAL_RANK"]), "w") as file:
        file.write(" ".join(left))

if "LOCAL_RANK" in os.environ:
    atexit.register(note)
"""


def run(*arguments: object, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


class Page(HTMLParser):
    """A page whose every element is closed, with its pictures, its texts by element, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: dict[str, str] = {}
        self.texts: dict[str, list[str]] = {}
        self.loads: list[str] = []
        self.attributes: dict[str, dict[str, str | None]] = {}
        self.feed(text)
        self.close()
        assert not self.open
        self.loads += re.findall(r"url\(['\"]?(?!#)[^)]*|@import[^;]*", text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [
            value for name, value in attrs if name in ("src", "srcset", "href") and not value.startswith(("#", "data:"))
        ]
        self.attributes.setdefault(tag, given)
        if tag == "img":
            told = given["alt"] or ""
            self.pictures[told.split(" (")[0]] = told
        if tag not in ("meta", "source", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def test_movielens_matches_torchrec_and_reports_its_findings(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir(mode=0o750)
    path = tmp_path / "a" / "report.html"
    arguments = ("--ratings", 20_000, "--epochs", 1, "--folder", tmp_path / "work", "--report", path)
    out = run("examples/movielens_dlrm.py", *arguments)
    assert out.splitlines()[-1] == f"the report is in {path}"
    assert "all of it agrees" in out.splitlines()[-2]
    page = Page(path.read_text())
    assert not page.loads
    assert "https:" not in path.read_text()
    assert page.attributes["html"]["lang"] == "en"
    assert page.texts["title"] == page.texts["h1"] == ["A DLRM on MovieLens-100K over three tiers"]
    assert "prefers-color-scheme: dark" in page.texts["style"][0]
    checks = re.findall(r"^  agrees   ([^:\n]*)(?:: (.*))?$", out, re.MULTILINE)
    assert f"All {len(checks)} checks agree." in page.texts["p"]
    assert page.texts["th"].count("ok") == len(checks) > 12
    for what, figures in checks:
        assert what in page.texts["td"], "each check that was printed is in the page"
        assert not figures or figures in page.texts["td"]
    ours, plain = re.findall(r"AUC on the 4000 later ratings: (\S+) and (\S+)", out)[0]
    assert page.texts["dd"][:2] == [ours, plain]
    ms = re.findall(r"(\S+) ms a step in RAM, (\S+) ms over", out)[0]
    assert page.texts["dd"][3:5] == [f"{ms[1]} ms", f"{ms[0]} ms"]
    losses = re.findall(r"three tiers: \S+ at first, (\S+) at last", page.pictures["Loss of each step"])
    assert float(losses[0]) == pytest.approx(float(page.texts["dd"][2]), abs=1e-3)
    assert {
        "Difference of the losses",
        "Time of each step",
        "Miss ratio by the share of rows in RAM",
    } <= page.pictures.keys()
    for table in ("user", "item", "cross"):
        for what in ("hit rate by tier", "rows by tier", "bytes by tier", "wait of a batch for its rows"):
            assert f"{table}: {what}" in page.pictures
        assert f"budget of now of {table}: " in page.pictures["Miss ratio by the bytes of rows in RAM"]
    samples = [json.loads(line) for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    last = {table["table"]: table["values"] for table in samples[-1]["tables"]}
    assert f"SSD: 0 at first, {last['cross']['ssd.rows']:,} at last" in page.pictures["cross: rows by tier"]


def test_demo_without_matplotlib_says_there_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('it is not there')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    report = tmp_path / "report.html"
    report.write_text("that of a run before")
    out = run("examples/movielens_dlrm.py", "--ratings", 20_000, "--report", report, PYTHONPATH=path)
    assert 'there is no report: pictures need matplotlib: pip install "torchrec-embcache[plot]"' in out
    assert "all of it agrees" in out.splitlines()[-1]
    assert not report.exists()


def found_rows(said: str) -> tuple[int, int]:
    """The rows and the steps with which the plain example begins."""
    found = re.search(r"the table has (\d+) rows and (\d+) steps", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def test_plain_pytorch_run_twice_goes_on_where_it_was(tmp_path: Path) -> None:
    program = [ROOT / "examples" / "plain_pytorch.py", "--steps", 20, "--ids", 5_000]
    first, second = run(*program, cwd=tmp_path), run(*program, cwd=tmp_path)
    assert found_rows(first) == (0, 0)
    rows, steps = found_rows(second)
    assert rows == int(re.findall(r"(\d+) rows, of them", first)[-1])
    assert steps == 20


def test_plain_pytorch_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    program = [ROOT / "examples" / "plain_pytorch.py", "--ids", 5_000, "--folder", tmp_path / "rows"]
    process = subprocess.Popen(
        [sys.executable, "-u", *map(str, program), "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert found_rows(process.stdout.readline()) == (0, 0)
    assert process.stdout.readline().startswith("step  100: ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert "KeyboardInterrupt" in err
    assert "Warning" not in err
    rows, steps = found_rows(run(*program, "--steps", 1))
    assert rows > 0
    assert steps >= 100


def test_torchrun_trains_two_ranks_and_saves_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTE_THREADS_AT_EXIT)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    out = run("examples/torchrun_two_ranks.py", "--steps", 5, "--folder", tmp_path, PYTHONPATH=path)
    for noted in tmp_path.glob("threads-*"):
        assert noted.read_text() == "", "no interpreter shuts down beside threads of gloo"
    for table in ("people", "things"):
        shares = [int(rows) for rows in re.findall(rf"rank \d, {table}: (\d+) rows", out)]
        assert len(shares) == 2
        assert max(shares) <= 1.1 * min(shares), f"the rows of {table!r} are spread over the ranks: {shares}"
    assert (tmp_path / "checkpoint" / "LATEST").is_file()


def test_zipf_over_a_tenth_of_the_ram_gives_the_same_bits() -> None:
    out = run("examples/synthetic_zipf.py", "--rows", 100_000, "--steps", 8, "--batch", 256)
    assert "the same losses and rows, bit for bit" in out


def test_year_in_an_hour_compares_capped_and_unbounded_tables() -> None:
    out = run("examples/year_in_an_hour.py", "--days", 35, "--scale", 0.05)
    assert "DIFFERS" not in out
    months = [[float(figure) for figure in line.replace("|", " ").split()] for line in out.splitlines()[2:4]]
    for month, best, *aucs in (figures[:4] for figures in months):
        assert 0.6 < min(aucs) <= max(aucs) < best < 1, f"month {month}: both tables have learned something"
    admitted, evicted = months[-1][-3:-1]
    assert months[-1][10] > 0, "some rows of the capped table are on SSD"
    assert admitted > evicted > 0, "rows came by admission and left by rule"


def test_admission_spares_the_ids_that_come_once() -> None:
    out = run("examples/year_in_an_hour.py", "--admission", "--steps", 60)
    assert "DIFFERS" not in out
    once = float(re.findall(r"these come once.*: ([\d.]+)%", out)[0])
    assert 58 <= once <= 62
    saved = re.findall(r"Count\(2\) +\d+ +([\d.]+)% +[\d.]+ +([\d.]+)%", out)
    rows, written = (float(share) for share in saved[0])
    assert abs(rows - once) < 0.1, "each of them has no row"
    assert written > 50, "and is not written to SSD"


def test_lightning_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    program = [ROOT / "examples" / "lightning_dlrm.py", "--clicks", 3_000]
    first = run(*program, "--epochs", 1, cwd=tmp_path)
    second = run(*program, "--epochs", 2, cwd=tmp_path)
    whole = run(*program, "--epochs", 2, "--folder", "whole", cwd=tmp_path)
    assert "starts in" in first
    assert "continues from lightning_rows/newest.ckpt" in second
    last = [said.splitlines()[-1] for said in (first, second, whole)]
    assert last[1] == last[2] != last[0]
    assert last[1].startswith("epoch 2: loss of new clicks 0.")
    for said in (first, second):
        assert min(int(rows) for rows in re.findall(r"(\d+) on SSD", said)) > 0


def test_torchrecs_checkpoints_come_and_go_by_the_command() -> None:
    out = run("examples/torchrec_dcp.py", "--steps", 5)
    assert out.count("agrees") == 4
    assert "DIFFERS" not in out
    assert out.count("$ embcache convert") == 2


CRITEO = [ROOT / "examples" / "criteo_parquet.py", "--groups", 1, "--say-every", 4, "--host", "2MiB"]


def test_criteo_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    def losses(said: str) -> dict[str, str]:
        return dict(re.findall(r"(step \d+): (loss [\d.]+)", said))

    first = run(*CRITEO, "--steps", 20, cwd=tmp_path)
    second = run(*CRITEO, "--steps", 20, cwd=tmp_path)
    whole = run(*CRITEO, "--steps", 40, "--workers", 0, "--lookahead", 1, "--folder", "whole", cwd=tmp_path)
    assert "begins with click 0 of 2 files" in first
    assert f"begins with click {20 * 256:,} of 2 files" in second
    assert losses(first) | losses(second) == losses(whole)
    assert len(losses(whole)) == 10
    assert first.splitlines()[-1].startswith("after 20 steps: ")
    counts = {said.splitlines()[-1].partition(" rows")[0] for said in (second, whole)}
    assert len(counts) == 1, "the same clicks gave the same rows"
    rows, in_ram, on_ssd = map(int, re.findall(r"after 40 steps: (\d+) rows, (\d+) in RAM, (\d+) on SSD", whole)[0])
    assert in_ram < rows / 2 < on_ssd, "the tables are larger than their RAM"
    for said, tiers in ((first, ("RAM", "new")), (second, ("RAM", "SSD"))):
        for tier in tiers:
            assert max(float(share) for share in re.findall(rf"([\d.]+)% {tier}", said)) > 0


def test_criteo_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, *map(str, CRITEO), "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert "begins with click 0" in process.stdout.readline()
    assert process.stdout.readline().startswith("step 4: ")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    out, err = process.communicate(timeout=600)
    assert "KeyboardInterrupt" in err
    assert "Warning" not in err
    (steps,) = re.findall(r"after (\d+) steps", out)
    assert int(steps) >= 4
    again = run(*CRITEO, "--steps", 4, cwd=tmp_path)
    assert f"begins with click {int(steps) * 256:,} " in again
    assert f"step {int(steps) + 4}: loss" in again


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_the_notebook_runs_and_measures_what_was_expected(tmp_path: Path) -> None:
    """It asserts so in its last cell."""
    assert [path.name for path in NOTEBOOKS] == ["sizing.ipynb"]
    files = {
        "IPYTHONDIR": tmp_path / "ipython",
        "JUPYTER_CONFIG_DIR": tmp_path / "config",
        "JUPYTER_RUNTIME_DIR": tmp_path,
    }
    out = run(
        "-m", "pytest", "--nbmake", "-p", "no:cacheprovider", *NOTEBOOKS, **{key: str(to) for key, to in files.items()}
    )
    assert "1 passed" in out


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")  # the folder of the first run of a cell
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_each_cell_of_a_notebook_can_be_run_again(path: Path) -> None:
    """The last one compares figures that take many steps."""
    *cells, last = ["".join(cell["source"]) for cell in code_cells(path)]
    assert "assert" in last
    (short,) = [cell for cell in cells if "STEPS = 60_000, 2_000, 100" in cell]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        for _ in range(2):
            exec(compile(cell.replace("2_000, 100", "2_000, 4") if cell is short else cell, path.name, "exec"), names)
    for table in names["tables"].values():
        table.close()
    names["folder"].cleanup()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_kept_with_what_they_gave_from_top_to_bottom(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        last = "".join(cell["source"]).splitlines()[-1]
        assert bool(cell["outputs"]) == last.startswith(("SVG(", "print(", "    print(")), cell["id"]
        assert cell["metadata"] == {}, cell["id"]
        assert not [given for given in cell["outputs"] if given["output_type"] == "error"], cell["id"]
        assert "/tmp/" not in json.dumps(cell["outputs"]), cell["id"]


def test_the_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cache").mkdir(mode=0o750)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks, "README.md has an example"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
