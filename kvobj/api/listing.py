"""Listings of a bucket: objects (versions 1 and 2), versions of an unversioned bucket, multipart uploads.

Order is that of the keys' UTF-8 bytes; a page costs a page, since the catalog seeks past each common prefix.
Source: S3 API reference.
"""

from __future__ import annotations

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import (
    Listing,
    ListMultipartUploads,
    ListObjectsV1,
    ListObjectsV2,
    ListObjectVersions,
)
from kvobj.api.request import encode_key
from kvobj.api.routing import encode_token
from kvobj.api.timestamps import iso_time
from kvobj.catalog.rows import ListPage, ObjectRow, UploadRow

_AFTER_ALL_UPLOADS_OF_KEY = "\U0010ffff"


class Listings:
    """Handlers of ListObjects, ListObjectsV2, ListObjectVersions and ListMultipartUploads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def objects(self, exchange: Exchange, operation: ListObjectsV1) -> Reply:
        """ListObjects: continued by the marker, which is a key or a common prefix."""
        page = await self._page(exchange, operation, operation.marker)
        nodes = _front(operation, [("Marker", _name(operation, operation.marker))], "MaxKeys")
        nodes.append(_truncated(page))
        if page.next_after is not None and operation.delimiter:
            nodes.append(("NextMarker", _name(operation, page.next_after)))
        nodes += [("Contents", self._about(exchange, operation, row, with_owner=True)) for row in page.rows]
        nodes += _common_prefixes(operation, page.common_prefixes)
        return exchange.xml(xml.document("ListBucketResult", nodes))

    async def objects_v2(self, exchange: Exchange, operation: ListObjectsV2) -> Reply:
        """ListObjectsV2: continued by an opaque token."""
        page = await self._page(exchange, operation, operation.after)
        more: list[xml.Node] = [("KeyCount", str(len(page.rows) + len(page.common_prefixes)))]
        if operation.token is not None:
            more.append(("ContinuationToken", operation.token))
        if operation.start_after:
            more.append(("StartAfter", _name(operation, operation.start_after)))
        nodes = _front(operation, more, "MaxKeys")
        nodes.append(_truncated(page))
        if page.next_after is not None:
            nodes.append(("NextContinuationToken", encode_token(page.next_after)))
        nodes += [
            ("Contents", self._about(exchange, operation, row, with_owner=operation.fetch_owner)) for row in page.rows
        ]
        nodes += _common_prefixes(operation, page.common_prefixes)
        return exchange.xml(xml.document("ListBucketResult", nodes))

    async def versions(self, exchange: Exchange, operation: ListObjectVersions) -> Reply:
        """ListObjectVersions: each object is its own only version, `null`."""
        page = await self._page(exchange, operation, operation.key_marker, Action.LIST_BUCKET_VERSIONS)
        markers: list[xml.Node] = [
            ("KeyMarker", _name(operation, operation.key_marker)),
            ("VersionIdMarker", operation.version_id_marker),
        ]
        nodes = _front(operation, markers, "MaxKeys")
        nodes.append(_truncated(page))
        if page.next_after is not None:
            nodes += [("NextKeyMarker", _name(operation, page.next_after)), ("NextVersionIdMarker", "null")]
        for row in page.rows:
            about = self._about(exchange, operation, row, with_owner=True)
            nodes.append(("Version", [about[0], ("VersionId", "null"), ("IsLatest", "true"), *about[1:]]))
        nodes += _common_prefixes(operation, page.common_prefixes)
        return exchange.xml(xml.document("ListVersionsResult", nodes))

    async def uploads(self, exchange: Exchange, operation: ListMultipartUploads) -> Reply:
        """ListMultipartUploads: in (key, upload id) order, which of one key is that of their beginning (`new_upload_id`)."""
        exchange.authorise(await self._store.catalog.bucket(operation.bucket), operation.bucket, Action.LIST_UPLOADS)
        rows: tuple[UploadRow, ...] = ()
        common_prefixes: tuple[str, ...] = ()
        next_after = None
        if operation.limit:
            # A key marker alone means: past every upload of that key. Upload ids are hex, which sorts before this one.
            after = (operation.key_marker, operation.upload_id_marker or _AFTER_ALL_UPLOADS_OF_KEY)
            page = await self._store.catalog.list_uploads(
                operation.bucket,
                key_prefix=operation.key_prefix,
                delimiter=operation.delimiter,
                after=after if operation.key_marker else ("", ""),
                limit=operation.limit,
            )
            rows, common_prefixes, next_after = page.rows, page.common_prefixes, page.next_after
        nodes: list[xml.Node] = [
            ("Bucket", operation.bucket),
            ("KeyMarker", _name(operation, operation.key_marker)),
            ("UploadIdMarker", operation.upload_id_marker),
        ]
        if next_after is not None:
            nodes += [("NextKeyMarker", _name(operation, next_after[0])), ("NextUploadIdMarker", next_after[1])]
        nodes += _asked(operation)
        nodes += [("MaxUploads", str(operation.limit)), ("IsTruncated", "false" if next_after is None else "true")]
        for row in rows:
            owner = _owner(exchange, row.owner)
            about: list[xml.Node] = [
                ("Key", _name(operation, row.key)),
                ("UploadId", row.upload_id),
                ("Initiator", owner),
                ("Owner", owner),
                ("StorageClass", "STANDARD"),
                ("Initiated", iso_time(row.initiated_ms)),
            ]
            if row.checksum_algorithm is not None:
                about += [("ChecksumAlgorithm", row.checksum_algorithm), ("ChecksumType", row.checksum_type or "")]
            nodes.append(("Upload", about))
        nodes += _common_prefixes(operation, common_prefixes)
        return exchange.xml(xml.document("ListMultipartUploadsResult", nodes))

    async def _page(
        self, exchange: Exchange, operation: Listing, after: str, action: Action = Action.LIST_BUCKET
    ) -> ListPage:
        exchange.authorise(await self._store.catalog.bucket(operation.bucket), operation.bucket, action)
        if not operation.limit:
            return ListPage(rows=(), common_prefixes=(), next_after=None)
        return await self._store.catalog.list_objects(
            operation.bucket,
            key_prefix=operation.key_prefix,
            delimiter=operation.delimiter,
            after=after,
            limit=operation.limit,
        )

    @staticmethod
    def _about(exchange: Exchange, operation: Listing, row: ObjectRow, *, with_owner: bool) -> list[xml.Node]:
        about: list[xml.Node] = [
            ("Key", _name(operation, row.key)),
            ("LastModified", iso_time(row.modified_ms)),
            ("ETag", f'"{row.etag}"'),
            ("Size", str(row.size_bytes)),
        ]
        for checksum in row.checksums:
            about += [("ChecksumAlgorithm", checksum.algorithm), ("ChecksumType", checksum.type)]
        if with_owner:
            about.append(("Owner", _owner(exchange, row.owner)))
        about.append(("StorageClass", "STANDARD"))
        return about


def _name(operation: Listing, name: str) -> str:
    return encode_key(name) if operation.encode else name


def _owner(exchange: Exchange, user_id: str) -> list[xml.Node]:
    return [("ID", user_id), ("DisplayName", exchange.users.display_name(user_id))]


def _asked(operation: Listing) -> list[xml.Node]:
    nodes: list[xml.Node] = [("Prefix", _name(operation, operation.key_prefix))]
    if operation.delimiter:
        nodes.append(("Delimiter", _name(operation, operation.delimiter)))
    if operation.encode:
        nodes.append(("EncodingType", "url"))
    return nodes


def _front(operation: Listing, more: list[xml.Node], limit_name: str) -> list[xml.Node]:
    return [("Name", operation.bucket), *_asked(operation), *more, (limit_name, str(operation.limit))]


def _truncated(page: ListPage) -> xml.Node:
    return ("IsTruncated", "false" if page.next_after is None else "true")


def _common_prefixes(operation: Listing, common_prefixes: tuple[str, ...]) -> list[xml.Node]:
    return [("CommonPrefixes", [("Prefix", _name(operation, name))]) for name in common_prefixes]
