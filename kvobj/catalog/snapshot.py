"""The durable rows as record log entries: what a snapshot of the log holds in place of all that led to them."""

from __future__ import annotations

from collections.abc import Iterator

from kvobj.catalog.catalog_rows import newest_gone
from kvobj.catalog.encoding import BUCKETS, USERS, decode_stored_bucket, decode_upload, decode_user
from kvobj.catalog.log_entries import GoneBuckets, PartPut, encode_entry, encode_object_value
from kvobj.catalog.namespace_changes import stored_namespaces
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.upload_rows import StoredUpload, UploadRows
from kvobj.database import ReadView


def snapshot_entries(view: ReadView) -> Iterator[bytes]:
    """Entries that make all durable rows of the catalog from nothing: buckets and their namespaces before what lies in them."""
    objects, uploads = ObjectRows(_no_numbers), UploadRows(_no_numbers)
    for _, value in view.range(USERS):
        yield encode_entry(decode_user(value))
    for _, value in view.range(BUCKETS):
        bucket = decode_stored_bucket(value)
        yield encode_entry(bucket.row)
        for namespace in stored_namespaces(view, bucket.root):
            yield encode_entry(namespace)
        for _, row in objects.durable.items(view, bucket.root):
            yield encode_object_value(row)
        for _, encoded in uploads.durable.items(view, bucket.root):
            upload = StoredUpload(decode_upload(encoded), is_volatile=False)
            yield encode_entry(upload.row)
            for part in uploads.parts(view, upload):
                yield encode_entry(PartPut(upload.row.bucket, upload.row.key, part))
    gone = newest_gone(view)
    if gone is not None:
        yield encode_entry(GoneBuckets(gone))


def _no_numbers() -> int:
    raise RuntimeError("a snapshot draws no numbers")
