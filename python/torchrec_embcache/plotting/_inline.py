"""Inline plots for HTML pages, in the colors of the page."""

from __future__ import annotations

import re
from html import escape

from torchrec_embcache.exceptions import InputError

from ._colors import DARK, LIGHT, ColorTheme
from ._drawing import build_figure, figure_to_svg
from ._panels import Panel

__all__ = ["inline_css", "inline_svg"]

#: Size of a plot in inches: small enough that its text is readable on a phone.
_SIZE = (4.5, 3.5)


def inline_svg(panel: Panel, name: str) -> str:
    """Returns a panel as an `<svg>` element for an HTML page, with the width of its container.

    It is an image with alternative text (`role="img"`, `aria-label`). Its colors are those of `inline_css()`.

    Args:
        panel: the panel to draw.
        name: a unique name within the page, of letters, digits and "-". It is the prefix of the identifiers in the element.

    Raises `InputError` for any other `name`, and like `draw`.

    Examples:
        >>> from torchrec_embcache.plotting import Line, Panel, inline_css, inline_svg
        >>> loss = Panel("loss", "step", "loss", (Line("trained", (0.0, 1.0), (0.75, 0.5)),))
        >>> page = f"<!doctype html><title>A run</title><style>{inline_css()}</style>{inline_svg(loss, 'loss')}"
        >>> 'aria-label="loss (step: 0 to 1). trained: 0.75 at first, 0.5 at last."' in page
        True
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
        raise InputError(f"name={name!r}: give letters, digits and '-', a letter first")
    text = figure_to_svg(build_figure([panel], LIGHT, 1, _SIZE), "")
    whole = text[text.index("<svg") :].rstrip()
    head, _, body = whole.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None, "matplotlib writes it"
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    # A style inside the element would apply to the entire page.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', body)
    body = re.sub(r'(url\(|href=")#', rf"\1#{name}-", body).replace("xlink:href", "href")
    for variable, color in _css_variables(LIGHT).items():
        body = re.sub(re.escape(color), f"var({variable})", body, flags=re.IGNORECASE)
    body = re.sub(r"<(path|use|rect|g)\b([^<>]*?)/>", r"<\1\2></\1>", body)
    label = escape(panel.about(), quote=True)
    return f'<svg class="embcache-plot" role="img" aria-label="{label}" {view[0]}>{body}'


def inline_css() -> str:
    """Returns the style sheet for `inline_svg`: its colors for the light and dark modes of the reader's system.

    The colors are variables, `--plot-background`, `--plot-foreground`, `--plot-muted`, `--plot-grid`, `--plot-line-0` and so on,
    which a page may use too.

    For example `f"<style>{inline_css()}</style>"`; see `inline_svg`.

    Examples:
        >>> from torchrec_embcache.plotting import inline_css
        >>> "prefers-color-scheme: dark" in inline_css()
        True
    """
    light, dark = (
        " ".join(f"{name}: {color};" for name, color in _css_variables(theme).items()) for theme in (LIGHT, DARK)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        ".embcache-plot { display: block; width: 100%; height: auto; }\n"
        ".embcache-plot * { stroke-linecap: butt; stroke-linejoin: round; }\n"
        ".embcache-plot text { font-family: system-ui, sans-serif !important; }\n"
    )


def _css_variables(theme: ColorTheme) -> dict[str, str]:
    named = {f"--plot-{name}": getattr(theme, name) for name in ("background", "foreground", "muted", "grid")}
    return named | {f"--plot-line-{number}": color for number, color in enumerate(theme.lines)}
