"""Digests that follow their acknowledgement: what was committed without is hashed, its frame sealed, and its row handed to
write-behind, which records the digest (ADR 4).

A burst of chunks is stored, and read, before their hashing takes the cores; how much may wait so is bounded in bytes and in time,
and whoever asks for a digest ends the wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.errors import FrameCorruptError, InvalidRequestError
from kvobj.ids import BlobId
from kvobj.store.arriving import ArrivingKeys
from kvobj.store.hashing import BlobHash
from kvobj.store.host_reads import HostReads
from kvobj.store.ingest import ReceivedBlob
from kvobj.store.placement import Placement
from kvobj.store.sealed import with_header_digest
from kvobj.store.write_behind import WriteBehind
from kvobj.task_endings import to_their_end

SEAL_BATCH_BYTES: Final = 16 * 1024 * 1024
SEAL_DELAY_SECONDS: Final = 0.025
"""How long no further chunk must come, next to nothing of any, and clients on this host read next to nothing, before digests are
made that nobody waits for. Where it goes on after all, they wait again. Only while three quarters at most of what may be unhashed
is, and half of what may be dirty."""
SEAL_DELAY_SECONDS_MAX: Final = 1.0
"""How long a burst that does not end puts them off; what may be unhashed bounds it in bytes."""
BURST_BYTES: Final = 1024 * 1024
"""Bodies of which less than this comes within the delay, or while a batch is hashed, want no core for themselves; nor do reads."""
_SEALING_MAX: Final = 2
"""Batches that are sealed at a time once writers will have to wait for it soon, and while no chunk comes; until then one, and the
cores are others'."""


def _hash_and_seal(blobs: list[ReceivedBlob]) -> None:
    for blob in blobs:
        if blob.hash is None:
            blob.hash = BlobHash(blob.payload)
        blob.hash.advance(blob.plain_bytes, None)
        blob.seal()


class ToldHash:
    """The hash of an acknowledged blob that another process computes (`Sealing.follow_told`): told once, or made here after all."""

    __slots__ = ("_blob", "_hash_here", "_row", "_seal", "is_hashed")

    def __init__(
        self,
        blob: ReceivedBlob,
        row: ObjectRow,
        *,
        seal: Callable[[ReceivedBlob, ObjectRow], None],
        hash_here: Callable[[ReceivedBlob, ObjectRow], None],
    ) -> None:
        self._blob = blob
        self._row = row
        self._seal = seal
        self._hash_here = hash_here
        self.is_hashed = False
        """Whether nothing is waited for any more."""

    def hashed(self, number: int, digest: bytes, block_crcs: Sequence[int]) -> None:
        """The hash of the blob, which is number 0 and the only one. `InvalidRequestError` for what no such blob has."""
        if number:
            raise InvalidRequestError("the body is one blob", blob=number)
        if not self.is_hashed:
            blob_hash = self._blob.hash = BlobHash(self._blob.payload)
            blob_hash.adopt(digest, block_crcs)
            self.is_hashed = True
            self._seal(self._blob, self._row)

    def hash_here(self) -> None:
        """Nobody will tell it."""
        if not self.is_hashed:
            self.is_hashed = True
            self._blob.hash = None
            self._hash_here(self._blob, self._row)


class Sealing:
    """See the module's text. Event-loop-only, but for the jobs it sends to `hash_executor`."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        placement: Placement,
        write_behind: WriteBehind,
        arriving: ArrivingKeys,
        host_reads: HostReads,
        clock: Clock,
        hash_executor: Executor,
        unhashed_bytes_max: int,
        log: logging.Logger,
    ) -> None:
        """`unhashed_bytes_max`: what may be acknowledged and not hashed yet."""
        self._catalog = catalog
        self._placement = placement
        self._write_behind = write_behind
        self._arriving = arriving
        self._host_reads = host_reads
        self._clock = clock
        self._executor = hash_executor
        self._log = log
        self._unhashed_bytes = 0
        self._unhashed_bytes_max = unhashed_bytes_max
        self._delayed_bytes_max = min(unhashed_bytes_max * 3 // 4, placement.dirty_bytes_max // 2)
        self._follow_ups: dict[bytes, asyncio.Future[None]] = {}
        self._unsealed: deque[tuple[ReceivedBlob, ObjectRow]] = deque()
        self._hurry = asyncio.Event()
        self._followed = 0
        self._sealing: set[asyncio.Task[None]] = set()

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes more may be acknowledged before they are hashed."""
        return self._unhashed_bytes + size_bytes <= self._unhashed_bytes_max

    def puts_off(self, size_bytes: int) -> bool:
        """Whether a body that comes now is better hashed after its acknowledgement: the cores are free to receive it, and what has
        been put off leaves room. Else it is hashed while it arrives, beside what was put off."""
        return self._unhashed_bytes + size_bytes <= self._delayed_bytes_max

    def follow(self, blob: ReceivedBlob, row: ObjectRow, *, is_hashed_later: bool) -> None:
        """Take over a blob that was acknowledged without its digest, and release its frame in the end. `is_hashed_later`: nobody
        hashes it yet, and it need not have begun one; else its hash is under way."""
        self._unhashed_bytes += blob.plain_bytes
        if not is_hashed_later:
            self._follow_ups[bytes(blob.blob_id)] = asyncio.create_task(self._seal_hashed(blob, row))
            return
        self._follow_ups[bytes(blob.blob_id)] = asyncio.get_running_loop().create_future()
        self._put_off(blob, row)

    def follow_told(self, blob: ReceivedBlob, row: ObjectRow) -> ToldHash:
        """`follow`, of a blob that who filled it hashes, too, in another process: without a task that waits for it."""
        self._unhashed_bytes += blob.plain_bytes
        self._follow_ups[bytes(blob.blob_id)] = asyncio.get_running_loop().create_future()
        return ToldHash(blob, row, seal=self._seal_told, hash_here=self._put_off)

    def _seal_told(self, blob: ReceivedBlob, row: ObjectRow) -> None:
        follow_up = self._follow_ups[bytes(blob.blob_id)]
        try:
            blob.seal()
        finally:
            self._end_follow_up(blob, row)
            follow_up.set_result(None)

    def _put_off(self, blob: ReceivedBlob, row: ObjectRow) -> None:
        self._followed += 1
        self._unsealed.append((blob, row))
        if self._unhashed_bytes > self._delayed_bytes_max:
            self._hurry.set()
        is_behind = self._unhashed_bytes > self._unhashed_bytes_max * 7 // 8
        # Of those that end just now none looks again.
        at_work = sum(1 for task in self._sealing if not task.done())
        if at_work < (_SEALING_MAX if is_behind else 1):
            task = asyncio.create_task(self._seal_batches())
            self._sealing.add(task)
            task.add_done_callback(self._sealing.discard)

    async def settled(self, row: ObjectRow, *, wait: bool) -> ObjectRow:
        """The row with the digest that it was committed without, from its frame's header.

        A digest that is still being computed is waited for, or left out where `wait` is false.
        """
        if row.digest is not None or len(row.blobs) != 1:
            return row
        (blob,) = row.blobs
        pending = self._follow_ups.get(blob.blob_id)
        if pending is not None:
            if not wait:
                return row
            self._hurry.set()
            await asyncio.wait([pending])
        frame = await self._placement.cache.get(BlobId(blob.blob_id))
        if frame is not None:
            try:
                return with_header_digest(row, frame)
            except FrameCorruptError:
                return row  # a digest nobody knows is left out; the bytes are judged where they are read
            finally:
                frame.release()
        # Written down and evicted since it was looked up: the durable row has the digest.
        (current,) = await self._catalog.lookup(row.bucket, [row.key])
        return current if current is not None and current.blobs[0].blob_id == blob.blob_id else row

    async def drain(self) -> None:
        """Wait until no digest is pending."""
        while self._follow_ups:
            self._hurry.set()
            await asyncio.wait(list(self._follow_ups.values()))

    async def _seal_hashed(self, blob: ReceivedBlob, row: ObjectRow) -> None:
        assert blob.hash is not None
        try:
            await blob.hash.wait()
            blob.seal()
        finally:
            self._end_follow_up(blob, row)

    async def _seal_batches(self) -> None:
        """Hash and seal what is waiting, many small bodies in one job: while no more comes, unless somebody waits or it is much."""
        deadline = self._clock.monotonic() + SEAL_DELAY_SECONDS_MAX
        while self._unsealed:
            await self._burst_ends(deadline)
            beside = asyncio.create_task(self._seal_in_quiet(lambda: False))
            try:
                await self._seal_in_quiet(lambda: self._is_due(deadline))
            finally:
                await to_their_end([beside])
        self._hurry.clear()

    def _is_due(self, deadline: float) -> bool:
        """Whether what was put off is wanted now, whatever comes."""
        return self._hurry.is_set() or self._clock.monotonic() >= deadline

    async def _seal_in_quiet(self, is_due: Callable[[], bool]) -> None:
        """Hash and seal on one core, for as long as nobody sends what would want it, or it is due."""
        before = self._came()
        while self._unsealed and (not self._is_burst(before, now := self._came()) or is_due()):
            before = now
            await self._seal_batch()

    def _came(self) -> tuple[int, int, int]:
        """How many chunks have been put off so far, how much of others is there, and how much clients on this host have opened and
        let go of."""
        return self._followed, self._arriving.filled_bytes, self._host_reads.seen_bytes

    def _is_burst(self, before: tuple[int, int, int], now: tuple[int, int, int]) -> bool:
        """Whether chunks have come in between, or so much of one: between two of a few large ones that come side by side passes
        longer than the delay. Or so much is being read on this host, or going to be."""
        return (
            now[0] != before[0]
            or any(after - earlier >= BURST_BYTES for earlier, after in zip(before[1:], now[1:], strict=True))
            or self._host_reads.ahead_bytes >= BURST_BYTES
        )

    async def _burst_ends(self, deadline: float) -> None:
        while not self._is_due(deadline):
            before = self._came()
            with suppress(TimeoutError):
                async with asyncio.timeout(SEAL_DELAY_SECONDS):
                    await self._hurry.wait()
            if not self._is_burst(before, self._came()):
                return

    async def _seal_batch(self) -> None:
        batch: list[tuple[ReceivedBlob, ObjectRow]] = []
        size_bytes = 0
        while self._unsealed and size_bytes < SEAL_BATCH_BYTES:
            batch.append(self._unsealed.popleft())
            size_bytes += batch[-1][0].plain_bytes
        blobs = [blob for blob, _ in batch]
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, _hash_and_seal, blobs)
        finally:
            for blob, row in batch:
                follow_up = self._follow_ups[bytes(blob.blob_id)]
                self._end_follow_up(blob, row)
                follow_up.set_result(None)

    def _end_follow_up(self, blob: ReceivedBlob, row: ObjectRow) -> None:
        del self._follow_ups[bytes(blob.blob_id)]
        if blob.sealed:
            self._placement.cache.mark_sealed(blob.blob_id)
            self._write_behind.enqueue(row)
        else:
            # The row stays volatile and its blob dirty: the next start hashes and enqueues it again.
            self._log.error("a chunk could not be sealed blob_id=%s", blob.blob_id.hex())
        self._unhashed_bytes -= blob.plain_bytes
        blob.frame.release()
