"""The home tier of a node with a remote below it: nvme, and what of it lies on the remote alone by now.

For those who look after what rests somewhere (recovery, scrub, the sweep) and not for readers: nothing here promotes, checks or
meters, and nothing but a read asks the remote. What is there is known by the node's own directory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvobj.arena import PinnedFrame
from kvobj.ids import BlobId
from kvobj.tiers.protocol import BlobNames, ByteRange, Tier, TierUsage


class RemoteBlobs(Protocol):
    """Which blobs this node knows to be on the remote (`remote.directory.RemoteDirectory`). Cheap: no request is made."""

    def find(self, blob_id: BlobId) -> object | None:
        """Where the blob lies there; None where it does not, or another node put it."""
        ...


class LayeredHome:
    """See `Tier`. `get` is nvme's, else the remote's; `put` is nvme's alone; `missing` are those that lie in neither; `delete` is
    of both; `scan` and `usage` are nvme's, since the remote's blobs may be other nodes'."""

    __slots__ = ("_blobs", "_nvme", "_remote")

    def __init__(self, nvme: Tier, remote: Tier, *, blobs: RemoteBlobs) -> None:
        self._nvme = nvme
        self._remote = remote
        self._blobs = blobs

    @property
    def name(self) -> str:
        """That of the tier in front."""
        return self._nvme.name

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`."""
        frame = await self._nvme.get(blob_id, byte_range)
        if frame is not None or not self.is_remote(blob_id):
            return frame
        return await self._remote.get(blob_id, byte_range)

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`."""
        await self._nvme.put(blob_id, frame, names)

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """See `Tier.missing`. A blob that another node put there, and of which this one never heard, counts as missing."""
        return [blob_id for blob_id in await self._nvme.missing(blob_ids) if not self.is_remote(blob_id)]

    def is_remote(self, blob_id: BlobId) -> bool:
        """Whether the blob is known to be on the remote."""
        return self._blobs.find(blob_id) is not None

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`. The remote first, as in a cascade; those that are not there cost no request."""
        there = [blob_id for blob_id in blob_ids if self.is_remote(blob_id)]
        if there:
            await self._remote.delete(there)
        await self._nvme.delete(blob_ids)

    def scan(self) -> AsyncIterator[BlobId]:
        """See `Tier.scan`."""
        return self._nvme.scan()

    async def usage(self) -> TierUsage:
        """See `Tier.usage`."""
        return await self._nvme.usage()

    async def aclose(self) -> None:
        """See `Tier.aclose`."""
        await self._nvme.aclose()
        await self._remote.aclose()
