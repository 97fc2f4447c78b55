"""Read-only serving of checkpoints, optionally following a trainer that publishes incremental checkpoints.

    tables = serving.open("ckpt", follow=serving.Follow(poll_seconds=1))
    with tables.pin() as version:  # one checkpoint for all tables of a request
        rows = version["item"].lookup(ids)

`docs/serving.md` is the guide. TorchRec is required only by `replace`, and only for models with TorchRec modules.
"""

from typing import TYPE_CHECKING, Any

from ._follow import Follow
from .stats import ServingStats
from .tables import Tables, open  # noqa: A004  # users write serving.open
from .version import Rows, Table, Version

if TYPE_CHECKING:
    from ._replace import replace

__all__ = ["Follow", "Rows", "ServingStats", "Table", "Tables", "Version", "open", "replace"]


def __getattr__(name: str) -> Any:
    if name != "replace":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._replace import replace

    globals()[name] = replace
    return replace
