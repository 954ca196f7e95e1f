"""Moves blobs between the arena and segment files on threads of its own: record page and frame in one go, both ways.

Reads and writes have separate threads, so that a burst of writing never makes a read wait in line. Guarantees that a write
that is told durable was flushed after its last byte was written, and that no thread touches an extent after the write's
future, or the reading's `on_ended`, has been told. Directory and room are the tier's affair.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvobj.arena import Progress
from kvobj.errors import FrameCorruptError
from kvobj.ids import BlobId
from kvobj.tiers.nvme.directory import Place, padded
from kvobj.tiers.nvme.frame_reading import FrameReading
from kvobj.tiers.nvme.record import RECORD_BYTES, Record, decode_record, encode_record
from kvobj.tiers.nvme.segment_file import SegmentFile
from kvobj.tiers.nvme.space import unavailable

_READ_THREADS: Final = 4
_WRITE_THREADS: Final = 4
# Several pieces of one frame in flight wrote no faster than one after the other (32 MiB: 2.8 to 3.0 GB/s either way), so a
# write is one job; pieces only keep a single call short.
_WRITE_PIECE_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class EarlyBytes:
    """What of a frame was written before its put: from `head_bytes` up to `upto`, both multiples of 4096, where `piece`, if there
    is one, is the last of it and may still be under way."""

    head_bytes: int
    upto: int
    piece: Future[None] | None


class BlobIo:
    """The threads, and one record page for each. Event loop only; `shut_down` when nothing is in flight."""

    def __init__(self, record_key: bytes) -> None:
        self._record_key = record_key
        self._readers = ThreadPoolExecutor(_READ_THREADS, "nvme-read")
        self.writers = ThreadPoolExecutor(_WRITE_THREADS, "nvme-write")
        self._pages = threading.local()

    def write(
        self, segment: SegmentFile, record: Record, extent: memoryview, *, early: EarlyBytes | None = None
    ) -> asyncio.Future[None]:
        """Write record page and frame at `record.offset`, and flush. Done once durable, or with the error of the medium.

        `extent` holds the frame and room up to the next 4096, which is zeroed here; it must stay until the future is done.
        `early`: what of the frame need not be written any more. Cancelling the future stops nothing.
        """
        written, tell = _outcome()

        def write() -> None:
            try:
                self._write_extent(segment, record, extent, early)
            except Exception as error:  # noqa: BLE001 - a put waits for this thread: whatever ended it must reach it
                tell(error)
            else:
                segment.flushes.request(tell)

        self.writers.submit(write)
        return written

    def write_piece(
        self, segment: SegmentFile, piece: memoryview, offset: int
    ) -> tuple[asyncio.Future[None], Future[None]]:
        """Write aligned bytes of a frame at `offset` of the segment, without a flush: one that begins later covers them. Otherwise
        as `write`. The second future is for `EarlyBytes`."""
        written, tell = _outcome()

        def write() -> None:
            try:
                segment.write([piece], offset)
            except Exception as error:
                tell(error)
                raise
            tell(None)

        return written, self.writers.submit(write)

    def read(
        self,
        segment: SegmentFile,
        blob_id: BlobId,
        place: Place,
        view: memoryview,
        *,
        origin: int,
        progress: Progress,
        timeout_seconds: float,
        on_ended: Callable[[], None],
    ) -> None:
        """Fill `view` with the blob's encoded bytes from `origin` on (both multiples of 4096), reporting to `progress`.

        With `origin` 0 and a view for the whole frame, the record page is read too and checked before the first advance.
        """
        whole = len(view) == padded(place.frame_bytes)

        def read_first(segment: SegmentFile, offset: int, first: memoryview) -> None:
            page = self._page()
            segment.read([page, first], offset - RECORD_BYTES)
            record = decode_record(page, self._record_key)
            if (
                record is None
                or (record.segment, record.offset) != (place.segment, place.offset)
                or (record.blob_id, record.frame_bytes) != (blob_id, place.frame_bytes)
            ):
                raise FrameCorruptError("record in front of the frame is not its own", blob_id=blob_id, place=place)

        FrameReading(
            segment,
            place.offset + RECORD_BYTES + origin,
            view,
            progress=progress,
            timeout_seconds=timeout_seconds,
            on_ended=on_ended,
            first=read_first if whole else None,
        ).start(self._readers)

    def shut_down(self, *, wait: bool) -> None:
        """End the threads. `wait` only when none can be stuck in the kernel."""
        self._readers.shutdown(wait=wait)
        self.writers.shutdown(wait=wait)

    def _write_extent(self, segment: SegmentFile, record: Record, extent: memoryview, early: EarlyBytes | None) -> None:
        length = padded(record.frame_bytes)
        extent[record.frame_bytes : length] = bytes(length - record.frame_bytes)
        first = min(length, _WRITE_PIECE_BYTES - RECORD_BYTES)
        rest = first
        if early is not None:
            first, rest = early.head_bytes, early.upto
            if early.piece is not None:
                early.piece.result()  # on a thread already, since threads take jobs in turn
        data_offset = record.offset + RECORD_BYTES
        page = self._page()
        encode_record(record, self._record_key, page)
        if early is None:
            segment.write([page, extent[:first]], record.offset)
        for start in range(rest, length, _WRITE_PIECE_BYTES):
            segment.write([extent[start : min(start + _WRITE_PIECE_BYTES, length)]], data_offset + start)
        if early is not None:
            segment.write([page, extent[:first]], record.offset)

    def _page(self) -> memoryview:
        """Room for one record page, the calling thread's own, page-aligned as O_DIRECT wants it."""
        page: memoryview | None = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = memoryview(mmap.mmap(-1, RECORD_BYTES))
        return page


def _outcome() -> tuple[asyncio.Future[None], Callable[[Exception | None], None]]:
    """A future of the running loop, and how any thread settles it: None for done, or what went wrong."""
    loop = asyncio.get_running_loop()
    written: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if written.done():
            return
        if error is None:
            written.set_result(None)
        elif isinstance(error, OSError):
            written.set_exception(unavailable(error, "segment cannot be written"))
        else:
            written.set_exception(error)

    def tell(error: Exception | None) -> None:
        loop.call_soon_threadsafe(settle, error)

    return written, tell
