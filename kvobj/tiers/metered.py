"""Counts what a tier does: hits, misses, bytes, errors, latency. Changes nothing and costs 2 µs a call."""

from __future__ import annotations

from collections.abc import Sequence

from kvobj.arena import PinnedFrame
from kvobj.clock import Clock
from kvobj.errors import KvobjError
from kvobj.ids import BlobId
from kvobj.tiers.forwarding import ForwardingTier
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import BlobNames, ByteRange, Tier


class Metered(ForwardingTier):
    """See `Tier`. Bytes count when a frame is handed out, though it may still be filling."""

    __slots__ = (
        "_bytes_in",
        "_bytes_out",
        "_clock",
        "_deleted",
        "_get_errors",
        "_get_seconds",
        "_hits",
        "_misses",
        "_put_errors",
        "_put_seconds",
        "_puts",
    )

    def __init__(self, inner: Tier, *, instruments: TierInstruments, clock: Clock) -> None:
        super().__init__(inner)
        tier = inner.name
        self._clock = clock
        # Looked up once: finding a labelled child takes longer than counting on it.
        self._hits = instruments.gets.labels(tier, "hit")
        self._misses = instruments.gets.labels(tier, "miss")
        self._get_errors = instruments.gets.labels(tier, "error")
        self._puts = instruments.puts.labels(tier, "done")
        self._put_errors = instruments.puts.labels(tier, "error")
        self._bytes_in = instruments.bytes.labels(tier, "in")
        self._bytes_out = instruments.bytes.labels(tier, "out")
        self._deleted = instruments.deleted_blobs.labels(tier)
        self._get_seconds = instruments.get_latency_seconds.labels(tier)
        self._put_seconds = instruments.put_latency_seconds.labels(tier)

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`."""
        began = self._clock.monotonic()
        try:
            frame = await self.inner.get(blob_id, byte_range)
        except KvobjError:
            self._get_errors.inc()
            raise
        self._get_seconds.observe(self._clock.monotonic() - began)
        if frame is None:
            self._misses.inc()
        else:
            self._hits.inc()
            self._bytes_out.inc(frame.size)
        return frame

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`."""
        began = self._clock.monotonic()
        try:
            await self.inner.put(blob_id, frame, names)
        except KvobjError:
            self._put_errors.inc()
            raise
        self._put_seconds.observe(self._clock.monotonic() - began)
        self._puts.inc()
        self._bytes_in.inc(frame.frame_bytes)

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`."""
        await self.inner.delete(blob_ids)
        self._deleted.inc(len(blob_ids))
