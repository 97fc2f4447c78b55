"""Rivals of the benches, each measured on the same batches as our round.

Shapes: K batches, N ids per batch, B bags per batch, R rows of the table, D = 64 columns. A rival is created from (ids int64 [K,
N], R). The result is a round: a function that runs all K batches and returns ids per second.
"""

import time
from collections.abc import Callable

import torch

__all__ = ["RIVALS", "Rival", "Round"]

Round = Callable[[], float]
Rival = Callable[[torch.Tensor, int], Round]

DIM = 64
BAG = 20  # ids per bag


def timed(ids_KN: torch.Tensor, step: Callable[[torch.Tensor], object], threads: int = 1) -> Round:
    step(ids_KN[0])  # warm-up: one-time initialization

    def run() -> float:
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        for ids_N in ids_KN:
            step(ids_N)
        return ids_KN.numel() / (time.perf_counter() - begin)

    return run


def torch_unique(ids_KN: torch.Tensor, _rows: int) -> Round:
    return timed(ids_KN, lambda ids_N: torch.unique(ids_N, return_inverse=True))


def bag_offsets(ids_KN: torch.Tensor) -> torch.Tensor:
    """Returns the offsets of the bags: [B + 1]."""
    return torch.arange(0, ids_KN.shape[1] + 1, BAG)


def embedding_bag_forward(ids_KN: torch.Tensor, rows: int) -> Round:
    weight = torch.empty(rows, DIM).uniform_(-0.01, 0.01)
    offsets = bag_offsets(ids_KN)
    bag = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)

    def step(ids_N: torch.Tensor) -> None:
        with torch.no_grad():
            bag(ids_N, offsets)

    return timed(ids_KN, step)


def embedding_bag_sparse_adam(ids_KN: torch.Tensor, rows: int) -> Round:
    bag = torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, include_last_offset=True)
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.001)
    offsets = bag_offsets(ids_KN)
    grad_BD = torch.full((len(offsets) - 1, DIM), 0.01)

    def step(ids_N: torch.Tensor) -> None:
        optimizer.zero_grad()
        bag(ids_N, offsets).backward(grad_BD)
        optimizer.step()

    return timed(ids_KN, step)


def fbgemm(optimizer: str | None, threads: int = 1) -> Rival:
    """FBGEMM's table-batched embedding on the CPU. Without an optimizer it only runs the forward."""

    def make(ids_KN: torch.Tensor, rows: int) -> Round:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        table = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType[optimizer or "EXACT_ROWWISE_ADAGRAD"],
            learning_rate=0.02,
            eps=1e-8,
            pooling_mode=PoolingMode.SUM,
        )
        table.init_embedding_weights_uniform(-0.01, 0.01)
        offsets = bag_offsets(ids_KN)
        grad_BD = torch.full((len(offsets) - 1, DIM), 0.01)

        def forward(ids_N: torch.Tensor) -> None:
            with torch.no_grad():
                table(ids_N, offsets)

        def train(ids_N: torch.Tensor) -> None:
            table(ids_N, offsets).backward(grad_BD)

        return timed(ids_KN, train if optimizer else forward, threads)

    return make


# The rivals of each bench.
RIVALS: dict[str, dict[str, Rival]] = {
    "dedupe_zipf105": {"torch.unique (1 thread)": torch_unique},
    "dedupe_uniform": {"torch.unique (1 thread)": torch_unique},
    "forward_pooled_zipf105_10m": {"nn.EmbeddingBag": embedding_bag_forward, "FBGEMM TBE": fbgemm(None)},
    "forward_pooled_uniform_10m": {"nn.EmbeddingBag": embedding_bag_forward, "FBGEMM TBE": fbgemm(None)},
    "train_rowwise_adagrad_zipf105_10m": {"FBGEMM TBE": fbgemm("EXACT_ROWWISE_ADAGRAD")},
    "train_rowwise_adagrad_uniform_10m": {"FBGEMM TBE": fbgemm("EXACT_ROWWISE_ADAGRAD")},
    "train_rowwise_adagrad_two_threads": {"FBGEMM TBE (2 threads)": fbgemm("EXACT_ROWWISE_ADAGRAD", threads=2)},
    "train_adagrad_zipf105_10m": {"FBGEMM TBE": fbgemm("EXACT_ADAGRAD")},
    "train_adam_zipf105_4m": {"nn.EmbeddingBag + SparseAdam": embedding_bag_sparse_adam},
}
