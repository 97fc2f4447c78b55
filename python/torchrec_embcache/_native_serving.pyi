"""The part of `_native` that serves checkpoints (`rust/core/src/serve`). There is no module of this name at run time.

Shapes: N ids, B bags, D a table's width.
"""

from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from ._native import F32, I64, CheckpointDirectory

@final
class TableServer:
    """A directory of checkpoints that is served. Every method may be called by any thread."""

    def __new__(
        cls,
        directory: CheckpointDirectory,
        *,
        at: str | None = None,  # the name of a checkpoint or the digits of its number; None: the newest
        host_bytes: int | None = None,  # what this process may keep of its own
        max_staleness_seconds: float | None = None,
        raise_when_stale: bool = False,
        missing: Literal["zeros", "initial", "oov", "value"] | None = None,  # None: what the manifest says
        missing_value: float = 0.0,  # what "value" reads
        source: CheckpointDirectory | None = None,  # the trainer's, where it is another one
        preload: bool = False,  # whether the weights of all rows are read into memory before they are served
        verify: bool = False,  # whether all rows are held against their checksums before they are served
    ) -> TableServer: ...
    def pin(self) -> ServedVersion: ...  # StaleError
    def poll(self) -> str | None: ...  # the name of the version that is served from now on, where it is a newer one
    def rollback(self) -> str: ...  # the name of the version that is served from now on; StateError where none was kept
    def follow(self, every_seconds: float) -> None: ...  # a thread of the core's polls
    def stop(self) -> None: ...  # ends that thread; harmless twice
    def stats(self) -> ServingStats: ...

@final
class ServedVersion:
    """One checkpoint that is served. It stays whole for as long as this lives."""

    name: str
    published_at: float  # in seconds since 1970
    def tables(self) -> list[ServedTable]: ...
    def table(self, name: str) -> ServedTable: ...  # its name where one table has it, or "module/name"

@final
class ServedTable:
    """A table of a version."""

    module: str
    name: str
    dim: int
    rows: int
    precision: Literal["fp32", "fp16", "bf16", "int8"]  # how the served files store weights
    stored_bytes: int  # of a row that is stored so
    def lookup_stored(
        self,
        ids: I64,
        out: NDArray[np.uint8],  # [N, stored_bytes]
        found: NDArray[np.bool_],  # [N]
    ) -> int: ...  # ids that have no row
    def lookup(self, ids: I64, out: F32, found: NDArray[np.bool_]) -> int: ...  # fills out [N, D] and found [N]; ids that have no row
    def lookup_pooled(
        self,
        ids: I64,
        offsets: I64,  # [B + 1]
        pooling: Literal["sum", "mean"],
        weights: F32 | None,  # [N]
        out: F32,  # [B, D]
    ) -> int: ...  # ids that have no row

@final
class ServingStats:
    """Counters of a directory of checkpoints that is served, since it was opened."""

    version: str
    seq: int
    staleness_seconds: float
    polls: int
    swaps: int
    failed_polls: int
    last_error: str | None
    versions: int
    lookups: int
    ids: int
    missing: int
    cold_rows: int
    rows: int
    overlay_ids: int
    shared_index_bytes: int
    private_bytes: int

@final
class ServeIndexReport:
    """What making an index did."""

    checkpoint: str
    rows: int
    bytes: int
    existed: bool

def check_serving_index(
    directory: CheckpointDirectory, at: str | None = None
) -> int | None: ...  # its rows; None where there is no such file, or one that servers make anew; CorruptionError
def build_serving_index(directory: CheckpointDirectory, at: str | None = None) -> ServeIndexReport: ...
