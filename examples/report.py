"""The report of the demo: a self-contained page with the setup, the checks, and the tiers' counters of a run."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from reporting import Checks, Course
from torchrec_embcache.exceptions import ConfigError
from torchrec_embcache.plotting import Line, Panel, curve_panels, read_panels, svg
from torchrec_embcache.sizing import BudgetAdvice, TableTraffic, advise

__all__ = ["Run", "write_report"]

CSS = """
:root { color-scheme: light dark; --background: #fff; --foreground: #1b1f24; --muted: #57606a; --grid: #d8dee4; }
@media (prefers-color-scheme: dark) {
  :root { --background: #000; --foreground: #e6e9ed; --muted: #a3abb5; --grid: #353c45; }
}
body { margin: 0; background: var(--background); color: var(--foreground); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: 1rem clamp(1rem, 3vw, 2rem) 3rem; }
h1 { font-size: clamp(1.4rem, 4vw, 2rem); line-height: 1.2; margin: 1rem 0 .5rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--grid); padding-top: 1.5rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p { max-width: 65ch; }
.verdict { font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure img { display: block; width: 100%; height: auto; }
figure { margin: 0; min-width: 0; border: 1px solid var(--grid); border-radius: .5rem; padding: .25rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 9.5rem), 1fr)); gap: 1rem; }
dl div { border: 1px solid var(--grid); border-radius: .5rem; padding: .5rem .75rem; }
dt { color: var(--muted); font-size: .875rem; }
dd { margin: 0; font-size: 1.05rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; border: 1px solid var(--grid); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .4rem .75rem; border-bottom: 1px solid var(--grid); vertical-align: top; }
.numbers td, .numbers th:not(:first-child) { text-align: right; white-space: nowrap; }
thead th { color: var(--muted); font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
"""


@dataclass(frozen=True)
class Run:
    """Data of the page.

    - `facts`: names and values of the setup.
    - `checks`: the comparisons.
    - `ours`, `plain`: the training over three tiers, and on plain TorchRec.
    - `auc`: AUC of both, on the later ratings.
    - `metrics`: the file of samples that `JsonlLogger` wrote during training.
    - `traffic`: the traffic of the tables.
    """

    facts: dict[str, str]
    checks: Checks
    ours: Course
    plain: Course
    auc: tuple[float, float]
    metrics: Path
    traffic: list[TableTraffic]


def write_report(run: Run, path: Path) -> None:
    """Writes the page. It loads nothing: plots and styles are inline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    title = "A DLRM on MovieLens-100K over three tiers"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>",
        *opening(run),
        "<h2>What was checked</h2>",
        *checked(run.checks),
        "<h2>Training</h2>",
        "<p>Both models begin with the same values and see the same batches.</p>",
        figures(training_panels(run)),
        "<h2>What the tiers did</h2>",
        "<p>Rates and waits are those between two samples of the counters. A tier is asked for the ids that none above it had.</p>",
        *tiers(run),
        "<h2>Sizing</h2>",
        *sizing(run.traffic),
        "</main>\n</body>\n</html>\n",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def opening(run: Run) -> Iterator[str]:
    failed, count = len(run.checks.failed), len(run.checks.found)
    verdict = f"All {count} checks agree." if not failed else f"{failed} of {count} checks FAILED."
    yield f'<p class="verdict">{verdict}</p>'
    yield (
        "<p>The same DLRM was trained on plain TorchRec, and on tables whose budgets are so small that device, host RAM and SSD "
        "all serve rows. Then it was saved, and loaded by two new processes.</p>"
    )
    figures_of = {
        "AUC over three tiers": f"{run.auc[0]:.5f}",
        "AUC of plain TorchRec": f"{run.auc[1]:.5f}",
        "last loss": f"{float(run.ours.losses[-1]):.4f}",
        "a step over three tiers": f"{run.ours.mean_ms:.1f} ms",
        "a step in RAM": f"{run.plain.mean_ms:.1f} ms",
    }
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in {**figures_of, **run.facts}.items()
    )
    yield f"<dl>{shown}</dl>"


def checked(checks: Checks) -> Iterator[str]:
    rows = [("ok" if agrees else "FAILED", what, said) for what, agrees, said in checks.found]
    yield grid("Checks", ("", "what", "figures"), rows)


def training_panels(run: Run) -> list[Panel]:
    steps = tuple(float(step) for step in range(1, len(run.ours.losses) + 1))
    ours, plain = (tuple(course.losses.tolist()) for course in (run.ours, run.plain))
    apart = tuple(abs(a - b) for a, b in zip(ours, plain, strict=True))
    times = [tuple(1e3 * seconds for seconds in course.times) for course in (run.ours, run.plain)]
    step, three, ram = "training step", "three tiers", "plain TorchRec"
    return [
        Panel(
            "Loss of each step",
            step,
            "loss",
            (Line(three, steps, ours), Line(ram, steps, plain, 1, 3)),
            y_from_zero=False,
        ),
        Panel("Difference of the losses", step, "difference", (Line("three tiers - plain", steps, apart),)),
        Panel(
            "Time of each step", step, "ms", (Line(three, steps, times[0]), Line(ram, steps, times[1], 1)), y_log=True
        ),
    ]


def tiers(run: Run) -> Iterator[str]:
    """Yields the plots of each table. Their titles start with its name."""
    panels = read_panels([run.metrics])
    for table in dict.fromkeys(panel.title.split(": ")[0] for panel in panels):
        yield f"<h3>Table {escape(table)}</h3>"
        yield figures([panel for panel in panels if panel.title.startswith(f"{table}: ")])


def sizing(traffic: Sequence[TableTraffic]) -> Iterator[str]:
    """Yields the miss ratio curves, and the division of the current budgets by `advise`."""
    yield (
        "<p>The miss ratio is the share of lookups whose row is not in RAM, in which device tier and host tier count together. It "
        "was measured on a sample of the ids while the tables trained.</p>"
    )
    times, advice = advised(traffic)
    yield figures(curve_panels(traffic, advice))
    yield f"<h3>What advise says of {times} the bytes that the tables have now</h3>"
    rows = [
        (
            table.name,
            f"{table.rows:,}",
            *(f"{size / 1024:,.0f}" for size in (table.table_bytes, now.device_bytes, table.device_bytes)),
            *(f"{size / 1024:,.0f}" for size in (now.host_bytes, table.host_bytes)),
            f"{table.rows_in_ram / table.rows:.1%}",
            f"{table.miss_ratio:.1%}",
            f"{table.reads_per_batch:.1f}",
        )
        for table, now in zip(advice.tables.values(), traffic, strict=True)
    ]
    heads = "table,rows,all rows KiB,device KiB now,advised,host KiB now,advised,rows in RAM,misses,SSD reads a batch"
    yield grid("Advice", heads.split(","), rows, css="numbers")
    yield f"<p>{escape(' '.join(advice.sentences()))}</p>"


def advised(traffic: Sequence[TableTraffic]) -> tuple[str, BudgetAdvice]:
    """Returns the advice for the current budgets. `advise` reserves space for several batches in each tier, for which these may be
    too small: in that case they are doubled until they suffice.
    """
    device, host, ssd = (
        sum(getattr(table, f"{tier}_bytes") for table in traffic) for tier in ("device", "host", "ssd")
    )
    times = 1
    while True:
        try:
            advice = advise(traffic, device=times * device, ram=times * host, ssd=times * ssd)
            return ("once" if times == 1 else f"{times} times"), advice
        except ConfigError:
            if times == 64:
                raise
            times *= 2


def figures(panels: Sequence[Panel]) -> str:
    return '<div class="figures">' + "\n".join(f"<figure>{picture(panel)}</figure>" for panel in panels) + "</div>"


def picture(panel: Panel) -> str:
    """Returns a plot as an image, in the colors that the reader's system asks for."""
    light, dark = (base64.b64encode(svg([panel], dark=dark).encode()).decode() for dark in (False, True))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="data:image/svg+xml;base64,{dark}">'
    image = f'<img alt="{escape(panel.about())}" src="data:image/svg+xml;base64,{light}">'
    return f"<picture>{source}{image}</picture>"


def grid(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], css: str = "") -> str:
    """Returns a table in a box that scrolls if the table is wider."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}"><table class="{css}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
