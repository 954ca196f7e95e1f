"""A frame that is written into its segment while it still arrives, so that its put finds all but the beginning written.

Pieces go out one after the other, each on a thread, as soon as they are long enough; the rest, the frame's head, which only
the finished frame has, and the record page come last, as one job of the put. Until then nothing names the place: a start
after a crash takes it for free room, and what an earlier blob's record page there may still say was settled when that blob was
removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from kvobj.arena import Pin, PinnedFrame
from kvobj.tiers.nvme.blob_io import BlobIo, EarlyBytes, settle
from kvobj.tiers.nvme.directory import Place, padded
from kvobj.tiers.nvme.record import RECORD_BYTES, Record
from kvobj.tiers.nvme.segment_file import SegmentFile

# Below this a frame is written whole: a hop to a thread and back costs as much as writing some hundred KiB.
EARLY_FRAME_BYTES_MIN: Final = 2 << 20
_PIECE_BYTES: Final = 1 << 20
_PIECE_BYTES_MAX: Final = 8 << 20


class EarlyWrite:
    """One frame under way. Event loop only; ended by the put of its blob or by `abandon`, whichever comes first."""

    __slots__ = (
        "_error",
        "_head_bytes",
        "_io",
        "_is_taken",
        "_on_abandoned",
        "_on_job",
        "_piece",
        "_pin",
        "_ready_bytes",
        "_since",
        "_submitted_bytes",
        "_view",
        "_writing",
        "place",
        "segment",
    )

    def __init__(
        self,
        io: BlobIo,
        segment: SegmentFile,
        place: Place,
        frame: PinnedFrame,
        *,
        head_bytes: int,
        on_job: Callable[[asyncio.Future[None]], None],
        on_abandoned: Callable[[], None],
    ) -> None:
        self.segment = segment
        self.place = place
        self._io = io
        self._pin = frame.pin.share()
        self._view = self._pin.view
        # The end of the leading pages that hold any of the head: behind it, bytes are final once they are there.
        self._head_bytes = min(padded(head_bytes), padded(place.frame_bytes))
        self._submitted_bytes = self._head_bytes
        self._ready_bytes = 0
        self._since = segment.flushes.times_given_up
        self._writing: asyncio.Future[None] | None = None
        self._piece: Future[None] | None = None
        self._error: BaseException | None = None
        self._is_taken = False
        self._on_job = on_job
        self._on_abandoned = on_abandoned

    def is_of(self, pin: Pin, frame_bytes: int) -> bool:
        """Whether a put of the frame of so many bytes in this very extent may take over: not what was abandoned, which gives room
        and extent back as soon as its last piece is written."""
        return not self._is_taken and pin.extent == self._pin.extent and frame_bytes == self.place.frame_bytes

    def advance(self, ready_bytes: int) -> None:
        """The frame's bytes up to `ready_bytes`, but for its head, are there and change no more."""
        self._ready_bytes = ready_bytes
        if self._writing is None:
            self._write_next()

    def abandon(self) -> None:
        """There will be no put: give room and extent back, as soon as no thread uses them. Nothing once a put has taken over."""
        if self._is_taken:
            return
        self._is_taken = True
        if self._writing is None:
            self._give_back()
        else:
            self._writing.add_done_callback(lambda _: self._give_back())

    def take(self) -> None:
        """A put takes over; it calls `finish`."""
        self._is_taken = True

    async def finish(self, record: Record) -> None:
        """Write what is left, the head and the record page, and flush. Returns once durable, and no thread uses the extent then.
        `StoreFullError` or `TierUnavailableError` where the medium failed, then or earlier."""
        try:
            if self._error is not None:
                raise self._error
            early = EarlyBytes(self._head_bytes, self._submitted_bytes, self._piece, self._since)
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._io.write(self.segment, record, self._view, partial(settle, written), early=early)
            await written
        finally:
            self._pin.release()

    def _write_next(self) -> None:
        start = self._submitted_bytes
        upto = min(self._ready_bytes // RECORD_BYTES * RECORD_BYTES, start + _PIECE_BYTES_MAX)
        if self._is_taken or self._error is not None or upto - start < _PIECE_BYTES:
            return
        self._submitted_bytes = upto
        offset = self.place.offset + RECORD_BYTES + start
        self._writing, self._piece = self._io.write_piece(self.segment, self._view[start:upto], offset)
        self._on_job(self._writing)
        self._writing.add_done_callback(self._written)

    def _written(self, job: asyncio.Future[None]) -> None:
        self._writing = self._piece = None
        self._error = job.exception()
        self._write_next()

    def _give_back(self) -> None:
        self._pin.release()
        self._on_abandoned()
