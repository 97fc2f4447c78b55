"""`embcache advise`: budgets for tables with measured or assumed traffic."""

import argparse

from torchrec_embcache.config import bytes_text
from torchrec_embcache.exceptions import ConfigError
from torchrec_embcache.sizing import BudgetAdvice, TableTraffic, advise, read_traffic

from .report import AddCommand, CommandReport, ReportTable

__all__ = ["add_advise", "assumed_table"]

_TABLE_KEYS = "name, rows, dim, ids, zipf and optimizer"


def add_advise(command: AddCommand) -> None:
    """Adds the command to the parser."""
    made = command("advise", "divide budgets between tables and tiers, so that batches wait least for the SSD", _advise)
    made.add_argument("traffic", nargs="*", help="what write_traffic wrote: a file for each rank")
    made.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="name=item,rows=1e9,dim=64,ids=65536",
        help="a table whose traffic is assumed: also zipf=1.05 (the exponent) and optimizer=rowwise_adagrad. `ids` are those of a "
        "batch of all ranks, repetitions included",
    )
    made.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks that share the tables of --table")
    made.add_argument("--ram", required=True, help="bytes of RAM of a rank, such as 64GiB")
    made.add_argument("--ssd", default="0", help="bytes of SSD of a rank, such as 1TiB")
    made.add_argument("--device", default="0", help="bytes of the device of a rank")
    made.add_argument(
        "--batches-in-flight", type=int, default=2, metavar="N", help="batches that hold their rows at once (2)"
    )


def _advise(args: argparse.Namespace) -> CommandReport:
    if bool(args.traffic) == bool(args.table):
        raise ConfigError("give files of traffic, or tables by --table: one of both")
    if args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks} is out of range: give 1 or more")
    of_ranks = [(path, read_traffic(path)) for path in args.traffic]
    if args.table:
        title = "one rank" if args.ranks == 1 else f"each of {args.ranks} ranks"
        of_ranks = [(title, [assumed_table(text, args.ranks) for text in args.table])]
    budget = {"ram": args.ram, "ssd": args.ssd, "device": args.device, "batches_in_flight": args.batches_in_flight}
    advices = [(title, advise(traffic, **budget)) for title, traffic in of_ranks]
    return CommandReport(
        {title: advice.as_dict() for title, advice in advices},
        [_advice_table(title, advice) for title, advice in advices],
        [sentence for _, advice in advices for sentence in advice.sentences()],
    )


def _advice_table(title: str, advice: BudgetAdvice) -> ReportTable:
    rows = [
        (
            table.name,
            table.rows,
            bytes_text(table.table_bytes),
            bytes_text(table.device_bytes),
            bytes_text(table.host_bytes),
            bytes_text(table.ssd_bytes),
            f"{table.rows_in_ram / table.rows:.1%}",
            f"{table.reads_per_batch:,.1f}",
        )
        for table in advice.tables.values()
    ]
    columns = ("table", "rows", "all rows", "device", "host", "ssd", "in RAM", "reads a batch")
    return ReportTable(title, columns, rows)


def assumed_table(text: str, ranks: int = 1) -> TableTraffic:
    """Parses a table option and returns one rank's shard. Raises `ConfigError`, which names the invalid field."""
    fields = dict(field.partition("=")[::2] for field in text.split(","))
    unknown = sorted(fields.keys() - {"name", "rows", "dim", "ids", "zipf", "optimizer"})
    missing = [field for field in ("name", "rows", "dim", "ids") if not fields.get(field)]
    if unknown or missing:
        wrong = f"{unknown[0]!r} is not known" if unknown else f"{missing[0]!r} is missing"
        raise ConfigError(
            f"--table {text}: {wrong}: give {_TABLE_KEYS}, as in name=item,rows=1e9,dim=64,ids=65536,zipf=1.05"
        )
    try:
        rows, dim, ids = (int(float(fields[field])) for field in ("rows", "dim", "ids"))
        exponent = float(fields.get("zipf", "1.05"))
    except (ValueError, OverflowError) as cause:
        raise ConfigError(f"--table {text}: rows, dim, ids and zipf are numbers: {cause}") from cause
    return TableTraffic.assumed(
        fields["name"],
        rows=max(rows // ranks, 1),
        dim=dim,
        ids_per_batch=max(ids // ranks, 1),
        exponent=exponent,
        optimizer=fields.get("optimizer", "rowwise_adagrad"),
    )
