"""CopyObject and UploadPartCopy: the right to read is checked on the source, the right to write on the destination.

A copy is a new object of its own blobs. Source: S3 API reference, CopyObject and UploadPartCopy.
"""

from __future__ import annotations

from kvobj.api.access.actions import Action
from kvobj.api.access.bucket_access import BucketAccess
from kvobj.api.checksums import CHECKSUM_BYTES, COMPOSITE, FULL_OBJECT, checksum_headers
from kvobj.api.chunk_access import open_bucket
from kvobj.api.chunk_headers import PART_HEADER
from kvobj.api.conditions import judge_copy, parse_write_condition
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_headers import parse_durability, parse_metadata, parse_stored_headers, write_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.objects_write import MAX_PUT_BYTES
from kvobj.api.operations import CopyObject, UploadPartCopy
from kvobj.api.ranges import parse_copy_range
from kvobj.api.settings.new_object import acl_of_object, tags_of_object
from kvobj.api.timestamps import iso_time
from kvobj.api.xml import Node, document
from kvobj.catalog.rows import BucketKind, Checksum, ObjectRow, PartRow
from kvobj.errors import EntityTooLargeError, InvalidRangeError, NoSuchKeyError, PreconditionFailedError
from kvobj.store.places import check_size
from kvobj.store.requests import PartTarget, PutRequest, PutResult
from kvobj.store.standing import check_same_chunk


class ObjectCopies:
    """Handlers of CopyObject and UploadPartCopy."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def copy(self, exchange: Exchange, operation: CopyObject) -> Reply:
        """Copy an object, with its headers and metadata or with new ones. Its ACL is not copied."""
        if exchange.authentication.is_anonymous:
            raise S3Error("AccessDenied", "Anonymous users cannot copy objects. Please authenticate.")
        fields = exchange.fields
        catalog = self._store.catalog
        access = await open_bucket(exchange, catalog, operation.bucket, action=Action.PUT_OBJECT, key=operation.key)
        bucket = access.bucket
        place = await access.place(operation.key, fields)
        if place is not None and place.group is not None:
            raise S3Error("InvalidRequest", "A part of a chunk is put, not copied.", ArgumentName=PART_HEADER)
        readable, source = await self._source(exchange, operation.source_bucket, operation.source_key)
        replaces = _replaces(fields, "metadata")
        replaces_tags = _replaces(fields, "tagging")
        if source.tags and not replaces_tags:
            readable.require(Action.GET_OBJECT_TAGGING, key=operation.source_key, row=source)
            access.rights.require_tags(source.tags, operation.key)
        is_self = (operation.source_bucket, operation.source_key) == (operation.bucket, operation.key)
        if (
            is_self
            and not replaces
            and "x-amz-checksum-algorithm" not in fields
            and "x-amz-storage-class" not in fields
        ):
            raise S3Error(
                "InvalidRequest",
                "This copy request is illegal because it is trying to copy an object to itself without changing the object's "
                "metadata, storage class, website redirect location or encryption attributes.",
            )
        if source.size_bytes > MAX_PUT_BYTES:
            raise EntityTooLargeError("the source is too large to be copied at once", size_bytes=source.size_bytes)
        if place is not None:
            check_size(place, source.size_bytes)
        # A composite checksum counts parts, which a copy does not have: it is computed anew, as S3 does.
        composite = next((each.algorithm for each in source.checksums if each.type == COMPOSITE), None)
        algorithm = _algorithm(fields) or composite
        request = PutRequest(
            bucket=bucket,
            key=operation.key,
            size_bytes=source.size_bytes,
            owner=exchange.authentication.user.id,
            durability=parse_durability(fields),
            headers=parse_stored_headers(fields) if replaces else source.headers,
            metadata=parse_metadata(fields) if replaces else source.metadata,
            condition=parse_write_condition(fields),
            algorithms=frozenset() if algorithm is None else frozenset({algorithm.lower()}),
            place=place,
            acl=await acl_of_object(exchange, access.rights, operation.key),
            tags=tags_of_object(exchange, access.rights, operation.key) if replaces_tags else source.tags,
        )
        kept = tuple(checksum for checksum in source.checksums if checksum.type == FULL_OBJECT)
        result = _found(
            await self._store.copy(source, 0, source.size_bytes, request, checksums=kept, checksum_algorithm=algorithm),
            source,
        )
        row = result.row
        assert isinstance(row, ObjectRow)
        if result.existed:
            await access.check_shown(row)
            check_same_chunk(row, request)
        reply = exchange.xml(document("CopyObjectResult", _result_nodes(row.etag, row.modified_ms, row.checksums)))
        headers = write_headers(row, bucket, existed=result.existed, durability=result.durability)
        return Reply(reply.status, (*reply.headers, *headers), reply.body)

    async def copy_part(self, exchange: Exchange, operation: UploadPartCopy) -> Reply:
        """Copy an object or a range of it as a part of an upload."""
        if exchange.authentication.is_anonymous:
            raise S3Error("AccessDenied", "Anonymous users cannot copy objects. Please authenticate.")
        catalog = self._store.catalog
        access = await open_bucket(exchange, catalog, operation.bucket, action=Action.PUT_OBJECT, key=operation.key)
        found = await catalog.upload(operation.bucket, operation.key, operation.upload_id)
        upload = await access.check_upload(found, operation.upload_id)
        _, source = await self._source(exchange, operation.source_bucket, operation.source_key)
        start, stop = _copy_span(exchange.fields.get("x-amz-copy-source-range"), source)
        if stop - start > MAX_PUT_BYTES:
            raise EntityTooLargeError("the range is too large for a part", size_bytes=stop - start)
        algorithm = upload.checksum_algorithm
        request = PutRequest(
            bucket=access.bucket,
            key=operation.key,
            size_bytes=stop - start,
            owner=exchange.authentication.user.id,
            algorithms=frozenset() if algorithm is None else frozenset({algorithm.lower()}),
            part=PartTarget(operation.upload_id, operation.number),
        )
        result = _found(await self._store.copy(source, start, stop, request, checksum_algorithm=algorithm), source)
        part = result.row
        assert isinstance(part, PartRow)
        checksums = () if part.checksum is None else (part.checksum,)
        return exchange.xml(
            document("CopyPartResult", _result_nodes(part.etag, part.modified_ms, checksums, with_type=False))
        )

    async def _source(self, exchange: Exchange, bucket: str, key: str) -> tuple[BucketAccess, ObjectRow]:
        """The source's row, and the caller's rights in its bucket."""
        catalog = self._store.catalog
        access = await open_bucket(exchange, catalog, bucket, action=Action.GET_OBJECT, key=key, is_source=True)
        (found,) = await catalog.lookup(bucket, [key])
        row = await access.check_read(found, key)
        if access.bucket.kind is BucketKind.KV:
            row = await access.check_read(await self._store.look_up(bucket, key), key)
        if not judge_copy(exchange.fields, row):
            raise PreconditionFailedError("a condition on the copy's source does not hold", bucket=bucket, key=key)
        return access.rights, row


def _found(result: PutResult | None, source: ObjectRow) -> PutResult:
    if result is None:
        raise NoSuchKeyError("no such key", bucket=source.bucket, key=source.key)
    return result


def _replaces(fields: dict[str, str], what: str) -> bool:
    name = f"x-amz-{what}-directive"
    directive = fields.get(name, "COPY")  # in capitals alone: policies compare the header as it came
    if directive not in ("COPY", "REPLACE"):
        raise S3Error("InvalidArgument", f"Unknown {what} directive.", ArgumentName=name)
    return directive == "REPLACE"


def _algorithm(fields: dict[str, str]) -> str | None:
    value = fields.get("x-amz-checksum-algorithm")
    if value is None:
        return None
    if value.upper() not in CHECKSUM_BYTES:
        raise S3Error("InvalidRequest", "Checksum algorithm provided is unsupported.")
    return value.upper()


def _copy_span(value: str | None, source: ObjectRow) -> tuple[int, int]:
    if value is None:
        return 0, source.size_bytes
    try:
        return parse_copy_range(value, source.size_bytes)
    except InvalidRangeError as error:
        raise S3Error(
            "InvalidArgument",
            f"Range specified is not valid for source object of size: {source.size_bytes}",
            ArgumentName="x-amz-copy-source-range",
            ArgumentValue=value,
        ) from error
    except ValueError as error:
        raise S3Error(
            "InvalidArgument",
            "The x-amz-copy-source-range value must be of the form bytes=first-last.",
            ArgumentName="x-amz-copy-source-range",
        ) from error


def _result_nodes(
    etag: str, modified_ms: int, checksums: tuple[Checksum, ...], *, with_type: bool = True
) -> list[Node]:
    nodes: list[Node] = [("LastModified", iso_time(modified_ms)), ("ETag", f'"{etag}"')]
    for name, value in checksum_headers(checksums):
        if name == "x-amz-checksum-type":
            if with_type:
                nodes.append(("ChecksumType", value))
        else:
            nodes.append((f"Checksum{name.rpartition('-')[2].upper()}", value))
    return nodes
