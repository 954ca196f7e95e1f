"""The catalog's changes of multipart uploads; see `object_changes` for how they run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvobj.catalog.catalog_rows import bucket_of, is_meant
from kvobj.catalog.encoding import BUCKETS, decode_stored_bucket
from kvobj.catalog.namespace_changes import is_namespace_meant, no_such_namespace, stored_namespace
from kvobj.catalog.object_changes import NeedsDurableError, Refusal, fence
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.rows import Durability, PartRow, UploadRow
from kvobj.catalog.upload_rows import StoredUpload, UploadRows
from kvobj.database import ReadView, WriteView
from kvobj.errors import KvobjError, NoSuchBucketError, NoSuchUploadError


@dataclass(frozen=True, slots=True)
class CreateUpload:
    """`Catalog.create_upload` as a change."""

    uploads: UploadRows
    upload: UploadRow
    made_ms: int | None = None

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        bucket = bucket_of(view, self.upload.bucket)
        if bucket is None or not is_meant(bucket, self.made_ms):
            raise NoSuchBucketError("no such bucket", bucket=self.upload.bucket)
        if not is_namespace_meant(view, bucket.root, self.upload.namespace, self.upload.namespace_root):
            raise no_such_namespace(self.upload.bucket, self.upload.namespace)
        if self.upload.group_parts:
            key = self.upload.key.encode()
            if self.uploads.find(view, bucket.root, key, self.upload.upload_id) is not None:
                return  # the writers of a chunk's parts meet in the upload that the first of them began
        self.uploads.put(view, bucket.root, self.upload, volatile=self.upload.durability is Durability.MEMORY)


def begun_unnamed(view: ReadView, uploads: UploadRows) -> Iterator[tuple[bytes, StoredUpload]]:
    """Uploads that an older version began, which did not write down of which namespace they are, each with the root of its bucket
    and what it should say: the namespace that has the name now, unless that was declared later than the upload was begun."""
    for _, value in view.range(BUCKETS):
        bucket = decode_stored_bucket(value)
        for upload in uploads.first(view, bucket.root, sys.maxsize):
            row = upload.row
            if row.namespace_root or not row.namespace:
                continue
            namespace = stored_namespace(view, bucket.root, row.namespace)
            if namespace is not None and namespace.created_ms <= row.initiated_ms:
                named = msgspec.structs.replace(row, namespace_root=namespace.root)
                yield bucket.root, StoredUpload(named, is_volatile=upload.is_volatile)


@dataclass(frozen=True, slots=True)
class NameUploads:
    """Write down what `begun_unnamed` says, before anything can be declared anew."""

    uploads: UploadRows

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        for root, upload in list(begun_unnamed(view, self.uploads)):
            self.uploads.put(view, root, upload.row, volatile=upload.is_volatile)


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """The part that stands, the upload's owner, and how many bytes the upload holds more than before."""

    part: PartRow
    owner: str
    added_bytes: int


@dataclass(frozen=True, slots=True)
class PutPart:
    """`Catalog.put_part` as a change."""

    objects: ObjectRows
    uploads: UploadRows
    bucket: str
    key: str
    part: PartRow
    now_ms: int
    durable: bool
    made_ms: int | None = None
    namespace_root: bytes = b""

    def __call__(self, view: WriteView) -> PlacedPart | Refusal:
        """Run it."""
        part = self.part
        bucket = bucket_of(view, self.bucket)
        is_anew = bucket is not None and not is_meant(bucket, self.made_ms)
        upload = None
        if bucket is not None and not is_anew:
            upload = self.uploads.find(view, bucket.root, self.key.encode(), part.upload_id)
        if upload is not None and self.namespace_root and upload.row.namespace_root != self.namespace_root:
            # The parts of a chunk meet under its key: these are of a namespace that was declared anew under the same name.
            upload = None
        if (upload is None or not upload.is_volatile) and not self.durable:
            raise NeedsDurableError("the upload is durable, or gone")
        refusal: KvobjError | None = fence(view, part.blobs)
        if is_anew:
            refusal = NoSuchBucketError("no such bucket", bucket=self.bucket)
        elif upload is None:
            refusal = NoSuchUploadError("no such upload", bucket=self.bucket, key=self.key, upload_id=part.upload_id)
        elif bucket is not None and not is_namespace_meant(
            view, bucket.root, upload.row.namespace, self.namespace_root
        ):
            refusal = no_such_namespace(self.bucket, upload.row.namespace)
        if refusal is not None or upload is None:
            self._queue(view, part, upload, kept=set())
            return Refusal(refusal or NoSuchUploadError("no such upload"))
        before = self.uploads.part(view, upload, part.number)
        if before is not None and upload.row.group_parts:
            # Parts of a chunk come from several writers: the first stands, as with chunks themselves.
            self._queue(view, part, upload, kept={blob.blob_id for blob in before.blobs})
            return PlacedPart(before, upload.row.owner, 0)
        self.uploads.put_part(view, upload, part)
        if before is not None:
            self._queue(view, before, upload, kept={blob.blob_id for blob in part.blobs})
        replaced_bytes = 0 if before is None else before.size_bytes
        return PlacedPart(part, upload.row.owner, part.size_bytes - replaced_bytes)

    def _queue(self, view: WriteView, part: PartRow, upload: StoredUpload | None, *, kept: set[bytes]) -> None:
        spare = [blob.blob_id for blob in part.blobs if blob.blob_id not in kept]
        volatile = upload is not None and upload.is_volatile
        self.objects.queue(view, spare, bucket=self.bucket, key=self.key, volatile=volatile, now_ms=self.now_ms)


@dataclass(frozen=True, slots=True)
class AbortUpload:
    """`Catalog.abort_upload` as a change. Whether the upload has ended."""

    objects: ObjectRows
    uploads: UploadRows
    bucket: str
    key: str
    upload_id: str
    now_ms: int
    durable: bool
    made_ms: int | None = None
    namespace_root: bytes = b""
    if_empty: bool = False

    def __call__(self, view: WriteView) -> bool:
        """Run it."""
        bucket = bucket_of(view, self.bucket)
        upload = None
        if bucket is not None and is_meant(bucket, self.made_ms):
            upload = self.uploads.find(view, bucket.root, self.key.encode(), self.upload_id)
        if upload is not None and self.namespace_root and upload.row.namespace_root != self.namespace_root:
            upload = None  # another writer has given up the one that is meant, and begun this one under its name
        if bucket is None or upload is None:
            raise NoSuchUploadError("no such upload", bucket=self.bucket, key=self.key, upload_id=self.upload_id)
        if not upload.is_volatile and not self.durable:
            raise NeedsDurableError("the upload is durable")
        parts = self.uploads.parts(view, upload)
        if parts and self.if_empty:
            return False
        self.uploads.remove(view, bucket.root, upload, parts)
        spare = [blob.blob_id for part in parts for blob in part.blobs]
        self.objects.queue(
            view, spare, bucket=self.bucket, key=self.key, volatile=upload.is_volatile, now_ms=self.now_ms
        )
        return True
