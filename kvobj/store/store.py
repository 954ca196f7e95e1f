"""The store: one put, one get, one delete, one copy. Coordination only.

Where bytes lie is the tiers' business, what exists is the catalog's, what stands where somebody writes is `standing`'s, room is
`rooms`', how bodies are received and hashed is `ingest`'s, what a class of durability needs is `placement`'s, how uploads become
objects is `uploads`', how objects are read `object_reads`', how they go `removals`'. All calls come from one event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor

from kvobj.arena import Pin, PinnedFrame
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BucketRow,
    Checksum,
    DeleteOutcome,
    Durability,
    ObjectRow,
    UploadRow,
    WriteCondition,
)
from kvobj.clock import Clock
from kvobj.codec.checksums import Digester
from kvobj.errors import InvalidRequestError, NoSuchUploadError, ParentNotFoundError
from kvobj.ids import BlobId, BlobIdAllocator
from kvobj.store.arriving import ArrivingKeys
from kvobj.store.commit import CommitStep
from kvobj.store.following import Following
from kvobj.store.groups import GroupStart, GroupState
from kvobj.store.ingest import PutTransfer, ReceivedBlob, WholeSource
from kvobj.store.lost_rows import LostRows
from kvobj.store.multipart import CompletedPart
from kvobj.store.object_reads import ObjectReads
from kvobj.store.placement import Placement
from kvobj.store.places import ChunkPlace
from kvobj.store.reader import HotRead, ObjectReader, ReaderSource
from kvobj.store.remote_class import SharedWrites
from kvobj.store.removals import Removals
from kvobj.store.representation import Accepted
from kvobj.store.requests import PartTarget, PutRequest, PutResult
from kvobj.store.rooms import WriteRooms
from kvobj.store.sealing import ToldHash
from kvobj.store.split import BlobSplit
from kvobj.store.standing import Standing
from kvobj.store.uploads import ReceivedPart, UploadEnds
from kvobj.store.whole_writes import WholeWrites
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.in_use import BlobsInUse


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
        self._commit_step = commit_step
        self.arriving = arriving
        self._lost = LostRows(catalog=catalog, placement=placement, corrupt=corrupt, clock=clock, on_removed=on_removed)
        self._standing = Standing(catalog=catalog, lost=self._lost, on_asked=on_asked)
        self._rooms = WriteRooms(
            placement=placement,
            commit_step=commit_step,
            arriving=arriving,
            blob_ids=blob_ids,
            hash_executor=hash_executor,
            split=split,
            shared=shared,
        )
        self._reads = ObjectReads(
            catalog=catalog,
            placement=placement,
            lost=self._lost,
            in_use=in_use,
            on_asked=on_asked,
            on_read=on_read,
            on_hot_read=on_hot_read,
            hot_frame=hot_frame,
            hot_bytes=hot_bytes,
        )
        self._uploads = UploadEnds(
            catalog=catalog,
            commit_step=commit_step,
            clock=clock,
            live_chunk=self._standing.standing_chunk,
            open_blobs=self._reads.open_blobs,
            start_whole=self._rooms.start_whole,
            on_removed=on_removed,
            on_whole=arriving.tell,
            on_gone=arriving.tell,
            shared=shared,
        )
        self._removals = Removals(
            catalog=catalog,
            arriving=arriving,
            uploads=self._uploads,
            shared=shared,
            clock=clock,
            on_removed=on_removed,
            named_profiles=named_profiles,
        )
        self._whole_writes = WholeWrites(catalog=catalog, commit_step=commit_step, blob_ids=blob_ids, split=split)
        self.following = Following(
            catalog=catalog,
            arriving=arriving,
            look_up=self.look_up,
            open_row=self._reads.open,
            open_blobs=self._reads.open_blobs,
        )

    # -- writes --------------------------------------------------------------------------------------------------
    async def start_put(self, request: PutRequest, *, room: Pin | None = None) -> PutTransfer:
        """Check what can be known before the body and reserve room for it.

        In a KV bucket a live row under the key is in the transfer's `existing`: the caller answers from it, and
        receives nothing. Errors: `PreconditionFailedError`, `NoSuchKeyError` (If-Match on an absent key), `NoSuchUploadError`,
        `BusyError` (no room within the deadline), `StoreFullError` (never any room), `InvalidRequestError` (a
        durability class that this store has no tier for), `QuotaExceededError` (a part: its upload's owner holds as much in
        unfinished uploads as one user may).

        `room`: the extent that a body of one blob, in a raw bucket and no part, goes to or lies in; it is the transfer's from here
        on, and released where there will be none.
        """
        if room is not None:
            return await self._start_in(request, room)
        if request.part is not None:
            return await self._start_part(request, request.part)
        existing, durability = await self._early_look(request)
        return await self._rooms.reserve(request, existing, durability)

    async def _start_in(self, request: PutRequest, room: Pin) -> PutTransfer:
        try:
            existing, durability = await self._early_look(request)
            transfer = await self._rooms.reserve(request, existing, durability, room=room)
        except BaseException:
            room.release()
            raise
        if existing is not None:
            room.release()
        return transfer

    async def _early_look(self, request: PutRequest) -> tuple[ObjectRow | None, Durability]:
        """The live chunk that answers for the write, and the class that the write gets."""
        existing = await self._standing.early_look(request)
        durability = self.durability_of(request.bucket, request.durability)
        if (
            existing is not None
            and existing.size_bytes == request.size_bytes
            and not await self._standing.stands(existing, durability)
        ):
            existing = None
        elif existing is not None and existing.size_bytes == request.size_bytes:
            (existing,) = await self.reached([existing], request.bucket, request.durability)
        return existing, durability

    def put_at_once(
        self, request: PutRequest, source: WholeSource, check: Callable[[Digester], tuple[Checksum, ...]]
    ) -> PutResult | None:
        """See `ObjectStore.put_at_once`."""
        return self._whole_writes.put(request, source, check)

    def put_filled(
        self, request: PutRequest, room: ReceivedBlob, checksums: tuple[Checksum, ...]
    ) -> tuple[PutResult, ToldHash] | None:
        """See `WholeWrites.put_filled`."""
        return self._whole_writes.put_filled(request, room, checksums)

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
        return await self._standing.of_batch(requests, self.durability_of(first.bucket, first.durability))

    async def start_beside(self, request: PutRequest, existing: ObjectRow | None) -> PutTransfer:
        """`start_in_batch` of who knows what stands already (`standing`)."""
        return await self._rooms.reserve(request, existing, self.durability_of(request.bucket, request.durability))

    async def _start_part(self, request: PutRequest, part: PartTarget) -> PutTransfer:
        """A part is of its upload's class, and counts for who began that."""
        place = request.place
        if place is None or place.group is None:
            return await self._reserve_part(request, part)
        writer = await self._uploads.writers.enter(request)
        try:
            if await self.catalog.upload(request.bucket.name, request.key, part.upload_id) is None:
                # Who began it was refused, and took it away: its class and what else it says are this writer's then.
                await self._uploads.start_part(request, self.durability_of(request.bucket, request.durability))
            transfer = await self._reserve_part(request, part)
        except BaseException:
            await writer.leave(is_stored=False)
            raise
        transfer.group = writer
        return transfer

    async def _reserve_part(self, request: PutRequest, part: PartTarget) -> PutTransfer:
        upload = await self.catalog.upload(request.bucket.name, request.key, part.upload_id)
        if upload is None:
            raise NoSuchUploadError("no such upload", upload_id=part.upload_id)
        counted = self.catalog.unfinished.reserve(upload.owner, request.size_bytes)
        try:
            transfer = await self._rooms.reserve(request, None, upload.durability)
        except BaseException:
            counted.release()
            raise
        transfer.counted = counted
        return transfer

    async def live_chunk(self, bucket: str, key: str, place: ChunkPlace | None) -> ObjectRow | None:
        """The live chunk that a writer of the key meets, as `look_up` gives it; where there is none, the parent has to be live.
        Raises `ParentNotFoundError`, and `LayoutMismatchError` (`parent`) where that is a partial chunk."""
        return await self._standing.live_chunk(bucket, key, place)

    def durability_of(self, bucket: BucketRow, asked: Durability | None) -> Durability:
        """The class a write gets: what was asked for, else the bucket's default, else an error. `NotSharedError` where class shared
        was asked for by name and the remote is known to be away."""
        durability = bucket.durability if asked is None else asked
        if durability is Durability.SHARED:
            if self._shared is None:
                raise InvalidRequestError("durability class shared needs a remote tier, and none is configured")
            self._shared.check(self._shared.sharing(bucket, durability, by_name=asked is Durability.SHARED))
        return durability

    # -- reads ---------------------------------------------------------------------------------------------------
    async def look_up(self, bucket: str, key: str, *, will_open: bool = False) -> ObjectRow | None:  # noqa: ARG002 - see `api.object_store`
        """A client asks for the chunk: it is live again if policy has condemned it, and held against policy for the grace time."""
        return await self._reads.look_up(bucket, key)

    async def pinned(self, bucket: str, key: str, pin: bytes, *, user_id: str) -> ObjectRow | None:
        """The row that the user's pin lets it read, also where DELETE has hidden it; None: no such pin, or it does not cover it."""
        return await self._reads.pinned(bucket, key, pin, user_id=user_id)

    async def represent(self, row: ObjectRow, accepts: Sequence[Accepted]) -> ObjectRow | None:
        """What a reader that takes these codecs gets of the object: a row to `open` (`representation.choose`); None: nothing
        will do. A lossy copy may be made coarser for it, which it waits for. `BusyError`: no room for that."""
        return await self._reads.represent(row, accepts)

    async def would_give(self, row: ObjectRow, accepts: Sequence[Accepted]) -> bool:
        """See `ObjectReads.would_give`."""
        return await self._reads.would_give(row, accepts)

    async def open(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """A reader over the object's bytes `[start, stop)`; None when no tier has them any more (a miss).

        The caller closes the reader. `TierUnavailableError`: they are on the remote, which does not answer; of a chunk that is a
        miss like any other. `FrameCorruptError` cannot come from here: a corrupt copy is a miss in its tier.
        """
        return await self._reads.open(row, start, stop)

    def open_hot(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """See `ObjectStore.open_hot`."""
        return self._reads.open_hot(row, start, stop)

    def read_hot(self, bucket: BucketRow, key: str, *, only_short: bool = False) -> HotRead | None:
        """See `ObjectStore.read_hot`."""
        return self._reads.read_hot(bucket, key, only_short=only_short)

    def look_up_hot(self, bucket: BucketRow, key: str) -> HotRead | None:
        """See `ObjectStore.look_up_hot`."""
        return self._reads.look_up_hot(bucket, key)

    async def frame_of(self, row: ObjectRow) -> PinnedFrame | None:
        """The whole frame of an object of one blob, every byte of it there, pinned for the caller; None as from `open`, as which it
        counts. `BusyError`: no room to read it into."""
        return await self._reads.frame_of(row)

    async def refuse_if_away(self, row: ObjectRow) -> None:
        """What could not be read of an ordinary object of class `shared` is there all the same, unless a tier says that it is not:
        `TierUnavailableError` rather than an answer that would let the client take it for lost."""
        await self._lost.refuse_if_away(row)

    async def forget_if_lost(self, row: ObjectRow) -> None:
        """Drop a chunk's row if its bytes are gone for good, so that the next PUT of the chunk stores it again.

        A medium that merely fails loses nothing; rows of ordinary buckets stay, for an operator to see.
        """
        await self._lost.forget_if_lost(row)

    async def settled(self, row: ObjectRow, *, wait: bool = True) -> ObjectRow:
        """The row with its digest, waiting for it (unless told not to) where it is still being computed."""
        return await self._commit_step.sealing.settled(row, wait=wait)

    # -- removal -------------------------------------------------------------------------------------------------
    async def delete(
        self,
        bucket: str,
        keys: Sequence[str],
        conditions: Sequence[WriteCondition | None] = (),
        *,
        made_ms: int | None = None,
    ) -> list[DeleteOutcome]:
        """Hide the keys at once, of chunks with all that follows on them; their bytes go soon after. See `Catalog.delete`.
        Parts of a chunk that is not whole yet are given up. A profile that a namespace names stays (`DeleteOutcome.kept`)."""
        return await self._removals.delete(bucket, keys, conditions, made_ms=made_ms)

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        """Remove an empty bucket. Errors as `Catalog.delete_bucket`."""
        await self._removals.delete_bucket(name, made_ms=made_ms)

    async def removed(self, bucket: str | None) -> None:
        """Before anybody is told that a bucket or something of it (None: a user) is gone: see `SharedWrites.removed`."""
        await self._removals.removed(bucket)

    async def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """Forget an upload and its parts. `NoSuchUploadError`."""
        await self._removals.abort_upload(bucket, key, upload_id)

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
            existing = await self._standing.early_look(request)
        except ParentNotFoundError:
            existing = await self._uploads.live_or_coming(request.bucket.name, request.key, request.place, durability)
        start = GroupStart(existing=existing)
        if existing is None or not await self._standing.stands(existing, durability):
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
