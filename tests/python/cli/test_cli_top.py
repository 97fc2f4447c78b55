"""`embcache top`: reads live endpoints and files, and draws frames."""

import io
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tables import make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import EmbCacheEmbeddingBag, Histogram, admission, eviction
from torchrec_embcache.cli import main
from torchrec_embcache.cli.top.command import read_frame
from torchrec_embcache.cli.top.drawing import draw_frame
from torchrec_embcache.cli.top.frames import ALL_TABLES, TableFrame, TopFrame, build_frame
from torchrec_embcache.cli.top.sources import SourceReading, open_source, parse_tables
from torchrec_embcache.exceptions import CorruptionError, InputError
from torchrec_embcache.monitoring import JsonlLogger, PrometheusExporter, Sampler, TableSample
from torchrec_embcache.monitoring._jsonl import sample_to_line


@pytest.fixture
def bag(tmp_path: Path) -> Iterator[EmbCacheEmbeddingBag]:
    """A table with every part that has counters, trained for a while."""
    made = make_bag(
        tiers=ssd_tiers(tmp_path / "ssd", host_bytes="256KiB", device_bytes="16KiB", ssd_bytes="16MiB"),
        embedding_dim=16,
        admission=admission.Count(2),
        eviction=eviction.Policy([eviction.Ttl(steps=8)], every_steps=2),
    )
    with made:
        trained(made)
        yield made


def trained(bag: EmbCacheEmbeddingBag) -> None:
    train(bag, random_batches(4, 20, 300, seed=1))
    for first in range(0, 4000, 1000):
        for _ in range(3):
            step(bag, [list(range(first, first + 1000))])
    bag.flush()
    step(bag, [list(range(1000, 2000))])


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


# ---- what is read


def test_an_endpoint_is_read_back_as_the_tables_were_sampled(bag: EmbCacheEmbeddingBag) -> None:
    with PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:
        (pair,) = open_source(exporter.url).read().values()
    (sampled,) = Sampler(bag).sample().tables
    before, reading = pair
    assert before is None
    assert reading.table.title == sampled.title == "item"
    assert reading.table.values.keys() == sampled.values.keys()
    for path, value in sampled.values.items():
        found = reading.table.values[path]
        if not isinstance(value, Histogram):
            assert found == value, path
            assert isinstance(found, type(value)), path
        elif path != "lock_held":
            assert isinstance(found, Histogram)
            assert (found.count, found.sum_ns) == (value.count, pytest.approx(value.sum_ns, abs=1000))
            # The endpoint has only powers of two, so that a bound is at most twice as high.
            for q in (0.5, 0.99):
                assert value.quantile(q) <= max(found.quantile(q), 1024) <= max(2 * value.quantile(q), 1024)


@pytest.mark.parametrize("given", ["http://127.0.0.1:{}", "http://127.0.0.1:{}/metrics", ":{}", "127.0.0.1:{}"])
def test_an_endpoint_may_be_named_in_short(given: str, bag: EmbCacheEmbeddingBag) -> None:
    with PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:
        source = open_source(given.format(exporter.port))
        assert source.name == exporter.url
        assert [key[1] for key in source.read()] == ["item"]


@pytest.mark.parametrize("given", ["file:///etc/passwd", "ftp://127.0.0.1/metrics"])
def test_other_urls_are_refused(given: str) -> None:
    with pytest.raises(InputError, match="is not an address of metrics"):
        open_source(given)


def test_file_gives_its_last_two_samples_without_a_partial_line(tmp_path: Path, bag: EmbCacheEmbeddingBag) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlLogger(bag, path, interval_s=None) as logger:
        for number in range(3):
            step(bag, [[number]])
            logger.sample(number)
    whole = path.read_text()
    path.write_text(whole + '{"time":1.0,"step"\n' + whole.splitlines()[-1][:100])
    ((before, after),) = open_source(str(path)).read().values()
    assert before is not None
    assert before.time < after.time
    steps = [reading.table.values["step"] for reading in (before, after)]
    assert steps[1] - steps[0] == 1


def test_two_ranks_may_share_a_file(tmp_path: Path, bag: EmbCacheEmbeddingBag) -> None:
    sample = Sampler(bag).sample()
    (table,) = sample.tables
    path = tmp_path / "metrics.jsonl"
    ranks = [TableSample(table.module, table.table, rank, table.values) for rank in (0, 1)]
    made = [type(sample)(sample.time + seconds, 1, (one,)) for seconds in (0, 1) for one in ranks]
    path.write_text("".join(sample_to_line(one) + "\n" for one in made))
    frame = read_frame([open_source(str(path))])
    assert [(one.title, one.rank, one.seconds) for one in frame.tables] == [
        ("item", "0", 1.0),
        ("item", "1", 1.0),
        (ALL_TABLES, "", 0.0),
    ]
    rows = bag.stats().rows
    assert [one.numbers["rows"] for one in frame.tables] == [rows, rows, 2 * rows]


class Elsewhere(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>a page that is something else</html>")

    def log_message(self, *_arguments: Any) -> None:
        pass


def test_what_is_no_endpoint_and_no_file_of_samples_is_a_typed_error(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(CorruptionError, match="is not an endpoint of PrometheusExporter"):
            open_source(f"127.0.0.1:{server.server_port}").read()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    path = tmp_path / "other.jsonl"
    for text in ('{"loss": 1}\n', "step,loss\n1,2\n", "[]\n"):
        path.write_text(text)
        with pytest.raises(CorruptionError, match="is not a sample of JsonlLogger"):
            open_source(str(path)).read()
    path.write_text("")
    assert open_source(str(path)).read() == {}


def test_metrics_of_other_programs_at_the_endpoint_are_left_out() -> None:
    from prometheus_client import CollectorRegistry, Counter, generate_latest

    registry = CollectorRegistry()
    Counter("python_gc", "Of another program.", registry=registry).inc()
    assert parse_tables(generate_latest(registry).decode(), "here") == []


# ---- what a frame says


def test_a_frame_has_the_rates_between_two_readings() -> None:
    def at(time: float, rank: int, hits: int, misses: int, waits: Histogram) -> SourceReading:
        values = {"step": hits, "rows": 10, "host.hits": hits, "host.misses": misses, "row_wait": waits}
        return SourceReading(time, TableSample("tables", "item", rank, values))

    fast, slow = Histogram(10, 10_000, ((1_024, 10),)), Histogram(10, 10**7, ((1 << 20, 10),))
    readings = [
        {("tables", "item", 0): (at(10.0, 0, 100, 100, slow), at(12.0, 0, 130, 110, slow + fast))},
        {("tables", "item", 1): (at(20.0, 1, 0, 0, Histogram()), at(24.0, 1, 10, 30, slow))},
    ]
    frame = build_frame(["a", "b"], readings, ["c cannot be read"])
    first, second, both = frame.tables
    assert (frame.time, frame.problems) == (24.0, ("c cannot be read",))
    assert (first.title, first.rank, first.seconds) == ("tables/item", "0", 2.0)
    assert first.numbers["host/hit_rate"] == 0.75
    assert first.numbers["host/hits_per_second"] == 15.0
    assert first.numbers["row_wait/p99_ms"] == 1_024 / 1e6
    assert first.numbers["steps_per_second"] == 15.0
    assert second.numbers["host/hit_rate"] == 0.25
    assert (both.title, both.rank) == (ALL_TABLES, "")
    assert both.numbers["host/hit_rate"] == 40 / 80
    assert both.numbers["host/hits_per_second"] == 15.0 + 2.5
    assert both.numbers["rows"] == 20
    assert (both.numbers["row_wait/p50_ms"], both.numbers["row_wait/p99_ms"]) == (1_024 / 1e6, (1 << 20) / 1e6)
    assert "step" not in both.numbers


def test_tables_of_one_name_and_rank_are_told_apart_by_their_source() -> None:
    reading = SourceReading(1.0, TableSample("", "item", 0, {"rows": 1}))
    frame = build_frame(["left", "right"], [{("", "item", 0): (None, reading)}] * 2)
    assert [table.rank for table in frame.tables] == ["0 of left", "0 of right", ""]


# ---- the command


def test_once_prints_a_frame_of_a_live_endpoint(bag: EmbCacheEmbeddingBag, capsys: pytest.CaptureFixture[str]) -> None:
    with PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:
        assert main(["top", exporter.url, "--once", "--interval", "0"]) == 0
    shown = capsys.readouterr()
    stats = bag.stats()
    assert not shown.err
    found = lines(shown.out)
    heads = " ".join(found[0])
    assert heads.startswith("embcache top")
    assert exporter.url in heads
    assert stats.ssd is not None
    hit_rate = f"{stats.host.hits / (stats.host.hits + stats.host.misses):.1%}"
    (host,) = [line for line in found if line[0] == "host"]
    assert hit_rate in host
    (ssd,) = [line for line in found if line[0] == "item" and "io_uring" in line[-1]]
    assert str(stats.ssd.segments) in ssd
    assert len([line for line in found if line[0] == "item"]) == 4  # of waits, tiers, SSD, ids


def test_once_waits_for_a_second_sample_and_shows_rates(
    bag: EmbCacheEmbeddingBag, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on between the two samples."""
    waited: list[float] = []

    def trains(seconds: float) -> None:
        waited.append(seconds)
        for _ in range(5):
            step(bag, [[1, 2, 3]])

    monkeypatch.setattr(sys.modules["torchrec_embcache.cli.top.command"], "sleep", trains)
    with PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:
        assert main(["top", exporter.url, "--json", "--interval", "0.5"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert waited == [0.5]
    assert table["seconds"] > 0
    assert table["numbers"]["steps_per_second"] == pytest.approx(5 / table["seconds"])


def test_once_prints_a_frame_of_a_file(
    tmp_path: Path, bag: EmbCacheEmbeddingBag, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(3):
        step(bag, [[1, 2, 3]])
    with JsonlLogger(bag, path, interval_s=None) as logger:
        logger.sample(1)
        for _ in range(4):
            step(bag, [[1, 2, 3]])
        logger.sample(5)
    assert main(["top", str(path), "--once"]) == 0
    assert "100.0%" in capsys.readouterr().out
    assert main(["top", str(path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["numbers"]["device/hit_rate"] == 1.0
    assert table["numbers"]["steps_per_second"] == pytest.approx(4 / table["seconds"])
    # With 0 seconds, as for a training that has ended, it is about the whole of it.
    assert main(["top", str(path), "--json", "--interval", "0"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert (table["seconds"], table["numbers"]["step"]) == (0.0, bag.table.step())
    assert table["numbers"]["device/hit_rate"] < 1.0


BAD_SAMPLES: dict[str, Callable[[dict[str, Any]], object]] = {
    "an infinite time": lambda line: line.update(time=float("inf")),
    "no time": lambda line: line.update(time=float("nan")),
    "a time after all calendars": lambda line: line.update(time=1e300),
    "a step that is text": lambda line: line.update(step="7"),
    "an infinite rank": lambda line: line["tables"][0].update(rank=float("inf")),
    "a counter past 64 bits": lambda line: line["tables"][0]["values"].update({"host.hits": 10**400}),
    "an infinite counter": lambda line: line["tables"][0]["values"].update({"host.hits": float("inf")}),
}


@pytest.mark.parametrize("bad", [*BAD_SAMPLES, "brackets within brackets"])
def test_a_file_of_samples_that_are_none_is_refused(
    tmp_path: Path, bag: EmbCacheEmbeddingBag, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    step(bag, [[1, 2, 3]])
    with JsonlLogger(bag, path, interval_s=None) as logger:
        logger.sample(1)
    line = json.loads(path.read_text().splitlines()[0])
    BAD_SAMPLES.get(bad, id)(line)
    path.write_text((json.dumps(line) if bad in BAD_SAMPLES else "[" * 100_000) + "\n")
    for command in (
        ["top", str(path), "--once", "--interval", "0"],
        ["plot", str(path), "-o", str(tmp_path / "x.svg")],
    ):
        assert main(command) == 3
        assert "CorruptionError" in capsys.readouterr().err
    if bad not in BAD_SAMPLES:
        assert main(["advise", str(path), "--ram", "1GiB"]) == 3
        assert "CorruptionError" in capsys.readouterr().err


def test_one_source_of_several_may_be_away_and_not_all(
    bag: EmbCacheEmbeddingBag, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        with PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:
            assert main(["top", nobody, exporter.url, "--once", "--interval", "0"]) == 0
            assert f"cannot read http://{nobody}/metrics" in capsys.readouterr().out
        assert main(["top", nobody, "--once"]) == 3
        assert "is the training running" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--interval", "-1", "--once"], ["--interval", "0"], ["--interval", "nan"]])
def test_an_interval_that_is_none_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:1", *arguments]) == 3
    assert "give seconds above 0" in capsys.readouterr().err


def test_live_view_survives_a_training_gap_and_ends_by_ctrl_c(
    bag: EmbCacheEmbeddingBag, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = PrometheusExporter(bag, 0, host="127.0.0.1")
    ticks = iter([lambda: step(bag, [[1]]), exporter.close])

    def tick(_seconds: float) -> None:
        try:
            next(ticks)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(sys.modules["torchrec_embcache.cli.top.command"], "sleep", tick)
    assert main(["top", exporter.url]) == 0
    assert "cannot read" in capsys.readouterr().out


# ---- how it is drawn


def test_numbers_are_not_cut_in_a_terminal_that_is_wide_enough() -> None:
    """Every column of the widest numbers, and names as long as those of models are."""
    numbers = {
        "rows": 1.2e9,
        "step": 12_345_678.0,
        "steps_per_second": 123.4,
        "row_wait/p50_ms": 0.0123,
        "row_wait/p99_ms": 12_345.6,
        "host/rows": 1.2e9,
        "host/bytes": 7.5 * 2**40,
        "host/capacity_bytes": 8.0 * 2**40,
        "host/hit_rate": 0.98765,
        "host/read_bytes_per_second": 1023.9 * 1024,
        "host/hits_per_second": 98_765_432.0,
        "ssd/rows": 0.0,
        "ssd/bytes": 0.0,
        "ssd/capacity_bytes": 1.0 * 2**40,
        "ssd/read_only": 1.0,
    }
    frame = TopFrame(0.0, ("here",), (TableFrame("model.sparse.tables/item", "0", 1.0, numbers),))
    console = Console(file=io.StringIO(), width=140, record=True, color_system=None)
    console.print(draw_frame(frame))
    text = console.export_text()
    for shown in (
        "1.2 G",
        "12,345,678",
        "12.3 µs",
        "12.35 s",
        "7.5 TiB",
        "94%    8.0 TiB",
        "98.8%",
        " 1.0 MiB",
        "98.8 M",
        "read-only",
        "model.sparse.tables/item",
    ):
        assert shown in text, shown
    assert "…" not in text


def test_a_frame_of_no_table_says_so() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(draw_frame(TopFrame(None, ("here",), ())))
    assert "no samples yet" in console.export_text()


def test_frames_are_drawn_while_a_table_is_trained_in_another_thread(bag: EmbCacheEmbeddingBag) -> None:
    done = threading.Event()

    def go_on() -> None:
        while not done.is_set():
            bag(torch.arange(100).view(-1, 1)).sum().backward()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        with PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:
            source = open_source(exporter.url)
            frames = [read_frame([source]) for _ in range(5)]
    finally:
        done.set()
        thread.join()
    assert all(frame.tables[0].numbers["rows"] > 0 for frame in frames)
    assert all(frame.tables[0].seconds > 0 for frame in frames[1:])
