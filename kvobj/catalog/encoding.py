"""The tables of the LMDB catalog, and how rows and their keys are written in them.

Values are msgpack arrays of rows (fields are only appended); keys are made so that LMDB's byte order is the order wanted.
Durable tables have volatile twins for what is of class `memory`; the bytes are the same in both.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import BucketRow, ObjectRow, PartRow, QueueEntry, UploadRow, UserRow
from kvobj.database import Table

META: Final = Table("catalog_meta", volatile=False)
USERS: Final = Table("users", volatile=False)
BUCKETS: Final = Table("buckets", volatile=False)
OBJECTS: Final = Table("objects", volatile=False)
OBJECTS_VOLATILE: Final = Table("objects_volatile", volatile=True)
USAGE: Final = Table("bucket_usage", volatile=False)
USAGE_VOLATILE: Final = Table("bucket_usage_volatile", volatile=True)
UPLOADS: Final = Table("uploads", volatile=False)
UPLOADS_VOLATILE: Final = Table("uploads_volatile", volatile=True)
PARTS: Final = Table("parts", volatile=False)
PARTS_VOLATILE: Final = Table("parts_volatile", volatile=True)
DELETE_QUEUE: Final = Table("delete_queue", volatile=False)
DELETE_QUEUE_VOLATILE: Final = Table("delete_queue_volatile", volatile=True)
CHILDREN: Final = Table("children", volatile=False)
CHILDREN_VOLATILE: Final = Table("children_volatile", volatile=True)
EXPOSED: Final = Table("exposed_parents", volatile=False)
HIDDEN: Final = Table("hidden", volatile=False)
HIDDEN_VOLATILE: Final = Table("hidden_volatile", volatile=True)
NAMESPACES: Final = Table("namespaces", volatile=False)
NAMESPACE_USAGE: Final = USAGE
NAMESPACE_USAGE_VOLATILE: Final = USAGE_VOLATILE
"""In one table with those of buckets (root ‖ name beside root): a commit writes both, and each table it touches costs it a page."""
SESSIONS: Final = Table("sessions", volatile=True)
PINS: Final = Table("pins", volatile=True)
PINS_BY_BLOB: Final = Table("pins_by_blob", volatile=True)
PINS_BY_KEY: Final = Table("pins_by_key", volatile=True)
PINS_BY_SESSION: Final = Table("pins_by_session", volatile=True)
LEASE_META: Final = Table("lease_meta", volatile=True)
LEASE_USAGE: Final = Table("lease_usage", volatile=True)
EVENTS: Final = Table("events", volatile=False)
EVENTS_VOLATILE: Final = Table("events_volatile", volatile=True)
REMOVALS: Final = Table("removals", volatile=True)
REMOVALS_BY_TIME: Final = Table("removals_by_time", volatile=True)

CATALOG_TABLES: Final = (
    META, USERS, BUCKETS, OBJECTS, OBJECTS_VOLATILE, USAGE, USAGE_VOLATILE,
    UPLOADS, UPLOADS_VOLATILE, PARTS, PARTS_VOLATILE, DELETE_QUEUE, DELETE_QUEUE_VOLATILE,
    CHILDREN, CHILDREN_VOLATILE, EXPOSED, HIDDEN, HIDDEN_VOLATILE, NAMESPACES,
    SESSIONS, PINS, PINS_BY_BLOB, PINS_BY_KEY, PINS_BY_SESSION, LEASE_META,
    LEASE_USAGE, EVENTS, EVENTS_VOLATILE, REMOVALS, REMOVALS_BY_TIME,
)  # fmt: skip
"""What the catalog needs of the database it is opened on."""

REMOTE_QUEUE: Final = Table("remote_queue", volatile=False)
REMOTE_QUEUE_ROWS: Final = Table("remote_queue_rows", volatile=False)
REMOTE_QUEUE_BYTES: Final = Table("remote_queue_bytes", volatile=False)

REMOTE_TABLES: Final = (REMOTE_QUEUE, REMOTE_QUEUE_ROWS, REMOTE_QUEUE_BYTES)
"""What it needs beside them where the database is opened with an outbox."""

EPOCH: Final = b"epoch"
GONE_BUCKETS: Final = b"gone_buckets"
INCARNATION: Final = b"incarnation"
INCARNATION_SHIFT: Final = 40
"""Numbers (sequences, node ids, queue positions) are incarnation ‖ 40-bit count: a start draws no number again, and no
commit has to write down how far the count has come. The incarnation grows by one a start."""

ROOT_BYTES: Final = 8
_PART_NUMBER: Final = struct.Struct(">H")


def _plain(value: object) -> bytes:
    """Ids are subclasses of bytes, which msgspec does not encode by itself."""
    if isinstance(value, bytes):
        return bytes(value)
    raise NotImplementedError(f"a row holds a {type(value).__name__}")


encode_row = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_object = msgspec.msgpack.Decoder(ObjectRow).decode
decode_user = msgspec.msgpack.Decoder(UserRow).decode
decode_upload = msgspec.msgpack.Decoder(UploadRow).decode
decode_part = msgspec.msgpack.Decoder(PartRow).decode
decode_queue_entry = msgspec.msgpack.Decoder(QueueEntry).decode
decode_bucket = msgspec.msgpack.Decoder(BucketRow).decode
decode_namespace = msgspec.msgpack.Decoder(NamespaceRow).decode


class StoredBucket(NamedTuple):
    """A bucket and the root node of its trees, which no other bucket ever has (also not one of the same name)."""

    root: bytes
    row: BucketRow


def encode_stored_bucket(bucket: StoredBucket) -> bytes:
    """Root, then the row."""
    return bucket.root + encode_row(bucket.row)


@lru_cache(maxsize=1024)
def decode_stored_bucket(value: bytes) -> StoredBucket:
    """See `encode_stored_bucket`."""
    return StoredBucket(value[:ROOT_BYTES], decode_bucket(value[ROOT_BYTES:]))


def upload_key(key: bytes, upload_id: str) -> bytes:
    """Sorts by (key, upload id): zero bytes of the key are escaped, so that its end (00 01) sorts below all that goes on."""
    return escaped(key) + b"\0\x01" + upload_id.encode()


def escaped(key: bytes) -> bytes:
    """The part of `upload_key` that stands for (the beginning of) a key."""
    return key.replace(b"\0", b"\0\xff")


def part_key(upload_id: str, number: int) -> bytes:
    """Sorts the parts of an upload by number."""
    return upload_id.encode() + b"\0" + _PART_NUMBER.pack(number)


def part_range(upload_id: str) -> tuple[bytes, bytes]:
    """From where to where the parts of an upload lie."""
    return upload_id.encode() + b"\0", upload_id.encode() + b"\x01"


def number_key(number: int) -> bytes:
    """A number in order."""
    return number.to_bytes(8, "big")
