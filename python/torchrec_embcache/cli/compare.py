"""`diff`: compares two checkpoints row by row, in bounded memory."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.exceptions import MismatchError

from .checkpoints import OpenCheckpoint
from .report import EXIT_FOUND, CommandReport, ReportTable

__all__ = ["diff"]

#: Bytes of rows that are compared at a time.
_WINDOW_BYTES = 128 << 20
#: Fields that must be equal for rows to be comparable, and fields whose differences are only reported.
_SHAPE_FIELDS = ("dim", "total_num_buckets")
_SETTING_FIELDS = ("key", "optimizer", "step", "seed", "initializer", "oov_row", "missing_read", "precision")
_METADATA_FIELDS = ("count", "last_step", "score", "modified_epoch")
#: Possible results for the admission counts. All but the last are differences.
_ONLY = ("only in the first", "only in the second")
_DIFFER, _EQUAL = "differ", "equal"
#: Bytes per admission count during the comparison.
_COUNT_BYTES = 64


@dataclass
class TableDiff:
    """Numbers of rows and of pending ids by kind of difference; a row may have several kinds."""

    module: str
    table: str
    settings: list[str] = field(default_factory=list)
    rows_first: int = 0
    rows_second: int = 0
    only_first: int = 0
    only_second: int = 0
    weights: int = 0
    slots: int = 0
    metadata: int = 0
    max_weight_difference: float = 0.0
    ids: list[int] = field(default_factory=list)
    pending_first: int | None = None
    pending_second: int | None = None
    pending_only_first: int = 0
    pending_only_second: int = 0
    pending_counts: int = 0
    pending_ids: list[int] = field(default_factory=list)
    counts: str = ""

    @property
    def differs(self) -> bool:
        """True if anything differs, including settings and counts."""
        rows = self.only_first or self.only_second or self.weights or self.slots or self.metadata
        return bool(self.settings or rows or self.counts not in ("", _EQUAL))


def diff(
    first: str, second: str, show_ids: int = 0, ignore_metadata: bool = False, *, counters: bool = True
) -> CommandReport:
    """Compares two checkpoints: tables, settings and rows, bitwise. The exit status is 1 if they differ.

    The admission counts of pending ids are compared one by one: occurrences, clicks, and which of them are dropped next.

    Args:
        first: A directory of checkpoints, or one checkpoint in it.
        second: The other checkpoint.
        show_ids: Maximum number of ids to list per table, for rows and for admission counts that differ.
        ignore_metadata: If true, counts, steps, scores and epochs of rows may differ, and which counts are dropped next.
        counters: If false, admission counts may differ or exist in only one of the checkpoints.

    The weights of a serving checkpoint are compared as they are read. It has no slots, so the slots of the other are ignored.
    """
    one, other = OpenCheckpoint.open(first), OpenCheckpoint.open(second)
    tables = [{(entry["module"], entry["table"]): entry for entry in side.tables} for side in (one, other)]
    missing = [sorted(tables[0].keys() - tables[1].keys()), sorted(tables[1].keys() - tables[0].keys())]
    slotless = [side.name for side in (one, other) if side.is_for_serving]
    how = _DiffOptions(show_ids, ignore_metadata, counters, slots=not slotless)
    results = [
        _diff_table(one, other, tables[0][pair], tables[1][pair], how)
        for pair in sorted(tables[0].keys() & tables[1].keys())
    ]
    differs = any(missing) or any(result.differs for result in results)
    data = {
        "first": {"path": one.root, "checkpoint": one.name},
        "second": {"path": other.root, "checkpoint": other.name},
        "equal": not differs,
        "only_first": [list(pair) for pair in missing[0]],
        "only_second": [list(pair) for pair in missing[1]],
        "tables": [asdict(result) for result in results],
    }
    columns = ["only_first", "only_second", "weights", "slots", "metadata", "max_weight_difference"]
    if any(result.counts for result in results):
        columns += [
            "pending_first",
            "pending_second",
            "pending_only_first",
            "pending_only_second",
            "pending_counts",
            "counts",
        ]
    grid = ReportTable(
        f"{one.name} in {one.root} | {other.name} in {other.root}",
        ("module", "table", *(name.replace("_", " ") for name in columns), "settings"),
        [(result.module, result.table, *map(_cell(result), columns), ", ".join(result.settings)) for result in results],
    )
    lines = [f"only in the first: {module}/{table}" for module, table in missing[0]]
    lines += [f"only in the second: {module}/{table}" for module, table in missing[1]]
    lines += [f"{result.module}/{result.table}: ids {result.ids}" for result in results if result.ids]
    lines += [
        f"{result.module}/{result.table}: ids that wait for rows {result.pending_ids}"
        for result in results
        if result.pending_ids
    ]
    lines += [f"{name} is a serving checkpoint, which has no slots: slots are not compared" for name in slotless]
    lines.append("they differ" if differs else "equal")
    return CommandReport(data, [grid], lines, EXIT_FOUND if differs else 0)


def _cell(result: TableDiff) -> Callable[[str], object]:
    """Returns a function that formats a field: empty if it is None."""
    return lambda name: "" if getattr(result, name) is None else getattr(result, name)


@dataclass(frozen=True)
class _DiffOptions:
    """Options of a comparison."""

    show_ids: int
    ignore_metadata: bool
    counters: bool
    slots: bool


def _count_pending(side: OpenCheckpoint, table: dict[str, Any]) -> int | None:
    """Returns an upper bound of the number of pending ids of a table; None if counts were not saved."""
    found = [
        entry.get("pending")
        for link in side.chain
        for entry in link["tables"]
        if (entry["spec"]["module"], entry["spec"]["table"]) == (table["module"], table["table"])
    ]
    return None if found[0] is None else sum(pending or 0 for pending in found)


def _record_counts(result: TableDiff, has_counts: tuple[bool, bool]) -> None:
    """Records the differences of the counts. `has_counts` states which of the two checkpoints has counts."""
    if not has_counts[0]:
        result.pending_first = None
    if not has_counts[1]:
        result.pending_second = None
    if all(has_counts):
        differ = result.pending_only_first or result.pending_only_second or result.pending_counts
        result.counts = _DIFFER if differ else _EQUAL
    elif any(has_counts):
        result.counts = _ONLY[has_counts.index(True)]
        # The other checkpoint has no counts to compare with.
        result.pending_only_first = result.pending_only_second = 0
        result.pending_ids = []


def _diff_table(
    one: OpenCheckpoint, other: OpenCheckpoint, first: dict[str, Any], second: dict[str, Any], options: _DiffOptions
) -> TableDiff:
    for name in (*_SHAPE_FIELDS, "optimizer"):
        values = (first[name], second[name]) if name != "optimizer" else (first[name]["name"], second[name]["name"])
        if values[0] != values[1]:
            raise MismatchError(
                f"table {first['table']!r} of module {first['module']!r} has {name} {values[0]} in the first and {values[1]} in "
                "the second: their rows cannot be compared"
            )
    result = TableDiff(first["module"], first["table"], rows_first=first["rows"], rows_second=second["rows"])
    result.settings = [name for name in _SETTING_FIELDS if first.get(name) != second.get(name)]
    pending = [_count_pending(side, first) if options.counters else None for side in (one, other)]
    has = (pending[0] is not None, pending[1] is not None)
    # Weights, at most two slots, id and metadata.
    row_bytes = first["dim"] * 4 * 3 + 64
    rows, ids = first["rows"] + second["rows"], sum(each or 0 for each in pending)
    windows = max(1, (rows * row_bytes + ids * _COUNT_BYTES) // _WINDOW_BYTES)
    step = max(1, first["total_num_buckets"] // windows)
    result.pending_first = result.pending_second = 0
    for begin in range(0, first["total_num_buckets"], step):
        end = min(begin + step, first["total_num_buckets"])
        sides = [
            _RowWindow.read(side, table, begin, end, counts=counts)
            for side, table, counts in zip((one, other), (first, second), has, strict=True)
        ]
        _diff_rows(result, sides[0], sides[1], options)
        _diff_counts(result, sides[0].counts, sides[1].counts, options)
    _record_counts(result, has)
    return result


@dataclass(frozen=True)
class _PendingCounts:
    """Pending ids, ascending, and their columns."""

    ids: NDArray[np.int64]
    columns: NDArray[np.int64]  # [n, 3]: occurrences, clicks, whether it is forgotten next

    @classmethod
    def from_blocks(cls, blocks: list[_native.CountedIds]) -> "_PendingCounts":
        if not blocks:
            return cls(np.empty(0, np.int64), np.empty((0, 3), np.int64))
        ids = np.concatenate([block.ids for block in blocks])
        order = np.argsort(ids)
        columns = [
            np.stack([block.shows, block.clicks, block.is_older], axis=1, dtype=np.int64, casting="unsafe")
            for block in blocks
        ]
        return cls(ids[order], np.concatenate(columns)[order])


@dataclass(frozen=True)
class _RowWindow:
    """Rows sorted by id."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    slots: NDArray[np.float32]
    metadata: list[NDArray[Any]]
    counts: _PendingCounts

    @classmethod
    def read(cls, side: OpenCheckpoint, table: dict[str, Any], begin: int, end: int, *, counts: bool) -> "_RowWindow":
        blocks: list[_native.RowBlock] = []
        pending: list[_native.CountedIds] = []
        take = pending.append if counts else None
        side.rows.read(table["module"], table["table"], begin, end, blocks.append, counts=take)
        dim, waiting = table["dim"], _PendingCounts.from_blocks(pending)
        if not blocks:
            nothing = np.empty((0, dim), np.float32)
            return cls(np.empty(0, np.int64), nothing, nothing, [np.empty(0)] * len(_METADATA_FIELDS), waiting)
        ids = np.concatenate([block.ids for block in blocks])
        vectors = np.concatenate([block.vectors for block in blocks])
        scalars = np.concatenate([block.scalars for block in blocks])
        order = np.argsort(ids, kind="stable")
        metadata = [
            np.concatenate([getattr(block.metadata, name) for block in blocks])[order] for name in _METADATA_FIELDS
        ]
        slots = np.concatenate([vectors[:, dim:], scalars[:, None]], axis=1)
        return cls(ids[order], vectors[order, :dim], slots[order], metadata, waiting)


def _diff_counts(result: TableDiff, one: _PendingCounts, other: _PendingCounts, options: _DiffOptions) -> None:
    common, left, right = np.intersect1d(one.ids, other.ids, assume_unique=True, return_indices=True)
    only = np.setxor1d(one.ids, other.ids, assume_unique=True)
    assert result.pending_first is not None, "they are counted here"
    assert result.pending_second is not None, "they are counted here"
    result.pending_first += len(one.ids)
    result.pending_second += len(other.ids)
    result.pending_only_first += len(one.ids) - len(common)
    result.pending_only_second += len(other.ids) - len(common)
    compared = slice(0, 2 if options.ignore_metadata else 3)
    differ = np.any(one.columns[left, compared] != other.columns[right, compared], axis=1)
    result.pending_counts += int(differ.sum())
    room = options.show_ids - len(result.pending_ids)
    if room > 0:
        result.pending_ids += [int(each) for each in np.concatenate([only, common[differ]])[:room]]


def _diff_rows(result: TableDiff, one: _RowWindow, other: _RowWindow, options: _DiffOptions) -> None:
    common, left, right = np.intersect1d(one.ids, other.ids, assume_unique=True, return_indices=True)
    only = np.setxor1d(one.ids, other.ids, assume_unique=True)
    result.only_first += len(one.ids) - len(common)
    result.only_second += len(other.ids) - len(common)
    weights = _rows_differ(one.weights[left], other.weights[right])
    slots = _rows_differ(one.slots[left], other.slots[right]) if options.slots else np.zeros(len(common), bool)
    metadata = np.zeros(len(common), bool)
    if not options.ignore_metadata:
        # A serving checkpoint has no `modified_epoch`, which is the last field.
        compared = len(_METADATA_FIELDS) - (0 if options.slots else 1)
        for mine, theirs in zip(one.metadata[:compared], other.metadata[:compared], strict=True):
            metadata |= _rows_differ(mine[left, None], theirs[right, None])
    result.weights += int(weights.sum())
    result.slots += int(slots.sum())
    result.metadata += int(metadata.sum())
    if weights.any():
        apart = np.abs(one.weights[left][weights] - other.weights[right][weights])
        result.max_weight_difference = max(result.max_weight_difference, float(np.nanmax(apart, initial=0.0)))
    room = options.show_ids - len(result.ids)
    if room > 0:
        ids = np.concatenate([only, common[weights | slots | metadata]])
        result.ids += [int(row) for row in ids[:room]]


def _rows_differ(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns True for the rows that are not bitwise identical."""
    bits = [np.ascontiguousarray(side).view(f"u{side.dtype.itemsize}") for side in (one, other)]
    differ: NDArray[np.bool_] = np.any(bits[0] != bits[1], axis=1)
    return differ
