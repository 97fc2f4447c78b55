"""Writes docs/benchmarks.md and its plots from target/bench/results.json.

    python benches/python/document.py [RESULTS.json]

A bench that the results lack is left out of the tables. The plots are SVG, made here.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from catalog import GROWTH, SECTIONS
from results import Row, quantity, ratio, read
from served import ROOT

DOCS = ROOT / "docs"
HEAD = """# Benchmarks

Made by `make bench-docs` from what `make bench` measured; do not edit. `make bench ONLY=<name>,<name>` measures some again.

Every figure is the median of the rounds of one run, in brackets its least and greatest. In each round ours, the limit and the
rivals take turns on the same data, in the same state. The *limit* is a plain, well-written loop with prefetch, or raw system calls,
that does no more than the task asks for. A ratio above 1 means that ours is ahead, for costs too. Take the ratios, not the
absolutes: machines are noisy, and so is a disk that is shared.

Unless said otherwise: ids drawn with exponent 1.05 over 10M ids (*zipf105*), scattered by a 64-bit mix, or uniformly; batches of
163,840 ids (8192 bags of 20); rows of 64 float32; one thread; at least 20 batches a round; reads with `O_DIRECT`. `k`, `M` and `G`
are powers of 1000.
"""
TIMES = "\N{MULTIPLICATION SIGN}"
INK, GRID = "#1f2328", "#d0d7de"
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#0f766e", "#6e7781")


def table(rows: dict[str, Row], section: dict[str, str]) -> Iterator[str]:
    yield "| bench | what | ours | of the limit | against |"
    yield "| --- | --- | --- | --- | --- |"
    for name, what in section.items():
        if (row := rows.get(name)) is None:
            continue
        ours = f"{quantity(row['value'])} {row['unit']} [{quantity(row['low'])} .. {quantity(row['high'])}]"
        limit = f"{ratio(row, row['limit']['value']):.2f}" if row["limit"] else ""
        rivals = ", ".join(f"{ratio(row, rival['value']):.2f} {TIMES} {rival['what']}" for rival in row["rivals"])
        yield f"| `{name}` | {what} | {ours} | {limit} | {rivals} |"


def limits(rows: dict[str, Row]) -> Iterator[str]:
    """What the limits are, each with the benches it is of."""
    of: dict[str, list[str]] = {}
    for row in rows.values():
        if row["limit"]:
            of.setdefault(row["limit"]["what"], []).append(f"`{row['name']}`")
    for what, names in of.items():
        yield f"- {what}: {', '.join(names)}."
    for row in rows.values():
        for what, why in (row.get("missing") or {}).items():
            yield f"- `{row['name']}` was measured without {what}: {why}."


def figures(rows: dict[str, Row]) -> Iterator[str]:
    """What else was seen in the runs."""
    for row in rows.values():
        seen = {name: value for name, value in (row.get("run") or {}).items() if isinstance(value, int | float | str)}
        if seen:
            text = ", ".join(f"{name} {shown(value)}" for name, value in seen.items())
            yield f"- `{row['name']}`: {text}."


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else quantity(value)


def settings(rows: dict[str, Row]) -> Iterator[str]:
    """The machines and versions, with the benches measured there where there are several."""
    of: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for row in rows.values():
        of.setdefault(tuple((row.get("setting") or {}).items()), []).append(f"`{row['name']}`")
    for setting, names in of.items():
        if setting:
            text = ", ".join(f"{name} {value}" for name, value in setting if value)
            yield f"- {text}" + (f": {', '.join(names)}." if len(of) > 1 else ".")


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
    """Ours as a ratio to its limit (dot) and its rivals (diamonds), a bench a line, on a logarithmic axis."""
    compared = [row for row in rows.values() if row["limit"] or row["rivals"]]
    left, right, top, step = 290, 40, 40, 22
    width, height = 900, top + step * len(compared) + 40
    low, high = 1 / 8, 32.0

    def at(value: float) -> float:
        place = math.log(min(max(value, low), high) / low) / math.log(high / low)
        return left + place * (width - left - right)

    parts = [text(left, 20, "ours / limit (dot) and ours / rival (diamond); right of 1 is ahead")]
    for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32):
        parts.append(line(at(tick), top - 8, at(tick), height - 30, INK if tick == 1 else GRID))
        parts.append(text(at(tick), height - 12, f"{tick:g}", "middle"))
    for number, row in enumerate(compared):
        y = top + step * number + step / 2
        parts.append(text(left - 10, y + 4, row["name"], "end"))
        for rival in row["rivals"]:
            x = at(ratio(row, rival["value"]))
            said = escape(f"{ratio(row, rival['value']):.2f} {TIMES} {rival['what']}")
            corners = f"{x},{y - 6} {x + 6},{y} {x},{y + 6} {x - 6},{y}"
            parts.append(f'<polygon points="{corners}" fill="{COLOURS[1]}"><title>{said}</title></polygon>')
        if row["limit"]:
            x = at(ratio(row, row["limit"]["value"]))
            said = escape(f"{ratio(row, row['limit']['value']):.2f} of {row['limit']['what']}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[0]}"><title>{said}</title></circle>')
    return svg(width, height, parts)


def growth_plot(rows: dict[str, Row]) -> str:
    """Rates by rows of the table, both axes logarithmic; a bar is the spread."""
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


def document(rows: dict[str, Row]) -> str:
    parts = [HEAD]
    parts.append("![Ratios to the limits and the rivals](benchmarks-ratios.svg)\n")
    for title, section in SECTIONS.items():
        if rows.keys() & section.keys():
            parts += [f"## {title}\n", *table(rows, section), ""]
    if others := {name: "" for name in rows if not any(name in section for section in SECTIONS.values())}:
        parts += ["## Others\n", *table(rows, others), ""]
    parts.append("## Growth\n\n![Rates by rows of the table](benchmarks-growth.svg)\n")
    ends = {"Limits": limits(rows), "Also seen in these runs": figures(rows), "Machine and versions": settings(rows)}
    for title, lines in ends.items():
        if listed := [*lines]:
            parts += [f"## {title}\n", *listed, ""]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=ROOT / "target" / "bench" / "results.json")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder to write to")
    options = parser.parse_args()
    found = {row["name"]: row for row in read(options.results)}
    if not found:
        parser.error(f"{options.results} has no results: run make bench first")
    ordered = [name for section in SECTIONS.values() for name in section if name in found]
    rows = {name: found[name] for name in [*ordered, *sorted(found.keys() - {*ordered})]}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "benchmarks.md").write_text(document(rows))
    (options.out / "benchmarks-ratios.svg").write_text(ratios_plot(rows))
    if any(len(rows.keys() & {*names.values()}) > 1 for names in GROWTH.values()):
        (options.out / "benchmarks-growth.svg").write_text(growth_plot(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
