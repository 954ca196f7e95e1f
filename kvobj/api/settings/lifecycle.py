"""Lifecycle of a bucket's objects: the document of its rules, put, got and deleted whole. What the rules do is gc's.

A rule names what it applies to in a Filter, or in the older way by a Prefix beside none; it is told back as it came. Transitions to
other storage classes are not implemented: there are none. Source: S3 API reference, PutBucketLifecycleConfiguration; S3 User
Guide, "Lifecycle configuration elements".
"""

from __future__ import annotations

from typing import Final

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.checksums import parse_announced
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import DeleteBucketLifecycle, GetBucketLifecycle, PutBucketLifecycle
from kvobj.api.settings.lifecycle_document import lifecycle_document, parse_lifecycle
from kvobj.catalog.setting_rows import BucketUpdate

MAX_DOCUMENT_BYTES: Final = 1024 * 1024
_MINIMUM_HEADER: Final = "x-amz-transition-default-minimum-object-size"
_MINIMUMS: Final = ("all_storage_classes_128K", "varies_by_storage_class")


class LifecycleSettings:
    """Handlers of ?lifecycle."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get(self, exchange: Exchange, operation: GetBucketLifecycle) -> Reply:
        """The bucket's rules; without any it is a 404."""
        catalog = self._store.catalog
        row = exchange.authorise(await catalog.bucket(operation.bucket), operation.bucket, Action.GET_LIFECYCLE)
        if not row.lifecycle:
            raise S3Error("NoSuchLifecycleConfiguration", BucketName=row.name)
        headers = [(_MINIMUM_HEADER, _MINIMUMS[0]), ("content-type", "application/xml")]
        return exchange.reply(200, headers, xml.document("LifecycleConfiguration", lifecycle_document(row.lifecycle)))

    async def put(self, exchange: Exchange, operation: PutBucketLifecycle) -> Reply:
        """Replace the bucket's rules."""
        catalog, fields = self._store.catalog, exchange.fields
        row = exchange.authorise(await catalog.bucket(operation.bucket), operation.bucket, Action.PUT_LIFECYCLE)
        minimum = fields.get(_MINIMUM_HEADER, _MINIMUMS[0])
        if minimum not in _MINIMUMS:
            raise S3Error("InvalidRequest", f"Invalid TransitionDefaultMinimumObjectSize found: {minimum}")
        announced = parse_announced(fields, exchange.authentication)
        rules = parse_lifecycle(await exchange.read_document(announced, limit_bytes=MAX_DOCUMENT_BYTES))
        await catalog.update_bucket(row.name, BucketUpdate(lifecycle=rules), made_ms=row.created_ms)
        return exchange.reply(200, [(_MINIMUM_HEADER, minimum)])

    async def delete(self, exchange: Exchange, operation: DeleteBucketLifecycle) -> Reply:
        """Take the bucket's rules away, if there are any."""
        catalog = self._store.catalog
        row = exchange.authorise(await catalog.bucket(operation.bucket), operation.bucket, Action.PUT_LIFECYCLE)
        if row.lifecycle:
            await catalog.update_bucket(row.name, BucketUpdate(lifecycle=()), made_ms=row.created_ms)
        return exchange.reply(204)
