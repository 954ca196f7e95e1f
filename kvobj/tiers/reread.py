"""A second look at what a network brought: bytes that did not check out may be right when they are asked for again."""

from __future__ import annotations

from kvobj.arena import PinnedFrame
from kvobj.errors import CorruptionError
from kvobj.ids import BlobId
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.forwarding import ForwardingTier
from kvobj.tiers.protocol import ByteRange, Tier


class Reread(ForwardingTier):
    """See `Tier`. Around a tier that checks (`Verified`): what that calls a miss because it is corrupt is read once more. `corrupt`
    is whom it tells of such blobs. What is found corrupt after a frame was handed out ends that frame; the next read is a new
    one."""

    __slots__ = ("_corrupt",)

    def __init__(self, inner: Tier, *, corrupt: CorruptBlobs) -> None:
        super().__init__(inner)
        self._corrupt = corrupt

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`."""
        try:
            frame = await self.inner.get(blob_id, byte_range)
        except CorruptionError:
            return await self.inner.get(blob_id, byte_range)
        if frame is None and blob_id in self._corrupt:
            return await self.inner.get(blob_id, byte_range)
        return frame
