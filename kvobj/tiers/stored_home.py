"""The tiers below memory as one, holding frames as they lie: nvme in front of the remote, for a cascade that decodes above it."""

from __future__ import annotations

from typing import Protocol

from kvobj.arena import PinnedFrame
from kvobj.codec.frame import MAX_HEAD_BYTES
from kvobj.ids import BlobId
from kvobj.tiers.coded import CodedHome, CodedIndex
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.coded_frames import head_of
from kvobj.tiers.forwarding import ForwardingTier
from kvobj.tiers.protocol import BlobNames, Tier


class HeldBlobs(Protocol):
    """Which blobs nvme holds (`NvmeTier.frame_bytes`). Cheap."""

    def frame_bytes(self, blob_id: BlobId) -> int | None:
        """How long the blob's frame is there; None if it is not held."""
        ...


class StoredHome(ForwardingTier):
    """A tier of frames as nvme holds them, whose `put` takes what the remote holds: a coded frame is put as one that readers are to
    be given decoded. `remote` says which those are; `home` is nvme as it is written to."""

    __slots__ = ("_home", "_remote")

    def __init__(self, inner: Tier, *, home: CodedHome, remote: CodedIndex) -> None:
        super().__init__(inner)
        self._home = home
        self._remote = remote

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`."""
        if self._remote.find(blob_id) is None:
            await self._home.put(blob_id, frame, names)
            return
        await frame.complete()
        plain_bytes = head_of(frame.view[:MAX_HEAD_BYTES], frame.frame_bytes).plain_bytes
        await self._home.put_coded(blob_id, frame, names, plain_bytes=plain_bytes)


class LayeredIndex:
    """How a blob lies in the first of the two that holds it; `tiers.coded.CodedIndex`."""

    __slots__ = ("_held", "_nvme", "_remote")

    def __init__(self, nvme: CodedIndex, remote: CodedIndex, *, held: HeldBlobs) -> None:
        self._nvme = nvme
        self._remote = remote
        self._held = held

    def find(self, blob_id: bytes) -> CodedBlob | None:
        """See `CodedIndex.find`."""
        found = self._nvme.find(blob_id)
        if found is not None:
            return found
        found = self._remote.find(blob_id)
        return found if found is not None and self._held.frame_bytes(BlobId(blob_id)) is None else None
