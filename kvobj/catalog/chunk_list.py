"""A list of chunks as a request names it: raw chunk ids, or keys. Made once, read by position.

Chunk ids stay one byte string, since most of a long list is never looked at: a match probes a dozen of 4,096.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CHUNK_ID_BYTES = 32


class ChunkList(Protocol):
    """Chunks in the order of the request."""

    def __len__(self) -> int:
        """How many."""
        ...

    def key(self, index: int) -> str:
        """The S3 key of one."""
        ...

    def lanes(self) -> bytes:
        """16 bytes a chunk, as `ids.chain_sums` sums them up."""
        ...


class IdList:
    """Chunk ids, 32 bytes each; their keys are their hex digits."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        if len(raw) % CHUNK_ID_BYTES:
            raise ValueError("chunk ids have 32 bytes each")
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw) // CHUNK_ID_BYTES

    def key(self, index: int) -> str:
        """See `ChunkList.key`."""
        return self.raw[index * CHUNK_ID_BYTES : (index + 1) * CHUNK_ID_BYTES].hex()

    def lanes(self) -> bytes:
        """See `ChunkList.lanes`: the first half of each id."""
        return b"".join([self.raw[at : at + 16] for at in range(0, len(self.raw), CHUNK_ID_BYTES)])


class KeyList:
    """S3 keys as they are."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, index: int) -> str:
        """See `ChunkList.key`."""
        return self._keys[index]

    def lanes(self) -> bytes:
        """See `ChunkList.lanes`."""
        raise NotImplementedError
