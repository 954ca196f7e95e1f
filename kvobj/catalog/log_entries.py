"""Entries of the record log that the catalog writes: one durable change of one row each. Kinds 0x01 to 0x3f are the catalog's.

An entry is its kind (one byte) and a msgpack value. Replaying them in order over nothing gives the durable rows; an entry
may be replayed twice. Blobs and the delete queue are not in here: after a rebuild the sweep finds blobs that no row names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from kvobj.catalog.encoding import (
    decode_bucket,
    decode_namespace,
    decode_object,
    decode_upload,
    decode_user,
    encode_row,
)
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import BucketRow, ObjectRow, PartRow, UploadRow, UserRow
from kvobj.database import WriteView
from kvobj.errors import CorruptionError

_ROW_PUT: Final = 0x01
_ROW_REMOVED: Final = 0x02
_BUCKET_PUT: Final = 0x03
_BUCKET_REMOVED: Final = 0x04
_USER_PUT: Final = 0x05
_USER_REMOVED: Final = 0x06
_UPLOAD_PUT: Final = 0x07
_UPLOAD_REMOVED: Final = 0x08
_PART_PUT: Final = 0x09
_NAMESPACE_PUT: Final = 0x0A
_NAMESPACE_REMOVED: Final = 0x0B
_GONE_BUCKETS: Final = 0x0C
_LAST_KIND: Final = 0x3F


class RowRemoved(msgspec.Struct, frozen=True, array_like=True):
    """The object is gone."""

    bucket: str
    key: str


class BucketRemoved(msgspec.Struct, frozen=True, array_like=True):
    """The bucket is gone; it was empty."""

    name: str


class GoneBuckets(msgspec.Struct, frozen=True, array_like=True):
    """No bucket that is gone was made later than that: one that is made from here on is told from all of them by its time."""

    made_ms: int


class UserRemoved(msgspec.Struct, frozen=True, array_like=True):
    """The user is gone."""

    id: str


class UploadRemoved(msgspec.Struct, frozen=True, array_like=True):
    """The upload was completed or aborted; its parts went with it."""

    bucket: str
    key: str
    upload_id: str


class PartPut(msgspec.Struct, frozen=True, array_like=True):
    """A part of the upload, replacing one of the same number."""

    bucket: str
    key: str
    part: PartRow


class NamespaceRemoved(msgspec.Struct, frozen=True, array_like=True):
    """The namespace is gone; its chunks went before it."""

    bucket: str
    name: str


LogEntry = (
    ObjectRow
    | BucketRow
    | UserRow
    | UploadRow
    | NamespaceRow
    | PartPut
    | RowRemoved
    | BucketRemoved
    | GoneBuckets
    | UserRemoved
    | UploadRemoved
    | NamespaceRemoved
)

_KINDS: Final[dict[type[LogEntry], int]] = {
    ObjectRow: _ROW_PUT,
    RowRemoved: _ROW_REMOVED,
    BucketRow: _BUCKET_PUT,
    BucketRemoved: _BUCKET_REMOVED,
    UserRow: _USER_PUT,
    UserRemoved: _USER_REMOVED,
    UploadRow: _UPLOAD_PUT,
    UploadRemoved: _UPLOAD_REMOVED,
    PartPut: _PART_PUT,
    NamespaceRow: _NAMESPACE_PUT,
    NamespaceRemoved: _NAMESPACE_REMOVED,
    GoneBuckets: _GONE_BUCKETS,
}
_REMOVED: Final = bytes([_ROW_REMOVED])
_decode_row_removed = msgspec.msgpack.Decoder(RowRemoved).decode
_decode_bucket_removed = msgspec.msgpack.Decoder(BucketRemoved).decode
_decode_user_removed = msgspec.msgpack.Decoder(UserRemoved).decode
_decode_upload_removed = msgspec.msgpack.Decoder(UploadRemoved).decode
_decode_part_put = msgspec.msgpack.Decoder(PartPut).decode
_decode_namespace_removed = msgspec.msgpack.Decoder(NamespaceRemoved).decode
_decode_gone_buckets = msgspec.msgpack.Decoder(GoneBuckets).decode
_DECODERS: Final[dict[int, Callable[[bytes], LogEntry]]] = {
    _ROW_PUT: decode_object,
    _ROW_REMOVED: _decode_row_removed,
    _BUCKET_PUT: decode_bucket,
    _BUCKET_REMOVED: _decode_bucket_removed,
    _USER_PUT: decode_user,
    _USER_REMOVED: _decode_user_removed,
    _UPLOAD_PUT: decode_upload,
    _UPLOAD_REMOVED: _decode_upload_removed,
    _PART_PUT: _decode_part_put,
    _NAMESPACE_PUT: decode_namespace,
    _NAMESPACE_REMOVED: _decode_namespace_removed,
    _GONE_BUCKETS: _decode_gone_buckets,
}


def encode_entry(entry: LogEntry) -> bytes:
    """The entry as it stands in the log."""
    return bytes([_KINDS[type(entry)]]) + encode_row(entry)


def tell(view: WriteView, entry: LogEntry, *, removed_from: str = "") -> None:
    """Write the entry to the record log, and publish it. `removed_from`: the bucket that something is removed from by it, which is
    the topic of such publications (`Outbox.removals_of`)."""
    content = encode_entry(entry)
    view.log(content)
    view.publish(content, topic=removed_from)


def encode_row_removed(bucket: str, key: str) -> bytes:
    """The entry of a `RowRemoved`, which there are many of."""
    return _REMOVED + encode_row((bucket, key))


def encode_rows_removed(bucket: str, keys: Iterable[bytes]) -> Iterator[bytes]:
    """`encode_row_removed` of each of a bucket's keys, at a fifth of the cost."""
    heads: dict[int, bytes] = {}
    for key in keys:
        head = heads.get(len(key))
        if head is None:
            entry = encode_row_removed(bucket, key.decode())
            head = heads[len(key)] = entry[: len(entry) - len(key)]  # a text ends with its bytes
        yield head + key


def encode_object_value(value: bytes) -> bytes:
    """The entry for an object row that is encoded already (as the objects table has it)."""
    return bytes([_ROW_PUT]) + value


def decode_entry(content: bytes) -> LogEntry | None:
    """An entry of the catalog's, None for one of somebody else's. `CorruptionError` for what is neither."""
    if not content:
        raise CorruptionError("empty record log entry")
    kind = content[0]
    if kind > _LAST_KIND:
        return None
    decode = _DECODERS.get(kind)
    if decode is None:
        raise CorruptionError("record log entry of an unknown kind: written by a newer version?", kind=kind)
    try:
        return decode(content[1:])
    except msgspec.MsgspecError as error:
        raise CorruptionError("record log entry that cannot be decoded", kind=kind) from error
