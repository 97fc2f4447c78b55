"""A server whose memory is measured: the increase since before it opened a checkpoint.

    python benches/python/soak_memory.py CHECKPOINTS ROWS [--save]

With `--save` it saves the checkpoint, builds its index, and exits. Otherwise it answers each line: `read` reads every row, and
`memory` returns the bytes in memory of the checkpoint's files and of its private memory since it opened them ("own"): "rss", and
"pss", in which each shared page is divided by the number of processes that share it.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import torch

from scratch import die_with_parent
from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving
from torchrec_embcache.cli import main as embcache

DIM = 64
AT_ONCE = 2000


def save(path: Path, rows: int) -> None:
    tiers = TierBudgets(host_bytes=(rows + 1) * (DIM * 4 + 128) + (8 << 20))
    table = EmbCacheEmbedding(name="item", embedding_dim=DIM, tiers=tiers, optimizer=optimizers.SGD(lr=1.0))
    for begin in range(0, rows, 100_000):
        ids = torch.arange(begin, min(rows, begin + 100_000))
        table.import_rows(ids, ids[:, None].float().expand(-1, DIM))
    Saver(0).save(table, path)
    with contextlib.redirect_stdout(sys.stderr):
        assert embcache(["index", str(path)]) == 0


def anonymous() -> int:
    """Returns the bytes of this process's private memory."""
    rollup = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rollup["Anonymous"].split()[0]) << 10


def mapped(path: Path) -> dict[str, int]:
    """Returns RSS and PSS in bytes of the mapped files below a path."""
    found, counts = {"rss": 0, "pss": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the header of a mapping, which ends with its file
            counts = bool(values) and values[-1].startswith(str(path))
        elif counts and name in ("Rss:", "Pss:"):
            found[name[:-1].lower()] += int(values[0]) << 10
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    die_with_parent()
    torch.set_num_threads(1)
    if given.save:
        save(given.path, given.rows)
        print(json.dumps({}), flush=True)
        return
    # Allocates the memory of a process's first lookups before the measurement.
    torch.zeros(AT_ONCE, DIM).sum()
    before = anonymous()
    with serving.open(given.path) as tables:
        print(json.dumps({"ready": tables.stats().version}), flush=True)
        for line in sys.stdin:
            if line.strip() == "read":
                with tables.pin() as version:
                    for begin in range(0, given.rows, AT_ONCE):
                        ids = torch.arange(begin, min(given.rows, begin + AT_ONCE))
                        rows_ND = version["item"].lookup(ids)[:]
                        assert torch.equal(rows_ND, ids[:, None].float().expand(-1, DIM))
                print(json.dumps({}), flush=True)
            else:
                more = anonymous() - before
                files = mapped(given.path.resolve())
                print(json.dumps({what: size + more for what, size in files.items()} | {"own": more}), flush=True)


if __name__ == "__main__":
    main()
