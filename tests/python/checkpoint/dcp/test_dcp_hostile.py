"""Hostile metadata with valid checksums is rejected with a typed error before anything is allocated for it."""

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import default_planner as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from dcp_cases import dense_state
from torchrec_embcache.checkpoint.dcp import EmbCacheStorageReader, EmbCacheStorageWriter, reader
from torchrec_embcache.checkpoint.dcp._metadata import DenseExtent, from_json, to_json
from torchrec_embcache.exceptions import CorruptionError, UnsupportedError

STREAMS = [1 << 20, 0, 4096]
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    4097,
    1 << 62,
    1 << 64,
    10**400,
    0.5,
    math.inf,
    "",
    "raw",
    "torch.float32",
    [],
    {},
    [[]],
]
VALUES += [{"tuple": [1]}, {"size": [-1]}, {"what": 1}, [1 << 40] * 3, [0] * 100, "\udfff"]


def document() -> dict[str, Any]:
    """The metadata of a state dict with one of everything, whose tensors lie one behind the other in rank 0's stream."""
    state, mappings = torch_dcp.flatten_state_dict(dense_state(1))
    plan = torch_dcp.create_default_local_save_plan(state, True)
    _, metadata = torch_dcp.create_default_global_save_plan([plan])
    storage, offset = {}, 0
    for item in plan.items:
        value = state[item.index.fqn]
        if isinstance(value, torch.Tensor) and not value.is_sparse and value.nbytes < 10_000:
            extent = DenseExtent(offset, value.nbytes, "raw", value.dtype, tuple(value.shape))
        else:
            extent = DenseExtent(offset, 100, "bytes")
        storage[item.index] = extent
        offset += -(-extent.bytes // 4096) * 4096
    metadata.storage_data, metadata.planner_data = storage, mappings
    metadata.storage_meta = StorageMeta(checkpoint_id="/path", save_id="save")
    loaded: dict[str, Any] = json.loads(to_json(metadata))
    return loaded


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a document, with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def check(document: Any) -> Metadata | None:
    """Reads the document. Returns None if it is rejected. Checks that an accepted document stays within its streams."""
    try:
        metadata = from_json(json.dumps(document).encode(), "dense.json", STREAMS)
    except (CorruptionError, UnsupportedError):
        return None
    for index, extent in metadata.storage_data.items():
        assert isinstance(index, MetadataIndex)
        assert 0 <= extent.offset <= extent.offset + extent.bytes <= STREAMS[extent.rank]
        assert extent.kind != "raw" or math.prod(extent.shape) * extent.dtype.itemsize == extent.bytes
    for item in metadata.state_dict_metadata.values():
        if isinstance(item, TensorStorageMetadata):
            for chunk in item.chunks:
                bounds = zip(chunk.offsets, chunk.sizes, item.size, strict=True)
                assert all(offset >= 0 and offset + length <= whole for offset, length, whole in bounds)
    return metadata


def test_metadata_comes_back_as_it_was() -> None:
    made = document()
    metadata = check(made)
    assert metadata is not None
    assert json.loads(to_json(metadata)) == made
    assert metadata.planner_data["optimizer.state.1.step"] == ("optimizer", "state", 1, "step")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_change_is_refused_or_harmless(seed: int) -> None:
    rng = random.Random(seed)
    whole = document()
    refused = 0
    for _ in range(250):
        changed = copy.deepcopy(whole)
        for _ in range(rng.randint(1, 3)):
            container, key = rng.choice(list(places(changed)))
            if rng.random() < 0.2:
                del container[key]
            else:
                container[key] = copy.deepcopy(rng.choice(VALUES))
        refused += check(changed) is None
    assert refused > 100


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[1]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"format": "torchrec-embcache dense"}']
)
def test_what_is_no_metadata_is_refused(text: bytes) -> None:
    with pytest.raises(CorruptionError, match="dense.json is damaged"):
        from_json(text, "dense.json", STREAMS)


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_another_version_is_called_that(version: object) -> None:
    with pytest.raises(UnsupportedError, match=f"version {version!r} and this release reads 1"):
        from_json(json.dumps({**document(), "version": version}).encode(), "dense.json", STREAMS)


def test_an_item_that_is_stored_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=EmbCacheStorageWriter(tmp_path / "x"), no_dist=True)

    def forgetful(*arguments: Any) -> Metadata:
        metadata = from_json(*arguments)
        metadata.storage_data.clear()
        return metadata

    monkeypatch.setattr(reader, "from_json", forgetful)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"a": torch.zeros(3)}, storage_reader=EmbCacheStorageReader(tmp_path / "x"), no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CorruptionError)


def test_an_extent_past_its_stream_is_refused() -> None:
    for rank, offset, length in [
        (0, 1 << 20, 1),
        (1, 0, 1),
        (3, 0, 0),
        (-1, 0, 0),
        (2, 4096, 1),
        (0, -4096, 8),
        (0, 0, -1),
    ]:
        lying = document()
        lying["storage"][0][3].update(rank=rank, offset=offset, bytes=length, kind="bytes")
        assert check(lying) is None
