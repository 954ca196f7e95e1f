"""The hbm tier: frames in device memory, each in an extent of exactly its size, for readers on the device.

A put copies a frame out of the arena, and encodes it there where its namespace says so; a get copies it back as it was put; both
beside the event loop. `get_tensor` hands out the plain bytes where they lie. It is a cache: what it holds is elsewhere too, it
makes room by forgetting what was used least recently, and nothing of it outlives the process. Device memory is trusted as host
memory is (ECC): what comes back is not hashed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from kvobj.arena import Arena, Pin, PinnedFrame
from kvobj.codec.frame import CODEC_RAW, MAX_HEAD_BYTES, raw_payload_offset
from kvobj.errors import (
    CorruptionError,
    InvalidRangeError,
    InvalidRequestError,
    StoreFullError,
    TierUnavailableError,
    UnavailableError,
)
from kvobj.gpu.codec_copies import ChunkToEncode, DeviceCodecs, FrameToDecode
from kvobj.gpu.copies import Copies
from kvobj.gpu.device import Device
from kvobj.gpu.lane import StuckError
from kvobj.gpu.pins import MemoryPin
from kvobj.gpu.pool import DevicePin, DevicePool
from kvobj.gpu.registered import RegisteredMemory
from kvobj.gpu.tensors import DeviceChunk
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.policy import EvictionPolicy
from kvobj.tensors.frame import TensorFrame, tensor_frame_bound
from kvobj.tiers.coded_blobs import CodecTotals, CodedBlob
from kvobj.tiers.coded_frames import Coding, head_of
from kvobj.tiers.protocol import BlobNames, ByteRange, TierUsage

_RESERVE_SECONDS: Final = 2.0


class _Entry:
    """One blob held. `pin` is the tier's own. Of a raw frame `plain` says where its plain bytes lie, of a tensor frame `tensor` how
    they are got; of other frames both are None. `raw_head` is there where the blob was put raw and lies coded: what stands in front
    of its plain bytes."""

    __slots__ = ("frame_bytes", "pin", "plain", "raw_head", "tensor")

    def __init__(
        self,
        pin: DevicePin,
        frame_bytes: int,
        plain: tuple[int, int] | None,
        tensor: TensorFrame | None,
        raw_head: bytes | None = None,
    ) -> None:
        self.pin = pin
        self.frame_bytes = frame_bytes
        self.plain = plain
        self.tensor = tensor
        self.raw_head = raw_head

    @property
    def coded(self) -> CodedBlob | None:
        """How the blob lies, where that is otherwise than it was put."""
        if self.tensor is None or self.raw_head is None:
            return None
        return CodedBlob(self.tensor.codec, self.tensor.plain_bytes, self.frame_bytes)


class _Putting:
    """A put that is under way; void once its blob was deleted."""

    __slots__ = ("is_void",)

    def __init__(self) -> None:
        self.is_void = False


CodingOf: TypeAlias = Callable[[BlobId], Awaitable[Coding | None]]
"""How a blob is to lie here; None: as it is."""


async def _as_it_is(_: BlobId) -> Coding | None:
    return None


class HbmTier:
    """See `kvobj.tiers.protocol.Tier`. It owns the device and everything on it, and closes them.

    Frames are held as they are put, but for raw ones of blobs of which `coding_of` says that they are to lie coded, without loss:
    these are encoded on the device, and `get` gives the raw frame again. `codecs` also decodes tensors on the device when they are
    asked for there. A device that fails, or does not answer, is `TierUnavailableError`; memory that it may still use is never used
    again then.
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
        coding_of: CodingOf = _as_it_is,
        reserve_timeout_seconds: float = _RESERVE_SECONDS,
    ) -> None:
        self._arena = arena
        self._device = device
        self._pool = pool
        self._copies = copies
        self._registered = registered
        self._policy = policy
        self._codecs = codecs
        self._coding_of = coding_of
        self.coded_totals = CodecTotals()
        self._reserve_timeout_seconds = reserve_timeout_seconds
        self._entries: dict[BlobId, _Entry] = {}
        self._putting: dict[BlobId, set[_Putting]] = {}
        # Pins on memory of which nobody knows whether a device that hangs still uses it.
        self._abandoned: list[Pin | MemoryPin | memoryview] = []
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
        whole_bytes = entry.frame_bytes
        if entry.raw_head is not None and entry.tensor is not None:
            whole_bytes = len(entry.raw_head) + entry.tensor.plain_bytes
        start, stop = (0, whole_bytes) if byte_range is None else (byte_range.start, byte_range.stop)
        if stop > whole_bytes:
            raise InvalidRangeError("past the end of the frame", stop=stop, frame_bytes=whole_bytes)
        self._policy.touch(blob_id)
        if entry.raw_head is not None and entry.tensor is not None:
            return await self._get_coded(blob_id, entry.pin, entry.tensor, entry.raw_head, ByteRange(start, stop))
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

    async def _get_coded(
        self, blob_id: BlobId, pin: DevicePin, tensor: TensorFrame, head: bytes, asked: ByteRange
    ) -> PinnedFrame:
        """A part of the raw frame of a blob that lies coded: its head, then what is decoded on the device."""
        try:
            chunk = await self._decoded(blob_id, pin, tensor)
        except CorruptionError:
            self._forget([blob_id] if blob_id in self._entries else [])
            raise
        try:
            size, head_end = asked.stop - asked.start, min(max(len(head) - asked.start, 0), asked.stop - asked.start)
            extent = await self._arena.reserve(max(1, size), timeout_seconds=self._reserve_timeout_seconds)
            try:
                extent.view[:head_end] = head[asked.start : asked.start + head_end]
                if head_end < size:
                    self._registered.note(self._arena.region_memory(extent.extent.region))
                    first = chunk.address + asked.start + head_end - len(head)
                    await self._copies.to_host(extent.view[head_end:size], first)
            except StuckError as error:
                self._abandoned += (extent, chunk.pin.share())
                raise TierUnavailableError("the device does not answer", blob_id=blob_id) from error
            except BaseException:
                extent.release()
                raise
            return PinnedFrame(
                extent,
                frame_bytes=len(head) + tensor.plain_bytes,
                start=asked.start,
                size=size,
                tier=self.name,
                origin=asked.start,
            )
        finally:
            chunk.release()

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
        if entry.coded is not None:
            self.coded_totals.add(entry.coded)
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
        raw = _Entry(pin, frame.frame_bytes, plain, head.tensor)
        if plain is None:
            return raw
        try:
            coded = await self._coded(blob_id, frame, pin, plain, head.digest)
        except BaseException:
            pin.release()
            raise
        if coded is None:
            return raw
        pin.release()
        return coded

    async def _coded(
        self, blob_id: BlobId, frame: PinnedFrame, raw: DevicePin, plain: tuple[int, int], digest: bytes
    ) -> _Entry | None:
        """The blob of a raw frame, which lies in device memory, as its namespace wants it there; None where it is to stay."""
        coding = await self._coding_of(blob_id)
        if coding is None or coding.form is None or coding.is_lossy or coding.form.plain_bytes != plain[1]:
            return None
        into = memoryview(bytearray(tensor_frame_bound(coding.form)))
        chunk = ChunkToEncode(
            raw.address + plain[0], coding.form, coding.codec, into, digest=digest, fingerprint=coding.fingerprint
        )
        try:
            (length,) = await self._codecs.encode([chunk])
        except StuckError as error:
            self._abandoned += (raw.share(), into)
            raise TierUnavailableError("the device does not answer", blob_id=blob_id) from error
        except (UnavailableError, InvalidRequestError):
            return None
        if length >= frame.frame_bytes:
            return None
        try:
            pin = self._reserved(length)
        except StoreFullError:
            return None
        try:
            await self._copies.to_device(pin.address, into[:length])
            tensor = head_of(into[:MAX_HEAD_BYTES], length).tensor
        except StuckError as error:
            self._abandoned += (pin, into)
            raise TierUnavailableError("the device does not answer", blob_id=blob_id) from error
        except BaseException:
            pin.release()
            raise
        return _Entry(pin, length, None, tensor, bytes(frame.view[: plain[0]]))

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
            if entry.coded is not None:
                self.coded_totals.add(entry.coded, times=-1)
            entry.pin.release()

    def _finish_work(self) -> None:
        self._codecs.close()
        self._copies.close()

    def _close_device(self) -> None:
        self._registered.close()
        self._pool.close()
        self._device.close()
