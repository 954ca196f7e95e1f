"""The store process's end of one worker: serves its calls over the store, the catalog and the tiers, and undoes it when it is gone.

Reading what is hot in dram is answered at once, without a task; everything else is the store's own call. Event-loop-only.
"""

# The arguments of a call are what it needs (`calls`).
# ruff: noqa: PLR0917

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from kvobj.api.same_host.rights import Granted, Granting, Rights
from kvobj.catalog.chunk_list import ChunkList, IdList, KeyList
from kvobj.catalog.chunk_records import EncodedChunks
from kvobj.catalog.history_protocol import EventPage
from kvobj.catalog.lease_protocol import PinsResult, Renewal
from kvobj.catalog.lease_rows import SessionRow
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import (
    BucketRow,
    Checksum,
    DeleteOutcome,
    Durability,
    NamespaceQuota,
    ObjectRow,
    ObjectState,
    UploadRow,
    WriteCondition,
)
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate
from kvobj.clock import Clock
from kvobj.errors import KvobjError, UnavailableError
from kvobj.ids import BlobId
from kvobj.store.byte_gate import ByteGate
from kvobj.store.chunk_values import Caller, MatchReply
from kvobj.store.chunks import ChunkStore
from kvobj.store.multipart import CompletedPart
from kvobj.store.placement import ReadTier
from kvobj.store.places import ChunkPlace
from kvobj.store.prepared import PreparedRooms
from kvobj.store.reader import fetch, slices_of
from kvobj.store.representation import Accepted, stored_codec
from kvobj.store.requests import PutRequest
from kvobj.store.store import Store
from kvobj.tiers.dram import DramTier
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.protocol import ByteRange
from kvobj.workers.calls import (
    ChainOutcome,
    Chunks,
    Detail,
    FilledRoom,
    FollowedUpload,
    GroupBegin,
    GroupProgress,
    Hashed,
    Matched,
    OpenFrame,
    OpenTransfer,
    Room,
    SpareRoom,
    StoreCalls,
    Stored,
    WorkerCalls,
    WrittenRow,
)
from kvobj.workers.channel import LATER, Channel
from kvobj.workers.following import FollowedStreams
from kvobj.workers.given_rooms import GivenRooms
from kvobj.workers.held_frames import HeldFrames
from kvobj.workers.held_transfers import HeldTransfers, room_of
from kvobj.workers.room_puts import RoomPuts
from kvobj.workers.wire import failure_of

WORKER_LONG_CALLS: Final = frozenset({"drain"})


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What desks stand on. `on_asked` and `on_read` are the collector's, as `Store` has them, `on_hot_read` is both in one;
    `count_hits` counts reads of dram and their bytes."""

    catalog: LmdbCatalog
    store: Store
    chunks: ChunkStore
    gate: ByteGate
    tiers: ReadTier
    dram: DramTier
    in_use: BlobsInUse
    clock: Clock
    on_asked: Callable[[ObjectRow], None]
    on_read: Callable[[ObjectRow], None]
    on_hot_read: Callable[[ObjectRow], None]
    count_hits: Callable[[int, int], None]
    prepared: PreparedRooms
    workers: int
    granting: Granting | None = None


class Desk(StoreCalls):
    """See the module's text. `on_ready()` is called when the worker can accept connections."""

    def __init__(self, parts: StoreParts, *, log: logging.Logger, on_ready: Callable[[], None]) -> None:
        self._parts = parts
        self._on_ready = on_ready
        self._gates: dict[int, int] = {}
        self._entering: dict[int, bool] = {}
        """Entries that are on their way in, and whether the worker has given each up meanwhile."""
        self._hot_opens = 0
        self._hot_bytes = 0
        self.channel = Channel(
            serves=self,
            interface=StoreCalls,
            calls=WorkerCalls,
            log=log,
            at_once={"open": self._open_now, "put": self._put_now, "enter_gate": self._enter_gate_now},
            long_calls=WORKER_LONG_CALLS,
        )
        self.worker: WorkerCalls = self.channel.proxy(WorkerCalls)
        self._frames = HeldFrames(parts.in_use, filled=self._frame_filled, failed=self._frame_failed)
        self._followed = FollowedStreams(parts.store.following)
        self._transfers = HeldTransfers(send_room=self._send_room, fail=self._transfer_failed, log=log)
        self._rooms = GivenRooms(parts.prepared, workers=parts.workers)
        self._room_puts = RoomPuts(parts.store, self._rooms, self._transfers, log)

    def __len__(self) -> int:
        """What the worker holds here: nothing of it may be left when it is idle, or gone."""
        held = len(self._frames) + len(self._transfers) + len(self._room_puts)
        return held + len(self._gates) + len(self._followed)

    async def connect(self, pair: socket.socket) -> None:
        """Speak over this end of the pair, which is the channel's from here on."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.channel, sock=pair)

    def count_hits(self) -> None:
        """Count what was read of dram since the last time: at once would cost a read as much as half of the rest."""
        self._parts.count_hits(self._hot_opens, self._hot_bytes)
        self._hot_opens = self._hot_bytes = 0

    async def aclose(self) -> None:
        """The worker is gone, and writes into no memory any more: end its calls and give back what it held."""
        await self.channel.aclose()
        self.count_hits()
        await self._room_puts.aclose()
        await self._transfers.aclose()
        await self._followed.aclose()
        self._frames.close()
        for size_bytes in self._gates.values():
            self._parts.gate.leave(size_bytes)
        self._gates.clear()
        self._entering.clear()

    def _frame_filled(self, handle: int, filled: int) -> None:
        self.channel.tell("filled", handle, filled)

    def _frame_failed(self, handle: int, error: KvobjError) -> None:
        self.channel.tell("frame_failed", handle, failure_of(error))

    def _transfer_failed(self, handle: int, error: KvobjError) -> None:
        self.channel.tell("transfer_failed", handle, failure_of(error))

    def _send_room(self, handle: int, blob: int, room: Room) -> None:
        self.channel.tell("room", handle, blob, room)

    # -- reading -------------------------------------------------------------------------------------------------
    def _open_now(self, row: ObjectRow, start: int, stop: int) -> object:
        """`open` of one blob that is in dram and known to be right; `LATER` for all else."""
        parts = self._parts
        if len(row.blobs) != 1 or start >= stop or stored_codec(row.blobs[0]) is not None:
            return LATER
        blob_id = cast("BlobId", row.blobs[0].blob_id)  # its bytes; made one of that type it would cost a microsecond
        if not parts.catalog.rescue(row.bucket, row.key) and row.state is ObjectState.LIVE:
            return None
        found = parts.dram.pin_hot(blob_id)
        if found is None:
            return LATER
        parts.on_hot_read(row)
        self._hot_opens += 1
        self._hot_bytes += stop - start
        return self._frames.hand_out_hot(*found, blob_id)

    async def open(self, row: ObjectRow, start: int, stop: int) -> OpenFrame | None:
        """See `StoreCalls.open`."""
        parts = self._parts
        if not parts.catalog.rescue(row.bucket, row.key) and row.state is ObjectState.LIVE:
            return None
        parts.on_asked(row)
        part = slices_of(row.blobs, start, stop)[0]
        held = (part.blob.blob_id,)
        parts.in_use.hold(held)
        try:
            frame = await fetch(parts.tiers, part)
            if frame is not None:
                parts.on_read(row)
                return self._frames.hand_out(frame, held[0])
        except BaseException:
            parts.in_use.release(held)
            raise
        parts.in_use.release(held)
        await parts.store.forget_if_lost(row)
        await parts.store.refuse_if_away(row)
        return None

    async def represent(self, row: ObjectRow, accepts: list[Accepted]) -> ObjectRow | None:
        """See `StoreCalls.represent`."""
        return await self._parts.store.represent(row, accepts)

    async def open_blob(self, blob_id: bytes, start: int | None, stop: int | None) -> OpenFrame | None:
        """See `StoreCalls.open_blob`."""
        in_use, held = self._parts.in_use, (blob_id,)
        in_use.hold(held)
        try:
            byte_range = None if start is None or stop is None else ByteRange(start, stop)
            frame = await self._parts.tiers.get(BlobId(blob_id), byte_range)
            if frame is not None:
                return self._frames.hand_out(frame, held[0])
        except BaseException:
            in_use.release(held)
            raise
        in_use.release(held)
        return None

    def release(self, handles: list[int]) -> None:
        """See `StoreCalls.release`."""
        self._frames.release(handles)

    def kept_hits(self, reads: int, size_bytes: int) -> None:
        """See `StoreCalls.kept_hits`."""
        self._hot_opens += reads
        self._hot_bytes += size_bytes

    def use(self, use: int, blob_ids: list[bytes]) -> None:
        """See `StoreCalls.use`."""
        self._frames.use(use, blob_ids)

    def unuse(self, use: int) -> None:
        """See `StoreCalls.unuse`."""
        self._frames.unuse(use)

    async def look_up(self, bucket: str, key: str) -> ObjectRow | None:
        """See `StoreCalls.look_up`."""
        return await self._parts.store.look_up(bucket, key)

    async def lookup(self, bucket: str, keys: list[str], rescue: bool) -> list[ObjectRow | None]:  # noqa: FBT001
        """See `StoreCalls.lookup`."""
        return await self._parts.catalog.lookup(bucket, keys, rescue=rescue)

    async def live_chunk(self, bucket: str, key: str, place: ChunkPlace | None) -> ObjectRow | None:
        """See `StoreCalls.live_chunk`."""
        return await self._parts.store.live_chunk(bucket, key, place)

    async def pinned(self, bucket: str, key: str, pin: bytes, user_id: str) -> ObjectRow | None:
        """See `StoreCalls.pinned`."""
        return await self._parts.store.pinned(bucket, key, pin, user_id=user_id)

    async def settled(self, row: ObjectRow, wait: bool) -> ObjectRow:  # noqa: FBT001
        """See `StoreCalls.settled`."""
        return await self._parts.store.settled(row, wait=wait)

    async def follow(self, bucket: BucketRow, key: str) -> FollowedUpload | None:
        """See `StoreCalls.follow`."""
        return await self._followed.find(bucket, key)

    async def begin_follow(self, handle: int, span: tuple[int, int] | None, part_sizes: list[int] | None) -> None:
        """See `StoreCalls.begin_follow`."""
        self._followed.begin(handle, span, part_sizes)

    async def next_followed(self, handle: int) -> bytes | None:
        """See `StoreCalls.next_followed`."""
        return await self._followed.next(handle)

    async def unfollow(self, handle: int) -> None:
        """See `StoreCalls.unfollow`."""
        await self._followed.end(handle)

    # -- writing -------------------------------------------------------------------------------------------------
    async def start_put(self, request: PutRequest, in_batch: bool) -> OpenTransfer:  # noqa: FBT001
        """See `StoreCalls.start_put`."""
        store = self._parts.store
        transfer = await (store.start_in_batch(request) if in_batch else store.start_put(request))
        if transfer.existing is not None:
            return OpenTransfer(existing=transfer.existing)
        hash_later = transfer.hash_later and not transfer.is_small and transfer.body_digester is None
        room, sizes = room_of(transfer.first_room), list(transfer.sizes)
        handle, held = await self._transfers.take(transfer)
        is_written_down = transfer.durability is not Durability.MEMORY or not transfer.single
        return OpenTransfer(None, handle, sizes, room, sorted(held.algorithms), hash_later, is_written_down)

    def filled(self, handle: int, blob: int, filled: int) -> None:
        """See `StoreCalls.filled`."""
        if handle < 0:
            self._room_puts.filled(handle, filled)
        else:
            self._transfers.filled(handle, blob, filled)

    def hashed(self, hashes: list[Hashed]) -> None:
        """See `StoreCalls.hashed`."""
        for told in hashes:
            self._room_puts.hashed(told)

    async def spare_rooms(self, request: PutRequest, count: int) -> list[SpareRoom]:
        """See `StoreCalls.spare_rooms`."""
        return self._rooms.give(request, count)

    def give_back(self, rooms: list[int]) -> None:
        """See `StoreCalls.give_back`."""
        self._room_puts.give_back(rooms)

    def begin(self, room: int, request: PutRequest) -> None:
        """See `StoreCalls.begin`."""
        self._room_puts.begin(room, request)

    def _put_now(self, filled: FilledRoom) -> object:
        return self._room_puts.put_now(filled)

    async def put(self, filled: FilledRoom) -> Stored:
        """See `StoreCalls.put`."""
        return await self._room_puts.put(filled)

    async def commit(
        self,
        handle: int,
        digests: dict[str, bytes],
        checksums: tuple[Checksum, ...],
        want_digest: bool,  # noqa: FBT001
    ) -> WrittenRow:
        """See `StoreCalls.commit`."""
        held = self._transfers.get(handle)
        try:
            transfer = await held.received(digests)
            return WrittenRow.of(await transfer.commit(checksums=checksums, want_digest=want_digest))
        finally:
            await self._transfers.end(handle)

    async def place(self, handle: int, digests: dict[str, bytes], want_digest: bool) -> ObjectRow:  # noqa: FBT001
        """See `StoreCalls.place`."""
        held = self._transfers.get(handle)
        transfer = await held.received(digests)
        row = held.row = await transfer.place(want_digest=want_digest)
        return row

    async def commit_chain(
        self,
        handles: list[int],
        quota: NamespaceQuota | None,
        parent_tokens: int,
        to_remote: bool,  # noqa: FBT001
    ) -> list[ChainOutcome]:
        """See `StoreCalls.commit_chain`."""
        catalog, now_ms = self._parts.catalog, self._parts.clock.now_ms()
        request = self._transfers.get(handles[0]).transfer.request if handles else None
        made_ms = None if request is None else request.bucket.created_ms
        place = None if request is None else request.place
        namespace_root = b"" if place is None else place.namespace_root
        outcomes = await self._transfers.commit_chain(
            handles,
            lambda rows: catalog.commit_chain(
                rows,
                quota=quota,
                parent_tokens=parent_tokens,
                made_ms=made_ms,
                namespace_root=namespace_root,
                now_ms=now_ms,
                to_remote=to_remote,
            ),
        )
        return [
            ChainOutcome(None, failure_of(each)) if isinstance(each, KvobjError) else ChainOutcome(each, None)
            for each in outcomes
        ]

    async def reached(self, rows: list[ObjectRow], bucket: BucketRow, asked: Durability | None) -> list[ObjectRow]:
        """See `StoreCalls.reached`."""
        return await self._parts.store.reached(rows, bucket, asked)

    def leave(self, handle: int) -> None:
        """See `StoreCalls.leave`."""
        self._transfers.leave(handle)

    async def start_group_part(self, request: PutRequest) -> GroupBegin:
        """See `StoreCalls.start_group_part`."""
        start = await self._parts.store.start_group_part(request)
        return GroupBegin(start.existing, start.part, start.request)

    async def end_group(
        self, request: PutRequest, handle: int, digests: dict[str, bytes], checksums: tuple[Checksum, ...]
    ) -> GroupProgress:
        """See `StoreCalls.end_group`."""
        store = self._parts.store
        if not handle:
            return GroupProgress.of(await store.end_group(request))
        held = self._transfers.get(handle)
        try:
            transfer = await held.received(digests)
            return GroupProgress.of(await store.end_group(request, transfer, checksums=checksums))
        finally:
            await self._transfers.end(handle)

    async def copy(
        self,
        source: ObjectRow,
        start: int,
        stop: int,
        request: PutRequest,
        checksums: tuple[Checksum, ...],
        checksum_algorithm: str | None,
    ) -> WrittenRow | None:
        """See `StoreCalls.copy`."""
        result = await self._parts.store.copy(
            source, start, stop, request, checksums=checksums, checksum_algorithm=checksum_algorithm
        )
        return None if result is None else WrittenRow.of(result)

    async def complete_upload(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: list[CompletedPart],
        condition: WriteCondition | None,
        checksums: tuple[Checksum, ...],
        size_bytes: int | None,
    ) -> WrittenRow:
        """See `StoreCalls.complete_upload`."""
        result = await self._parts.store.complete_upload(
            bucket, upload, parts, condition=condition, checksums=checksums, size_bytes=size_bytes
        )
        return WrittenRow.of(result)

    async def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """See `StoreCalls.abort_upload`."""
        await self._parts.store.abort_upload(bucket, key, upload_id)

    async def delete(
        self, bucket: str, keys: list[str], conditions: list[WriteCondition | None], made_ms: int | None
    ) -> list[DeleteOutcome]:
        """See `StoreCalls.delete`. Descendants that went too are the store's business alone."""
        return await self._parts.store.delete(bucket, keys, conditions, made_ms=made_ms)

    # -- the catalog ---------------------------------------------------------------------------------------------
    async def create_bucket(self, bucket: BucketRow) -> None:
        """See `StoreCalls.create_bucket`."""
        await self._parts.catalog.create_bucket(bucket)

    async def update_bucket(self, name: str, update: BucketUpdate, made_ms: int | None) -> BucketRow:
        """See `StoreCalls.update_bucket`."""
        return await self._parts.catalog.update_bucket(name, update, made_ms=made_ms)

    async def delete_bucket(self, name: str, made_ms: int | None) -> None:
        """See `StoreCalls.delete_bucket`."""
        await self._parts.store.delete_bucket(name, made_ms=made_ms)

    async def create_upload(self, upload: UploadRow, made_ms: int | None, limit: int | None) -> None:
        """See `StoreCalls.create_upload`."""
        await self._parts.catalog.create_upload(upload, made_ms=made_ms, limit=limit)

    async def update_object(
        self, bucket: str, key: str, update: ObjectUpdate, sequence: int | None
    ) -> ObjectRow | None:
        """See `StoreCalls.update_object`."""
        return await self._parts.catalog.update_object(bucket, key, update, sequence=sequence)

    async def last_event(self) -> int:
        """See `StoreCalls.last_event`."""
        return self._parts.catalog.history.last_sequence()

    async def read_events(self, bucket: str | None, after: int, limit: int) -> EventPage:
        """See `StoreCalls.read_events`."""
        return await self._parts.catalog.history.read(bucket, after=after, limit=limit)

    async def wait_for_events(self, after: int, timeout_seconds: float) -> bool:
        """See `StoreCalls.wait_for_events`."""
        return await self._parts.catalog.history.wait(after, timeout_seconds=timeout_seconds)

    # -- the KV API ----------------------------------------------------------------------------------------------
    async def declare_namespace(
        self, bucket: BucketRow, name: str, declaration: dict[str, Any], caller: Caller, key: bytes | None
    ) -> tuple[NamespaceRow, bool, bool]:
        """See `StoreCalls.declare_namespace`."""
        opened, is_new = await self._parts.chunks.declare_namespace(bucket, name, declaration, caller=caller, key=key)
        return opened.row, opened.may_write, is_new

    async def remove_namespace(self, bucket: BucketRow, name: str, caller: Caller) -> int:
        """See `StoreCalls.remove_namespace`."""
        return await self._parts.chunks.remove_namespace(bucket, name, caller=caller)

    async def match(
        self,
        bucket: BucketRow,
        namespace: str,
        chunks: Chunks,
        caller: Caller,
        tokens: bytes | None,
        session: bytes | None,
        detail: bool,  # noqa: FBT001
        may_encode: bool,  # noqa: FBT001
        explain: bool,  # noqa: FBT001
        partial_last: bool,  # noqa: FBT001
        hint: int,
        accepts: list[Accepted],
    ) -> Matched:
        """See `StoreCalls.match`."""
        store = self._parts.chunks
        found = await store.match(
            bucket,
            await store.namespace(bucket, namespace, caller=caller),
            _list_of(chunks),
            caller=caller,
            tokens=tokens,
            session=session,
            detail=detail,
            may_encode=may_encode,
            explain=explain,
            partial_last=partial_last,
            hint=hint,
            accepts=accepts,
        )
        return _matched(found)

    async def find(self, bucket: BucketRow, chunks: Chunks, caller: Caller) -> list[ObjectRow | None]:
        """See `StoreCalls.find`."""
        return await self._parts.chunks.find(bucket, _list_of(chunks), caller=caller)

    async def open_session(self, bucket: BucketRow, holder: str, ttl_ms: int | None, caller: Caller) -> SessionRow:
        """See `StoreCalls.open_session`."""
        return await self._parts.chunks.open_session(bucket, holder=holder, ttl_ms=ttl_ms, caller=caller)

    async def renew_session(
        self,
        bucket: BucketRow,
        session_id: bytes,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        release: list[bytes],
        caller: Caller,
        waited_ms: int,
    ) -> Renewal:
        """See `StoreCalls.renew_session`."""
        return await self._parts.chunks.renew_session(
            bucket,
            session_id,
            as_of=as_of,
            pins=pins,
            pins_digest=pins_digest,
            release=release,
            caller=caller,
            waited_ms=waited_ms,
        )

    async def close_session(self, bucket: BucketRow, session_id: bytes, caller: Caller) -> None:
        """See `StoreCalls.close_session`."""
        await self._parts.chunks.close_session(bucket, session_id, caller=caller)

    async def pin_tails(
        self,
        bucket: BucketRow,
        session_id: bytes,
        tails: Chunks,
        release: list[bytes],
        caller: Caller,
        namespace: NamespaceRow | None,
        accepts: list[Accepted],
    ) -> PinsResult:
        """See `StoreCalls.pin_tails`."""
        return await self._parts.chunks.pin_tails(
            bucket,
            session_id,
            _list_of(tails),
            release=release,
            caller=caller,
            namespace=namespace,
            accepts=accepts,
        )

    def note_write(self, bucket: str, key: str, is_partial: bool, hint: int) -> None:  # noqa: FBT001
        """See `StoreCalls.note_write`."""
        self._parts.chunks.note_write(bucket, key, is_partial=is_partial, hint=hint)

    async def grant(self, rights: Rights) -> Granted:
        """See `StoreCalls.grant`."""
        return await self._granting().grant(rights)

    async def renew_grant(self, grant_id: bytes, rights: Rights) -> int:
        """See `StoreCalls.renew_grant`."""
        return await self._granting().renew(grant_id, rights)

    def _granting(self) -> Granting:
        if self._parts.granting is None:
            raise UnavailableError("there is no same-host path")
        return self._parts.granting

    async def enter_gate(self, entry: int, size_bytes: int) -> None:
        """See `StoreCalls.enter_gate`."""
        try:
            await self._parts.gate.enter(size_bytes)
        except BaseException:
            self._entering.pop(entry, None)
            raise
        if self._entering.pop(entry, False):  # let in and given up in one turn: nobody would leave for it
            self._parts.gate.leave(size_bytes)
        else:
            self._gates[entry] = size_bytes

    def _enter_gate_now(self, entry: int, _size_bytes: int) -> object:
        """`leave_gate` may come in one with the call, before that has begun."""
        self._entering[entry] = False
        return LATER

    def leave_gate(self, entry: int) -> None:
        """See `StoreCalls.leave_gate`."""
        size_bytes = self._gates.pop(entry, None)
        if size_bytes is not None:
            self._parts.gate.leave(size_bytes)
        elif entry in self._entering:
            self._entering[entry] = True

    # -- a worker's life -----------------------------------------------------------------------------------------
    def ready(self) -> None:
        """See `StoreCalls.ready`."""
        self._on_ready()


def _list_of(chunks: Chunks) -> ChunkList:
    return KeyList(chunks.keys or []) if chunks.ids is None else IdList(chunks.ids)


def _matched(found: MatchReply) -> Matched:
    chunks = found.chunks
    details: list[Detail] | None = None
    encoded: bytes | None = None
    if isinstance(chunks, EncodedChunks):
        encoded = bytes(chunks.msgpack)
    elif chunks is not None:
        details = [Detail(each.id, each.size_bytes, each.digest, each.tier, each.codec) for each in chunks]
    return Matched(
        found.matched,
        found.tokens,
        found.size_bytes,
        found.expected_load_ms,
        found.pin,
        found.grant,
        found.deadline_ms,
        details,
        encoded,
        found.explain,
    )
