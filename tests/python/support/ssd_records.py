"""The place of a record in the files of an SSD tier."""

import struct
from collections.abc import Iterator
from pathlib import Path

# The trailer is the last 72 bytes of a segment. It has the number of records at byte 8.
TRAILER_BYTES = 72


# Where in a record the id is.
ID_AT = 4


def records(path: Path) -> Iterator[tuple[int, int, int]]:
    """The position, the length and the id of each record of a row in a segment."""
    data = path.read_bytes()
    header, content, length = struct.unpack_from("<I", data, 8)[0], data[12], struct.unpack_from("<I", data, 16)[0]
    count = struct.unpack_from("<I", data, len(data) - TRAILER_BYTES + 8)[0] & 0xFFFFFF
    for at in range(header, header + count * length, length) if content == 1 else ():
        yield at, length, struct.unpack_from("<q", data, at + ID_AT)[0]


def place_of(root: Path, row: int) -> tuple[Path, int, int]:
    """The file, the position and the length of the record of a row that was written once."""
    found = [
        (path, at, length) for path in sorted(root.rglob("*.seg")) for at, length, id_ in records(path) if id_ == row
    ]
    assert len(found) == 1
    return found[0]
