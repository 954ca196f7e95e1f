"""Fakes that several folders of tests share: a clock turned by hand, tiers that keep, record or fail on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from kvobj.arena import Arena, PinnedFrame, Progress
from kvobj.errors import InvalidRangeError
from kvobj.ids import BlobId
from kvobj.tiers.protocol import BlobNames, ByteRange, Tier, TierUsage


class ManualClock:
    """A `Clock` that stands still until it is advanced; wall time can be set apart from monotonic time."""

    def __init__(self, *, now_ms: int = 1_700_000_000_000, monotonic: float = 1000.0) -> None:
        self._now_ms = now_ms
        self._monotonic = monotonic

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._now_ms += round(seconds * 1000)
        self._monotonic += seconds

    def jump_wall(self, seconds: float) -> None:
        self._now_ms += round(seconds * 1000)


class DictTier:
    """A tier in a dict of pinned frames. `capacity_bytes` is only reported. With `fill_gates`, a get hands out a copy
    that is still filling: each gate lets one more of as many equal pieces come."""

    def __init__(self, arena: Arena, *, name: str = "dict", capacity_bytes: int = 1 << 40) -> None:
        self.name = name
        self.frames: dict[BlobId, PinnedFrame] = {}
        self.fill_gates: Sequence[asyncio.Event] | None = None
        self.fill_error: Exception | None = None
        self._arena = arena
        self._capacity_bytes = capacity_bytes
        self._fills: set[asyncio.Task[None]] = set()

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        held = self.frames.get(blob_id)
        if held is None:
            return None
        start, stop = (0, held.frame_bytes) if byte_range is None else (byte_range.start, byte_range.stop)
        if stop > held.frame_bytes:
            raise InvalidRangeError("past the end of the frame", stop=stop, frame_bytes=held.frame_bytes)
        if self.fill_gates is not None:
            return await self._filling(held, start, stop)
        return PinnedFrame(
            held.pin.share(), frame_bytes=held.frame_bytes, start=start, size=stop - start, tier=self.name
        )

    async def _filling(self, held: PinnedFrame, start: int, stop: int) -> PinnedFrame:
        assert self.fill_gates is not None
        origin = start // 4096 * 4096
        total = stop - origin
        pin = await self._arena.reserve(max(total, 1), timeout_seconds=5)
        progress = Progress(total)
        source = held.share()
        target = pin.share()

        async def fill(gates: Sequence[asyncio.Event], error: Exception | None) -> None:
            try:
                for number, gate in enumerate(gates, start=1):
                    await gate.wait()
                    end = total * number // len(gates)
                    target.view[progress.filled : end] = source.view[origin + progress.filled : origin + end]
                    if error is not None and number == len(gates):
                        progress.fail(error)
                    else:
                        progress.advance(end)
            finally:
                source.release()
                target.release()

        task = asyncio.create_task(fill(self.fill_gates, self.fill_error))
        self._fills.add(task)
        task.add_done_callback(self._fills.discard)
        return PinnedFrame(
            pin,
            frame_bytes=held.frame_bytes,
            start=start,
            size=stop - start,
            progress=progress,
            tier=self.name,
            origin=origin,
        )

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        del names
        assert frame.is_whole
        if blob_id not in self.frames:
            self.frames[blob_id] = PinnedFrame(frame.pin.share(), frame_bytes=frame.frame_bytes, tier=self.name)

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        return [blob_id for blob_id in blob_ids if blob_id not in self.frames]

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        for blob_id in blob_ids:
            held = self.frames.pop(blob_id, None)
            if held is not None:
                held.release()

    async def scan(self) -> AsyncIterator[BlobId]:
        for blob_id in sorted(self.frames):
            yield blob_id

    async def usage(self) -> TierUsage:
        used_bytes = sum(frame.frame_bytes for frame in self.frames.values())
        return TierUsage(self._capacity_bytes, used_bytes, len(self.frames), "dict")

    async def aclose(self) -> None:
        for task in tuple(self._fills):
            task.cancel()
        await asyncio.gather(*self._fills, return_exceptions=True)
        for held in self.frames.values():
            held.release()
        self.frames.clear()

    async def raw_read(self, blob_id: BlobId) -> bytes | None:
        held = self.frames.get(blob_id)
        return None if held is None else bytes(held.view)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong at one call: it waits for `delay`, then raises `error`; or a get's frame, already read, is
    changed by `spoil` and held back until `answer_delay`."""

    delay: asyncio.Event | None = None
    answer_delay: asyncio.Event | None = None
    error: Exception | None = None
    spoil: Callable[[memoryview], None] | None = None


def flip(offset: int, mask: int = 1) -> Callable[[memoryview], None]:
    """Spoil what is read by flipping the bits of `mask` in its byte at `offset`; a read that ends before is left alone."""

    def spoil(view: memoryview) -> None:
        if offset < len(view):
            view[offset] ^= mask

    return spoil


def truncate(length: int) -> Callable[[memoryview], None]:
    """Spoil a frame by losing what is past `length` bytes: zeros, as a hole in a file reads."""

    def spoil(view: memoryview) -> None:
        view[length:] = bytes(len(view) - length)

    return spoil


class _Forwarding:
    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        return await self.inner.get(blob_id, byte_range)

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        await self.inner.put(blob_id, frame, names)

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        return await self.inner.missing(blob_ids)

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        await self.inner.delete(blob_ids)

    def scan(self) -> AsyncIterator[BlobId]:
        return self.inner.scan()

    async def usage(self) -> TierUsage:
        return await self.inner.usage()

    async def aclose(self) -> None:
        await self.inner.aclose()


class FaultyTier(_Forwarding):
    """Forwards to `inner`, but for the calls that `faults` names: (method, n) is the nth call of that method, from 1.

    (method, 0) is every call that is not named by its number. A frame is spoiled in a copy, so what `inner` holds
    stays right.
    """

    def __init__(self, inner: Tier, arena: Arena) -> None:
        super().__init__(inner)
        self.faults: dict[tuple[str, int], Fault] = {}
        self.calls: Counter[str] = Counter()
        self.answer_held = asyncio.Event()
        self._arena = arena

    async def _meet(self, method: str) -> Fault:
        self.calls[method] += 1
        fault = self.faults.get((method, self.calls[method])) or self.faults.get((method, 0)) or Fault()
        if fault.delay is not None:
            await fault.delay.wait()
        if fault.error is not None:
            raise fault.error
        return fault

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        fault = await self._meet("get")
        frame = await self.inner.get(blob_id, byte_range)
        if fault.answer_delay is not None:
            self.answer_held.set()
            await fault.answer_delay.wait()
        if frame is None or fault.spoil is None:
            return frame
        try:
            await frame.complete()
            return await self._spoiled(frame, fault.spoil)
        finally:
            frame.release()

    async def _spoiled(self, frame: PinnedFrame, spoil: Callable[[memoryview], None]) -> PinnedFrame:
        pin = await self._arena.reserve(max(frame.size, 1), timeout_seconds=5)
        copy = PinnedFrame(
            pin,
            frame_bytes=frame.frame_bytes,
            start=frame.start,
            size=frame.size,
            tier=frame.tier,
            origin=frame.start,
        )
        copy.writable[:] = frame.view
        spoil(copy.writable)
        return copy

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        await self._meet("put")
        await self.inner.put(blob_id, frame, names)

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        await self._meet("missing")
        return await self.inner.missing(blob_ids)

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        await self._meet("delete")
        await self.inner.delete(blob_ids)


class RecordingTier(_Forwarding):
    """Forwards to `inner` and notes each call that names blobs as (method, blob ids), in order."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, tuple[BlobId, ...]]] = []

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        self.calls.append(("get" if byte_range is None else "get range", (blob_id,)))
        return await self.inner.get(blob_id, byte_range)

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        self.calls.append(("put", (blob_id,)))
        await self.inner.put(blob_id, frame, names)

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        self.calls.append(("missing", tuple(blob_ids)))
        return await self.inner.missing(blob_ids)

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        self.calls.append(("delete", tuple(blob_ids)))
        await self.inner.delete(blob_ids)

    def count(self, method: str) -> int:
        """How often the method was called."""
        return sum(called == method for called, _ in self.calls)
