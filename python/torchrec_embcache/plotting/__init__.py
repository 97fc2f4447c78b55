"""Pictures of miss ratio curves, hit rates, bytes, reads and waits, as SVG, as PNG, or in a page.

    print(plotting.svg(plotting.read_panels(["traffic.json"])))

What a picture shows is decided apart from how it is drawn: a `Panel` has the numbers of one diagram. Drawing needs matplotlib:
`pip install "torchrec-embcache[plot]"`. It neither needs a display nor touches `matplotlib.pyplot`. `embcache plot` does the same
in a terminal.
"""

from .curves import curve_panels
from .drawing import draw, svg
from .history import history_panels
from .inline import inline_css, inline_svg
from .panels import Line, Mark, Panel
from .reading import read_panels

__all__ = [
    "Line",
    "Mark",
    "Panel",
    "curve_panels",
    "draw",
    "history_panels",
    "inline_css",
    "inline_svg",
    "read_panels",
    "svg",
]
