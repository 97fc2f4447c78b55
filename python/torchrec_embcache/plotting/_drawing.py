"""Drawing of panels with matplotlib, without `pyplot` and without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrec_embcache.exceptions import ConfigError, InputError, UnsupportedError

from ._panels import AxisUnit, Line, Panel, format_value

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "png", "svg"]

#: Size of a plot in inches. PNG has `_DPI` pixels per inch.
_SIZE = (6.4, 4.2)
_DPI = 100
#: Settings of matplotlib: a grid behind the lines, and SVG that is the same in each run and has its labels as text.
_SETTINGS = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "embcache",
}
#: A style of matplotlib whose lines are distinguishable with common color vision deficiencies.
_STYLE = "seaborn-v0_8-colorblind"
#: Line patterns: solid, and several kinds of dashes.
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (3, 1.5, 1, 1.5)), (0, (1.5, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
_MARKERS = "Ds^v"


def draw(panels: Sequence[Panel], *, dark: bool = False, columns: int = 2) -> Figure:
    """Draws the panels as a matplotlib figure with `columns` columns. The figure can be changed before it is saved.

    Raises:
        InputError: there is no panel.
        ConfigError: `columns` is not above 0.
        UnsupportedError: matplotlib is not installed.

    Examples:
        >>> from torchrec_embcache.plotting import Line, Panel, draw
        >>> figure = draw([Panel("loss", "step", "loss", (Line("trained", (0.0, 1.0), (0.75, 0.5)),))])
        >>> [axes.get_title() for axes in figure.axes]
        ['loss']
    """
    if not panels:
        raise InputError("there is no diagram to draw")
    if not columns > 0:
        raise ConfigError(f"columns={columns!r}: give a number above 0")
    with _settings(dark):
        from matplotlib.figure import Figure

        columns = min(columns, len(panels))
        rows = math.ceil(len(panels) / columns)
        figure = Figure((_SIZE[0] * columns, _SIZE[1] * rows), dpi=_DPI, layout="constrained")
        for number, panel in enumerate(panels, start=1):
            _draw_panel(figure.add_subplot(rows, columns, number), panel)
        return figure


def svg(panels: Sequence[Panel], *, dark: bool = False, columns: int = 2) -> str:
    """Returns the panels as the text of an SVG file. Labels are stored as text, which is searchable and accessible.

    Raises like `draw`.

    Examples:
        >>> from torchrec_embcache.plotting import Line, Panel, svg
        >>> svg([Panel("loss", "step", "loss", (Line("trained", (0.0, 1.0), (0.75, 0.5)),))])[:5]
        '<?xml'
    """
    about = " ".join(panel.about() for panel in panels)
    metadata = {"Date": None, "Creator": "embcache", "Description": about}
    return _saved(draw(panels, dark=dark, columns=columns), dark, "svg", metadata).decode()


def png(panels: Sequence[Panel], *, dark: bool = False, columns: int = 2) -> bytes:
    """Returns the panels as a PNG file, 640 x 420 pixels each."""
    return _saved(draw(panels, dark=dark, columns=columns), dark, "png", {"Software": "embcache"})


def _settings(dark: bool) -> AbstractContextManager[None]:
    """Returns a context with the settings of the pictures; matplotlib's own are restored after it."""
    try:
        from matplotlib import style
    except ImportError as missing:
        raise UnsupportedError('pictures need matplotlib: pip install "torchrec-embcache[plot]"') from missing
    return style.context([*(["dark_background"] if dark else []), _STYLE, _SETTINGS])


def _saved(figure: Figure, dark: bool, suffix: str, metadata: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    with _settings(dark):
        figure.savefig(file, format=suffix, metadata=metadata)
    return file.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    from matplotlib import rcParams

    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    colors = rcParams["axes.prop_cycle"].by_key()["color"]
    for line in panel.lines:
        # A line of one point is drawn as a dot.
        dot = "o" if sum(map(math.isfinite, line.y)) == 1 else None
        color = colors[line.color % len(colors)]
        axes.plot(line.x, line.y, color=color, linestyle=_dash_pattern(line, len(colors)), marker=dot)
    for mark in panel.marks:
        shape, color = _MARKERS[mark.shape % len(_MARKERS)], colors[mark.color % len(colors)]
        axes.plot([mark.x], [mark.y], shape, color=color, markersize=8, zorder=3, clip_on=False)
    for name, unit, is_log in (("x", panel.x_unit, panel.x_log), ("y", panel.y_unit, panel.y_log)):
        # A logarithmic axis needs a value above 0.
        is_log = is_log and any(value > 0 for line in panel.lines for value in getattr(line, name))
        _set_scale(axes, name, unit, is_log=is_log)
    if panel.y_from_zero and not panel.y_log:
        axes.set_ylim(bottom=0.0)
    _draw_legend(axes, panel, colors)


def _dash_pattern(line: Line, colors: int) -> Any:
    if line.dash < 0:
        return ":"
    # After the last color, the colors repeat with another pattern.
    return _DASHES[(line.dash + line.color // colors) % len(_DASHES)]


def _set_scale(axes: Axes, name: str, unit: AxisUnit, *, is_log: bool) -> None:
    """Sets the scale of the axis `name` and its tick labels."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axis = axes.xaxis if name == "x" else axes.yaxis
    if is_log:
        base = 2 if unit == "bytes" else 10
        axes.set(**{f"{name}scale": "log"})
        low, high = axis.get_view_interval()
        fine = (1.0, 2.0, 5.0) if base == 10 and high < 300 * low else (1.0,)
        axis.set_major_locator(LogLocator(base, fine, numticks=8) if high > 4 * low else MaxNLocator(5))
        axis.set_minor_locator(NullLocator())
    if unit != "number" or is_log:
        axis.set_major_formatter(lambda value, _place: format_value(value, unit))


def _draw_legend(axes: Axes, panel: Panel, colors: Sequence[Any]) -> None:
    """Draws the legend of colors, patterns and shapes below the plot, so that it covers nothing."""
    from matplotlib.lines import Line2D

    text = axes.title.get_color()
    handles: dict[str, Line2D] = {}
    for line in panel.lines:
        style: Any = "-" if line.table and line.color < len(colors) else _dash_pattern(line, len(colors))
        handles.setdefault(line.label, Line2D([], [], color=colors[line.color % len(colors)], linestyle=style))
    owners = {line.table: line.dash for line in reversed(panel.lines) if line.table}
    # More patterns could not be distinguished.
    for owner, dash in reversed(owners.items()) if len(owners) <= len(_DASHES) else ():
        handles.setdefault(owner, Line2D([], [], color=text, linestyle=_DASHES[dash % len(_DASHES)]))
    for mark in panel.marks:
        shape = _MARKERS[mark.shape % len(_MARKERS)]
        handles.setdefault(mark.label, Line2D([], [], marker=shape, linestyle="none", color=text))
    if handles and not (len(handles) == 1 and next(iter(handles)) in panel.title):
        columns = min(len(handles), max(1, 57 // (max(map(len, handles)) + 6)))
        axes.legend(
            handles.values(), handles, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, frameon=False
        )
