"""The colours of pictures, on a light and on a dark ground."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DARK", "LIGHT", "ColorTheme"]


@dataclass(frozen=True)
class ColorTheme:
    """Colours as "#rrggbb": of the ground, of text, of secondary text and axes, of grids, and of lines.

    People who see two of three primary colours tell the lines apart, and every colour of a line stands out from its ground by a
    contrast of 3 to 1, text by 4.5 to 1 (WCAG 2.2).
    """

    background: str
    foreground: str
    muted: str
    grid: str
    lines: tuple[str, ...]


LIGHT = ColorTheme("#ffffff", "#1b1f24", "#57606a", "#d8dee4", ("#7a4fd0", "#e0610f", "#009e73", "#111111", "#8c2d7f"))
DARK = ColorTheme("#15191e", "#e6e9ed", "#a3abb5", "#353c45", ("#7d8cff", "#e8743b", "#3ddc97", "#f2f2f2", "#f0e442"))
