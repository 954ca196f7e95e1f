"""A tier that holds some of its blobs in another codec, seen as one that holds plain frames.

A get of a blob that lies plain is the inner tier's, at the price of one look-up. One that lies coded is read whole, decoded on a
pool into an extent of its own, checked against its digest, and handed out as a sealed `raw` frame; of layer-major tensors a range
decodes the layers alone that it touches. Callers who want such a blob at the same time share one decoding. What does not decode
is a miss, counted and told to `on_corrupt`, or raised where nobody listens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final, Protocol, TypeAlias

from kvobj.arena import Arena, PinnedFrame
from kvobj.codec.frame import CODEC_RAW, MAX_HEAD_BYTES, raw_frame_bytes, raw_payload_offset
from kvobj.errors import FrameCorruptError, InvalidRangeError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.tensors.frame import TensorFrame
from kvobj.tensors.profiles import Profile
from kvobj.tiers.coded_blobs import CodedBlob, CodedBlobs
from kvobj.tiers.coded_frames import (
    CodedHead,
    decode_coded,
    decode_coded_layers,
    head_of,
    layers_over,
)
from kvobj.tiers.decode_turns import DecodeTurns
from kvobj.tiers.forwarding import ForwardingTier
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import BlobNames, ByteRange, Tier
from kvobj.tiers.single_flight import SingleFlight
from kvobj.tiers.verified import RunOnPool

_HEADS_KEPT: Final = 256
_RESERVE_SECONDS: Final = 2.0


class CodedIndex(Protocol):
    """Who knows which blobs of a tier lie coded."""

    def find(self, blob_id: bytes) -> CodedBlob | None:
        """How the blob lies, or None where it lies plain or not at all. Cheap: it is asked at every get."""
        ...


ProfileOf: TypeAlias = Callable[[bytes], Awaitable[Profile | None]]
"""The profile of a digest, None where it is not to be had."""


async def no_profile(_: bytes) -> Profile | None:
    """For who holds none."""
    return None


class _Decoding(ForwardingTier):
    """The inner tier's coded blobs as raw frames. `get` of whole frames alone."""

    __slots__ = ("_arena", "_profile_of", "_run", "_turns")

    def __init__(self, inner: Tier, *, arena: Arena, run: RunOnPool, profile_of: ProfileOf, turns: DecodeTurns) -> None:
        super().__init__(inner)
        self._turns = turns
        self._arena = arena
        self._run = run
        self._profile_of = profile_of

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """The blob decoded, every byte of it there. `FrameCorruptError`, `BusyError`."""
        del byte_range
        async with self._turns.turn():
            return await self._decoded(blob_id)

    async def _decoded(self, blob_id: BlobId) -> PinnedFrame | None:
        frame = await self.inner.get(blob_id)
        if frame is None:
            return None
        try:
            await frame.complete()
            return await decoded(frame, arena=self._arena, run=self._run, profile_of=self._profile_of)
        finally:
            frame.release()


async def decoded(
    frame: PinnedFrame, *, arena: Arena, run: RunOnPool, profile_of: ProfileOf = no_profile
) -> PinnedFrame:
    """A whole, complete frame as a raw one, under a pin of its own; the very same where it is raw. `FrameCorruptError`,
    `BusyError` where there is no room to decode into, `TierUnavailableError` without the profile that it names."""
    head = head_of(frame.view[:MAX_HEAD_BYTES], frame.frame_bytes)
    if head.codec == CODEC_RAW:
        return frame.share()
    profile = await profile_named(head.tensor, profile_of)
    size_bytes = raw_frame_bytes(head.plain_bytes)
    pin = await arena.reserve(size_bytes, timeout_seconds=_RESERVE_SECONDS)
    try:
        await run(decode_coded, frame.view, pin.view, profile)
    except BaseException:
        pin.release()
        raise
    return PinnedFrame(pin, frame_bytes=size_bytes, tier=frame.tier)


async def profile_named(tensor: TensorFrame | None, profile_of: ProfileOf) -> Profile | None:
    """The profile that a frame names; None where it names none. `TierUnavailableError` where that is not to be had."""
    if tensor is None or tensor.profile_digest is None:
        return None
    profile = await profile_of(tensor.profile_digest)
    if profile is None or not profile.fits(tensor.form):
        raise TierUnavailableError("the profile that a frame names is not here", profile=tensor.profile_digest.hex())
    return profile


class Coded(ForwardingTier):
    """See the module's text. `index` says which blobs lie coded; `put` is of plain frames and the inner tier's own; `turns` are
    those of all that decode into the arena."""

    __slots__ = ("_arena", "_corrupt", "_decoding", "_heads", "_index", "_on_corrupt", "_profile_of", "_run", "_turns")

    def __init__(
        self,
        inner: Tier,
        *,
        index: CodedIndex,
        arena: Arena,
        run: RunOnPool,
        instruments: TierInstruments,
        on_corrupt: Callable[[BlobId], None] | None = None,
        profile_of: ProfileOf = no_profile,
        turns: DecodeTurns | None = None,
    ) -> None:
        super().__init__(inner)
        self._turns = turns = DecodeTurns() if turns is None else turns
        self._index = index
        self._arena = arena
        self._run = run
        self._on_corrupt = on_corrupt
        self._profile_of = profile_of
        self._corrupt = instruments.corrupt_frames.labels(inner.name)
        self._decoding = SingleFlight(
            _Decoding(inner, arena=arena, run=run, profile_of=profile_of, turns=turns), instruments=instruments
        )
        self._heads: OrderedDict[BlobId, CodedHead] = OrderedDict()

    def get(
        self, blob_id: BlobId, byte_range: ByteRange | None = None
    ) -> Coroutine[object, object, PinnedFrame | None]:
        """See `Tier.get`. Not a coroutine of its own: a plain blob's get would pay for it."""
        found = self._index.find(blob_id)
        if found is None:
            return self.inner.get(blob_id, byte_range)
        return self._get_coded(blob_id, byte_range)

    async def _get_coded(self, blob_id: BlobId, byte_range: ByteRange | None) -> PinnedFrame | None:
        try:
            if byte_range is not None:
                return await self._get_range(blob_id, byte_range)
            return await self._decoding.get(blob_id)
        except FrameCorruptError:
            self._corrupt.inc()
            if self._on_corrupt is None:
                raise
            self._on_corrupt(blob_id)
            return None

    async def _get_range(self, blob_id: BlobId, asked: ByteRange) -> PinnedFrame | None:
        head = await self._head(blob_id)
        if head is None:
            return None
        if head.codec == CODEC_RAW:
            return await self.inner.get(blob_id, asked)
        if asked.stop > raw_frame_bytes(head.plain_bytes):
            raise InvalidRangeError("range past the end of the frame", blob_id=blob_id, stop=asked.stop)
        offset = raw_payload_offset(head.plain_bytes)
        layers = None
        if head.tensor is not None and asked.start >= offset:
            layers = layers_over(head.tensor, asked.start - offset, asked.stop - offset)
        if head.tensor is None or layers is None or len(layers) == head.tensor.form.layers:
            return await self._cut(blob_id, asked)
        async with self._turns.turn():
            return await self._decode_layers(blob_id, head.tensor, layers, asked, offset)

    async def _cut(self, blob_id: BlobId, asked: ByteRange) -> PinnedFrame | None:
        whole = await self._decoding.get(blob_id)
        if whole is None:
            return None
        try:
            return whole.piece(asked.start, asked.stop - asked.start)
        finally:
            whole.release()

    async def _decode_layers(
        self, blob_id: BlobId, tensor: TensorFrame, layers: range, asked: ByteRange, offset: int
    ) -> PinnedFrame | None:
        profile = await profile_named(tensor, self._profile_of)
        start, stop = tensor.layers_span(layers)
        encoded = await self.inner.get(blob_id, ByteRange(start, stop))
        if encoded is None:
            return None
        try:
            await encoded.complete()
            layer_bytes = tensor.form.plain_bytes // tensor.form.layers
            size_bytes = len(layers) * layer_bytes
            pin = await self._arena.reserve(size_bytes, timeout_seconds=_RESERVE_SECONDS)
            try:
                await self._run(
                    decode_coded_layers, encoded.view, start, tensor, layers, pin.view[:size_bytes], profile
                )
            except BaseException:
                pin.release()
                raise
        finally:
            encoded.release()
        return PinnedFrame(
            pin,
            frame_bytes=raw_frame_bytes(tensor.form.plain_bytes),
            start=asked.start,
            size=asked.stop - asked.start,
            tier=encoded.tier,
            origin=offset + layers.start * layer_bytes,
        )

    async def _head(self, blob_id: BlobId) -> CodedHead | None:
        """The frame's head, kept: a blob id never comes to mean other bytes."""
        head = self._heads.get(blob_id)
        if head is not None:
            self._heads.move_to_end(blob_id)
            return head
        found = self._index.find(blob_id)
        if found is None:
            return None
        frame = await self.inner.get(blob_id, ByteRange(0, min(found.stored_bytes, MAX_HEAD_BYTES)))
        if frame is None:
            return None
        try:
            await frame.complete()
            head = head_of(frame.view, frame.frame_bytes)
        finally:
            frame.release()
        self._heads[blob_id] = head
        if len(self._heads) > _HEADS_KEPT:
            self._heads.popitem(last=False)
        return head

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`."""
        await self.inner.put(blob_id, frame, names)
        self._heads.pop(blob_id, None)

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`."""
        await self.inner.delete(blob_ids)
        for blob_id in blob_ids:
            self._heads.pop(blob_id, None)

    async def aclose(self) -> None:
        """See `Tier.aclose`. Waits for the decodings going on."""
        await self._decoding.aclose()


class CodedHome(Coded):
    """A durable tier whose coded blobs have rows of their own: `put_coded` takes frames of other codecs."""

    __slots__ = ("_blobs",)

    def __init__(
        self,
        inner: Tier,
        *,
        blobs: CodedBlobs,
        arena: Arena,
        run: RunOnPool,
        instruments: TierInstruments,
        on_corrupt: Callable[[BlobId], None] | None = None,
        profile_of: ProfileOf = no_profile,
        turns: DecodeTurns | None = None,
    ) -> None:
        super().__init__(
            inner,
            index=blobs,
            arena=arena,
            run=run,
            instruments=instruments,
            on_corrupt=on_corrupt,
            profile_of=profile_of,
            turns=turns,
        )
        self._blobs = blobs

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`. Of a blob that lay coded too, the frame that is given is what lies there now."""
        await super().put(blob_id, frame, names)
        if self._blobs.find(blob_id) is not None:
            await self._blobs.forget([blob_id])

    async def put_coded(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, plain_bytes: int) -> None:
        """`Tier.put` of a frame that readers are to be given decoded. Errors as there; nothing is left of it then."""
        codec = head_of(frame.view[:MAX_HEAD_BYTES], frame.frame_bytes).codec
        await self._blobs.note(blob_id, CodedBlob(codec, plain_bytes, frame.frame_bytes))
        try:
            await self.inner.put(blob_id, frame, names)
        except BaseException:
            if await self.inner.missing([blob_id]):
                await self._blobs.forget([blob_id])
            raise

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`."""
        await super().delete(blob_ids)
        await self._blobs.forget(blob_ids)
