"""`embcache plot` and `torchrec_embcache.plotting`: the numbers shown, the drawing, and rejected input."""

import itertools
import json
import math
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tables import make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import EmbCacheEmbeddingBag
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import ConfigError, CorruptionError, InputError, StorageError
from torchrec_embcache.monitoring import JsonlLogger, Sample, TableSample, scalars
from torchrec_embcache.monitoring._jsonl import sample_from_line, sample_to_line
from torchrec_embcache.plotting import (
    Line,
    Panel,
    curve_panels,
    draw,
    history_panels,
    read_panels,
    svg,
)
from torchrec_embcache.sizing import TableTraffic, advise, read_traffic, traffic_of, write_traffic

ITEM = TableTraffic.assumed("m/item", rows=200_000, dim=64, ids_per_batch=8_192)
USER = TableTraffic.assumed("m/user", rows=900_000, dim=32, ids_per_batch=2_048, exponent=0.7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with three tiers was trained here: `metrics.jsonl` and `traffic.json`."""
    place = tmp_path_factory.mktemp("plot")
    tiers = ssd_tiers(place / "ssd", host_bytes="256KiB", device_bytes="16KiB", ssd_bytes="16MiB", sizing=True)
    with make_bag(tiers=tiers, embedding_dim=16) as bag:
        with JsonlLogger(bag, place / "metrics.jsonl", interval_s=None) as logger:
            logger.sample()
            for seed in range(6):
                trained(bag, seed)
                logger.sample()
        write_traffic(traffic_of(bag), place / "traffic.json")
    return place


def trained(bag: EmbCacheEmbeddingBag, seed: int) -> None:
    train(bag, random_batches(3, 20, 300, seed=seed))
    step(bag, [list(range(1000 * seed, 1000 * seed + 900))])
    step(bag, [list(range(max(0, 1000 * seed - 1000), 1000 * seed))])


def samples_of(path: Path) -> list[Sample]:
    return [sample_from_line(line) for line in path.read_text().splitlines()]


def texts(picture: str) -> list[str]:
    """Returns the texts of an SVG."""
    return ["".join(found.itertext()) for found in ET.fromstring(picture).iter() if found.tag.endswith("}text")]


def is_same(one: tuple[float, ...], other: list[float]) -> bool:
    return np.array_equal(np.array(one), np.array(other), equal_nan=True)


# ---- which numbers are shown


def test_curves_match_the_file_and_mark_the_current_budgets(folder: Path) -> None:
    (table,) = read_traffic(folder / "traffic.json")
    by_share, by_bytes = read_panels([folder / "traffic.json"])
    (line,) = by_share.lines
    inside = table.curve.rows <= table.rows
    count = int(inside.sum())
    assert count > 3
    assert line.x[:count] == pytest.approx(table.curve.rows[inside] / table.rows)
    assert line.y[:count] == tuple(table.curve.miss_ratios[inside])
    assert (line.x[-1], line.y[-1]) == (pytest.approx(1.0), table.curve.at(table.rows))
    assert by_bytes.lines[0].x == pytest.approx([share * table.rows * table.row_bytes.host for share in line.x])
    assert by_bytes.lines[0].y == line.y
    (mark,), (in_bytes,) = by_share.marks, by_bytes.marks
    held = advise([table], ram="1GiB", ssd="1GiB").reads_per_batch_now
    assert mark.y == table.curve.at(mark.x * table.rows)
    assert table.lookups_per_batch * table.curve.reads_at(mark.x * table.rows) == pytest.approx(held, rel=1e-3), (
        "rows are whole"
    )
    assert in_bytes.x == pytest.approx(mark.x * table.rows * table.row_bytes.host)
    assert (by_share.x_log, by_share.x_unit, by_bytes.x_unit, by_share.y_unit) == (True, "share", "bytes", "share")


def test_advised_budgets_are_marked_on_the_curves_of_their_tables() -> None:
    tables = [replace(table, host_bytes=16 << 20, ssd_bytes=1 << 30) for table in (ITEM, USER)]
    advice = advise(tables, ram="64MiB", ssd="2GiB")
    by_share, _ = curve_panels(tables, advice)
    marks = {(mark.label, mark.table): (mark.x, mark.y) for mark in by_share.marks}
    assert len(marks) == 4
    for table in tables:
        made = advice.tables[table.name]
        assert marks["advised budget", table.name] == (
            pytest.approx(made.rows_in_ram / table.rows),
            pytest.approx(made.miss_ratio, abs=1e-4),
        )


def test_a_table_that_has_no_budget_yet_has_a_curve_without_a_mark() -> None:
    by_share, _ = curve_panels([ITEM, USER])
    assert [line.title for line in by_share.lines] == ["m/item", "m/user"]
    assert by_share.lines[0].color != by_share.lines[1].color
    assert not by_share.marks


def test_several_ranks_are_lines_of_one_colour_and_of_several_patterns(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text((folder / "traffic.json").read_text())
    by_share, _ = read_panels([folder / "traffic.json", tmp_path / "other.json"])
    assert [line.title for line in by_share.lines] == ["item, traffic.json", "item, other.json"]
    assert {line.color for line in by_share.lines} == {0}
    assert [line.dash for line in by_share.lines] == [0, 1]


def test_the_history_is_that_of_the_file(folder: Path) -> None:
    samples = samples_of(folder / "metrics.jsonl")
    panels = {panel.title: panel for panel in read_panels([folder / "metrics.jsonl"])}
    lines = {(title, line.label): line for title, panel in panels.items() for line in panel.lines}
    # Before the first batch, nothing can be said but what there is.
    expected = [scalars(before, after) for before, after in itertools.pairwise(samples)]
    for (title, label), number, factor in (
        (("item: hit rate by tier", "device"), "device/hit_rate", 1.0),
        (("item: hit rate by tier", "host"), "host/hit_rate", 1.0),
        (("item: hit rate by tier", "SSD"), "ssd/hit_rate", 1.0),
        (("item: SSD reads and writes", "read"), "ssd/read_bytes_per_second", 2.0**-20),
        (("item: SSD reads and writes", "written"), "ssd/written_bytes_per_second", 2.0**-20),
        (("item: wait of a batch for its rows", "median"), "row_wait/p50_ms", 1.0),
        (("item: wait of a batch for its rows", "99th percentile"), "row_wait/p99_ms", 1.0),
        (("item: time of a read from SSD", "99th percentile"), "ssd/read_latency/p99_ms", 1.0),
    ):
        found = [numbers.get(f"embcache/item/{number}", math.nan) * factor for numbers in expected]
        assert not all(math.isnan(value) for value in found), number
        assert is_same(lines[title, label].y, [math.nan, *found]), number
    for label, path in (("SSD", "ssd.bytes"), ("SSD budget", "ssd.capacity_bytes"), ("host", "host.bytes")):
        assert is_same(lines["item: bytes by tier", label].y, [one.tables[0].values[path] for one in samples]), path
    assert is_same(lines["item: rows by tier", "host"].y, [one.tables[0].values["host.rows"] for one in samples])
    assert all(line.x == tuple(one.step for one in samples) for line in lines.values())
    assert {panel.x_label for panel in panels.values()} == {"training step"}


def history(
    values: list[int], *, rank: int = 0, steps: list[int | None] | None = None, name: str = "item"
) -> list[Sample]:
    """Samples of a table, 2 seconds apart, of a host tier that was asked for 100 ids and had so many."""
    given = steps or list(range(len(values)))
    return [
        Sample(
            100.0 + 2 * n, step, (TableSample("m", name, rank, {"host.hits": value, "host.misses": 100 * n - value}),)
        )
        for n, (value, step) in enumerate(zip(values, given, strict=True))
    ]


def test_a_table_that_was_opened_again_begins_anew() -> None:
    (panel,) = history_panels(history([0, 50, 140, 20]))
    assert is_same(panel.lines[0].y, [math.nan, 0.5, 0.9, 20 / 300])


def test_time_axis_is_used_on_request_or_for_unsorted_steps() -> None:
    rising, falling = history([0, 1, 2]), history([0, 1, 2], steps=[0, 5, 3])
    (step_,), (time_,), (asked,) = history_panels(rising), history_panels(falling), history_panels(rising, over="time")
    assert (step_.x_label, step_.lines[0].x) == ("training step", (0.0, 1.0, 2.0))
    assert (time_.x_label, time_.lines[0].x) == ("seconds since the first sample", (0.0, 2.0, 4.0))
    assert asked.lines[0].x == time_.lines[0].x
    (forced,) = history_panels(falling, over="step")
    assert forced.lines[0].x == (0.0, 5.0, 3.0)


def test_ranks_are_named_and_those_of_one_number_by_their_files() -> None:
    one, other = history([0, 10, 20]), history([0, 30, 60], rank=1)
    (panel,) = history_panels({"a": one, "b": other})
    assert [line.title for line in panel.lines] == ["host, rank 0", "host, rank 1"]
    (shared,) = history_panels([sample for pair in zip(one, other, strict=True) for sample in pair])
    assert [line.y[1:] for line in shared.lines] == [line.y[1:] for line in panel.lines] == [(0.1, 0.1), (0.3, 0.3)]
    (same,) = history_panels({"a": one, "b": one})
    assert [line.title for line in same.lines] == ["host, rank 0 of a", "host, rank 0 of b"]


def test_tables_can_be_chosen() -> None:
    both = [*history([0, 10]), *history([0, 20], name="user")]
    assert [panel.title for panel in history_panels(both)] == ["m/item: hit rate by tier", "m/user: hit rate by tier"]
    for name in ("user", "m/user"):
        assert [panel.title for panel in history_panels(both, tables=[name])] == ["m/user: hit rate by tier"]
    with pytest.raises(InputError, match="table 'page' is not there: give one of m/item, m/user"):
        history_panels(both, tables=["page"])


def test_what_has_nothing_to_show_says_so() -> None:
    with pytest.raises(InputError, match="no table with two samples"):
        history_panels(history([5]))
    with pytest.raises(InputError, match="no miss ratio curve"):
        curve_panels([])
    with pytest.raises(InputError, match="no diagram to draw"):
        draw([])
    with pytest.raises(ConfigError, match="columns=0"):
        draw(curve_panels([ITEM]), columns=0)


# ---- what is refused


def test_lines_that_a_full_disk_has_cut_are_left_out(folder: Path, tmp_path: Path, caplog: Any) -> None:
    whole = (folder / "metrics.jsonl").read_text()
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"time":1.0,"step"\n' + whole + whole.splitlines()[-1][:100])
    found, expected = read_panels([path]), read_panels([folder / "metrics.jsonl"])
    assert [str(panel.as_dict()) for panel in found] == [str(panel.as_dict()) for panel in expected]
    assert "2 of 9 lines are incomplete samples" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"step,loss\n1,2\n",
        b'{"loss": 1}\n',
        b"[]\n",
        b"\x89PNG\r\n\x1a\n\x00\xff",
        b"[" * 100_000,
        b'{"time":1e999,"step":1,"tables":[]}\n',
        b'{"time":1.0,"step":"a","tables":[]}\n',
        b'{"format": 1, "tables": ' + b"[" * 100_000,
        b'{"format": 2, "tables": []}',
        b'{"format": 1, "tables": [{}]}',
        b'{"format": 1, "tab',
    ],
)
def test_wrong_and_damaged_files_raise_typed_errors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "given"
    path.write_bytes(content)
    with pytest.raises(CorruptionError, match="given: (expected|no traffic of a table)"):
        read_panels([path])


def test_a_counter_that_no_number_can_hold_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [sample_to_line(sample) for sample in history([0, 10, 20])]
    path.write_text("\n".join([*lines[:2], lines[2].replace('"host.hits":20', f'"host.hits":{10**400}')]) + "\n")
    assert read_panels([path])
    assert "metrics.jsonl: 1 of 3 lines are incomplete samples" in caplog.text


def test_every_cut_of_a_file_of_traffic_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "traffic.json").read_text().rstrip()
    path = tmp_path / "traffic.json"
    for length in range(1, len(whole), max(1, len(whole) // 200)):
        path.write_text(whole[:length])
        with pytest.raises(CorruptionError):
            read_panels([path])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read .*nothing"):
        read_panels([tmp_path / "nothing"])


# ---- how it is drawn


def curves_of(picture: str) -> list[list[tuple[float, float]]]:
    """The points of each path of an SVG in the color of a line."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*?style="fill: none;[^"]*stroke: #(?:0072b2|009e73)', picture)
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)] for path in paths]


def test_an_svg_has_the_titles_the_labels_and_the_curves() -> None:
    panels = curve_panels([ITEM, USER])
    picture = svg(panels)
    said = texts(picture)
    for panel in panels:
        assert {panel.title, panel.x_label, panel.y_label} <= set(said)
    assert said.count("m/item") == said.count("m/user") == len(panels)
    assert {"10%", "100%", "0%"} <= set(said)
    drawn = [points for points in curves_of(picture) if len(points) > 4]
    assert len(drawn) == 4
    # Pixels are the logarithm of the size, and the ratio, along straight lines.
    line, points = panels[0].lines[0], drawn[0]
    across = np.polyfit(np.log([line.x[0], line.x[-1]]), [points[0][0], points[-1][0]], 1)
    up = np.polyfit([line.y[0], line.y[-1]], [points[0][1], points[-1][1]], 1)
    for x, y in points:
        share = math.exp((x - across[1]) / across[0])
        assert ITEM.curve.at(share * ITEM.rows) == pytest.approx((y - up[1]) / up[0], abs=0.01)


def test_what_is_drawn_in_both_grounds_is_the_same_but_for_colours() -> None:
    panels = curve_panels([ITEM])
    light, dark = svg(panels), svg(panels, dark=True)
    assert texts(light) == texts(dark)
    assert curves_of(light) == curves_of(dark) != []
    grounds = [draw(panels, dark=is_dark).get_facecolor() for is_dark in (False, True)]
    assert grounds == [(1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0)]


def test_the_same_picture_has_the_same_bytes() -> None:
    assert svg(curve_panels([ITEM])) == svg(curve_panels([ITEM]))


@pytest.mark.slow
def test_drawing_leaves_pyplot_and_the_settings_of_matplotlib_alone() -> None:
    script = (
        "import sys, matplotlib\n"
        "settings = lambda: {name: dict.__getitem__(matplotlib.rcParams, name) for name in matplotlib.rcParams}\n"
        "before = settings()\n"
        "from torchrec_embcache import plotting\n"
        "panel = plotting.Panel('loss', 'step', 'loss', (plotting.Line('a', (0.0, 1.0), (2.0, 1.0)),))\n"
        "plotting.svg([panel]), plotting.svg([panel], dark=True)\n"
        "assert settings() == before\n"
        "print([name for name in sys.modules if 'pyplot' in name or 'tkinter' in name])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.slow
def test_gaps_single_points_and_zeros_on_a_log_axis_are_drawn() -> None:
    nothing = (math.nan, math.nan, math.nan)
    lines = (Line("a", (0.0, 1.0, 2.0), (math.nan, 1.0, math.nan)), Line("b", (0.0, 1.0, 2.0), nothing, color=1))
    for is_log in (False, True):
        panels = [
            Panel("gaps", "x", "y", lines, y_log=is_log),
            Panel("zeros", "x", "y", (Line("a", (0.0, 0.0), (0.0, 0.0)),), x_log=is_log, y_log=is_log, y_unit="bytes"),
            Panel("none", "x", "y", ()),
        ]
        assert {"gaps", "zeros", "none"} <= set(texts(svg(panels)))


def test_an_axis_begins_at_0_where_it_is_to() -> None:
    line = Line("loss", (1.0, 2.0), (0.625, 0.75))
    ends = [
        draw([Panel("loss", "step", "loss", (line,), y_from_zero=zero)]).axes[0].get_ylim() for zero in (True, False)
    ]
    assert ends[0][0] == 0.0
    assert 0.5 < ends[1][0] < 0.625
    assert all(end > 0.75 for _, end in ends)


# ---- the command


@pytest.mark.slow
def test_the_command_writes_svg_and_png(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.svg"
    assert main(["plot", str(folder / "traffic.json"), "-o", str(picture), "--dark"]) == 0
    assert "curves.svg: 2 diagrams of 1 files" in capsys.readouterr().out
    assert "Miss ratio by the share of rows in RAM" in texts(picture.read_text())
    assert picture.read_text() == svg(read_panels([folder / "traffic.json"]), dark=True)
    picture = tmp_path / "history.PNG"
    assert main(["plot", str(folder / "metrics.jsonl"), "-o", str(picture)]) == 0
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1280, 1260), "two columns and three rows of 640 x 420"


def test_the_command_gives_the_numbers_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(folder / "metrics.jsonl"), str(folder / "traffic.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = read_panels([folder / "metrics.jsonl", folder / "traffic.json"])
    assert found["panels"] == json.loads(json.dumps([panel.as_dict() for panel in expected], allow_nan=False))
    assert found["panels"][2]["lines"][0]["y"][0] is None
    assert len(found["panels"]) == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "-o is missing"),
        (["-o", "picture.pdf"], "end its name with .svg or .png"),
        (["-o", "picture.svg", "--table", "page"], "page"),
    ],
)
def test_the_command_says_what_to_give(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("metrics.jsonl", "traffic.json"):
        assert main(["plot", str(folder / file), *arguments]) == 3
        assert said in capsys.readouterr().err


def test_more_tables_than_a_picture_can_show_are_to_be_chosen_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    samples = [sample for number in range(73) for sample in history([0, 10], name=f"t{number}")]
    path.write_text("".join(sample_to_line(sample) + "\n" for sample in samples))
    assert main(["plot", str(path), "-o", str(tmp_path / "a.svg")]) == 3
    assert "73 diagrams are too many for one picture: choose some tables by --table" in capsys.readouterr().err
    assert main(["plot", str(path), "-o", str(tmp_path / "a.svg"), "--table", "t3", "--table", "m/t4"]) == 0


@pytest.mark.slow
def test_without_matplotlib_the_command_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from torchrec_embcache.cli import main\n"
        f"assert main(['plot', {str(folder / 'traffic.json')!r}, '--json']) == 0\n"
        f"sys.exit(main(['plot', {str(folder / 'traffic.json')!r}, '-o', {str(tmp_path / 'a.svg')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert 'pip install "torchrec-embcache[plot]"' in done.stderr
    assert not (tmp_path / "a.svg").exists()
