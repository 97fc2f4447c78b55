"""Policies that evict rows, and an `on_evict` callback that notes them."""

from typing import Any

from lifecycle_cases import Expected, takes
from torchrec_embcache.eviction import All, L2Norm, Policy, Rule, Score, Ttl

# A row as text: its id, the bits of its weights and slots, and its metadata.
Row = tuple[Any, ...]


def rows_of(chunk: Any) -> list[Row]:
    """The rows of a chunk, each with every bit. The model knows no saves, and so no epochs."""
    columns = chunk.to_numpy()
    names = sorted(columns.keys() - {"modified_epoch"})
    return [tuple((name, columns[name][at].tobytes()) for name in names) for at in range(len(chunk))]


class Told(Expected):
    """The model of eviction, which notes what it removes: every row with its step and its reason."""

    def __init__(self, policy: Policy, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.rows: list[Row] = []

    def sweep(self) -> None:
        step = self.table.stats().step
        for chunk in self.table.export():
            for place, row in enumerate(rows_of(chunk)):
                values = {
                    "last_step": int(chunk.metadata.last_step[place]),
                    "score": float(chunk.metadata.score[place]),
                    "weights": chunk.weights[place].tolist(),
                }
                by = next((rule for rule in self.policy.rules if takes(rule, values, step)), None)
                if by is not None:
                    self.rows.append((step, name_of(by), row))
        super().sweep()


def name_of(rule: Rule) -> str:
    return {Ttl: "ttl", Score: "score", L2Norm: "l2_norm", All: "all"}[type(rule)]


POLICIES = {
    "time": Policy([Ttl(steps=4)], every_steps=3),
    "any of three": Policy([Ttl(steps=9), L2Norm(below=0.4), All([Ttl(steps=4), Score(below=2.5)])], every_steps=1),
    "at saves": Policy([Score(below=1.6), L2Norm(below=0.3)]),
}
