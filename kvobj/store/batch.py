"""Many chunks in, one commit: each is received and placed as a PUT's body is, and all become visible together or not at all.

A batch that is left without a commit leaves nothing: every extent is freed and every blob deleted. Its bytes stay in the arena
until the commit, so a batch is as large as the store lets it be (`ByteGate`), counted before its first byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

import msgspec

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketRow, CommitOutcome, Durability, NamespaceQuota, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import DigestMismatchError, ImmutableChunkError, InvalidRequestError, KvobjError
from kvobj.store.byte_gate import ByteGate
from kvobj.store.ingest import ByteSource, PutTransfer
from kvobj.store.requests import PutRequest
from kvobj.task_endings import ended, to_their_end

MAX_CHUNKS: Final = 1000
"""Of one batch: what the catalog commits in one step."""
_PLACED_AT_ONCE: Final = 8
_AT_ONCE: Final = 64
"""Chunks that are dealt with before others get a turn of the event loop: one to three milliseconds of it."""
_SKIPPED_BYTES: Final = 256 * 1024

Reached: TypeAlias = Callable[[Sequence[ObjectRow], BucketRow, Durability | None], Awaitable[list[ObjectRow]]]
"""`Store.reached`."""


Tell: TypeAlias = Callable[[Sequence["BatchItem"]], None]


class StartsTogether(Protocol):
    """What starts many writes with one look-up (`Store`)."""

    async def standing(self, requests: Sequence[PutRequest]) -> list[ObjectRow | None]:
        """See `Store.standing`."""
        ...

    async def start_beside(self, request: PutRequest, existing: ObjectRow | None) -> PutTransfer:
        """See `Store.start_beside`."""
        ...


@dataclass(frozen=True, slots=True)
class BatchItem:
    """What became of one chunk: the row that stands, or why there is none."""

    row: ObjectRow | None
    existed: bool = False
    error: KvobjError | None = None


class ChunkBatch:
    """See the module's text; an async context manager. Made by `ChunkStore.batch`. One task uses it.

    `check_shown` raises `ImmutableChunkError` for a live row that the writer may not know of; `reached` is `Store.reached`,
    `together` the store, where `reserve_together` need not ask for each chunk.
    """

    def __init__(
        self,
        *,
        size_bytes: int,
        gate: ByteGate,
        start: Callable[[PutRequest], Awaitable[PutTransfer]],
        catalog: Catalog,
        clock: Clock,
        check_shown: Callable[[ObjectRow], Awaitable[None]],
        reached: Reached,
        together: StartsTogether | None = None,
    ) -> None:
        self._together = together
        self._check_shown = check_shown
        self._reached = reached
        self._is_inside = False
        self._is_aside = False
        self._bucket: BucketRow | None = None
        self._namespace_root = b""
        self._asked: Durability | None = None
        self._size_bytes = size_bytes
        self._gate = gate
        self._start = start
        self._catalog = catalog
        self._clock = clock
        self._stack = AsyncExitStack()
        self._items: list[BatchItem | int] = []
        self._transfers: list[PutTransfer] = []
        self._placing: list[asyncio.Task[ObjectRow]] = []
        self._placed: list[ObjectRow] = []
        self._turns = asyncio.Semaphore(_PLACED_AT_ONCE)
        self._keys: set[str] = set()

    async def __aenter__(self) -> Self:
        """Wait for room. `EntityTooLargeError`, `BusyError`."""
        await self._gate.enter(self._size_bytes)
        self._is_inside = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo what was not committed."""
        await self._leave(kind, error, trace)

    async def _leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Give everything back. Idempotent."""
        if not self._is_inside:
            return
        self._is_inside = False
        try:
            # The writer may have gone as soon as it had its answer: it is then that this is cancelled.
            await ended(self._placing)
        finally:
            try:
                await self._stack.__aexit__(kind, error, trace)
            finally:
                if self._is_aside:
                    self._gate.leave_aside(self._size_bytes)
                else:
                    self._gate.leave(self._size_bytes)

    def set_aside(self) -> None:
        """Keep what the batch holds, but let others in: its writer may be stopped inside its copy, and nobody knows for how long.
        Nothing more is received or committed. Idempotent."""
        if self._is_inside and not self._is_aside:
            self._is_aside = True
            self._gate.set_aside(self._size_bytes)

    async def add(self, request: PutRequest, source: ByteSource, *, digest: bytes | None = None) -> None:
        """Receive the next chunk from the source; of one that is stored already the bytes are passed over.

        `digest`: what BLAKE3 of the bytes has to be. Errors as `Store.start_put` but for the parent's: the commit asks for it.
        """
        if digest is not None:
            request = msgspec.structs.replace(request, wants_digest=True)
        transfer = await self.reserve(request)
        if transfer is None:
            await _pass_over(source, request.size_bytes)
        else:
            await self.fill(transfer, source, digest=digest)

    async def reserve(self, request: PutRequest) -> PutTransfer | None:
        """Room for the next chunk, for who brings its bytes later: `fill` it, in the order of the reservations, before the commit.
        None where the chunk is stored already. Errors as `add`."""
        self._count(request)
        return await self._enter(request, await self._start(request))

    async def reserve_together(self, requests: Sequence[PutRequest]) -> list[PutTransfer | None]:
        """`reserve` of many chunks of one bucket and class, with one look-up."""
        together = self._together
        if together is None:
            return [await self.reserve(request) for request in requests]
        for request in requests:
            self._count(request)
        rows = await together.standing(requests)
        transfers: list[PutTransfer | None] = []
        for request, row in zip(requests, rows, strict=True):
            await take_turns(len(transfers))
            transfers.append(await self._enter(request, await together.start_beside(request, row)))
        return transfers

    def _count(self, request: PutRequest) -> None:
        if request.key in self._keys or len(self._keys) >= MAX_CHUNKS:
            raise InvalidRequestError(f"a batch has at most {MAX_CHUNKS} chunks, each once", limit=MAX_CHUNKS)
        self._keys.add(request.key)
        self._bucket, self._asked = request.bucket, request.durability
        self._namespace_root = b"" if request.place is None else request.place.namespace_root

    async def _enter(self, request: PutRequest, started: PutTransfer) -> PutTransfer | None:
        transfer = await self._stack.enter_async_context(started)
        existing = transfer.existing
        if existing is not None:
            self._items.append(await self._existing(existing, request))
            return None
        self._items.append(len(self._transfers))
        self._transfers.append(transfer)
        return transfer

    async def fill(self, transfer: PutTransfer, source: ByteSource, *, digest: bytes | None = None) -> None:
        """Receive a chunk that has room from the source. Otherwise as `add`."""
        await transfer.receive(source)
        await self._begin_placing(transfer, digest)

    async def fill_together(self, filled: Sequence[tuple[PutTransfer, ByteSource, bytes | None]]) -> None:
        """`fill` all that was reserved, in that order: what waits for nothing is placed in one step."""
        for index, (transfer, source, _) in enumerate(filled):
            await take_turns(index)
            await transfer.receive(source)
        transfers = [transfer for transfer, _, _ in filled]
        if transfers and all(digest is None for _, _, digest in filled):
            rows = transfers[0].place_together(transfers)
            if rows is not None:
                self._placed += rows
                return
        for transfer, _, digest in filled:
            await self._begin_placing(transfer, digest)

    async def _begin_placing(self, transfer: PutTransfer, digest: bytes | None) -> None:
        await self._turns.acquire()
        task = asyncio.create_task(self._place(transfer, digest))
        task.add_done_callback(lambda _: self._turns.release())
        self._placing.append(task)

    async def _existing(self, row: ObjectRow, request: PutRequest) -> BatchItem:
        """What becomes of a chunk whose key has a live row."""
        shown = await self._shown(row)
        if shown.error is None and row.size_bytes != request.size_bytes:
            error = ImmutableChunkError("a live chunk has another size", key=row.key, size_bytes=row.size_bytes)
            return BatchItem(None, error=error)
        return shown

    async def _shown(self, row: ObjectRow) -> BatchItem:
        """An earlier writer's row, if the writer of this batch may know of it."""
        try:
            await self._check_shown(row)
        except ImmutableChunkError as error:
            return BatchItem(None, error=error)
        return BatchItem(row, existed=True)

    async def _place(self, transfer: PutTransfer, digest: bytes | None) -> ObjectRow:
        row = await transfer.place(want_digest=digest is not None)
        if digest is not None and row.digest is not None and row.digest != digest:
            raise DigestMismatchError("a chunk does not have the digest that its header names", key=row.key)
        return row

    async def placed(self) -> None:
        """Return once every chunk lies where its class needs it; raises what the first of them failed with."""
        await asyncio.gather(*self._placing)

    async def commit(
        self, *, quota: NamespaceQuota | None = None, parent_tokens: int = 0, tell: Tell | None = None
    ) -> list[BatchItem]:
        """Make the chunks visible in one step; what became of each, in the order they were added, once they have the class that was
        asked for. See `Catalog.commit_chain` and `Store.reached`.

        `tell` is called with the same as soon as it is known, where nothing has to be asked or waited for: what the store has to do
        for itself comes after it. It returns at once, and what it raises fails the commit's caller and not the commit."""
        await self.placed()
        rows = self._placed + [task.result() for task in self._placing]
        outcomes: list[CommitOutcome | KvobjError] = []
        if rows:
            for transfer in self._transfers:
                transfer.hand_over()
            # Seen through for all chunks also where the writer goes meanwhile: the catalog commits what it was asked for, and what
            # it commits has to be concluded.
            committing = asyncio.create_task(self._see_through(rows, quota, parent_tokens, tell))
            await to_their_end([committing])
            outcomes = committing.result()
        items = [item if isinstance(item, BatchItem) else await self._item(outcomes[item]) for item in self._items]
        if not self._is_shared:
            return items
        await self._leave()  # the wait for the remote holds nothing of the arena
        assert self._bucket is not None
        stand = [item.row for item in items if item.row is not None]
        reached = iter(await self._reached(stand, self._bucket, self._asked))
        return [item if item.row is None else replace(item, row=next(reached)) for item in items]

    async def _see_through(
        self, rows: Sequence[ObjectRow], quota: NamespaceQuota | None, parent_tokens: int, tell: Tell | None
    ) -> list[CommitOutcome | KvobjError]:
        outcomes: list[CommitOutcome | KvobjError] = []
        try:
            outcomes = await self._commit_chain(rows, quota, parent_tokens)
            if tell is not None and not self._is_shared:
                self._tell(outcomes, tell)
        finally:
            await self._conclude(outcomes)
        return outcomes

    async def _conclude(self, outcomes: Sequence[CommitOutcome | KvobjError]) -> None:
        for index, transfer in enumerate(self._transfers):
            await take_turns(index)
            outcome = outcomes[index] if outcomes else None
            await transfer.conclude(None if isinstance(outcome, KvobjError) else outcome)

    @property
    def _is_shared(self) -> bool:
        """Whether the batch is of class `shared`."""
        bucket = self._bucket
        return bucket is not None and (self._asked or bucket.durability) is Durability.SHARED

    async def _commit_chain(
        self, rows: Sequence[ObjectRow], quota: NamespaceQuota | None, parent_tokens: int
    ) -> list[CommitOutcome | KvobjError]:
        assert self._bucket is not None
        return await self._catalog.commit_chain(
            rows,
            quota=quota,
            parent_tokens=parent_tokens,
            made_ms=self._bucket.created_ms,
            namespace_root=self._namespace_root,
            now_ms=self._clock.now_ms(),
            to_remote=self._is_shared,
        )

    def _tell(self, outcomes: Sequence[CommitOutcome | KvobjError], tell: Tell) -> None:
        """Tell, unless an earlier writer's chunk has to be looked at first."""
        items: list[BatchItem] = []
        for item in self._items:
            outcome = item if isinstance(item, BatchItem) else outcomes[item]
            if isinstance(outcome, BatchItem):
                items.append(outcome)
            elif isinstance(outcome, KvobjError):
                items.append(BatchItem(None, error=outcome))
            elif outcome.existed:
                return
            else:
                items.append(BatchItem(outcome.row))
        tell(items)

    async def _item(self, outcome: CommitOutcome | KvobjError) -> BatchItem:
        if isinstance(outcome, KvobjError):
            return BatchItem(None, error=outcome)
        return await self._shown(outcome.row) if outcome.existed else BatchItem(outcome.row)


async def take_turns(index: int) -> None:
    """Before each of many: every so often others go first."""
    if index and not index % _AT_ONCE:
        await asyncio.sleep(0)


async def _pass_over(source: ByteSource, size_bytes: int) -> None:
    scratch = memoryview(bytearray(min(size_bytes, _SKIPPED_BYTES)))
    left = size_bytes
    while left:
        step = min(left, len(scratch))
        await source.receive_into(scratch[:step], _ignore)
        left -= step


def _ignore(_: int) -> None:
    """Bytes that nobody wants have arrived."""
