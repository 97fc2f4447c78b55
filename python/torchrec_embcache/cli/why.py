"""`why`: shows the history of one id in a checkpoint and its base checkpoints."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache._buckets import buckets_of
from torchrec_embcache.exceptions import InputError, MismatchError

from .checkpoints import OpenCheckpoint
from .report import CommandReport, ReportTable
from .rules import describe_rule, table_sweeps

__all__ = ["why"]

_COLUMNS = (
    "checkpoint",
    "kind",
    "step",
    "is",
    "trained last",
    "occurrences",
    "score",
    "L2 norm",
    "since the one before",
)
#: Possible states of an id in a checkpoint.
_ROW, _PENDING, _NOTHING = "row", "pending", "nothing"
_STATE_TEXT = {_ROW: "has a row", _NOTHING: "no row, no count"}
#: Events that remove the previous row.
_REMOVED_EVENTS = ("swept", "tombstone")
_LINKED_NOTE = (
    "Every row of the rank that has the id was read, because a linked checkpoint does not lie in the order of buckets."
)


@dataclass(frozen=True)
class _HistoryEntry:
    """State of the id in one checkpoint. `row` and `count` include data inherited from the base checkpoints."""

    checkpoint: str
    kind: str
    step: int
    state: str
    row: dict[str, Any] | None
    count: dict[str, Any] | None
    has_row: bool  # in the checkpoint's own files
    has_tombstone: bool
    has_sweeps: bool
    sweeps: list[dict[str, Any]]  # the sweeps that match the row of the previous checkpoint


def why(path: str, table: str, row_id: int) -> CommandReport:
    """Shows when an id was inserted, when and why it was removed, and its present state, as recorded in a checkpoint and its
    parents.

    Args:
        path: A directory of checkpoints, whose latest is used, or one checkpoint in it.
        table: The table's name, or `<module>/<name>` if several modules have a table of this name.
        row_id: The id, as a signed or an unsigned 64-bit number.
    """
    opened = OpenCheckpoint.open(path)
    module, name = _find_table(opened, table)
    signed = row_id - (1 << 64) if row_id >= 1 << 63 else row_id
    (spec,) = (entry for entry in opened.tables if (entry["module"], entry["table"]) == (module, name))
    links = _read_history(opened, module, name, signed)
    events = [_history_events(link, links[at - 1] if at else None) for at, link in enumerate(links)]
    (bucket,) = buckets_of(np.array([signed]), spec["total_num_buckets"])
    data = {
        "path": opened.root,
        "checkpoint": opened.name,
        "module": module,
        "table": name,
        "id": signed,
        "bucket": int(bucket),
        "state": links[-1].state,
        "links": [
            asdict(link) | {"events": [vars(event) for event in said]} for link, said in zip(links, events, strict=True)
        ],
    }
    unsigned = f" ({signed + (1 << 64)} unsigned)" if signed < 0 else ""
    title = f"Id {signed}{unsigned} of table {name} ({module}), bucket {bucket}, in {opened.root}"
    rows = [_cells(link, said) for link, said in zip(links, events, strict=True)]
    lines = [_final_state_text(links, events)]
    if any(link.kind == "linked" for link in links):
        lines.append(_LINKED_NOTE)
    return CommandReport(data, [ReportTable(title, _COLUMNS, rows)], lines)


def _find_table(opened: OpenCheckpoint, name: str) -> tuple[str, str]:
    """Returns the module and name of the table that `name` refers to."""
    pairs = [(entry["module"], entry["table"]) for entry in opened.tables]
    found = [pair for pair in pairs if name in (pair[1], "/".join(pair))]
    there = ", ".join("/".join(pair) for pair in pairs)
    if not found:
        raise MismatchError(f"{opened.name} in {opened.root} has no table {name!r}; it has [{there}]")
    if len(found) > 1:
        raise InputError(f"several modules have a table {name!r}: give one of [{there}]")
    return found[0]


def _read_history(opened: OpenCheckpoint, module: str, table: str, row_id: int) -> list[_HistoryEntry]:
    """Returns the id's state in each checkpoint of the chain, oldest first."""
    links: list[_HistoryEntry] = []
    own_links = opened.rows.id_history(module, table, row_id)
    for manifest, own in reversed(list(zip(opened.chain, own_links, strict=True))):
        (spec,) = (
            entry["spec"]
            for entry in manifest["tables"]
            if (entry["spec"]["module"], entry["spec"]["table"]) == (module, table)
        )
        before, sweeps = links[-1].row if links else None, table_sweeps(manifest, module, table)
        row = None
        if own.has_row_now:
            row = before if own.row is None else _row_fields(own.row)
        links.append(
            _HistoryEntry(
                checkpoint=manifest["name"],
                kind=manifest["kind"],
                step=spec["step"],
                state=_ROW if own.has_row_now else _PENDING if own.count_now is not None else _NOTHING,
                row=row,
                count=None if own.count_now is None else _count_fields(own.count_now),
                has_row=own.row is not None,
                has_tombstone=own.has_tombstone,
                has_sweeps=bool(sweeps),
                sweeps=_matching_sweeps(own, sweeps),
            )
        )
    return links


def _row_fields(block: _native.RowBlock) -> dict[str, Any]:
    metadata = block.metadata
    return {
        "last_step": int(metadata.last_step[0]),
        "count": int(metadata.count[0]),
        "score": float(metadata.score[0]),
        "modified_epoch": int(metadata.modified_epoch[0]),
        "l2_norm": _norm(block.vectors[0]),
    }


def _norm(weights: NDArray[np.float32]) -> float:
    """Returns the L2 norm as sweeps compute it: in float64, summed in column order."""
    squares = weights.astype(np.float64) ** 2
    return float(np.sqrt(np.cumsum(squares)[-1]))


def _count_fields(pending: _native.CountedIds) -> dict[str, Any]:
    return {
        "shows": int(pending.shows[0]),
        "clicks": int(pending.clicks[0]),
        "is_older": bool(pending.is_older[0]),
    }


def _matching_sweeps(matches: _native.IdHistoryEntry, sweeps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the sweeps of a delta that removed the row, each with the part of its rule that matched."""
    rules = [json.loads(taken.rule) for taken in matches.sweeps]
    return [
        {"step": sweeps[taken.sweep]["step"], "rule": rule, "words": describe_rule(rule), "score": taken.score}
        for taken, rule in zip(matches.sweeps, rules, strict=True)
    ]


@dataclass(frozen=True)
class _IdEvent:
    """An event of the id between two checkpoints. `event` is a fixed name, for programs."""

    event: str
    text: str


def _history_events(link: _HistoryEntry, before: _HistoryEntry | None) -> list[_IdEvent]:
    """Returns the events of the id since the previous checkpoint."""
    if before is None:
        return _first_events(link)
    between = f"after step {before.step} and by step {link.step}"
    events = _removal_events(link, before, between)
    if link.has_row:
        assert link.row is not None, "its own files have it"
        if before.state != _ROW or any(event.event in _REMOVED_EVENTS for event in events):
            events.append(_IdEvent("inserted", f"it got its row {between}"))
        elif not events:
            trained = f"trained last at step {link.row['last_step']}"
            events.append(_IdEvent("modified", f"its row was modified; {trained}"))
    elif link.state != _ROW:
        events += _count_events(link, before, between)
    return events


def _first_events(link: _HistoryEntry) -> list[_IdEvent]:
    """Returns the events of the oldest checkpoint, which has no predecessor."""
    if link.state == _ROW:
        return [_IdEvent("inserted", f"it got its row by step {link.step}; nothing here tells more of that")]
    return [_IdEvent("counted", f"it was counted by step {link.step}")] if link.state == _PENDING else []


def _removal_events(link: _HistoryEntry, before: _HistoryEntry, between: str) -> list[_IdEvent]:
    """Returns the event that removed the row of the previous checkpoint, or a row inserted since; empty if none."""
    if link.has_tombstone and not link.sweeps:
        reasons = ["removed by hand", "dropped because the table was full"]
        if link.has_sweeps:
            reasons.append("trained or imported since the checkpoint before and then taken by a sweep")
        which = "its row" if before.state == _ROW else "a row that it had meanwhile"
        text = f"a tombstone says that {which} left {between}: it was {', or '.join(reasons)}"
        return [_IdEvent("tombstone", text)]
    if before.row is None or not link.sweeps:
        return []
    if link.has_tombstone or link.row is None or link.row["count"] < before.row["count"]:
        return [_IdEvent("swept", _sweep_text(taken, listed=link.has_tombstone)) for taken in link.sweeps]
    taken = link.sweeps[0]
    text = (
        f"its row was modified; trained last at step {link.row['last_step']}. A sweep by step {taken['step']} takes the row as the "
        f"checkpoint before has it ({taken['words']}): the row was trained before that, or it left and came back"
    )
    return [_IdEvent("modified or swept", text)]


def _sweep_text(sweeps: dict[str, Any], *, listed: bool) -> str:
    """Describes a removal by a sweep. `listed`: a tombstone contains the id too."""
    score = "" if sweeps["score"] is None else f"; its score was {_format_score(sweeps['score'])} by then"
    earlier = "; it has a tombstone too, so it may have been removed or dropped before that" if listed else ""
    return (
        f"the sweep after step {sweeps['step']}, or one of the same rule before it, took its row: "
        f"{sweeps['words']}{score}{earlier}"
    )


def _count_events(link: _HistoryEntry, before: _HistoryEntry, between: str) -> list[_IdEvent]:
    """Returns the events of the admission count of an id without a row."""
    forgotten = "its count was forgotten: its window was over, or the memory for counts was full"
    if before.count is None:
        return [_IdEvent("counted", f"it was counted {between}")] if link.count is not None else []
    if link.count is None:
        # A tombstone refers to a row, and an id with a count has none.
        return [] if link.has_tombstone else [_IdEvent("forgotten", forgotten)]
    grown = [link.count[name] - before.count[name] for name in ("shows", "clicks")]
    if min(grown) < 0:
        return [_IdEvent("forgotten", forgotten), _IdEvent("counted", f"its count started again {between}")]
    return [_IdEvent("counted", f"it was counted {between}")] if max(grown) > 0 else []


def _format_score(score: float) -> str:
    """Formats a float32 with the fewest digits that identify it."""
    return str(np.float32(score))


def _count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cells(link: _HistoryEntry, events: list[_IdEvent]) -> tuple[object, ...]:
    row = link.row
    values = (
        ("", "", "", "")
        if row is None
        else (row["last_step"], row["count"], _format_score(row["score"]), row["l2_norm"])
    )
    said = "; ".join(event.text for event in events) or "nothing"
    return (link.checkpoint, link.kind, link.step, _state_text(link), *values, said)


def _state_text(link: _HistoryEntry) -> str:
    if link.count is None:
        return _STATE_TEXT[link.state]
    clicks = f", {_count_text(link.count['clicks'], 'click')}" if link.count["clicks"] else ""
    older = ", forgotten next" if link.count["is_older"] else ""
    return f"waits: {_count_text(link.count['shows'], 'occurrence')}{clicks}{older}"


def _final_state_text(links: list[_HistoryEntry], events: list[list[_IdEvent]]) -> str:
    """Describes the state of the id in the latest checkpoint."""
    newest = links[-1]
    if newest.row is not None:
        return f"It has a row, which was trained last at step {newest.row['last_step']}."
    if newest.count is not None:
        return f"It waits for a row ({_state_text(newest).removeprefix('waits: ')})."
    gone = [event.text for said in events for event in said if event.event in (*_REMOVED_EVENTS, "forgotten")]
    if gone:
        return f"It has no row and no count: {gone[-1]}."
    return "No checkpoint of the chain has anything of it."
