"""The catalog's changes of epochs, users and buckets: rare, durable, each one transaction of the durable writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

from kvobj.catalog.catalog_rows import (
    CatalogRows,
    bucket_of,
    is_meant,
    made_after,
    newest_gone,
    note_gone,
)
from kvobj.catalog.encoding import (
    BUCKETS,
    EPOCH,
    INCARNATION,
    INCARNATION_SHIFT,
    META,
    USERS,
    StoredBucket,
    decode_object,
    decode_stored_bucket,
    decode_user,
    encode_row,
    encode_stored_bucket,
    number_key,
)
from kvobj.catalog.log_entries import BucketRemoved, GoneBuckets, NamespaceRemoved, UserRemoved, encode_entry, tell
from kvobj.catalog.namespace_changes import drop_namespaces
from kvobj.catalog.object_changes import AT_ONCE_MS
from kvobj.catalog.object_rows import NO_ROWS
from kvobj.catalog.rows import BucketRow, ObjectState, PartRow, UserRow
from kvobj.catalog.setting_rows import BucketUpdate, changes_of
from kvobj.catalog.upload_rows import StoredUpload
from kvobj.database import WriteView
from kvobj.errors import (
    BucketExistsError,
    BucketNotEmptyError,
    NoSuchBucketError,
    NoSuchUserError,
    UserExistsError,
)

_HIDDEN_MAX: Final = 1000
# What one transaction removes with a bucket: as many as one upload can have.
_PARTS_MAX: Final = 10_000


def begin_incarnation(view: WriteView) -> int:
    """Count this start; returns the first number that is its own."""
    incarnation = int.from_bytes(view.get(META, INCARNATION) or b"", "big") + 1
    view.put(META, INCARNATION, number_key(incarnation), headroom=True)
    return (incarnation << INCARNATION_SHIFT) + 1


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """`Catalog.open_epoch` as a change."""

    epoch: int

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        view.put(META, EPOCH, number_key(self.epoch), headroom=True)


@dataclass(frozen=True, slots=True)
class AddUser:
    """`Catalog.add_user` and `Catalog.put_user` as a change. An access key never belongs to two users."""

    user: UserRow
    may_replace: bool

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        for _, value in view.range(USERS):
            other = decode_user(value)
            if other.id == self.user.id and not self.may_replace:
                raise UserExistsError("a user with this id exists", id=other.id)
            if other.id != self.user.id and other.access_key == self.user.access_key:
                raise UserExistsError("a user with this access key exists", id=other.id)
        value = encode_row(self.user)
        if view.get(USERS, self.user.id.encode()) == value:
            return  # each start declares the configuration's users again
        view.put(USERS, self.user.id.encode(), value)
        tell(view, self.user)


@dataclass(frozen=True, slots=True)
class RemoveUser:
    """`Catalog.remove_user` as a change."""

    user_id: str

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        if not self.user_id or not view.delete(USERS, self.user_id.encode()):
            raise NoSuchUserError("no such user", id=self.user_id)
        tell(view, UserRemoved(self.user_id))


@dataclass(frozen=True, slots=True)
class CreateBucket:
    """`Catalog.create_bucket` as a change."""

    bucket: BucketRow
    allocate: Callable[[], int]

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        name = self.bucket.name.encode()
        value = view.get(BUCKETS, name)
        if value is not None:
            existing = decode_stored_bucket(value).row
            raise BucketExistsError("the bucket exists", bucket=self.bucket.name, existing=existing)
        row = made_after(self.bucket, newest_gone(view))
        view.put(BUCKETS, name, encode_stored_bucket(StoredBucket(number_key(self.allocate()), row)))
        tell(view, row)


@dataclass(frozen=True, slots=True)
class UpdateBucket:
    """`Catalog.update_bucket` as a change."""

    name: str
    update: BucketUpdate
    made_ms: int | None = None

    def __call__(self, view: WriteView) -> BucketRow:
        """Run it."""
        stored = bucket_of(view, self.name)
        if stored is None or not is_meant(stored, self.made_ms):
            raise NoSuchBucketError("no such bucket", bucket=self.name)
        row = msgspec.structs.replace(stored.row, **changes_of(self.update))
        view.put(BUCKETS, self.name.encode(), encode_stored_bucket(StoredBucket(stored.root, row)))
        tell(view, row)
        return row


@dataclass(frozen=True, slots=True)
class DeleteBucket:
    """`Catalog.delete_bucket` as a change. Looks into the tables, not at the counters.

    Hidden rows, which nobody sees, go with the bucket; their blobs wait for the pins on them. So do uploads in progress, and chunks
    of which some parts came and never all. Up to 1,000 of each with 10,000 parts: with more of them the bucket is not empty yet.
    """

    name: str
    tables: CatalogRows
    made_ms: int | None = None

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        bucket = bucket_of(view, self.name)
        if bucket is None or not is_meant(bucket, self.made_ms):
            raise NoSuchBucketError("no such bucket", bucket=self.name)
        root = bucket.root
        objects, uploads = self.tables.objects, self.tables.uploads
        rows = [
            decode_object(value)
            for tree in (objects.volatile, objects.durable)
            for _, value in islice(tree.items(view, root), _HIDDEN_MAX + 1)
        ]
        is_used = len(rows) > _HIDDEN_MAX or any(row.state is ObjectState.LIVE for row in rows)
        pending = [] if is_used else uploads.first(view, root, _HIDDEN_MAX + 1)
        is_used = is_used or len(pending) > _HIDDEN_MAX
        ended: list[tuple[StoredUpload, tuple[PartRow, ...]]] = []
        room = _PARTS_MAX
        while pending and not is_used:
            upload = pending.pop()
            ended.append((upload, uploads.parts(view, upload)))
            room -= len(ended[-1][1])
            is_used = room < 0
        if is_used:
            raise BucketNotEmptyError("the bucket is not empty", bucket=self.name)
        for upload, parts in ended:
            uploads.remove(view, root, upload, parts)
            spare = [blob.blob_id for part in parts for blob in part.blobs]
            is_volatile = upload.is_volatile
            objects.queue(view, spare, bucket=self.name, key=upload.row.key, volatile=is_volatile, now_ms=AT_ONCE_MS)
        for row in rows:
            key = row.key.encode()
            before = objects.pair(view, root, key)
            objects.change(view, root, key, before, NO_ROWS)
            objects.queue_replaced(view, before, NO_ROWS, now_ms=AT_ONCE_MS, may_be_pinned=True)
        for namespace in drop_namespaces(view, self.name):
            view.publish(encode_entry(NamespaceRemoved(self.name, namespace)), topic=self.name)
        view.delete(BUCKETS, self.name.encode())
        tell(view, GoneBuckets(note_gone(view, bucket.row.created_ms)))
        tell(view, BucketRemoved(self.name), removed_from=self.name)
