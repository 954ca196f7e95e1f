"""Reading an object: views of pinned frames, in order, sent as they become valid.

A reader holds at most two frames (the one being sent and the next one being fetched) and keeps every blob of its row from
being reaped. The first frame is there before the reader is handed out, so a miss or a corrupt head is known
before a reply's status is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

import msgspec

from kvobj.arena import PinnedFrame
from kvobj.catalog.rows import BlobRef, ObjectRow
from kvobj.codec.codec import codec_named
from kvobj.codec.frame import BLOCK_PLAIN_BYTES, FrameHeader, frame_head_bytes, parse_frame, raw_payload_offset
from kvobj.errors import KvobjError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.store.representation import stored_codec
from kvobj.tiers.protocol import ByteRange

# A cold read of a small part of a large blob reads that part alone and is not promoted; anything else reads
# (and promotes) the whole blob, since engines that read one range soon read the next.
PARTIAL_READ_SHARE: Final = 8
PARTIAL_READ_BLOB_BYTES_MIN: Final = 4 * 1024 * 1024


class FrameSource(Protocol):
    """As much of the tiers as a reader needs."""

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`."""
        ...

    async def get_stored(self, blob_id: BlobId, codec: str) -> PinnedFrame | None:
        """The frame as a tier holds it in this codec (`StoredFrames.get`)."""
        ...


class InUse(Protocol):
    """Who is told when a reader is done with its blobs (`BlobsInUse`)."""

    def release(self, blob_ids: Iterable[bytes]) -> None:
        """The reader is done."""
        ...


class BlobSlice(msgspec.Struct, frozen=True):
    """The part `[start, stop)` of one blob's plain bytes."""

    blob: BlobRef
    start: int
    stop: int


def slices_of(blobs: Sequence[BlobRef], start: int, stop: int) -> list[BlobSlice]:
    """The slices whose bytes are the object's `[start, stop)`, in order."""
    slices: list[BlobSlice] = []
    position = 0
    for blob in blobs:
        end = position + blob.plain_bytes
        if end > start and position < stop:
            slices.append(BlobSlice(blob, max(start - position, 0), min(stop - position, blob.plain_bytes)))
        position = end
        if position >= stop:
            break
    return slices


async def fetch(tier: FrameSource, part: BlobSlice) -> PinnedFrame | None:
    """The frame that holds the slice, or just the slice's bytes of a raw frame where that is much less to read."""
    blob = part.blob
    blob_id = BlobId(blob.blob_id)
    length = part.stop - part.start
    stored = stored_codec(blob)
    if stored is not None:
        return await tier.get_stored(blob_id, stored)
    if (
        blob.codec == "raw"
        and blob.plain_bytes > PARTIAL_READ_BLOB_BYTES_MIN
        and length * PARTIAL_READ_SHARE < blob.plain_bytes
    ):
        offset = raw_payload_offset(blob.plain_bytes)
        return await tier.get(blob_id, ByteRange(offset + part.start, offset + part.stop))
    return await tier.get(blob_id)


class ObjectReader:
    """Implements `api.message.BodyStream`. Made by `Store.open`; `aclose` must be called."""

    __slots__ = ("_current", "_in_use", "_next", "_slices", "_tier", "length", "tier")

    def __init__(
        self,
        slices: list[BlobSlice],
        first: PinnedFrame | None,
        *,
        tier: FrameSource,
        in_use: InUse,
    ) -> None:
        self._slices = slices
        self._current = first
        self._tier = tier
        self._in_use = in_use
        self._next: asyncio.Task[PinnedFrame | None] | None = None
        self.length = 0
        for part in slices:
            self.length += part.stop - part.start
        self.tier = first.tier if first is not None else ""

    async def views(self) -> AsyncIterator[memoryview]:
        """See `BodyStream.views`."""
        for index, part in enumerate(self._slices):
            if index:
                await self._advance()
            frame = self._current
            assert frame is not None
            if index + 1 < len(self._slices):
                self._next = asyncio.create_task(fetch(self._tier, self._slices[index + 1]))
            async for view in plain_views(frame, part):
                yield view

    def whole(self) -> memoryview | None:
        """See `WholeStream.whole`."""
        frame = self._current
        if frame is None or len(self._slices) != 1 or (frame.progress is not None and not frame.progress.done):
            return None
        (part,) = self._slices
        stored = stored_codec(part.blob)
        if stored is None and part.blob.codec != "raw":
            return None
        first = (0 if stored is not None else raw_payload_offset(part.blob.plain_bytes)) - frame.start
        return frame.view[first + part.start : first + part.stop]

    async def _advance(self) -> None:
        if self._current is not None:
            self._current.release()
            self._current = None
        assert self._next is not None
        task, self._next = self._next, None
        self._current = await task
        if self._current is None:
            raise TierUnavailableError("a blob vanished while its object was being read")

    async def aclose(self) -> None:
        """See `BodyStream.aclose`."""
        if self._current is not None:
            self._current.release()
            self._current = None
        if self._next is not None:
            task, self._next = self._next, None
            with suppress(KvobjError):
                frame = await task
                if frame is not None:
                    frame.release()
        self._in_use.release([part.blob.blob_id for part in self._slices])
        self._slices = []


def plain_views(frame: PinnedFrame, part: BlobSlice) -> AsyncIterator[memoryview]:
    """The plain bytes of the slice as views, valid until the next is asked for or the frame is released."""
    if part.blob.codec == "raw":
        return _views_from(raw_payload_offset(part.blob.plain_bytes), frame, part)
    if stored_codec(part.blob) is not None:
        return _views_from(0, frame, part)
    return _decoded_views(frame, part)


async def _views_from(first: int, frame: PinnedFrame, part: BlobSlice) -> AsyncIterator[memoryview]:
    """The slice of the frame's bytes from `first` on."""
    offset = first - frame.start
    position, stop = offset + part.start, offset + part.stop
    progress = frame.progress
    if progress is None or progress.done:
        if stop > position:
            yield frame.view[position:stop]
        return
    # Progress counts the extent's bytes, which begin before the frame's view where a range was widened.
    ahead = frame.start - frame.origin
    while position < stop:
        await frame.ready(position + 1)
        filled = min(progress.filled - ahead, stop)
        yield frame.view[position:filled]
        position = filled


async def _decoded_views(frame: PinnedFrame, part: BlobSlice) -> AsyncIterator[memoryview]:
    blob = part.blob
    head_bytes = frame_head_bytes(blob.plain_bytes)
    await frame.ready(head_bytes)
    header: FrameHeader = parse_frame(frame.view[:head_bytes], blob.frame_bytes)
    codec = codec_named(header.codec)
    scratch = memoryview(bytearray(BLOCK_PLAIN_BYTES))
    for index in header.blocks_for(part.start, part.stop):
        block_start = index * BLOCK_PLAIN_BYTES
        block_plain_bytes = min(BLOCK_PLAIN_BYTES, blob.plain_bytes - block_start)
        begin, end = header.offset(index), header.offset(index) + header.length(index)
        await frame.ready(end)
        plain = scratch[:block_plain_bytes]
        codec.decode_block(header, index, frame.view[begin:end], plain)
        low = max(part.start - block_start, 0)
        high = min(part.stop - block_start, block_plain_bytes)
        yield plain[low:high]


class HotRead(NamedTuple):
    """An object that lies in memory: its row, and its bytes, or a reader over all of them, to be closed, where they are many."""

    row: ObjectRow
    body: bytes | ObjectReader


class ReaderSource:
    """A `ByteSource` over a reader: the one stated copy that CopyObject makes, from frame to frame."""

    __slots__ = ("_rest", "_views")

    def __init__(self, reader: ObjectReader) -> None:
        self._views = reader.views()
        self._rest = memoryview(b"")

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`."""
        filled = 0
        while filled < len(buffer):
            if not self._rest:
                self._rest = await anext(self._views)
                continue
            step = self._rest[: len(buffer) - filled]
            buffer[filled : filled + len(step)] = step
            self._rest = self._rest[len(step) :]
            filled += len(step)
            on_bytes(filled)
            # A copy between frames never waits for I/O when both are in memory: let others run.
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Stop reading; the reader itself is closed by who opened it."""
        close: Callable[[], Awaitable[None]] | None = getattr(self._views, "aclose", None)
        if close is not None:
            await close()
