"""Serve the tables of a directory of checkpoints over HTTP, following the trainer, with metrics for Prometheus.

    pip install "torchrec-embcache[serve]"
    python examples/serve_fastapi.py ckpt --port 8000
    curl -s localhost:8000/lookup -H 'content-type: application/json' -d '{"tables": {"item": [7, 8]}}'

A request reads one version for all of its tables. Several workers of one machine (`--workers 4`) share the files' memory. Without a
directory a small table is created in a temporary folder, which is removed when the server stops.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel

from torchrec_embcache import EmbCacheEmbedding, EmbCacheError, Saver, TierBudgets, optimizers, serving
from torchrec_embcache.exceptions import ConfigError, InputError, MismatchError, StaleError
from torchrec_embcache.monitoring import ServingCollector

# Workers are separate processes; environment variables pass the settings to them.
PATH, MOST_SECONDS = "SERVE_PATH", "SERVE_MAX_STALENESS_SECONDS"


class Lookup(BaseModel):
    """Ids by table, which is identified by its name or by "module/name"."""

    tables: dict[str, list[int]]


class Pooled(BaseModel):
    """Bags of ids, each of which is pooled to one row."""

    table: str
    bags: list[list[int]]
    pooling: str = "mean"


def make_app() -> FastAPI:
    """Creates the application for uvicorn. It opens the tables at startup and closes them at shutdown."""
    most = os.environ.get(MOST_SECONDS)
    follow = serving.Follow(
        poll_seconds=0.5, max_staleness_seconds=float(most) if most else None, on_stale="raise" if most else "serve"
    )
    tables = serving.open(os.environ[PATH], follow=follow)
    registry = CollectorRegistry()
    registry.register(ServingCollector(tables))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        yield
        tables.close()

    app = FastAPI(title="torchrec-embcache", lifespan=lifespan)

    # Functions that are not async run in threads, so lookups run in parallel.
    def lookup(asked: Lookup) -> dict[str, Any]:
        with tables.pin() as version:
            found = {name: version[name].lookup(ids) for name, ids in asked.tables.items()}
        rows = {name: {"rows": part.tolist(), "found": part.found.tolist()} for name, part in found.items()}
        return {"version": version.name, "tables": rows}

    def pooled(asked: Pooled) -> dict[str, Any]:
        ids = [row_id for bag in asked.bags for row_id in bag]
        offsets = [0]
        for bag in asked.bags:
            offsets.append(offsets[-1] + len(bag))
        if asked.pooling not in ("sum", "mean"):
            raise ConfigError(f'pooling={asked.pooling!r} is not known: use "sum" or "mean"')
        with tables.pin() as version:
            rows = version[asked.table].lookup_pooled(ids, offsets, "sum" if asked.pooling == "sum" else "mean")
        return {"version": version.name, "rows": rows.tolist()}

    def health(response: Response) -> dict[str, Any]:
        stats = tables.stats()
        response.status_code = 503 if stats.is_stale else 200
        return {"version": stats.version, "staleness_seconds": stats.staleness_seconds, "last_error": stats.last_error}

    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def refuse(_request: Request, error: Exception) -> Response:
        status = 503 if isinstance(error, StaleError) else 500
        if isinstance(error, InputError | MismatchError | ConfigError):
            status = 400
        return JSONResponse({"error": type(error).__name__, "message": str(error)}, status)

    app.add_api_route("/lookup", lookup, methods=["POST"])
    app.add_api_route("/pooled", pooled, methods=["POST"])
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", metrics)
    app.add_exception_handler(EmbCacheError, refuse)
    return app


def make_checkpoint(folder: Path) -> Path:
    """Saves a checkpoint of a small table: the row of id n is n, n / 2, n / 4, n / 8."""
    item = EmbCacheEmbedding(
        name="item", embedding_dim=4, tiers=TierBudgets(host_bytes="8MiB"), optimizer=optimizers.SGD(lr=0.1)
    )
    item.import_rows(list(range(1000)), [[n, n / 2, n / 4, n / 8] for n in range(1000)])
    Saver(0).save(item, str(folder / "ckpt"))
    item.close()
    return folder / "ckpt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="a directory of checkpoints; without it a small one is made")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--max-staleness", type=float, metavar="S", help="older checkpoints are not served: status 503")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ[PATH] = str(options.path or make_checkpoint(Path(temporary)))
        if options.max_staleness is not None:
            os.environ[MOST_SECONDS] = str(options.max_staleness)
        uvicorn.run(
            "serve_fastapi:make_app",
            factory=True,
            app_dir=str(Path(__file__).parent),
            host=options.host,
            port=options.port,
            workers=options.workers,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
