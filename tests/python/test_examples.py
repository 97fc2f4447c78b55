"""Each example runs briefly, and its exit status says whether all that it checks holds."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Each process imports this as it starts. It notes which of gloo's threads live when the interpreter begins to shut down. A thread
# that lets go of a tensor after that aborts the process.
NOTE_THREADS_AT_EXIT = """
import atexit, glob, os

def note():
    names = [open(task + "/comm").read().strip() for task in glob.glob("/proc/self/task/*")]
    with open(os.path.join(os.path.dirname(__file__), "threads-" + os.environ["LOCAL_RANK"]), "w") as file:
        file.write(" ".join(name for name in names if "gloo" in name))

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


def test_movielens_agrees_with_plain_torchrec_and_loads_into_two_processes() -> None:
    assert "all of it agrees" in run("examples/movielens_dlrm.py", "--ratings", 20_000, "--epochs", 1)


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


def test_a_year_in_an_hour_keeps_a_capped_table_beside_an_unbounded_one() -> None:
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


def test_lightning_goes_on_with_the_bits_of_a_run_that_was_not_interrupted(tmp_path: Path) -> None:
    program = [ROOT / "examples" / "lightning_dlrm.py", "--clicks", 3_000]
    first = run(*program, "--epochs", 1, cwd=tmp_path)
    second = run(*program, "--epochs", 2, cwd=tmp_path)
    whole = run(*program, "--epochs", 2, "--folder", "whole", cwd=tmp_path)
    assert "starts anew in" in first
    assert "goes on from lightning_rows/newest.ckpt" in second
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


def test_criteo_goes_on_with_the_bits_of_a_run_that_was_not_interrupted(tmp_path: Path) -> None:
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
