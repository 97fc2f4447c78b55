"""`why`: what a checkpoint, and all that it builds on, tell of one id."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.buckets import buckets_of
from torchrec_embcache.exceptions import InputError, MismatchError

from .checkpoints import Opened
from .report import Grid, Report
from .rules import in_words, sweeps_of

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
#: What an id can be as of a checkpoint.
_ROW, _WAITS, _NOTHING = "row", "waits", "nothing"
_IN_WORDS = {_ROW: "has a row", _NOTHING: "no row, no count"}
#: Events after which the row of before is gone.
_GONE = ("swept", "tombstone")
_LINKED = (
    "Every row of the rank that has the id was read, because a linked checkpoint does not lie in the order of buckets."
)


@dataclass(frozen=True)
class _Link:
    """What one checkpoint tells of the id. `row` and `count` are as of this checkpoint, which may have them from its parents."""

    checkpoint: str
    kind: str
    step: int
    now: str
    row: dict[str, Any] | None
    count: dict[str, Any] | None
    has_row: bool  # in its own files
    has_tombstone: bool
    has_sweeps: bool
    taken: list[dict[str, Any]]  # the sweeps that take the row as the checkpoint before has it


def why(path: str, table: str, row_id: int) -> Report:
    """When an id got its row, when and why the row left, and what it is now, as far as a checkpoint and its parents tell.

    Args:
        path: A directory of checkpoints, of which the newest is taken, or one checkpoint in it.
        table: The table's name, or `<module>/<name>` where several modules have one of this name.
        row_id: The id, as a signed or an unsigned 64-bit number.
    """
    opened = Opened.at(path)
    module, name = _table(opened, table)
    signed = row_id - (1 << 64) if row_id >= 1 << 63 else row_id
    (spec,) = (entry for entry in opened.tables if (entry["module"], entry["table"]) == (module, name))
    links = _links(opened, module, name, signed)
    events = [_events(link, links[at - 1] if at else None) for at, link in enumerate(links)]
    (bucket,) = buckets_of(np.array([signed]), spec["total_num_buckets"])
    data = {
        "path": opened.root,
        "checkpoint": opened.name,
        "module": module,
        "table": name,
        "id": signed,
        "bucket": int(bucket),
        "now": links[-1].now,
        "links": [
            asdict(link) | {"events": [vars(event) for event in said]} for link, said in zip(links, events, strict=True)
        ],
    }
    unsigned = f" ({signed + (1 << 64)} unsigned)" if signed < 0 else ""
    title = f"Id {signed}{unsigned} of table {name} ({module}), bucket {bucket}, in {opened.root}"
    rows = [_cells(link, said) for link, said in zip(links, events, strict=True)]
    lines = [_now(links, events)]
    if any(link.kind == "linked" for link in links):
        lines.append(_LINKED)
    return Report(data, [Grid(title, _COLUMNS, rows)], lines)


def _table(opened: Opened, given: str) -> tuple[str, str]:
    """The module and the name of the table that is meant."""
    pairs = [(entry["module"], entry["table"]) for entry in opened.tables]
    found = [pair for pair in pairs if given in (pair[1], "/".join(pair))]
    there = ", ".join("/".join(pair) for pair in pairs)
    if not found:
        raise MismatchError(f"{opened.name} in {opened.root} has no table {given!r}; it has [{there}]")
    if len(found) > 1:
        raise InputError(f"several modules have a table {given!r}: give one of [{there}]")
    return found[0]


def _links(opened: Opened, module: str, table: str, row_id: int) -> list[_Link]:
    """The checkpoints of the chain, oldest first."""
    links: list[_Link] = []
    own_links = opened.rows.life_of(module, table, row_id)
    for manifest, own in reversed(list(zip(opened.links, own_links, strict=True))):
        (spec,) = (
            entry["spec"]
            for entry in manifest["tables"]
            if (entry["spec"]["module"], entry["spec"]["table"]) == (module, table)
        )
        before, sweeps = links[-1].row if links else None, sweeps_of(manifest, module, table)
        row = None
        if own.has_row_now:
            row = before if own.row is None else _row(own.row)
        links.append(
            _Link(
                checkpoint=manifest["name"],
                kind=manifest["kind"],
                step=spec["step"],
                now=_ROW if own.has_row_now else _WAITS if own.count_now is not None else _NOTHING,
                row=row,
                count=None if own.count_now is None else _count(own.count_now),
                has_row=own.row is not None,
                has_tombstone=own.has_tombstone,
                has_sweeps=bool(sweeps),
                taken=_taken(own, sweeps),
            )
        )
    return links


def _row(block: _native.RowBlock) -> dict[str, Any]:
    metadata = block.metadata
    return {
        "last_step": int(metadata.last_step[0]),
        "count": int(metadata.count[0]),
        "score": float(metadata.score[0]),
        "modified_epoch": int(metadata.modified_epoch[0]),
        "l2_norm": _norm(block.vectors[0]),
    }


def _norm(weights: NDArray[np.float32]) -> float:
    """The L2 norm as sweeps compute it: in float64, column after column."""
    squares = weights.astype(np.float64) ** 2
    return float(np.sqrt(np.cumsum(squares)[-1]))


def _count(pending: _native.PendingIds) -> dict[str, Any]:
    return {
        "shows": int(pending.shows[0]),
        "clicks": int(pending.clicks[0]),
        "is_older": bool(pending.is_older[0]),
    }


def _taken(own: _native.LinkOfId, sweeps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sweeps of a delta that took the row, each with what of its rule did."""
    rules = [json.loads(taken.rule) for taken in own.taken]
    return [
        {"step": sweeps[taken.sweep]["step"], "rule": rule, "words": in_words(rule), "score": taken.score}
        for taken, rule in zip(own.taken, rules, strict=True)
    ]


@dataclass(frozen=True)
class _Event:
    """What became of the id between two checkpoints. `what` is one of a few names, for programs."""

    what: str
    text: str


def _events(link: _Link, before: _Link | None) -> list[_Event]:
    """What became of the id since the checkpoint before."""
    if before is None:
        return _first(link)
    between = f"after step {before.step} and by step {link.step}"
    events = _left(link, before, between)
    if link.has_row:
        assert link.row is not None, "its own files have it"
        if before.now != _ROW or any(event.what in _GONE for event in events):
            events.append(_Event("got row", f"it got its row {between}"))
        elif not events:
            trained = f"trained last at step {link.row['last_step']}"
            events.append(_Event("modified", f"its row was modified; {trained}"))
    elif link.now != _ROW:
        events += _counted(link, before, between)
    return events


def _first(link: _Link) -> list[_Event]:
    """What the oldest checkpoint tells, before which there is none."""
    if link.now == _ROW:
        return [_Event("got row", f"it got its row by step {link.step}; nothing here tells more of that")]
    return [_Event("counted", f"it was counted by step {link.step}")] if link.now == _WAITS else []


def _left(link: _Link, before: _Link, between: str) -> list[_Event]:
    """Whether and why the row is gone that the checkpoint before has, or one that came since."""
    if link.has_tombstone and not link.taken:
        reasons = ["removed by hand", "dropped because the table was full"]
        if link.has_sweeps:
            reasons.append("trained or imported since the checkpoint before and then taken by a sweep")
        which = "its row" if before.now == _ROW else "a row that it had meanwhile"
        text = f"a tombstone says that {which} left {between}: it was {', or '.join(reasons)}"
        return [_Event("tombstone", text)]
    if before.row is None or not link.taken:
        return []
    if link.has_tombstone or link.row is None or link.row["count"] < before.row["count"]:
        return [_Event("swept", _swept(taken, listed=link.has_tombstone)) for taken in link.taken]
    taken = link.taken[0]
    text = (
        f"its row was modified; trained last at step {link.row['last_step']}. A sweep by step {taken['step']} takes the row as the "
        f"checkpoint before has it ({taken['words']}): the row was trained before that, or it left and came back"
    )
    return [_Event("modified or swept", text)]


def _swept(taken: dict[str, Any], *, listed: bool) -> str:
    """`listed`: a tombstone names the id too."""
    score = "" if taken["score"] is None else f"; its score was {_short(taken['score'])} by then"
    earlier = "; it has a tombstone too, so it may have been removed or dropped before that" if listed else ""
    return (
        f"the sweep after step {taken['step']}, or one of the same rule before it, took its row: "
        f"{taken['words']}{score}{earlier}"
    )


def _counted(link: _Link, before: _Link, between: str) -> list[_Event]:
    """What became of the count of an id without a row."""
    forgotten = "its count was forgotten: its window was over, or the memory for counts was full"
    if before.count is None:
        return [_Event("counted", f"it was counted {between}")] if link.count is not None else []
    if link.count is None:
        # A tombstone tells of a row, which an id with a count has not.
        return [] if link.has_tombstone else [_Event("forgotten", forgotten)]
    grown = [link.count[name] - before.count[name] for name in ("shows", "clicks")]
    if min(grown) < 0:
        return [_Event("forgotten", forgotten), _Event("counted", f"it was counted anew {between}")]
    return [_Event("counted", f"it was counted {between}")] if max(grown) > 0 else []


def _short(score: float) -> str:
    """A float32 in as few digits as tell it from others."""
    return str(np.float32(score))


def _number(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _cells(link: _Link, events: list[_Event]) -> tuple[object, ...]:
    row = link.row
    values = ("", "", "", "") if row is None else (row["last_step"], row["count"], _short(row["score"]), row["l2_norm"])
    said = "; ".join(event.text for event in events) or "nothing"
    return (link.checkpoint, link.kind, link.step, _state(link), *values, said)


def _state(link: _Link) -> str:
    if link.count is None:
        return _IN_WORDS[link.now]
    clicks = f", {_number(link.count['clicks'], 'click')}" if link.count["clicks"] else ""
    older = ", forgotten next" if link.count["is_older"] else ""
    return f"waits: {_number(link.count['shows'], 'occurrence')}{clicks}{older}"


def _now(links: list[_Link], events: list[list[_Event]]) -> str:
    """What the id is in the newest checkpoint, in a sentence."""
    newest = links[-1]
    if newest.row is not None:
        return f"It has a row, which was trained last at step {newest.row['last_step']}."
    if newest.count is not None:
        return f"It waits for a row ({_state(newest).removeprefix('waits: ')})."
    gone = [event.text for said in events for event in said if event.what in (*_GONE, "forgotten")]
    if gone:
        return f"It has no row and no count: {gone[-1]}."
    return "No checkpoint of the chain has anything of it."
