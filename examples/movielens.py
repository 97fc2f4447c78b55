"""MovieLens-100K as batches for a DLRM: likes of users, in the order of time.

The ratings are read from the installed `recbole` wheel, which may distribute them. This project may not, and contains no copy.

Features (ids are any 64-bit integers):
    user, item          those of the rating
    history             the items that the user liked most recently, at most 10, in the table of `item`
    taste               the user with each genre of the item, hashed to ids of the table `cross`, half of them negative
    peers               the user's occupation and age band with the item, hashed to ids of `cross` too
Dense: the user's age, the film's year, the number of earlier ratings of the user and of the item. The label is 1 for a rating of 4
or
5.
"""

import csv
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import torch
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

__all__ = ["FEATURES", "TABLES", "Ratings", "read_ratings"]

# The features of each table. The DLRM requires one width for all tables.
TABLES = {"user": ["user"], "item": ["item", "history"], "cross": ["taste", "peers"]}
FEATURES = [feature for features in TABLES.values() for feature in features]
HISTORY = 10
LIKED = 4.0


@dataclass(frozen=True)
class Ratings:
    """Ratings in the order of time. For R ratings: dense [R, 4], labels [R], and ids and lengths [R] of each feature."""

    dense: torch.Tensor
    labels: torch.Tensor
    values: dict[str, torch.Tensor]
    lengths: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, share: float) -> tuple["Ratings", "Ratings"]:
        """Splits into the first `share` of the ratings and the rest."""
        order = torch.arange(len(self))
        cut = int(len(self) * share)
        return self.take(order[:cut]), self.take(order[cut:])

    def take(self, rows: torch.Tensor) -> "Ratings":
        """Returns the ratings at the given positions, in that order."""
        values, lengths = {}, {}
        for feature in FEATURES:
            length = self.lengths[feature]
            begin = torch.cumsum(length, 0) - length
            lengths[feature] = length[rows]
            within = torch.arange(int(lengths[feature].sum())) - torch.repeat_interleave(
                torch.cumsum(lengths[feature], 0) - lengths[feature], lengths[feature]
            )
            values[feature] = self.values[feature][torch.repeat_interleave(begin[rows], lengths[feature]) + within]
        return Ratings(self.dense[rows], self.labels[rows], values, lengths)

    def batches(self, size: int, shuffle_seed: int | None = None) -> Iterator[Batch]:
        """Yields batches of `size` ratings. If they are shuffled, an incomplete last batch is omitted."""
        order = torch.arange(len(self))
        if shuffle_seed is not None:
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(shuffle_seed))
            order = order[: len(self) // size * size]
        for rows in order.split(size):
            part = self.take(rows)
            features = KeyedJaggedTensor(
                keys=FEATURES,
                values=torch.cat([part.values[feature] for feature in FEATURES]),
                lengths=torch.cat([part.lengths[feature] for feature in FEATURES]).int(),
            )
            yield Batch(dense_features=part.dense, sparse_features=features, labels=part.labels)

    def ids(self, table: str) -> torch.Tensor:
        """Returns the distinct ids of a table, sorted."""
        return torch.unique(torch.cat([self.values[feature] for feature in TABLES[table]]))


def dataset_folder() -> Path:
    """Returns the directory of MovieLens-100K in the installed recbole."""
    try:
        folder = Path(str(distribution("recbole").locate_file("recbole/dataset_example/ml-100k")))
    except PackageNotFoundError:
        raise SystemExit(
            "recbole, which ships MovieLens-100K, is not installed: pip install --no-deps recbole==1.2.1"
        ) from None
    if not folder.is_dir():
        raise SystemExit(f"{folder} does not exist: pip install --no-deps recbole==1.2.1")
    return folder


def rows_of(name: str) -> list[dict[str, str]]:
    """Reads a file of the data set. The types are removed from its column names."""
    with (dataset_folder() / f"ml-100k.{name}").open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = [column.split(":")[0] for column in next(rows)]
        return [dict(zip(names, row, strict=True)) for row in rows]


def cross(*parts: int) -> int:
    """Hashes several small ids to a signed 64-bit id (with the finalizer of SplitMix64)."""
    mixed = 0
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def read_ratings() -> Ratings:
    """Reads all 100,000 ratings."""
    users = {int(row["user_id"]): row for row in rows_of("user")}
    items = {int(row["item_id"]): row for row in rows_of("item")}
    genres = sorted({genre for row in items.values() for genre in row["class"].split()})
    genre_of = {item: [genres.index(genre) for genre in row["class"].split()] for item, row in items.items()}
    occupations = sorted({row["occupation"] for row in users.values()})
    year = {
        item: float(row["release_year"]) if row["release_year"].isdigit() else 1990.0 for item, row in items.items()
    }

    liked: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=HISTORY))
    seen: dict[str, dict[int, int]] = {"user": defaultdict(int), "item": defaultdict(int)}
    dense, labels = [], []
    values: dict[str, list[int]] = {feature: [] for feature in FEATURES}
    lengths: dict[str, list[int]] = {feature: [] for feature in FEATURES}
    for row in sorted(
        rows_of("inter"), key=lambda row: (int(row["timestamp"]), int(row["user_id"]), int(row["item_id"]))
    ):
        user, item, like = int(row["user_id"]), int(row["item_id"]), float(row["rating"]) >= LIKED
        age = int(users[user]["age"])
        occupation = occupations.index(users[user]["occupation"])
        found = {
            "user": [user],
            "item": [item],
            "history": list(liked[user]),
            "taste": [cross(1, user, genre) for genre in genre_of[item]],
            "peers": [cross(2, occupation, item), cross(3, age // 10, item)],
        }
        for feature, ids in found.items():
            values[feature] += ids
            lengths[feature].append(len(ids))
        dense.append(
            (age / 50, (year[item] - 1980) / 20, np.log1p(seen["user"][user]) / 5, np.log1p(seen["item"][item]) / 5)
        )
        labels.append(float(like))
        seen["user"][user] += 1
        seen["item"][item] += 1
        if like:
            liked[user].append(item)
    return Ratings(
        torch.tensor(np.array(dense, np.float32)),
        torch.tensor(labels),
        {feature: torch.tensor(ids, dtype=torch.int64) for feature, ids in values.items()},
        {feature: torch.tensor(length, dtype=torch.int64) for feature, length in lengths.items()},
    )
