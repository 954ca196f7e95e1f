"""Room for a body before it comes: in the arena, among what may be dirty, in the queue for the remote; and the transfer that holds
it."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Final

from kvobj.arena import Pin
from kvobj.catalog.rows import BucketKind, CommitMode, Durability, ObjectRow
from kvobj.codec.checksums import Digester, fast_algorithms
from kvobj.codec.frame import raw_frame_bytes
from kvobj.errors import CapacityError
from kvobj.ids import BlobIdAllocator
from kvobj.store.arriving import ArrivingKeys
from kvobj.store.commit import CommitStep
from kvobj.store.hashing import HashPipeline
from kvobj.store.ingest import PutTransfer
from kvobj.store.placement import Placement
from kvobj.store.remote_class import SharedWrites, Sharing
from kvobj.store.remote_room import QueueRoom
from kvobj.store.requests import PutRequest
from kvobj.store.split import BlobSplit

# Up to here a body is always hashed after its acknowledgement, many in one job: a job of its own costs a 1 MiB body a fifth of
# its time in thread hops. A larger one is, unless its writer waits for that or much was put off already
# (`Sealing.puts_off`).
HASH_LATER_BYTES_MAX: Final = 4 * 1024 * 1024


class WriteRooms:
    """Of one store. Event loop only."""

    __slots__ = ("_arriving", "_blob_ids", "_commit_step", "_executor", "_placement", "_shared", "_split")

    def __init__(
        self,
        *,
        placement: Placement,
        commit_step: CommitStep,
        arriving: ArrivingKeys,
        blob_ids: BlobIdAllocator,
        hash_executor: Executor,
        split: BlobSplit,
        shared: SharedWrites | None,
    ) -> None:
        """`shared`: what class `shared` takes, where there is a remote tier."""
        self._placement = placement
        self._commit_step = commit_step
        self._arriving = arriving
        self._blob_ids = blob_ids
        self._executor = hash_executor
        self._split = split
        self._shared = shared

    async def reserve(
        self, request: PutRequest, existing: ObjectRow | None, durability: Durability, *, room: Pin | None = None
    ) -> PutTransfer:
        """Room for the body, and the transfer that holds it; none is needed where a live chunk answers. `room`: as of
        `Store.start_put`."""
        is_kv = request.bucket.kind is BucketKind.KV
        sharing = Sharing.NONE
        if durability is Durability.SHARED:
            sharing = self._sharing(request)
            durability = Durability.LOCAL  # which it is until it is on the remote
        sizes = self._split.sizes(request.size_bytes)
        single = len(sizes) == 1
        if not single:
            # Written down while it arrives: no reason to promise less than was reached.
            durability = Durability.LOCAL
        if durability is Durability.MEMORY and raw_frame_bytes(sizes[0]) > self._placement.dirty_bytes_max:
            durability = Durability.LOCAL  # it could never be held without a home copy
        algorithms = set(request.algorithms)
        if not is_kv:
            algorithms.add("md5")
        if not single and request.part is None:
            algorithms.add("blake3")
        queue_room: QueueRoom | None = None
        if existing is None and self._shared is not None and request.part is None:
            queue_room = await self._enter_queue(self._shared, request, sharing)
        try:
            transfer = await self._reserve_rooms(request, existing, durability, sizes, algorithms, room=room)
        except BaseException:
            if queue_room is not None:
                queue_room.leave(request.size_bytes)
            raise
        transfer.sharing = sharing
        transfer.queue_room = queue_room
        return transfer

    async def start_whole(self, request: PutRequest, durability: Durability) -> PutTransfer | None:
        """A transfer for an upload's bytes as one blob; None where they are too many for one, or there is no room to spare."""
        if len(self._split.sizes(request.size_bytes)) > 1:
            return None
        if durability is Durability.MEMORY and not self._placement.may_stay_dirty(raw_frame_bytes(request.size_bytes)):
            return None
        try:
            return await self.reserve(request, None, durability)
        except CapacityError:
            return None

    def _sharing(self, request: PutRequest) -> Sharing:
        """What a write of class `shared` does. A part is local: only its whole is shared. Of an upload nobody remembers whether the
        class was said by name: in a bucket of that class it was not."""
        if self._shared is None or request.part is not None:
            return Sharing.NONE
        by_name = request.durability is Durability.SHARED and request.ends is None
        return self._shared.sharing(request.bucket, Durability.SHARED, by_name=by_name)

    @staticmethod
    async def _enter_queue(shared: SharedWrites, request: PutRequest, sharing: Sharing) -> QueueRoom | None:
        """Room in the queue for the remote, for an object that will go there whatever happens."""
        if not shared.must_queue(request.bucket, sharing):
            return None
        await shared.room.enter(request.size_bytes)
        return shared.room

    async def _reserve_rooms(
        self,
        request: PutRequest,
        existing: ObjectRow | None,
        durability: Durability,
        sizes: list[int],
        algorithms: set[str],
        *,
        room: Pin | None,
    ) -> PutTransfer:
        is_kv = request.bucket.kind is BucketKind.KV
        dirty_bytes = 0
        if existing is None and durability is Durability.MEMORY:
            dirty_bytes = await self._reserve_dirty(request, raw_frame_bytes(sizes[0]))
        pins: list[Pin] = []
        encode_pin: Pin | None = None
        if room is not None and existing is None:
            pins = [room]
        elif existing is None:
            try:
                pins = await self._commit_step.reserve(sizes[:2], codec=request.bucket.codec, bucket=request.bucket)
            except BaseException:
                self._placement.unreserve_dirty(dirty_bytes)
                raise
            if request.bucket.codec != "raw":
                encode_pin = pins.pop()
        may_hash_later = (
            dirty_bytes > 0
            and request.part is None
            and algorithms <= fast_algorithms()
            and request.bucket.codec == "raw"
        )
        return PutTransfer(
            request,
            committer=self._commit_step,
            pipeline=HashPipeline(self._executor, body=Digester(frozenset(algorithms)) if algorithms else None),
            durability=durability,
            mode=CommitMode.FIRST_WRITER_WINS if is_kv else CommitMode.REPLACE,
            existing=existing,
            sizes=sizes,
            pins=pins,
            encode_pin=encode_pin,
            dirty_reserved_bytes=dirty_bytes,
            hash_later=may_hash_later and self._is_hashed_later(request),
            may_hash_later=may_hash_later,
            allocate=self._blob_ids.allocate,
            arriving=self._arriving,
        )

    def _is_hashed_later(self, request: PutRequest) -> bool:
        if request.size_bytes <= HASH_LATER_BYTES_MAX:
            return True
        return not request.wants_digest and self._commit_step.sealing.puts_off(request.size_bytes)

    async def _reserve_dirty(self, request: PutRequest, frame_bytes: int) -> int:
        if request.part is not None and not self._placement.may_stay_dirty(frame_bytes):
            return 0  # nobody writes a part down before Complete: it goes to the home tier at once
        await self._placement.reserve_dirty(frame_bytes)
        return frame_bytes
