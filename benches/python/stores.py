"""Other stores beside the benches of the SSD tier: each in its own process, loaded with the same rows, asked for rounds in turn.

The program is `benches/rivals`. Its libraries are where `make rivals` put them; a store that has none is reported as missing.
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
# Bench: the stores that it is measured beside, and after how many rounds of ours each has one. Of fetches a round is a batch, as
# near in time to ours as can be; rewriting is by time.
STORES: dict[str, dict[str, int]] = {
    "ssd_fetch_uniform": {"rocksdb": 1, "lmdb": 4, "mmap": 4},
    "ssd_fetch_sessions": {"rocksdb": 1},
    "ssd_writeback": {"rocksdb": 1},
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
        # Why it is not here, if it is not.
        self.missing: str | None = ready.get("missing")
        self.what: str = ready.get("what", store)
        self.rounds: list[dict[str, float]] = []

    def run(self) -> None:
        """One round, the first time and every few times: value (rows a second) and cpu_us_per_row."""
        if self._asked % self._every == 0:
            self._child.write("run")
            self.rounds.append(self._child.read())
        self._asked += 1

    def row(self) -> dict[str, Any]:
        """The rival of a row of results: medians of the rounds."""
        return {"what": self.what} | {key: statistics.median(r[key] for r in self.rounds) for key in self.rounds[0]}

    def close(self) -> None:
        """Ends the program, which removes the store."""
        self._child.close()
