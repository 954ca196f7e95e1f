"""POST ?mput: many chunks in one stream, received into the store as they come, visible in one step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from kvobj.api.checksums import Announced, check_digests, check_trailers, parse_announced
from kvobj.api.exchange import Exchange, PayloadSource
from kvobj.api.kv.calls import Call, begin
from kvobj.api.kv.chunk_lists import namer
from kvobj.api.kv.chunk_stream import CONTENT_TYPE, BoundedSource, ItemHeader, read_header
from kvobj.api.kv.errors import error_value
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply
from kvobj.api.object_headers import parse_durability
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import PutChunks
from kvobj.catalog.rows import BucketRow, Durability
from kvobj.codec.checksums import Digester
from kvobj.errors import AccessDeniedError, IncompleteBodyError, InvalidChunkIdError, InvalidRequestError
from kvobj.ids.chunk_ids import CHUNK_ID_BYTES
from kvobj.store.batch import BatchItem, ChunkBatch
from kvobj.store.chunk_naming import has_raw_ids, key_of
from kvobj.store.chunk_values import OpenNamespace
from kvobj.store.places import DEFAULT_NAMESPACE, check_size, place_of
from kvobj.store.requests import PutRequest

_DIGESTED_INLINE_BYTES: Final = 64 * 1024
DIGEST_BYTES: Final = 32


class BatchWrites:
    """Handler of ?mput."""

    def __init__(self, store: ObjectStore, chunks: ChunkStore) -> None:
        self._store = store
        self._chunks = chunks

    async def put(self, exchange: Exchange, operation: PutChunks) -> Reply:
        """Store the stream's chunks. What is wrong with the stream or one of its headers refuses it whole; what the store's state
        refuses (a parent that is gone, another size) is told of each chunk."""
        call = await begin(exchange, operation, self._store, self._chunks)
        fields = exchange.fields
        if fields.get("content-type", CONTENT_TYPE).partition(";")[0].strip().lower() != CONTENT_TYPE:
            raise InvalidRequestError(f"the body is {CONTENT_TYPE}")
        announced = parse_announced(fields, exchange.authentication)
        durability = parse_durability(fields)
        size_bytes = exchange.body_size_bytes()
        async with self._chunks.batch(size_bytes, check_shown=call.access.check_shown) as batch:
            await exchange.body.accept()
            stream = _Incoming(exchange.source(size_bytes), size_bytes, announced, exchange.executor)
            namespace = await self._receive(call, stream, batch, durability)
            await stream.finish()
            quota = None if namespace is None else namespace.row.quota
            parent_tokens = 0 if namespace is None else namespace.row.chunk_tokens
            items = await batch.commit(quota=quota, parent_tokens=parent_tokens)
        name = namer(None if namespace is None else namespace.row, raw=call.is_msgpack_reply)
        return call.reply({"items": [_told(index, item, name) for index, item in enumerate(items)]})

    async def _receive(
        self, call: Call, stream: _Incoming, batch: ChunkBatch, durability: Durability | None
    ) -> OpenNamespace | None:
        namespace: OpenNamespace | None = None
        count = 0
        while True:
            header, _ = await read_header(stream)
            if header.end:
                if header.items != count:
                    raise IncompleteBodyError("the stream's end counts other items than came", given=header.items)
                return namespace
            if header.i not in (None, count):
                raise InvalidRequestError("the items of a stream are numbered from 0", position=count)
            if header.codec != "raw" or header.layer is not None:
                raise InvalidRequestError("chunks are put whole and raw", position=count)
            name = header.namespace or DEFAULT_NAMESPACE
            if namespace is None:
                namespace = await call.namespace(name)
                if not namespace.may_write:
                    raise AccessDeniedError("the namespace may not be written", bucket=call.bucket.name)
            elif namespace.row.name != name:
                raise InvalidRequestError("the chunks of a batch are of one namespace", position=count)
            request = put_request(call.bucket, call.caller.user_id, namespace, header, durability)
            if header.digest is not None and len(header.digest) != DIGEST_BYTES:
                raise InvalidRequestError(f"a digest has {DIGEST_BYTES} bytes", position=count)
            await batch.add(request, stream, digest=header.digest)
            count += 1


class _Incoming:
    """The stream's bytes, not past what the request carries, and the digests that were announced of them."""

    def __init__(self, source: PayloadSource, size_bytes: int, announced: Announced, executor: Executor | None) -> None:
        self._payload = source
        self._source = BoundedSource(source, size_bytes)
        self._announced = announced
        self._digester = Digester(announced.digests) if announced.digests else None
        self._executor = executor

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `message.ByteSource`."""
        await self._source.receive_into(buffer, on_bytes)
        if self._digester is None:
            return
        if len(buffer) <= _DIGESTED_INLINE_BYTES:
            self._digester.update(buffer)
        else:
            # Shielded: whoever owns the buffer must not give it away while it is being read.
            hashing = asyncio.get_running_loop().run_in_executor(self._executor, self._digester.update, buffer)
            try:
                await asyncio.shield(hashing)
            finally:
                if not hashing.done():
                    await asyncio.wait([hashing])

    async def finish(self) -> None:
        """The end of the request's body: nothing may follow, and all that was announced must hold."""
        if self._source.left_bytes:
            raise InvalidRequestError("bytes follow the end of the stream")
        value = check_trailers(self._announced, await self._payload.finish())
        if self._digester is not None:
            check_digests(self._announced, value, self._digester)


def put_request(
    bucket: BucketRow, user_id: str, namespace: OpenNamespace, header: ItemHeader, durability: Durability | None
) -> PutRequest:
    """What one item of a batch asks to be stored. `InvalidChunkIdError`, `LayoutMismatchError`, and those of `place_of`."""
    row = namespace.row
    name, parent = _name(namespace, header.id), None
    if name is None:
        raise InvalidChunkIdError("a chunk of a batch has an id")
    if header.parent is not None:
        parent = _name(namespace, header.parent)
    key = key_of(row, name)
    place = place_of(row, key, parent=parent, tokens=header.tokens)
    check_size(place, header.size_bytes)
    return PutRequest(
        bucket=bucket,
        key=key,
        size_bytes=header.size_bytes,
        owner=user_id,
        durability=durability,
        place=place,
    )


def _name(namespace: OpenNamespace, value: object) -> str | None:
    """A chunk's or parent's name as a client says it: raw ids become hex."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InvalidChunkIdError("a chunk is named by a raw id or a string")
    if len(value) != CHUNK_ID_BYTES or not has_raw_ids(namespace.row):
        raise InvalidChunkIdError("a raw id has 32 bytes, in a namespace that has such ids")
    return value.hex()


def _told(index: int, item: BatchItem, name: Callable[[str], str | bytes]) -> dict[str, object]:
    if item.error is not None:
        status, error = error_value(item.error)
        return {"i": index, "status": status, "error": error}
    row = item.row
    assert row is not None
    return {
        "i": index,
        "id": name(row.key),
        "status": 200,
        "existed": item.existed,
        "etag": row.etag,
        "digest": row.digest,
        "durability": row.durability.value,
    }
