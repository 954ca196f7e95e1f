"""PUT of an object, of a part of an upload, of a part of a chunk; and DELETE of one object.

Order: rights and place, length, what is announced, conditions, parent and room; only then `100 Continue`; then bytes, trailers,
digests, commit. So a refusal comes before the body, and nothing is visible unless everything announced was true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from kvobj.api.access.actions import Action
from kvobj.api.checksums import Announced, check_digests, check_trailers, checksum_headers, parse_announced
from kvobj.api.chunk_access import ChunkAccess, open_bucket
from kvobj.api.chunk_headers import PARTS_HEADER, parse_hint
from kvobj.api.conditions import parse_delete_condition, parse_write_condition
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange, Header
from kvobj.api.hot_requests import KnownWrite
from kvobj.api.kv.matching import hint_level
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply
from kvobj.api.object_headers import parse_durability, parse_metadata, parse_stored_headers, write_headers
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import DeleteObject, PutObject, UploadPart
from kvobj.api.settings.new_object import acl_of_object, owner_of_object, tags_of_object
from kvobj.catalog.rows import BucketRow, ObjectRow
from kvobj.errors import EntityTooLargeError, ImmutableChunkError, PreconditionFailedError
from kvobj.store.groups import check_same_part
from kvobj.store.places import ChunkPlace, GroupPart, check_size
from kvobj.store.requests import AT_ONCE_BYTES_MAX, PartTarget, PutRequest, PutResult
from kvobj.store.standing import check_same_chunk

MAX_PUT_BYTES: Final = 5 * 1024**3


class ObjectWrites:
    """Handlers of PutObject, UploadPart and DeleteObject."""

    def __init__(
        self,
        store: ObjectStore,
        chunks: ChunkStore | None = None,
        on_stored: Callable[[Exchange, PutRequest, Announced], None] = lambda _, __, ___: None,
    ) -> None:
        """`chunks` is told the hints of writers, `on_stored` what was stored at once, or is too long for that."""
        self._store = store
        self._on_stored = on_stored
        self._chunks = chunks

    async def put(self, exchange: Exchange, operation: PutObject) -> Reply:
        """Store the body as the object. A KV bucket's live chunk stands: 200 with x-kvobj-existed, or 409."""
        catalog, fields = self._store.catalog, exchange.fields
        access = await open_bucket(exchange, catalog, operation.bucket, action=Action.PUT_OBJECT, key=operation.key)
        bucket = access.bucket
        place = await access.place(operation.key, fields)
        if "x-amz-rdma-token" in fields and exchange.body.length == 0:
            # Nothing is stored: the bytes are not in this request. The client sends them again over HTTP.
            return exchange.reply(200, [("x-amz-rdma-reply", "501")])
        size_bytes = _checked_size(exchange)
        if place is not None:
            check_size(place, size_bytes)
            self._note_hint(exchange, operation, place)
        announced = parse_announced(fields, exchange.authentication)
        request = PutRequest(
            bucket=bucket,
            key=operation.key,
            size_bytes=size_bytes,
            owner=owner_of_object(exchange, bucket),
            durability=parse_durability(fields),
            headers=parse_stored_headers(fields),
            metadata=parse_metadata(fields),
            condition=parse_write_condition(fields),
            algorithms=announced.digests,
            place=place,
            acl=await acl_of_object(exchange, access.rights, operation.key),
            tags=tags_of_object(exchange, access.rights, operation.key),
            wants_digest=fields.get("x-kvobj-want", "").strip().lower() == "digest",
        )
        if place is not None and place.group is not None:
            return await self._put_chunk_part(exchange, access, request, announced, place.group)
        return await self._stored(exchange, access, request, announced)

    async def put_known(self, exchange: Exchange, known: KnownWrite) -> Reply:
        """`put` of what was found out before: who asks may do all with the bucket."""
        return await self._stored(exchange, None, known.request, known.announced)

    async def _stored(
        self, exchange: Exchange, access: ChunkAccess | None, request: PutRequest, announced: Announced
    ) -> Reply:
        """Receive the body and store it. `access`: None for who may do all."""
        bucket, size_bytes = request.bucket, request.size_bytes
        source = exchange.source(size_bytes)
        result: PutResult | None = None
        if size_bytes <= AT_ONCE_BYTES_MAX:
            result = self._store.put_at_once(request, source, partial(check_digests, announced, announced.value))
        is_learned = access is not None and (result is not None or size_bytes > AT_ONCE_BYTES_MAX)
        if result is None:
            async with await self._store.start_put(request) as transfer:
                if transfer.existing is not None:
                    if access is not None:
                        await access.check_shown(transfer.existing)
                    check_same_chunk(transfer.existing, request)
                    row = await self._store.settled(transfer.existing, wait=request.wants_digest)
                    return _existed(exchange, row, bucket)
                await exchange.body.accept()
                await transfer.receive(source)
                value = check_trailers(announced, await source.finish())
                checksums = check_digests(announced, value, await transfer.digests()) if request.algorithms else ()
                result = await transfer.commit(checksums=checksums, want_digest=request.wants_digest)
        if is_learned:
            self._on_stored(exchange, request, announced)
        assert isinstance(result.row, ObjectRow)
        row = result.row
        if result.existed and access is not None:
            await access.check_shown(row)
        headers = [
            ("etag", f'"{row.etag}"'),
            *write_headers(row, bucket, existed=result.existed, durability=result.durability),
        ]
        if not result.existed:
            headers += checksum_headers(row.checksums)
        return exchange.reply(200, headers)

    def _note_hint(self, exchange: Exchange, operation: PutObject, place: ChunkPlace) -> None:
        """Before the body, so that the policy knows what the chunk is of when it is stored; of a chunk in parts, once."""
        tokens = parse_hint(exchange.fields)
        if tokens is None or self._chunks is None or (place.group is not None and place.group.index):
            return
        is_partial = 0 < place.tokens < place.namespace.chunk_tokens
        self._chunks.note_write(operation.bucket, operation.key, is_partial=is_partial, hint=hint_level(tokens))

    async def _put_chunk_part(
        self, exchange: Exchange, access: ChunkAccess, request: PutRequest, announced: Announced, group: GroupPart
    ) -> Reply:
        """Store the body as one part of a chunk: the last one, whichever it is, makes the chunk visible."""
        bucket = access.bucket
        start = await self._store.start_group_part(request)
        if start.existing is not None:
            await access.check_shown(start.existing)
            check_same_part(start.existing, group, request.size_bytes)
            parts_header = (PARTS_HEADER, f"{group.count}/{group.count}")
            return _existed(exchange, await self._store.settled(start.existing, wait=False), bucket, parts_header)
        if start.part is not None:
            if start.part.size_bytes != request.size_bytes:
                raise ImmutableChunkError("an earlier writer's part has another size", size_bytes=start.part.size_bytes)
            state = replace(await self._store.end_group(request), existed=True)
        else:
            assert start.request is not None
            source = exchange.source(request.size_bytes)
            async with await self._store.start_put(start.request) as transfer:
                await exchange.body.accept()
                await transfer.receive(source)
                value = check_trailers(announced, await source.finish())
                checksums = check_digests(announced, value, await transfer.digests()) if request.algorithms else ()
                state = await self._store.end_group(start.request, transfer, checksums=checksums)
        headers: list[Header] = [(PARTS_HEADER, f"{state.have}/{state.count}")]
        if state.result is not None:
            row, durability = state.result.row, state.result.durability
            assert isinstance(row, ObjectRow)
            if state.existed:
                await access.check_shown(row)
            headers += [("etag", f'"{row.etag}"')]
            headers += write_headers(row, bucket, existed=state.existed, durability=durability)
        else:
            headers += [("x-kvobj-existed", "true" if state.existed else "false")]
        return Reply(200, (*exchange.base, *headers), close=exchange.must_close())

    async def upload_part(self, exchange: Exchange, operation: UploadPart) -> Reply:
        """Store the body as a part of an upload."""
        catalog = self._store.catalog
        access = await open_bucket(exchange, catalog, operation.bucket, action=Action.PUT_OBJECT, key=operation.key)
        size_bytes = _checked_size(exchange)
        found = await catalog.upload(operation.bucket, operation.key, operation.upload_id)
        upload = await access.check_upload(found, operation.upload_id)
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
            bucket=access.bucket,
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
        """Hide the object, of a chunk with all that follows on it. Absent is fine but under If-Match, which must hold."""
        catalog, key = self._store.catalog, operation.key
        rights = exchange.access(await catalog.bucket(operation.bucket), operation.bucket)
        rights.require(Action.DELETE_OBJECT, key=key)
        condition = parse_delete_condition(exchange.fields)
        if condition is not None and condition.compares and not rights.may_all:
            # The answer would tell of the object: S3 wants the right to read it too.
            (row,) = await catalog.lookup(operation.bucket, [key])
            if row is not None:
                rights.require(Action.GET_OBJECT, key=key, row=row)
        bucket, conditions = rights.bucket, (condition,) if condition else ()
        (outcome,) = await self._store.delete(bucket.name, [operation.key], conditions, made_ms=bucket.created_ms)
        if outcome.precondition_failed:
            raise PreconditionFailedError("the object is another", bucket=operation.bucket, key=operation.key)
        if outcome.kept:
            raise S3Error("ImmutableChunk", f"The object stays: {outcome.kept}.", Key=operation.key)
        if outcome.removed is None and condition is not None and condition.if_match is not None:
            rights.check_row(None, key, Action.DELETE_OBJECT)
        return exchange.reply(204)


def _existed(exchange: Exchange, row: ObjectRow, bucket: BucketRow, *more: Header) -> Reply:
    """A live chunk answers for the write, and the body need not come."""
    headers = [("etag", f'"{row.etag}"'), *more, *write_headers(row, bucket, existed=True, durability=row.durability)]
    return Reply(200, (*exchange.base, *headers), close=exchange.must_close(), log={"existed": True})


def _checked_size(exchange: Exchange) -> int:
    size_bytes = exchange.body_size_bytes()
    if size_bytes > MAX_PUT_BYTES:
        raise EntityTooLargeError("the body is too large", size_bytes=size_bytes, limit_bytes=MAX_PUT_BYTES)
    return size_bytes
