"""Descriptions of the sweeps of checkpoints, and the size of their clocks."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["count_step_times", "describe_rule", "table_sweeps"]


def describe_rule(rule: Any) -> str:
    """Describes the rows matched by a rule of a manifest, as in "trained last at step 40 or before"."""
    match rule:
        case {"last_step": step}:
            return f"trained last at step {step} or before"
        case {"score_below": {"below": below, "half_life": half_life}}:
            return f"score below {below} (half life {half_life} steps)"
        case {"norm_below": below}:
            return f"L2 norm below {below}"
        case {"below": {"threshold": threshold, "half_life": half_life}}:
            score, step, row_id = _decode_score(threshold["score"]), threshold["last_step"], threshold["id"]
            return (
                f"score below {score} (half life {half_life} steps), or as much and trained last before step {step}, "
                f"or then too and an id below {row_id}"
            )
        case {"any": []}:
            return "no rows"
        case {"any": rules}:
            return _join_rules(rules, " or ")
        case {"all": rules}:
            return _join_rules(rules, " and ")
    return json.dumps(rule)


def _decode_score(key: int) -> float:
    """Decodes the score of a threshold. The native code maps scores to ascending uint32: it flips the sign bit of scores >= 0, and
    all bits of others.
    """
    bits = key ^ 0x80000000 if key >> 31 else key ^ 0xFFFFFFFF
    return float(np.array(bits, np.uint32).view(np.float32))


def _join_rules(rules: Sequence[Any], word: str) -> str:
    """Joins the descriptions of rules; nested compound rules are in brackets."""
    texts = [describe_rule(rule) for rule in rules]
    several = [isinstance(rule, dict) and bool(rule.keys() & {"any", "all"}) for rule in rules]
    return word.join(f"({text})" if inner else text for text, inner in zip(texts, several, strict=True))


def table_sweeps(link: dict[str, Any], module: str, table: str) -> list[dict[str, Any]]:
    """Returns a table's sweeps in the manifest of one checkpoint, each with a description of its rule."""
    (entry,) = (each for each in link["tables"] if (each["spec"]["module"], each["spec"]["table"]) == (module, table))
    return [
        {
            "checkpoint": link["name"],
            "step": sweep["step"],
            "rule": sweep["rule"],
            "words": describe_rule(sweep["rule"]),
        }
        for sweep in entry.get("sweeps", [])
    ]


def count_step_times(clock: str) -> int | None:
    """Returns the number of step times of a clock, which consists of its owner and two numbers per time; None if it has none."""
    return len(clock.split()) // 2 or None
