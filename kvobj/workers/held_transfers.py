"""What one worker writes in the store process: transfers under handles, whose bytes the worker fills, hashes and checksums.

The store's own `PutTransfer` does here what it does anywhere; its bytes come from elsewhere (`_FilledElsewhere`), and so do its
hashes, which may follow the acknowledgement where the class of durability allows it. A worker that dies leaves what it had
acknowledged to be hashed here, and everything else undone. Event-loop-only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from kvobj.arena import Pin
from kvobj.catalog.rows import CommitOutcome, ObjectRow
from kvobj.errors import InvalidRequestError, KvobjError
from kvobj.store.hashing import BlobHash
from kvobj.store.ingest import PutTransfer
from kvobj.store.sealing import ToldHash
from kvobj.workers.calls import Hashed, Room

EAGER_BYTES: Final = 1024 * 1024
"""A body of so much is taken in while it arrives, so that it can be written down and followed meanwhile; a smaller one at its
commit, which spares it a task."""


class HeldTransfer:
    """One transfer of a worker. `send_room` names the room of a later blob; `fail` says that the transfer cannot go on."""

    def __init__(
        self,
        transfer: PutTransfer,
        stack: AsyncExitStack,
        *,
        send_room: Callable[[int, Room], None],
        fail: Callable[[KvobjError], None],
    ) -> None:
        self.transfer = transfer
        self.row: ObjectRow | None = None
        self._stack = stack
        self._pipeline, self.algorithms = transfer.hash_elsewhere()
        self._send_room = send_room
        self._fail = fail
        self._hashes: list[BlobHash] = []
        self._early_hashes: dict[int, tuple[bytes, Sequence[int]]] = {}
        self._filled: dict[int, int] = {}
        self._more: asyncio.Future[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        if transfer.request.size_bytes >= EAGER_BYTES:
            self._receiving = asyncio.create_task(self._receive(), name="worker-transfer")

    # -- what the worker tells -----------------------------------------------------------------------------------
    def filled(self, blob: int, filled: int) -> None:
        """So many leading bytes of blob number `blob` are there."""
        self._filled[blob] = filled
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def hashed(self, blob: int, digest: bytes, block_crcs: Sequence[int]) -> None:
        """The hash of a blob, all of whose bytes are there. `InvalidRequestError` for what no such blob has."""
        if blob < len(self._hashes):
            if not self._hashes[blob].finished:
                self._pipeline.adopt(self._hashes[blob], digest, block_crcs)
        else:
            self._early_hashes[blob] = digest, block_crcs

    @property
    def is_hashed(self) -> bool:
        """Whether the hash of all that was received is known."""
        return all(each.finished for each in self._hashes)

    def hash_here(self) -> None:
        """The worker is gone: what it has not hashed is hashed in this process."""
        for each in self._hashes:
            self._pipeline.hash_here(each)

    # -- as a source of bytes ------------------------------------------------------------------------------------
    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ingest.ByteSource`: returns when the worker says that the blob is full."""
        held = self.transfer.held
        assert held is not None
        assert held.hash is not None
        blob = len(self._hashes)
        if blob:
            self._send_room(blob, room_of(held.pin))
        self._hashes.append(held.hash)
        told = 0
        while told < len(buffer):
            filled = min(self._filled.get(blob, 0), len(buffer))
            if filled > told:
                told = filled
                on_bytes(told)
                continue
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        early = self._early_hashes.pop(blob, None)
        if early is not None:
            self._pipeline.adopt(held.hash, *early)

    async def _receive(self) -> None:
        try:
            await self.transfer.receive(self)
        except KvobjError as error:
            self._fail(error)
            raise

    async def received(self, digests: Mapping[str, bytes]) -> PutTransfer:
        """The transfer, with the whole body and its own digests; raises what ended it."""
        self.transfer.adopt_digests(digests)
        if self._receiving is not None:
            await asyncio.shield(self._receiving)
        elif not self.transfer.is_received:
            await self.transfer.receive(self)
        return self.transfer

    async def leave(self) -> None:
        """Leave the transfer's context: what was not committed is undone."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.cancel()
            await asyncio.wait([receiving])
            if not receiving.cancelled():
                receiving.exception()  # retrieved: the transfer fails or failed for its own reason
        await self._stack.aclose()


class HeldTransfers:
    """All transfers of one worker. See the module's text."""

    def __init__(
        self,
        *,
        send_room: Callable[[int, int, Room], None],
        fail: Callable[[int, KvobjError], None],
        log: logging.Logger,
    ) -> None:
        self._send_room = send_room
        self._fail = fail
        self._log = log
        self._next_handle = 1
        self._held: dict[int, HeldTransfer] = {}
        self._unhashed: dict[int, HeldTransfer | ToldHash] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many are out, those included whose hash is still to come."""
        return len(self._held) + len(self._unhashed)

    async def take(self, transfer: PutTransfer, handle: int = 0) -> tuple[int, HeldTransfer]:
        """Enter the transfer's context and keep it for the worker, under a handle of its own unless it has one."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(transfer)
            if not handle:
                handle = self._next_handle
                self._next_handle += 1

            def send_room(blob: int, room: Room) -> None:
                self._send_room(handle, blob, room)

            def fail(error: KvobjError) -> None:
                self._fail(handle, error)

            held = self._held[handle] = HeldTransfer(transfer, stack.pop_all(), send_room=send_room, fail=fail)
        return handle, held

    def get(self, handle: int) -> HeldTransfer:
        """The transfer of a handle. `InvalidRequestError` for what is none."""
        held = self._held.get(handle)
        if held is None:
            raise InvalidRequestError("no such transfer", handle=handle)
        return held

    def find(self, handle: int) -> HeldTransfer | None:
        """The transfer of a handle, if there is one."""
        return self._held.get(handle)

    def filled(self, handle: int, blob: int, filled: int) -> None:
        """See `HeldTransfer.filled`; of a transfer that is over it is ignored."""
        held = self._held.get(handle)
        if held is not None:
            held.filled(blob, filled)

    def await_hash(self, handle: int, told: ToldHash) -> None:
        """The worker will tell the hash of what is committed already."""
        self._unhashed[handle] = told

    def hashed(self, told: Hashed) -> None:
        """See `HeldTransfer.hashed`; also after the commit."""
        handle = told.handle
        held = self._held.get(handle) or self._unhashed.get(handle)
        if held is None:
            return
        try:
            held.hashed(told.blob, told.digest, told.block_crcs)
        except InvalidRequestError as error:
            self._log.error("a worker's hash is not that of its blob: %s", error)
            held.hash_here()
        if handle in self._unhashed and held.is_hashed:
            del self._unhashed[handle]

    async def end(self, handle: int) -> None:
        """Leave the transfer's context; a handle that is not known is ignored."""
        held = self._held.pop(handle, None)
        if held is None:
            return
        if held.transfer.committed and not held.is_hashed:
            self._unhashed[handle] = held
        await held.leave()

    def leave(self, handle: int) -> None:
        """`end`, beside what goes on."""
        if handle in self._held:
            task = asyncio.create_task(self._end_quietly(handle), name="worker-leave")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _end_quietly(self, handle: int) -> None:
        try:
            await self.end(handle)
        except KvobjError as error:
            self._log.warning("a transfer could not be undone whole: %s", error)

    async def commit_chain(
        self,
        handles: Sequence[int],
        commit: Callable[[Sequence[ObjectRow]], Awaitable[list[CommitOutcome | KvobjError]]],
    ) -> list[CommitOutcome | KvobjError]:
        """Make placed chunks visible by `commit`, as `store.batch` does, and leave their contexts."""
        chain = [self.get(handle) for handle in handles]
        rows = [each.row for each in chain if each.row is not None]
        if len(rows) != len(chain):
            raise InvalidRequestError("a chunk of the batch is not placed")
        outcomes: list[CommitOutcome | KvobjError] = []
        try:
            for each in chain:
                each.transfer.hand_over()
            try:
                outcomes = await commit(rows)
            finally:
                for number, each in enumerate(chain):
                    outcome = outcomes[number] if outcomes else None
                    await each.transfer.conclude(None if isinstance(outcome, KvobjError) else outcome)
        finally:
            for handle in handles:
                await self.end(handle)
        return outcomes

    async def aclose(self) -> None:
        """The worker is gone, and no call of it runs any more: undo what was not committed, hash what it left."""
        for handle in list(self._held):
            await self._end_quietly(handle)
        for held in self._unhashed.values():
            held.hash_here()
        self._unhashed.clear()
        if self._leaving:
            await asyncio.wait(self._leaving)


def room_of(pin: Pin) -> Room:
    """A pin's extent as it is told."""
    extent = pin.extent
    return Room(extent.region, extent.offset, extent.length, extent.generation)
