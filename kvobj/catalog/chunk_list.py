"""A list of chunks as a request names it: raw chunk ids, or keys. Made once, read by position.

Chunk ids stay one byte string, since most of a long list is never looked at: a match probes a dozen of 4,096.
"""

from __future__ import annotations

from array import array
from binascii import hexlify
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, Protocol

from kvobj.ids.chain_sums import id_lanes, key_lanes

CHUNK_ID_BYTES: Final = 32
_KEY_BYTES: Final = 2 * CHUNK_ID_BYTES


class ChunkList(Protocol):
    """Chunks in the order of the request."""

    def __len__(self) -> int:
        """How many."""
        ...

    def key(self, index: int) -> str:
        """The S3 key of one."""
        ...

    def joined_keys(self, start: int, stop: int) -> tuple[bytes, array[int]]:
        """The UTF-8 of the keys from `start` to before `stop`, end to end, and where each of them ends; read-only."""
        ...

    def lanes(self, start: int, stop: int) -> bytes:
        """16 bytes for each of them, as `ids.chain_sums` sums them up."""
        ...


@lru_cache(maxsize=16)
def _ends(count: int) -> array[int]:
    return array("I", range(_KEY_BYTES, (count + 1) * _KEY_BYTES, _KEY_BYTES))


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

    def joined_keys(self, start: int, stop: int) -> tuple[bytes, array[int]]:
        """See `ChunkList.joined_keys`. ~10 ns a key."""
        digits = hexlify(self.raw[start * CHUNK_ID_BYTES : stop * CHUNK_ID_BYTES])
        return digits, _ends(len(digits) // _KEY_BYTES)

    def lanes(self, start: int, stop: int) -> bytes:
        """See `ChunkList.lanes`: the first half of each id. ~1 ns an id."""
        return id_lanes(self.raw[start * CHUNK_ID_BYTES : stop * CHUNK_ID_BYTES])


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

    def joined_keys(self, start: int, stop: int) -> tuple[bytes, array[int]]:
        """See `ChunkList.joined_keys`. ~0.2 µs a key."""
        keys = [key.encode() for key in self._keys[start:stop]]
        return b"".join(keys), array("I", accumulate(map(len, keys)))

    def lanes(self, start: int, stop: int) -> bytes:
        """See `ChunkList.lanes`. ~1.5 µs a key that is no chunk id: it is hashed."""
        return b"".join([key_lanes(key) for key in self._keys[start:stop]])


def first_of(chunks: ChunkList, count: int) -> ChunkList:
    """So many chunks at the head of a list, in the same form."""
    if isinstance(chunks, IdList):
        return IdList(chunks.raw[: count * CHUNK_ID_BYTES])
    return KeyList([chunks.key(index) for index in range(min(count, len(chunks)))])
