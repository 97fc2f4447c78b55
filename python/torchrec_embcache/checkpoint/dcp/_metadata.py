"""DCP's metadata as JSON, stored in the checkpoint's file `dense.json`. All contents of that file are validated before use."""

import base64
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_embcache.exceptions import CorruptionError, UnsupportedError

__all__ = ["DenseExtent", "from_json", "to_json"]

# The format name in the file.
_FORMAT = "torchrec-embcache dense"
_VERSION = 1
# Maximum numbers of dimensions and elements of a tensor.
_MAX_DIMS = 64
_MAX_ELEMENTS = (1 << 63) - 1
# Torch's types, layouts and memory formats, by their names in the file.
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
_MEMORY_FORMATS = {str(form): form for form in (torch.contiguous_format, torch.channels_last, torch.preserve_format)}


@dataclass(frozen=True)
class DenseExtent:
    """Location and encoding of a stored state dict item.

    `offset`: start of the item in the stream of `rank`, in bytes. `bytes`: its length. `kind` is the encoding:

    - "raw": the elements of a tensor of `dtype` and `shape`, in row-major order and little-endian.
    - "saved": a tensor as `torch.save` writes it.
    - "bytes": the bytes that DCP's planner returned for an item that is not a tensor.
    """

    offset: int
    bytes: int
    kind: Literal["raw", "saved", "bytes"]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    rank: int = 0


def to_json(metadata: Metadata) -> bytes:
    """Serializes the metadata as JSON. The values of its `storage_data` are `DenseExtent`s.

    Raises `UnsupportedError` for planner data of a type that JSON cannot represent.
    """
    storage: dict[MetadataIndex, DenseExtent] = metadata.storage_data
    meta = metadata.storage_meta or StorageMeta()
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "torch": str(torch.__version__),
        "dcp_version": metadata.version,
        "save_id": meta.save_id,
        "checkpoint_id": None if meta.checkpoint_id is None else str(meta.checkpoint_id),
        "modules": list(meta.modules),
        "items": {name: _item_to_json(item) for name, item in metadata.state_dict_metadata.items()},
        "storage": [[*_index_to_json(index), _dense_extent_to_json(extent)] for index, extent in storage.items()],
        "planner_data": _value_to_json(metadata.planner_data),
    }
    return json.dumps(document, indent=0).encode()


def from_json(text: bytes, path: str, stream_bytes: Sequence[int]) -> Metadata:
    """Parses the metadata that `to_json` wrote as `text`. Messages name the file `path`.

    `stream_bytes`: the length of each rank's stream. Raises `CorruptionError` if `text` is not such metadata, or if an extent
    exceeds its stream or does not have the length of its tensor. Raises `UnsupportedError` for another version.
    """
    try:
        document = json.loads(text)
        if document["format"] != _FORMAT:
            raise ValueError(f"the format is {document['format']!r}")
        if type(document["version"]) is not int or document["version"] != _VERSION:  # to Python, True and 1.0 equal 1
            raise UnsupportedError(
                f"{path} has version {document['version']!r} and this release reads {_VERSION}: load it with the release that "
                "wrote it"
            )
        storage = {}
        for fqn, offset, index, extent in document["storage"]:
            if index is not None and type(index) is not int:
                raise TypeError(f"{index!r} is not the number of a chunk")
            key = MetadataIndex(_text(fqn), None if offset is None else _sizes(offset), index)
            storage[key] = _dense_extent_from_json(extent, stream_bytes)
        items = {_text(name): _item_from_json(item) for name, item in document["items"].items()}
        return Metadata(
            state_dict_metadata=items,
            planner_data=_value_from_json(document["planner_data"]),
            storage_data=storage,
            storage_meta=StorageMeta(
                checkpoint_id=document["checkpoint_id"], save_id=document["save_id"], modules=document["modules"]
            ),
            version=document["dcp_version"],
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise CorruptionError(f"{path} is damaged: it does not describe a state dict ({error!r})") from error


def _item_to_json(item: TensorStorageMetadata | BytesStorageMetadata) -> dict[str, Any] | None:
    if not isinstance(item, TensorStorageMetadata):
        return None
    properties = item.properties
    return {
        "dtype": _name(properties.dtype),
        "layout": str(properties.layout),
        "requires_grad": properties.requires_grad,
        "memory_format": str(properties.memory_format),
        "pin_memory": properties.pin_memory,
        "size": list(item.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in item.chunks],
    }


def _item_from_json(item: dict[str, Any] | None) -> TensorStorageMetadata | BytesStorageMetadata:
    if item is None:
        return BytesStorageMetadata()
    size = _sizes(item["size"])
    chunks = []
    for given_offsets, given_sizes in item["chunks"]:
        offsets, sizes = _sizes(given_offsets), _sizes(given_sizes)
        if not len(size) == len(offsets) == len(sizes):
            raise ValueError(f"a chunk of {len(sizes)} dimensions of a tensor of {len(size)}")
        if any(offset + length > whole for offset, length, whole in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"a chunk at {list(offsets)} of {list(sizes)} is not within {list(size)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    properties = TensorProperties(
        dtype=_DTYPES[item["dtype"]],
        layout=_LAYOUTS[item["layout"]],
        requires_grad=bool(item["requires_grad"]),
        memory_format=_MEMORY_FORMATS[item["memory_format"]],
        pin_memory=bool(item["pin_memory"]),
    )
    return TensorStorageMetadata(properties, size, chunks)


def _index_to_json(index: MetadataIndex) -> tuple[str, list[int] | None, int | None]:
    return index.fqn, None if index.offset is None else list(index.offset), index.index


def _dense_extent_to_json(dense_extent: DenseExtent) -> dict[str, Any]:
    fields = {**dataclasses.asdict(dense_extent), "shape": list(dense_extent.shape)}
    fields["dtype"] = None if dense_extent.dtype is None else _name(dense_extent.dtype)
    return fields


def _dense_extent_from_json(fields: dict[str, Any], stream_bytes: Sequence[int]) -> DenseExtent:
    rank, offset, length, kind = fields["rank"], fields["offset"], fields["bytes"], fields["kind"]
    if type(rank) is not int or not 0 <= rank < len(stream_bytes):
        raise ValueError(f"an extent is of rank {rank!r} of {len(stream_bytes)}")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"an extent at {offset!r} of {length!r} bytes")
    if offset + length > stream_bytes[rank]:
        raise ValueError(f"an extent ends at {offset + length} of {stream_bytes[rank]} bytes")
    if kind not in ("raw", "saved", "bytes"):
        raise ValueError(f"an extent of kind {kind!r}")
    shape = tuple(_sizes(fields["shape"]))
    dtype = _DTYPES[fields["dtype"]] if kind == "raw" else None
    if dtype is not None and math.prod(shape) * dtype.itemsize != length:
        raise ValueError(f"{length} bytes for {list(shape)} of {dtype}")
    return DenseExtent(offset, length, kind, dtype, shape, rank)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a name")
    return value


def _sizes(values: list[int]) -> torch.Size:
    if len(values) > _MAX_DIMS or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} are not sizes")
    if math.prod(values) > _MAX_ELEMENTS or any(value > _MAX_ELEMENTS for value in values):
        raise ValueError(f"{values!r} are more than any tensor has")
    return torch.Size(values)


def _value_to_json(value: object) -> Any:
    """Converts a value of planner data to JSON. Numbers, text, None and lists are unchanged. Any other value becomes an object
    whose only key is its type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_value_to_json(entry) for entry in value]
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, tuple):
        return {"tuple": [_value_to_json(entry) for entry in value]}
    if isinstance(value, dict):
        return {"dict": [[_value_to_json(key), _value_to_json(entry)] for key, entry in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    raise UnsupportedError(
        f"planner_data holds a {type(value).__name__}, which is not saved: use plain values, lists, tuples and dicts"
    )


def _value_from_json(value: Any) -> Any:
    """Inverse of `_value_to_json`."""
    if isinstance(value, list):
        return [_value_from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "size":
            return _sizes(content)
        case "tuple":
            return tuple(_value_from_json(entry) for entry in content)
        case "dict":
            return {_value_from_json(key): _value_from_json(entry) for key, entry in content}
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "dtype":
            return _DTYPES[content]
        case _:
            raise ValueError(f"a value of type {kind!r}")
