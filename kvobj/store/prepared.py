"""Room in the arena for chunks that nobody has named yet, and the commit of chunks that lie in such room already.

For a writer on the same host that is going to store more of what it has just stored: its bytes are there before anything is asked,
and one call does what reserving and committing do otherwise. Chunks of class `memory` alone, each of one blob, in raw KV buckets.
Nothing here waits for room: who finds none reserves as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.arena import Arena
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BlobRef,
    BucketKind,
    BucketRow,
    CommitOutcome,
    Durability,
    NamespaceQuota,
    ObjectRow,
)
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.clock import Clock
from kvobj.codec.frame import CODEC_RAW, raw_frame_bytes
from kvobj.errors import BusyError, KvobjError
from kvobj.ids import BlobIdAllocator
from kvobj.store.arriving import ArrivingKeys
from kvobj.store.commit import kv_etag
from kvobj.store.extents import extent_bytes
from kvobj.store.ingest import ReceivedBlob
from kvobj.store.placement import Placement
from kvobj.store.requests import PutRequest
from kvobj.store.sealing import Sealing
from kvobj.store.split import BlobSplit
from kvobj.task_endings import to_their_end

ROOMS_MAX: Final = 64
"""Of one connection: so many chunks are committed before others get a turn of the event loop."""
WRITER_BYTES_MAX: Final = 80 * 1024 * 1024
"""Sixty-four chunks of 1 MiB with what a frame has before its bytes."""

Told = Sequence[CommitOutcome | KvobjError]


class PreparedRooms:
    """See the module's text. Event-loop-only. All rooms that are out have `bytes_max` at most, those of one
    connection `WRITER_BYTES_MAX`."""

    def __init__(
        self,
        *,
        arena: Arena,
        catalog: Catalog,
        placement: Placement,
        sealing: Sealing,
        arriving: ArrivingKeys,
        blob_ids: BlobIdAllocator,
        split: BlobSplit,
        clock: Clock,
        bytes_max: int,
        on_asked: Callable[[ObjectRow], None],
    ) -> None:
        """`on_asked`: a writer has met a live chunk (`Store`)."""
        self._arena = arena
        self._catalog = catalog
        self._placement = placement
        self._sealing = sealing
        self._arriving = arriving
        self._blob_ids = blob_ids
        self._split = split
        self._clock = clock
        self.bytes_max = bytes_max
        self._on_asked = on_asked
        self.bytes_out = 0
        """Of extents that are prepared and not committed."""

    def prepare(self, bucket: BucketRow, asked: Durability | None, size_bytes: int, count: int) -> list[ReceivedBlob]:
        """Room for so many chunks of so many bytes, to be given back or committed; none where there is not as much at once,
        somebody waits for some, or such chunks are not committed so."""
        if not 0 < count <= ROOMS_MAX or not self.may_hold(bucket, asked):
            return []
        if not 0 < size_bytes <= self._split.blob_plain_bytes_max:  # before anything is made that grows with it
            return []
        frame_bytes = raw_frame_bytes(size_bytes)
        if extent_bytes(size_bytes) * count > self._left_bytes:
            return []
        rooms: list[ReceivedBlob] = []
        for _ in range(count):
            pin = self._arena.try_reserve(frame_bytes, bucket=bucket)
            if pin is None:
                self.give_back(rooms)
                return []
            self.bytes_out += pin.extent.length
            # All that can be made before the chunk has a name: nobody waits for it now.
            room = ReceivedBlob(self._blob_ids.allocate(), pin, size_bytes, CODEC_RAW)
            room.unseal()
            rooms.append(room)
        return rooms

    @property
    def _left_bytes(self) -> int:
        return min(self.bytes_max - self.bytes_out, WRITER_BYTES_MAX)

    @staticmethod
    def may_hold(bucket: BucketRow, asked: Durability | None) -> bool:
        """Whether chunks of such a class, as the bucket is now, may be committed so."""
        return (
            bucket.kind is BucketKind.KV
            and bucket.codec == "raw"
            and (asked or bucket.durability) is Durability.MEMORY
            # What goes to the remote whatever becomes of it needs room in that queue first.
            and bucket.durability is not Durability.SHARED
            and bucket.remote is not RemoteRule.ALWAYS
        )

    def are_of(self, rooms: Sequence[ReceivedBlob], bucket: BucketRow) -> bool:
        """Whether rooms lie where the bucket's chunks go. They do not where they were prepared for one that had its name before."""
        lane, lane_of = self._arena.lane(bucket), self._arena.lane_of
        return all(lane_of(room.pin.extent.region) == lane for room in rooms)

    def take(self, room: ReceivedBlob) -> None:
        """The room is a writer's whose bytes are counted elsewhere from here on."""
        self.bytes_out -= room.pin.extent.length

    def give_back(self, rooms: Sequence[ReceivedBlob]) -> None:
        """Let go of rooms whose writer does not want them, or is gone."""
        for room in rooms:
            self.bytes_out -= room.pin.extent.length
            room.frame.release()

    async def commit(
        self,
        requests: Sequence[PutRequest],
        blobs: Sequence[ReceivedBlob],
        *,
        quota: NamespaceQuota | None,
        parent_tokens: int,
        tell: Callable[[Told], None],
    ) -> Told:
        """Make chunks visible in one step, whose bytes lie in these rooms, which are this call's from now on. What became of each:
        see `Catalog.commit_chain`; `tell` is called with it before the store does for itself what comes behind a commit.

        The requests are of one bucket and class, which `may_hold` says may be committed so, of at most `ROOMS_MAX` chunks, each of
        the size of its room. `BusyError`, and nothing is stored: too much is not written down yet, or not hashed. Cancelled, it
        ends when the commit has: what became visible by then is whole.
        """
        committing = asyncio.create_task(self._commit(requests, blobs, quota, parent_tokens, tell))
        await to_their_end([committing])
        return committing.result()

    async def _commit(
        self,
        requests: Sequence[PutRequest],
        blobs: Sequence[ReceivedBlob],
        quota: NamespaceQuota | None,
        parent_tokens: int,
        tell: Callable[[Told], None],
    ) -> Told:
        outcomes: Told = ()
        try:
            self._hold(blobs)
            now_ms = self._clock.now_ms()
            rows = [_row(request, blob, now_ms) for request, blob in zip(requests, blobs, strict=True)]
            outcomes = await self._catalog.commit_chain(
                rows,
                quota=quota,
                parent_tokens=parent_tokens,
                made_ms=requests[0].bucket.created_ms,
                namespace_root=b"" if requests[0].place is None else requests[0].place.namespace_root,
                now_ms=now_ms,
            )
            tell(outcomes)
        finally:
            self._conclude(blobs, outcomes)
        return outcomes

    def _hold(self, blobs: Sequence[ReceivedBlob]) -> None:
        """Have the blobs outlive the process, as bytes that lie in no frame yet."""
        dirty_bytes = plain_bytes = 0
        for blob in blobs:
            dirty_bytes += blob.frame_bytes
            plain_bytes += blob.plain_bytes
        if not self._placement.has_dirty_room(dirty_bytes):
            raise BusyError("too much is waiting to be written down", size_bytes=dirty_bytes)
        if not self._sealing.has_room(plain_bytes):
            raise BusyError("too much is waiting to be hashed", size_bytes=plain_bytes)
        self._placement.hold_unsealed([(blob.blob_id, blob.frame) for blob in blobs])

    def _conclude(self, blobs: Sequence[ReceivedBlob], outcomes: Told) -> None:
        """What became visible is hashed; the rest is let go of. Of what the catalog was asked it owns the blobs, whatever it
        answered (`Catalog.commit_chain`)."""
        is_watched = self._arriving.is_watched
        for index, blob in enumerate(blobs):
            self.bytes_out -= blob.pin.extent.length
            outcome = outcomes[index] if outcomes else None
            if outcome is None or isinstance(outcome, KvobjError) or outcome.existed:
                blob.frame.release()
                if isinstance(outcome, CommitOutcome):
                    self._on_asked(outcome.row)
                continue
            self._sealing.follow(blob, outcome.row, is_hashed_later=True)
            if is_watched:
                self._arriving.tell(outcome.row.bucket, outcome.row.key)


def _row(request: PutRequest, blob: ReceivedBlob, now_ms: int) -> ObjectRow:
    place = request.place
    assert place is not None
    blob_id = bytes(blob.blob_id)
    return ObjectRow(
        bucket=request.bucket.name,
        key=request.key,
        blobs=(BlobRef(blob_id, blob.plain_bytes, blob.frame_bytes, None, CODEC_RAW),),
        size_bytes=request.size_bytes,
        etag=kv_etag(blob_id),
        modified_ms=now_ms,
        owner=request.owner,
        durability=Durability.MEMORY,
        parent=place.parent,
        namespace=place.namespace.name,
        tokens=place.tokens,
    )
