"""Exporters of `stats()` give the counts of the tables in every format, read with each format's own reader."""

import gc
import json
import logging
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from processes import World
from tables import make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import EmbCacheEmbeddingBag, Histogram, TableStats, TierBudgets, admission, eviction, optimizers
from torchrec_embcache.exceptions import ConfigError, InputError, StorageError
from torchrec_embcache.monitoring import (
    METRICS,
    JsonlLogger,
    Metric,
    PrometheusExporter,
    Sampler,
    TensorBoardLogger,
    scalars,
)
from torchrec_embcache.monitoring._families import BOUNDS_NS
from torchrec_embcache.monitoring._jsonl import sample_from_line
from torchrec_embcache.monitoring._sampling import flatten_stats

BY_PATH = {metric.path: metric for metric in METRICS}


def paths_of(kind: type[Any], above: str = "") -> Iterator[str]:
    """The path of each field of a class of counters, those of its parts included."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        kinds = [one for one in (get_args(hints[field.name]) or (hints[field.name],)) if one is not type(None)]
        part = kinds[0]
        if is_dataclass(part) and part is not Histogram:
            yield from paths_of(part, f"{above}{field.name}.")
        else:
            yield f"{above}{field.name}"


def full_bag(folder: Path, **settings: Any) -> EmbCacheEmbeddingBag:
    """A table with every part that has counters."""
    return make_bag(
        tiers=ssd_tiers(folder, host_bytes="256KiB", device_bytes="16KiB", ssd_bytes="16MiB"),
        embedding_dim=16,
        admission=admission.Count(2),
        eviction=eviction.Policy([eviction.Ttl(steps=8)], every_steps=2),
        **settings,
    )


def trained(bag: EmbCacheEmbeddingBag, seed: int = 1) -> None:
    """Steps that use all tiers, admit ids and evict rows."""
    train(bag, random_batches(10, 20, 300, seed=seed))
    bag.flush()
    for first in range(0, 4000, 1000):
        for _ in range(3):
            step(bag, [list(range(first, first + 1000))])
    bag.flush()
    step(bag, [list(range(1000, 2000))])


class Models(nn.Module):
    """Two modules with a table each."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.users = make_bag(name="user")
        self.items = nn.ModuleDict({"inner": full_bag(folder, name="item")})


def scraped(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples at an endpoint, by name and labels, as Prometheus' own parser finds them."""
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert len({family.name for family in families}) == len(families)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def labels(module: str, table: str, rank: int = 0, **more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"module": module, "table": table, "rank": str(rank), **more}.items()))


# ---- the list of metrics


def test_every_field_of_stats_is_a_metric_and_every_metric_a_field() -> None:
    assert sorted(paths_of(TableStats)) == sorted(BY_PATH)
    assert len(BY_PATH) == len(METRICS)


def test_names_are_as_prometheus_wants_them() -> None:
    """By its guide to names: units are those of the base, counters end in _total, and info metrics in _info."""
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("embcache_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.endswith("_info") == (metric.kind == "text")
        assert metric.name.endswith("_seconds") == (metric.kind == "histogram")
        assert not metric.name.endswith(("_ns", "_ms", "_kb"))
        assert metric.about.endswith(".")


def test_a_sample_has_every_number_of_a_table_that_has_all_parts(tmp_path: Path) -> None:
    with full_bag(tmp_path) as bag:
        trained(bag)
        stats = bag.stats()
        (table,) = Sampler(bag).sample().tables
        assert set(table.values) == set(BY_PATH)
        kinds = {path: metric.kind for path, metric in BY_PATH.items()}
        for path, value in table.values.items():
            assert isinstance(value, Histogram) == (kinds[path] == "histogram"), path
            assert isinstance(value, bool) == (kinds[path] == "flag"), path
            assert isinstance(value, str) == (kinds[path] == "text"), path
        same = dict(flatten_stats(stats))
        moving = {"lock_held"}  # the sample takes the lock itself
        assert {path: value for path, value in table.values.items() if path not in moving} == {
            path: value for path, value in same.items() if path not in moving
        }


# ---- Prometheus


def expected(metric: Metric, value: Any, own: tuple[str, str]) -> dict[tuple[str, Any], float]:
    """Returns the samples that a scrape should have for one value."""
    if metric.kind == "histogram":
        found: dict[tuple[str, Any], float] = {
            (f"{metric.name}_count", labels(*own)): value.count,
            (f"{metric.name}_sum", labels(*own)): value.sum_ns / 1e9,
            (f"{metric.name}_bucket", labels(*own, le="+Inf")): value.count,
        }
        for bound in BOUNDS_NS:
            below = sum(count for upper, count in value.buckets if upper <= bound)
            found[(f"{metric.name}_bucket", labels(*own, le=repr(bound / 1e9)))] = below
        return found
    if metric.kind == "text":
        return {(metric.name, labels(*own, **{metric.path.rpartition(".")[2]: value})): 1.0}
    if metric.label is not None:
        return {(metric.name, labels(*own, **{metric.label: name})): number for name, number in value.items()}
    return {(metric.name, labels(*own)): value / 1e9 if metric.path.endswith("_ns") else float(value)}


def test_a_scrape_has_the_numbers_of_stats_and_nothing_else(tmp_path: Path) -> None:
    model = Models(tmp_path)
    trained(model.items["inner"])
    step(model.users, [[1, 2], [3]])
    with PrometheusExporter(model, 0) as exporter:
        assert (exporter.host, exporter.port > 0) == ("127.0.0.1", True)  # it listens to this machine alone
        found = scraped(exporter.url)
    wanted: dict[tuple[str, Any], float] = {}
    for own, bag in {("users", "user"): model.users, ("items.inner", "item"): model.items["inner"]}.items():
        for path, value in flatten_stats(bag.stats()):
            if path != "lock_held":
                wanted |= expected(BY_PATH[path], value, own)
    held = {key for key in found if key[0].startswith("embcache_table_lock_held_seconds_")}
    assert {key: value for key, value in found.items() if key not in held} == wanted
    assert len(held) == 2 * (len(BOUNDS_NS) + 3)
    rule = ("embcache_eviction_evicted_by_rule_rows_total", labels("items.inner", "item", rule="ttl"))
    assert found[rule] == found["embcache_eviction_evicted_rows_total", labels("items.inner", "item")] > 0


def test_counters_and_histograms_only_rise_while_tables_are_trained(tmp_path: Path) -> None:
    counted = {metric.name for metric in METRICS if metric.kind == "counter"}
    with full_bag(tmp_path) as bag, PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:
        before: dict[tuple[str, Any], float] = {}
        for seed in range(4):
            trained(bag, seed)
            found = scraped(exporter.url)
            rising = {
                key: value
                for key, value in found.items()
                if key[0] in counted or key[0].endswith(("_bucket", "_sum", "_count"))
            }
            assert all(rising[key] >= value for key, value in before.items())
            assert rising.keys() >= before.keys()
            assert sum(rising.values()) > sum(before.values())
            before = rising


def test_closed_table_leaves_endpoint_which_ends_with_exporter(tmp_path: Path) -> None:
    model = Models(tmp_path)
    exporter = PrometheusExporter(model, 0, host="127.0.0.1")
    assert {dict(key[1])["table"] for key in scraped(exporter.url)} == {"user", "item"}
    model.users.close()
    assert {dict(key[1])["table"] for key in scraped(exporter.url)} == {"item"}
    model.items["inner"].close()
    assert scraped(exporter.url) == {}
    exporter.close()
    exporter.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(exporter.url)
    with PrometheusExporter(model, exporter.port, host="127.0.0.1") as again:  # the port is free again
        assert again.port == exporter.port


def test_a_port_that_is_taken_is_a_typed_error() -> None:
    bag = make_bag()
    with PrometheusExporter(bag, 0, host="127.0.0.1") as first:
        for port in (first.port, 70_000):
            with pytest.raises(StorageError, match="give another port, or 0"):
                PrometheusExporter(bag, port, host="127.0.0.1")


def test_an_exporter_keeps_no_table_alive(tmp_path: Path) -> None:
    bag = full_bag(tmp_path)
    with (
        PrometheusExporter(bag, 0, host="127.0.0.1") as exporter,
        JsonlLogger(bag, tmp_path / "metrics.jsonl", interval_s=3600),
    ):
        assert scraped(exporter.url)
        gone = weakref.ref(bag.table)
        bag.close()
        del bag
        gc.collect()
        assert gone() is None
        assert scraped(exporter.url) == {}


def test_scrapes_beside_training_and_a_close_see_whole_tables(tmp_path: Path) -> None:
    """Threads scrape until the table is closed. None of them fails, and the table is closed at once."""
    bag = full_bag(tmp_path)
    failures: list[Exception] = []
    done = threading.Event()
    with PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:

        def scrape() -> None:
            while not done.is_set():
                try:
                    found = scraped(exporter.url)
                    # Rows are counted under one lock.
                    total = found.get(("embcache_table_rows", labels("", "item")))
                    tiers = [
                        found.get((f"embcache_{tier}_rows", labels("", "item"))) for tier in ("device", "host", "ssd")
                    ]
                    assert total is None or None not in tiers
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=scrape) for _ in range(2)]
        for thread in threads:
            thread.start()
        trained(bag)
        bag.close()
        done.set()
        for thread in threads:
            thread.join()
    assert not failures


def serve_one_rank(rank: int, size: int) -> dict[str, float]:
    """Each rank trains its own rows and serves them."""
    bag = EmbCacheEmbeddingBag(
        name="item",
        embedding_dim=4,
        tiers=TierBudgets(host_bytes="1MiB"),
        optimizer=optimizers.SGD(lr=0.1),
        replicated=True,
    )
    bag(torch.arange(10 * (rank + 1)).view(-1, 1)).sum().backward()
    with PrometheusExporter(bag, 0, host="127.0.0.1") as exporter:
        found = scraped(exporter.url)
    assert size == 2
    return {dict(key[1])["rank"]: value for key, value in found.items() if key[0] == "embcache_table_rows"}


def test_two_ranks_serve_their_own_tables_under_their_own_rank() -> None:
    world = World(2)
    try:
        assert world.run(serve_one_rank) == [{"0": 10.0}, {"1": 20.0}]
    finally:
        world.stop()


# ---- JSON lines


def test_json_lines_are_read_back_as_they_were_sampled(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with full_bag(tmp_path / "ssd") as bag, JsonlLogger(bag, path, interval_s=None) as logger:
        samples = []
        for number in range(3):
            trained(bag, number)
            logger.sample(number * 100)
            samples.append(dict(flatten_stats(bag.stats())))
    lines = path.read_text().splitlines()
    found = [sample_from_line(line) for line in lines]
    assert [sample.step for sample in found] == [0, 100, 200]
    assert found[0].time < found[1].time < found[2].time
    for sample, wanted in zip(found, samples, strict=True):
        (table,) = sample.tables
        assert (table.module, table.table, table.rank) == ("", "item", 0)
        assert {path: value for path, value in table.values.items() if path != "lock_held"} == {
            path: value for path, value in wanted.items() if path != "lock_held"
        }
    assert json.loads(lines[0])["tables"][0]["values"]["row_wait"].keys() == {"count", "sum_ns", "buckets"}


def test_lines_of_several_threads_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    bag = make_bag()
    step(bag, [[1]])
    loggers = [JsonlLogger(bag, path, interval_s=None) for _ in range(3)]
    threads = [threading.Thread(target=lambda one=one: [one.sample(7) for _ in range(50)]) for one in loggers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sample_from_line(line).step for line in path.read_text().splitlines()] == [7] * 150


def test_a_thread_samples_at_its_interval_and_ends_with_the_logger(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    bag = make_bag()
    step(bag, [[1]])
    written = threading.Event()

    class Told(JsonlLogger):
        def _write(self, sample: Any) -> None:
            super()._write(sample)
            written.set()

    logger = Told(bag, path, interval_s=0.01)
    assert written.wait(600)
    logger.close()
    size = path.stat().st_size
    logger.sample()
    assert path.stat().st_size == size
    assert sample_from_line(path.read_text().splitlines()[0]).step == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "embcache-monitor"]


def test_a_rotated_file_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    bag = make_bag()
    with JsonlLogger(bag, path, interval_s=None) as logger:
        logger.sample(1)
        path.rename(tmp_path / "metrics.jsonl.1")
        logger.sample(2)
    assert [sample_from_line(text.read_text()).step for text in (tmp_path / "metrics.jsonl.1", path)] == [1, 2]


def test_an_error_of_writing_is_a_warning_once_and_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bag = make_bag()
    path = tmp_path / "missing" / "metrics.jsonl"
    with caplog.at_level(logging.WARNING, "torchrec_embcache"), JsonlLogger(bag, path, interval_s=None) as logger:
        for number in range(3):
            logger.sample(number)
        (said,) = caplog.records
        assert said.levelno == logging.WARNING
        assert "metrics.jsonl" in said.getMessage()
        assert "FileNotFoundError" in said.getMessage()
        path.parent.mkdir()
        logger.sample(3)  # it works again
        path.unlink()
        path.parent.rmdir()
        logger.sample(4)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("interval_s", [0, -1.0, float("nan"), True])
def test_what_is_no_interval_is_refused(interval_s: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="interval_s="):
        JsonlLogger(make_bag(), tmp_path / "a", interval_s=interval_s)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="give an nn.Module"):
        Sampler(make_bag().table)  # type: ignore[arg-type]


# ---- TensorBoard


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboards_own_reader_finds_rates_and_waits(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model = Models(tmp_path / "ssd")
    bag = model.items["inner"]
    with SummaryWriter(str(tmp_path / "runs")) as writer, TensorBoardLogger(model, writer, interval_s=None) as logger:
        logger.sample(0)
        before = bag.stats()
        trained(bag)
        logger.sample(100)
        after = bag.stats()
    found = read_events(tmp_path / "runs")
    tag = "embcache/items.inner/item/host/hit_rate"
    hits, misses = after.host.hits - before.host.hits, after.host.misses - before.host.misses
    assert found[tag] == [(100, pytest.approx(hits / (hits + misses), rel=1e-6))]
    assert found["embcache/users/user/rows"] == [(0, 0.0), (100, 0.0)]
    assert found["embcache/items.inner/item/rows"] == [(0, 0.0), (100, float(after.rows))]
    p99 = after.row_wait.quantile(0.99) / 1e6
    assert found["embcache/items.inner/item/row_wait/p99_ms"] == [(100, pytest.approx(p99, rel=1e-6))]
    assert found["embcache/items.inner/item/eviction/evicted_per_second"][0][1] > 0
    assert found["embcache/items.inner/item/eviction/evicted_by_rule/ttl_per_second"][0][1] > 0


def test_every_number_of_stats_is_among_the_scalars(tmp_path: Path) -> None:
    with full_bag(tmp_path) as bag:
        sampler = Sampler(bag)
        first = sampler.sample()
        trained(bag)
        found = scalars(first, sampler.sample())
    for metric in METRICS:
        above = f"embcache/item/{metric.path.replace('.', '/').removesuffix('_ns')}"
        wanted = {
            "counter": f"{above}{'/ttl' if metric.label else ''}_per_second",
            "histogram": f"{above}/p99_ms",
        }.get(metric.kind, above)
        assert wanted in found or metric.kind == "text", metric.path


def test_counters_that_begin_anew_are_no_negative_rates() -> None:
    """A table that is opened again counts from 0."""
    samples = []
    for steps in (9, 2):
        with make_bag() as bag:
            for number in range(steps):
                step(bag, [[number, 1]])
            samples.append(Sampler(bag).sample())
    found = scalars(*samples)
    assert all(value >= 0 for name, value in found.items())
    assert found["embcache/item/host/hit_rate"] == 1 / 3


# ---- the end of a process, and what is imported


def run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_process_ends_with_exporters_open(tmp_path: Path) -> None:
    """Tables that nobody closed are flushed at the end, while nobody samples them any more."""
    tmp_path.chmod(0o700)
    script = """
    import sys, torch
    from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
    from torchrec_embcache.monitoring import JsonlLogger, PrometheusExporter
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="16MiB", ssd_dir=sys.argv[1], reopen="auto")
    bag = EmbCacheEmbeddingBag(name="item", embedding_dim=4, tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
    exporter = PrometheusExporter(bag, 0, host="127.0.0.1")
    loggers = [JsonlLogger(bag, sys.argv[1] + "/metrics.jsonl", interval_s=0.001) for _ in range(3)]
    before = len(bag)
    bag(torch.arange(100).view(-1, 1)).sum().backward()
    loggers[0].sample(7)
    print(before, len(bag))
    """
    assert run(script, tmp_path) == "0 100\n"
    assert run(script, tmp_path) == "100 100\n"
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert sum(sample_from_line(line).step == 7 for line in lines) == 2


@pytest.mark.slow
def test_a_forked_child_samples_nothing_of_its_parent(tmp_path: Path) -> None:
    script = """
    import os, sys, torch
    from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
    from torchrec_embcache.monitoring import JsonlLogger, PrometheusExporter, Sampler
    tiers = TierBudgets(host_bytes="1MiB")
    bag = EmbCacheEmbeddingBag(name="item", embedding_dim=4, tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
    exporter = PrometheusExporter(bag, 0, host="127.0.0.1")
    logger = JsonlLogger(bag, sys.argv[1] + "/metrics.jsonl", interval_s=None)
    child = os.fork()
    if child == 0:
        logger.sample(1)
        print(len(Sampler(bag).sample().tables), flush=True)
        logger.close()
        exporter.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    logger.sample(2)
    """
    assert run(script, tmp_path) == "0\n"
    assert [sample_from_line(line).step for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2]


@pytest.mark.slow
def test_exporter_libraries_are_imported_on_first_use(
    tmp_path: Path,
) -> None:
    script = """
    import sys
    import torchrec_embcache
    libraries = {"prometheus_client", "tensorboard", "rich", "google.protobuf", "grpc"}
    print(sorted((libraries | {"torchrec_embcache.monitoring"}) & set(sys.modules)))
    import torchrec_embcache.monitoring
    print(sorted(libraries & set(sys.modules)))
    """
    assert run(script, tmp_path) == "[]\n[]\n"


@pytest.mark.slow
def test_without_prometheus_client_the_exporter_says_what_to_install(tmp_path: Path) -> None:
    script = """
    import sys
    sys.modules["prometheus_client"] = None
    from torch import nn
    from torchrec_embcache.exceptions import UnsupportedError
    from torchrec_embcache.monitoring import PrometheusExporter
    try:
        PrometheusExporter(nn.Linear(1, 1), 0)
    except UnsupportedError as error:
        print(error)
    """
    assert 'pip install "torchrec-embcache[prometheus]"' in run(script, tmp_path)
