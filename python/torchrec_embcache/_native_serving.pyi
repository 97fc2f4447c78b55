"""The part of `_native` that serves checkpoints (`rust/core/src/serve`). This module does not exist at run time.

Shapes: N ids, B bags, D a table's width.
"""

from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from ._native import CheckpointDirectory, F32, I64

@final
class TableServer:
    """Serves a directory of checkpoints. Every method is thread-safe."""

    def __new__(
        cls,
        directory: CheckpointDirectory,
        *,
        at: str | None = None,  # the name of a checkpoint or the digits of its number; None: the latest
        host_bytes: int | None = None,  # memory limit of this process, without shared files
        max_staleness_seconds: float | None = None,
        raise_when_stale: bool = False,
        missing: Literal["zeros", "initial", "oov", "value"] | None = None,  # None: the value in the manifest
        missing_value: float = 0.0,  # the value of "value"
        source: CheckpointDirectory | None = None,  # the trainer's directory, if it is another one
        preload: bool = False,  # True: loads the weights of all rows into memory before serving
        verify: bool = False,  # True: verifies all rows against their checksums before serving
    ) -> TableServer: ...
    def pin(self) -> ServedVersion: ...  # StaleError
    def poll(self) -> str | None: ...  # the name of the new version, if there is one
    def rollback(self) -> str: ...  # the name of the version that is then served; StateError if none was kept
    def follow(self, every_seconds: float) -> None: ...  # a native thread polls
    def stop(self) -> None: ...  # stops that thread; idempotent
    def stats(self) -> ServingStats: ...

@final
class ServedVersion:
    """A served checkpoint. It stays intact as long as this exists."""

    name: str
    published_at: float  # in seconds since 1970
    def tables(self) -> list[ServedTable]: ...
    def table(self, name: str) -> ServedTable: ...  # its name if it is unique, or "module/name"

@final
class ServedTable:
    """A table of a version."""

    module: str
    name: str
    dim: int
    rows: int
    precision: Literal["fp32", "fp16", "bf16", "int8"]  # the format of weights in the served files
    stored_bytes: int  # bytes of a row in that format
    def lookup_stored(
        self,
        ids: I64,
        out: NDArray[np.uint8],  # [N, stored_bytes]
        found: NDArray[np.bool_],  # [N]
    ) -> int: ...  # number of ids without a row
    def lookup(self, ids: I64, out: F32, found: NDArray[np.bool_]) -> int: ...  # fills out [N, D] and found [N]; number of ids without a row
    def lookup_pooled(
        self,
        ids: I64,
        offsets: I64,  # [B + 1]
        pooling: Literal["sum", "mean"],
        weights: F32 | None,  # [N]
        out: F32,  # [B, D]
    ) -> int: ...  # number of ids without a row

@final
class ServingStats:
    """Counters of a served directory of checkpoints, since it was opened."""

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
    """The result of building an index."""

    checkpoint: str
    rows: int
    bytes: int
    existed: bool

def check_serving_index(
    directory: CheckpointDirectory, at: str | None = None
) -> int | None: ...  # number of its rows; None if there is no such file, or one that servers rebuild; CorruptionError
def build_serving_index(directory: CheckpointDirectory, at: str | None = None) -> ServeIndexReport: ...
