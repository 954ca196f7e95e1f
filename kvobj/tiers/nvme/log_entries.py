"""The nvme tier's entries in the record log: small frames, which no segment scan would find, and removals.

Pure encoding. Kinds 0x40 to 0x7f are this tier's; the log frames and checksums entries, so nothing here does. With them and
the segments' record pages a lost directory is rebuilt, and what was deleted stays deleted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvobj.errors import CorruptionError
from kvobj.ids import BLOB_ID_BYTES, BlobId
from kvobj.tiers.protocol import BlobNames

INLINE_PUT: Final = 0x40
BLOBS_REMOVED: Final = 0x41
KINDS: Final = range(0x40, 0x80)

_PUT_HEAD: Final = struct.Struct("<B16sHHI")
_REMOVED_HEAD: Final = struct.Struct("<BI")


@dataclass(frozen=True, slots=True)
class InlinePut:
    """A small frame and its names. `frame` may be a view of the entry that it was decoded from."""

    blob_id: BlobId
    names: BlobNames
    frame: bytes | memoryview


@dataclass(frozen=True, slots=True)
class BlobsRemoved:
    """Blobs, inline or in segments, that were deleted: for good, or because the remote has them, or to be put again whole."""

    blob_ids: tuple[BlobId, ...]


def encode_inline_put(blob_id: BlobId, names: BlobNames, frame: bytes | memoryview) -> bytes:
    """The entry (and the value of the inline table) for a small frame."""
    bucket, key = names.bucket.encode(), names.key.encode()
    return b"".join((_PUT_HEAD.pack(INLINE_PUT, blob_id, len(bucket), len(key), len(frame)), bucket, key, frame))


def encode_removed(blob_ids: Sequence[BlobId]) -> bytes:
    """The entry for a batch of removals."""
    return _REMOVED_HEAD.pack(BLOBS_REMOVED, len(blob_ids)) + b"".join(blob_ids)


def decode_entry(entry: bytes) -> InlinePut | BlobsRemoved | None:
    """What an entry of the record log says, None if its kind is not this tier's. `CorruptionError` if it is malformed."""
    if not entry or entry[0] not in KINDS:
        return None
    if entry[0] == INLINE_PUT and len(entry) >= _PUT_HEAD.size:
        _, blob_id, bucket_bytes, key_bytes, frame_bytes = _PUT_HEAD.unpack_from(entry)
        key_start = _PUT_HEAD.size + bucket_bytes
        frame_start = key_start + key_bytes
        if len(entry) == frame_start + frame_bytes:
            try:
                names = BlobNames(
                    bucket=entry[_PUT_HEAD.size : key_start].decode(), key=entry[key_start:frame_start].decode()
                )
            except UnicodeDecodeError as error:
                raise CorruptionError("nvme log entry names are not text", blob_id=blob_id.hex()) from error
            return InlinePut(BlobId(blob_id), names, memoryview(entry)[frame_start:])
    elif entry[0] == BLOBS_REMOVED and len(entry) >= _REMOVED_HEAD.size:
        _, count = _REMOVED_HEAD.unpack_from(entry)
        if len(entry) == _REMOVED_HEAD.size + count * BLOB_ID_BYTES:
            starts = range(_REMOVED_HEAD.size, len(entry), BLOB_ID_BYTES)
            return BlobsRemoved(tuple(BlobId(entry[start : start + BLOB_ID_BYTES]) for start in starts))
    raise CorruptionError("nvme log entry is malformed", kind=entry[0], length=len(entry))
