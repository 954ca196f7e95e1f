"""A worker's way to bytes at rest: frames that the store process pins, seen through the worker's own mapping of the arena.

Implements as much of a tier, and of the counts of blobs in use, as `store.reader.ObjectReader` needs. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from kvobj.arena import PinnedFrame, Progress
from kvobj.errors import KvobjError
from kvobj.ids import BlobId
from kvobj.tiers.protocol import ByteRange
from kvobj.workers.calls import OpenFrame, StoreCalls
from kvobj.workers.channel import Channel
from kvobj.workers.kept_frames import Keeping, KeptFrames
from kvobj.workers.mapped_arena import MappedArena

_RELEASE_SECONDS: Final = 0.005
"""Releases wait for so long for other messages to leave with: nobody waits for them, and a message by itself wakes a process."""


class RemoteFrames:
    """Opens frames and gives them back, many in one message."""

    def __init__(self, channel: Channel, calls: StoreCalls, arena: MappedArena, keeping: Keeping) -> None:
        self.kept = KeptFrames(
            keeping, count_hits=lambda reads, size_bytes: channel.tell("kept_hits", reads, size_bytes)
        )
        self._channel = channel
        self._calls = calls
        self._arena = arena
        self._loop = asyncio.get_running_loop()
        self._filling: dict[int, Progress] = {}
        self._released: list[int] = []
        self._next_use = 1
        channel.on_flush.append(self._tell_released)

    def answered(self, opened: OpenFrame) -> None:
        """The answer has come; what is told of the frame next finds it."""
        if opened.total:
            progress = self._filling[opened.handle] = Progress(opened.total)
            progress.advance(opened.filled)

    def unwanted(self, opened: OpenFrame) -> None:
        """Nobody wants the frame."""
        self._release(opened.handle)

    def frame(self, opened: OpenFrame) -> PinnedFrame:
        """The frame that was opened and `answered`; its last release is told."""
        handle = opened.handle
        try:
            pin = self._arena.pin(opened.room, lambda: self._release(handle))
        except BaseException:
            self._release(handle)
            raise
        progress = self._filling.get(handle) if opened.total else None
        return PinnedFrame(
            pin,
            frame_bytes=opened.frame_bytes,
            start=opened.start,
            size=opened.size,
            progress=progress,
            tier=opened.tier,
            origin=opened.origin,
        )

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`."""
        start, stop = (None, None) if byte_range is None else (byte_range.start, byte_range.stop)
        opened = await self._calls.open_blob(blob_id, start, stop)
        return None if opened is None else self.frame(opened)

    async def get_stored(self, blob_id: BlobId, codec: str) -> PinnedFrame | None:
        """None: a reader of a frame as it lies has no other blob than the one that was opened for it."""
        del blob_id, codec
        return None

    def filled(self, handle: int, filled: int) -> None:
        """More of a frame is there."""
        progress = self._filling.get(handle)
        if progress is not None:
            progress.advance(filled)

    def failed(self, handle: int, error: KvobjError) -> None:
        """A frame will not be filled."""
        progress = self._filling.get(handle)
        if progress is not None:
            progress.fail(error)

    def _release(self, handle: int) -> None:
        self._filling.pop(handle, None)
        if not self._released:
            self._loop.call_later(_RELEASE_SECONDS, self._tell_released)
        self._released.append(handle)

    def _tell_released(self) -> None:
        if self._released:
            released, self._released = self._released, []
            self._channel.tell("release", released)

    def use(self, blob_ids: Iterable[bytes]) -> BlobsUsed:
        """Keep blobs from being reaped, until the result's `release`."""
        use = self._next_use
        self._next_use += 1
        self._channel.tell("use", use, list(blob_ids))
        return BlobsUsed(self._channel, use)


class BlobsUsed:
    """Blobs of one reader that are in use."""

    __slots__ = ("_channel", "_use")

    def __init__(self, channel: Channel, use: int) -> None:
        self._channel = channel
        self._use = use

    def release(self, _blob_ids: Iterable[bytes] = ()) -> None:
        """Let go of all of them. Once."""
        self._channel.tell("unuse", self._use)


class NothingUsed:
    """For a reader of one frame, whose handle keeps its blob in use."""

    __slots__ = ()

    def release(self, _blob_ids: Iterable[bytes] = ()) -> None:
        """Nothing."""


NOTHING_USED = NothingUsed()
