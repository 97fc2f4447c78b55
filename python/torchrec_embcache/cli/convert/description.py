"""`table.json`, stored next to the columns of an exported table: properties that the columns do not contain.

The file can be edited by anyone, so it is treated as untrusted input: every field is validated here before it is used.
"""

import json
import sys
from typing import Any

from torchrec_embcache.config import MAX_NUM_BUCKETS
from torchrec_embcache.exceptions import CorruptionError

__all__ = ["DESCRIPTION_FILE", "parse_description"]

#: Name of the file. It contains the table's entry of the checkpoint's manifest.
DESCRIPTION_FILE = "table.json"

#: Integer fields, with the minimum and maximum of each.
_INTEGER_RANGES = {
    "key": (0, (1 << 64) - 1),
    "seed": (0, (1 << 64) - 1),
    "step": (0, (1 << 63) - 1),
    "total_num_buckets": (1, MAX_NUM_BUCKETS),
}


def parse_description(data: bytes, path: str) -> dict[str, Any]:
    """Parses a `table.json` and validates the type and range of each field. Fields may be missing; unknown fields are kept.

    Raises `CorruptionError`, which names `path`, the field, the expected and the found value.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _field_error(path, "the description", "JSON", error) from error
    if not isinstance(found, dict):
        raise _field_error(path, "the description", "an object", type(found).__name__)
    for name in ("module", "table"):
        if name in found:
            _check_text(path, name, found[name])
    for name, (low, high) in _INTEGER_RANGES.items():
        if name in found:
            _check_integer(path, name, found[name], low, high)
    if "oov_row" in found:
        _check_text(path, "oov_row", found["oov_row"])
    if "missing_read" in found:
        _check_missing_read(path, found["missing_read"])
    if "initializer" in found:
        _check_object(path, "initializer", found["initializer"])
    if "optimizer" in found:
        _check_optimizer(path, found["optimizer"])
    return found


def _field_error(path: str, field: str, expected: str, found: object) -> CorruptionError:
    error = CorruptionError(f"{path}: offset 0: {field}: expected {expected}, found {found}")
    error.filename = path
    return error


def _check_text(path: str, field: str, value: object) -> None:
    if not isinstance(value, str):
        raise _field_error(path, field, "a string", repr(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _field_error(path, field, "a string of Unicode characters", f"a lone surrogate: {error}") from error


def _check_integer(path: str, field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _field_error(path, field, f"an integer from {low} to {high}", repr(value))


def _check_object(path: str, field: str, value: object) -> None:
    if not isinstance(value, dict):
        raise _field_error(path, field, "an object", repr(value))


def _check_missing_read(path: str, value: object) -> None:
    """Validates the value that evaluation reads for missing ids: its name, or a number for every column."""
    number = value.get("value") if isinstance(value, dict) and len(value) == 1 else None
    if not _is_finite(number) and value not in ("zeros", "initial", "oov_row"):
        raise _field_error(
            path, "missing_read", '"zeros", "initial", "oov_row" or {"value": a finite number}', repr(value)
        )


def _is_finite(value: object) -> bool:
    # `math.isfinite` raises OverflowError for an integer that no float can represent.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check_optimizer(path: str, optimizer: Any) -> None:
    _check_object(path, "optimizer", optimizer)
    _check_text(path, "optimizer.name", optimizer.get("name"))
    hyperparameters = optimizer.get("hyperparameters", {})
    _check_object(path, "optimizer.hyperparameters", hyperparameters)
    for name, value in hyperparameters.items():
        if not _is_finite(value):
            raise _field_error(path, f"optimizer.hyperparameters.{name}", "a finite number", repr(value))
