"""Colors of plots, for light and dark backgrounds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DARK", "LIGHT", "ColorTheme"]


@dataclass(frozen=True)
class ColorTheme:
    """Colors as "#rrggbb": background, text, secondary text and axes, grid, and lines.

    The lines are distinguishable with common color vision deficiencies. The contrast to the background is at least 3:1 for lines
    and 4.5:1 for text (WCAG 2.2).
    """

    background: str
    foreground: str
    muted: str
    grid: str
    lines: tuple[str, ...]


LIGHT = ColorTheme("#ffffff", "#1b1f24", "#57606a", "#d8dee4", ("#7a4fd0", "#e0610f", "#009e73", "#111111", "#8c2d7f"))
DARK = ColorTheme("#15191e", "#e6e9ed", "#a3abb5", "#353c45", ("#7d8cff", "#e8743b", "#3ddc97", "#f2f2f2", "#f0e442"))
