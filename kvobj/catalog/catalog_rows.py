"""What the catalog's changes work on: the tables of objects, uploads and history, the guard of pins, and the
remote queue where there is a remote, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import msgspec

from kvobj.catalog.encoding import (
    BUCKETS,
    GONE_BUCKETS,
    META,
    ROOT_BYTES,
    StoredBucket,
    decode_stored_bucket,
    number_key,
)
from kvobj.catalog.history_rows import HistoryRows
from kvobj.catalog.lease_rows import PinGuard
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.remote_rows import RemoteRows
from kvobj.catalog.rows import BucketRow
from kvobj.catalog.upload_rows import UploadRows
from kvobj.database import ReadView, WriteView
from kvobj.errors import NoSuchBucketError


@dataclass(frozen=True, slots=True)
class CatalogRows:
    """See the module's text. Stateless but for the guard's quiet time."""

    objects: ObjectRows
    uploads: UploadRows
    history: HistoryRows
    guard: PinGuard
    remote: RemoteRows | None = None

    @classmethod
    def over(cls, allocate: Callable[[], int], *, has_remote: bool = False) -> Self:
        """All of them, drawing numbers by `allocate`, which any thread may call."""
        guard = PinGuard()
        remote = RemoteRows(allocate) if has_remote else None
        objects = ObjectRows(allocate, guard, remote)
        return cls(objects, UploadRows(allocate), HistoryRows(allocate), guard, remote)


def bucket_of(view: ReadView, name: str) -> StoredBucket | None:
    """A bucket's row and the root node of its trees, None if there is no such bucket. A decoded row is kept: ~1 µs."""
    value = view.get(BUCKETS, name.encode())
    return None if value is None else decode_stored_bucket(value)


def is_meant(bucket: StoredBucket, made_ms: int | None) -> bool:
    """Whether the bucket is the one that a writer was let into, which was made then, and not one that was made anew under its name
    while the body arrived: that may be of another kind, and another user's. None: whichever there is. No two buckets of a name have
    one time (`made_after`)."""
    return made_ms is None or bucket.row.created_ms == made_ms


def newest_gone(view: ReadView) -> int | None:
    """When the youngest of the buckets was made that are gone, None while none is (or an older version removed them)."""
    value = view.get(META, GONE_BUCKETS)
    return None if value is None else int.from_bytes(value, "big")


def note_gone(view: WriteView, made_ms: int) -> int:
    """Write down that a bucket that was made then is gone; what `newest_gone` says from here on."""
    known = newest_gone(view)
    newest = made_ms if known is None else max(known, made_ms)
    if newest != known:
        view.put(META, GONE_BUCKETS, number_key(newest), headroom=True)
    return newest


def made_after(row: BucketRow, newest_gone_ms: int | None) -> BucketRow:
    """The row of a bucket that is being made, with a time above those of all that are gone: every bucket that had its name before
    is, so the clock may stand still or be put back between two of them, and requests still tell them apart."""
    if newest_gone_ms is None or row.created_ms > newest_gone_ms:
        return row
    return msgspec.structs.replace(row, created_ms=newest_gone_ms + 1)


def root_of(view: ReadView, bucket: str) -> bytes | None:
    """The root node of a bucket's trees, None if there is no such bucket."""
    value = view.get(BUCKETS, bucket.encode())
    return None if value is None else value[:ROOT_BYTES]


def require_root(view: ReadView, bucket: str, made_ms: int | None = None) -> bytes:
    """`root_of`, or `NoSuchBucketError`, also where the bucket is another than that of `made_ms` (`is_meant`)."""
    if made_ms is not None:
        stored = bucket_of(view, bucket)
        if stored is not None and not is_meant(stored, made_ms):
            raise NoSuchBucketError("no such bucket", bucket=bucket)
    root = root_of(view, bucket)
    if root is None:
        raise NoSuchBucketError("no such bucket", bucket=bucket)
    return root
