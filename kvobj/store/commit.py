"""The last step of a write: blobs are placed where their class needs them, then one catalog commit makes them visible.

Class `memory` in a raw KV bucket does not wait for digests: the row is committed without them, and `Sealing` makes them after it.
A crash in between is healed by adoption, which hashes what was unsealed before it serves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Final

from kvobj.arena import Arena, Pin, PinnedFrame
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BlobRef,
    BucketKind,
    BucketRow,
    Checksum,
    CommitMode,
    CommitOutcome,
    Durability,
    ObjectRow,
    PartRow,
)
from kvobj.clock import Clock
from kvobj.codec.checksums import blake3_digest
from kvobj.codec.codec import codec_named
from kvobj.codec.frame import CODEC_RAW, one_block_frame, raw_frame_bytes, raw_payload_offset
from kvobj.database import WriteView
from kvobj.errors import KvobjError, StoreFullError
from kvobj.ids import BlobId
from kvobj.store.arriving import ArrivingKeys
from kvobj.store.ingest import PutTransfer, ReceivedBlob
from kvobj.store.placement import EarlyPut, Placement
from kvobj.store.remote_class import SharedWrites, Sharing
from kvobj.store.requests import PutRequest, PutResult
from kvobj.store.sealing import Sealing, ToldHash
from kvobj.store.write_behind import WriteBehind
from kvobj.task_endings import to_their_end
from kvobj.tiers.coded_frames import Coding
from kvobj.tiers.protocol import BlobNames

MAKE_ROOM_MAX: Final = 8
"""How often room is made for one blob before its writer is refused."""


def kv_etag(blob_id: bytes) -> str:
    """The opaque ETag of a KV chunk, in the shape of a multipart object's of one part: no client takes it for an MD5.

    What stands behind the only hyphen is a number: aws-c-s3 reads the number of parts there, and without one its transfers of
    large objects never end (seen with NIXL 1.5.1; awslabs/aws-c-s3 pull request 662).
    """
    return f"kv{blob_id.hex()[-24:]}-1"


class CommitStep:
    """Implements `ingest.Committer` over tiers and catalog. Event-loop-only."""

    def __init__(
        self,
        *,
        arena: Arena,
        catalog: Catalog,
        placement: Placement,
        write_behind: WriteBehind,
        sealing: Sealing,
        arriving: ArrivingKeys,
        clock: Clock,
        hash_executor: Executor,
        make_room: Callable[[int], Awaitable[int]],
        on_written: Callable[[ObjectRow], Awaitable[None]],
        reserve_timeout_seconds: float,
        shared: SharedWrites | None = None,
    ) -> None:
        """`arriving`: the writes under way, as `Store` has them. `shared`: where there is a remote, what class `shared` takes."""
        self._arena = arena
        self._catalog = catalog
        self._placement = placement
        self._write_behind = write_behind
        self._arriving = arriving
        self._clock = clock
        self._executor = hash_executor
        self._make_room = make_room
        self._on_written = on_written
        self._reserve_timeout_seconds = reserve_timeout_seconds
        self._shared = shared
        self.sealing = sealing

    async def reserve(
        self, plain_sizes: list[int], *, codec: str = "raw", bucket: BucketRow | None = None
    ) -> list[Pin]:
        """Extents for raw frames of the given plain sizes, all or none, and a last one to encode into if the codec is not raw; in
        the bucket's own regions where it has such.

        All in one reservation: half-served writers that wait for each other would never finish.
        """
        lengths = [raw_frame_bytes(plain_bytes) for plain_bytes in plain_sizes]
        if codec != "raw":
            lengths.append(codec_named(codec).encode_bound(plain_sizes[0]))
        if len(lengths) == 1:
            pin = self._arena.try_reserve(lengths[0], bucket=bucket)
            if pin is not None:
                return [pin]
        return await self._arena.reserve_many(lengths, timeout_seconds=self._reserve_timeout_seconds, bucket=bucket)

    async def encode(self, blob: ReceivedBlob, bucket: BucketRow, into: Pin) -> ReceivedBlob:
        """See `Committer.encode`."""
        assert blob.hash is not None
        assert blob.hash.digest is not None
        digest = blob.hash.digest
        # KV tensors are 2-byte floats nearly always: their planes are what makes zp worth its time. A wrong guess costs
        # ratio, never bytes.
        element_bytes = 2 if bucket.kind is BucketKind.KV else 1

        def work() -> int:
            codec = codec_named(bucket.codec)
            return codec.encode(blob.payload, into.view, digest=digest, element_bytes=element_bytes)

        frame_bytes = await asyncio.get_running_loop().run_in_executor(self._executor, work)
        encoded = ReceivedBlob(blob.blob_id, into, blob.plain_bytes, bucket.codec)
        encoded.frame_bytes = frame_bytes
        encoded.frame = PinnedFrame(into, frame_bytes=frame_bytes)
        encoded.hash = blob.hash
        encoded.sealed = True
        return encoded

    def begin_home(self, transfer: PutTransfer, blob: ReceivedBlob) -> EarlyPut | None:
        """See `Committer.begin_home`."""
        is_part_for_home = transfer.request.part is not None and not transfer.dirty_reserved_bytes
        goes_home = transfer.durability is not Durability.MEMORY or not transfer.single or is_part_for_home
        if not goes_home or transfer.request.bucket.codec != "raw" or self._home_coding(transfer) is not None:
            return None
        return self._placement.begin_home(blob.blob_id, blob.frame, head_bytes=raw_payload_offset(blob.plain_bytes))

    def _home_coding(self, transfer: PutTransfer) -> Coding | None:
        """How the transfer's one blob is to lie in the home tier, if its namespace says so."""
        coded, request = self._placement.coded, transfer.request
        if coded is None or request.place is None or request.part is not None or not transfer.single:
            return None
        if request.bucket.codec != "raw":
            return None
        return coded.of_chunk(request.place.namespace, tokens=request.place.tokens, plain_bytes=request.size_bytes)

    async def write_home(
        self,
        blob: ReceivedBlob,
        names: BlobNames,
        *,
        keep_cached: bool,
        coding: Coding | None = None,
        rides: bool = False,
    ) -> None:
        """See `Committer.write_home`; `rides` as of `Placement.put_home`."""
        hold_home = self._placement.hold_home
        for attempts_left in reversed(range(MAKE_ROOM_MAX + 1)):
            try:
                await hold_home(blob.blob_id, blob.frame, names, keep_cached=keep_cached, coding=coding, rides=rides)
            except StoreFullError:
                # Chunks of KV buckets are a cache, and so is what the remote has: they give way before a writer is refused. More
                # than once: the room that was made may be in pieces, or another writer's by the time it is asked for.
                if not attempts_left or not await self._make_room(blob.frame_bytes):
                    raise
            else:
                return

    async def abandon(self, transfer: PutTransfer) -> None:
        """See `Committer.abandon`."""
        self._give_back_dirty(transfer)
        with suppress(KvobjError):  # a tier that fails here keeps an orphan, which the next sweep finds
            await self._placement.discard(transfer.written)

    def _give_back_dirty(self, transfer: PutTransfer) -> None:
        if transfer.dirty_reserved_bytes:
            self._placement.unreserve_dirty(transfer.dirty_reserved_bytes)
            transfer.dirty_reserved_bytes = 0

    async def finish(self, transfer: PutTransfer, checksums: tuple[Checksum, ...], *, want_digest: bool) -> PutResult:
        """See `Committer.finish`."""
        request = transfer.request
        if request.part is not None:
            return await self._commit_part(transfer, checksums)
        if self._is_of_one_step(transfer):
            await self._hash_held(transfer, want_digest=want_digest)
            done = self._commit_held(transfer, checksums)
            if done is not None:
                await self.conclude(transfer, done)
                return PutResult(row=done.row, existed=False, durability=Durability.MEMORY)
        row = await self.place(transfer, checksums, want_digest=want_digest)
        if self._shared is not None and transfer.mode is CommitMode.REPLACE:
            row = await self._shared.replacing(row, transfer.sharing)
        # From here on the catalog owns the blobs, whatever it answers (`Catalog.commit`). Seen through also where the writer goes
        # meanwhile: the catalog commits what it was asked for, and what it commits has to be concluded.
        transfer.hand_over()
        committing = asyncio.create_task(self._see_through(transfer, row))
        await to_their_end([committing])
        outcome = committing.result()
        stands = outcome.row
        if self._shared is not None and transfer.sharing is not Sharing.NONE:
            if not outcome.existed:
                self._shared.committed(stands)
            await transfer.let_go()  # the wait for the remote holds nothing of the arena
            (stands,) = await self._shared.reached([stands], transfer.sharing)
        return PutResult(row=stands, existed=outcome.existed, durability=stands.durability)

    async def _see_through(self, transfer: PutTransfer, row: ObjectRow) -> CommitOutcome:
        request = transfer.request
        outcome: CommitOutcome | None = None
        try:
            outcome = await self._catalog.commit(
                row,
                mode=transfer.mode,
                condition=request.condition,
                upload_id=None if request.ends is None else request.ends.upload_id,
                quota=None if request.place is None else request.place.quota,
                parent_tokens=0 if request.place is None else request.place.parent_tokens,
                made_ms=request.bucket.created_ms,
                namespace_root=b"" if request.place is None else request.place.namespace_root,
                now_ms=row.modified_ms,
                to_remote=transfer.sharing is not Sharing.NONE,
            )
        finally:
            if self._shared is not None:
                self._shared.concluded(row)
            await self.conclude(transfer, outcome)
        return outcome

    def _is_of_one_step(self, transfer: PutTransfer) -> bool:
        """Whether frame and row of the body can become known in one volatile commit, if nothing is in its way."""
        return (
            transfer.durability is Durability.MEMORY
            and transfer.held is not None
            and transfer.sharing is Sharing.NONE
            and (self._shared is None or transfer.mode is not CommitMode.REPLACE)
            and transfer.request.ends is None
            and transfer.request.bucket.codec == CODEC_RAW
        )

    def _commit_held(self, transfer: PutTransfer, checksums: tuple[Checksum, ...]) -> CommitOutcome | None:
        """`place` and commit of what `_hash_held` has seen to, in one step: a second volatile commit costs as much as the look for
        the row. None, and nothing was done: the two then do it one by one, or say why not."""
        blob, refs = transfer.held, transfer.refs
        assert blob is not None
        refs.append(blob.ref())
        row = self._row_of(transfer, checksums)
        pin = blob.pin.share()
        outcome: CommitOutcome | None = None
        try:
            outcome = self._placement.cache.put_within(
                blob.blob_id,
                pin,
                blob.frame_bytes,
                partial(self._commit_row_at_once, transfer.request, row, transfer.mode),
                sealed=blob.sealed,
            )
        finally:
            if outcome is None:
                pin.release()
                refs.pop()
        if outcome is not None:
            transfer.hand_over()
        return outcome

    def _commit_row_at_once(
        self, request: PutRequest, row: ObjectRow, mode: CommitMode, beside: Callable[[WriteView], None]
    ) -> CommitOutcome | None:
        place = request.place
        return self._catalog.commit_at_once(
            row,
            mode=mode,
            condition=request.condition,
            quota=None if place is None else place.quota,
            parent_tokens=0 if place is None else place.parent_tokens,
            made_ms=request.bucket.created_ms,
            namespace_root=b"" if place is None else place.namespace_root,
            now_ms=row.modified_ms,
            beside=beside,
        )

    async def place(self, transfer: PutTransfer, checksums: tuple[Checksum, ...], *, want_digest: bool) -> ObjectRow:
        """See `Committer.place`."""
        if transfer.held is not None:
            await self._place_held(transfer, want_digest=want_digest)
            self._give_back_dirty(transfer)  # the cache counts its bytes from here on
        return self._row_of(transfer, checksums)

    def place_together(self, transfers: Sequence[PutTransfer]) -> list[ObjectRow] | None:
        """See `Committer.place_together`."""
        blobs: list[ReceivedBlob] = []
        for transfer in transfers:
            blob = transfer.held
            if blob is None or not transfer.hash_later or not self._may_defer(transfer):
                return None
            blobs.append(blob)
        if not self.sealing.has_room(sum(blob.plain_bytes for blob in blobs)):
            return None
        for transfer, blob in zip(transfers, blobs, strict=True):
            transfer.written.append(blob.blob_id)
        self._placement.hold_unsealed([(blob.blob_id, blob.frame) for blob in blobs])
        for transfer, blob in zip(transfers, blobs, strict=True):
            transfer.refs.append(blob.ref())
            self._give_back_dirty(transfer)
        return [self._row_of(transfer, ()) for transfer in transfers]

    def put_at_once(
        self,
        request: PutRequest,
        body: bytes,
        blob_id: BlobId,
        *,
        mode: CommitMode,
        etag: str,
        checksums: tuple[Checksum, ...],
    ) -> PutResult | None:
        """All that a transfer does with a body of one block of class `memory` in a raw bucket, from reserving to write-behind,
        before this returns: the frame and the row become known in one volatile commit. `etag` and `checksums` are the row's.

        None, and nothing was done: something has to be waited for, or the write is to be refused or answered by what stands. A
        transfer does it then, or tells why not.
        """
        bucket = request.bucket
        frame_bytes = raw_frame_bytes(len(body))
        if self._shared is not None and self._shared.must_queue(bucket, Sharing.NONE):
            return None
        if not self._placement.has_dirty_room(frame_bytes):
            return None
        pin = self._arena.try_reserve(frame_bytes, bucket=bucket)
        if pin is None:
            return None
        outcome: CommitOutcome | None = None
        try:
            digest = blake3_digest(memoryview(body))
            pin.view[:frame_bytes] = one_block_frame(body, digest)
            ref = BlobRef(bytes(blob_id), len(body), frame_bytes, digest, CODEC_RAW)
            row = self._row(request, (ref,), etag=etag, digest=digest, checksums=checksums)
            commit = partial(self._commit_row_at_once, request, row, mode)
            outcome = self._placement.cache.put_within(blob_id, pin, frame_bytes, commit, sealed=True)
        finally:
            if outcome is None:
                pin.release()
        if outcome is None:
            return None
        self._write_behind.enqueue(outcome.row)
        self._arriving.tell(bucket.name, request.key)
        return PutResult(row=outcome.row, existed=False, durability=Durability.MEMORY)

    def put_filled(
        self, request: PutRequest, room: ReceivedBlob, *, checksums: tuple[Checksum, ...]
    ) -> tuple[PutResult, ToldHash] | None:
        """`put_at_once` of a chunk whose bytes lie in a room that was prepared for such (`PreparedRooms`), and whose hash is told
        later by who put them there. The room is the store's from here on.

        None, and nothing was done, as there; the room is still the caller's then.
        """
        bucket, plain_bytes, blob_id, frame_bytes = request.bucket, room.plain_bytes, room.blob_id, room.frame_bytes
        if self._shared is not None and self._shared.must_queue(bucket, Sharing.NONE):
            return None
        if not self._placement.has_dirty_room(frame_bytes) or not self.sealing.has_room(plain_bytes):
            return None
        ref = BlobRef(bytes(blob_id), plain_bytes, frame_bytes, None, CODEC_RAW)
        row = self._row(request, (ref,), etag=kv_etag(blob_id), digest=None, checksums=checksums)
        commit = partial(self._commit_row_at_once, request, row, CommitMode.FIRST_WRITER_WINS)
        pin = room.pin.share()
        outcome: CommitOutcome | None = None
        try:
            outcome = self._placement.cache.put_within(blob_id, pin, frame_bytes, commit, sealed=False)
        finally:
            if outcome is None:
                pin.release()
        if outcome is None:
            return None
        self._arriving.tell(bucket.name, request.key)
        told = self.sealing.follow_told(room, outcome.row)
        return PutResult(row=outcome.row, existed=False, durability=Durability.MEMORY), told

    @staticmethod
    def _may_defer(transfer: PutTransfer) -> bool:
        """Whether the body's digest may follow its acknowledgement, but for how much of that there is already."""
        return (
            transfer.durability is Durability.MEMORY
            and transfer.request.part is None
            and transfer.request.bucket.codec == "raw"
            and transfer.is_body_digested
        )

    def _row_of(self, transfer: PutTransfer, checksums: tuple[Checksum, ...]) -> ObjectRow:
        refs = tuple(transfer.refs)
        return self._row(
            transfer.request,
            refs,
            etag=self._etag(transfer, refs),
            digest=refs[0].digest if len(refs) == 1 else self._whole_digest(transfer),
            checksums=checksums,
            durability=transfer.durability,
        )

    def _row(
        self,
        request: PutRequest,
        refs: tuple[BlobRef, ...],
        *,
        etag: str,
        digest: bytes | None,
        checksums: tuple[Checksum, ...],
        durability: Durability = Durability.MEMORY,
    ) -> ObjectRow:
        place = request.place
        return ObjectRow(
            bucket=request.bucket.name,
            key=request.key,
            blobs=refs,
            size_bytes=request.size_bytes,
            etag=etag,
            modified_ms=self._clock.now_ms(),
            owner=request.owner,
            durability=durability,
            headers=dict(request.headers),
            metadata=dict(request.metadata),
            checksums=checksums,
            parts=() if request.ends is None else request.ends.parts,
            digest=digest,
            parent=None if place is None else place.parent,
            namespace="" if place is None else place.namespace.name,
            tokens=0 if place is None else place.tokens,
            acl=request.acl,
            tags=dict(request.tags) if request.tags else {},
        )

    async def conclude(self, transfer: PutTransfer, outcome: CommitOutcome | None) -> None:
        """See `Committer.conclude`."""
        self._give_back_dirty(transfer)
        if outcome is not None:
            refs = transfer.refs
            transfer.arrival.settle(outcome, refs[0].digest if len(refs) == 1 else None)
        if outcome is None or outcome.existed:
            return
        if transfer.durability is Durability.MEMORY and transfer.held is not None and not transfer.held.sealed:
            blob, transfer.held = transfer.held, None
            self.sealing.follow(blob, outcome.row, is_hashed_later=transfer.hash_later)
        else:
            await self.committed(outcome.row)

    async def _commit_part(self, transfer: PutTransfer, checksums: tuple[Checksum, ...]) -> PutResult:
        request = transfer.request
        assert request.part is not None
        if transfer.held is not None:
            await self._place_held(transfer, want_digest=True)
        refs = tuple(transfer.refs)
        now_ms = self._clock.now_ms()
        part = PartRow(
            upload_id=request.part.upload_id,
            number=request.part.number,
            blobs=refs,
            size_bytes=request.size_bytes,
            etag=self._etag(transfer, refs),
            modified_ms=now_ms,
            checksum=checksums[0] if checksums else None,
        )
        transfer.hand_over()
        try:
            stands = await self._catalog.put_part(
                request.bucket.name,
                request.key,
                part,
                made_ms=request.bucket.created_ms,
                namespace_root=b"" if request.place is None else request.place.namespace_root,
                now_ms=now_ms,
            )
        finally:
            transfer.count_no_more()
            self._give_back_dirty(transfer)
        # Of a chunk's part the first writer's stands.
        existed = stands.blobs != part.blobs
        return PutResult(row=stands, existed=existed, durability=transfer.durability)

    async def _hash_held(self, transfer: PutTransfer, *, want_digest: bool) -> None:
        """Hash and seal the body, unless its digest may follow the acknowledgement."""
        blob = transfer.held
        assert blob is not None
        assert blob.hash is not None
        # What is hashed where it is costs less than the job, the task and the second mark of a digest that follows.
        may_defer = (
            not want_digest
            and not transfer.is_small
            and self._may_defer(transfer)
            and self.sealing.has_room(blob.plain_bytes)
        )
        if not may_defer or blob.hash.finished:
            transfer.hash_now()
            await blob.hash.wait()
            blob.seal()

    async def _place_held(self, transfer: PutTransfer, *, want_digest: bool) -> None:
        await self._hash_held(transfer, want_digest=want_digest)
        blob = transfer.held
        assert blob is not None
        if transfer.request.bucket.codec != "raw":  # never before its digest is there
            blob = await self._encode_held(transfer, blob)
        in_memory = transfer.durability is Durability.MEMORY
        transfer.written.append(blob.blob_id)
        if in_memory and not (transfer.request.part is not None and not transfer.dirty_reserved_bytes):
            await self._placement.hold_dirty(blob.blob_id, blob.frame, transfer.names, sealed=blob.sealed)
        else:
            coding = self._home_coding(transfer)
            # A part's row may be a volatile one, whatever its class.
            rides = not in_memory and transfer.request.part is None
            await self.write_home(blob, transfer.names, keep_cached=True, coding=coding, rides=rides)
        transfer.refs.append(blob.ref())

    async def _encode_held(self, transfer: PutTransfer, plain: ReceivedBlob) -> ReceivedBlob:
        encoded = await transfer.encoded(plain)
        transfer.arrival.end_bytes()
        plain.frame.release()
        transfer.held = encoded
        # The extent was reserved for the worst case: keep no more of the arena than the frame needs.
        exact = self._arena.try_reserve(encoded.frame_bytes, bucket=transfer.request.bucket)
        if exact is not None:
            exact.view[: encoded.frame_bytes] = encoded.frame.view
            encoded.frame.release()
            encoded.pin = exact
            encoded.frame = PinnedFrame(exact, frame_bytes=encoded.frame_bytes)
        return encoded

    @staticmethod
    def _etag(transfer: PutTransfer, refs: tuple[BlobRef, ...]) -> str:
        if transfer.request.bucket.kind is BucketKind.KV:
            return kv_etag(refs[0].blob_id)
        body = transfer.body_digester
        assert body is not None
        return body.hexdigest("md5")

    @staticmethod
    def _whole_digest(transfer: PutTransfer) -> bytes | None:
        body = transfer.body_digester
        return body.digest("blake3") if body is not None and "blake3" in body.algorithms else None

    async def committed(self, row: ObjectRow) -> None:
        """A row whose blobs are all sealed has become visible."""
        if row.durability is Durability.MEMORY:
            self._write_behind.enqueue(row)
        else:
            await self._on_written(row)
