"""`embcache top`: shows the counters of running tables live in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import sleep

from torchrec_embcache.cli.report import CommandReport
from torchrec_embcache.exceptions import EmbCacheError, InputError, StorageError, UnsupportedError

from .frames import TopFrame, build_frame
from .sources import SampleSource, open_source

__all__ = ["DEFAULT_URL", "top"]

#: Metrics URL of a training on this machine, with the port used in the guide.
DEFAULT_URL = "http://127.0.0.1:9400/metrics"
# A pipe or a file has no width.
_MAX_WIDTH = 240  # characters


def top(names: Sequence[str], interval_s: float, *, once: bool, as_json: bool) -> CommandReport:
    """Shows frames of the sources `names` until Ctrl-C, or a single frame with `once` or `as_json`.

    A frame covers the `interval_s` seconds after the call, or, with 0 seconds, the time since the tables were opened. The samples
    of a file have the interval at which they were written.

    Raises `StorageError` if none of the sources can be read, `InputError` for wrong arguments, `UnsupportedError` without rich.
    """
    if not interval_s >= 0.0 or (interval_s == 0.0 and not (once or as_json)):
        raise InputError(f"--interval {interval_s}: give seconds above 0, or 0 with --once")
    sources = [open_source(one) for one in names or [DEFAULT_URL]]
    if as_json:
        return CommandReport(_read_single_frame(sources, interval_s).as_json())
    try:
        from rich.console import Console
    except ImportError as missing:
        raise UnsupportedError('tables need rich: pip install "torchrec-embcache[cli]", or ask for --json') from missing
    from .drawing import draw_frame

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _MAX_WIDTH)
    if once:
        console.print(draw_frame(_read_single_frame(sources, interval_s)))
    else:
        _run_live(sources, interval_s, console)
    return CommandReport({})


def _read_single_frame(sources: Sequence[SampleSource], interval_s: float) -> TopFrame:
    """Returns the frame of a call that shows one frame."""
    frame = read_frame(sources, since_opened=interval_s == 0.0)
    if interval_s > 0.0 and any(table.seconds == 0.0 for table in frame.tables):
        sleep(interval_s)
        frame = read_frame(sources)
    return frame


def _run_live(sources: Sequence[SampleSource], interval_s: float, console: object) -> None:
    from rich.console import Console
    from rich.live import Live

    from .drawing import draw_frame

    assert isinstance(console, Console)
    try:
        with Live(
            draw_frame(read_frame(sources)), console=console, screen=console.is_terminal, auto_refresh=False
        ) as live:
            while True:
                sleep(interval_s)
                live.update(draw_frame(_read_live_frame(sources)), refresh=True)
    except KeyboardInterrupt:
        return


def read_frame(sources: Sequence[SampleSource], *, since_opened: bool = False) -> TopFrame:
    """Returns the current frame: since the previous sample, or since the tables were opened.

    Raises `StorageError` if none of the sources can be read. Otherwise the frame lists unreadable sources.
    """
    readings, problems = [], []
    for source in sources:
        try:
            found = source.read()
            readings.append({key: (None, newest) for key, (_, newest) in found.items()} if since_opened else found)
        except UnsupportedError:
            raise
        except EmbCacheError as error:
            readings.append({})
            problems.append(error)
    if len(problems) == len(sources):
        raise problems[0] if len(problems) == 1 else StorageError("; ".join(map(str, problems)))
    return build_frame([source.name for source in sources], readings, [str(error) for error in problems])


def _read_live_frame(sources: Sequence[SampleSource]) -> TopFrame:
    """Like `read_frame`, for a live view: continues if no source can be read, because a training may restart."""
    try:
        return read_frame(sources)
    except StorageError as error:
        return build_frame([source.name for source in sources], [{} for _ in sources], [str(error)])
