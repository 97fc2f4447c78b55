"""The code of the pages runs and prints the output that they show. Code that cannot run states the reason."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from documents import DATA, PAGES, ROOT, Block, Reader, all_blocks, blocks_of, commands
from torchrec_embcache import exceptions

BLOCKS = all_blocks()
# How many blocks of a page cannot run, for the reason that the page gives in a comment. One more is a choice to be made here.
NOT_RUN = Counter(
    {
        "README.md": 1,
        "docs/backup.md": 1,
        "docs/convert.md": 2,
        "docs/gpu.md": 1,
        "docs/monitoring.md": 2,
        "docs/troubleshooting.md": 1,
    }
)


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks])
def test_the_code_of_a_page_runs_and_gives_what_it_says(page: str, tmp_path: Path, monkeypatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    Reader(tmp_path).read(BLOCKS[page])


@pytest.mark.parametrize(
    ("number", "end", "steps"),
    [(0, "Saver().save(", 'model.module[0].tables["item"].step()'), (1, "bag.close()", "bag.table.step()")],
)
def test_a_program_of_the_readme_that_is_run_again_goes_on(number, end, steps, tmp_path: Path, monkeypatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    program = [block for block in BLOCKS["README.md"] if block.language == "python"][number]
    assert program.text.count(end) == 1
    asks = replace(program, text=program.text.replace(end, f"print('step', {steps})\n{end}"))
    for run in (1, 2, 3):
        Reader(tmp_path).read([asks, Block("README.md", 0, "text", f"...step {run}\n")])


def test_blocks_that_do_not_run_are_counted_and_say_why() -> None:
    marked = [block for blocks in BLOCKS.values() for block in blocks if block.not_run is not None]
    assert Counter(block.page for block in marked) == NOT_RUN, [f"{block}: {block.not_run}" for block in marked]
    assert all(len(block.not_run or "") > 20 for block in marked)


def test_every_block_says_what_it_is() -> None:
    """Only the pages of the design draw: a block without a language is a drawing, or a listing of a folder."""
    unknown = [
        f"{block} is {block.language or 'without a language'}"
        for page, blocks in BLOCKS.items()
        for block in blocks
        if block.language not in {"python", "bash", "promql", "text", "diff", *DATA}
        and (block.not_run is None or not block.language)
        and not (block.language == "" and page.startswith("docs/design"))
    ]
    assert not unknown


def test_code_fits_beside_the_side_bars_of_the_site() -> None:
    wide = [
        f"{block}: {line}"
        for blocks in BLOCKS.values()
        for block in blocks
        if block.language
        for line in block.text.splitlines()
        if len(line) > 96
    ]
    assert not wide


def test_a_text_stands_below_what_prints_it() -> None:
    alone = [
        str(block)
        for blocks in BLOCKS.values()
        for before, block in zip([None, *blocks], blocks, strict=False)
        if block.language == "text"
        and not (before is not None and before.language in {"python", "bash"} and before.not_run is None)
    ]
    assert not alone


def sections(page: str) -> dict[str, str]:
    """The text below each heading of the third level, by heading."""
    parts = re.split(r"^### (.*)$", PAGES[page].read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", exceptions.__all__)
def test_every_error_section_shows_a_message_of_real_code(name: str) -> None:
    page = "docs/troubleshooting.md" if name.endswith("Warning") else "docs/errors.md"
    assert name in sections(page)
    shown = [
        block
        for before, block in itertools.pairwise(blocks_of(page, sections(page)[name]))
        if before.language == "python" and before.not_run is None and block.language == "text"
    ]
    # The base is never raised itself.
    assert any(block.text.startswith(f"{name}: ") for block in shown) or name == "EmbCacheError"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    dead = []
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(#[^)\s]*)?\)", path.read_text()):
        if ":" in target:
            continue
        to = (path.parent / target).resolve() if target else path
        if not to.is_file() or (anchor and anchor[1:] not in anchors(to.read_text())):
            dead.append(target + anchor)
    assert not dead


def test_commands_of_make_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        words[1]
        for blocks in BLOCKS.values()
        for block in blocks
        if block.language == "bash"
        for words in commands(block.text)
        if words[0] == "make"
    }
    assert {"demo", "test"} <= named <= targets
    for page in PAGES.values():
        assert set(re.findall(r"`make ([a-z-]+)", page.read_text())) <= targets, page


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "gives\n1"),
        ("```python\nprint(1)\n```\n```text\nConfigError: it is wrong\n```\n", "gives no ConfigError"),
        (
            "```python\nfrom torchrec_embcache import TierBudgets\nTierBudgets(host_bytes=0)\n```\n```text\nConfigError: it\n```\n",
            "its page says\nConfigError: it",
        ),
        ("```python\nprint(name_of_nothing)\n```\n", "name_of_nothing"),
        ("<!-- not run: it is not Python at all -->\n```python\nprint(\n```\n", "never closed"),
        ("```bash\nrm -rf nothing\n```\n", "cannot be run"),
        ("```bash\nembcache inspect nothing\n```\n", "nothing"),
        ("```diff\n-a = EmbeddingBagCollection(tables=b)\n+a = EmbCacheBags(tables=b)\n```\n", "no EmbCacheBags"),
        ("```diff\n+a = TierBudgets(hosts=1)\n```\n", "hosts=1"),
        ("```json\n{a: 1}\n```\n", "double quotes"),
    ],
)
def test_a_page_that_says_what_is_not_so_is_found(blocks: str, complaint: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, NameError, SyntaxError, ValueError)) as found:
        Reader(tmp_path).read(blocks_of("page.md", blocks))
    assert complaint in str(found.value)


def test_a_comment_before_a_block_belongs_to_that_block_alone() -> None:
    page = "<!-- setup\na = 1\n-->\n```python\nprint(a)\n```\n\n```python\na\n```\n"
    page += "<!-- not run: why -->\n\n    ```bash\n    x\n    ```\n"
    first, second, third = blocks_of("page.md", page)
    assert (first.setup, first.not_run, second.setup, second.not_run) == ("a = 1\n", None, "", None)
    assert third == Block("page.md", 13, "bash", "x\n", not_run="why")
