"""Writing an object: bytes are received into reserved extents, hashed beside the wire, and become visible in one commit.

States of a transfer: reserved (room for at most two blobs is held) → receiving → complete → committed. Leaving it
anywhere before the commit frees every extent and deletes every blob that was written down already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from kvobj.arena import Pin, PinnedFrame
from kvobj.catalog.rows import BlobRef, BucketRow, Checksum, CommitMode, CommitOutcome, Durability, ObjectRow
from kvobj.catalog.unfinished import Reservation
from kvobj.codec.checksums import Digester
from kvobj.codec.frame import HEADER_BYTES, raw_frame_bytes, raw_payload_offset, seal_raw
from kvobj.errors import IncompleteBodyError
from kvobj.ids import BlobId
from kvobj.store.arriving import Arrival, ArrivingKeys
from kvobj.store.group_writers import GroupWriter
from kvobj.store.hashing import INLINE_BYTES, BlobHash, HashPipeline
from kvobj.store.placement import EarlyPut
from kvobj.store.remote_class import Sharing
from kvobj.store.remote_room import QueueRoom
from kvobj.store.requests import PutRequest, PutResult
from kvobj.task_endings import ended
from kvobj.tiers.protocol import BlobNames


class ByteSource(Protocol):
    """See `api.message.ByteSource`; repeated here since the store is below the API."""

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """Fill the whole buffer, reporting how much of it is there."""
        ...


class WholeSource(Protocol):
    """A `ByteSource` that may be all here already."""

    def take_whole(self) -> bytes | None:
        """All of it, without waiting; `receive_into` gives it again. None, and nothing was taken: some is still to come, or it has
        to be got out of a framing."""
        ...


class ReceivedBlob:
    """One blob of a transfer while its bytes are in the arena."""

    __slots__ = ("blob_id", "codec", "frame", "frame_bytes", "hash", "pin", "plain_bytes", "sealed")

    def __init__(self, blob_id: BlobId, pin: Pin, plain_bytes: int, codec: str) -> None:
        self.blob_id = blob_id
        self.pin = pin
        self.plain_bytes = plain_bytes
        self.codec = codec
        self.frame_bytes = raw_frame_bytes(plain_bytes)
        self.frame = PinnedFrame(pin, frame_bytes=self.frame_bytes)
        self.hash: BlobHash | None = None
        self.sealed = False

    @property
    def payload(self) -> memoryview:
        """Where the plain bytes go."""
        offset = raw_payload_offset(self.plain_bytes)
        return self.frame.writable[offset : offset + self.plain_bytes]

    def unseal(self) -> None:
        """Wipe the header of whatever lay here before: a start must not take it for this frame's."""
        self.frame.writable[:HEADER_BYTES] = bytes(HEADER_BYTES)

    def seal(self) -> None:
        """Write header and directory in front of the payload; the hash must be finished."""
        assert self.hash is not None
        assert self.hash.digest is not None
        if not self.sealed:
            seal_raw(
                self.frame.writable,
                plain_bytes=self.plain_bytes,
                digest=self.hash.digest,
                block_crcs=self.hash.block_crcs,
            )
            self.sealed = True

    def ref(self) -> BlobRef:
        """The row's reference to this blob, with its digest if that is known."""
        digest = self.hash.digest if self.hash is not None else None
        return BlobRef(
            blob_id=bytes(self.blob_id),
            plain_bytes=self.plain_bytes,
            frame_bytes=self.frame_bytes,
            digest=digest,
            codec=self.codec,
        )


class Committer(Protocol):
    """The store's side of a transfer: rooms, tiers and the catalog."""

    async def encode(self, blob: ReceivedBlob, bucket: BucketRow, into: Pin) -> ReceivedBlob:
        """The hashed blob in the bucket's codec, in the extent `into`, whose pin the new blob takes over."""
        ...

    def begin_home(self, transfer: PutTransfer, blob: ReceivedBlob) -> EarlyPut | None:
        """Begin to write into the home tier a blob that is about to be received; None where that is not where it goes."""
        ...

    async def write_home(self, blob: ReceivedBlob, names: BlobNames, *, keep_cached: bool) -> None:
        """Put a sealed blob into the home tier."""
        ...

    async def finish(self, transfer: PutTransfer, checksums: tuple[Checksum, ...], *, want_digest: bool) -> PutResult:
        """Place what is not placed yet and commit."""
        ...

    async def place(self, transfer: PutTransfer, checksums: tuple[Checksum, ...], *, want_digest: bool) -> ObjectRow:
        """Place what is not placed yet; the row that is to be committed."""
        ...

    def place_together(self, transfers: Sequence[PutTransfer]) -> list[ObjectRow] | None:
        """`place` of all at once, without their digests; None, and nothing is done, where one of them has to wait for anything."""
        ...

    async def conclude(self, transfer: PutTransfer, outcome: CommitOutcome | None) -> None:
        """The row was committed, or (None) refused."""
        ...

    async def abandon(self, transfer: PutTransfer) -> None:
        """Undo: delete blobs that were written down, give back what was reserved."""
        ...


class PutTransfer:
    """One write in progress; an async context manager. Made by `Store.start_put`. One task uses it."""

    def __init__(
        self,
        request: PutRequest,
        *,
        committer: Committer,
        pipeline: HashPipeline,
        durability: Durability,
        mode: CommitMode,
        existing: ObjectRow | None,
        sizes: list[int],
        pins: list[Pin],
        encode_pin: Pin | None,
        dirty_reserved_bytes: int,
        hash_later: bool,
        may_hash_later: bool,
        allocate: Callable[[], BlobId],
        arriving: ArrivingKeys,
    ) -> None:
        self._arriving = arriving
        self.request = request
        self.existing = existing
        self.durability = durability
        self.mode = mode
        self.names = BlobNames(bucket=request.bucket.name, key=request.key)
        self.refs: list[BlobRef] = []
        self.arrival = Arrival(request, sizes, self.refs)
        if existing is not None:
            self.arrival.end()  # a live chunk answers: nothing will come
        self.counted: Reservation | None = None
        """Of a part: its room among what its upload's owner may hold unfinished."""
        self.group: GroupWriter | None = None
        """Of a part of a chunk that arrives in parts: one of its writers."""
        self._is_stored = False
        self.sharing = Sharing.NONE
        self.queue_room: QueueRoom | None = None
        """Where the object's size is counted among what is about to be queued for the remote, until its commit."""
        self.written: list[BlobId] = []
        self.held: ReceivedBlob | None = None
        self.dirty_reserved_bytes = dirty_reserved_bytes
        self.hash_later = hash_later
        self._may_hash_later = may_hash_later
        self.committed = False
        self._committer = committer
        self._pipeline = pipeline
        self._sizes = sizes
        self._pins = pins
        self._encode_pin = encode_pin
        self._allocate = allocate
        self._writing: asyncio.Task[None] | None = None
        self._early: list[EarlyPut] = []
        self._received = False
        self._is_expecting = False
        self._is_over = False

    async def __aenter__(self) -> Self:
        """Nothing but to say that the key is being written: the room is reserved already."""
        self._arriving.begin(self.names, self.arrival)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back whatever the transfer still holds; undo it unless it was committed."""
        await self.let_go()

    async def let_go(self) -> None:
        """What leaving the transfer does, for who has committed it and waits for more than the commit. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._arriving.end(self.names, self.arrival)
        self.count_no_more()
        self.note_queued()
        try:
            await self._end_writing()
            for early in self._early:
                early.abandon()
            if not self.committed:
                await self._committer.abandon(self)
        finally:
            self._release()
            if self.group is not None:
                await self.group.leave(is_stored=self._is_stored)

    def _release(self) -> None:
        if self.held is not None:
            self.held.frame.release()
            self.held = None
        for pin in self._pins:
            pin.release()
        self._pins.clear()
        if self._encode_pin is not None:
            self._encode_pin.release()
            self._encode_pin = None

    def count_no_more(self) -> None:
        """The part is committed, and counted by the catalog, or given up. Idempotent."""
        if self.counted is not None:
            self.counted.release()

    def note_queued(self) -> None:
        """The object is in the queue for the remote, or never will be. Idempotent."""
        room, self.queue_room = self.queue_room, None
        if room is not None:
            room.leave(self.request.size_bytes)

    async def _end_writing(self) -> None:
        task, self._writing = self._writing, None
        if task is not None:
            await ended([task])

    @property
    def single(self) -> bool:
        """Whether the body is one blob."""
        return len(self._sizes) == 1

    @property
    def is_small(self) -> bool:
        """Whether hashing the body where it is, at its commit, costs less than a digest that follows."""
        return len(self._sizes) == 1 and self._sizes[0] <= INLINE_BYTES

    @property
    def sizes(self) -> Sequence[int]:
        """Plain sizes of the body's blobs, in order."""
        return self._sizes

    @property
    def first_room(self) -> Pin:
        """The extent of the first blob, before it is received."""
        return self._pins[0]

    @property
    def is_received(self) -> bool:
        """Whether the whole body is there."""
        return self._received

    @property
    def room(self) -> tuple[Pin | None, int]:
        """The extent that the body goes to and its size, before it is received: for who fills it from elsewhere. No extent where
        the body is several blobs, or nothing is to be received."""
        return (self._pins[0], self._sizes[0]) if self.single and self._pins else (None, self.request.size_bytes)

    def hash_elsewhere(self) -> tuple[HashPipeline, frozenset[str]]:
        """Who fills the room hashes it, too, and tells the pipeline (`HashPipeline.adopt`). Before `receive`. The second: of which
        algorithms the body's own digests have to be given (`adopt_digests`)."""
        self.hash_later = False
        self._pipeline.is_elsewhere = True
        body = self._pipeline.body
        return self._pipeline, frozenset() if body is None else body.algorithms

    def hash_after(self) -> None:
        """Hash the body after its acknowledgement, if its class and what was asked for let that be, whatever its size: for bytes
        that come all at once, so that nothing could be hashed beside them. Before `receive`."""
        self.hash_later = self._may_hash_later

    def adopt_digests(self, digests: Mapping[str, bytes]) -> None:
        """The body's own digests, computed elsewhere. Before the commit."""
        if self._pipeline.body is not None:
            self._pipeline.body = Digester.computed(digests)

    async def receive(self, source: ByteSource) -> None:
        """Receive the whole body. A body of several blobs is written down while it arrives, at most two blobs at a time."""
        last = len(self._sizes) - 1
        for index, plain_bytes in enumerate(self._sizes):
            blob = self.held if self._is_expecting else None
            if blob is None:
                blob = self._begin(plain_bytes)
            if plain_bytes:
                await source.receive_into(blob.payload, self._feeder(blob))
            if index == last and self.single:
                break
            if self._writing is not None:
                writing, self._writing = self._writing, None
                await writing
            self.held = None
            self._writing = asyncio.create_task(self._write_down(blob))
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing
        self._received = True

    def expect(self) -> None:
        """Do what `receive` begins with, for a body of one blob whose bytes are on their way to its room: less is left to do once
        they are there."""
        if self.single and self._pins:
            self._begin(self._sizes[0])
            self._is_expecting = True

    def _begin(self, plain_bytes: int) -> ReceivedBlob:
        blob = ReceivedBlob(self._allocate(), self._pins.pop(0), plain_bytes, "raw")
        self.held = blob
        blob.unseal()
        payload = blob.payload
        blob.hash = self._pipeline.begin(payload)
        if self.single:
            self.arrival.begin_bytes(blob.pin, payload)
        return blob

    def _feeder(self, blob: ReceivedBlob) -> Callable[[int], None]:
        arrival = self.arrival
        pipeline, blob_hash = self._pipeline, blob.hash
        assert blob_hash is not None
        advance: Callable[[int], None] = arrival.advance
        if pipeline.body is not None and self._may_hash_later and not pipeline.is_elsewhere:
            pipeline.is_body_apart = True
            advance = self._body_feeder(pipeline.body, blob.payload)
        if self.hash_later:
            return advance  # hashed after the acknowledgement
        early = self._committer.begin_home(self, blob)
        if early is None:

            def feed(available_bytes: int) -> None:
                pipeline.feed(blob_hash, available_bytes)
                advance(available_bytes)

            return feed
        self._early.append(early)
        offset = raw_payload_offset(blob.plain_bytes)

        def feed_and_write(available_bytes: int) -> None:
            pipeline.feed(blob_hash, available_bytes)
            early.advance(offset + available_bytes)
            arrival.advance(available_bytes)

        return feed_and_write

    def _body_feeder(self, body: Digester, payload: memoryview) -> Callable[[int], None]:
        """Makes the body's own digests where its bytes arrive: they are as fast as memory, and these bytes are in the cache."""
        arrival = self.arrival

        def feed(available_bytes: int) -> None:
            body.update(payload[body.size_bytes : available_bytes])
            arrival.advance(available_bytes)

        return feed

    async def _write_down(self, blob: ReceivedBlob) -> None:
        # The extent goes back to this transfer and not to the arena: were it freed and reserved again for the next
        # blob, transfers could wait for each other's halves.
        assert blob.hash is not None
        try:
            await blob.hash.wait()
            blob.seal()
            encoded = blob
            codec = self.request.bucket.codec
            if codec != "raw":
                encoded = await self.encoded(blob)
            self.written.append(blob.blob_id)
            await self._committer.write_home(encoded, self.names, keep_cached=False)
            self.refs.append(encoded.ref())
            self.arrival.wake()
            if encoded is not blob:
                self._encode_pin = encoded.pin
        finally:
            self._pins.append(blob.pin)

    async def encoded(self, blob: ReceivedBlob) -> ReceivedBlob:
        """The blob in its bucket's codec, in the extent that was reserved for it."""
        pin, self._encode_pin = self._encode_pin, None
        assert pin is not None
        try:
            return await self._committer.encode(blob, self.request.bucket, pin)
        except BaseException:
            pin.release()
            raise

    def hash_now(self) -> None:
        """Hash a body after all that was to be hashed later: it cannot be acknowledged without its digest."""
        blob = self.held
        if self.hash_later and blob is not None and blob.hash is not None:
            self.hash_later = False
            self._pipeline.feed(blob.hash, blob.plain_bytes)

    async def digests(self) -> Digester:
        """Every digest that was asked for, once the last byte has gone into them."""
        if not self._received:
            raise IncompleteBodyError("the body has not been received")
        if self.held is not None and not self.is_body_digested:
            assert self.held.hash is not None
            await self.held.hash.wait()
        body = self._pipeline.body
        assert body is not None
        return body

    @property
    def body_digester(self) -> Digester | None:
        """The body's digester, if any digest was asked for."""
        return self._pipeline.body

    @property
    def is_body_digested(self) -> bool:
        """Whether the received body's own digests are there without its blobs' hashes: none was asked for, or they were made where
        its bytes arrived."""
        return self._pipeline.body is None or self._pipeline.is_body_apart

    async def commit(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> PutResult:
        """Make the object or part visible. Returns once the class asked for is reached.

        `want_digest`: the row carries the digest of the plain bytes even where the class would not wait for it.
        Errors as `Catalog.commit` and `Tier.put`; after any, nothing is visible and nothing is left behind.
        """
        if not self._received:
            raise IncompleteBodyError("the body has not been received")
        result = await self._committer.finish(self, checksums, want_digest=want_digest)
        self._is_stored = True
        return result

    async def place(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> ObjectRow:
        """Instead of `commit`, where several rows become visible together: the bytes lie where their class needs them, and this
        row is to be committed. `hand_over` right before that commit, `conclude` after it."""
        if not self._received:
            raise IncompleteBodyError("the body has not been received")
        return await self._committer.place(self, checksums, want_digest=want_digest)

    def place_together(self, transfers: Sequence[PutTransfer]) -> list[ObjectRow] | None:
        """`place` of received ones, of which this is one, at once. None where one has to wait for anything: then `place` each."""
        if not all(transfer.is_received for transfer in transfers):
            return None
        return self._committer.place_together(transfers)

    def hand_over(self) -> None:
        """From here on the catalog owns the blobs, whatever it answers (`Catalog.commit_chain`)."""
        self.committed = True

    async def conclude(self, outcome: CommitOutcome | None) -> None:
        """The commit's outcome for the row of `place`; None: it was refused. Call it once, also where the commit raised."""
        await self._committer.conclude(self, outcome)
