"""`embcache`: inspects, verifies, compares, copies, merges, converts, reshards and indexes checkpoints; monitors, sizes and plots
tables.

`embcache --help` lists the commands.

Exit status: 0 success; 1 corruption (`verify`) or differences (`diff`) found; 2 wrong usage; 3 failure, with the reason on standard
error. `--json` prints complete output for programs, including errors.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import get_args

from torchrec_embcache import __version__
from torchrec_embcache._paths import PathChecks, default_checks, override_default_checks
from torchrec_embcache.exceptions import ConfigError, EmbCacheError

from .advise import add_advise
from .backup import add_backup
from .checkpoints import compact, inspect, reshard, verify
from .compare import diff
from .convert.command import convert
from .convert.layout import ConvertSettings
from .convert.layouts import LAYOUTS
from .convert.serving import PRECISIONS, check_serving_settings, convert_to_serving
from .index import build_index
from .plot import add_plot
from .report import EXIT_FAILED, AddCommand, CommandReport
from .top.command import DEFAULT_URL, top
from .why import why

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; `arguments` default to those of the command line. Returns the exit status."""
    given = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], CommandReport] = given.run
    try:
        with override_default_checks(given.path_checks):
            report = run(given)
        report.write(given.json)
        sys.stdout.flush()
        return report.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe. Without this Python would report the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (EmbCacheError, OSError) as error:
        if given.json:
            what = {"error": {"type": type(error).__name__, "message": str(error)}}
            sys.stdout.write(json.dumps(what, indent=2, sort_keys=True) + "\n")
        sys.stderr.write(f"embcache: {type(error).__name__}: {error}\n")
        return EXIT_FAILED


def _add_rewrite_commands(command: AddCommand, checkpoint: str) -> None:
    """Adds the commands that rewrite the rows of a checkpoint."""
    no_counters = "leave out the counts of ids that wait for rows, as for a checkpoint that only serves"
    made = command(
        "reshard",
        "write a checkpoint again, divided between another number of ranks",
        lambda a: reshard(a.source, a.target, a.world_size, counters=not a.no_counters),
    )
    made.add_argument("source", help=checkpoint)
    made.add_argument("target", help="another directory; made when missing")
    made.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks")
    made.add_argument("--no-counters", action="store_true", help=no_counters)

    made = command(
        "compact",
        "merge the newest checkpoint and all it builds on into a full one",
        lambda a: compact(a.path, a.keep, counters=not a.no_counters),
    )
    made.add_argument("path", help="a directory of checkpoints; a run that saves there continues from the merged one")
    made.add_argument("--keep", type=int, default=1, metavar="N", help="checkpoints that stay, the merged one included")
    made.add_argument("--no-counters", action="store_true", help=no_counters)


def _add_index(command: AddCommand, checkpoint: str) -> None:
    """Adds the command that prepares a checkpoint for serving."""
    made = command(
        "index",
        "make the index by which processes that serve a checkpoint find its rows; they make it themselves otherwise",
        lambda a: build_index(a.path, a.at),
    )
    made.add_argument("path", help=checkpoint)
    made.add_argument("--at", metavar="N", help="the number or the name of a checkpoint; by default the newest")


def _add_top(command: AddCommand) -> None:
    """Adds the command that monitors running tables."""
    made = command(
        "top",
        "show hit rates, bytes, reads, compaction and waits of running tables, live",
        lambda a: top(a.source, a.interval, once=a.once, as_json=a.json),
    )
    made.add_argument(
        "source",
        nargs="*",
        metavar="URL|FILE",
        help=f"a PrometheusExporter (http://HOST:PORT or HOST:PORT) or a file of JsonlLogger, one a rank; by default {DEFAULT_URL}",
    )
    made.add_argument("--once", action="store_true", help="print one frame and end; --json does so too")
    made.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds of a frame; 0 with --once: since the tables were opened",
    )


def _add_convert(command: AddCommand) -> None:
    made = command("convert", "tables from other layouts into a checkpoint, or out of one", _convert)
    made.add_argument("source", help="a checkpoint, or a directory in another layout")
    made.add_argument("target", help="a directory; made when missing")
    made.add_argument("--from", dest="from_layout", choices=["auto", "embcache", *LAYOUTS], default="auto")
    written = [name for name, layout in LAYOUTS.items() if layout.is_writable]
    made.add_argument("--to", dest="to_layout", choices=["embcache", *written, "serving"], default="embcache")
    made.add_argument("--precision", choices=PRECISIONS, help="how weights are stored; to serving, fp32 by default")
    made.add_argument(
        "--keep", type=int, metavar="N", help="checkpoints that stay in the target; to serving, 1 by default"
    )
    made.add_argument("--module", default="", help="path in the model of the module that has the tables")
    made.add_argument("--optimizer", help="whose slots the rows have; by default guessed from them")
    made.add_argument("--step", type=int, default=0, help="training steps so far (Adam corrects its bias by it)")
    made.add_argument(
        "--buckets", type=int, default=ConvertSettings.total_num_buckets, metavar="N", help="total_num_buckets"
    )
    made.add_argument(
        "--rename", action="append", default=[], type=_parse_pair, metavar="OLD=NEW", help="another name for a table"
    )
    made.add_argument("--skip", action="append", default=[], metavar="SLOT", help="leave out a slot")
    dcp = made.add_argument_group("torchrec-dcp")
    dcp.add_argument("--model-key", default="", metavar="KEY", help="where in the state the model's is, such as model")
    dcp.add_argument(
        "--optimizer-key", default="optim", metavar="KEY", help="where in the state the optimizer's is; to torchrec-dcp"
    )
    dcp.add_argument(
        "--rows",
        action="append",
        default=[],
        type=_parse_row_count,
        metavar="TABLE=N",
        help="num_embeddings of a table; to torchrec-dcp",
    )
    dcp.add_argument(
        "--sequence",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that is an EmbeddingCollection and no EmbeddingBagCollection; to torchrec-dcp",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="embcache",
        description="Look at checkpoints of tables, check, compare, merge, convert and divide them; watch, size and draw tables.",
        epilog="exit status: 0 done, 1 damage or differences found, 2 wrong usage, 3 it could not be done",
    )
    parser.add_argument("--version", action="version", version=f"embcache {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    checkpoint = "a directory of checkpoints (its newest is taken), or one checkpoint in it"

    def command(name: str, about: str, run: Callable[[argparse.Namespace], CommandReport]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=about)
        made.add_argument("--json", action="store_true", help="print JSON")
        made.add_argument(
            "--path-checks",
            choices=get_args(PathChecks),
            default=default_checks(),
            help="the rules for directories, as those of Saver; trusted: volumes that others may write to; by default basic",
        )
        made.set_defaults(run=run)
        return made

    made = command("inspect", "show the checkpoints of a directory and the tables of one", lambda a: inspect(a.path))
    made.add_argument("path", help=checkpoint)

    made = command("verify", "hold every byte of a checkpoint against its checksums", lambda a: verify(a.path))
    made.add_argument("path", help=checkpoint)

    made = command(
        "diff",
        "compare two checkpoints row by row",
        lambda a: diff(a.first, a.second, a.ids, a.ignore_metadata, counters=not a.no_counters),
    )
    made.add_argument("first", help=checkpoint)
    made.add_argument("second", help="the other")
    made.add_argument("--ids", type=int, default=0, metavar="N", help="list up to N ids that differ, for each table")
    made.add_argument("--ignore-metadata", action="store_true", help="counts, steps, scores and epochs may differ")
    made.add_argument("--no-counters", action="store_true", help="the counts of ids that wait for rows may differ")

    made = command(
        "why",
        "show when an id got its row, when and why the row left, and what the id is now",
        lambda a: why(a.checkpoint, a.table, a.id),
    )
    made.add_argument("checkpoint", help=checkpoint)
    made.add_argument("table", help="its name, or <module>/<name>")
    made.add_argument("id", type=_parse_row_id, help="a signed or unsigned 64-bit number; 0x... is hexadecimal")

    _add_rewrite_commands(command, checkpoint)
    add_backup(command, checkpoint)
    _add_index(command, checkpoint)
    for add in (add_advise, add_plot, _add_top, _add_convert):
        add(command)
    return parser


def _parse_pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def _parse_row_count(text: str) -> tuple[str, int]:
    name, number = _parse_pair(text)
    try:
        return name, int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TABLE=NUMBER") from None


def _parse_row_id(text: str) -> int:
    try:
        row_id = int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if not -(1 << 63) <= row_id < 1 << 64:
        raise argparse.ArgumentTypeError(f"{text} does not fit 64 bits")
    return row_id


def _convert(args: argparse.Namespace) -> CommandReport:
    settings = ConvertSettings(
        module=args.module,
        optimizer=args.optimizer,
        step=args.step,
        total_num_buckets=args.buckets,
        rename=dict(args.rename),
        skip=tuple(args.skip),
        model_key=args.model_key,
        optimizer_key=args.optimizer_key,
        rows=dict(args.rows),
        sequences=tuple(args.sequence),
    )
    if args.to_layout == "serving":
        check_serving_settings(settings, args.from_layout)
        return convert_to_serving(
            args.source, args.target, args.precision or "fp32", 1 if args.keep is None else args.keep
        )
    if args.precision is not None or args.keep is not None:
        raise ConfigError("--precision and --keep are of --to serving alone: leave them out")
    return convert(args.source, args.target, args.from_layout, args.to_layout, settings)
