"""The plots of docs/benchmarks.md, as SVG."""

import math
from collections.abc import Sequence
from html import escape

from catalog import GROWTH
from results import Row, quantity, ratio

__all__ = ["growth_plot", "ratios_plot", "soak_plot"]

INK, GRID = "#1f2328", "#d0d7de"
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#0f766e", "#6e7781")


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    style = f"font-family:sans-serif;font-size:12px;fill:{INK}"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


def text(x: float, y: float, what: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def ratios_plot(rows: dict[str, Row]) -> str:
    """Draws ours as a ratio to its limit (dot) and to its rivals (diamonds), one line per bench, on a logarithmic axis."""
    compared = [row for row in rows.values() if row["limit"] or row["rivals"]]
    left, right, top, step = 290, 40, 40, 22
    width, height = 900, top + step * len(compared) + 40
    all_ratios = [ratio(row, other["value"]) for row in compared for other in [row["limit"], *row["rivals"]] if other]
    # Powers of two around all ratios and 1.
    least = min(-1, math.floor(math.log2(min(all_ratios, default=1))))
    greatest = max(1, math.ceil(math.log2(max(all_ratios, default=1))))

    def at(value: float) -> float:
        place = (math.log2(value) - least) / (greatest - least)
        return left + place * (width - left - right)

    parts = [text(left, 20, "ours / limit (dot) and ours / rival (diamond); right of 1 is ahead")]
    for tick in (2.0**power for power in range(least, greatest + 1)):
        parts.append(line(at(tick), top - 8, at(tick), height - 30, INK if tick == 1 else GRID))
        parts.append(text(at(tick), height - 12, f"{tick:g}", "middle"))
    for number, row in enumerate(compared):
        y = top + step * number + step / 2
        parts.append(text(left - 10, y + 4, row["name"], "end"))
        for rival in row["rivals"]:
            x = at(ratio(row, rival["value"]))
            said = escape(f"{ratio(row, rival['value']):.2f} \N{MULTIPLICATION SIGN} {rival['what']}")
            corners = f"{x},{y - 6} {x + 6},{y} {x},{y + 6} {x - 6},{y}"
            parts.append(f'<polygon points="{corners}" fill="{COLOURS[1]}"><title>{said}</title></polygon>')
        if row["limit"]:
            x = at(ratio(row, row["limit"]["value"]))
            said = escape(f"{ratio(row, row['limit']['value']):.2f} of {row['limit']['what']}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[0]}"><title>{said}</title></circle>')
    return svg(width, height, parts)


def growth_plot(rows: dict[str, Row]) -> str:
    """Draws rates by the number of rows of the table, on two logarithmic axes. A bar is the spread."""
    lines = {path: {size: rows[name] for size, name in names.items() if name in rows} for path, names in GROWTH.items()}
    lines = {path: points for path, points in lines.items() if len(points) > 1}
    left, right, top, width, height = 70, 230, 30, 820, 420
    values = [row[key] for points in lines.values() for row in points.values() for key in ("low", "high")]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))

    def x_of(size: float) -> float:
        return left + math.log10(size) / 2 * (width - left - right)

    def y_of(value: float) -> float:
        return top + (1 - math.log10(value / low) / math.log10(high / low)) * (height - top - 50)

    parts = [text(left, 18, "rows or ids a second, by rows of the table")]
    decade = low
    while decade <= high:
        parts += [line(left, y_of(decade), width - right, y_of(decade), GRID)]
        parts += [text(left - 8, y_of(decade) + 4, quantity(decade), "end")]
        decade *= 10
    for size in (1, 10, 100):
        parts.append(text(x_of(size), height - 28, f"{size}M", "middle"))
    ends = []
    for (path, points), colour in zip(lines.items(), COLOURS, strict=False):
        places = [(x_of(size), row) for size, row in sorted(points.items())]
        joined = " ".join(f"{x:.1f},{y_of(row['value']):.1f}" for x, row in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, row in places:
            parts.append(line(x, y_of(row["low"]), x, y_of(row["high"]), colour, 3))
            parts.append(f'<circle cx="{x:.1f}" cy="{y_of(row["value"]):.1f}" r="4" fill="{colour}"/>')
        ends.append((y_of(places[-1][1]["value"]), places[-1][0], path, colour))
    below = 0.0
    for y, x, path, colour in sorted(ends):
        below = max(y, below + 15)
        parts.append(line(x, y, width - right + 10, below, colour, 0.5))
        parts.append(text(width - right + 14, below + 4, path))
    return svg(width, height, parts)


def soak_plot(windows: Sequence[Row], marks: Sequence[tuple[float, str]]) -> str:
    """Draws the servers' measurements over time: request times, the age of the version, and memory. A tick below is a swap of
    versions, in the server's color. A dotted line is a full save, and a dashed one with a number is a fault or its end.
    """
    left, width, panel = 80, 960, 150
    end = max([window["at"] for window in windows] + [at for at, _ in marks], default=1.0)
    by_process: dict[int, list[Row]] = {}
    for window in windows:
        by_process.setdefault(window["process"], []).append(window)

    def x_of(seconds: float) -> float:
        return left + seconds / end * (width - left - 20)

    def upright(at: float, top: float, bottom: float, style: str, what: str) -> str:
        place = f'x1="{x_of(at):.1f}" y1="{top:.1f}" x2="{x_of(at):.1f}" y2="{bottom:.1f}"'
        return f"<line {place} {style}><title>{escape(what)}</title></line>"

    faults = grouped([(at, what) for at, what in marks if what != "full"], 16 * end / (width - left - 20))
    parts = []
    # The fields that each panel draws, and their divisor.
    panels = (
        ("time of a request, ms: 99th percentile and median", ("p99", "p50"), 1e3),
        ("age of the version, s", ("staleness",), 1.0),
        ("memory, MiB: PSS and anonymous", ("pss", "anonymous"), 2.0**20),
    )
    for number, (title, fields, unit) in enumerate(panels):
        top = 56 + number * (panel + 60)
        most = max((window[field] / unit for window in windows for field in fields), default=0.0) or 1.0
        parts += [text(left, top - 26, title), text(left - 8, top + 4, quantity(most), "end")]
        parts += [text(left - 8, top + panel + 4, "0", "end"), line(left, top + panel, width - 20, top + panel, INK)]
        parts += [
            upright(at, top, top + panel, f'stroke="{GRID}" stroke-dasharray="2 3"', what)
            for at, what in marks
            if what == "full"
        ]
        for label, (at, what) in enumerate(faults, 1):
            parts.append(upright(at, top - 4, top + panel, f'stroke="{INK}" stroke-dasharray="5 3"', what))
            parts.append(text(x_of(at), top - 8, str(label), "middle"))
        for (process, seen), colour in zip(by_process.items(), COLOURS, strict=False):
            for field in fields:
                points = " ".join(
                    f"{x_of(window['at']):.1f},{top + panel * (1 - window[field] / unit / most):.1f}" for window in seen
                )
                thick = 2 if field == fields[0] else 1
                title = f"<title>server {process}: {field}</title>"
                parts.append(
                    f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{thick}">{title}</polyline>'
                )
            below = top + panel + 2 + 4 * process
            swaps = [at for window in seen for at in window["swapped"]]
            parts += [
                upright(at, below, below + 4, f'stroke="{colour}"', f"server {process}: another version")
                for at in swaps
            ]
    below = 56 + len(panels) * (panel + 60)
    parts += [text(x_of(0), below, "0 s", "middle"), text(x_of(end), below, f"{end:.0f} s", "end")]
    for label, (at, what) in enumerate(faults, 1):
        parts.append(text(left, below + 18 * label, f"{label}: {at:.0f} s: {what}"))
    return svg(width, below + 18 * len(faults) + 16, parts)


def grouped(marks: Sequence[tuple[float, str]], apart: float) -> list[tuple[float, str]]:
    """Groups marks in time order. Marks within `apart` seconds of the first of a group are merged with it."""
    found: list[tuple[float, str]] = []
    for at, what in marks:
        if found and at - found[-1][0] < apart:
            found[-1] = (found[-1][0], f"{found[-1][1]}; {what}")
        else:
            found.append((at, what))
    return found
