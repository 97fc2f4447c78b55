"""Other stores that are measured in the benches of the SSD tier and of serving. Each runs in a separate process, is loaded with the
same rows, and runs rounds alternately.

The program is `benches/rivals`. Its libraries are installed by `make rivals`. A store without its library is reported as missing.
"""

import json
import os
import statistics
import tempfile
from typing import Any

import torch

from served import ROOT, Child, built

__all__ = ["STORES", "Store"]

LIBRARIES = ROOT / "target" / "rivals" / "lib"
# For each bench its stores, and the number of our rounds per round of each store. For fetches a round is one batch, so that both
# sides run at nearly the same time. For rewrites a round has a fixed time. For lookups a round is all batches.
STORES: dict[str, dict[str, int]] = {
    "ssd_fetch_uniform": {"rocksdb": 1, "lmdb": 4, "mmap": 4},
    "ssd_fetch_sessions": {"rocksdb": 1},
    "ssd_writeback": {"rocksdb": 1},
    "serve_lookup_warm_2000": {"rocksdb": 3, "lmdb": 3},
}


class Store:
    """A store that is loaded with the rows of `work` (see benches/src/store.rs) and fetches ids int64 [K, N]."""

    def __init__(
        self, store: str, work: dict[str, Any], ids: torch.Tensor | None, every: int, smoke: bool, seconds: float
    ) -> None:
        self._every = every
        self._asked = 0
        path = ":".join(part for part in (str(LIBRARIES), os.environ.get("LD_LIBRARY_PATH")) if part)
        [program] = built(smoke)["rivals"]
        self._child = Child([str(program), "--serve"], seconds, env={"LD_LIBRARY_PATH": path})
        with tempfile.NamedTemporaryFile() as file:
            request: dict[str, Any] = {"store": store, "work": work, "batch": 0}
            if ids is not None:
                ids.numpy().tofile(file.name)
                request |= {"ids": file.name, "batch": ids.shape[1]}
            self._child.write(json.dumps(request))
            ready = self._child.read()
        # The reason if the store is missing.
        self.missing: str | None = ready.get("missing")
        self.what: str = ready.get("what", store)
        self.rounds: list[dict[str, float]] = []

    def run(self) -> None:
        """Measures a round on the first call and then on every `every`-th call: value (rows per second) and cpu_us_per_row."""
        if self._asked % self._every == 0:
            self._child.write("run")
            self.rounds.append(self._child.read())
        self._asked += 1

    def row(self) -> dict[str, Any]:
        """Returns the rival entry of a row of results.json: the medians of the rounds."""
        return {"what": self.what} | {key: statistics.median(r[key] for r in self.rounds) for key in self.rounds[0]}

    def close(self) -> None:
        """Ends the program, which removes the store."""
        self._child.close()
