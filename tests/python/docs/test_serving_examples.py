"""The serving examples run: over HTTP, and in several processes next to a trainer."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from project_paths import ROOT
from serving_cases import publish, two_saves, until

EXAMPLES = ROOT / "examples"


@contextmanager
def server(*arguments: object) -> Iterator[httpx.Client]:
    """A client of the example. At the end the server is stopped by Ctrl-C, and ends well."""
    command = [sys.executable, "-u", "-W", "ignore", EXAMPLES / "serve_fastapi.py", "--port", 0, *arguments]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if found := re.search(r"running on (http://127.0.0.1:\d+)", line):
                with httpx.Client(base_url=found[1], timeout=None) as client:
                    # Its address is said before workers are ready, where there are several.
                    yield client
                break
        else:
            raise AssertionError(said)
        process.send_signal(signal.SIGINT)
        rest = process.communicate()[1]
        assert "Traceback" not in rest.replace("KeyboardInterrupt", ""), rest
    finally:
        process.kill()
        process.wait()


def test_rows_and_metrics_are_served_over_http_and_follow_the_trainer(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ckpt = tmp_path / "ckpt"
    table, saver, first = two_saves(ckpt)
    with server(ckpt) as client:
        answer = client.post("/lookup", json={"tables": {"item": [1, 3, 77]}}).json()
        assert answer["version"] == first
        assert answer["tables"]["item"]["found"] == [True, True, False]
        assert answer["tables"]["item"]["rows"][:2] == [[1.0] * 4, [3.0] * 4]
        answer = client.post("/pooled", json={"table": "item", "bags": [[1, 3], []], "pooling": "mean"}).json()
        assert answer == {"version": first, "rows": [[2.0] * 4, [0.0] * 4]}
        second = publish(table, saver, ckpt, 20.0)
        until(lambda: client.get("/health").json()["version"] == second)
        answer = client.post("/lookup", json={"tables": {"item": [1]}}).json()
        assert answer["tables"]["item"]["rows"] == [[20.0] * 4]
        for path, asked, status, told in (
            ("/lookup", {"tables": {"nothing": [1]}}, 400, "item"),
            ("/lookup", {"tables": {"item": [2**70]}}, 400, "ids"),
            ("/pooled", {"table": "item", "bags": [[1]], "pooling": "max"}, 400, "pooling"),
            ("/lookup", {"tables": {"item": ["x"]}}, 422, "int"),
        ):
            refused = client.post(path, json=asked)
            assert refused.status_code == status, refused.text
            assert told in refused.text
        families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
        (rows,) = families["embcache_serving_rows"].samples
        assert (rows.labels, rows.value) == ({"path": str(ckpt)}, 9.0)
        assert families["embcache_serving_missing_ids"].samples[0].value == 1.0
        assert families["embcache_serving_version"].samples[0].value == 2.0
        assert families["embcache_serving_failing"].samples[0].value == 0.0


def test_server_creates_its_directory_and_rejects_stale_data() -> None:
    with server("--max-staleness", 0) as client:
        assert client.get("/health").status_code == 503
        refused = client.post("/lookup", json={"tables": {"item": [1]}})
        assert (refused.status_code, refused.json()["error"]) == (503, "StaleError")


@pytest.mark.parametrize("processes", [2])
def test_processes_serve_beside_a_trainer_without_a_mixed_request(processes: int) -> None:
    arguments = ["--processes", processes, "--seconds", 2, "--every", 0.3, "--rows", 5000, "--batch", 200]
    command = [sys.executable, "-W", "ignore", EXAMPLES / "serve_processes.py", *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(
        r"process 1: version 00\d{8}, served \d+ ms after its publication, [\d.]+ s old now; \d+ req", done.stdout
    )
    assert (
        len(re.findall(r"^process \d: \d+ requests over \d+ versions, p50 \d+ us, p99 \d+ us", done.stdout, re.M))
        == processes
    )
    assert done.stdout.count("  agrees ") == 5
