"""Drawing of panels with matplotlib, without `pyplot` and without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrec_embcache.exceptions import ConfigError, InputError, UnsupportedError

from ._colors import DARK, LIGHT, ColorTheme
from ._panels import AxisUnit, Line, Panel, format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["build_figure", "draw", "figure_to_svg", "png", "svg"]

#: Size of a plot in inches. PNG has `_DPI` pixels per inch.
_SIZE = (6.4, 4.2)
_DPI = 100
#: Value of `svg.hashsalt`, which makes the SVG deterministic.
_SVG_HASH_SALT = "embcache"
#: Line patterns: solid, and several kinds of dashes.
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (3, 1.5, 1, 1.5)), (0, (1.5, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
_DOTTED = (0, (1, 2))
_MARKERS = ("D", "s", "^", "v")
#: The legend lists at most this many ranks. More patterns could not be distinguished.
_MAX_LEGEND_LINES = len(_DASHES)


def draw(panels: Sequence[Panel], *, dark: bool = False, columns: int = 2) -> Figure:
    """Draws the panels as a matplotlib figure with `columns` columns. The figure can be changed before it is saved.

    Raises:
        InputError: there is no panel.
        ConfigError: `columns` is not above 0.
        UnsupportedError: matplotlib is not installed.

    Examples:
        >>> from torchrec_embcache.plotting import Line, Panel, draw
        >>> figure = draw([Panel("loss", "step", "loss", (Line("trained", (0.0, 1.0), (0.75, 0.5)),))])
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['loss']
    """
    return build_figure(panels, DARK if dark else LIGHT, columns, _SIZE)


def svg(panels: Sequence[Panel], *, dark: bool = False, columns: int = 2) -> str:
    """Returns the panels as the text of an SVG file. Labels are stored as text, which is searchable and accessible.

    Raises like `draw`.

    Examples:
        >>> from torchrec_embcache.plotting import Line, Panel, svg
        >>> svg([Panel("loss", "step", "loss", (Line("trained", (0.0, 1.0), (0.75, 0.5)),))])[:5]
        '<?xml'
    """
    return figure_to_svg(draw(panels, dark=dark, columns=columns), " ".join(panel.about() for panel in panels))


def png(panels: Sequence[Panel], *, dark: bool = False, columns: int = 2) -> bytes:
    """Returns the panels as a PNG file, 640 x 420 pixels each."""
    file = io.BytesIO()
    figure = draw(panels, dark=dark, columns=columns)
    figure.savefig(file, format="png", dpi=_DPI, facecolor=figure.get_facecolor(), metadata={"Software": "embcache"})
    return file.getvalue()


def figure_to_svg(figure: Figure, about: str) -> str:
    """Returns a figure as deterministic SVG. matplotlib's settings are restored."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": _SVG_HASH_SALT}):
        metadata = {"Date": None, "Creator": "embcache", "Description": about}
        figure.savefig(file, format="svg", facecolor=figure.get_facecolor(), metadata=metadata)
    return file.getvalue()


def build_figure(panels: Sequence[Panel], theme: ColorTheme, columns: int, size: tuple[float, float]) -> Figure:
    """Draws the panels as a figure, each `size` inches large."""
    if not panels:
        raise InputError("there is no diagram to draw")
    if not columns > 0:
        raise ConfigError(f"columns={columns!r}: give a number above 0")
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise UnsupportedError('pictures need matplotlib: pip install "torchrec-embcache[plot]"') from missing
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure((size[0] * columns, size[1] * rows), dpi=_DPI, facecolor=theme.background, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr,call-arg]
    for number, panel in enumerate(panels, start=1):
        _draw_panel(figure.add_subplot(rows, columns, number), panel, theme)
    return figure


def _draw_panel(axes: Axes, panel: Panel, theme: ColorTheme) -> None:
    axes.set_title(panel.title, color=theme.foreground, fontsize=11, loc="left", fontweight="bold", pad=10)
    axes.set_xlabel(panel.x_label, color=theme.foreground, fontsize=10)
    axes.set_ylabel(panel.y_label, color=theme.foreground, fontsize=10)
    axes.set_facecolor(theme.background)
    axes.grid(color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.muted, which="both", labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.muted)
    for line in panel.lines:
        axes.plot(
            line.x,
            line.y,
            color=theme.lines[line.color % len(theme.lines)],
            linestyle=_dash_pattern(line),
            linewidth=1.2 if line.dash < 0 else 1.8,
            # A line of one point is drawn as a dot.
            marker="o" if sum(map(math.isfinite, line.y)) == 1 else None,
        )
    for mark in panel.marks:
        color = theme.lines[mark.color % len(theme.lines)]
        axes.plot(
            *([mark.x], [mark.y]),
            marker=_MARKERS[mark.shape % len(_MARKERS)],
            markersize=8,
            color=color,
            markeredgecolor=theme.background,
            linestyle="none",
            zorder=3,
            clip_on=False,
        )
    for axis, unit, is_log in ((axes.xaxis, panel.x_unit, panel.x_log), (axes.yaxis, panel.y_unit, panel.y_log)):
        values = [value for line in panel.lines for value in (line.x if axis is axes.xaxis else line.y)]
        _set_scale(axis, unit, values, is_log=is_log, from_zero=panel.y_from_zero and axis is axes.yaxis)
    _draw_legend(axes, panel, theme)


def _dash_pattern(line: Line) -> Any:
    if line.dash < 0:
        return _DOTTED
    # After the last color, the colors repeat with another pattern.
    return _DASHES[(line.dash + line.color // len(LIGHT.lines)) % len(_DASHES)]


def _set_scale(axis: Axis, unit: AxisUnit, values: Sequence[float], *, is_log: bool, from_zero: bool) -> None:
    """Sets the scale of an axis, its limits, and its tick labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    set_ends = axis.axes.set_xlim if axis is axis.axes.xaxis else axis.axes.set_ylim
    there = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    if is_log and there:
        base = 2 if unit == "bytes" else 10
        low, high = _widen_log_range(min(there), max(there), base)
        set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
        set_scale("log", base=base)
        set_ends(low, high)
        decades = math.log(high / low, base)
        fine = (1.0, 2.0, 5.0) if base == 10 and decades < 2.5 else (1.0,)
        axis.set_major_locator(LogLocator(base=base, subs=fine, numticks=8))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        if axis is axis.axes.xaxis and there:
            margin = 0.03 * (max(there) - min(there) or 1.0)
            set_ends(min(there) - margin, max(there) + margin)
        elif from_zero:
            set_ends(0.0, 1.02 if unit == "share" else 1.08 * max([value for value in there if value > 0], default=1.0))
    if unit != "number" or is_log:
        axis.set_major_formatter(FuncFormatter(lambda value, _place: format_value(value, unit)))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:,.12g}"))


def _widen_log_range(low: float, high: float, base: int) -> tuple[float, float]:
    """Returns limits of a logarithmic axis with at least two ticks between them."""
    low, high = low / base**0.1, high * base**0.1
    while high / low < 4:
        low, high = low / 2**0.5, high * 2**0.5
    return low, high


def _draw_legend(axes: Axes, panel: Panel, theme: ColorTheme) -> None:
    """Draws the legend of colors, patterns and shapes below the plot, so that it covers nothing."""
    from matplotlib.lines import Line2D

    handles: dict[str, Line2D] = {}
    for line in panel.lines:
        color = theme.lines[line.color % len(theme.lines)]
        style: Any = "-" if line.table and line.color < len(theme.lines) else _dash_pattern(line)
        handles.setdefault(line.label, Line2D([], [], color=color, linestyle=style, linewidth=1.8))
    owners = list(dict.fromkeys(line.table for line in panel.lines if line.table))
    for line in panel.lines if len(owners) <= _MAX_LEGEND_LINES else ():
        if line.table:
            style = _DASHES[line.dash % len(_DASHES)]
            handles.setdefault(line.table, Line2D([], [], color=theme.muted, linestyle=style, linewidth=1.8))
    for mark in panel.marks:
        shape = _MARKERS[mark.shape % len(_MARKERS)]
        handles.setdefault(mark.label, Line2D([], [], marker=shape, linestyle="none", color=theme.muted, markersize=8))
    if not handles or (len(handles) == 1 and next(iter(handles)) in panel.title):
        return
    longest = max(map(len, handles))
    width = 9 * axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols  # type: ignore[union-attr]
    key = axes.legend(
        list(handles.values()),
        list(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=max(1, min(len(handles), int(width) // (longest + 6))),
        fontsize=9,
        frameon=False,
        handlelength=2.6,
    )
    for text in key.get_texts():
        text.set_color(theme.foreground)
