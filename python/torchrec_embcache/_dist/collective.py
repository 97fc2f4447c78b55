"""Process groups that exchange values between CPUs.

An exchange between devices would wait for pending device work and block the CPU.
"""

import atexit
import pickle
import weakref
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["cpu_group", "exchange", "gloo_group", "is_distributed"]

T = TypeVar("T")


def is_distributed() -> bool:
    """True if there is a default process group."""
    return dist.is_available() and dist.is_initialized()


# Maps groups that cannot exchange CPU tensors, such as those of NCCL, to a gloo group of the same ranks.
_gloo_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def cpu_group(group: dist.ProcessGroup | None = None) -> Any:
    """Returns a group of the ranks of `group` (by default the default group) whose own methods exchange CPU tensors.

    Returns `group` itself if it can do so, else a gloo group, which is created by the first call for `group`. All ranks of the
    group, and no others, make that call at the same time.
    """
    asked = group if group is not None else dist.group.WORLD
    assert asked is not None, "the callers ask whether there is a default group"
    if any(device.type == "cpu" for device in asked._device_types):  # noqa: SLF001 - torch says it nowhere else
        return asked
    if asked not in _gloo_groups:
        _gloo_groups[asked] = gloo_group(asked, "cpu")
    return _gloo_groups[asked]


def gloo_group(group: dist.ProcessGroup, name: str) -> Any:
    """Creates a gloo group of the ranks of `group`. They make this call at the same time, with the same new `name`.

    `new_group` would require ranks outside of the group to take part, and it names groups by their number, which differs between
    ranks that were members of different groups before.
    """
    backends = [group._get_backend(device) for device in group._device_types]  # noqa: SLF001
    options = [getattr(backend, "options", None) for backend in backends]
    timeouts = [getattr(each, "_timeout", dist.distributed_c10d.default_pg_timeout) for each in options]
    group_store = dist.distributed_c10d._get_process_group_store(group)  # noqa: SLF001
    store = dist.distributed_c10d.PrefixStore(f"torchrec_embcache/{name}", group_store)
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), max(timeouts))


# As for the group of asynchronous saves: the threads of these groups stop before the interpreter does.
atexit.register(_gloo_groups.clear)


def exchange(value: T, group: Any) -> list[T]:
    """Returns the value of each rank, in rank order, using the group's own methods, which need no default group.

    Collective; values are pickled.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(data)], dtype=torch.int64, device="cpu")]).wait()
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = data
    everyone = [torch.empty_like(padded) for _ in sizes]
    group.allgather([everyone], [padded]).wait()
    return [pickle.loads(data[: int(size)].numpy().tobytes()) for data, size in zip(everyone, sizes, strict=True)]
