"""`embcache plot`: plots miss ratio curves, or the history of running tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_embcache._paths import check_path
from torchrec_embcache.exceptions import InputError

from .report import AddCommand, CommandReport

__all__ = ["add_plot"]

#: More plots in one image would be unreadable and slow to draw.
_MAX_PANELS = 72
_SUFFIXES = (".svg", ".png")


def add_plot(command: AddCommand) -> None:
    """Adds the command to the parser."""
    made = command("plot", "draw miss ratio curves, or hit rates, bytes, reads and waits over time", _plot)
    made.add_argument(
        "files", nargs="+", metavar="FILE", help="what sizing.write_traffic wrote, or a file of JsonlLogger; one a rank"
    )
    made.add_argument("-o", "--output", metavar="OUT.svg|OUT.png", help="the picture; it replaces a file of that name")
    made.add_argument("--dark", action="store_true", help="on a dark ground")
    made.add_argument(
        "--table", action="append", default=[], metavar="NAME", help="only this table; give it again for others"
    )
    made.add_argument(
        "--over", choices=["auto", "step", "time"], default="auto", help="auto: training steps, where they rise"
    )


def _plot(args: argparse.Namespace) -> CommandReport:
    from torchrec_embcache.plotting import read_panels

    if args.output is None and not args.json:
        raise InputError("-o is missing: give the name of the picture, or ask for its numbers by --json")
    if args.output is not None and not args.output.lower().endswith(_SUFFIXES):
        raise InputError(f"-o {args.output}: the picture is written as SVG or PNG: end its name with .svg or .png")
    output = None if args.output is None else Path(check_path("-o", args.output))
    panels = read_panels(args.files, over=args.over, tables=args.table)
    if len(panels) > _MAX_PANELS:
        raise InputError(
            f"{len(panels)} diagrams are too many for one picture: choose some tables by --table NAME, for {_MAX_PANELS} at most"
        )
    if output is not None:
        from torchrec_embcache.plotting._drawing import png, svg

        if args.output.lower().endswith(".svg"):
            data = svg(panels, dark=args.dark).encode()
        else:
            data = png(panels, dark=args.dark)
        output.write_bytes(data)
    found = {"output": args.output, "panels": [panel.as_dict() for panel in panels]}
    return CommandReport(found, lines=[f"{args.output}: {len(panels)} diagrams of {len(args.files)} files"])
