"""Tagging of buckets and objects: put, get and delete the whole set. Source: S3 API reference, the operations' pages."""

from __future__ import annotations

from typing import Final

from kvobj.api.access.actions import Action
from kvobj.api.checksums import parse_announced
from kvobj.api.chunk_access import open_bucket
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import (
    BucketOperation,
    DeleteBucketTagging,
    DeleteObjectTagging,
    GetBucketTagging,
    GetObjectTagging,
    ObjectOperation,
    PutBucketTagging,
    PutObjectTagging,
)
from kvobj.api.settings.object_update import update_checked
from kvobj.api.settings.tags import BUCKET_TAGS_MAX, OBJECT_TAGS_MAX, parse_tagging, tagging_document
from kvobj.catalog.rows import BucketKind, BucketRow, ObjectRow
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate

MAX_DOCUMENT_BYTES: Final = 128 * 1024


class Tagging:
    """Handlers of ?tagging."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get_bucket(self, exchange: Exchange, operation: GetBucketTagging) -> Reply:
        """The bucket's tags; without any it is a 404."""
        row = await self._bucket(exchange, operation, Action.GET_BUCKET_TAGGING)
        if not row.tags:
            raise S3Error("NoSuchTagSet", BucketName=row.name)
        return exchange.xml(tagging_document(row.tags))

    async def put_bucket(self, exchange: Exchange, operation: PutBucketTagging) -> Reply:
        """Replace the bucket's tags."""
        row = await self._bucket(exchange, operation, Action.PUT_BUCKET_TAGGING)
        tags = await _document(exchange, tags_max=BUCKET_TAGS_MAX)
        await self._store.catalog.update_bucket(row.name, BucketUpdate(tags=tags), made_ms=row.created_ms)
        return exchange.reply(204)

    async def delete_bucket(self, exchange: Exchange, operation: DeleteBucketTagging) -> Reply:
        """Take the bucket's tags away."""
        row = await self._bucket(exchange, operation, Action.PUT_BUCKET_TAGGING)
        await self._store.catalog.update_bucket(row.name, BucketUpdate(tags={}), made_ms=row.created_ms)
        return exchange.reply(204)

    async def get_object(self, exchange: Exchange, operation: GetObjectTagging) -> Reply:
        """The object's tags, which may be none."""
        row = await self._object(exchange, operation, Action.GET_OBJECT_TAGGING)
        return exchange.xml(tagging_document(row.tags))

    async def put_object(self, exchange: Exchange, operation: PutObjectTagging) -> Reply:
        """Replace the object's tags. Its ETag and dates stay."""
        bucket = await self._store.catalog.bucket(operation.bucket)
        if bucket is not None and bucket.policy:  # which may ask for the tags themselves
            tags = await _document(exchange, tags_max=OBJECT_TAGS_MAX)
            row = await self._object(exchange, operation, Action.PUT_OBJECT_TAGGING, tags)
        else:
            row = await self._object(exchange, operation, Action.PUT_OBJECT_TAGGING)
            tags = await _document(exchange, tags_max=OBJECT_TAGS_MAX)
        await update_checked(self._store.catalog, row, ObjectUpdate(tags=tags))
        return exchange.reply(200)

    async def delete_object(self, exchange: Exchange, operation: DeleteObjectTagging) -> Reply:
        """Take the object's tags away."""
        row = await self._object(exchange, operation, Action.DELETE_OBJECT_TAGGING)
        await update_checked(self._store.catalog, row, ObjectUpdate(tags={}))
        return exchange.reply(204)

    async def _bucket(self, exchange: Exchange, operation: BucketOperation, action: Action) -> BucketRow:
        return exchange.authorise(await self._store.catalog.bucket(operation.bucket), operation.bucket, action)

    async def _object(
        self, exchange: Exchange, operation: ObjectOperation, action: Action, tags: dict[str, str] | None = None
    ) -> ObjectRow:
        catalog = self._store.catalog
        access = await open_bucket(exchange, catalog, operation.bucket, action=action, key=operation.key)
        if access.bucket.kind is BucketKind.KV:
            # Grants of namespaces are about chunks, not about what their owner says of them.
            access.rights.require(action)
        (row,) = await catalog.lookup(operation.bucket, [operation.key])
        return access.rights.check_row(row, operation.key, action, tags=tags)


async def _document(exchange: Exchange, *, tags_max: int) -> dict[str, str]:
    announced = parse_announced(exchange.fields, exchange.authentication)
    return parse_tagging(await exchange.read_document(announced, limit_bytes=MAX_DOCUMENT_BYTES), tags_max=tags_max)
