"""Writes blobs, record page and frame, through the kernel's queue, and flushes for whoever waits for a flush meanwhile.

A write that finds no flush running is flushed with itself; one beside others joins the next group. Either way one flush runs at a
time, as `GroupFlush` has it. What the kernel refuses is left to the caller's threads. Event loop only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from kvobj.tiers.nvme.directory import padded
from kvobj.tiers.nvme.flush import Flushed
from kvobj.tiers.nvme.kernel_queue import Kind, TransferQueue, is_for_threads
from kvobj.tiers.nvme.record import RECORD_BYTES, Record, encode_record
from kvobj.tiers.nvme.segment_file import SegmentFile, is_out_of_room


class BlobWrite:
    """A record page and a frame on their way into a segment. Until `tell` was called `extent`, which holds the frame and room up to
    the next 4096, must stay."""

    __slots__ = ("extent", "kind", "otherwise", "record", "segment", "since", "tell", "wanted")

    def __init__(
        self,
        segment: SegmentFile,
        record: Record,
        extent: memoryview,
        *,
        tell: Callable[[Exception | None], None],
        otherwise: Callable[[BlobWrite], None],
    ) -> None:
        self.segment = segment
        self.record = record
        self.extent = extent
        self.tell = tell
        """Called on any thread, once: when all is durable, or with the error of the medium."""
        self.otherwise = otherwise
        """Called on the event loop in place of `tell` where a thread must do it all."""
        self.wanted = RECORD_BYTES + padded(record.frame_bytes)
        self.kind = Kind.WRITE
        self.since = 0


class QueuedWrites:
    """Writes of one tier. The queue and the threads, on which flushes are led where the kernel refuses them, are the caller's."""

    def __init__(self, queue: TransferQueue, record_key: bytes, threads: Executor) -> None:
        self._queue = queue
        self._record_key = record_key
        self._threads = threads

    def begin(self, write: BlobWrite) -> bool:
        """Begin to write. True: `tell` or `otherwise` will be called, later. False: nothing was begun."""
        segment, record, extent, wanted = write.segment, write.record, write.extent, write.wanted
        slot = self._queue.take() if segment.may_queue(record.offset, wanted, writes=True) else None
        if slot is None:
            return False
        length = wanted - RECORD_BYTES
        extent[record.frame_bytes : length] = bytes(length - record.frame_bytes)
        try:
            encode_record(record, self._record_key, slot.page)
        except ValueError:
            self._queue.give_back(slot)
            return False  # the thread tells of it
        flushes_itself = segment.flushes.begin_alone()
        if flushes_itself:
            write.kind = Kind.WRITE_DURABLY
        write.since = segment.flushes.times_given_up
        error = self._queue.begin(
            slot,
            write.kind,
            segment.descriptor,
            partial(self._written, write),
            view=extent[:length],
            offset=record.offset,
            with_page=True,
        )
        if not error:
            return True
        segment.note_outcome(record.offset, wanted, -error, writes=True)
        if flushes_itself:
            self._lead(segment)
        return False

    def _written(self, write: BlobWrite, result: int) -> None:
        """The kernel is done with a write."""
        segment = write.segment
        flushes_itself = write.kind is Kind.WRITE_DURABLY
        segment.note_outcome(write.record.offset, write.wanted, result, writes=True)
        error: OSError | None = None
        if result != write.wanted:
            if is_for_threads(write.kind, result, write.wanted):
                if flushes_itself:
                    self._lead(segment)
                write.otherwise(write)
                return
            error = OSError(-result, os.strerror(-result))
            if flushes_itself and is_out_of_room(error):
                # Whether it was the write or its flush: whose bytes no flush has covered yet cannot know what became of them.
                segment.flushes.give_up(error)
            else:
                segment.fail()
                if flushes_itself:
                    segment.flushes.fail(error)
        if flushes_itself:
            self._lead(segment)
        if flushes_itself or error is not None:
            write.tell(error)
        elif segment.flushes.join(write.tell, since=write.since):
            self._lead(segment)

    def _lead(self, segment: SegmentFile) -> None:
        """Flush for who waits for it, if anybody does."""
        flushes = segment.flushes
        while group := flushes.next_group():
            if flushes.failed is None:
                slot = self._queue.take()
                flushed = partial(self._flushed, segment, group)
                if slot is None or self._queue.begin(slot, Kind.FLUSH, segment.descriptor, flushed):
                    self._threads.submit(flushes.lead, group)
                return
            flushes.settle(group, flushes.failed)

    def _flushed(self, segment: SegmentFile, group: list[Flushed], result: int) -> None:
        error = OSError(-result, os.strerror(-result)) if result else None
        if error is not None:
            segment.fail()
            segment.flushes.fail(error)
        segment.flushes.settle(group, error)
        self._lead(segment)
