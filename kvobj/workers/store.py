"""The store as a worker process has it: implements `api.object_store.ObjectStore` over the calls of the store process.

Look-ups that only read are the worker's own (`catalog`); bytes are read from, and received into, the arena that both map. Whatever
else the store does is done by the store. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from kvobj.arena import PinnedFrame
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BucketRow,
    Checksum,
    DeleteOutcome,
    ObjectRow,
    UploadRow,
    WriteCondition,
)
from kvobj.codec.checksums import Digester
from kvobj.codec.frame import raw_payload_offset
from kvobj.errors import KvobjError
from kvobj.store.at_once import at_once
from kvobj.store.groups import GroupStart, GroupState
from kvobj.store.ingest import WholeSource
from kvobj.store.multipart import CompletedPart
from kvobj.store.object_reads import COPIED_BYTES_MAX, plain_blob
from kvobj.store.places import ChunkPlace
from kvobj.store.reader import BlobSlice, HotRead, InUse, ObjectReader, slices_of
from kvobj.store.representation import Accepted
from kvobj.store.requests import PutRequest, PutResult
from kvobj.store.standing import check_parent
from kvobj.workers.calls import OpenFrame, OpenTransfer, Room, StoreCalls, Stored
from kvobj.workers.channel import Channel
from kvobj.workers.following import RemoteFollowing
from kvobj.workers.kept_frames import Keeping
from kvobj.workers.mapped_arena import MappedArena
from kvobj.workers.reading import NOTHING_USED, RemoteFrames
from kvobj.workers.spare_rooms import SpareRooms
from kvobj.workers.spare_writing import SpareTransfer
from kvobj.workers.writing import LaterHashes, WorkerTransfer


class WorkerStore:
    """See the module's text. `executor` hashes what is received."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        channel: Channel,
        calls: StoreCalls,
        arena: MappedArena,
        keeping: Keeping,
        executor: Executor,
    ) -> None:
        self.catalog = catalog
        self.following = RemoteFollowing(channel, calls)
        self.frames = RemoteFrames(channel, calls, arena, keeping)
        self.later = LaterHashes(channel, executor)
        self.spare = SpareRooms(channel, calls)
        self._channel = channel
        self._calls = calls
        self._arena = arena
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._transfers: dict[int, WorkerTransfer] = {}

    # -- what the store process tells ----------------------------------------------------------------------------
    def room(self, handle: int, blob: int, room: Room) -> None:
        """Where the next blob of a transfer goes."""
        transfer = self._transfers.get(handle)
        if transfer is not None:
            transfer.room(blob, room)

    def transfer_failed(self, handle: int, error: KvobjError) -> None:
        """A transfer cannot go on."""
        transfer = self._transfers.get(handle)
        if transfer is not None:
            transfer.failed(error)

    def answered(self, result: Any) -> None:  # noqa: ANN401 - of whatever call
        """A call that holds something was answered: what is told of that next finds it."""
        if isinstance(result, OpenFrame):
            self.frames.answered(result)
        elif isinstance(result, OpenTransfer) and result.handle:
            self._transfers[result.handle] = self._transfer(result)

    def unwanted(self, call: str, result: Any) -> None:  # noqa: ANN401 - of whatever call
        """A call was answered when its caller was gone: give back what the answer holds."""
        if isinstance(result, OpenFrame):
            self.frames.unwanted(result)
        elif isinstance(result, OpenTransfer) and result.handle:
            self._transfers.pop(result.handle, None)
            self._channel.tell("leave", result.handle)
        elif isinstance(result, Stored):
            self.spare.give_back([room.handle for room in result.rooms])
        elif call == "spare_rooms":
            self.spare.give_back([room.handle for room in result])
        elif call == "follow" and result is not None:
            self._channel.tell("unfollow", result.handle)

    # -- writes --------------------------------------------------------------------------------------------------
    async def start_put(self, request: PutRequest) -> WorkerTransfer | SpareTransfer:
        """See `ObjectStore.start_put`: without asking where there is room at hand, and what the store process would find before the
        body is not there."""
        room = self.spare.take(request)
        if room is not None:
            if self._may_come(request):
                return SpareTransfer(
                    request,
                    room,
                    channel=self._channel,
                    calls=self._calls,
                    arena=self._arena,
                    later=self.later,
                    rooms=self.spare,
                )
            self.spare.add(request, [room])
        return self._started(await self._calls.start_put(request, in_batch=False))

    def _may_come(self, request: PutRequest) -> bool:
        """Whether no live chunk answers for the write, and its parent lets it follow."""
        place, bucket = request.place, request.bucket.name
        parent = None if place is None else place.parent
        rows = at_once(self.catalog.lookup(bucket, [request.key, parent] if parent else [request.key]))
        if rows is None or rows[0] is not None:
            return False
        if parent and place is not None:
            try:
                check_parent(rows[1], place, bucket=bucket, key=request.key)
            except KvobjError:
                return False
        return True

    def put_at_once(
        self,
        request: PutRequest,  # noqa: ARG002 - see `ObjectStore.put_at_once`
        source: WholeSource,  # noqa: ARG002
        check: Callable[[Digester], tuple[Checksum, ...]],  # noqa: ARG002
    ) -> PutResult | None:
        """See `ObjectStore.put_at_once`: the store process, which has to be waited for, commits."""
        return None

    async def start_in_batch(self, request: PutRequest) -> WorkerTransfer:
        """See `Store.start_in_batch`."""
        return self._started(await self._calls.start_put(request, in_batch=True))

    def _started(self, opened: OpenTransfer) -> WorkerTransfer:
        return self._transfers[opened.handle] if opened.handle else self._transfer(opened)

    def _transfer(self, opened: OpenTransfer) -> WorkerTransfer:
        return WorkerTransfer(
            opened,
            channel=self._channel,
            calls=self._calls,
            arena=self._arena,
            executor=self._executor,
            later=self.later,
            on_end=self._end,
        )

    def _end(self, handle: int) -> None:
        self._transfers.pop(handle, None)

    async def start_group_part(self, request: PutRequest) -> GroupStart:
        """See `ObjectStore.start_group_part`."""
        begin = await self._calls.start_group_part(request)
        return GroupStart(begin.existing, begin.part, begin.request)

    async def end_group(
        self, request: PutRequest, transfer: object = None, *, checksums: tuple[Checksum, ...] = ()
    ) -> GroupState:
        """See `ObjectStore.end_group`."""
        if transfer is None:
            progress = await self._calls.end_group(request, 0, {}, checksums)
        else:
            assert isinstance(transfer, WorkerTransfer)
            digests = await transfer.given_digests()
            transfer.end_elsewhere()
            ending = self._calls.end_group(request, transfer.handle, digests, checksums)
            transfer.hash_beside()
            progress = await ending
        return progress.state()

    async def live_chunk(self, bucket: str, key: str, place: ChunkPlace | None) -> ObjectRow | None:
        """See `ObjectStore.live_chunk`."""
        return await self._calls.live_chunk(bucket, key, place)

    # -- reads ---------------------------------------------------------------------------------------------------
    async def look_up(self, bucket: str, key: str, *, will_open: bool = False) -> ObjectRow | None:
        """See `ObjectStore.look_up`: what is opened next is told of then, and found here."""
        if will_open:
            (row,) = await self.catalog.lookup(bucket, [key])
            return row
        return await self._calls.look_up(bucket, key)

    async def pinned(self, bucket: str, key: str, pin: bytes, *, user_id: str) -> ObjectRow | None:
        """See `ObjectStore.pinned`."""
        return await self._calls.pinned(bucket, key, pin, user_id)

    async def represent(self, row: ObjectRow, accepts: Sequence[Accepted]) -> ObjectRow | None:
        """See `ObjectStore.represent`."""
        return await self._calls.represent(row, list(accepts))

    def open_hot(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """See `ObjectStore.open_hot`: of what this worker has kept."""
        frame = self.frames.kept.find(row)
        if frame is None or start >= stop:
            return None
        self.frames.kept.count(stop - start)
        return self._reader(slices_of(row.blobs, start, stop), frame.share())

    def read_hot(self, bucket: BucketRow, key: str, *, only_short: bool = False) -> HotRead | None:
        """See `ObjectStore.read_hot`: of what this worker has kept. For all else the store process has to be waited for."""
        row, frame = self._find_kept(bucket, key)
        blob = None if row is None else plain_blob(row, bucket)
        if row is None or frame is None or blob is None:
            return None
        body: bytes | ObjectReader
        if row.size_bytes <= COPIED_BYTES_MAX:
            start = raw_payload_offset(row.size_bytes)
            body = frame.pin.copy(start, start + row.size_bytes)
        elif only_short:
            return None
        else:
            body = self._reader([BlobSlice(blob, 0, row.size_bytes)], frame.share())
        self.frames.kept.count(row.size_bytes)
        return HotRead(row, body)

    def look_up_hot(self, bucket: BucketRow, key: str) -> HotRead | None:
        """See `ObjectStore.look_up_hot`: of what this worker has kept. All else the store process holds, which is waited for."""
        row, frame = self._find_kept(bucket, key)
        if row is None or frame is None or plain_blob(row, bucket) is None:
            return None
        return HotRead(row, b"")

    def _find_kept(self, bucket: BucketRow, key: str) -> tuple[ObjectRow | None, PinnedFrame | None]:
        """The live row and its kept frame, whose pin stays where it is."""
        kept = self.frames.kept
        rows = at_once(self.catalog.lookup(bucket.name, [key])) if len(kept) else None
        row = rows[0] if rows else None
        return row, None if row is None else kept.find(row)

    async def open(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """See `ObjectStore.open`."""
        reader = self.open_hot(row, start, stop)
        if reader is not None:
            return reader
        slices = slices_of(row.blobs, start, stop)
        if not slices:
            return self._reader(slices, None)
        used = self.frames.use([part.blob.blob_id for part in slices]) if len(slices) > 1 else None
        asked_at = self._loop.time()
        try:
            opened = await self._calls.open(row, start, stop)
        except BaseException:
            if used is not None:
                used.release()
            raise
        if opened is None:
            if used is not None:
                used.release()
            return None
        frame = self.frames.frame(opened)
        self.frames.kept.note(row, frame, asked_at)
        return self._reader(slices, frame, used or NOTHING_USED)

    def _reader(self, slices: list[BlobSlice], frame: PinnedFrame | None, in_use: InUse = NOTHING_USED) -> ObjectReader:
        return ObjectReader(slices, frame, tier=self.frames, in_use=in_use)

    async def settled(self, row: ObjectRow, *, wait: bool = True) -> ObjectRow:
        """See `ObjectStore.settled`."""
        if row.digest is not None or len(row.blobs) != 1:
            return row
        return await self._calls.settled(row, wait)

    # -- removal and compositions --------------------------------------------------------------------------------
    async def delete(
        self,
        bucket: str,
        keys: Sequence[str],
        conditions: Sequence[WriteCondition | None] = (),
        *,
        made_ms: int | None = None,
    ) -> list[DeleteOutcome]:
        """See `ObjectStore.delete`."""
        return await self._calls.delete(bucket, list(keys), list(conditions), made_ms)

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        """See `ObjectStore.delete_bucket`."""
        await self.catalog.delete_bucket(name, made_ms=made_ms)

    async def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """See `ObjectStore.abort_upload`."""
        await self._calls.abort_upload(bucket, key, upload_id)

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
        """See `ObjectStore.copy`: from extent to extent, by the store."""
        written = await self._calls.copy(source, start, stop, request, checksums, checksum_algorithm)
        return None if written is None else written.result()

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
        """See `ObjectStore.complete_upload`."""
        written = await self._calls.complete_upload(bucket, upload, list(parts), condition, checksums, size_bytes)
        return written.result()
