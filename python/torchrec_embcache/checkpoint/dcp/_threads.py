"""Check of the process group of a save in a thread: its collectives must not interleave with those of training."""

import inspect
import sys
from types import FrameType

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache.exceptions import InputError

__all__ = ["check_async_save_group"]

_ASYNC_SAVE = inspect.unwrap(async_save).__code__


def check_async_save_group() -> None:
    """Raises `InputError` if the running `dcp.async_save` would save in a thread with the process group of training.

    DCP does not pass the arguments of the call to a writer, so they are read from its frame. A save in a process has its own group.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not _ASYNC_SAVE:
        frame = frame.f_back
    if frame is None or all_ranks().world_size == 1:
        return
    given = frame.f_locals
    in_thread = given["async_checkpointer_type"] is AsyncCheckpointerType.THREAD and not given["no_dist"]
    if in_thread and given["process_group"] in (None, dist.group.WORLD):
        raise InputError(
            "dcp.async_save: process_group is the default group, whose collectives in the saving thread would meet those of "
            'training: make a group once, on every rank, by group = dist.new_group(backend="gloo"), and give process_group=group'
        )
