"""Writes of class `shared` to KV buckets with an upstream, for the API: what was committed here is put there before the writer is
answered, and the upstream's answer is the writer's. Where the upstream does not take a chunk it stands here all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from kvobj.api.message import ByteSource
from kvobj.api.object_store import ObjectStore, Transfer
from kvobj.catalog.rows import BucketRow, Checksum, Durability, NamespaceQuota, ObjectRow
from kvobj.codec.checksums import Digester
from kvobj.errors import KvobjError, TierUnavailableError
from kvobj.store.batch import BatchItem, ChunkBatch, Tell
from kvobj.store.ingest import PutTransfer
from kvobj.store.places import ChunkPlace
from kvobj.store.requests import PutRequest, PutResult
from kvobj.store.upstream.batch_forwarding import BatchForwarder
from kvobj.store.upstream.client import UpstreamClient
from kvobj.store.upstream.forwarding import Forwarded, Forwarder

_COPIED_BYTES: Final = 4 * 2**20
"""At a time."""


class UpstreamWrites:
    """Of one bucket. Event loop only. `has_remote`: whether class shared can be had here, too."""

    def __init__(
        self,
        client: UpstreamClient,
        forwarder: Forwarder,
        batches: BatchForwarder,
        *,
        store: ObjectStore,
        has_remote: bool,
    ) -> None:
        self._client = client
        self._forwarder = forwarder
        self._batches = batches
        self._store = store
        self._has_remote = has_remote
        self._on_their_way: dict[str, asyncio.Future[None]] = {}

    def is_meant(self, bucket: BucketRow, asked: Durability | None) -> bool:
        """Whether a write that asks for this class is to be forwarded: it is `shared`, and did not come from there."""
        return (asked or bucket.durability) is Durability.SHARED and not self._client.via.is_at_end

    def here(self, request: PutRequest) -> PutRequest:
        """The request as this store can do it."""
        asked = request.durability or request.bucket.durability
        if asked is not Durability.SHARED or self._has_remote:
            return request
        return msgspec.structs.replace(request, durability=Durability.LOCAL)

    def check(self, size_bytes: int) -> None:
        """See `Forwarder.check`."""
        self._forwarder.check(size_bytes)

    async def forward(self, row: ObjectRow, place: ChunkPlace) -> tuple[ObjectRow, bool]:
        """Put a live chunk there: the row as the upstream has it, and whether it had it before. Errors of `Forwarder.put`."""
        row = await self._store.settled(row)
        async with self._after_parents([row]), self._forwarder.room(row.size_bytes):
            data = bytearray()
            await self._append_bytes(row, data)
            answered = await self._forwarder.put(row, place, memoryview(data))
        return _as_there(row, answered), answered.existed

    async def forwarded(self, result: PutResult, place: ChunkPlace) -> PutResult:
        """A write's result after its chunk was put there. A chunk of another namespace, which stood here, is not the writer's:
        whether he may know of it is for who asked."""
        row = result.row
        assert isinstance(row, ObjectRow)
        if row.namespace != place.namespace.name:
            return result
        row, existed = await self.forward(row, place)
        return PutResult(row=row, existed=existed, durability=row.durability)

    async def forward_all(self, items: Sequence[BatchItem], places: Mapping[str, ChunkPlace]) -> list[BatchItem]:
        """Put the chunks of a batch that stand here there, in order; what became of each. `places` by key."""
        chunks: list[tuple[ObjectRow, ChunkPlace]] = []
        positions: list[int] = []
        for position, item in enumerate(items):
            place = None if item.row is None else places.get(item.row.key)
            if item.row is not None and place is not None and item.row.namespace == place.namespace.name:
                chunks.append((await self._store.settled(item.row), place))
                positions.append(position)
        told = list(items)
        async with self._after_parents([row for row, _ in chunks]):
            answers = await self._batches.put_all(chunks, self._append_bytes)
        for position, (row, _), answered in zip(positions, chunks, answers, strict=True):
            if isinstance(answered, KvobjError):
                told[position] = BatchItem(None, error=answered)
            else:
                told[position] = BatchItem(_as_there(row, answered), existed=answered.existed)
        return told

    @asynccontextmanager
    async def _after_parents(self, rows: Sequence[ObjectRow]) -> AsyncIterator[None]:
        """The time in which these chunks are put there; it begins when parents that are on their way have arrived, or have not: a
        chunk that is live here may be written under at once, also by others."""
        parents = {row.parent for row in rows if row.parent}
        before = [self._on_their_way[parent] for parent in parents if parent in self._on_their_way]
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for row in rows:
            self._on_their_way[row.key] = ended
        try:
            if before:
                await asyncio.wait(before, timeout=self._client.settings.timeout_seconds)
            yield
        finally:
            ended.set_result(None)
            for row in rows:
                if self._on_their_way.get(row.key) is ended:
                    del self._on_their_way[row.key]

    async def _append_bytes(self, row: ObjectRow, data: bytearray) -> None:
        """Put a chunk's bytes at the end of `data`. `TierUnavailableError`."""
        if not row.size_bytes:
            return
        reader = await self._store.open(row, 0, row.size_bytes)
        if reader is None:
            raise TierUnavailableError("the chunk's bytes are gone before they were forwarded", key=row.key)
        try:
            async for view in reader.views():
                for start in range(0, len(view), _COPIED_BYTES):
                    data += view[start : start + _COPIED_BYTES]
                    await asyncio.sleep(0)  # others' turn: a copy is on the event loop
        except KvobjError as error:
            raise TierUnavailableError("the chunk cannot be read to be forwarded", key=row.key) from error
        finally:
            await reader.aclose()


class ForwardedTransfer:
    """Implements `object_store.Transfer`, of a whole chunk."""

    def __init__(self, inner: Transfer, request: PutRequest, place: ChunkPlace, writes: UpstreamWrites) -> None:
        self._inner = inner
        self._request = request
        self._place = place
        self._writes = writes
        self._existing: ObjectRow | None = None

    @property
    def existing(self) -> ObjectRow | None:
        """See `Transfer.existing`."""
        return self._existing

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        self._existing = existing = self._inner.existing
        # One that the writer may not know of, or another, is refused by who asked, before anything is told.
        if (
            existing is not None
            and existing.namespace == self._place.namespace.name
            and existing.size_bytes == self._request.size_bytes
        ):
            try:
                self._existing, _ = await self._writes.forward(existing, self._place)
            except BaseException as error:
                await self._inner.__aexit__(type(error), error, error.__traceback__)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)

    async def receive(self, source: ByteSource) -> None:
        """See `Transfer.receive`."""
        await self._inner.receive(source)

    async def digests(self) -> Digester:
        """See `Transfer.digests`."""
        return await self._inner.digests()

    async def commit(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> PutResult:
        """See `Transfer.commit`."""
        result = await self._inner.commit(checksums=checksums, want_digest=want_digest)
        return await self._writes.forwarded(result, self._place)


class ForwardedBatch:
    """In front of a `ChunkBatch`, whose calls it has: `__getattr__` gives those not written down here. One task uses it."""

    def __init__(self, inner: ChunkBatch, upstreams: Mapping[str, UpstreamWrites]) -> None:
        """`upstreams` by bucket."""
        self._inner = inner
        self._upstreams = upstreams
        self._writes: UpstreamWrites | None = None
        self._places: dict[str, ChunkPlace] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a batch has
        return getattr(self._inner, name)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)

    async def add(self, request: PutRequest, source: ByteSource, *, digest: bytes | None = None) -> None:
        """See `ChunkBatch.add`. Refused as a single write is where the upstream is known not to answer."""
        await self._inner.add(self._noted(request), source, digest=digest)

    async def reserve(self, request: PutRequest) -> PutTransfer | None:
        """See `ChunkBatch.reserve`; as `add`."""
        return await self._inner.reserve(self._noted(request))

    async def reserve_together(self, requests: Sequence[PutRequest]) -> list[PutTransfer | None]:
        """See `ChunkBatch.reserve_together`; as `add`."""
        return await self._inner.reserve_together([self._noted(request) for request in requests])

    async def commit(
        self, *, quota: NamespaceQuota | None = None, parent_tokens: int = 0, tell: Tell | None = None
    ) -> list[BatchItem]:
        """See `ChunkBatch.commit`. What the upstream did not take is told of each chunk, and stands here."""
        if self._writes is None:
            return await self._inner.commit(quota=quota, parent_tokens=parent_tokens, tell=tell)
        items = await self._inner.commit(quota=quota, parent_tokens=parent_tokens)
        await self._inner.__aexit__(None, None, None)  # the wait for the upstream holds nothing of the arena
        return await self._writes.forward_all(items, self._places)

    def _noted(self, request: PutRequest) -> PutRequest:
        writes = self._upstreams.get(request.bucket.name)
        if writes is None or request.place is None:
            return request
        if writes.is_meant(request.bucket, request.durability):
            writes.check(request.size_bytes)
            self._writes = writes
            self._places[request.key] = request.place
        return writes.here(request)


def _as_there(row: ObjectRow, answered: Forwarded) -> ObjectRow:
    """The row as the upstream has it. An earlier writer's bytes there may be others than those here."""
    digest = answered.digest if answered.digest is not None or answered.existed else row.digest
    return msgspec.structs.replace(row, durability=answered.durability, digest=digest)
