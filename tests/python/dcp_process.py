"""A trainer that saves in a process beside and trains on: what `test_dcp.py` starts, as the process's group ends with it."""

import os
import sys
import tempfile
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_cases import Model, dense_state, stageable
from torchrec_embcache import EmbCacheStorageWriter

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        writer = EmbCacheStorageWriter(sys.argv[1], model := Model(salt=1))
        for salt in (0, 1):
            state = stageable(dense_state(salt))
            future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
            state["weight"].zero_()
            model.fill(5)
            future.result()
            model.fill(1)
        dist.destroy_process_group()
