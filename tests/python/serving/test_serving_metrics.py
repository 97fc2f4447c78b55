"""Monitoring of a server: a failed sync is logged, counted and exported, and every figure has a metric."""

import dataclasses
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lifecycle_cases import embedding, update
from serving_cases import LATEST, contents, publish, served, two_saves, until, value_of
from torchrec_embcache import Saver, _native, serving
from torchrec_embcache.admission import NotAdmitted
from torchrec_embcache.eviction import Policy, Ttl
from torchrec_embcache.exceptions import CorruptionError, StaleError
from torchrec_embcache.monitoring import SERVING_METRICS, PrometheusExporter

PACKAGE = "torchrec_embcache"
LOGGER = f"{PACKAGE}.core.serve"
# Fields of the statistics that are in no metric.
WITHOUT_METRIC: set[str] = set()
LONG_AGO = 1e9
# The name of the metric of each field.
NAMES = {metric.path: metric.name for metric in SERVING_METRICS}


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "ckpt"


@pytest.fixture
def _levels_as_before() -> Iterator[None]:
    """Passes the log records of the native extension only to this test."""
    _native.drain_log()
    yield
    _native.drain_log()


def set_latest(ckpt: Path, name: str) -> None:
    """Let another checkpoint be the newest, at once and whole, as a save does it."""
    made = ckpt / "LATEST of the test"
    made.write_text(f"{name}\n")
    made.replace(ckpt / LATEST)


def damage(ckpt: Path, name: str) -> Path:
    """Change the last bit of the one data file of a delta. Returns the file."""
    (file,) = (ckpt / name).rglob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    return file


def by_field(families: Iterable[Metric]) -> dict[str, Sample]:
    """The sample of each field of the statistics of one directory."""
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert sorted(samples) == sorted(NAMES.values())
    return {field: samples[name] for field, name in NAMES.items()}


def scrape(exporter: PrometheusExporter) -> dict[str, Sample]:
    """Returns the scraped samples of one directory."""
    answer = httpx.get(exporter.url, timeout=300, trust_env=False).raise_for_status()
    return by_field(text_string_to_metric_families(answer.text))


def numbers(told: dict[str, Sample], *fields: str) -> list[float]:
    """Returns the values of these fields in a scrape."""
    return [told[field].value for field in fields]


def exporter_of(tables: serving.Tables) -> PrometheusExporter:
    return PrometheusExporter(tables, 0, host="127.0.0.1")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the warnings of the native extension while it served."""
    _native.drain_log()
    return [record.getMessage() for record in caplog.records if (record.name, record.levelname) == (LOGGER, "WARNING")]


# ---- a sync that fails


@pytest.mark.usefixtures("_levels_as_before")
def test_failed_sync_is_logged_counted_and_exported(ckpt: Path, caplog: pytest.LogCaptureFixture) -> None:
    table, saver, first = two_saves(ckpt)
    second = publish(table, saver, ckpt, 20.0)
    file = damage(ckpt, second)
    set_latest(ckpt, first)
    follow = serving.Follow(poll_seconds=0.001)
    assert NAMES["last_error"] == "embcache_serving_failing"
    assert NAMES["failed_polls"] == "embcache_serving_failed_polls_total"
    with caplog.at_level(logging.WARNING, PACKAGE), serving.open(ckpt, follow=follow) as tables:
        with exporter_of(tables) as exporter:
            assert numbers(scrape(exporter), "last_error", "failed_polls", "seq") == [0, 0, 1]
            assert not warnings_of(caplog)
            set_latest(ckpt, second)
            until(lambda: tables.stats().failed_polls >= 3)
            told, stats = scrape(exporter), tables.stats()
            assert file.name in (stats.last_error or "")
            assert (stats.version, stats.seq) == (first, 1)
            assert numbers(told, "last_error", "seq") == [1, 1]
            assert 3 <= told["failed_polls"].value <= stats.failed_polls
            assert told["version"].labels["version"] == first
            assert value_of(tables.pin()) == 1.0
            third = publish(table, saver, ckpt, 30.0, full=True)
            until(lambda: tables.pin().name == third and tables.stats().last_error is None)
            told, stats = scrape(exporter), tables.stats()
            assert numbers(told, "last_error", "seq", "swaps") == [0, 3, 1]
            assert told["failed_polls"].value == stats.failed_polls >= 3
            assert told["version"].labels == {"path": str(ckpt), "version": third}
            assert value_of(tables.pin()) == 30.0
        (said,) = warnings_of(caplog)
    assert f"{first} serves on" in said, "each error is said once, and not at each look"
    assert file.name in said


@pytest.mark.usefixtures("_levels_as_before")
def test_error_is_logged_again_after_a_successful_sync(ckpt: Path, caplog: pytest.LogCaptureFixture) -> None:
    table, saver, first = two_saves(ckpt)
    second = publish(table, saver, ckpt, 20.0)
    damage(ckpt, second)
    set_latest(ckpt, first)
    with caplog.at_level(logging.WARNING, PACKAGE), serving.open(ckpt) as tables:
        for times in (1, 2):
            set_latest(ckpt, second)
            for _ in range(2):
                with pytest.raises(CorruptionError):
                    tables.poll()
            assert len(warnings_of(caplog)) == times
            set_latest(ckpt, first)
            assert tables.poll() is None
            assert tables.stats().last_error is None
        stats = tables.stats()
        assert (stats.failed_polls, stats.polls, stats.swaps) == (4, 6, 0)


# ---- staleness


@pytest.mark.parametrize("on_stale", ["serve", "raise"])
def test_data_past_its_age_limit_is_exported_as_stale(ckpt: Path, on_stale: str) -> None:
    table, saver, first = two_saves(ckpt)
    os.utime(ckpt / first / "manifest.json", (LONG_AGO, LONG_AGO))
    follow = serving.Follow(poll_seconds=3600, max_staleness_seconds=3600, on_stale=on_stale)  # type: ignore[arg-type]
    with serving.open(ckpt, follow=follow) as tables, exporter_of(tables) as exporter:
        before = time.time() - LONG_AGO
        told = scrape(exporter)
        assert told["is_stale"].value == 1
        assert before <= told["staleness_seconds"].value <= time.time() - LONG_AGO
        assert told["staleness_seconds"].value <= scrape(exporter)["staleness_seconds"].value
        if on_stale == "raise":
            with pytest.raises(StaleError, match=first):
                tables.pin()
        # Tables that are stale because the newer checkpoint cannot be served report both.
        damage(ckpt, publish(table, saver, ckpt, 20.0))
        with pytest.raises(CorruptionError):
            tables.poll()
        assert numbers(scrape(exporter), "is_stale", "last_error") == [1, 1]
        publish(table, saver, ckpt, 30.0, full=True)
        tables.poll()
        told = scrape(exporter)
        assert numbers(told, "is_stale", "last_error") == [0, 0]
        assert told["staleness_seconds"].value < 3600
        assert value_of(tables.pin()) == 30.0


def test_what_was_published_in_the_future_is_not_stale(ckpt: Path) -> None:
    _, _, first = two_saves(ckpt)
    later = time.time() + 1e6
    os.utime(ckpt / first / "manifest.json", (later, later))
    follow = serving.Follow(poll_seconds=3600, max_staleness_seconds=0, on_stale="raise")
    with serving.open(ckpt, follow=follow) as tables, exporter_of(tables) as exporter:
        assert value_of(tables.pin()) == 1.0
        assert numbers(scrape(exporter), "is_stale", "staleness_seconds") == [0, 0]


# ---- figures


def check_scrape(tables: serving.Tables, told: dict[str, Sample]) -> None:
    """Hold each field of the statistics against a scrape of tables that nobody uses now."""
    stats = tables.stats()
    fields = {field.name for field in dataclasses.fields(stats)}
    assert fields - told.keys() == WITHOUT_METRIC
    for field in fields - WITHOUT_METRIC:
        value, sample = getattr(stats, field), told[field]
        labels = {"path": tables.path}
        if field == "version":
            assert (sample.labels, sample.value) == (labels | {"version": value}, 1)
            continue
        assert sample.labels == labels
        if field == "last_error":
            assert sample.value == (value is not None)
        elif field == "staleness_seconds":
            assert 0 <= sample.value <= value
        else:
            assert sample.value == value, field


def test_every_figure_of_a_server_is_what_a_scrape_says(ckpt: Path) -> None:
    table, saver, first = two_saves(ckpt)
    with serving.open(ckpt) as tables, exporter_of(tables) as exporter:
        check_scrape(tables, scrape(exporter))
        held = [tables.pin()]
        for value in range(20, 23):
            publish(table, saver, ckpt, float(value))
            tables.poll()
            held.append(tables.pin())
        for _ in range(7):
            held[-1]["item"].lookup([1, 2, 3, 77, 78])
        held[0]["item"].lookup_pooled([1, 99], [0, 2])
        tables.rollback()
        assert tables.poll() is None
        damage(ckpt, publish(table, saver, ckpt, 30.0))
        for _ in range(2):
            with pytest.raises(CorruptionError):
                tables.poll()
        told, stats = scrape(exporter), tables.stats()
        check_scrape(tables, told)
        # Each figure is another one, so that none can stand for another.
        wanted = {"seq": 3, "polls": 6, "swaps": 4, "failed_polls": 2, "versions": 4, "lookups": 8, "ids": 37}
        wanted |= {"missing": 15, "rows": 9, "overlay_ids": 1, "is_stale": False}
        assert {name: getattr(stats, name) for name in wanted} == wanted
        assert stats.version not in (first, held[-1].name)
        assert stats.shared_index_bytes > 9
        assert stats.private_bytes > 0
        assert stats.last_error is not None


def test_prometheus_can_read_a_scrape_in_the_format_that_it_asks_for(ckpt: Path) -> None:
    """Prometheus asks for OpenMetrics, in which each family has a name of its own."""
    two_saves(ckpt)
    asks = {"Accept": "application/openmetrics-text; version=1.0.0; charset=utf-8"}
    with serving.open(ckpt) as tables, exporter_of(tables) as exporter:
        answer = httpx.get(exporter.url, timeout=300, trust_env=False, headers=asks)
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        families = list(openmetrics.text_string_to_metric_families(answer.text))
        assert len({family.name for family in families}) == len(families) == len(SERVING_METRICS)
        check_scrape(tables, by_field(families))


# ---- rows that left


@pytest.mark.parametrize("missing", [None, "zeros", "initial", 0.25], ids=str)
def test_swept_row_is_in_the_old_version_and_not_in_the_next(ckpt: Path, missing: NotAdmitted | None) -> None:
    table, saver = embedding(eviction=Policy([Ttl(steps=2)])), Saver(0)
    update(table(torch.tensor([7, 8])))
    saver.save(table, ckpt, keep=9)
    old = contents(table)
    with serving.open(ckpt, missing=missing) as tables:
        first = tables.pin()
        for _ in range(3):
            update(table(torch.tensor([8, 9])))
        report = saver.save(table, ckpt, incremental=True, keep=9)
        assert (report.kind, tables.poll()) == ("delta", report.checkpoint)
        second, gone = tables.pin(), contents(table)
        assert (sorted(old), sorted(gone)) == ([7, 8], [8, 9])
        born = table.read_rows([7]).weights[0]
        missing_row = {None: born, "initial": born, "zeros": torch.zeros(4), 0.25: torch.full((4,), 0.25)}[missing]
        # The id is trained again, twice as often as before, and is born anew.
        for _ in range(2):
            update(table(torch.tensor([7])))
        again = saver.save(table, ckpt, incremental=True, keep=9)
        assert (again.kind, tables.poll()) == ("delta", again.checkpoint)
        third, new = tables.pin(), contents(table)
        assert new[7] not in (old[7], missing_row.tolist())
        for version, rows in ((first, old), (second, gone), (third, new), (first, old)):
            assert served(version, [7, 8, 9]) == rows
            wanted = torch.tensor(rows[7]) if 7 in rows else missing_row
            read = version["item"].lookup([7])
            assert (read.found.tolist(), read.tolist()) == ([7 in rows], [wanted.tolist()])
            pooled = version["item"].lookup_pooled([7, 7], [0, 1, 2])
            assert torch.equal(pooled, wanted.expand(2, 4))
            assert version["item"].rows == len(rows)
