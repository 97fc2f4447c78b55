"""Runs a function together with other work, for the tests of Megatron-Core."""

from typing import Any

import torch.multiprocessing as mp


def run_beside(request: Any) -> None:
    """Save as megatron's caller does, in a fork of the trainer."""
    args = list(request.async_fn_args)
    args[1] = request.preload_fn()
    process = mp.get_context("fork").Process(target=request.async_fn, args=args, kwargs=request.async_fn_kwargs)
    process.start()
    process.join()
    assert process.exitcode == 0
