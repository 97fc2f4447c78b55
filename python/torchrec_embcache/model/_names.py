"""The tables of models and checkpoints, by user-visible names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torchrec_embcache.exceptions import CorruptionError, InputError, MismatchError

__all__ = ["TablePath", "check_names", "check_rows", "display_name", "find_by_name", "load_sources"]

# A table of a model or of a checkpoint: the path of its module, and its name.
TablePath = tuple[str, str]


def display_name(pair: TablePath) -> str:
    """Returns a table's user-visible name: `<module path>/<table>`, or only the table's name if the model itself is the module."""
    return f"{pair[0]}/{pair[1]}" if pair[0] else pair[1]


def find_by_name(name: object, pairs: Collection[TablePath], field: str, where: str) -> TablePath:
    """Returns the table of `pairs` with a user-visible name. Raises `InputError` if there is none, or more than one."""
    found = [pair for pair in pairs if display_name(pair) == name] or [pair for pair in pairs if pair[1] == name]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(sorted(display_name(pair) for pair in (found or pairs)))
    problem = f"names several tables of {where}" if found else f"is not a table of {where}"
    raise InputError(f"{field}: {name!r} {problem}: give one of {listed}")


def load_sources(
    model: set[TablePath], saved: set[TablePath], tables: Collection[str] | None, rename: Mapping[str, str] | None
) -> dict[TablePath, TablePath]:
    """Maps each table of the model to the table of the checkpoint that it is loaded from, if any.

    Raises `InputError` for malformed `tables` and `rename`, and for unknown names.
    """
    if isinstance(tables, str):
        raise InputError(f"tables={tables!r} is text: give a collection of names")
    if not isinstance(rename, Mapping | None):
        raise InputError(f"rename is a {type(rename).__name__}: give names in the model by names in the checkpoint")
    renamed: dict[TablePath, TablePath] = {}
    for old, new in (rename or {}).items():
        source = find_by_name(old, saved, "rename", "the checkpoint")
        target = find_by_name(new, model, "rename", "the model")
        if target in renamed:
            raise InputError(f"rename: {new!r} is named twice")
        renamed[target] = source
    wanted = model if tables is None else {find_by_name(name, model, "tables", "the model") for name in tables}
    taken = set(renamed.values())
    own = {pair: pair for pair in wanted if pair in saved and pair not in taken}
    return {**own, **{pair: source for pair, source in renamed.items() if pair in wanted}}


def check_names(
    model: set[TablePath],
    sources: Mapping[TablePath, TablePath],
    tables: Collection[str] | None,
    unexpected: set[TablePath],
    saved: set[TablePath],
    root: str,
) -> None:
    """Raises `MismatchError` if the checkpoint lacks a requested table, or has a table that the model lacks."""

    def listed(pairs: set[TablePath]) -> str:
        return ", ".join(f"{table!r} of module {module!r}" for module, table in sorted(pairs))

    wanted = model if tables is None else {find_by_name(name, model, "tables", "the model") for name in tables}
    missing = wanted - set(sources)
    if missing:
        raise MismatchError(
            f"the checkpoint in {root} has no table {listed(missing)}; it has {listed(saved)}: give rename=, or strict=False "
            "to leave tables as they are"
        )
    if unexpected:
        raise MismatchError(
            f"the model has no table {listed(unexpected)}, which the checkpoint in {root} holds: give rename=, tables=, or "
            "strict=False to leave them out"
        )


def check_rows(counts: Mapping[TablePath, tuple[int, int]], name: str, root: str) -> None:
    """Raises `CorruptionError` unless all ranks together loaded the expected number of rows. `counts`: loaded and expected rows."""
    for pair, (loaded, expected) in counts.items():
        if loaded != expected:
            raise CorruptionError(
                f"the checkpoint {name} in {root} is damaged: table {display_name(pair)} should have {expected} rows "
                f"and has {loaded}"
            )
