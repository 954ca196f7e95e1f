"""Which blobs of a row have to be on the remote tier, and how they get there: read from the node's own tiers, put as they lie.

A chunk with a lossy copy rests on that copy, at home and so on the remote as well: its bytes are in memory alone, for a while, and
go nowhere. What lies coded at home goes up as it lies, under a name that says so; everything else in the frame that was put.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from kvobj.arena import PinnedFrame
from kvobj.catalog.rows import BlobRef, ObjectRow
from kvobj.errors import CorruptionError, FrameCorruptError, KvobjError, UnavailableError
from kvobj.ids import BlobId
from kvobj.store.placement import ReadTier
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.protocol import BlobNames, Tier
from kvobj.tiers.remote.names import CodedNames


def lasting_blobs(row: ObjectRow) -> list[BlobRef]:
    """The blobs that a tier below memory has to hold: of a chunk with a lossy copy that copy."""
    copy = row.lossy
    if copy is None:
        return list(row.blobs)
    return [BlobRef(copy.blob_id, copy.plain_bytes, copy.frame_bytes, copy.digest, copy.codec)]


class RemoteFrames:
    """`local` are the node's own tiers, fast before slow, which check what they hand out; `read` gives a lossy copy's frame;
    `coded` says how the home tier holds one in another codec than it was put; `is_there`: whether the remote has a blob, as far as
    the node knows. Event-loop-only."""

    def __init__(
        self,
        *,
        remote: Tier,
        local: Sequence[Tier],
        read: ReadTier,
        coded: Callable[[bytes], CodedBlob | None],
        is_there: Callable[[BlobId], bool],
    ) -> None:
        self._remote = remote
        self._local = tuple(local)
        self._read = read
        self._coded = coded
        self._is_there = is_there

    async def put(self, row: ObjectRow) -> int:
        """Put what the row rests on into the remote, one blob after the other; how many bytes went there.

        `CorruptionError`: no sound copy is here. `StoreFullError`: the remote is full. `BusyError`: no room to read into.
        `TierUnavailableError`: the remote, or the only tier that has a blob, does not answer.
        """
        sent = 0
        for blob in lasting_blobs(row):
            blob_id = BlobId(blob.blob_id)
            if self._is_there(blob_id):
                continue
            frame, names = await self._frame(row, blob_id)
            try:
                await self._remote.put(blob_id, frame, names)
                sent += frame.frame_bytes
            finally:
                frame.release()
        return sent

    async def put_all(self, row: ObjectRow) -> int:
        """`put`, of all or nothing: for a row that nobody knows of yet."""
        try:
            return await self.put(row)
        except BaseException:
            with suppress(KvobjError):  # what stays then is found by a later process's sweep: nobody names it
                await self._remote.delete([BlobId(blob.blob_id) for blob in lasting_blobs(row)])
            raise

    async def _frame(self, row: ObjectRow, blob_id: BlobId) -> tuple[PinnedFrame, BlobNames]:
        """The whole frame, every byte of it there and pinned for the caller, and the names that it goes under."""
        found = _Found()
        coded, copy = self._coded(blob_id), row.lossy
        if coded is None and copy is not None and copy.blob_id == blob_id:
            coded = CodedBlob(copy.codec, copy.plain_bytes, copy.frame_bytes)
        if coded is not None:
            frame = await found.taken(self._read.get_stored(blob_id, coded.codec))
            if frame is not None:
                return frame, CodedNames(row.bucket, row.key, coded.codec, coded.plain_bytes)
        for tier in self._local:
            frame = await found.taken(tier.get(blob_id))
            if frame is not None:
                return frame, BlobNames(row.bucket, row.key)
        raise found.failure or found.corruption or FrameCorruptError("no tier holds the blob", blob_id=blob_id)


class _Found:
    """What came of looking for a frame in one tier after the other."""

    __slots__ = ("corruption", "failure")

    def __init__(self) -> None:
        self.failure: UnavailableError | None = None
        self.corruption: CorruptionError | None = None

    async def taken(self, reading: Awaitable[PinnedFrame | None]) -> PinnedFrame | None:
        """The complete frame, or None, and why not is kept. `BusyError` passes: the next tier would have no more room."""
        try:
            frame = await reading
            if frame is None:
                return None
            try:
                await frame.complete()
            except BaseException:
                frame.release()
                raise
        except UnavailableError as error:
            self.failure = error
        except CorruptionError as error:
            self.corruption = error
        else:
            return frame
        return None
