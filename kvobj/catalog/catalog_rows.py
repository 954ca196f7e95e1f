"""What the catalog's changes work on: the tables of objects, uploads and history, the guard of pins, and the
remote queue where there is a remote, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from kvobj.catalog.encoding import BUCKETS, ROOT_BYTES, StoredBucket, decode_stored_bucket
from kvobj.catalog.history_rows import HistoryRows
from kvobj.catalog.lease_rows import PinGuard
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.remote_rows import RemoteRows
from kvobj.catalog.upload_rows import UploadRows
from kvobj.database import ReadView
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
    while the body arrived: that may be of another kind, and another user's. None: whichever there is. Two that were made in one
    millisecond, by a clock that was put back between them for one, are not told apart."""
    return made_ms is None or bucket.row.created_ms == made_ms


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
