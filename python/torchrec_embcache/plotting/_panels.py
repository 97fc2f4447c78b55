"""Data of plots, independent of drawing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torchrec_embcache.config import bytes_text

__all__ = ["AxisUnit", "Line", "Mark", "Panel", "format_value", "matches_table"]

#: Unit of an axis: fractions of 1, bytes, or other numbers, whose unit is in the label.
AxisUnit = Literal["share", "bytes", "number"]


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    - `label`: its label, such as "host".
    - `x`, `y`: its n points. A `y` that is NaN is a gap.
    - `color`: index of its color. Lines of one color belong together.
    - `dash`: index of its pattern; 0 is solid.
    - `table`: its owner if several have such a line: a rank or a file.

    Examples:
        >>> from torchrec_embcache.plotting import Line
        >>> Line("host", (0.0, 10.0), (0.5, 0.75), table="rank 1").title
        'host, rank 1'
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    color: int = 0
    dash: int = 0
    table: str = ""

    @property
    def title(self) -> str:
        """Its label and its owner."""
        return f"{self.label}, {self.table}" if self.table else self.label


@dataclass(frozen=True)
class Mark:
    """A highlighted point of a plot, such as a budget on a curve.

    - `label`: its label, such as "budget of now".
    - `table`: the title of its line.
    - `x`, `y`: its position.
    - `color`: index of its color, as for its line.
    - `shape`: index of its shape. Marks with the same label have the same shape.

    Examples:
        >>> from torchrec_embcache.plotting import Mark
        >>> Mark("budget of now", "item", x=0.1, y=0.25)
        Mark(label='budget of now', table='item', x=0.1, y=0.25, color=0, shape=0)
    """

    label: str
    table: str
    x: float
    y: float
    color: int = 0
    shape: int = 0


@dataclass(frozen=True)
class Panel:
    """Data of one plot.

    - `title`: its title.
    - `x_label`, `y_label`: its axes, with their units.
    - `lines`, `marks`: its data.
    - `x_unit`, `y_unit`: "share" (a fraction of 1, shown in percent), "bytes", or "number".
    - `x_log`, `y_log`: if true, the axis is logarithmic. It omits values that are not above 0.
    - `y_from_zero`: if true, a linear `y` axis starts at 0.

    Examples:
        >>> from torchrec_embcache.plotting import Line, Panel
        >>> panel = Panel("loss", "step", "loss", (Line("trained", (0.0, 1.0, 2.0), (0.75, 0.5, 0.25)),))
        >>> panel.about()
        'loss (step: 0 to 2). trained: 0.75 at first, 0.25 at last.'
        >>> panel.as_dict()["lines"][0]["y"]
        [0.75, 0.5, 0.25]
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    x_unit: AxisUnit = "number"
    y_unit: AxisUnit = "number"
    x_log: bool = False
    y_log: bool = False
    y_from_zero: bool = True

    def about(self) -> str:
        """Returns a description of the plot in a few sentences, as alternative text."""
        x = [value for line in self.lines for value in line.x if math.isfinite(value)]
        ends = " to ".join(format_value(end, self.x_unit) for end in (min(x), max(x))) if x else "nothing"
        told = [f"{self.title} ({self.x_label}: {ends})."]
        for line in self.lines:
            there = [value for value in line.y if math.isfinite(value)]
            if there:
                first, last = (format_value(value, self.y_unit) for value in (there[0], there[-1]))
                told.append(f"{line.title}: {first} at first, {last} at last.")
        for mark in self.marks:
            at, of = format_value(mark.x, self.x_unit), format_value(mark.y, self.y_unit)
            told.append(f"{mark.label} of {mark.table}: {of} at {at}.")
        return " ".join(told)

    def as_dict(self) -> dict[str, Any]:
        """Returns its data in a JSON-serializable form. A gap is null."""
        lines = [{**vars(line), "x": _to_json_values(line.x), "y": _to_json_values(line.y)} for line in self.lines]
        return {**vars(self), "lines": lines, "marks": [vars(mark) for mark in self.marks]}


def matches_table(title: str, tables: Collection[str]) -> bool:
    """True if the table "<module>/<table>" is among `tables`, which may omit the module. No `tables` stand for all."""
    return not tables or bool({title, title.rsplit("/", 1)[-1]} & set(tables))


def _to_json_values(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def format_value(value: float, unit: AxisUnit) -> str:
    """Formats a number for display."""
    if unit == "share":
        return f"{100 * value:.3g}%"
    if unit == "bytes":
        return bytes_text(round(value))
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
