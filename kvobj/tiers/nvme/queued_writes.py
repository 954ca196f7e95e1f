"""Writes blobs, record page and frame, through the kernel's queue, and flushes for whoever waits for a flush meanwhile.

A write that finds no flush running is flushed with itself; one beside others joins the next group. Either way one flush runs at a
time, as `GroupFlush` has it. What the kernel refuses is left to the caller's threads. Event loop only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from kvobj.tiers.nvme.directory import padded
from kvobj.tiers.nvme.flush import Flushed
from kvobj.tiers.nvme.kernel_queue import Kind, TransferQueue, is_for_threads
from kvobj.tiers.nvme.record import RECORD_BYTES, Record, encode_record
from kvobj.tiers.nvme.segment_file import SegmentFile


@dataclass(frozen=True, slots=True)
class _Write:
    """One write under way: where, how many bytes, and as `QueuedWrites.begin`."""

    segment: SegmentFile
    offset: int
    wanted: int
    kind: Kind
    tell: Flushed
    otherwise: Callable[[], None]


class QueuedWrites:
    """Writes of one tier. The queue and the threads, on which flushes are led where the kernel refuses them, are the caller's."""

    def __init__(self, queue: TransferQueue, record_key: bytes, threads: Executor) -> None:
        self._queue = queue
        self._record_key = record_key
        self._threads = threads

    def begin(
        self,
        segment: SegmentFile,
        record: Record,
        extent: memoryview,
        *,
        tell: Flushed,
        otherwise: Callable[[], None],
    ) -> bool:
        """Begin to write record page and frame, whose padding is zeroed. True: either `tell` is called, on any thread, once all is
        durable or with the error of the medium, or `otherwise`, on the event loop, where a thread must do it all. Until then the
        extent must stay. False: nothing was begun."""
        length = padded(record.frame_bytes)
        slot = self._queue.take() if segment.may_queue(record.offset, RECORD_BYTES + length, writes=True) else None
        if slot is None:
            return False
        extent[record.frame_bytes : length] = bytes(length - record.frame_bytes)
        try:
            encode_record(record, self._record_key, slot.page)
        except ValueError:
            self._queue.give_back(slot)
            return False  # the thread tells of it
        flushes_itself = segment.flushes.begin_alone()
        kind = Kind.WRITE_DURABLY if flushes_itself else Kind.WRITE
        error = self._queue.begin(
            slot,
            kind,
            segment.descriptor,
            partial(self._written, _Write(segment, record.offset, RECORD_BYTES + length, kind, tell, otherwise)),
            view=extent[:length],
            offset=record.offset,
            with_page=True,
        )
        if not error:
            return True
        segment.note_outcome(record.offset, RECORD_BYTES + length, -error, writes=True)
        if flushes_itself:
            self._lead(segment)
        return False

    def _written(self, write: _Write, result: int) -> None:
        """The kernel is done with a write."""
        segment = write.segment
        flushes_itself = write.kind is Kind.WRITE_DURABLY
        must_be_redone = is_for_threads(write.kind, result, write.wanted)
        error: OSError | None = None
        segment.note_outcome(write.offset, write.wanted, result, writes=True)
        if result != write.wanted and not must_be_redone:
            error = OSError(-result, os.strerror(-result))
            segment.fail()
        if flushes_itself:
            if error is not None:
                segment.flushes.fail(error)  # nobody knows whether it was the write or the flush
            self._lead(segment)
        if must_be_redone:
            write.otherwise()
        elif flushes_itself or error is not None:
            write.tell(error)
        elif segment.flushes.join(write.tell):
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
