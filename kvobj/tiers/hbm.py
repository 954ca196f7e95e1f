"""The hbm tier: frames in device memory, each in an extent of exactly its size, for readers on the device.

A put copies a frame out of the arena, a get copies it back, both beside the event loop; `get_tensor` hands out the plain bytes
where they lie. It is a cache: what it holds is elsewhere too, it makes room by forgetting what was used least recently, and
nothing of it outlives the process. Device memory is trusted as host memory is (ECC): what comes back is not hashed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from kvobj.arena import Arena, Pin, PinnedFrame
from kvobj.codec.frame import CODEC_RAW, MAX_HEAD_BYTES, raw_payload_offset
from kvobj.errors import CorruptionError, InvalidRangeError, StoreFullError, TierUnavailableError
from kvobj.gpu.codec_copies import DeviceCodecs, FrameToDecode
from kvobj.gpu.copies import Copies
from kvobj.gpu.device import Device
from kvobj.gpu.lane import StuckError
from kvobj.gpu.pool import DevicePin, DevicePool
from kvobj.gpu.registered import RegisteredMemory
from kvobj.gpu.tensors import DeviceChunk
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.policy import EvictionPolicy
from kvobj.tensors.frame import TensorFrame
from kvobj.tiers.coded_frames import head_of
from kvobj.tiers.protocol import BlobNames, ByteRange, TierUsage

_RESERVE_SECONDS: Final = 2.0


class _Entry:
    """One blob held. `pin` is the tier's own. Of a raw frame `plain` says where its plain bytes lie, of a tensor frame `tensor` how
    they are got; of other frames both are None."""

    __slots__ = ("frame_bytes", "pin", "plain", "tensor")

    def __init__(
        self, pin: DevicePin, frame_bytes: int, plain: tuple[int, int] | None, tensor: TensorFrame | None
    ) -> None:
        self.pin = pin
        self.frame_bytes = frame_bytes
        self.plain = plain
        self.tensor = tensor


class _Putting:
    """A put that is under way; void once its blob was deleted."""

    __slots__ = ("is_void",)

    def __init__(self) -> None:
        self.is_void = False


class HbmTier:
    """See `kvobj.tiers.protocol.Tier`. It owns the device and everything on it, and closes them.

    Frames are held as they are put. `codecs` decodes those of tensors on the device when they are asked for there. A device that
    fails, or does not answer, is `TierUnavailableError`; memory that it may still use is never used again then.
    """

    def __init__(
        self,
        arena: Arena,
        device: Device,
        pool: DevicePool,
        *,
        copies: Copies,
        registered: RegisteredMemory,
        codecs: DeviceCodecs,
        policy: EvictionPolicy,
        metrics: Metrics,
        reserve_timeout_seconds: float = _RESERVE_SECONDS,
    ) -> None:
        self._arena = arena
        self._device = device
        self._pool = pool
        self._copies = copies
        self._registered = registered
        self._policy = policy
        self._codecs = codecs
        self._reserve_timeout_seconds = reserve_timeout_seconds
        self._entries: dict[BlobId, _Entry] = {}
        self._putting: dict[BlobId, set[_Putting]] = {}
        # Pins on memory of which nobody knows whether a device that hangs still uses it.
        self._abandoned: list[Pin | DevicePin] = []
        self._is_closed = False
        self._evicted = metrics.counter("kvobj_hbm_evicted_blobs", "blobs evicted from the hbm tier")
        self._handed_out = metrics.counter("kvobj_hbm_tensors", "chunks handed out as device memory")
        usage = pool.usage
        metrics.gauge_of("kvobj_hbm_reserved_bytes", "device memory in extents", lambda: usage().reserved_bytes)
        metrics.gauge_of(
            "kvobj_hbm_fragmentation", "part of the free device memory that one extent cannot have",
            lambda: usage().fragmentation,
        )  # fmt: skip
        metrics.gauge_of(
            "kvobj_hbm_pinned_arena_bytes", "bytes of the arena pinned for the device",
            lambda: registered.registered_bytes,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """`hbm`."""
        return "hbm"

    # -- the tier protocol -----------------------------------------------------------------------------------------------
    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`. Copied into an extent of its own; complete when this returns. `BusyError` where the arena has no room."""
        entry = self._entries.get(blob_id)
        if entry is None:
            return None
        start, stop = (0, entry.frame_bytes) if byte_range is None else (byte_range.start, byte_range.stop)
        if stop > entry.frame_bytes:
            raise InvalidRangeError("past the end of the frame", stop=stop, frame_bytes=entry.frame_bytes)
        self._policy.touch(blob_id)
        pin = entry.pin.share()
        try:
            size = stop - start
            extent = await self._arena.reserve(max(1, size), timeout_seconds=self._reserve_timeout_seconds)
            self._registered.note(self._arena.region_memory(extent.extent.region))
            try:
                await self._copies.to_host(extent.view[:size], pin.address + start)
            except StuckError as error:
                self._abandoned += (extent, pin.share())
                raise TierUnavailableError("the device does not answer", blob_id=blob_id) from error
            except BaseException:
                extent.release()
                raise
            return PinnedFrame(
                extent, frame_bytes=entry.frame_bytes, start=start, size=size, tier=self.name, origin=start
            )
        finally:
            pin.release()

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`. `StoreFullError` where not even forgetting all that nobody uses makes room."""
        del names
        await frame.complete()
        if not frame.is_whole:
            raise ValueError("only a whole frame can be put")
        if blob_id in self._entries:
            self._policy.touch(blob_id)
            return
        putting = _Putting()
        self._putting.setdefault(blob_id, set()).add(putting)
        try:
            entry = await self._copied_in(blob_id, frame)
        finally:
            self._putting[blob_id].discard(putting)
            if not self._putting[blob_id]:
                del self._putting[blob_id]
        if putting.is_void or self._is_closed or blob_id in self._entries:
            entry.pin.release()
            return
        self._entries[blob_id] = entry
        self._policy.insert(blob_id, entry.pin.extent.length)

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """See `Tier.missing`."""
        return [blob_id for blob_id in blob_ids if blob_id not in self._entries]

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`. Puts that are under way come to nothing."""
        for blob_id in blob_ids:
            for putting in self._putting.get(blob_id, ()):
                putting.is_void = True
        self._forget([blob_id for blob_id in blob_ids if blob_id in self._entries])

    async def scan(self) -> AsyncIterator[BlobId]:
        """See `Tier.scan`."""
        for blob_id in sorted(self._entries):
            if blob_id in self._entries:
                yield blob_id

    async def usage(self) -> TierUsage:
        """See `Tier.usage`. Used are extents, those that readers still hold too."""
        pool = self._pool.usage()
        return TierUsage(
            capacity_bytes=pool.capacity_bytes,
            used_bytes=pool.reserved_bytes,
            blobs=len(self._entries),
            mode=self._device.kind,
        )

    async def aclose(self) -> None:
        """See `Tier.aclose`. Nobody may use a chunk of it any more."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.to_thread(self._finish_work)
        self._forget(list(self._entries))
        await asyncio.to_thread(self._close_device)

    # -- for readers on the device ---------------------------------------------------------------------------------------
    async def get_tensor(self, blob_id: BlobId) -> DeviceChunk | None:
        """The blob's plain bytes on the device, pinned for the caller, who releases it; None where they are not here in a form
        that a device reads.

        Of a raw frame without a copy; a tensor frame is decoded into an extent of its own. For reading alone.
        `CorruptionError` where it does not decode; `StoreFullError`.
        """
        entry = self._entries.get(blob_id)
        if entry is None:
            return None
        self._policy.touch(blob_id)
        if entry.plain is not None:
            offset, size_bytes = entry.plain
            chunk = DeviceChunk(entry.pin.share(), self._device, offset=offset, size_bytes=size_bytes)
        elif entry.tensor is not None:
            chunk = await self._decoded(blob_id, entry.pin, entry.tensor)
        else:
            return None
        self._handed_out.inc()
        return chunk

    # -- copies ----------------------------------------------------------------------------------------------------------
    async def _copied_in(self, blob_id: BlobId, frame: PinnedFrame) -> _Entry:
        self._registered.note(self._arena.region_memory(frame.pin.extent.region))
        head = head_of(frame.view[:MAX_HEAD_BYTES], frame.frame_bytes)
        plain = (raw_payload_offset(head.plain_bytes), head.plain_bytes) if head.codec == CODEC_RAW else None
        pin = self._reserved(frame.frame_bytes)
        held = frame.share()
        try:
            await self._copies.to_device(pin.address, frame.view)
        except StuckError as error:
            self._abandoned += (pin, held.pin.share())
            raise TierUnavailableError("the device does not answer", blob_id=blob_id) from error
        except BaseException:
            pin.release()
            raise
        finally:
            held.release()
        return _Entry(pin, frame.frame_bytes, plain, head.tensor)

    async def _decoded(self, blob_id: BlobId, frame: DevicePin, head: TensorFrame) -> DeviceChunk:
        held = frame.share()
        try:
            into = self._reserved(head.plain_bytes)
            try:
                (problem,) = await self._codecs.decode([FrameToDecode(None, head, into.address, at=held.address)])
            except StuckError as error:
                self._abandoned += (into, held.share())
                raise TierUnavailableError("the device does not answer", blob_id=blob_id) from error
            except BaseException:
                into.release()
                raise
        finally:
            held.release()
        if problem is not None:
            into.release()
            raise CorruptionError("a frame in device memory does not decode", blob_id=blob_id) from problem
        return DeviceChunk(into, self._device)

    # -- room ------------------------------------------------------------------------------------------------------------
    def _reserved(self, size_bytes: int) -> DevicePin:
        """Room, made by forgetting what was used least recently; more and more of it, where the free room is scattered."""
        if self._is_closed:
            raise TierUnavailableError("the tier is closed", tier=self.name)
        needed = size_bytes
        while self._pool.can_ever_hold(size_bytes):
            pin = self._pool.try_reserve(size_bytes)
            if pin is not None:
                return pin
            victims = self._policy.victims(needed, lambda blob_id: self._entries[blob_id].pin.pins == 1)
            if not victims:
                break
            self._evicted.inc(len(victims))
            self._forget(victims)
            needed *= 2
        raise StoreFullError("no room in device memory", size_bytes=size_bytes, tier=self.name)

    def _forget(self, blob_ids: Sequence[BlobId]) -> None:
        for blob_id in blob_ids:
            entry = self._entries.pop(blob_id)
            self._policy.discard(blob_id)
            entry.pin.release()

    def _finish_work(self) -> None:
        self._codecs.close()
        self._copies.close()

    def _close_device(self) -> None:
        self._registered.close()
        self._pool.close()
        self._device.close()
