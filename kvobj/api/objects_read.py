"""GET and HEAD of an object: from the catalog's row and, for bytes, the store's reader. A miss is a 404, never a 5xx.

Of a chunk also some of its layers, one of its parts, and what a pin still holds after a DELETE has hidden it.
"""

from __future__ import annotations

from typing import Final

from kvobj.api.accepting import VARY, parse_accept, representation_headers
from kvobj.api.access.actions import Action
from kvobj.api.checksums import checksum_headers
from kvobj.api.chunk_access import ChunkAccess, open_bucket
from kvobj.api.chunk_headers import ACCEPT_HEADER, PIN_HEADER, parse_pin
from kvobj.api.conditions import Verdict, judge_read, range_still_holds
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange, Header
from kvobj.api.following import FollowedReads
from kvobj.api.message import Reply
from kvobj.api.object_headers import check_no_overrides, entity_headers, object_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import GetObject
from kvobj.api.ranges import parse_range
from kvobj.catalog.rows import BucketKind, Checksum, ObjectRow
from kvobj.errors import CorruptionError, NoSuchKeyError, PreconditionFailedError
from kvobj.store.given_chunks import PLAIN
from kvobj.store.places import layer_span
from kvobj.store.representation import plain_only

# A row may be replaced, and its blobs reaped, between its look-up and the read: each attempt looks it up anew.
READ_ATTEMPTS: Final = 3
_CUSTOMER_KEY: Final = "x-amz-server-side-encryption-customer-algorithm"
_ENCRYPTION: Final = "x-amz-server-side-encryption"


class ObjectReads:
    """Handlers of GetObject and HeadObject."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._followed = FollowedReads(store)

    async def get(self, exchange: Exchange, operation: GetObject) -> Reply:
        """The object, a range of it or a part of it; of a HEAD the same headers without bytes."""
        catalog = self._store.catalog
        access = await open_bucket(exchange, catalog, operation.bucket, action=Action.GET_OBJECT, key=operation.key)
        bucket = access.bucket
        if exchange.overrides and exchange.authentication.is_anonymous:
            check_no_overrides(exchange.overrides)
        if bucket.kind is BucketKind.KV:
            parse_accept(exchange.fields)  # refused before anything is looked up
        elif operation.layers is not None or operation.part is not None or operation.follow:
            raise S3Error("InvalidRequest", "Layers, parts by index and follow are for buckets of kind kv.")
        if _CUSTOMER_KEY in exchange.fields or _ENCRYPTION in exchange.fields:
            raise _no_encryption(exchange.fields)
        if operation.follow and PIN_HEADER not in exchange.fields:
            return await self._stored_or_followed(exchange, operation, access)
        return await self._stored(exchange, operation, access)

    async def _stored_or_followed(self, exchange: Exchange, operation: GetObject, access: ChunkAccess) -> Reply:
        """What is here, then what is on its way here, and only then what an upstream may have: that may take long to tell."""
        if not await self._is_here(operation):
            reply = await self._followed.get(exchange, operation, access)
            if reply is not None:
                return reply
        try:
            return await self._stored(exchange, operation, access)
        except NoSuchKeyError:
            reply = await self._followed.get(exchange, operation, access)
            if reply is not None:
                return reply
            if not await self._is_here(operation):
                raise
        return await self._stored(exchange, operation, access)  # it arrived between the looks

    async def _is_here(self, operation: GetObject) -> bool:
        (row,) = await self._store.catalog.lookup(operation.bucket, [operation.key])
        return row is not None

    async def _stored(self, exchange: Exchange, operation: GetObject, access: ChunkAccess) -> Reply:
        """The reply to a read of what is there. `NoSuchKeyError`, `CorruptionError` where its bytes are lost."""
        for _ in range(READ_ATTEMPTS):
            reply = await self._read(exchange, operation, access)
            if reply is not None:
                return reply
        if access.bucket.kind is BucketKind.KV:
            # A chunk is a cache's content: lost bytes are a miss, and the engine computes them again.
            raise NoSuchKeyError("no such key", bucket=operation.bucket, key=operation.key)
        raise CorruptionError("no tier has the object's bytes", bucket=operation.bucket, key=operation.key)

    async def _read(self, exchange: Exchange, operation: GetObject, access: ChunkAccess) -> Reply | None:
        """The reply, or None where the row's bytes are gone: it was replaced since it was looked up, or they are lost."""
        bucket, fields = access.bucket, exchange.fields
        row = await self._represented(exchange, operation, access)
        verdict = judge_read(fields, row)
        if verdict is Verdict.FAILED:
            raise PreconditionFailedError("a condition does not hold", bucket=operation.bucket, key=operation.key)
        if verdict is Verdict.NOT_MODIFIED:
            takes = [VARY] if ACCEPT_HEADER in fields else []
            return exchange.reply(304, [*entity_headers(row), *takes])
        if bucket.kind is BucketKind.KV and row.digest is None:
            row = await self._store.settled(row, wait=exchange.is_head)
        span = None if operation.is_whole else await _asked_span(operation, row, access, has_range="range" in fields)
        if span is not None:
            start, stop = span
            status = 206 if stop > start else 200  # Content-Range cannot say "no bytes"
        else:
            status, start, stop = _span(fields, row)
        headers = self._headers(exchange, operation, row, access, is_whole=status == 200)  # noqa: PLR2004 - a status
        if status == 206:  # noqa: PLR2004 - a status
            headers.append(("content-range", f"bytes {start}-{stop - 1}/{row.size_bytes}"))
        if exchange.is_head:
            return Reply(status, (*exchange.base, *headers), content_length=stop - start)
        if start == stop:
            return exchange.reply(status, headers)
        reader = await self._store.open(row, start, stop)
        if reader is None:
            return None
        if reader.tier:
            headers.append(("x-kvobj-tier", reader.tier))
        return exchange.reply(status, headers, reader)

    async def _represented(self, exchange: Exchange, operation: GetObject, access: ChunkAccess) -> ObjectRow:
        """The row to read from: another than the chunk's own for a reader that says which codecs it takes. `NoSuchKeyError` where
        nothing there will do: to that reader the chunk is a miss."""
        row = await self._row(exchange, operation, access)
        accepts = parse_accept(exchange.fields) if access.bucket.kind is BucketKind.KV else None
        if accepts is None and row.lossy is not None:
            accepts = PLAIN  # a HEAD or a condition opens nothing that would tell whether the lossy copy alone is left
        if accepts is None or not row.size_bytes:
            return row
        if operation.layers is not None or operation.part is not None or operation.part_number is not None:
            accepts = plain_only(accepts)  # no frame is a part of a chunk
            if not accepts:
                raise S3Error("InvalidRequest", "Layers and parts are sent raw.", ArgumentName=ACCEPT_HEADER)
        if row.digest is None:
            row = await self._store.settled(row, wait=exchange.is_head)
        found = await self._store.represent(row, accepts)
        if found is None:
            raise NoSuchKeyError("no representation that is accepted", bucket=row.bucket, key=row.key)
        return found

    async def _row(self, exchange: Exchange, operation: GetObject, access: ChunkAccess) -> ObjectRow:
        """The row that the user may read. What policy has condemned is rescued, but only by who may read it."""
        store, bucket, key = self._store, access.bucket, operation.key
        if bucket.kind is not BucketKind.KV:
            (found,) = await store.catalog.lookup(bucket.name, [key])
            return await access.check_read(found, key)
        pin = parse_pin(exchange.fields)
        if pin is not None:
            user_id = exchange.authentication.user.id
            return await access.check_read(await store.pinned(bucket.name, key, pin, user_id=user_id), key)
        if not access.is_owner:
            (seen,) = await store.catalog.lookup(bucket.name, [key])
            if seen is None:
                await access.check_granted_any()  # it may be at an upstream: the look-up asks there
            else:
                await access.check_read(seen, key)
        row = await store.look_up(bucket.name, key, will_open=not exchange.is_head)
        return row if row is not None and access.is_owner else await access.check_read(row, key)

    @staticmethod
    def _headers(
        exchange: Exchange, operation: GetObject, row: ObjectRow, access: ChunkAccess, *, is_whole: bool
    ) -> list[Header]:
        fields = exchange.fields
        wants_checksums = fields.get("x-amz-checksum-mode", "").upper() == "ENABLED"
        of_whole = wants_checksums and is_whole and operation.part_number is None
        headers = object_headers(row, access.bucket, overrides=exchange.overrides, with_checksums=of_whole)
        if (operation.part_number is not None or operation.part is not None) and row.parts:
            headers.append(("x-amz-mp-parts-count", str(len(row.parts))))
        if wants_checksums and operation.part_number is not None:
            headers += checksum_headers(_part_checksums(row, operation.part_number))
        if ACCEPT_HEADER in fields and access.bucket.kind is BucketKind.KV:
            headers += representation_headers(row)
        if row.tags and access.rights.may(Action.GET_OBJECT_TAGGING, key=row.key, row=row):
            headers.append(("x-amz-tagging-count", str(len(row.tags))))
        if "x-amz-rdma-token" in fields:
            headers.append(("x-amz-rdma-reply", "501"))  # declined: the bytes come over HTTP
        return headers


def _span(fields: dict[str, str], row: ObjectRow) -> tuple[int, int, int]:
    value = fields.get("range")
    if value is not None and range_still_holds(fields.get("if-range"), row):
        span = parse_range(value, row.size_bytes)
        if span is not None:
            return 206, *span
    return 200, 0, row.size_bytes


async def _asked_span(
    operation: GetObject, row: ObjectRow, access: ChunkAccess, *, has_range: bool
) -> tuple[int, int] | None:
    """The bytes that the query names by part or by layers; None where it names none."""
    if operation.part_number is not None:
        if has_range:
            raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
        return _part_span(row, operation.part_number)
    if operation.part is not None:
        return _part_span(row, operation.part + 1)
    if operation.layers is None:
        return None
    namespace = await access.namespace(row.namespace)
    if namespace is None:  # it was removed since the row was looked up, and its chunks with it
        raise NoSuchKeyError("no such key", bucket=row.bucket, key=row.key)
    return layer_span(namespace, row, *operation.layers)


def _part_checksums(row: ObjectRow, number: int) -> tuple[Checksum, ...]:
    """What verifies part `number` alone, under the type that the object's has; an object that was put whole is its own part 1."""
    if not row.parts:
        return row.checksums
    checksum = row.parts[number - 1].checksum
    if checksum is None or not row.checksums:
        return ()
    return (Checksum(checksum.algorithm, checksum.value, row.checksums[0].type),)


def _part_span(row: ObjectRow, number: int) -> tuple[int, int]:
    """Where part `number` of the object lies; an object that was put whole is its own part 1."""
    if not row.parts and number == 1:
        return 0, row.size_bytes
    # Parts are counted as Complete listed them: S3 renumbers what was uploaded with gaps.
    if number > len(row.parts):
        raise S3Error("InvalidPartNumber", PartNumberRequested=number, ActualPartCount=max(1, len(row.parts)))
    start = sum(part.size_bytes for part in row.parts[: number - 1])
    return start, start + row.parts[number - 1].size_bytes


def _no_encryption(fields: dict[str, str]) -> S3Error:
    """Why a read that speaks of encryption is refused: with a key of the client's, or with the header that belongs to writes."""
    if _CUSTOMER_KEY in fields:
        return S3Error("InvalidRequest", "The encryption parameters are not applicable to this object.")
    message = f"{_ENCRYPTION} header is not supported for this operation."
    return S3Error("InvalidArgument", message, ArgumentName=_ENCRYPTION, ArgumentValue=fields[_ENCRYPTION])
