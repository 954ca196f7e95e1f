"""Checks frames that come from a medium that can lie (a disk, a network, memory adopted from an earlier process).

Guarantees: no byte of a block is readable before its crc32c was checked, and the last block of a whole frame not
before the BLAKE3 digest of all was; so what is wrong is never served whole. What is found before anything was handed
out is a miss; what is found later ends the frame's progress with `FrameCorruptError`. Either is counted and told to
`on_corrupt`. Does not repair: the cascade reads another tier, and who listens to `on_corrupt` removes the bad copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar, TypeVarTuple

from kvobj.arena import PinnedFrame, Progress
from kvobj.codec.frame import MAX_HEAD_BYTES, FrameHeader, parse_frame
from kvobj.errors import CorruptionError, FrameCorruptError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.forwarding import ForwardingTier
from kvobj.tiers.frame_check import FrameCheck
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import ByteRange, Tier

INLINE_BYTES: Final = 64 * 1024
"""Up to here hashing where one is (10 µs) is cheaper than a hop to a pool (60 µs)."""

STEP_BLOCKS: Final = 16
"""The most that one job checks, 4 MiB: 1 ms of a pool's time, and how far the checking may trail the filling."""

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class RunOnPool(Protocol):
    """Runs a blocking function on a pool's thread and awaits its result."""

    def __call__(self, work: Callable[[*_Arguments], _Result], /, *arguments: *_Arguments) -> Awaitable[_Result]:
        """Await `work(*arguments)`; what it raises is raised here."""
        ...


def _always(_: BlobId) -> bool:
    return True


def _ignore(_: BlobId) -> None:
    return


class Verified(ForwardingTier):
    """See `Tier`. Frames that still fill keep filling: their progress follows the checking.

    `run` is the pool that hashing over 64 KiB runs on. `on_corrupt(blob_id)` is called on the event loop for every
    frame that does not check out, `on_verified(blob_id)` once a whole frame's digest was right. `needs_check` spares
    frames that cannot have changed. A range is widened to whole blocks and checked by their checksums; the frame's
    head is read first. Nothing but its block vouches for an entry of the directory, so a range that shows entries waits
    until their blocks are checked too.
    """

    __slots__ = ("_corrupt", "_needs_check", "_on_corrupt", "_on_verified", "_run", "_tasks", "_verified")

    def __init__(
        self,
        inner: Tier,
        *,
        run: RunOnPool,
        instruments: TierInstruments,
        on_corrupt: Callable[[BlobId], None],
        on_verified: Callable[[BlobId], None] = _ignore,
        needs_check: Callable[[BlobId], bool] = _always,
    ) -> None:
        super().__init__(inner)
        self._run = run
        self._on_corrupt = on_corrupt
        self._on_verified = on_verified
        self._needs_check = needs_check
        self._corrupt = instruments.corrupt_frames.labels(inner.name)
        self._verified = instruments.verified_frames.labels(inner.name)
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`. Returns once the first block is checked. What does not check out by then is a miss."""
        if not self._needs_check(blob_id):
            return await self.inner.get(blob_id, byte_range)
        try:
            if byte_range is None:
                return await self._get_whole(blob_id)
            return await self._get_range(blob_id, byte_range)
        except CorruptionError:
            self._note_corrupt(blob_id)
            return None

    async def _get_whole(self, blob_id: BlobId) -> PinnedFrame | None:
        frame = await self.inner.get(blob_id)
        if frame is None:
            return None
        try:
            header = await _head_of(frame)
            check = FrameCheck(header, range(header.block_count), with_digest=True)
            return await self._checked(blob_id, check, frame, ByteRange(0, frame.frame_bytes))
        finally:
            frame.release()

    async def _get_range(self, blob_id: BlobId, byte_range: ByteRange) -> PinnedFrame | None:
        if byte_range.start == byte_range.stop:
            return await self.inner.get(blob_id, byte_range)
        head = await self._get_head(blob_id, byte_range)
        if head is None:
            return None
        try:
            header = await _head_of(head)
            blocks = header.blocks_over(byte_range.start, byte_range.stop)
            shown = header.blocks_named_in(byte_range.start, byte_range.stop)
            if not blocks and not shown:
                # All of it lies in front of the first block, inside what was just checked.
                return _part(head, byte_range, None)
        finally:
            head.release()
        if shown:
            blocks = range(max(blocks.stop, shown.stop))
        first, last = header.encoded_span(blocks)
        start = first if byte_range.start >= header.payload_offset else 0
        frame = await self.inner.get(blob_id, ByteRange(start, max(last, byte_range.stop)))
        if frame is None:
            return None
        try:
            if start == 0 and await _head_of(frame) != header:
                raise FrameCorruptError("frame head changed between two reads", blob_id=blob_id)
            check = FrameCheck(header, blocks, with_digest=False)
            while shown and not check.is_finished:
                await self._step(check, frame)
            return await self._checked(blob_id, check, frame, byte_range)
        finally:
            frame.release()

    async def _get_head(self, blob_id: BlobId, byte_range: ByteRange) -> PinnedFrame | None:
        head = await self.inner.get(blob_id, ByteRange(0, min(byte_range.stop, MAX_HEAD_BYTES)))
        if head is None or head.size == min(head.frame_bytes, MAX_HEAD_BYTES):
            return head
        # The range ends inside the head, which is checked whole or not at all.
        head_bytes = min(head.frame_bytes, MAX_HEAD_BYTES)
        head.release()
        return await self.inner.get(blob_id, ByteRange(0, head_bytes))

    async def _checked(self, blob_id: BlobId, check: FrameCheck, frame: PinnedFrame, wanted: ByteRange) -> PinnedFrame:
        """A pin of its own on the wanted part of `frame`, its first block checked and the others being checked."""
        filled = 0 if check.is_finished else await self._step(check, frame)
        if check.is_finished:
            self._note_checked(blob_id, check)
            return _part(frame, wanted, None)
        progress = Progress(wanted.stop - frame.origin)
        progress.advance(min(filled, progress.total))
        checking = self._check_rest(blob_id, check, frame.share(), progress)
        task = asyncio.create_task(checking)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _part(frame, wanted, progress)

    async def _check_rest(self, blob_id: BlobId, check: FrameCheck, frame: PinnedFrame, progress: Progress) -> None:
        try:
            finished = False
            while not finished:
                filled = await self._step(check, frame)
                finished = check.is_finished
                progress.advance(progress.total if finished else min(filled, progress.total))
            self._note_checked(blob_id, check)
        except CorruptionError as error:
            progress.fail(FrameCorruptError(error.message, **{**error.data, "blob_id": blob_id, "tier": self.name}))
            self._note_corrupt(blob_id)
        except asyncio.CancelledError:
            progress.fail(TierUnavailableError("closed while a frame was filling", blob_id=blob_id, tier=self.name))
            raise
        except Exception as error:  # noqa: BLE001 - readers wait on this progress, so whatever ends it must reach them
            progress.fail(error)
        finally:
            frame.release()

    async def _step(self, check: FrameCheck, frame: PinnedFrame) -> int:
        """Check the blocks that are there, one at least; return up to where the extent is checked now."""
        if check.has_blocks_left:
            await frame.ready(check.next_end - frame.start)
        blocks = check.blocks_ready(frame, STEP_BLOCKS)
        if check.plain_bytes(blocks) <= INLINE_BYTES:
            check.verify(blocks, frame.view, frame.start)
        else:
            await self._run(check.verify, blocks, frame.view, frame.start)
        return check.checked_to - frame.origin

    def _note_checked(self, blob_id: BlobId, check: FrameCheck) -> None:
        if check.has_digest:
            self._verified.inc()
            self._on_verified(blob_id)

    def _note_corrupt(self, blob_id: BlobId) -> None:
        self._corrupt.inc()
        self._on_corrupt(blob_id)

    async def aclose(self) -> None:
        """See `Tier.aclose`. Waits for the checks going on, which end when the inner tier's reads do."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await self.inner.aclose()


async def _head_of(frame: PinnedFrame) -> FrameHeader:
    head_bytes = min(frame.size, MAX_HEAD_BYTES)
    await frame.ready(head_bytes)
    return parse_frame(frame.view[:head_bytes], frame.frame_bytes)


def _part(frame: PinnedFrame, wanted: ByteRange, progress: Progress | None) -> PinnedFrame:
    """The wanted bytes of `frame` under a pin of their own, following `progress`."""
    return PinnedFrame(
        frame.pin.share(),
        frame_bytes=frame.frame_bytes,
        start=wanted.start,
        size=wanted.stop - wanted.start,
        progress=progress,
        tier=frame.tier,
        origin=frame.origin,
    )
