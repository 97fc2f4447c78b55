"""What a picture shows: diagrams with their numbers, which nothing has drawn yet."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torchrec_embcache.config import bytes_text

__all__ = ["AxisUnit", "Line", "Mark", "Panel", "format_value"]

#: What the numbers of an axis are: shares of 1, bytes, or others, whose unit the label says.
AxisUnit = Literal["share", "bytes", "number"]


@dataclass(frozen=True)
class Line:
    """One line of a diagram.

    - `label`: what it is, such as "host".
    - `x`, `y`: its n points. A `y` that is NaN is a gap.
    - `color`: the number of its colour. Lines of one colour belong together.
    - `dash`: the number of its pattern; 0 is solid.
    - `table`: whose it is, where several have such a line: a rank or a file.

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
        """Its label, and whose it is."""
        return f"{self.label}, {self.table}" if self.table else self.label


@dataclass(frozen=True)
class Mark:
    """A point of a diagram that matters, such as a budget on a curve.

    - `label`: what it is, such as "budget of now".
    - `table`: the title of its line.
    - `x`, `y`: where it is.
    - `color`: the number of its colour, as that of its line.
    - `shape`: the number of its shape. Marks of one label have one shape.

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
    """One diagram.

    - `title`: what it shows.
    - `x_label`, `y_label`: its axes, with their units.
    - `lines`, `marks`: its numbers.
    - `x_unit`, `y_unit`: "share" (of 1, shown in percent), "bytes", or "number".
    - `x_log`, `y_log`: whether an axis is logarithmic. Numbers that are not above 0 are not on such an axis.
    - `y_from_zero`: whether another `y` axis begins at 0.

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
        """What it shows in a few sentences, for those who do not see it."""
        told = [f"{self.title} ({self.x_label}: {self._range()})."]
        for line in self.lines:
            there = [value for value in line.y if math.isfinite(value)]
            if there:
                first, last = (format_value(value, self.y_unit) for value in (there[0], there[-1]))
                told.append(f"{line.title}: {first} at first, {last} at last.")
        for mark in self.marks:
            at, of = format_value(mark.x, self.x_unit), format_value(mark.y, self.y_unit)
            told.append(f"{mark.label} of {mark.table}: {of} at {at}.")
        return " ".join(told)

    def _range(self) -> str:
        there = [value for line in self.lines for value in line.x if math.isfinite(value)]
        return (
            " to ".join(format_value(value, self.x_unit) for value in (min(there), max(there))) if there else "nothing"
        )

    def as_dict(self) -> dict[str, Any]:
        """Its numbers as JSON has them. A gap is null."""
        lines = [{**vars(line), "x": _to_json_values(line.x), "y": _to_json_values(line.y)} for line in self.lines]
        return {**vars(self), "lines": lines, "marks": [vars(mark) for mark in self.marks]}


def _to_json_values(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def format_value(value: float, unit: AxisUnit) -> str:
    """A number as a person reads it."""
    if unit == "share":
        return f"{100 * value:.3g}%"
    if unit == "bytes":
        return bytes_text(round(value))
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
