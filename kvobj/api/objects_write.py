"""PUT of an object or part, and DELETE of one object.

Order: length, what is announced, conditions and room; only then `100 Continue`; then bytes, trailers, digests, commit. So a refusal
comes before the body, and nothing is visible unless everything announced was true.
"""

from __future__ import annotations

from typing import Final

from kvobj.api.checksums import check_digests, check_trailers, checksum_headers, parse_announced
from kvobj.api.conditions import parse_write_condition
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange, Header
from kvobj.api.message import Reply
from kvobj.api.object_headers import parse_durability, parse_metadata, parse_stored_headers, write_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import DeleteObject, PutObject, UploadPart
from kvobj.catalog.rows import ObjectRow
from kvobj.errors import (
    EntityTooLargeError,
    ImmutableChunkError,
    NoSuchUploadError,
    PreconditionFailedError,
)
from kvobj.store.requests import PartTarget, PutRequest

MAX_PUT_BYTES: Final = 5 * 1024**3


class ObjectWrites:
    """Handlers of PutObject, UploadPart and DeleteObject."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def put(self, exchange: Exchange, operation: PutObject) -> Reply:
        """Store the body as the object. A KV bucket's live chunk stands: 200 with x-kvobj-existed, or 409."""
        bucket = exchange.authorise(await self._store.catalog.bucket(operation.bucket), operation.bucket)
        fields = exchange.fields
        if "x-amz-rdma-token" in fields and exchange.body.length == 0:
            # Nothing is stored: the bytes are not in this request. The client sends them again over HTTP.
            return exchange.reply(200, [("x-amz-rdma-reply", "501")])
        size_bytes = _checked_size(exchange)
        announced = parse_announced(fields, exchange.authentication)
        request = PutRequest(
            bucket=bucket,
            key=operation.key,
            size_bytes=size_bytes,
            owner=exchange.authentication.user.id,
            durability=parse_durability(fields),
            headers=parse_stored_headers(fields),
            metadata=parse_metadata(fields),
            condition=parse_write_condition(fields),
            algorithms=announced.digests,
        )
        source = exchange.source(size_bytes)
        async with await self._store.start_put(request) as transfer:
            if transfer.existing is not None:
                check_same_chunk(transfer.existing, request)
                row, durability = transfer.existing, transfer.existing.durability
                headers = [
                    ("etag", f'"{row.etag}"'),
                    *write_headers(row, bucket, existed=True, durability=durability),
                ]
                return Reply(200, (*exchange.base, *headers), close=exchange.must_close(), log={"existed": True})
            await exchange.body.accept()
            await transfer.receive(source)
            value = check_trailers(announced, await source.finish())
            checksums = check_digests(announced, value, await transfer.digests()) if request.algorithms else ()
            wants_digest = fields.get("x-kvobj-want", "").strip().lower() == "digest"
            result = await transfer.commit(checksums=checksums, want_digest=wants_digest)
        assert isinstance(result.row, ObjectRow)
        row = result.row
        headers = [
            ("etag", f'"{row.etag}"'),
            *write_headers(row, bucket, existed=result.existed, durability=result.durability),
        ]
        if not result.existed:
            headers += checksum_headers(checksums)
        return exchange.reply(200, headers)

    async def upload_part(self, exchange: Exchange, operation: UploadPart) -> Reply:
        """Store the body as a part of an upload."""
        catalog = self._store.catalog
        bucket = exchange.authorise(await catalog.bucket(operation.bucket), operation.bucket)
        size_bytes = _checked_size(exchange)
        upload = await catalog.upload(operation.bucket, operation.key, operation.upload_id)
        if upload is None:
            raise NoSuchUploadError("no such upload", upload_id=operation.upload_id)
        announced = parse_announced(
            exchange.fields, exchange.authentication, default_algorithm=upload.checksum_algorithm
        )
        if upload.checksum_algorithm not in (None, announced.algorithm):
            raise S3Error(
                "InvalidRequest",
                f"Checksum Type mismatch occurred, expected checksum Type: {upload.checksum_algorithm}, "
                f"actual checksum Type: {announced.algorithm}",
            )
        request = PutRequest(
            bucket=bucket,
            key=operation.key,
            size_bytes=size_bytes,
            owner=exchange.authentication.user.id,
            algorithms=announced.digests,
            part=PartTarget(operation.upload_id, operation.number),
        )
        source = exchange.source(size_bytes)
        async with await self._store.start_put(request) as transfer:
            await exchange.body.accept()
            await transfer.receive(source)
            value = check_trailers(announced, await source.finish())
            checksums = check_digests(announced, value, await transfer.digests()) if request.algorithms else ()
            result = await transfer.commit(checksums=checksums)
        headers: list[Header] = [("etag", f'"{result.row.etag}"')]
        headers += [(f"x-amz-checksum-{checksum.algorithm.lower()}", checksum.value) for checksum in checksums]
        return exchange.reply(200, headers)

    async def delete(self, exchange: Exchange, operation: DeleteObject) -> Reply:
        """Hide the object. Absent is fine; If-Match must hold."""
        exchange.authorise(await self._store.catalog.bucket(operation.bucket), operation.bucket)
        condition = parse_write_condition(exchange.fields)
        if condition is not None and condition.if_none_match is not None:
            raise S3Error("NotImplemented", "If-None-Match on DELETE is not implemented.", Header="If-None-Match")
        (outcome,) = await self._store.delete(operation.bucket, [operation.key], (condition,) if condition else ())
        if outcome.precondition_failed:
            raise PreconditionFailedError("the etag is another", bucket=operation.bucket, key=operation.key)
        return exchange.reply(204)


def check_same_chunk(row: ObjectRow, request: PutRequest) -> None:
    """First writer wins: the live chunk answers for a write of the same size. Raises `ImmutableChunkError` and, under
    If-None-Match `*`, `PreconditionFailedError`."""
    if request.condition is not None and request.condition.if_none_match is not None:
        raise PreconditionFailedError("the chunk exists", bucket=row.bucket, key=row.key)
    if row.size_bytes != request.size_bytes:
        raise ImmutableChunkError(
            "a live chunk has another size", bucket=row.bucket, key=row.key, size_bytes=row.size_bytes
        )


def _checked_size(exchange: Exchange) -> int:
    size_bytes = exchange.body_size_bytes()
    if size_bytes > MAX_PUT_BYTES:
        raise EntityTooLargeError("the body is too large", size_bytes=size_bytes, limit_bytes=MAX_PUT_BYTES)
    return size_bytes
