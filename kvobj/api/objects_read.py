"""GET and HEAD of an object: from the catalog's row and, for bytes, the store's reader. A miss is a 404, never a 5xx."""

from __future__ import annotations

from typing import Final

from kvobj.api.conditions import Verdict, judge_read, range_still_holds
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange, Header
from kvobj.api.message import Reply
from kvobj.api.object_headers import entity_headers, object_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import GetObject
from kvobj.api.ranges import parse_range
from kvobj.catalog.rows import BucketKind, BucketRow, ObjectRow
from kvobj.errors import CorruptionError, NoSuchKeyError, PreconditionFailedError

# A row may be replaced, and its blobs reaped, between its look-up and the read: each attempt looks it up anew.
READ_ATTEMPTS: Final = 3


class ObjectReads:
    """Handlers of GetObject and HeadObject."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get(self, exchange: Exchange, operation: GetObject) -> Reply:
        """The object, a range of it or a part of it; of a HEAD the same headers without bytes."""
        bucket = exchange.authorise(await self._store.catalog.bucket(operation.bucket), operation.bucket)
        for _ in range(READ_ATTEMPTS):
            reply = await self._read(exchange, operation, bucket)
            if reply is not None:
                return reply
        if bucket.kind is BucketKind.KV:
            # A chunk is a cache's content: lost bytes are a miss, and the engine computes them again.
            raise NoSuchKeyError("no such key", bucket=operation.bucket, key=operation.key)
        raise CorruptionError("no tier has the object's bytes", bucket=operation.bucket, key=operation.key)

    async def _read(self, exchange: Exchange, operation: GetObject, bucket: BucketRow) -> Reply | None:
        """The reply, or None where the row's bytes are gone: it was replaced since it was looked up, or they are lost."""
        row = await self._row(operation)
        fields = exchange.fields
        verdict = judge_read(fields, row)
        if verdict is Verdict.FAILED:
            raise PreconditionFailedError("a condition does not hold", bucket=operation.bucket, key=operation.key)
        if verdict is Verdict.NOT_MODIFIED:
            return exchange.reply(304, entity_headers(row))
        if bucket.kind is BucketKind.KV and row.digest is None:
            row = await self._store.settled(row, wait=exchange.is_head)
        if operation.part_number is not None:
            start, stop = _part_span(row, operation.part_number)
            status = 206 if stop > start else 200  # Content-Range cannot say "no bytes"
        else:
            status, start, stop = _span(fields, row)
        headers = self._headers(exchange, operation, row, bucket, is_whole=status == 200)  # noqa: PLR2004 - a status
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

    async def _row(self, operation: GetObject) -> ObjectRow:
        (row,) = await self._store.catalog.lookup(operation.bucket, [operation.key])
        if row is None:
            raise NoSuchKeyError("no such key", bucket=operation.bucket, key=operation.key)
        return row

    @staticmethod
    def _headers(
        exchange: Exchange, operation: GetObject, row: ObjectRow, bucket: BucketRow, *, is_whole: bool
    ) -> list[Header]:
        fields = exchange.fields
        wants_checksums = is_whole and fields.get("x-amz-checksum-mode", "").upper() == "ENABLED"
        headers = object_headers(row, bucket, overrides=exchange.overrides, with_checksums=wants_checksums)
        if operation.part_number is not None and row.parts:
            headers.append(("x-amz-mp-parts-count", str(len(row.parts))))
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


def _part_span(row: ObjectRow, number: int) -> tuple[int, int]:
    """Where part `number` of the object lies; an object that was put whole is its own part 1."""
    if not row.parts and number == 1:
        return 0, row.size_bytes
    # Parts are counted as Complete listed them: S3 renumbers what was uploaded with gaps.
    if number > len(row.parts):
        raise S3Error("InvalidPartNumber", PartNumberRequested=number, ActualPartCount=max(1, len(row.parts)))
    start = sum(part.size_bytes for part in row.parts[: number - 1])
    return start, start + row.parts[number - 1].size_bytes
