"""Hooks that mkdocs calls while it builds the site.

They add the pages that are not stored in docs/, and rewrite links that are valid in the repository to be valid on the site.
"""

import base64
import json
import posixpath
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).resolve().parents[2]
# Files of the repository that are pages of the site, by where they are in either.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
}
# Where the site's readers find the other files of the repository.
SOURCES = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["repository"] + "/blob/main/"
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
# A link that is named by its file, as those of the README are.
_NAMED_BY_FILE = re.compile(r"\[(?:docs/)?[\w.-]+\.md\]\(([^)\s#]+\.md)\)")
_HIDDEN = re.compile(r"<!--.*?-->\n*", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of README.md and other files at the root, of the examples, and of the public names."""
    made: dict[str, str] = {to: (ROOT / source).read_text() for source, to in PAGES.items()}
    made["license.md"] = f"# License\n\n```text\n{made['license.md']}```\n"
    scripts = sorted((ROOT / "examples").glob("*.py"))
    for path in scripts:
        made[f"examples/{path.stem}.md"] = f"# {path.name}\n\n````python\n{path.read_text()}````\n"
    notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
    made |= {f"examples/{path.stem}.md": _page_of(path) for path in notebooks}
    listed = "".join(f"- [{path.name}]({path.stem}.md): {_about(path)}\n" for path in [*scripts, *notebooks])
    made["examples/index.md"] = f"# Examples\n\nThey are in `examples/`, and tests run them.\n\n{listed}"
    made["api/index.md"] = reference.index()
    for key in reference.REFERENCE:
        made[f"api/{key}.md"] = reference.page(key)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    # The pages of examples are reached from their list.
    for path in scripts:
        files.get_file_from_path(f"examples/{path.stem}.md").inclusion = InclusionLevel.NOT_IN_NAV
    return files


def _about(path: Path) -> str:
    """The first sentence of a script or a notebook."""
    if path.suffix == ".ipynb":
        return _page_of(path).split("\n\n")[1].replace("\n", " ").strip()
    return path.read_text().split('"""')[1].split("\n\n")[0].replace("\n", " ").strip()


def _page_of(notebook: Path) -> str:
    """A notebook as a page: its texts, its code, and what that gave."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [_shown(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """The output of a cell as a block, or its picture."""
    if "text" in output:
        return f"```text\n{''.join(output['text'])}```"
    picture = base64.b64encode("".join(output["data"]["image/svg+xml"]).encode()).decode()
    return f'<p><img alt="what the cell above shows" src="data:image/svg+xml;base64,{picture}"></p>'


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Take out the comments that only tests read, and turn links to files of the repository into links to pages or sources."""
    del config, files
    here = page.file.src_uri
    source = next((name for name, to in PAGES.items() if to == here), f"docs/{here}")
    if here.startswith(("api/", "examples/")):
        return markdown
    folder = posixpath.dirname(source)

    def titled(link: re.Match[str]) -> str:
        title = (ROOT / folder / link[1]).read_text().split("\n")[0].removeprefix("# ")
        return f"[{title}]({link[1]})"

    text = _NAMED_BY_FILE.sub(titled, _HIDDEN.sub("", markdown))
    return _LINK.sub(_turned(source, posixpath.dirname(here)), text)


def _turned(source: str, page_folder: str) -> Callable[[re.Match[str]], str]:
    """A link in the file `source` of the repository as one of a page in `page_folder` of the site."""
    folder = posixpath.dirname(source)

    def turned(link: re.Match[str]) -> str:
        if ":" in link[1]:
            return link[0]
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if target in PAGES:
            target = PAGES[target]
        elif target.startswith("examples/"):
            target = target.removesuffix(".py").removesuffix(".ipynb") + ".md"
        elif target.startswith("docs/") and not target.endswith(".py"):
            target = target.removeprefix("docs/")
        elif (ROOT / target).is_file() and not target.startswith("../"):
            return SOURCES + target + (link[2] or "")
        else:
            raise ValueError(f"{source} links to {target}, which is neither a page nor a file of the repository")
        return posixpath.relpath(target, page_folder or ".") + (link[2] or "")

    return turned


_LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


def on_post_build(config: Any) -> None:
    """Hold that no page loads anything from elsewhere. (A link that a reader may follow loads nothing.)"""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        loaded = _LOADED.findall(path.read_text())
        if loaded:
            raise ValueError(f"{path} loads {', '.join(loaded)}: the site is to be read without a network")
