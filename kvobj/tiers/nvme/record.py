"""The 4 KiB page in front of every blob in a segment file: what it is, whose it is, and where it must lie.

It exists so that a lost directory can be rebuilt by reading the segments. The page is authenticated with a key of the store
and names its own place, so neither a payload nor a copy of a page elsewhere can pose as a record. It says nothing about
whether the frame behind it is intact: the frame checks itself.

Layout, little-endian: magic 8 bytes, version u16, reserved u16, segment u32, offset u64, blob id 16 bytes, frame bytes u64,
bucket length u16, key length u16, bucket and key in UTF-8, zeros, BLAKE3 keyed MAC of all before it (32 bytes).
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

import msgspec
from blake3 import blake3

from kvobj.ids import BlobId
from kvobj.tiers.protocol import BlobNames

RECORD_BYTES: Final = 4096
RECORD_KEY_BYTES: Final = 32
RECORD_MAGIC: Final = b"\x93kvoRec\n"
RECORD_VERSION: Final = 1

_MAC_BYTES: Final = 32
_BODY_BYTES: Final = RECORD_BYTES - _MAC_BYTES
_HEAD: Final = struct.Struct("<8sHHIQ16sQHH")
_BLOB: Final = struct.Struct("<8sHHIQ16sQ")  # as the head begins
NAMES_BYTES_MAX: Final = _BODY_BYTES - _HEAD.size


class Record(msgspec.Struct, frozen=True, gc=False):
    """One blob at rest: `offset` is that of the record page in segment number `segment`; the frame follows the page."""

    segment: int
    offset: int
    blob_id: BlobId
    frame_bytes: int
    names: BlobNames


def _hash_of(page: memoryview, key: bytes) -> bytes:
    return blake3(page[:_BODY_BYTES], key=key).digest()


def _has_hash(page: memoryview, key: bytes) -> bool:
    return hmac.compare_digest(_hash_of(page, key), page[_BODY_BYTES:])


def encode_record(record: Record, key: bytes, into: memoryview) -> None:
    """Write the page into `into` (exactly 4096 bytes). ValueError for names longer than a page can carry."""
    bucket = record.names.bucket.encode()
    name = record.names.key.encode()
    if len(bucket) + len(name) > NAMES_BYTES_MAX:
        raise ValueError(f"names of {len(bucket) + len(name)} bytes do not fit a record")
    head = _HEAD.pack(
        RECORD_MAGIC,
        RECORD_VERSION,
        0,
        record.segment,
        record.offset,
        record.blob_id,
        record.frame_bytes,
        len(bucket),
        len(name),
    )
    into[:] = (head + bucket + name).ljust(RECORD_BYTES, b"\0")
    into[_BODY_BYTES:] = _hash_of(into, key)


def is_record_of(page: memoryview, key: bytes, *, segment: int, offset: int, blob_id: BlobId, frame_bytes: int) -> bool:
    """Whether `decode_record` finds the record of this blob at this place, whatever its names are; in half the time."""
    wanted = _BLOB.pack(RECORD_MAGIC, RECORD_VERSION, 0, segment, offset, blob_id, frame_bytes)
    return bytes(page[: _BLOB.size]) == wanted and _has_hash(page, key)


def decode_record(page: memoryview, key: bytes) -> Record | None:
    """The record in a page of 4096 bytes, or None for anything that this store's key did not write as one."""
    if bytes(page[: len(RECORD_MAGIC)]) != RECORD_MAGIC or not _has_hash(page, key):
        return None
    body = bytes(page[:_BODY_BYTES])
    _, version, _, segment, offset, blob_id, frame_bytes, bucket_bytes, key_bytes = _HEAD.unpack_from(body)
    if version != RECORD_VERSION:
        return None
    split = _HEAD.size + bucket_bytes
    names = BlobNames(bucket=body[_HEAD.size : split].decode(), key=body[split : split + key_bytes].decode())
    return Record(segment=segment, offset=offset, blob_id=BlobId(blob_id), frame_bytes=frame_bytes, names=names)
