"""Multipart uploads: create, list parts, complete, abort. Parts are put by `objects_write` and `copies`.

The rules of Complete that need only the rows are the store's; here its document is read and the object's checksum is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.checksums import (
    CHECKSUM_BYTES,
    COMPOSITE,
    FULL_OBJECT,
    Announced,
    check_value,
    checked_type,
    checksum_headers,
    of_parts,
    parse_upload_checksum,
)
from kvobj.api.chunk_access import ChunkAccess, open_bucket
from kvobj.api.chunk_headers import PART_HEADER
from kvobj.api.conditions import bare_etag, parse_write_condition
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange, Header
from kvobj.api.message import Reply
from kvobj.api.object_headers import parse_durability, parse_metadata, parse_stored_headers, write_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import (
    AbortMultipartUpload,
    CompleteMultipartUpload,
    CreateMultipartUpload,
    ListParts,
    UploadOperation,
)
from kvobj.api.request import encode_key
from kvobj.api.settings.lifecycle_headers import abort_headers
from kvobj.api.settings.new_object import acl_of_object, tags_of_object
from kvobj.api.timestamps import iso_time
from kvobj.catalog.rows import MAX_PARTS, BucketKind, BucketRow, Checksum, Durability, ObjectRow, UploadRow
from kvobj.errors import InvalidPartError, InvalidRequestError, NoSuchUploadError, PreconditionFailedError
from kvobj.store.multipart import CompletedPart, choose_parts, multipart_etag

MAX_COMPLETE_BYTES: Final = 4 * 1024 * 1024
_SIZE_HEADER: Final = "x-amz-mp-object-size"
_CHECKSUM_ELEMENTS: Final = {f"Checksum{algorithm}": algorithm for algorithm in CHECKSUM_BYTES}


class MultipartUploads:
    """Handlers of CreateMultipartUpload, ListParts, CompleteMultipartUpload and AbortMultipartUpload."""

    def __init__(self, store: ObjectStore, *, new_upload_id: Callable[[int], str]) -> None:
        self._store = store
        self._new_upload_id = new_upload_id

    async def create(self, exchange: Exchange, operation: CreateMultipartUpload) -> Reply:
        """Begin an upload; its headers and metadata are those the object will have."""
        if exchange.authentication.is_anonymous:
            raise S3Error("AccessDenied", "Anonymous users cannot initiate multipart uploads. Please authenticate.")
        catalog = self._store.catalog
        access = await open_bucket(exchange, catalog, operation.bucket, action=Action.PUT_OBJECT, key=operation.key)
        bucket, fields = access.bucket, exchange.fields
        place = await access.place(operation.key, fields)
        if place is not None:
            if place.group is not None:
                raise S3Error("InvalidRequest", "A part of a chunk is put whole.", ArgumentName=PART_HEADER)
            # Holds a live chunk, for which Complete answers; refuses what the commit would refuse, before any part is sent.
            await self._store.live_chunk(operation.bucket, operation.key, place)
        algorithm, kind = parse_upload_checksum(fields)
        durability = parse_durability(fields) or bucket.durability
        settings = exchange.settings
        can_share = settings.has_remote or operation.bucket in settings.upstream_buckets
        if durability is Durability.SHARED and not can_share:
            raise InvalidRequestError("durability class shared needs a remote tier, and none is configured")
        now_ms = exchange.clock.now_ms()
        upload = UploadRow(
            bucket=operation.bucket,
            key=operation.key,
            upload_id=self._new_upload_id(now_ms),
            initiated_ms=now_ms,
            owner=exchange.authentication.user.id,
            durability=durability,
            headers=parse_stored_headers(fields),
            metadata=parse_metadata(fields),
            checksum_algorithm=algorithm,
            checksum_type=kind,
            parent=None if place is None else place.parent,
            namespace="" if place is None else place.namespace.name,
            tokens=0 if place is None else place.tokens,
            namespace_root=b"" if place is None else place.namespace_root,
            acl=await acl_of_object(exchange, access.rights, operation.key),
            tags=tags_of_object(exchange, access.rights, operation.key),
        )
        await catalog.create_upload(upload, made_ms=bucket.created_ms, limit=settings.bucket_uploads)
        reply = exchange.xml(
            xml.document(
                "InitiateMultipartUploadResult",
                [("Bucket", upload.bucket), ("Key", upload.key), ("UploadId", upload.upload_id)],
            )
        )
        headers: list[Header] = abort_headers(bucket, upload) if bucket.lifecycle else []
        if algorithm is not None and kind is not None:
            headers += [("x-amz-checksum-algorithm", algorithm), ("x-amz-checksum-type", kind)]
        return Reply(reply.status, (*reply.headers, *headers), reply.body)

    async def list_parts(self, exchange: Exchange, operation: ListParts) -> Reply:
        """One page of an upload's parts, by number."""
        catalog = self._store.catalog
        access, upload = await self._upload(exchange, operation, Action.LIST_PARTS)
        parts = await catalog.parts(operation.bucket, operation.key, operation.upload_id)
        following = [part for part in parts if part.number > operation.after]
        page = following[: operation.limit]
        owner = [("ID", upload.owner), ("DisplayName", exchange.users.display_name(upload.owner))]
        nodes: list[xml.Node] = [
            ("Bucket", operation.bucket),
            ("Key", operation.key),
            ("UploadId", operation.upload_id),
            ("Initiator", owner),
            ("Owner", owner),
            ("StorageClass", "STANDARD"),
            ("PartNumberMarker", str(operation.after)),
        ]
        is_truncated = len(following) > len(page) > 0
        if page:
            nodes.append(("NextPartNumberMarker", str(page[-1].number)))
        nodes += [("MaxParts", str(operation.limit)), ("IsTruncated", "true" if is_truncated else "false")]
        if upload.checksum_algorithm is not None:
            nodes.append(("ChecksumAlgorithm", upload.checksum_algorithm))
            nodes.append(("ChecksumType", upload.checksum_type or ""))
        for part in page:
            about: list[xml.Node] = [
                ("PartNumber", str(part.number)),
                ("LastModified", iso_time(part.modified_ms)),
                ("ETag", f'"{part.etag}"'),
                ("Size", str(part.size_bytes)),
            ]
            if part.checksum is not None:
                about.append((f"Checksum{part.checksum.algorithm}", part.checksum.value))
            nodes.append(("Part", about))
        reply = exchange.xml(xml.document("ListPartsResult", nodes))
        headers = abort_headers(access.bucket, upload) if access.bucket.lifecycle else []
        return Reply(reply.status, (*reply.headers, *headers), reply.body)

    async def complete(self, exchange: Exchange, operation: CompleteMultipartUpload) -> Reply:
        """Make the object of the listed parts. Conditions are evaluated in the commit. Who completes again, be it while the first
        request is still at work, is told again."""
        access, found = await self._look_up(exchange, operation, Action.PUT_OBJECT)
        try:
            upload = await access.check_upload(found, operation.upload_id)
        except NoSuchUploadError:
            row = await self._own_object(exchange, operation, access)
            if row is None or not _made_of(row, await _listed_parts(exchange)):
                raise
            return _told_again(exchange, operation, access.bucket, row)
        parts = await _listed_parts(exchange)
        try:
            return await self._completed(exchange, operation, access, upload, parts)
        except (NoSuchUploadError, InvalidPartError, PreconditionFailedError) as error:
            # The same request may have come twice, and the other have been faster.
            if await self._store.catalog.upload(operation.bucket, operation.key, operation.upload_id) is not None:
                raise
            row = await self._own_object(exchange, operation, access)
            if row is not None and _made_of(row, parts):
                return _told_again(exchange, operation, access.bucket, row)
            if isinstance(error, InvalidPartError):  # it was aborted, and its parts with it
                raise NoSuchUploadError("no such upload", upload_id=operation.upload_id) from error
            raise

    async def _completed(
        self,
        exchange: Exchange,
        operation: CompleteMultipartUpload,
        access: ChunkAccess,
        upload: UploadRow,
        parts: Sequence[CompletedPart],
    ) -> Reply:
        bucket, fields = access.bucket, exchange.fields
        _check_part_checksums(upload, parts)
        upload, stated = _stated_checksum(fields, upload)
        checksums: tuple[Checksum, ...] = ()
        if upload.checksum_algorithm is not None:
            uploaded = await self._store.catalog.parts(operation.bucket, operation.key, operation.upload_id)
            checksums = of_parts(upload, choose_parts(uploaded, parts))
        if stated is not None and (not checksums or checksums[0].value.partition("-")[0] != stated.partition("-")[0]):
            raise S3Error("BadDigest", "The checksum of the object did not match that of its parts.")
        result = await self._store.complete_upload(
            bucket,
            upload,
            parts,
            condition=parse_write_condition(fields),
            checksums=checksums,
            size_bytes=_stated_size(fields),
        )
        row = result.row
        assert isinstance(row, ObjectRow)
        if result.existed:
            await access.check_shown(row)
        reply = _completed_reply(exchange, operation, row, () if result.existed else checksums)
        headers = write_headers(row, bucket, existed=result.existed, durability=result.durability)
        return Reply(reply.status, (*reply.headers, *headers), reply.body)

    async def _own_object(
        self, exchange: Exchange, operation: CompleteMultipartUpload, access: ChunkAccess
    ) -> ObjectRow | None:
        """The object under the key of an upload that is gone, for who owns it or its bucket. Completed uploads are not remembered:
        the parts' ETags tell whether this is the object that they made."""
        (row,) = await self._store.catalog.lookup(operation.bucket, [operation.key])
        if row is None or access.bucket.kind is BucketKind.KV:
            return None
        return row if access.is_owner or row.owner == exchange.authentication.user.id else None

    async def abort(self, exchange: Exchange, operation: AbortMultipartUpload) -> Reply:
        """Give the upload up; its parts' bytes go."""
        await self._upload(exchange, operation, Action.ABORT_UPLOAD)
        await self._store.abort_upload(operation.bucket, operation.key, operation.upload_id)
        return exchange.reply(204)

    async def _upload(
        self, exchange: Exchange, operation: UploadOperation, action: Action
    ) -> tuple[ChunkAccess, UploadRow]:
        """The upload, if the user may go on with it, and the user's rights in its bucket."""
        access, upload = await self._look_up(exchange, operation, action)
        return access, await access.check_upload(upload, operation.upload_id)

    async def _look_up(
        self, exchange: Exchange, operation: UploadOperation, action: Action
    ) -> tuple[ChunkAccess, UploadRow | None]:
        catalog = self._store.catalog
        access = await open_bucket(exchange, catalog, operation.bucket, action=action, key=operation.key)
        return access, await catalog.upload(operation.bucket, operation.key, operation.upload_id)


async def _listed_parts(exchange: Exchange) -> list[CompletedPart]:
    """The parts of the request's document. Its x-amz-checksum headers tell of the object, not of this document."""
    announced = Announced(None, exchange.authentication.payload_sha256, None, None)
    return parse_complete(await exchange.read_document(announced, limit_bytes=MAX_COMPLETE_BYTES))


def _made_of(row: ObjectRow, parts: Sequence[CompletedPart]) -> bool:
    if [part.number for part in parts] != [part.number for part in row.parts]:
        return False
    try:
        return multipart_etag([part.etag for part in parts]) == row.etag
    except ValueError:  # an ETag that is none of a part
        return False


def _told_again(exchange: Exchange, operation: CompleteMultipartUpload, bucket: BucketRow, row: ObjectRow) -> Reply:
    """The answer for who never saw the first one and completes again."""
    reply = _completed_reply(exchange, operation, row, row.checksums)
    headers = write_headers(row, bucket, existed=False, durability=row.durability)
    return Reply(reply.status, (*reply.headers, *headers), reply.body)


def _completed_reply(
    exchange: Exchange, operation: CompleteMultipartUpload, row: ObjectRow, checksums: Iterable[Checksum]
) -> Reply:
    nodes: list[xml.Node] = [
        ("Location", exchange.url or f"/{operation.bucket}/{encode_key(operation.key)}"),
        ("Bucket", operation.bucket),
        ("Key", operation.key),
        ("ETag", f'"{row.etag}"'),
    ]
    for name, value in checksum_headers(checksums):
        is_type = name == "x-amz-checksum-type"
        nodes.append(("ChecksumType" if is_type else f"Checksum{name.rpartition('-')[2].upper()}", value))
    return exchange.xml(xml.document("CompleteMultipartUploadResult", nodes))


def parse_complete(document: bytes) -> list[CompletedPart]:
    """The parts of a CompleteMultipartUpload document, in its order. Raises `S3Error` MalformedXML."""
    try:
        root = xml.parse(document, root="CompleteMultipartUpload")
    except xml.XmlSyntaxError as error:
        raise S3Error("MalformedXML") from error
    parts = [_parse_part(element) for element in root.children if element.name == "Part"]
    if not 1 <= len(parts) <= MAX_PARTS or len(parts) != len(root.children):
        raise S3Error("MalformedXML")
    return parts


def _parse_part(element: xml.Element) -> CompletedPart:
    number, etag = element.child_text("PartNumber"), element.child_text("ETag")
    if number is None or etag is None:
        raise S3Error("MalformedXML")
    number = number.strip()
    if not number.isascii() or not number.isdigit() or len(number) > 5 or not 1 <= int(number) <= MAX_PARTS:  # noqa: PLR2004 - digits
        raise S3Error("InvalidArgument", f"Part number must be an integer between 1 and {MAX_PARTS}, inclusive.")
    checksums = {
        _CHECKSUM_ELEMENTS[child.name]: child.text.strip()
        for child in element.children
        if child.name in _CHECKSUM_ELEMENTS
    }
    return CompletedPart(number=int(number), etag=bare_etag(etag), checksums=checksums)


def _check_part_checksums(upload: UploadRow, parts: Sequence[CompletedPart]) -> None:
    """Raise `S3Error` InvalidRequest where a part lacks the checksum that the upload was begun with, if it is one of parts."""
    algorithm = upload.checksum_algorithm
    if algorithm is None or upload.checksum_type != COMPOSITE:
        return
    for part in parts:
        if algorithm not in part.checksums:
            raise S3Error(
                "InvalidRequest",
                f"The upload was created using a {algorithm.lower()} checksum. The complete request must include the "
                f"checksum for each part. It was missing for part {part.number} in the request.",
            )


def _stated_checksum(fields: dict[str, str], upload: UploadRow) -> tuple[UploadRow, str | None]:
    """The object's checksum as Complete states it; an upload that named no algorithm takes Complete's."""
    for algorithm in CHECKSUM_BYTES:
        value = fields.get(f"x-amz-checksum-{algorithm.lower()}")
        if value is not None:
            value = value.strip()
            check_value(algorithm, value.partition("-")[0])
            if upload.checksum_algorithm is None:
                default = FULL_OBJECT if "-" not in value and not algorithm.startswith("SHA") else COMPOSITE
                kind = checked_type(algorithm, fields.get("x-amz-checksum-type", default))
                return msgspec.structs.replace(upload, checksum_algorithm=algorithm, checksum_type=kind), value
            if upload.checksum_algorithm != algorithm:
                raise S3Error("InvalidRequest", "The checksum's algorithm is not the upload's.")
            return upload, value
    return upload, None


def _stated_size(fields: dict[str, str]) -> int | None:
    value = fields.get(_SIZE_HEADER)
    if value is None:
        return None
    value = value.strip()
    if not value.isascii() or not value.isdigit() or len(value) > 19:  # noqa: PLR2004 - digits of 2^63
        raise S3Error("InvalidRequest", f"{_SIZE_HEADER} must be a number.")
    return int(value)
