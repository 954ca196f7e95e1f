"""`Stage`, `Reserve`, `Prepare`, `Commit`, `Abandon`: chunks that come by shared memory, as ?mput stores them.

From the staging room bytes are read, by a system call and never through a mapping, into the arena, and only there hashed and
judged: what the writer does to the staging room meanwhile changes what is stored or fails its digest, and never anything here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from kvobj.api.kv.chunk_stream import ItemHeader
from kvobj.api.kv.errors import error_value
from kvobj.api.kv.mput import DIGEST_BYTES, put_request
from kvobj.api.kv_store import ChunkStore
from kvobj.api.object_headers import parse_durability
from kvobj.api.objects_write import MAX_PUT_BYTES
from kvobj.api.same_host.rights import Rights
from kvobj.catalog.rows import CommitOutcome, Durability, ObjectRow
from kvobj.errors import (
    AccessDeniedError,
    BusyError,
    EntityTooLargeError,
    ImmutableChunkError,
    IncompleteBodyError,
    InvalidRequestError,
    KvobjError,
    NoSuchNamespaceError,
)
from kvobj.same_host.descriptors import staging_memory
from kvobj.same_host.messages import Commit, Committed, NewItem, Prepare, Prepared, Reserve, ReservedRoom, StoredItem
from kvobj.store.batch import BatchItem, ChunkBatch, take_turns
from kvobj.store.chunk_values import OpenNamespace
from kvobj.store.extents import FilledElsewhere, extent_bytes, place_in, room_of
from kvobj.store.ingest import PutTransfer, ReceivedBlob
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace
from kvobj.store.prepared import PreparedRooms, Told
from kvobj.store.requests import PutRequest
from kvobj.task_endings import to_their_end

STAGING_BYTES_MIN: Final = 1024 * 1024
BATCHES_MAX: Final = 8
"""Reservations that one connection may have open."""
_RESERVED_SHARE: Final = 4
_RESERVED_BYTES_MIN: Final = 96 * 1024 * 1024
_INLINE_BYTES: Final = 256 * 1024
"""Up to here copying where one is is cheaper than a hop to a pool."""
_STEP_BYTES: Final = 4 * 1024 * 1024


def reserved_bytes_max(batches_bytes_max: int) -> int:
    """What one connection may have reserved, where all batches may be so much: a quarter, since a client stores by three
    connections at most and others are to find room if all of it stalls. In a small arena half, if need be for a chunk of 80 MiB."""
    return max(batches_bytes_max // _RESERVED_SHARE, min(batches_bytes_max // 2, _RESERVED_BYTES_MIN))


class StagingBudget:
    """Bytes of staging rooms that connections may have together, and each of them."""

    __slots__ = ("connection_bytes_max", "total_bytes", "total_bytes_max")

    def __init__(self, *, connection_bytes_max: int, total_bytes_max: int) -> None:
        self.connection_bytes_max = connection_bytes_max
        self.total_bytes_max = total_bytes_max
        self.total_bytes = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    size_bytes: int
    batch: ChunkBatch
    namespace: OpenNamespace
    items: Sequence[tuple[PutTransfer | None, bytes | None]]
    stack: AsyncExitStack


class ExtentWrites:
    """What one connection writes; `reserved_bytes_max`: of its reservations together. `aclose` gives back all that is not
    committed."""

    def __init__(
        self,
        chunks: ChunkStore,
        executor: Executor | None,
        budget: StagingBudget,
        prepared: PreparedRooms,
        *,
        reserved_bytes_max: int,
    ) -> None:
        self._chunks = chunks
        self._prepared = prepared
        self._reserved_bytes_max = reserved_bytes_max
        self._rooms: dict[int, ReceivedBlob] = {}
        self._next_room = 1
        self._executor = executor
        self._budget = budget
        self._staging = -1
        self._staging_bytes = 0
        self._batches: dict[int, _Batch] = {}
        self._next_batch = 1

    # -- the staging room ----------------------------------------------------------------------------------------
    def stage(self, size_bytes: int, rights: Rights) -> tuple[int, int]:
        """A staging room of at least so many bytes: its descriptor, which stays this object's, and its size.

        `EntityTooLargeError`, `BusyError` where all connections together have as much as they may.
        """
        _check_may_write(rights)
        size_bytes = max(STAGING_BYTES_MIN, 1 << max(0, size_bytes - 1).bit_length())
        budget = self._budget
        if size_bytes > budget.connection_bytes_max:
            limit_bytes = budget.connection_bytes_max
            raise EntityTooLargeError("a staging room is not so large", size_bytes=size_bytes, limit_bytes=limit_bytes)
        if budget.total_bytes - self._staging_bytes + size_bytes > budget.total_bytes_max:
            raise BusyError("there is no room for more staging", limit_bytes=budget.total_bytes_max)
        self._end_staging()
        self._staging = staging_memory(size_bytes)
        self._staging_bytes = size_bytes
        budget.total_bytes += size_bytes
        return self._staging, size_bytes

    def _end_staging(self) -> None:
        if self._staging >= 0:
            os.close(self._staging)
            self._budget.total_bytes -= self._staging_bytes
            self._staging, self._staging_bytes = -1, 0

    # -- room in the arena ---------------------------------------------------------------------------------------
    async def reserve(self, request: Reserve, rights: Rights) -> tuple[int, list[ReservedRoom | None]]:
        """Room for a batch, which the writer fills; None for a chunk that is stored already. `AccessDeniedError` for writers that
        are not trusted; otherwise as ?mput."""
        _check_may_write(rights)
        if not rights.is_trusted:
            raise AccessDeniedError("only trusted writers write into the arena", user_id=rights.user_id)
        if len(self._batches) >= BATCHES_MAX:
            raise BusyError("too many reservations are open", limit=BATCHES_MAX)
        namespace = await self._namespace(request.namespace, rights)
        # What is no batch does not wait for room, nor is it kept meanwhile.
        puts = _put_requests(request, namespace, rights)
        size_bytes = _size_of(puts)
        self._check_share(size_bytes)
        async with AsyncExitStack() as stack:
            batch = await self._begin(stack, puts, rights)
            transfers = await batch.reserve_together(puts)
            rooms = [None if transfer is None else _room(transfer) for transfer in transfers]
            items = list(zip(transfers, [item.digest for item in request.items], strict=True))
            number = self._next_batch
            self._next_batch += 1
            self._batches[number] = _Batch(size_bytes, batch, namespace, items, stack.pop_all())
        return number, rooms

    def _check_share(self, size_bytes: int) -> None:
        limit_bytes = self._reserved_bytes_max
        if size_bytes > limit_bytes:
            raise EntityTooLargeError("a reservation is not so large", size_bytes=size_bytes, limit_bytes=limit_bytes)
        if sum(held.size_bytes for held in self._batches.values()) + size_bytes > limit_bytes:
            raise BusyError("too much is reserved by this connection", size_bytes=size_bytes, limit_bytes=limit_bytes)

    async def expect(self, number: int) -> None:
        """The writer has been told of its room, and fills it: do what need not wait for the commit."""
        held = self._batches.get(number)
        for index, (transfer, _) in enumerate(() if held is None else held.items):
            await take_turns(index)
            if transfer is not None:
                transfer.hash_after()
                transfer.expect()

    def prepare(self, request: Prepare, rights: Rights) -> Prepared:
        """Rooms for chunks that are not named yet, in place of those that are left; none for writers that are not trusted."""
        self.end_prepared()
        first = self._next_room
        if not (rights.may_write and rights.is_trusted):
            return Prepared(first, [])
        rooms = self._prepared.prepare(rights.bucket, _durability(request), request.size_bytes, request.count)
        self._rooms = dict(enumerate(rooms, start=first))
        self._next_room += len(rooms)
        places = [place_in(room.pin.extent, request.size_bytes) for room in rooms]
        return Prepared(first, [ReservedRoom(place.region, place.offset, place.size_bytes) for place in places])

    def end_prepared(self) -> None:
        """Give back what is left of the rooms that were prepared."""
        rooms, self._rooms = self._rooms, {}
        self._prepared.give_back(list(rooms.values()))

    async def abandon(self, number: int) -> None:
        """Give a reservation back. A number that is none is ignored."""
        held = self._batches.pop(number, None)
        if held is not None:
            await held.stack.aclose()

    # -- commits -------------------------------------------------------------------------------------------------
    async def commit(self, request: Commit, rights: Rights, tell: Callable[[Committed], None]) -> None:
        """Make a batch visible in one step, and `tell` once. What is wrong with it fails it whole, what the state of the store
        refuses is told of each chunk, as by ?mput."""
        _check_may_write(rights)
        if request.batch:
            await self._commit_reserved(request.batch, tell)
            return
        if request.rooms:
            await self._commit_prepared(request, rights, tell)
            return
        namespace = await self._namespace(request.namespace, rights)
        puts = _put_requests(request, namespace, rights)
        for item in request.items:
            if item.at + item.size_bytes > self._staging_bytes:
                raise IncompleteBodyError("a chunk is not within the staging room", size_bytes=item.size_bytes)
        async with AsyncExitStack() as stack:
            batch = await self._begin(stack, puts, rights)
            filled: list[tuple[PutTransfer, _Staged, bytes | None]] = []
            for item, put in zip(request.items, puts, strict=True):
                transfer = await batch.reserve(put)
                if transfer is not None:
                    transfer.hash_after()
                    filled.append((transfer, _Staged(self._staging, item.at, self._executor), item.digest))
            await batch.fill_together(filled)
            await _commit(batch, namespace, tell)

    async def _commit_reserved(self, number: int, tell: Callable[[Committed], None]) -> None:
        held = self._batches.pop(number, None)
        if held is None:
            raise InvalidRequestError("no such reservation", given=number)
        async with held.stack:
            await held.batch.fill_together(
                [(transfer, FilledElsewhere(), digest) for transfer, digest in held.items if transfer is not None]
            )
            await _commit(held.batch, held.namespace, tell)

    async def _commit_prepared(self, request: Commit, rights: Rights, tell: Callable[[Committed], None]) -> None:
        rooms = self._take_rooms(request)
        is_used = is_told = False
        try:
            namespace = await self._namespace(request.namespace, rights)
            requests = _put_requests(request, namespace, rights)
            if len({put.key for put in requests}) < len(requests):
                raise InvalidRequestError("a batch has each of its chunks once")
            may_hold = self._prepared.may_hold(rights.bucket, _durability(request))
            if not may_hold or not self._prepared.are_of(rooms, rights.bucket):
                # Another class than they were prepared for, or the bucket is another by now.
                raise InvalidRequestError("no rooms for chunks of such a class", bucket=rights.bucket.name)

            def tell_now(outcomes: Told) -> None:
                nonlocal is_told
                rows = [each.row for each in outcomes if isinstance(each, CommitOutcome) and not each.existed]
                if len(rows) == len(outcomes):  # nothing has to be looked at first
                    is_told = True
                    tell(Committed([_stored(row) for row in rows]))

            is_used = True
            outcomes = await self._prepared.commit(
                requests,
                rooms,
                quota=ChunkPlace(namespace.row).quota,
                parent_tokens=namespace.row.chunk_tokens,
                tell=tell_now,
            )
        finally:
            if not is_used:
                self._prepared.give_back(rooms)
        if not is_told:
            tell(Committed([_told(await self._item(each, rights)) for each in outcomes]))

    def _take_rooms(self, request: Commit) -> list[ReceivedBlob]:
        """The rooms of a commit, which are the caller's to give back. `InvalidRequestError`, and none is taken."""
        rooms, items = self._rooms, request.items
        if len(request.rooms) != len(items) or len(set(request.rooms)) < len(items):
            raise InvalidRequestError("each chunk lies in a room of its own")
        for number, item in zip(request.rooms, items, strict=True):
            room = rooms.get(number)
            if room is None or room.plain_bytes != item.size_bytes or item.digest is not None:
                raise InvalidRequestError("no room that was prepared for such a chunk", given=number)
        return [rooms.pop(number) for number in request.rooms]

    async def _item(self, outcome: CommitOutcome | KvobjError, rights: Rights) -> BatchItem:
        if isinstance(outcome, KvobjError):
            return BatchItem(None, error=outcome)
        if outcome.existed:
            try:
                await self._check_shown(outcome.row, rights)
            except ImmutableChunkError as error:
                return BatchItem(None, error=error)
        return BatchItem(outcome.row, existed=outcome.existed)

    async def _check_shown(self, row: ObjectRow, rights: Rights) -> None:
        if rights.is_owner:
            return
        try:
            await self._chunks.namespace(rights.bucket, row.namespace or DEFAULT_NAMESPACE, caller=rights.caller)
        except NoSuchNamespaceError:
            raise ImmutableChunkError(
                "a live chunk of another namespace has the key", bucket=row.bucket, key=row.key
            ) from None

    async def _begin(self, stack: AsyncExitStack, puts: Sequence[PutRequest], rights: Rights) -> ChunkBatch:
        async def check_shown(row: ObjectRow) -> None:
            await self._check_shown(row, rights)

        return await stack.enter_async_context(self._chunks.batch(_size_of(puts), check_shown=check_shown))

    async def _namespace(self, name: str, rights: Rights) -> OpenNamespace:
        namespace = await self._chunks.namespace(rights.bucket, name or DEFAULT_NAMESPACE, caller=rights.caller)
        if not namespace.may_write:
            raise AccessDeniedError("the namespace may not be written", bucket=rights.bucket.name)
        return namespace

    @property
    def has_reserved(self) -> bool:
        """Whether the writer may be writing into the arena at this moment."""
        return bool(self._batches or self._rooms)

    def set_aside(self) -> None:
        """The writer stalls, and may wake inside its copy: its room stays its own, but keeps no batch of others from its turn."""
        for held in self._batches.values():
            held.batch.set_aside()

    async def aclose(self) -> None:
        """The connection is gone. Idempotent."""
        async with AsyncExitStack() as ending:  # each batch whatever becomes of the others
            for number in list(self._batches):
                ending.push_async_callback(self.abandon, number)
            self._end_staging()
            self.end_prepared()


class _Staged:
    """A `ByteSource` over a part of a staging room. The descriptor outlives it: a connection serves one request at a time."""

    __slots__ = ("_at", "_descriptor", "_executor")

    def __init__(self, descriptor: int, at: int, executor: Executor | None) -> None:
        self._descriptor = descriptor
        self._at = at
        self._executor = executor

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`."""
        filled, size_bytes = 0, len(buffer)
        while filled < size_bytes:
            step = buffer[filled : filled + _STEP_BYTES]
            if size_bytes <= _INLINE_BYTES:
                count = os.preadv(self._descriptor, [step], self._at)
            else:
                loop = asyncio.get_running_loop()
                reading = loop.run_in_executor(self._executor, os.preadv, self._descriptor, [step], self._at)
                try:
                    count = await asyncio.shield(reading)
                finally:
                    # Whoever is cancelled here, or twice, gives the buffer away next.
                    if not reading.done():
                        await to_their_end([reading])
            if count <= 0:
                raise IncompleteBodyError("the staging room ends before the chunk does")
            filled += count
            self._at += count
            on_bytes(filled)


def _check_may_write(rights: Rights) -> None:
    if not rights.may_write:
        raise AccessDeniedError("the bucket may not be written", bucket=rights.bucket.name, user_id=rights.user_id)


def _size_of(items: Sequence[PutRequest]) -> int:
    """What chunks take of the arena."""
    return sum([extent_bytes(item.size_bytes) for item in items])


def _put_requests(request: Reserve | Commit, namespace: OpenNamespace, rights: Rights) -> list[PutRequest]:
    asked = _durability(request)
    return [_put_request(item, namespace, asked, rights) for item in request.items]


def _durability(request: Reserve | Commit | Prepare) -> Durability | None:
    durability = request.durability
    return None if durability is None else parse_durability({"x-kvobj-durability": durability})


def _put_request(item: NewItem, namespace: OpenNamespace, asked: Durability | None, rights: Rights) -> PutRequest:
    if item.size_bytes > MAX_PUT_BYTES:
        raise EntityTooLargeError("the chunk is too large", size_bytes=item.size_bytes, limit_bytes=MAX_PUT_BYTES)
    if item.digest is not None and len(item.digest) != DIGEST_BYTES:
        raise InvalidRequestError(f"a digest has {DIGEST_BYTES} bytes")
    header = ItemHeader(
        id=item.id, parent=item.parent, tokens=item.tokens, digest=item.digest, size_bytes=item.size_bytes
    )
    return put_request(rights.bucket, rights.user_id, namespace, header, asked)


def _room(transfer: PutTransfer) -> ReservedRoom:
    place = room_of(transfer)
    if place is None:
        raise EntityTooLargeError("larger than one blob", size_bytes=transfer.request.size_bytes)
    return ReservedRoom(place.region, place.offset, place.size_bytes)


async def _commit(batch: ChunkBatch, namespace: OpenNamespace, tell: Callable[[Committed], None]) -> None:
    is_told = False

    def tell_now(items: Sequence[BatchItem]) -> None:
        nonlocal is_told
        is_told = True
        tell(Committed([_told(item) for item in items]))

    quota = ChunkPlace(namespace.row).quota
    items = await batch.commit(quota=quota, parent_tokens=namespace.row.chunk_tokens, tell=tell_now)
    if not is_told:
        tell_now(items)


def _told(item: BatchItem) -> StoredItem:
    if item.error is not None:
        status, error = error_value(item.error)
        detail = error["detail"]
        assert isinstance(detail, dict)
        return StoredItem(status, code=str(error["code"]), message=str(error["message"]), detail=detail)
    row = item.row
    assert row is not None
    return _stored(row, existed=item.existed)


def _stored(row: ObjectRow, *, existed: bool = False) -> StoredItem:
    return StoredItem(200, existed, row.durability.value, row.etag, row.digest)
