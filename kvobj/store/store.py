"""The store: one put, one get, one delete, one copy. Coordination only.

Where bytes lie is the tiers' business, what exists is the catalog's, how bodies are received and hashed is `ingest`'s, what a
class of durability needs is `placement`'s, and how uploads become objects is `uploads`'. All calls come from one event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, cast

from kvobj.arena import Pin, PinnedFrame
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BlobRef,
    BucketKind,
    BucketRow,
    Checksum,
    CommitMode,
    DeleteOutcome,
    Durability,
    ObjectRow,
    UploadRow,
    WriteCondition,
)
from kvobj.clock import Clock
from kvobj.codec.checksums import Digester, fast_algorithms
from kvobj.codec.frame import CODEC_RAW, raw_frame_bytes, raw_payload_offset
from kvobj.errors import (
    CapacityError,
    CorruptionError,
    ImmutableChunkError,
    InvalidRequestError,
    LayoutMismatchError,
    NoSuchUploadError,
    ParentNotFoundError,
    TierUnavailableError,
    UnavailableError,
)
from kvobj.ids import BlobId, BlobIdAllocator
from kvobj.store.arriving import ArrivingKeys
from kvobj.store.at_once import at_once
from kvobj.store.commit import CommitStep
from kvobj.store.following import Following
from kvobj.store.groups import GroupStart, GroupState
from kvobj.store.hashing import HashPipeline
from kvobj.store.ingest import PutTransfer, WholeSource
from kvobj.store.multipart import CompletedPart
from kvobj.store.placement import Placement
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace
from kvobj.store.reader import BlobSlice, HotRead, ObjectReader, ReaderSource, fetch, slices_of
from kvobj.store.remote_class import SharedWrites, Sharing
from kvobj.store.remote_room import QueueRoom
from kvobj.store.representation import Accepted, choose, choose_demoted, coarser_wanted, stored_codec
from kvobj.store.requests import PartTarget, PutRequest, PutResult
from kvobj.store.split import BlobSplit
from kvobj.store.uploads import ReceivedPart, UploadEnds
from kvobj.store.whole_writes import WholeWrites, check_write_condition
from kvobj.tensors.profiles import KEY_PREFIX
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.in_use import BlobsInUse

# Up to here a body is always hashed after its acknowledgement, many in one job: a job of its own costs a 1 MiB body a fifth of
# its time in thread hops. A larger one is, unless its writer waits for that or much was put off already
# (`Sealing.puts_off`).
HASH_LATER_BYTES_MAX: Final = 4 * 1024 * 1024


COPIED_BYTES_MAX: Final = 16 * 1024
"""Up to here a hot read copies: a pin, its frame and a reader over it cost more."""


def _nothing_hot(_: BlobId) -> PinnedFrame | None:
    return None


def _no_hot_bytes(_blob_id: BlobId, _start: int, _stop: int) -> bytes | None:
    return None


async def _no_profiles(_bucket: str, _keys: Sequence[str]) -> Mapping[str, str]:
    return {}


class Store:
    """See the module's text. Made by `app.py`, which also closes what it is given."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        placement: Placement,
        commit_step: CommitStep,
        arriving: ArrivingKeys,
        blob_ids: BlobIdAllocator,
        clock: Clock,
        hash_executor: Executor,
        split: BlobSplit,
        in_use: BlobsInUse,
        on_read: Callable[[ObjectRow], None],
        on_removed: Callable[[Sequence[ObjectRow]], None],
        corrupt: CorruptBlobs,
        on_asked: Callable[[ObjectRow], None] = lambda _: None,
        hot_frame: Callable[[BlobId], PinnedFrame | None] = _nothing_hot,
        hot_bytes: Callable[[BlobId, int, int], bytes | None] = _no_hot_bytes,
        on_hot_read: Callable[[ObjectRow], None] = lambda _: None,
        named_profiles: Callable[[str, Sequence[str]], Awaitable[Mapping[str, str]]] = _no_profiles,
        shared: SharedWrites | None = None,
    ) -> None:
        """`shared`: what class `shared` takes, where there is a remote tier. `on_hot_read`: `on_asked` and `on_read` in one."""
        self.catalog = catalog
        self._shared = shared
        self._placement = placement
        self._commit_step = commit_step
        self._blob_ids = blob_ids
        self._clock = clock
        self._executor = hash_executor
        self._split = split
        self._in_use = in_use
        self._on_read = on_read
        self._on_removed = on_removed
        self._corrupt = corrupt
        self._on_asked = on_asked
        self._hot_frame = hot_frame
        self._hot_bytes = hot_bytes
        self._on_hot_read = on_hot_read
        self._named_profiles = named_profiles
        self.arriving = arriving
        self._uploads = UploadEnds(
            catalog=catalog,
            commit_step=commit_step,
            clock=clock,
            live_chunk=self._standing_chunk,
            open_blobs=self._open_blobs,
            start_whole=self._start_whole,
            on_removed=on_removed,
            on_whole=self.arriving.tell,
            shared=shared,
        )
        self._whole_writes = WholeWrites(catalog=catalog, commit_step=commit_step, blob_ids=blob_ids, split=split)
        self.following = Following(
            catalog=catalog,
            arriving=self.arriving,
            look_up=self.look_up,
            open_row=self.open,
            open_blobs=self._open_blobs,
        )

    # -- writes --------------------------------------------------------------------------------------------------
    async def start_put(self, request: PutRequest) -> PutTransfer:
        """Check what can be known before the body and reserve room for it.

        In a KV bucket a live row under the key is in the transfer's `existing`: the caller answers from it, and
        receives nothing. Errors: `PreconditionFailedError`, `NoSuchKeyError` (If-Match on an absent key), `NoSuchUploadError`,
        `BusyError` (no room within the deadline), `StoreFullError` (never any room), `InvalidRequestError` (a
        durability class that this store has no tier for), `QuotaExceededError` (a part: its upload's owner holds as much in
        unfinished uploads as one user may).
        """
        if request.part is not None:
            return await self._start_part(request, request.part)
        existing = await self._early_look(request)
        durability = self.durability_of(request.bucket, request.durability)
        if (
            existing is not None
            and existing.size_bytes == request.size_bytes
            and not await self._stands(existing, durability)
        ):
            existing = None
        elif existing is not None and existing.size_bytes == request.size_bytes:
            (existing,) = await self.reached([existing], request.bucket, request.durability)
        return await self._reserve(request, existing, durability)

    def put_at_once(
        self, request: PutRequest, source: WholeSource, check: Callable[[Digester], tuple[Checksum, ...]]
    ) -> PutResult | None:
        """See `ObjectStore.put_at_once`."""
        return self._whole_writes.put(request, source, check)

    async def reached(self, rows: Sequence[ObjectRow], bucket: BucketRow, asked: Durability | None) -> list[ObjectRow]:
        """Live rows that stand for a write which asked for this class, once they have it, where that is `shared`: each with the
        class that was reached in time. `NotSharedError` where it was asked for by name and not reached."""
        durability = bucket.durability if asked is None else asked
        if self._shared is None or durability is not Durability.SHARED:
            return list(rows)
        return await self._shared.reached(
            rows, self._shared.sharing(bucket, durability, by_name=asked is Durability.SHARED)
        )

    async def start_in_batch(self, request: PutRequest) -> PutTransfer:
        """As `start_put`, of a chunk that is committed with others: its parent may be among them, so only the commit asks for
        it."""
        (existing,) = await self.standing([request])
        return await self.start_beside(request, existing)

    async def standing(self, requests: Sequence[PutRequest]) -> list[ObjectRow | None]:
        """The live chunk that answers for each write of a batch, which is of one bucket and of one class; None: it is to be
        stored."""
        if not requests:
            return []
        first = requests[0]
        durability = self.durability_of(first.bucket, first.durability)
        rows = await self.catalog.lookup(first.bucket.name, [request.key for request in requests], rescue=True)
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            if row is not None:
                self._on_asked(row)
                if row.size_bytes == request.size_bytes and not await self._stands(row, durability):
                    rows[index] = None
        return rows

    async def start_beside(self, request: PutRequest, existing: ObjectRow | None) -> PutTransfer:
        """`start_in_batch` of who knows what stands already (`standing`)."""
        return await self._reserve(request, existing, self.durability_of(request.bucket, request.durability))

    async def _start_part(self, request: PutRequest, part: PartTarget) -> PutTransfer:
        """A part is of its upload's class, and counts for who began that."""
        upload = await self.catalog.upload(request.bucket.name, request.key, part.upload_id)
        if upload is None:
            raise NoSuchUploadError("no such upload", upload_id=part.upload_id)
        counted = self.catalog.unfinished.reserve(upload.owner, request.size_bytes)
        try:
            transfer = await self._reserve(request, None, upload.durability)
        except BaseException:
            counted.release()
            raise
        transfer.counted = counted
        return transfer

    async def _reserve(self, request: PutRequest, existing: ObjectRow | None, durability: Durability) -> PutTransfer:
        """Room for the body, and the transfer that holds it; none is needed where a live chunk answers."""
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
            transfer = await self._reserve_rooms(request, existing, durability, sizes, algorithms)
        except BaseException:
            if queue_room is not None:
                queue_room.leave(request.size_bytes)
            raise
        transfer.sharing = sharing
        transfer.queue_room = queue_room
        return transfer

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
    ) -> PutTransfer:
        is_kv = request.bucket.kind is BucketKind.KV
        dirty_bytes = 0
        if existing is None and durability is Durability.MEMORY:
            dirty_bytes = await self._reserve_dirty(request, raw_frame_bytes(sizes[0]))
        pins: list[Pin] = []
        encode_pin: Pin | None = None
        if existing is None:
            try:
                pins = await self._commit_step.reserve(
                    sizes[:2], codec=request.bucket.codec, bucket=request.bucket.name
                )
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
            arriving=self.arriving,
        )

    def _is_hashed_later(self, request: PutRequest) -> bool:
        if request.size_bytes <= HASH_LATER_BYTES_MAX:
            return True
        return not request.wants_digest and self._commit_step.sealing.puts_off(request.size_bytes)

    async def _early_look(self, request: PutRequest) -> ObjectRow | None:
        """The live chunk that answers for the write; refuses what the commit would refuse, before the body."""
        bucket, key, condition, place = request.bucket, request.key, request.condition, request.place
        if bucket.kind is not BucketKind.KV:
            if condition is not None:
                (row,) = await self.catalog.lookup(bucket.name, [key])
                check_write_condition(row, condition, key=key)
            return None
        row = await self.live_chunk(bucket.name, key, place)
        if condition is not None:
            check_write_condition(row, condition, key=key)
            if row is not None and condition.if_match is not None:
                if place is not None and place.namespace.name != DEFAULT_NAMESPACE:
                    raise ImmutableChunkError("a chunk of a declared namespace is never replaced", key=key)
                return None  # the commit replaces it
        return row

    async def live_chunk(self, bucket: str, key: str, place: ChunkPlace | None) -> ObjectRow | None:
        """The live chunk that a writer of the key meets, as `look_up` gives it; where there is none, the parent has to be live.
        Raises `ParentNotFoundError`, and `LayoutMismatchError` (`parent`) where that is a partial chunk."""
        parent = None if place is None else place.parent
        keys = [key, parent] if parent else [key]
        row, *parents = await self.catalog.lookup(bucket, keys, rescue=True)
        if row is None and parent and place is not None:
            (parent_row,) = parents
            # Ids are keyed by namespace and other keys begin with its name, so a parent elsewhere is a stranger's.
            if parent_row is None or (parent_row.namespace or DEFAULT_NAMESPACE) != place.namespace.name:
                raise ParentNotFoundError("the parent is not live", parent=parent, bucket=bucket, key=key)
            if parent_row.tokens < place.parent_tokens:
                raise LayoutMismatchError("nothing follows on a partial chunk", differs=("parent",))
        if row is not None:
            self._on_asked(row)
        return row

    async def _standing_chunk(
        self, bucket: str, key: str, place: ChunkPlace | None, durability: Durability
    ) -> ObjectRow | None:
        """`live_chunk` for who writes it in parts: None where it does not stand."""
        row = await self.live_chunk(bucket, key, place)
        return row if row is not None and await self._stands(row, durability) else None

    async def _stands(self, row: ObjectRow, durability: Durability) -> bool:
        """Whether the live row answers for a write of the same chunk. One whose bytes are gone, but for a lossy copy, does not (the
        chunk is stored again), nor does it where the writer is to be promised that its bytes last."""
        if row.lossy is None:
            return True
        if durability is not Durability.MEMORY:
            return False
        return not await self._are_missing([BlobId(blob.blob_id) for blob in row.blobs])

    def durability_of(self, bucket: BucketRow, asked: Durability | None) -> Durability:
        """The class a write gets: what was asked for, else the bucket's default, else an error. `NotSharedError` where class shared
        was asked for by name and the remote is known to be away."""
        durability = bucket.durability if asked is None else asked
        if durability is Durability.SHARED:
            if self._shared is None:
                raise InvalidRequestError("durability class shared needs a remote tier, and none is configured")
            self._shared.check(self._shared.sharing(bucket, durability, by_name=asked is Durability.SHARED))
        return durability

    async def _reserve_dirty(self, request: PutRequest, frame_bytes: int) -> int:
        if request.part is not None and not self._placement.may_stay_dirty(frame_bytes):
            return 0  # nobody writes a part down before Complete: it goes to the home tier at once
        await self._placement.reserve_dirty(frame_bytes)
        return frame_bytes

    # -- reads ---------------------------------------------------------------------------------------------------
    async def look_up(self, bucket: str, key: str, *, will_open: bool = False) -> ObjectRow | None:  # noqa: ARG002 - see `api.object_store`
        """A client asks for the chunk: it is live again if policy has condemned it, and held against policy for the grace time."""
        (row,) = await self.catalog.lookup(bucket, [key], rescue=True)
        if row is not None:
            self._on_asked(row)
        return row

    async def pinned(self, bucket: str, key: str, pin: bytes, *, user_id: str) -> ObjectRow | None:
        """The row that the user's pin lets it read, also where DELETE has hidden it; None: no such pin, or it does not cover it."""
        row = await self.catalog.leases.pin(pin, user=user_id, bucket=bucket)
        if row is None or not await self.catalog.leases.covers(row, key):
            return None
        (live,) = await self.catalog.lookup(bucket, [key])
        return live if live is not None else await self.catalog.lookup_hidden(bucket, key)

    async def represent(self, row: ObjectRow, accepts: Sequence[Accepted]) -> ObjectRow | None:
        """What a reader that takes these codecs gets of the object: a row to `open` (`representation.choose`); None: nothing
        will do. A lossy copy may be made coarser for it, which it waits for. `BusyError`: no room for that."""
        lies: list[CodedBlob | None] = []
        if len(row.blobs) == 1:
            lies = await self._placement.read.lies(BlobId(row.blobs[0].blob_id))
            if not lies and row.lossy is None:
                await self.forget_if_lost(row)
        chosen = choose(row, lies, accepts)
        if row.lossy is not None:
            for codec in coarser_wanted(row, chosen, accepts):
                demoted = await self._placement.read.demoted(BlobId(row.lossy.blob_id), row.lossy.codec, codec)
                found = None if demoted is None else choose_demoted(row, demoted, accepts)
                if found is not None:
                    return found
        return chosen

    async def open(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """A reader over the object's bytes `[start, stop)`; None when no tier has them any more (a miss).

        The caller closes the reader. `TierUnavailableError`: they are on the remote, which does not answer; of a chunk that is a
        miss like any other. `FrameCorruptError` cannot come from here: a corrupt copy is a miss in its tier.
        """
        reader = self._open_hot(row, start, stop) or await self._open_blobs(row.blobs, start, stop)
        if reader is None:
            await self.forget_if_lost(row)
            await self.refuse_if_away(row)
            return None
        self._on_read(row)
        return reader

    def read_hot(self, bucket: BucketRow, key: str, *, only_short: bool = False) -> HotRead | None:
        """See `ObjectStore.read_hot`. What is hidden by a mark of policy's is live again, as `look_up` has it."""
        is_kv = bucket.kind is BucketKind.KV
        rows = at_once(self.catalog.lookup(bucket.name, [key], rescue=is_kv))
        row = rows[0] if rows else None
        if row is None or not row.size_bytes or len(row.blobs) != 1 or (is_kv and row.digest is None):
            return None
        (blob,) = row.blobs
        if blob.codec != CODEC_RAW:
            return None
        body: bytes | ObjectReader | None
        if row.size_bytes <= COPIED_BYTES_MAX:
            start = raw_payload_offset(row.size_bytes)
            body = self._hot_bytes(cast("BlobId", blob.blob_id), start, start + row.size_bytes)
        else:
            body = None if only_short else self._open_hot(row, 0, row.size_bytes)
        if body is None:
            return None
        self._on_hot_read(row)
        return HotRead(row, body)

    def look_up_hot(self, bucket: BucketRow, key: str) -> HotRead | None:
        """See `ObjectStore.look_up_hot`."""
        is_kv = bucket.kind is BucketKind.KV
        rows = at_once(self.catalog.lookup(bucket.name, [key], rescue=is_kv))
        row = rows[0] if rows else None
        if row is None or (is_kv and row.digest is None):
            return None
        if is_kv:
            self._on_asked(row)
        return HotRead(row, b"")

    async def frame_of(self, row: ObjectRow) -> PinnedFrame | None:
        """The whole frame of an object of one blob, every byte of it there, pinned for the caller; None as from `open`, as which it
        counts. `BusyError`: no room to read it into."""
        frame = await self._placement.read.get(BlobId(row.blobs[0].blob_id))
        if frame is not None and frame.progress is not None:
            try:
                await frame.complete()
            except (UnavailableError, CorruptionError):
                frame.release()
                frame = None
            except BaseException:
                frame.release()
                raise
        if frame is None:
            await self.forget_if_lost(row)
            await self.refuse_if_away(row)
            return None
        self._on_read(row)
        return frame

    def _open_hot(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """A reader of one blob that lies in memory as it is to be read; None for all else. Where nothing has to be waited for, the
        tiers' layers cost more than the read."""
        if len(row.blobs) != 1 or start >= stop:
            return None
        (blob,) = row.blobs
        frame = None if stored_codec(blob) is not None else self._hot_frame(cast("BlobId", blob.blob_id))
        if frame is None:
            return None
        self._in_use.hold((blob.blob_id,))
        return ObjectReader([BlobSlice(blob, start, stop)], frame, tier=self._placement.read, in_use=self._in_use)

    async def _open_blobs(self, blobs: Sequence[BlobRef], start: int, stop: int) -> ObjectReader | None:
        slices = slices_of(blobs, start, stop)
        held = [part.blob.blob_id for part in slices]
        self._in_use.hold(held)
        try:
            first = await fetch(self._placement.read, slices[0]) if slices else None
        except BaseException:
            self._in_use.release(held)
            raise
        if slices and first is None:
            self._in_use.release(held)
            return None
        return ObjectReader(slices, first, tier=self._placement.read, in_use=self._in_use)

    async def refuse_if_away(self, row: ObjectRow) -> None:
        """What could not be read of an ordinary object of class `shared` is there all the same, unless a tier says that it is not:
        `TierUnavailableError` rather than an answer that would let the client take it for lost."""
        if row.durability is not Durability.SHARED:
            return
        bucket = await self.catalog.bucket(row.bucket)
        if bucket is None or bucket.kind is BucketKind.KV:
            return
        (current,) = await self.catalog.lookup(row.bucket, [row.key])
        if current is None or current.blob_ids != row.blob_ids:
            return  # replaced since it was looked up
        if not await self._are_missing([BlobId(blob.blob_id) for blob in row.blobs]):
            raise TierUnavailableError("the object is on the remote tier, which does not give it", key=row.key)

    async def forget_if_lost(self, row: ObjectRow) -> None:
        """Drop a chunk's row if its bytes are gone for good, so that the next PUT of the chunk stores it again.

        A medium that merely fails loses nothing; rows of ordinary buckets stay, for an operator to see.
        """
        bucket = await self.catalog.bucket(row.bucket)
        if bucket is None or bucket.kind is not BucketKind.KV:
            return
        (current,) = await self.catalog.lookup(row.bucket, [row.key])
        if current is None or current.blob_ids[len(current.blobs) :] != row.blob_ids[len(row.blobs) :]:
            return  # a lossy copy was made, or made anew, since the row was read
        if row.lossy is not None:
            # What was read may have been that copy or the bytes themselves: while either is there, the chunk is.
            if not await self._are_gone([row.lossy.blob_id]):
                return
            row = current
        if await self._are_gone([blob.blob_id for blob in row.blobs]):
            await self.catalog.drop_rows([row], now_ms=self._clock.now_ms())
            self._on_removed([row])

    async def _are_gone(self, blob_ids: Sequence[bytes]) -> bool:
        """Whether some of these blobs are nowhere, or nowhere sound."""
        ids = [BlobId(blob_id) for blob_id in blob_ids]
        return any(blob_id in self._corrupt for blob_id in ids) or await self._are_missing(ids)

    async def _are_missing(self, blob_ids: list[BlobId]) -> bool:
        try:
            return bool(await self._placement.read.missing(blob_ids))
        except UnavailableError:
            return False

    async def settled(self, row: ObjectRow, *, wait: bool = True) -> ObjectRow:
        """The row with its digest, waiting for it (unless told not to) where it is still being computed."""
        return await self._commit_step.sealing.settled(row, wait=wait)

    # -- removal -------------------------------------------------------------------------------------------------
    async def delete(
        self, bucket: str, keys: Sequence[str], conditions: Sequence[WriteCondition | None] = ()
    ) -> list[DeleteOutcome]:
        """Hide the keys at once, of chunks with all that follows on them; their bytes go soon after. See `Catalog.delete`.
        Parts of a chunk that is not whole yet are given up. A profile that a namespace names stays (`DeleteOutcome.kept`)."""
        kept = await self._named_profiles(bucket, keys) if any(key.startswith(KEY_PREFIX) for key in keys) else {}
        if kept:
            return await self._delete_others(bucket, keys, conditions, kept)
        outcomes = await self.catalog.delete(bucket, keys, conditions=conditions, now_ms=self._clock.now_ms())
        gone = [outcome.key for outcome in outcomes if not outcome.precondition_failed]
        await self._uploads.give_up_parts(bucket, gone)
        if self.arriving.is_watched:
            for key in gone:
                self.arriving.tell(bucket, key)
        removed = [outcome.removed for outcome in outcomes if outcome.removed is not None]
        removed += [row for outcome in outcomes for row in outcome.descendants]
        self._on_removed(removed)
        await self.removed(bucket)
        return outcomes

    async def delete_bucket(self, name: str) -> None:
        """Remove an empty bucket. Errors as `Catalog.delete_bucket`."""
        await self.catalog.delete_bucket(name)
        self._on_removed([])  # parts of uploads that ended with it
        await self.removed(name)

    async def removed(self, bucket: str | None) -> None:
        """Before anybody is told that a bucket or something of it (None: a user) is gone: see `SharedWrites.removed`."""
        if self._shared is not None:
            await self._shared.removed(bucket)

    async def _delete_others(
        self,
        bucket: str,
        keys: Sequence[str],
        conditions: Sequence[WriteCondition | None],
        kept: Mapping[str, str],
    ) -> list[DeleteOutcome]:
        """Delete all keys but those of profiles that namespaces name."""
        chosen = [index for index, key in enumerate(keys) if key not in kept]
        some = [conditions[index] for index in chosen] if conditions else []
        others = iter(await self.delete(bucket, [keys[index] for index in chosen], some) if chosen else [])
        return [
            DeleteOutcome(key, None, kept=f"the namespace {kept[key]} names this profile")
            if key in kept
            else next(others)
            for key in keys
        ]

    async def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """Forget an upload and its parts. `NoSuchUploadError`."""
        await self.catalog.abort_upload(bucket, key, upload_id, now_ms=self._clock.now_ms())
        self.arriving.tell(bucket, key)
        self._on_removed([])

    # -- compositions --------------------------------------------------------------------------------------------
    async def copy(
        self,
        source: ObjectRow,
        start: int,
        stop: int,
        request: PutRequest,
        *,
        checksums: tuple[Checksum, ...] = (),
        checksum_algorithm: str | None = None,
    ) -> PutResult | None:
        """Write the source's bytes `[start, stop)` as the request's object or part; None where they are lost.

        `checksum_algorithm` (an S3 name, also in `request.algorithms`) is computed and stored instead of `checksums`. Errors as
        `start_put` and `PutTransfer.commit`.
        """
        reader = await self.open(source, start, stop)
        if reader is None:
            return None
        source_bytes = ReaderSource(reader)
        try:
            async with await self.start_put(request) as transfer:
                if transfer.existing is not None:
                    existing = transfer.existing
                    return PutResult(row=existing, existed=True, durability=existing.durability)
                await transfer.receive(source_bytes)
                if checksum_algorithm is not None:
                    value = (await transfer.digests()).base64(checksum_algorithm.lower())
                    checksums = (Checksum(algorithm=checksum_algorithm, value=value),)
                return await transfer.commit(checksums=checksums)
        finally:
            await source_bytes.aclose()
            await reader.aclose()

    async def complete_upload(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: Sequence[CompletedPart],
        *,
        condition: WriteCondition | None = None,
        checksums: tuple[Checksum, ...] = (),
        size_bytes: int | None = None,
    ) -> PutResult:
        """Make one object of an upload's parts, in one step. `size_bytes`: what the client says the object must have.

        A chunk with a tensor layout becomes one blob (`uploads`). Errors: `InvalidPartError`, `InvalidPartOrderError`,
        `EntityTooSmallError`, `InvalidRequestError` (another size), `LayoutMismatchError`, and those of `Catalog.commit`.
        """
        return await self._uploads.complete(
            bucket, upload, parts, condition=condition, checksums=checksums, size_bytes=size_bytes
        )

    async def start_group_part(self, request: PutRequest) -> GroupStart:
        """Begin to write one part of a chunk that arrives in parts (`request.place.group`). See `UploadEnds.start_part`."""
        durability = self.durability_of(request.bucket, request.durability)
        try:
            existing = await self._early_look(request)
        except ParentNotFoundError:
            existing = await self._uploads.live_or_coming(request.bucket.name, request.key, request.place, durability)
        start = GroupStart(existing=existing)
        if existing is None or not await self._stands(existing, durability):
            start = await self._uploads.start_part(request, durability)
        if start.existing is None:
            return start
        (existing,) = await self.reached([start.existing], request.bucket, request.durability)
        return GroupStart(existing=existing)

    async def end_group(
        self, request: PutRequest, transfer: ReceivedPart | None = None, *, checksums: tuple[Checksum, ...] = ()
    ) -> GroupState:
        """After a part was received (by the transfer; None: an earlier writer's stands): commit it, and the chunk if all its
        parts are there. Errors as `PutTransfer.commit`; where the chunk is refused, its parts stay."""
        if transfer is None:
            return await self._uploads.end_group(request)
        return await self._uploads.end_part(request, transfer, checksums)

    async def _start_whole(self, request: PutRequest, durability: Durability) -> PutTransfer | None:
        """A transfer for an upload's bytes as one blob; None where they are too many for one, or there is no room to spare."""
        if len(self._split.sizes(request.size_bytes)) > 1:
            return None
        if durability is Durability.MEMORY and not self._placement.may_stay_dirty(raw_frame_bytes(request.size_bytes)):
            return None
        try:
            return await self._reserve(request, None, durability)
        except CapacityError:
            return None
