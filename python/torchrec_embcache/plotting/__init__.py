"""Plots of miss ratio curves, hit rates, bytes, reads and waits, as SVG or PNG.

    print(plotting.svg(plotting.read_panels(["traffic.json"])))

Data and drawing are separate: a `Panel` contains the data of one plot. Drawing requires matplotlib: `pip install
"torchrec-embcache[plot]"`. It requires no display and does not use `matplotlib.pyplot`. `embcache plot` does the same in a
terminal.
"""

from ._curves import curve_panels
from ._drawing import draw, svg
from ._history import history_panels
from ._panels import Line, Mark, Panel
from ._reading import read_panels

__all__ = [
    "Line",
    "Mark",
    "Panel",
    "curve_panels",
    "draw",
    "history_panels",
    "read_panels",
    "svg",
]
