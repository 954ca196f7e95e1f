"""A body on its way in through a worker: received into rooms that the store process reserved, hashed and checksummed here.

The worker's side of `held_transfers`. A small chunk of class `memory` is hashed after its acknowledgement, many in one job, as the
store does it by itself. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import Final, Self

from kvobj.api.message import ByteSource
from kvobj.arena import Pin
from kvobj.catalog.rows import Checksum, CommitOutcome, ObjectRow
from kvobj.codec.checksums import Digester
from kvobj.codec.frame import raw_payload_offset
from kvobj.errors import IncompleteBodyError, KvobjError
from kvobj.store.hashing import INLINE_BYTES, BlobHash, HashPipeline
from kvobj.store.requests import PutResult
from kvobj.workers.calls import Hashed, OpenTransfer, Room, StoreCalls
from kvobj.workers.channel import Channel
from kvobj.workers.mapped_arena import MappedArena

_TOLD_BYTES: Final = 1024 * 1024
"""How far a body has come is told in steps of so much, where the store process writes it down meanwhile."""
_TOLD_SECONDS: Final = 0.005
"""Else it is told so often, and hashes of what was acknowledged wait for so long for other messages to leave with: each message by
itself wakes the store process."""
_BATCH_BYTES: Final = 16 * 1024 * 1024


class LaterHashes:
    """Hashes bodies that were acknowledged already, in the order of their acknowledgement."""

    def __init__(self, channel: Channel, executor: Executor) -> None:
        self._channel = channel
        self._executor = executor
        self._waiting: deque[tuple[int, BlobHash, Pin, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._others: set[asyncio.Task[None]] = set()
        self._untold: list[Hashed] = []
        channel.on_flush.append(self._tell_all)

    def keep(self, task: asyncio.Task[None]) -> None:
        """What else tells of a hash, and may go on when its transfer is over."""
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def add(self, handle: int, blob: BlobHash, pin: Pin, *, is_awaited: bool = False) -> None:
        """Hash the first and only blob of a transfer whose bytes are all there; takes the pin over. `is_awaited`: the
        acknowledgement waits for it."""
        if not blob.finished and len(blob.payload) <= INLINE_BYTES:
            blob.advance(len(blob.payload), None)
        if blob.finished:
            self._tell(handle, blob, pin, is_awaited=is_awaited)
            return
        self._waiting.append((handle, blob, pin, is_awaited))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="hash-later")

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, size_bytes = [], 0
                while self._waiting and size_bytes < _BATCH_BYTES:
                    batch.append(self._waiting.popleft())
                    size_bytes += len(batch[-1][1].payload)
                await asyncio.get_running_loop().run_in_executor(
                    self._executor, _hash_all, [blob for _, blob, _, _ in batch]
                )
                for handle, blob, pin, is_awaited in batch:
                    self._tell(handle, blob, pin, is_awaited=is_awaited)
        finally:
            self._task = None

    def _tell(self, handle: int, blob: BlobHash, pin: Pin, *, is_awaited: bool) -> None:
        assert blob.digest is not None
        if not self._untold and not is_awaited:
            asyncio.get_running_loop().call_later(_TOLD_SECONDS, self._tell_all)
        self._untold.append(Hashed(handle, 0, blob.digest, blob.block_crcs))
        pin.release()
        if is_awaited:
            self._tell_all()

    def _tell_all(self) -> None:
        if self._untold:
            untold, self._untold = self._untold, []
            self._channel.tell("hashed", untold)

    async def drain(self) -> None:
        """Return when nothing waits."""
        while self._task is not None or self._others:
            await asyncio.wait([*self._others, *([] if self._task is None else [self._task])])
        self._tell_all()


def _hash_all(blobs: list[BlobHash]) -> None:
    for blob in blobs:
        blob.advance(len(blob.payload), None)


class WorkerTransfer:
    """Implements `api.object_store.Transfer`, and what `store.batch` needs of one. Made by `WorkerStore`. One task uses it."""

    def __init__(
        self,
        opened: OpenTransfer,
        *,
        channel: Channel,
        calls: StoreCalls,
        arena: MappedArena,
        executor: Executor,
        later: LaterHashes,
        on_end: Callable[[int], None],
    ) -> None:
        self.existing = opened.existing
        self.handle = opened.handle
        self._opened = opened
        self._channel = channel
        self._calls = calls
        self._arena = arena
        self._later = later
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        body = Digester(frozenset(opened.algorithms)) if opened.algorithms else None
        self._pipeline = HashPipeline(executor, body=body)
        self._pins: list[Pin] = []
        self._hashes: list[BlobHash] = []
        self._rooms: dict[int, Room] = {}
        self._more: asyncio.Future[None] | None = None
        self._told_later: asyncio.TimerHandle | None = None
        self._error: KvobjError | None = None
        self._telling: list[asyncio.Task[None]] = []
        self._is_received = False
        self._is_over = opened.existing is not None

    async def __aenter__(self) -> Self:
        """Nothing: the room is reserved already."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the transfer unless it was committed."""
        self._tell_no_more()
        if self.handle:
            self._on_end(self.handle)
            if not self._is_over:
                self._is_over = True
                self._channel.tell("leave", self.handle)
                for task in self._telling:
                    task.cancel()
        for pin in self._pins:
            pin.release()
        self._pins.clear()

    # -- what the store process tells ----------------------------------------------------------------------------
    def room(self, blob: int, room: Room) -> None:
        """Where the blob of this number goes."""
        self._rooms[blob] = room
        self._wake()

    def failed(self, error: KvobjError) -> None:
        """The transfer cannot go on."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    # -- the body ------------------------------------------------------------------------------------------------
    async def receive(self, source: ByteSource) -> None:
        """See `Transfer.receive`."""
        for number, plain_bytes in enumerate(self._opened.sizes):
            room = self._opened.room if number == 0 else await self._room_of(number)
            assert room is not None
            pin = self._arena.pin(room, nothing)
            self._pins.append(pin)
            offset = raw_payload_offset(plain_bytes)
            payload = pin.view[offset : offset + plain_bytes]
            blob = self._pipeline.begin(payload)
            self._hashes.append(blob)
            if not plain_bytes:
                continue
            await source.receive_into(payload, self._feeder(number, blob))
            self._tell_no_more()
            self._channel.tell("filled", self.handle, number, plain_bytes)
            if not self._opened.hash_later:
                if blob.finished:
                    self._tell_hash(number, blob)
                else:
                    telling = asyncio.create_task(self._tell_hash_later(number, blob), name="tell-hash")
                    self._telling.append(telling)
                    self._later.keep(telling)
        self._is_received = True

    async def _room_of(self, number: int) -> Room:
        while number not in self._rooms:
            if self._error is not None:
                raise self._error
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        return self._rooms[number]

    def _feeder(self, number: int, blob: BlobHash) -> Callable[[int], None]:
        told = 0
        pipeline = None if self._opened.hash_later else self._pipeline
        is_written_down, size_bytes = self._opened.is_written_down, len(blob.payload)

        def feed(available_bytes: int) -> None:
            nonlocal told
            if pipeline is not None:
                pipeline.feed(blob, available_bytes)
            if not is_written_down:
                blob.available_bytes = available_bytes
                if self._told_later is None:
                    self._told_later = self._loop.call_later(_TOLD_SECONDS, self._tell_filled, number, blob)
            elif available_bytes - told >= _TOLD_BYTES and available_bytes < size_bytes:
                told = available_bytes
                self._channel.tell("filled", self.handle, number, available_bytes)

        return feed

    def _tell_filled(self, number: int, blob: BlobHash) -> None:
        self._told_later = None
        self._channel.tell("filled", self.handle, number, blob.available_bytes)

    def _tell_no_more(self) -> None:
        if self._told_later is not None:
            self._told_later.cancel()
            self._told_later = None

    async def _tell_hash_later(self, number: int, blob: BlobHash) -> None:
        await blob.wait()
        self._tell_hash(number, blob)

    def _tell_hash(self, number: int, blob: BlobHash) -> None:
        assert blob.digest is not None
        self._channel.tell("hashed", [Hashed(self.handle, number, blob.digest, blob.block_crcs)])

    async def digests(self) -> Digester:
        """See `Transfer.digests`."""
        if not self._is_received:
            raise IncompleteBodyError("the body has not been received")
        body = await self._body_digests()
        assert body is not None
        return body

    async def _body_digests(self) -> Digester | None:
        body = self._pipeline.body
        if body is not None:
            for blob in self._hashes:
                await blob.wait()
        return body

    # -- the end -------------------------------------------------------------------------------------------------
    async def commit(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> PutResult:
        """See `Transfer.commit`."""
        digests = await self.given_digests()
        self._is_over = True  # whatever comes of it, the handle is gone
        committing = self._calls.commit(self.handle, digests, checksums, want_digest)
        self.hash_beside(is_awaited=want_digest)
        written = await committing
        return written.result()

    async def place(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> ObjectRow:  # noqa: ARG002 - chunks in batches have none
        """See `PutTransfer.place`."""
        placing = self._calls.place(self.handle, await self.given_digests(), want_digest)
        self.hash_beside(is_awaited=want_digest)
        return await placing

    def hand_over(self) -> None:
        """The commit of the whole batch does it (`StoreCalls.commit_chain`)."""

    async def conclude(self, outcome: CommitOutcome | None) -> None:  # noqa: ARG002 - nothing is left to do here
        """The batch was committed, or refused: the handle is gone."""
        self._is_over = True

    def end_elsewhere(self) -> None:
        """Another call takes the transfer to its end: the handle is gone, whatever comes of that."""
        self._is_over = True

    async def given_digests(self) -> dict[str, bytes]:
        """The body's own digests, for the commit."""
        if not self._is_received:
            raise IncompleteBodyError("the body has not been received")
        body = await self._body_digests()
        return {} if body is None else {name: body.digest(name) for name in body.algorithms}

    def hash_beside(self, *, is_awaited: bool = False) -> None:
        """Hash what may be acknowledged without its digest, while the acknowledgement is on its way: the store process may also
        wait for the digest, where too much is in that state or it was asked for."""
        if self._opened.hash_later and self._hashes and self._opened.sizes[0]:
            self._later.add(self.handle, self._hashes[0], self._pins[0].share(), is_awaited=is_awaited)


def nothing() -> None:
    """Rooms of transfers end with their transfers."""
