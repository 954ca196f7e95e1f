"""Looks a blob up on the remote before it is read, where this node never heard of it: for what decodes.

Whether a frame lies coded is asked of the directory before the frame is read. Of a blob that another process put the directory
knows nothing until one LIST has told it, so that comes first; otherwise a coded frame would be taken for a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine

from kvobj.arena import PinnedFrame
from kvobj.ids import BlobId
from kvobj.tiers.forwarding import ForwardingTier
from kvobj.tiers.protocol import ByteRange, Tier
from kvobj.tiers.remote.tier import RemoteTier


def _nothing(_: BlobId) -> bool:
    return False


class Located(ForwardingTier):
    """See `Tier`. Stands around what decodes what comes from `remote`. `is_nearer`: whether a tier in front of the remote, inside,
    holds the blob, so that the remote will not be read; cheap, as it is asked at every get."""

    __slots__ = ("_is_nearer", "_remote")

    def __init__(self, inner: Tier, *, remote: RemoteTier, is_nearer: Callable[[BlobId], bool] = _nothing) -> None:
        super().__init__(inner)
        self._remote = remote
        self._is_nearer = is_nearer

    def get(
        self, blob_id: BlobId, byte_range: ByteRange | None = None
    ) -> Coroutine[object, object, PinnedFrame | None]:
        """See `Tier.get`. Not a coroutine of its own where there is nothing to look up."""
        if self._is_nearer(blob_id) or self._remote.directory.find(blob_id) is not None:
            return self.inner.get(blob_id, byte_range)
        return self._get_located(blob_id, byte_range)

    async def _get_located(self, blob_id: BlobId, byte_range: ByteRange | None) -> PinnedFrame | None:
        if await self._remote.locate(blob_id) is None:
            return None
        return await self.inner.get(blob_id, byte_range)
