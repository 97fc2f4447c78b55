"""Lists in the docs have the names of the code: benches, metrics, loggers, optimizers, policies, commands, linked functions."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sources import ROOT, name_of, report

if TYPE_CHECKING:
    from torchrec_embcache.monitoring import Metric

DOCS = ROOT / "docs"


def benches() -> Iterator[str]:
    """Benches with rivals, with growth and in the README are in the catalog, once (benches/python/catalog.py)."""
    sys.path.insert(0, str(ROOT / "benches" / "python"))
    from catalog import GROWTH, KEY, SECTIONS
    from checkpoint_rivals import CHECKPOINT_RIVALS
    from rivals import RIVALS
    from stores import STORES

    names = [name for section in SECTIONS.values() for name in section]
    yield from sorted(f"{name}: twice in the catalog" for name in {*names} if names.count(name) > 1)
    grown = {name for sizes in GROWTH.values() for name in sizes.values()}
    used = {*KEY, *grown, *RIVALS, *CHECKPOINT_RIVALS, *STORES}
    yield from sorted(f"{name}: not in the catalog" for name in used - {*names})


def metric_table(metrics: "Sequence[Metric]") -> str:
    """The list of metrics as a page has it."""
    kinds = {"text": "info"}
    rows = [
        f"| `{metric.name}`{f' (label `{metric.label}`)' if metric.label else ''} | {kinds.get(metric.kind, metric.kind)} "
        f"| `{metric.path}` | {metric.about} |"
        for metric in metrics
    ]
    return "\n".join(["| metric | kind | path | what it says |", "| --- | --- | --- | --- |", *rows])


def metric_pages() -> Iterator[str]:
    """The pages docs/metrics.md and docs/serving-operations.md list the metrics of the code, and queries name existing ones."""
    from torchrec_embcache.monitoring import METRICS, SERVING_METRICS

    for name, metrics in (("metrics.md", METRICS), ("serving-operations.md", SERVING_METRICS)):
        pattern = r"<!-- [^\n]*compares this list[^\n]* -->\n\n(.*?)\n\n<!-- to here -->"
        if re.findall(pattern, (DOCS / name).read_text(), re.DOTALL) != [metric_table(metrics)]:
            yield f"docs/{name}: the list has to be\n{metric_table(metrics)}"
    histograms = {metric.name for metric in METRICS if metric.kind == "histogram"}
    known = {metric.name for metric in METRICS}
    known |= {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    page = (DOCS / "monitoring.md").read_text() + (DOCS / "metrics.md").read_text()
    (queries,) = re.findall(r"```promql\n(.*?)```", page, re.DOTALL)
    unknown = set(re.findall(r"\bembcache_\w+", queries)) - known
    yield from sorted(f"docs/monitoring.md: no metric {name}" for name in unknown)


def logger_names() -> Iterator[str]:
    """The loggers that docs/monitoring.md and docs/metrics.md name are those of the core."""
    modules = set(re.findall(r'Module::new\("([a-z_]+)"\)', (ROOT / "rust/pyext/src/logging.rs").read_text()))
    page = (DOCS / "monitoring.md").read_text() + (DOCS / "metrics.md").read_text()
    yield from sorted(set(re.findall(r"torchrec_embcache\.core\.([a-z_]+)", page)) - modules)


# The names in prose that differ from those in the code.
PROSE = {
    "rowwise Adagrad": "RowWiseAdagrad",
    "partial rowwise Adam": "PartialRowWiseAdam",
    "S3-FIFO": "s3fifo",
    "LRU": "lru",
    "LFU": "lfu",
}
# Where the docs list names: page, the list (the group of the pattern), and a name in it (by default, names between commas).
COMMAND_LISTS = (
    ("docs/cli.md", r"^\| command \|.*?\n\n", r"\n\| `embcache ([a-z]+)"),
    ("CHANGELOG.md", r"^- `embcache`: (.*?)\.$", r"`(\w+)`"),
)
OPTIMIZER_LISTS = (
    ("README.md", r"^\| optimizers \| ([^.|]*)", None),
    ("CHANGELOG.md", r"^- (SGD, [^.]*), fused in the backward", None),
    ("docs/comparison.md", r"^\| optimizers \| ([^|]*) \|", None),
    ("docs/configuration.md", r"^\| \| `lr` .*?\n\n", r"\n\| `optimizers\.(\w+)`"),
    ("docs/design.md", r"^\| optimizer \| update .*?---[^\n]*(.*?)\n\n", r"\n\| ([^|]*) \|"),
)
POLICY_LISTS = (
    ("README.md", r"^\| policies \| ([^|]*) select", None),
    ("docs/comparison.md", r"^\| cache policies \| ([^|]*) \|", None),
    ("docs/configuration.md", r"^\| `policy` \|[^|]*\|([^|]*)", r'`"(\w+)"`'),
    ("docs/design.md", r"^## Policies\n.*?^## ", r"\n- `(\w+)`"),
)


def code_lists() -> Iterator[str]:
    """The lists of optimizers, cache policies and commands in the docs have the names of the code."""
    from typing import get_args

    from torchrec_embcache.cli import _parser
    from torchrec_embcache.config import CachePolicy
    from torchrec_embcache.optimizers import BY_KIND

    (commands,) = (action.choices for action in _parser()._actions if isinstance(action.choices, dict))  # noqa: SLF001 - argparse has no other way
    for names, lists in (
        ({kind.__name__ for kind in BY_KIND.values()}, OPTIMIZER_LISTS),
        ({*get_args(CachePolicy)}, POLICY_LISTS),
        ({*commands}, COMMAND_LISTS),
    ):
        for page, pattern, item in lists:
            found = re.search(pattern, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
            text = "" if found is None else found[found.re.groups]
            listed = re.findall(item, text) if item else re.split(r",\s(?:and\s)?|\sand\s", text)
            if sorted(PROSE.get(name, name) for name in listed) != sorted(names):
                yield f"{page}: a list has {', '.join(listed) or 'no names'}, and the code has {', '.join(sorted(names))}"


def page_paths() -> list[Path]:
    """The pages of the docs, README.md and CONTRIBUTING.md."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def defines(source: str, name: str) -> bool:
    """True if a Rust or Python source defines `name`, a part of a path, or implements it."""
    word = rf"{re.escape(name)}\b"
    item = rf"\b(?:fn|struct|enum|trait|class|def) {word}|^{word}[^\n=]*=|\bimpl\b[^{{;]*?\b{word}[^{{;]*\{{"
    return re.search(item, source, re.MULTILINE) is not None


def source_links() -> Iterator[str]:
    """A link named `Type::function`, `Class.method` or `file.rs` leads to the source that defines it."""
    for page in page_paths():
        for text, target in re.findall(r"\[([^]\n]*`)\]\(([^)\s#:]+\.(?:rs|py))\)", page.read_text()):
            path = page.parent / target
            for name in re.findall(r"`([^`]+)`", text):
                if not path.is_file():
                    yield f"{name_of(page)}: no file {target}"
                elif name.endswith((".rs", ".py")):
                    if not path.resolve().as_posix().endswith("/" + name):
                        yield f"{name_of(page)}: {name} leads to {target}"
                elif not all(defines(path.read_text(), part) for part in re.split(r"::|\.", name)):
                    yield f"{name_of(page)}: {target} does not define {name}"


RULES = (benches, metric_pages, logger_names, code_lists, source_links)

if __name__ == "__main__":
    sys.exit(report(*RULES) > 0)
