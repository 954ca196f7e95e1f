"""How a chunk of LMCache's in-process connector lies in the store: as it is, or behind what says what it is. Pure.

A full chunk of the shape that the engine's configuration gives is its bytes and nothing else: they go from an engine's memory to
the store's and back in one copy. Any other (a short last chunk, one layer's, a serialized one) has a head: `MAGIC`, a byte that
says how many bytes follow behind the chunk (0 or 1), then LMCache's `RemoteMetadata`, then the chunk. The one byte behind it is
there where head and chunk together would be as large as a full chunk: so size alone tells the two forms apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

MAGIC: Final = b"kvobjLM1"

_HEAD_BYTES: Final = len(MAGIC) + 1

T = TypeVar("T")


def with_head(metadata: bytes, data: memoryview, *, full_bytes: int) -> bytearray:
    """A chunk with its head. `full_bytes`: the size of a full chunk without one."""
    size = _HEAD_BYTES + len(metadata) + len(data)
    is_padded = size == full_bytes
    stored = bytearray(size + is_padded)
    stored[:_HEAD_BYTES] = MAGIC + bytes([is_padded])
    stored[_HEAD_BYTES : size - len(data)] = metadata
    stored[size - len(data) : size] = data
    return stored


def parse_head(
    stored: memoryview, *, metadata_bytes: int, parse: Callable[[bytes], T], length_of: Callable[[T], int]
) -> tuple[T, memoryview] | None:
    """What a head says and the chunk behind it; None for bytes that have no head, or not one that fits them.

    `parse` reads metadata, and may raise whatever it likes for what is none; `length_of` says how long a chunk it tells of.
    """
    start = _HEAD_BYTES + metadata_bytes
    if len(stored) < start or bytes(stored[: len(MAGIC)]) != MAGIC or stored[len(MAGIC)] > 1:
        return None
    data = stored[start : len(stored) - stored[len(MAGIC)]]
    try:
        metadata = parse(bytes(stored[_HEAD_BYTES:start]))
        length = length_of(metadata)
    except Exception:  # noqa: BLE001 - it is another's parser, and these are not its bytes
        return None
    return (metadata, data) if length == len(data) else None
