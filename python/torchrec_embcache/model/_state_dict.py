"""Row counts of all tables, for checkpoints by PyTorch's DCP that do not contain the rows."""

import json
from collections.abc import Mapping

from torch import nn

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache.exceptions import StateError

from . import cache_modules

__all__ = ["TableState"]


class TableState:
    """The row counts of all tables, for a checkpoint by PyTorch's DCP that does not contain the rows; a `Stateful` there.

    Save it with the model: `dcp.save({"model": model.state_dict(), "tables": TableState(model)}, checkpoint_id=path)`. Then
    `dcp.load` raises `StateError` if the rows were not loaded before, by `Saver().load(model, rows_path)`.

    Both methods are collective, as DCP calls them.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TableState, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model(torch.tensor([7, 8])).sum().backward()
        >>> note = TableState(model).state_dict()
        >>> note
        {'tables': '{"/item": [2, 1]}'}
        >>> TableState(model).load_state_dict(note)  # the rows are here
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, str]:
        """Returns the rows and step of every open table, over all ranks."""
        return {"tables": json.dumps(self._row_counts(), sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Raises `StateError` if the row counts of the model's tables differ from those in `state`."""
        held = self._row_counts()
        for name, [rows, step] in json.loads(state["tables"]).items():
            now = held.get(name, [0, 0])
            if rows and now != [rows, step]:
                raise StateError(
                    f"the checkpoint is of a model whose table {name!r} had {rows} rows at step {step}, and here it has {now[0]} "
                    f"at step {now[1]}. It does not hold rows: load them first, by Saver(rank).load(model, path), then this"
                )

    def _row_counts(self) -> dict[str, list[int]]:
        def local_counts() -> dict[str, list[int]]:
            return {
                f"{path}/{name}": [len(table), table.step() or table._loaded_step]
                for path, module in cache_modules(self._model).items()
                for name, table in module.tables.items()
                if table.is_open
            }

        total: dict[str, list[int]] = {}
        for of_rank in all_ranks().gather(local_counts):
            for name, (rows, step) in of_rank.items():
                before = total.get(name, [0, 0])
                total[name] = [before[0] + rows, max(before[1], step)]
        return total
