"""Rows of chunks, decoded as far as a match needs them: 0.6 to 0.8 µs each where a whole `ObjectRow` costs 1.2.

The field names and their order are `ObjectRow`'s (array encoding); what is not needed is a `msgspec.Raw` that nothing looks into.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.rows import BlobRef, ObjectRow, ObjectState
from kvobj.database import ReadView

_UNREAD: Final = msgspec.Raw(b"\xc0")


class MatchedChunk(msgspec.Struct, frozen=True, gc=False):
    """One chunk of a match with details: its key, its first blob and that one's codec (b"" and "" for a chunk of no bytes), plain
    size and digest (None while it is being computed). Holds nothing of the encoded row: thousands of these are a reply."""

    key: str
    blob_id: bytes
    codec: str
    is_one_blob: bool
    size_bytes: int
    digest: bytes | None


class RowHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of a row, up to its state. Keeps the encoded row alive: for a moment's use."""

    bucket: msgspec.Raw
    key: str
    blobs: tuple[BlobRef, ...]
    size_bytes: int
    etag: msgspec.Raw = _UNREAD
    modified_ms: msgspec.Raw = _UNREAD
    owner: msgspec.Raw = _UNREAD
    durability: msgspec.Raw = _UNREAD
    headers: msgspec.Raw = _UNREAD
    metadata: msgspec.Raw = _UNREAD
    # Empty for chunks, which costs less than what is not looked at.
    checksums: tuple[msgspec.Raw, ...] = ()
    parts: tuple[msgspec.Raw, ...] = ()
    digest: bytes | None = None
    state: ObjectState = ObjectState.LIVE


class ChunkHead(RowHead, frozen=True, array_like=True, gc=False):
    """A chunk's place in its chain too, as a probe needs it."""

    sequence: int = 0
    parent: str | None = None
    depth: int = 0
    chain_sum: bytes = b""
    namespace: str = ""
    tokens: int = 0
    chain_bytes: int = 0
    chain_tokens: int = 0


decode_head = msgspec.msgpack.Decoder(ChunkHead).decode
decode_row_head = msgspec.msgpack.Decoder(RowHead).decode


def matched_chunks(values: Iterable[bytes]) -> list[MatchedChunk]:
    """Encoded rows as a match tells of them, without those that are hidden."""
    return [matched_chunk(head) for head in map(decode_row_head, values) if head.state is ObjectState.LIVE]


def matched_chunk(row: RowHead | ObjectRow) -> MatchedChunk:
    """A row as a match tells of it."""
    blobs = row.blobs
    blob_id, codec = (blobs[0].blob_id, blobs[0].codec) if blobs else (b"", "")
    return MatchedChunk(row.key, blob_id, codec, len(blobs) == 1, row.size_bytes, row.digest)


def stored_head(view: ReadView, objects: ObjectRows, root: bytes, key: str) -> ChunkHead | None:
    """The row of a key, hidden or not."""
    encoded = key.encode()
    value = objects.volatile.get(view, root, encoded)
    if value is None:
        value = objects.durable.get(view, root, encoded)
    return None if value is None else decode_head(value)


def live_head(view: ReadView, objects: ObjectRows, root: bytes, key: str) -> ChunkHead | None:
    """The live row of a key."""
    head = stored_head(view, objects, root, key)
    return head if head is not None and head.state is ObjectState.LIVE else None


def is_same_chunk(one: ChunkHead, other: ChunkHead) -> bool:
    """Whether two rows of a key are one commit's: sequences are never drawn twice, and a row keeps its own."""
    return one.sequence == other.sequence
