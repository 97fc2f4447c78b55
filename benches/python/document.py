"""Merges target/bench/results.json into docs/benchmarks.json, and generates docs/benchmarks.md, plots, and README.md's figures from
it.

    python benches/python/document.py [RESULTS.json]

docs/benchmarks.json has the latest row of each bench, with its commit and day, so a run of some benches leaves the others
unchanged. Benches that were never measured are omitted from the tables, except those of a GPU.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from catalog import GPU, GROWTH, KEY, SECTIONS
from plots import growth_plot, ratios_plot
from results import Row, merge, quantity, ratio, read
from served import ROOT

HEAD = """# Benchmarks

Made by `make bench-docs` from what `make bench` measured, which `benchmarks.json` keeps; do not edit. `make bench
ONLY=<name>,<name>` measures some again. Each row says at which commit and on which day it was measured.

Every figure is the median of the rounds of one run, in brackets its least and greatest. In each round ours, the limit and the
rivals take turns on the same data, in the same state. The *limit* is a plain, well-written loop with prefetch, or raw system calls,
that does no more than the task asks for. A ratio above 1 means that ours is ahead, for costs too. Take the ratios, not the
absolutes: machines are noisy, and so is a disk that is shared.

Unless said otherwise: ids drawn with exponent 1.05 over 10M ids (*zipf105*), scattered by a 64-bit mix, or uniformly; batches of
163,840 ids (8192 bags of 20); rows of 64 float32; one thread; at least 20 batches a round; reads with `O_DIRECT`. `k`, `M` and `G`
are powers of 1000.
"""
ON_A_GPU = """`make bench-cuda` measures these where there is a CUDA device.
[gpu.md](gpu.md#predicted-cost-of-a-step) predicts them.
"""
# A row of the serving soak, and the plots that such a run writes next to results.json, by their names in docs/.
SOAK = "serving_soak_p99_ms"
OVER_TIME = {
    "benchmarks-serving.svg": "Times of requests while a trainer saves every 2 s",
    "benchmarks-serving-faults.svg": "Times of requests while the trainer, its files and the disk fail",
}
# Keys of the commit and day of a row's measurement in its setting.
WHEN = ("commit", "date")
# The markers in README.md that enclose the table.
BEGIN, END = "<!-- make bench-docs writes from here -->", "<!-- to here -->"
TIMES = "\N{MULTIPLICATION SIGN}"


def short(what: str) -> str:
    """Returns the name of a rival without its settings, which are listed separately."""
    return what.split(" (")[0]


def compared(row: Row) -> str:
    """Returns the columns of the limit and of the rivals."""
    limit = f"{ratio(row, row['limit']['value']):.2f}" if row["limit"] else ""
    names = [short(rival["what"]) for rival in row["rivals"]]
    shown = [rival["what"] if names.count(name) > 1 else name for rival, name in zip(row["rivals"], names, strict=True)]
    rivals = ", ".join(
        f"{ratio(row, rival['value']):.2f} {TIMES} {name}" for rival, name in zip(row["rivals"], shown, strict=True)
    )
    return f"{limit} | {rivals}"


def table(rows: dict[str, Row], section: dict[str, str], *, lists_unmeasured: bool = False) -> Iterator[str]:
    yield "| bench | what | ours | of the limit | against | measured |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, what in section.items():
        if (row := rows.get(name)) is None:
            if lists_unmeasured:
                yield f"| `{name}` | {what} | not measured | | | |"
            continue
        ours = f"{quantity(row['value'])} {row['unit']} [{quantity(row['low'])} .. {quantity(row['high'])}]"
        setting = row.get("setting") or {}
        when = " ".join(setting[name] for name in WHEN if setting.get(name))
        yield f"| `{name}` | {what} | {ours} | {compared(row)} | {when} |"


def key_figures(rows: dict[str, Row]) -> Iterator[str]:
    """Yields README.md's table, and the setting of the measurements."""
    yield "| bench | what | ours | of the limit | against |"
    yield "| --- | --- | --- | --- | --- |"
    for name, what in KEY.items():
        if row := rows.get(name):
            yield f"| `{name}` | {what} | {quantity(row['value'])} {row['unit']} | {compared(row)} |"
    yield ""
    settings = [row["setting"] for name in KEY if (row := rows.get(name)) and row.get("setting")]
    machines = dict.fromkeys(f"{each['cpu']}, {each['cores']} cores, {each['memory']} of RAM" for each in settings)
    commits = dict.fromkeys(each.get("commit") or each.get("date", "") for each in settings)
    yield f"Measured on {'; '.join(machines)}, at {', '.join(commits)}."
    # A setting that the user adds to a row if the disk had an unusual state.
    for disk in dict.fromkeys(each["disk"] for each in settings if each.get("disk")):
        of = ", ".join(f"`{name}`" for name in KEY if ((rows.get(name) or {}).get("setting") or {}).get("disk") == disk)
        yield f"During {of} the disk was {disk}."


def with_key_figures(text: str, rows: dict[str, Row]) -> str:
    """Returns the text of README.md with its table replaced by the current one."""
    made = "\n".join([BEGIN, "", *key_figures(rows), "", END])
    text, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"README.md has no place for the figures: it needs {BEGIN!r} and, below, {END!r}")
    return text


def limits(rows: dict[str, Row]) -> Iterator[str]:
    """Yields the descriptions of the limits, each with its benches."""
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
    """Yields the additional figures of the runs."""
    for row in rows.values():
        seen = {name: value for name, value in (row.get("run") or {}).items() if isinstance(value, int | float | str)}
        if seen:
            text = ", ".join(f"{name} {shown(value)}" for name, value in seen.items())
            yield f"- `{row['name']}`: {text}."


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else quantity(value)


def rivals(rows: dict[str, Row]) -> Iterator[str]:
    """Yields the settings of the rivals that have any, each with its benches."""
    of: dict[str, list[str]] = {}
    for row in rows.values():
        for rival in row["rivals"]:
            if rival["what"] != short(rival["what"]):
                of.setdefault(rival["what"], []).append(f"`{row['name']}`")
    for what, names in of.items():
        yield f"- {what}: {', '.join(names)}."


def settings(rows: dict[str, Row]) -> Iterator[str]:
    """Yields the machines and versions, with the benches that were measured on each if there are several."""
    of: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for row in rows.values():
        where = {name: value for name, value in (row.get("setting") or {}).items() if name not in WHEN}
        of.setdefault(tuple(where.items()), []).append(f"`{row['name']}`")
    for setting, names in of.items():
        if setting:
            text = ", ".join(f"{name} {value}" for name, value in setting if value)
            yield f"- {text}" + (f": {', '.join(names)}." if len(of) > 1 else ".")


def grows(rows: dict[str, Row]) -> bool:
    """True if any path was measured at two sizes."""
    return any(len(rows.keys() & {*names.values()}) > 1 for names in GROWTH.values())


def document(rows: dict[str, Row], over_time: Sequence[str]) -> str:
    """Returns the page. `over_time` contains the existing plots of `OVER_TIME`, by their names in docs/."""
    parts = [HEAD]
    parts.append("![Ratios to the limits and the rivals](benchmarks-ratios.svg)\n")
    for title, section in SECTIONS.items():
        if rows.keys() & section.keys():
            parts += [f"## {title}\n", *table(rows, section), ""]
    parts += ["## On a GPU\n", ON_A_GPU, *table(rows, GPU, lists_unmeasured=True), ""]
    if others := {name: "" for name in rows if not any(name in section for section in (*SECTIONS.values(), GPU))}:
        parts += ["## Others\n", *table(rows, others), ""]
    if grows(rows):
        parts.append("## Growth\n\n![Rates by rows of the table](benchmarks-growth.svg)\n")
    if over_time:
        parts.append("## Servers over time\n")
        parts += [f"![{OVER_TIME[plot]}]({plot})\n" for plot in over_time]
    ends = {
        "Limits": limits(rows),
        "Rivals": rivals(rows),
        "Also seen in these runs": figures(rows),
        "Machine and versions": settings(rows),
    }
    for title, lines in ends.items():
        if listed := [*lines]:
            parts += [f"## {title}\n", *listed, ""]
    return "\n".join(parts)


def keep_plots(measured: Sequence[Row], folder: Path, docs: Path) -> list[str]:
    """Copies the plots of a measured soak. Returns the names of all existing plots."""
    if any(row["name"] == SOAK for row in measured):
        for plot in OVER_TIME:
            made = folder / plot.replace("benchmarks-serving", "serving_soak").replace("-", "_")
            if made.exists():
                (docs / plot).write_text(made.read_text(encoding="utf-8"), encoding="utf-8")
    return [plot for plot in OVER_TIME if (docs / plot).exists()]


def day(row: Row) -> str:
    """Returns the day of a row's measurement in sortable form; before any day if unknown."""
    return str((row.get("setting") or {}).get("date", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=ROOT / "target" / "bench" / "results.json")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree whose README.md and docs/ are written")
    options = parser.parse_args()
    docs: Path = options.root / "docs"
    kept = docs / "benchmarks.json"
    before = {row["name"]: row for row in read(kept)}
    measured = [row for row in read(options.results) if day(row) >= day(before.get(row["name"], {}))]
    if not measured and not before:
        parser.error(f"{options.results} has no results: run make bench first")
    docs.mkdir(exist_ok=True)
    merge(kept, *measured)
    found = {row["name"]: row for row in read(kept)}
    ordered = [name for section in (*SECTIONS.values(), GPU) for name in section if name in found]
    rows = {name: found[name] for name in [*ordered, *sorted(found.keys() - {*ordered})]}
    readme: Path = options.root / "README.md"
    readme.write_text(with_key_figures(readme.read_text(), rows))
    plots = keep_plots(measured, options.results.parent, docs)
    (docs / "benchmarks.md").write_text(document(rows, plots))
    (docs / "benchmarks-ratios.svg").write_text(ratios_plot(rows))
    if grows(rows):
        (docs / "benchmarks-growth.svg").write_text(growth_plot(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
