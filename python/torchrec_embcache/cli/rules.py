"""The sweeps of checkpoints in words, and how much their clocks say."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["count_step_times", "describe_rule", "table_sweeps"]


def describe_rule(rule: Any) -> str:
    """What a rule of a manifest says of the rows that it takes, such as "trained last at step 40 or before"."""
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
    """The score of a cut. The core maps scores to rising uint32: of those from 0 it flips the sign bit, and of others all bits."""
    bits = key ^ 0x80000000 if key >> 31 else key ^ 0xFFFFFFFF
    return float(np.array(bits, np.uint32).view(np.float32))


def _join_rules(rules: Sequence[Any], word: str) -> str:
    """Rules within others stand in brackets where they are joined themselves."""
    texts = [describe_rule(rule) for rule in rules]
    several = [isinstance(rule, dict) and bool(rule.keys() & {"any", "all"}) for rule in rules]
    return word.join(f"({text})" if inner else text for text, inner in zip(texts, several, strict=True))


def table_sweeps(link: dict[str, Any], module: str, table: str) -> list[dict[str, Any]]:
    """The sweeps that the manifest of one checkpoint has of a table, each with its rule in words."""
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
    """How many times of steps a clock has, which is whose times they are and two numbers for each; None: it has none."""
    return len(clock.split()) // 2 or None
