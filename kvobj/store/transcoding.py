"""Makes coded frames of plain ones, for the tiers that hold them so: on the pool, a few at a time, in extents of exact size.

A frame is encoded into scratch memory first, since nobody knows how long it becomes, and then copied into an extent that is as long
as it is. That is what lets a tier hold more chunks; and where the arena is full, an extent of the coded size is found sooner than
one of the worst case.
"""

from __future__ import annotations

import asyncio
import mmap
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvobj.arena import Arena, NamedBucket, Pin, PinnedFrame
from kvobj.codec.frame import MAX_HEAD_BYTES, raw_payload_offset
from kvobj.errors import BusyError, CapacityError, FrameCorruptError
from kvobj.metrics import Metrics
from kvobj.tiers.coded_frames import (
    CodedHead,
    Coding,
    coded_bound,
    demote_coded,
    demoted_bound,
    encode_coded,
    head_of,
    spoken_name,
)
from kvobj.tiers.verified import RunOnPool

CONCURRENT: Final = 2
"""Encodings at a time: scratch memory for as many frames is kept."""
_COPIED_AT_ONCE: Final = 1 << 20
_ROUNDED_TO: Final = 1 << 20
_RESERVE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class CodedFrame:
    """A frame in an extent of its own, which whoever is given it releases; `head` is what its head says."""

    frame: PinnedFrame
    head: CodedHead


class Transcoder:
    """Event-loop-only. `run` is the pool that encodes."""

    def __init__(self, *, arena: Arena, run: RunOnPool, metrics: Metrics) -> None:
        self._arena = arena
        self._run = run
        self._slots = asyncio.Semaphore(CONCURRENT)
        self._scratch: list[mmap.mmap] = []
        self._blobs = metrics.counter(
            "kvobj_transcoded_blobs", "Blobs encoded for a tier, by tier and codec.", ["tier", "codec"]
        )
        self._plain = metrics.counter(
            "kvobj_transcoded_plain_bytes", "Plain bytes of blobs encoded for a tier.", ["tier", "codec"]
        )
        self._coded = metrics.counter(
            "kvobj_transcoded_coded_bytes", "Bytes that blobs encoded for a tier came to.", ["tier", "codec"]
        )
        self._refused = metrics.counter(
            "kvobj_transcoding_skipped", "Blobs that stayed plain, by tier and reason (gain, room).", ["tier", "reason"]
        )

    async def encode(
        self, frame: PinnedFrame, coding: Coding, *, tier: str, bucket: NamedBucket | None = None, may_wait: bool = True
    ) -> CodedFrame | None:
        """The blob of a whole, sealed `raw` frame as the coding says; None where that is no smaller, so that the frame is to be
        used as it is. `bucket`: whose own regions it goes to, if any. `CapacityError`: no room for it (`may_wait`: in time).
        `FrameCorruptError`: the bytes that a lossy frame is asked of are not those of their digest."""
        head = head_of(frame.view[:MAX_HEAD_BYTES], frame.frame_bytes)
        offset = raw_payload_offset(head.plain_bytes)
        plain = frame.view[offset : offset + head.plain_bytes]
        async with self._slots:
            scratch = self._take(coded_bound(coding, head.plain_bytes))
            try:
                view = memoryview(scratch)
                length = await self._run(_encode, plain, view, coding, head.digest)
                # A lossy frame is wanted for what it is, however long; of lossless ones the smaller.
                if length >= frame.frame_bytes and not coding.is_lossy:
                    self._refused.labels(tier, "gain").inc()
                    return None
                coded = await self._placed(view[:length], frame.tier, tier, bucket, may_wait=may_wait)
            finally:
                self._scratch.append(scratch)
        self._count(coded, tier)
        return coded

    async def demote(self, frame: PinnedFrame, codec: str, *, tier: str, may_wait: bool = True) -> CodedFrame:
        """The blob of a whole frame in a coarser codec of the same ladder. `CapacityError` as `encode`; `FrameCorruptError`;
        `InvalidRequestError` where that codec is not on its ladder."""
        async with self._slots:
            scratch = self._take(demoted_bound(head_of(frame.view[:MAX_HEAD_BYTES], frame.frame_bytes), codec))
            try:
                view = memoryview(scratch)
                length = await self._run(demote_coded, frame.view, view, codec)
                coded = await self._placed(view[:length], frame.tier, tier, None, may_wait=may_wait)
            finally:
                self._scratch.append(scratch)
        self._count(coded, tier)
        return coded

    async def _placed(
        self, encoded: memoryview, held_in: str, tier: str, bucket: NamedBucket | None, *, may_wait: bool
    ) -> CodedFrame:
        """What lies in scratch memory, in an extent of its own."""
        try:
            pin = await self._reserve(len(encoded), bucket, may_wait=may_wait)
        except CapacityError:
            self._refused.labels(tier, "room").inc()
            raise
        try:
            await self._run(_copy, encoded, pin.view)
            coded = PinnedFrame(pin, frame_bytes=len(encoded), tier=held_in)
            return CodedFrame(coded, head_of(coded.view[:MAX_HEAD_BYTES], len(encoded)))
        except BaseException:
            pin.release()
            raise

    def _count(self, coded: CodedFrame, tier: str) -> None:
        labels = (tier, spoken_name(coded.head.codec))
        self._blobs.labels(*labels).inc()
        self._plain.labels(*labels).inc(coded.head.plain_bytes)
        self._coded.labels(*labels).inc(coded.frame.frame_bytes)

    async def _reserve(self, length: int, bucket: NamedBucket | None, *, may_wait: bool) -> Pin:
        if may_wait:
            return await self._arena.reserve(length, timeout_seconds=_RESERVE_SECONDS, bucket=bucket)
        pin = self._arena.try_reserve(length, bucket=bucket)
        if pin is None:
            raise BusyError("no room for a coded frame", frame_bytes=length)
        return pin

    def _take(self, size_bytes: int) -> mmap.mmap:
        scratch = self._scratch.pop() if self._scratch else None
        if scratch is None or len(scratch) < size_bytes:
            scratch = mmap.mmap(-1, -(-size_bytes // _ROUNDED_TO) * _ROUNDED_TO)
        return scratch


def _encode(plain: memoryview, into: memoryview, coding: Coding, digest: bytes) -> int:
    # A lossless frame carries the digest along, and whoever decodes it asks for these bytes. A lossy one vouches for others: what
    # memory holds, perhaps since before a restart, has to be what was put.
    if coding.is_lossy and blake3(plain, max_threads=1).digest() != digest:
        raise FrameCorruptError("a chunk in memory is not what was put", codec=coding.codec)
    return encode_coded(plain, into, coding, digest=digest)


def _copy(source: memoryview, into: memoryview) -> None:
    """In pieces: a thread that copies holds the interpreter's lock for each."""
    for start in range(0, len(source), _COPIED_AT_ONCE):
        stop = min(start + _COPIED_AT_ONCE, len(source))
        into[start:stop] = source[start:stop]
