"""A chunk from an upstream whose bytes are all here, into the store: as its writer would put it, checked against its digest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from kvobj.catalog.rows import BucketRow, Durability, ObjectRow
from kvobj.errors import EntityTooLargeError
from kvobj.store.batch import ChunkBatch
from kvobj.store.places import ChunkPlace
from kvobj.store.requests import PutRequest
from kvobj.store.upstream.body_memory import check_digest
from kvobj.store.upstream.client import ChunkHead

_COPIED_BYTES: Final = 4 * 2**20
"""At a time."""


class MakeBatch(Protocol):
    """`ChunkStore.batch`."""

    def __call__(self, size_bytes: int, *, check_shown: Callable[[ObjectRow], Awaitable[None]]) -> ChunkBatch:
        """Room for chunks of so many bytes."""
        ...


class Transfer(Protocol):
    """As much of `ingest.PutTransfer` as is used here."""

    @property
    def existing(self) -> ObjectRow | None:
        """The live row that answers for the write."""
        ...

    async def receive(self, source: _Bytes) -> None:
        """Receive the whole body."""
        ...

    async def commit(self, *, want_digest: bool = False) -> object:
        """Make the chunk visible."""
        ...


StartPut = Callable[[PutRequest], Awaitable[AbstractAsyncContextManager[Transfer]]]
"""`Store.start_put`."""


class ChunkWriter:
    """Of one bucket. Event loop only."""

    def __init__(self, batch: MakeBatch, start_put: StartPut) -> None:
        self._batch = batch
        self._start_put = start_put

    async def write(self, bucket: BucketRow, key: str, head: ChunkHead, place: ChunkPlace, data: memoryview) -> None:
        """Commit the chunk; nothing where somebody has done so meanwhile. `DigestMismatchError`, and errors of the store."""
        request = PutRequest(
            bucket=bucket,
            key=key,
            size_bytes=len(data),
            owner=bucket.owner,
            durability=Durability.LOCAL if bucket.durability is Durability.SHARED else None,
            headers=head.headers,
            metadata=head.metadata,
            place=place,
        )
        assert head.digest is not None
        try:
            async with self._batch(len(data), check_shown=_is_shown) as batch:
                await batch.add(request, _Bytes(data), digest=head.digest)
                (item,) = await batch.commit(quota=place.quota, parent_tokens=place.parent_tokens)
        except EntityTooLargeError:
            await self._write_large(request, data, head.digest)
        else:
            if item.error is not None:
                raise item.error

    async def _write_large(self, request: PutRequest, data: memoryview, digest: bytes) -> None:
        """What no batch has room for is stored as one that was put alone."""
        await check_digest(data, digest, key=request.key)
        async with await self._start_put(request) as transfer:
            if transfer.existing is None:
                await transfer.receive(_Bytes(data))
                await transfer.commit(want_digest=True)


class _Bytes:
    """Implements `batch.ByteSource` over memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._taken = 0

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource`."""
        for start in range(0, len(buffer), _COPIED_BYTES):
            stop = min(start + _COPIED_BYTES, len(buffer))
            buffer[start:stop] = self._data[self._taken + start : self._taken + stop]
            on_bytes(stop)
            if stop < len(buffer):
                await asyncio.sleep(0)  # others' turn: a copy is on the event loop
        self._taken += len(buffer)


async def _is_shown(_: ObjectRow) -> None:
    """A live row may be known of: nobody is told here."""
