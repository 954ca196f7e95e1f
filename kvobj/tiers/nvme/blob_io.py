"""Moves blobs between the arena and segment files: record page and frame in one go, both ways.

Short ones by the kernel's queue, if there is one; long ones, what comes in pieces, and what the kernel refuses, on threads of its
own. Reads and writes have separate threads, so that a burst of writing never makes a read wait in line. Guarantees that a write
that is told durable was flushed after its last byte was written, and that neither a thread nor the kernel touches an extent after
the write's future, or the reading's `on_ended`, has been told. Directory and room are the tier's affair.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvobj.arena import Progress
from kvobj.errors import FrameCorruptError
from kvobj.ids import BlobId
from kvobj.tiers.nvme.directory import Place, padded
from kvobj.tiers.nvme.frame_reading import FrameReading
from kvobj.tiers.nvme.kernel_queue import TransferQueue, why_no_queue
from kvobj.tiers.nvme.queued_writes import BlobWrite, QueuedWrites
from kvobj.tiers.nvme.record import RECORD_BYTES, Record, encode_record, is_record_of
from kvobj.tiers.nvme.segment_file import SegmentFile
from kvobj.tiers.nvme.space import unavailable

_READ_THREADS: Final = 4
_WRITE_THREADS: Final = 4
# The loop itself hands these to the kernel, in 25 to 50 µs.
_QUEUED_WRITE_BYTES_MAX: Final = (4 << 20) + (64 << 10)


@dataclass(frozen=True, slots=True)
class EarlyBytes:
    """What of a frame was written before its put: from `head_bytes` up to `upto`, both multiples of 4096, where `piece`, if there
    is one, is the last of it and may still be under way. `since`: the segment's `times_given_up` of before the first of it."""

    head_bytes: int
    upto: int
    piece: Future[None] | None
    since: int


class BlobIo:
    """The threads, one record page for each, and the queue, which it closes. Event loop only; `shut_down` when nothing is in
    flight."""

    def __init__(self, record_key: bytes, queue: TransferQueue | None) -> None:
        self._record_key = record_key
        self._readers = ThreadPoolExecutor(_READ_THREADS, "nvme-read")
        self.writers = ThreadPoolExecutor(_WRITE_THREADS, "nvme-write")
        self._pages = threading.local()
        self.queue_refusal = "" if queue is not None else why_no_queue()
        """Why there is no queue; empty where there is one."""
        self._queue = queue
        self._queued_writes = QueuedWrites(queue, record_key, self.writers) if queue is not None else None
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def write(
        self,
        segment: SegmentFile,
        record: Record,
        extent: memoryview,
        on_ended: Callable[[Exception | None], None],
        *,
        early: EarlyBytes | None = None,
    ) -> None:
        """Write record page and frame at `record.offset`, and flush. `on_ended` is called later, on the event loop: once durable,
        or with the error of the medium.

        `extent` holds the frame and room up to the next 4096, which is zeroed here; it must stay until then.
        `early`: what of the frame need not be written any more. Nothing stops it. Where this raises, nothing was begun.
        """
        write = BlobWrite(segment, record, extent, tell=partial(self._tell, on_ended), otherwise=self._write_on_thread)
        if (
            self._queued_writes is None
            or early is not None
            or record.frame_bytes > _QUEUED_WRITE_BYTES_MAX
            or not self._queued_writes.begin(write)
        ):
            self._write_on_thread(write, early)

    def write_piece(
        self, segment: SegmentFile, piece: memoryview, offset: int
    ) -> tuple[asyncio.Future[None], Future[None]]:
        """Write aligned bytes of a frame at `offset` of the segment, without a flush: one that begins later covers them. The first
        future is done when no thread uses the piece any more, or has the error of the medium; cancelling it stops nothing. The
        second is for `EarlyBytes`."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        on_ended = partial(settle, written)

        def write() -> None:
            try:
                segment.write([piece], offset)
            except Exception as error:
                self._tell(on_ended, error)
                raise
            self._tell(on_ended, None)

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

        def check_first(page: memoryview) -> None:
            if not is_record_of(
                page,
                self._record_key,
                segment=place.segment,
                offset=place.offset,
                blob_id=blob_id,
                frame_bytes=place.frame_bytes,
            ):
                raise FrameCorruptError("record in front of the frame is not its own", blob_id=blob_id, place=place)

        FrameReading(
            segment,
            place.offset + RECORD_BYTES + origin,
            view,
            progress=progress,
            timeout_seconds=timeout_seconds,
            on_ended=on_ended,
            page=self._page,
            check_first=check_first if whole else None,
            executor=self._readers,
            queue=self._queue,
        ).start()

    def shut_down(self, *, wait: bool) -> None:
        """End the threads and the queue. `wait` only when nothing can be stuck in the kernel; what is, is left behind."""
        self._readers.shutdown(wait=wait)
        self.writers.shutdown(wait=wait)
        if self._queue is None:
            return
        if wait:
            self._queue.close()
        else:
            self._queue.abandon()

    def _write_on_thread(self, write: BlobWrite, early: EarlyBytes | None = None) -> None:
        self.writers.submit(self._write, write, early)

    def _write(self, write: BlobWrite, early: EarlyBytes | None) -> None:
        flushes = write.segment.flushes
        since = flushes.times_given_up if early is None else early.since
        try:
            self._write_extent(write.segment, write.record, write.extent, early)
        except Exception as error:  # noqa: BLE001 - a put waits for this thread: whatever ended it must reach it
            write.tell(error)
        else:
            flushes.request(write.tell, since=since)

    def _write_extent(self, segment: SegmentFile, record: Record, extent: memoryview, early: EarlyBytes | None) -> None:
        length = padded(record.frame_bytes)
        extent[record.frame_bytes : length] = bytes(length - record.frame_bytes)
        first = length
        page = self._page()
        encode_record(record, self._record_key, page)
        if early is not None:
            first = early.head_bytes
            if early.piece is not None:
                early.piece.result()  # on a thread already, since threads take jobs in turn
            if early.upto < length:
                segment.write([extent[early.upto : length]], record.offset + RECORD_BYTES + early.upto)
        # In one call: pieces of 8 MiB, one after the other, took 6 % longer over 32 MiB.
        segment.write([page, extent[:first]], record.offset)

    def _tell(self, on_ended: Callable[[Exception | None], None], error: Exception | None) -> None:
        """Tell on the event loop, from any thread, how something ended: None for done, or what went wrong."""
        told = unavailable(error, "segment cannot be written") if isinstance(error, OSError) else error
        if threading.get_ident() == self._loop_thread:
            on_ended(told)
        else:
            self._loop.call_soon_threadsafe(on_ended, told)

    def _page(self) -> memoryview:
        """Room for one record page, the calling thread's own, page-aligned as O_DIRECT wants it."""
        page: memoryview | None = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = memoryview(mmap.mmap(-1, RECORD_BYTES))
        return page


def settle(future: asyncio.Future[None], error: Exception | None) -> None:
    """End a future that is not done yet."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
