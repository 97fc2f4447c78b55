"""Layout `recis`: safetensors files, as implemented in the sources of RecIS 1.2.

A table is divided into n parts. Part i has a tensor `<table>.id/part_<i>_<n>`, a tensor of the same form for `.embedding`, and one
for each slot.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from torchrec_embcache.checkpoint.recis._schema import PAD
from torchrec_embcache.exceptions import CorruptionError, InputError

from .layout import CheckpointLayout, StoredColumn, StoredTable
from .safetensors import list_tensors

__all__ = ["RecisLayout"]

#: Name of a tensor: a part of a table's column.
_PART = re.compile(r"(?P<table>.+)\.(?P<column>[^./]+)/part_(?P<shard>\d{1,9})_(?P<shards>\d{1,9})")
#: The other form of the names. It ends in the part's slice of ids.
_SLICED = re.compile(r"(?P<table>.+)@(?P<column>[^@^]+)\^(?P<shard>.+)")


class RecisLayout(CheckpointLayout):
    """Reads the tables of a RecIS checkpoint."""

    name = "recis"
    marks = ("torch_rank_weights_embs_table_multi_shard.json", "index")

    def read(self, path: Path) -> tuple[list[StoredTable], list[str]]:
        """Implements `CheckpointLayout`."""
        tables: dict[str, dict[str, dict[str, StoredColumn]]] = {}
        counts: dict[str, set[int]] = {}
        skipped = []
        files: dict[tuple[int, str], Path] = {}
        for file, tensor, values in list_tensors(sorted(path.glob("*.safetensors"))):
            if tensor.startswith(PAD):
                continue
            match = _PART.fullmatch(tensor) or _SLICED.fullmatch(tensor)
            if match is None:
                skipped.append(tensor)  # a dense tensor
                continue
            column = "weight" if match["column"] == "embedding" else match["column"]
            # RecIS prefixes the slot's name with the optimizer's, as in sparse_adam_exp_avg and sparse_adamw_tf_exp_avg_sq.
            column = re.sub(r"^sparse_.+_(exp_avg|exp_avg_sq)$", r"\1", column)
            part = tables.setdefault(match["table"], {}).setdefault(match["shard"], {})
            if column in part:
                raise InputError(
                    f"table {match['table']!r}: {tensor} is in {files[id(part), column]} and in {file}: keep the files of one save "
                    "only"
                )
            part[column], files[id(part), column] = values, file
            if "shards" in match.re.groupindex:
                counts.setdefault(match["table"], set()).add(int(match["shards"]))
        for name, wanted in counts.items():
            _check_shards(name, wanted, tables[name])
        return [
            StoredTable.from_parts(name, [shards[shard] for shard in sorted(shards)])
            for name, shards in sorted(tables.items())
        ], skipped


def _check_shards(table: str, counts: set[int], shards: Iterable[str]) -> None:
    """Raises `CorruptionError` unless all n parts of a table (`part_<i>_<n>`) exist. Otherwise rows would be missing."""
    found = {int(shard) for shard in shards}
    wanted = max(counts)
    if len(counts) > 1 or len(found) != wanted or max(found) >= wanted:
        raise CorruptionError(
            f"table {table!r}: expected all the parts of one save, found parts {sorted(found)} of {sorted(counts)}: the files of "
            "every shard must be there"
        )
