"""The base of every wrapper: a tier around a tier that forwards whatever the wrapper does not change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvobj.arena import PinnedFrame
from kvobj.ids import BlobId
from kvobj.tiers.protocol import BlobNames, ByteRange, Tier, TierUsage


class ForwardingTier:
    """See `kvobj.tiers.protocol.Tier`; each call is the inner tier's."""

    __slots__ = ("inner",)

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        """The name of what is wrapped."""
        return self.inner.name

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`."""
        return await self.inner.get(blob_id, byte_range)

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`."""
        await self.inner.put(blob_id, frame, names)

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """See `Tier.missing`."""
        return await self.inner.missing(blob_ids)

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`."""
        await self.inner.delete(blob_ids)

    def scan(self) -> AsyncIterator[BlobId]:
        """See `Tier.scan`."""
        return self.inner.scan()

    async def usage(self) -> TierUsage:
        """See `Tier.usage`."""
        return await self.inner.usage()

    async def aclose(self) -> None:
        """See `Tier.aclose`; the inner tier is closed too."""
        await self.inner.aclose()
