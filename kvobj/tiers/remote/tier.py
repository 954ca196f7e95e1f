"""The remote tier: frames as objects of an S3 bucket, found by a local directory or, where that does not know, by one LIST.

Guarantees: what `put` has returned for is on the server, and a frame there is whole; a delete that returned has removed what this
process has put or knows of. What an error, a cancelled put or a crash may have left there is nobody's as long as no row names it:
`delete` of its id removes it while this process lives, `leftovers` does later. Frames are not checked here. Retries, hedging,
limits and deadlines are the bucket's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvobj.arena import Arena, Pin, PinnedFrame, Progress
from kvobj.errors import InvalidRangeError, KvobjError, RemoteRefusedError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.protocol import BlobNames, ByteRange, TierUsage
from kvobj.tiers.remote.directory import RemoteDirectory, RemotePlace
from kvobj.tiers.remote.filling import Fillings
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.object_bucket import ObjectBucket
from kvobj.tiers.tasks_in_flight import TasksInFlight

UNBOUNDED_BYTES: Final = 2**62
"""What a remote tier says of its capacity, which nobody knows. Sums of a few such still fit 64 bits."""

_DELETED_AT_ONCE: Final = 1000
_NOTED_AT_ONCE: Final = 1000
_DOUBTFUL_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class RemoteTimeouts:
    """How long the tier waits: for room in the arena to read into, and at its closing for what it has begun."""

    reserve_seconds: float = 2.0
    close_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class RemoteCensus:
    """What one listing of all blobs found: blobs and their frames' bytes, those new to the directory, keys that are no blob's."""

    blobs: int
    frame_bytes: int
    noted: int
    foreign: int


class _Put:
    """One put in flight, and how many callers still want it."""

    __slots__ = ("abandoned", "task", "waiters")

    def __init__(self) -> None:
        self.task: asyncio.Task[None]
        self.waiters = 0
        self.abandoned = False


def _always() -> bool:
    return True


class RemoteTier:
    """See `Tier`. The bucket, the directory and the arena are the caller's and outlive the tier.

    At most `puts_at_once` puts and `lists_at_once` look-ups by LIST are under way, others wait. `may_write` is asked before
    anything is changed on the server: a store that another has succeeded must not (`identity`), and gets `RemoteRefusedError`.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        directory: RemoteDirectory,
        *,
        arena: Arena,
        names: RemoteNames,
        may_write: Callable[[], bool] = _always,
        timeouts: RemoteTimeouts | None = None,
        puts_at_once: int = 16,
        lists_at_once: int = 16,
    ) -> None:
        self._bucket = bucket
        self._directory = directory
        self._arena = arena
        self._names = names
        self._may_write = may_write
        self._timeouts = timeouts or RemoteTimeouts()
        self._put_turns = asyncio.Semaphore(puts_at_once)
        self._list_turns = asyncio.Semaphore(lists_at_once)
        self._tasks = TasksInFlight()
        self._fillings = Fillings(bucket, self._tasks, on_vanished=self._forget)
        self._puts: dict[BlobId, _Put] = {}
        self._replacing: set[BlobId] = set()
        # Blobs that are being deleted: gone for readers at once, and not put again before that is over.
        self._leaving: dict[BlobId, asyncio.Future[None]] = {}
        # Names of puts that did not end well: the server may have their objects all the same.
        self._doubtful: dict[BlobId, str] = {}
        self._closed = False

    @property
    def name(self) -> str:
        """`remote`."""
        return "remote"

    @property
    def directory(self) -> RemoteDirectory:
        """What this node knows of the remote."""
        return self._directory

    @property
    def is_available(self) -> bool:
        """Whether asking has a chance: the server answers, or was not asked yet."""
        return not self._closed and self._bucket.health.state not in ("down", "refused")

    @property
    def in_flight(self) -> frozenset[BlobId]:
        """The blobs that are being put."""
        return frozenset(self._puts) | self._replacing

    def is_in_flight(self, blob_id: BlobId) -> bool:
        """Whether the blob is being put."""
        return blob_id in self._puts or blob_id in self._replacing

    def may_hold(self, blob_ids: Sequence[BlobId]) -> set[BlobId]:
        """Those of the blobs that a delete asks the server about: the directory knows them, or this process tried to put them."""
        held = set(self._directory.find_many(blob_ids))
        held.update(blob_id for blob_id in blob_ids if blob_id in self._puts or blob_id in self._doubtful)
        return held

    # -- reading -----------------------------------------------------------------------------------------------------
    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`. Returns once the first bytes are there, or it is known that none will come; the others follow.

        The reading goes on when the caller lets go of the frame. `BusyError` when the arena gives no room in time. An object that
        has vanished is a miss, and the directory forgets it. The progress fails with `TierUnavailableError`.
        """
        place = await self.locate(blob_id)
        if place is None:
            return None
        asked = byte_range or ByteRange(0, place.frame_bytes)
        if asked.stop > place.frame_bytes:
            raise InvalidRangeError("range past the end of the frame", blob_id=blob_id, stop=asked.stop)
        size = asked.stop - asked.start
        pin = await self._arena.reserve(max(size, 1), timeout_seconds=self._timeouts.reserve_seconds)
        try:
            self._check_open()
            progress: Progress | None = None
            if size:
                key = self._names.key(blob_id, place.name)
                # A blob that was deleted while we waited for room is not read: who deletes has waited for readers already.
                is_held = blob_id not in self._leaving and self._directory.find(blob_id) == place
                progress = await self._fillings.begin(blob_id, key, asked, pin) if is_held else None
            if size and progress is None:
                pin.release()
                return None
        except BaseException:
            pin.release()
            raise
        return PinnedFrame(
            pin,
            frame_bytes=place.frame_bytes,
            start=asked.start,
            size=size,
            progress=progress,
            tier=self.name,
            origin=asked.start,
        )

    async def locate(self, blob_id: BlobId) -> RemotePlace | None:
        """Where the blob lies; None: nowhere. The server is asked, and what it says noted, where the directory does not know."""
        self._check_open()
        if blob_id in self._leaving:
            return None
        place = self._directory.find(blob_id)
        if place is not None:
            return place
        async with self._list_turns:
            async for found in self._bucket.list(self._names.of_blob(blob_id)):
                named = self._names.parse(found.key)
                if named is not None and place is None:
                    place = RemotePlace(found.size_bytes, named.name)
        if place is None or blob_id in self._leaving:
            return None
        await self._directory.note(blob_id, place)
        return place

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """See `Tier.missing`. What the directory holds is taken to be there; the server is asked about each of the others, and
        where it does not answer that is an error and not an absence."""
        self._check_open()
        known = self._directory.find_many(blob_ids)
        unknown = [blob_id for blob_id in dict.fromkeys(blob_ids) if blob_id not in known]
        absent = {blob_id for blob_id in known if blob_id in self._leaving}
        for start in range(0, len(unknown), _NOTED_AT_ONCE):
            batch = unknown[start : start + _NOTED_AT_ONCE]
            places = await self._located(batch)
            absent.update(blob_id for blob_id, place in zip(batch, places, strict=True) if place is None)
        return [blob_id for blob_id in blob_ids if blob_id in absent]

    async def _located(self, blob_ids: Sequence[BlobId]) -> list[RemotePlace | None]:
        tasks = [asyncio.create_task(self.locate(blob_id)) for blob_id in blob_ids]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def scan(self) -> AsyncIterator[BlobId]:
        """See `Tier.scan`. Asks the server, by LIST; what lies beside our blobs is passed over."""
        self._check_open()
        last: BlobId | None = None
        async for found in self._bucket.list(self._names.blobs):
            named = self._names.parse(found.key)
            if named is not None and named.blob_id != last:
                last = named.blob_id
                yield last

    async def census(self) -> RemoteCensus:
        """List all blobs and note those that the directory does not know, so that they are found and deleted without asking: for
        after a rebuild."""
        blobs = frame_bytes = noted = foreign = 0
        page: dict[BlobId, RemotePlace] = {}
        self._check_open()
        async for found in self._bucket.list(self._names.blobs):
            named = self._names.parse(found.key)
            if named is None:
                foreign += 1
                continue
            blobs += 1
            frame_bytes += found.size_bytes
            page[named.blob_id] = RemotePlace(found.size_bytes, named.name)
            if len(page) == _NOTED_AT_ONCE:
                noted += await self._note_unknown(page)
                page = {}
        noted += await self._note_unknown(page)
        return RemoteCensus(blobs, frame_bytes, noted, foreign)

    async def _note_unknown(self, page: dict[BlobId, RemotePlace]) -> int:
        known = self._directory.find_many(list(page))
        unknown = {
            blob_id: place
            for blob_id, place in page.items()
            if blob_id not in known and blob_id not in self._leaving and blob_id not in self._puts
        }
        await self._directory.note_many(unknown)
        return len(unknown)

    async def usage(self) -> TierUsage:
        """See `Tier.usage`: what the directory knows of. The capacity is `UNBOUNDED_BYTES`, and `mode` says so."""
        blobs, used_bytes = self._directory.totals
        return TierUsage(UNBOUNDED_BYTES, used_bytes, blobs, "unbounded")

    # -- writing -----------------------------------------------------------------------------------------------------
    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`: on the server, and known here durably with the next synced commit. With `CodedNames` the frame is one
        that readers are to be given decoded.

        One put of a blob is under way at a time. When all who wait for it are gone it is given up; should the server have it all
        the same, it is left to `delete` and `leftovers`.
        """
        await frame.complete()
        if not frame.is_whole:
            raise ValueError(f"only a whole frame can be put, not [{frame.start}, {frame.start + frame.size})")
        while True:
            self._check_open()
            leaving = self._leaving.get(blob_id)
            if leaving is not None:
                await asyncio.wait((leaving,))
                continue
            put = self._puts.get(blob_id)
            if put is None:
                if self._directory.find(blob_id) is not None:
                    return
                self._check_may_write()
                put = self._start_put(blob_id, frame, names)
            if not put.abandoned:
                break
            await asyncio.wait((put.task,))
        put.waiters += 1
        try:
            await asyncio.shield(put.task)
        finally:
            put.waiters -= 1
            if not put.waiters and not put.task.done():
                put.abandoned = True
                put.task.cancel()

    async def replace(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:  # noqa: ARG002 - it has its name
        """Put a whole frame in the place of the one that lies there, whose bytes are not what was put. `TierUnavailableError` where
        that has another length, or is just being put or deleted. The caller sees to it that nobody deletes the blob meanwhile."""
        await frame.complete()
        self._check_open()
        self._check_may_write()
        place = self._directory.find(blob_id)
        is_busy = self.is_in_flight(blob_id) or blob_id in self._leaving
        if place is None or place.frame_bytes != frame.frame_bytes or is_busy:
            raise TierUnavailableError("what lies on the remote is no such frame", blob_id=blob_id)
        self._replacing.add(blob_id)
        try:
            async with self._put_turns:
                await self._bucket.put(self._names.key(blob_id, place.name), frame.view.toreadonly())
        finally:
            self._replacing.discard(blob_id)

    def _start_put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> _Put:
        place = RemotePlace(frame.frame_bytes, self._names.name(names))
        put = _Put()
        pin = frame.pin.share()
        put.task = self._tasks.run(self._put(blob_id, pin, place))
        self._puts[blob_id] = put

        def on_ended(_: asyncio.Task[None]) -> None:
            pin.release()
            if self._puts.get(blob_id) is put:
                del self._puts[blob_id]

        put.task.add_done_callback(on_ended)
        return put

    async def _put(self, blob_id: BlobId, pin: Pin, place: RemotePlace) -> None:
        async with self._put_turns:
            self._doubt(blob_id, place.name)
            await self._bucket.put(self._names.key(blob_id, place.name), pin.view[: place.frame_bytes].toreadonly())
            await self._directory.note(blob_id, place)
        self._doubtful.pop(blob_id, None)

    def _doubt(self, blob_id: BlobId, name: str) -> None:
        self._doubtful[blob_id] = name
        if len(self._doubtful) > _DOUBTFUL_MAX:
            del self._doubtful[next(iter(self._doubtful))]

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`. Waits for puts and reads of these blobs that are under way. Ids that the directory does not know and
        this process has not tried to put cost no request. After an error, what is not known to be removed is held as before."""
        self._check_open()
        wanted = list(self.may_hold(blob_ids))
        if not wanted:
            return
        while others := {self._leaving[blob_id] for blob_id in wanted if blob_id in self._leaving}:
            await asyncio.wait(others)
        self._check_open()
        # Shielded: the directory must learn what the server did even if the caller is gone.
        await asyncio.shield(self._tasks.run(self._delete(wanted, self._begin_leaving(wanted))))

    def _begin_leaving(self, blob_ids: Iterable[BlobId]) -> asyncio.Future[None]:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for blob_id in blob_ids:
            self._leaving[blob_id] = over
        return over

    async def _delete(self, blob_ids: list[BlobId], over: asyncio.Future[None]) -> None:
        try:
            while puts := {self._puts[blob_id].task for blob_id in blob_ids if blob_id in self._puts}:
                await asyncio.wait(puts)
            names = {blob_id: place.name for blob_id, place in self._directory.find_many(blob_ids).items()}
            for blob_id in blob_ids:
                if blob_id not in names and blob_id in self._doubtful:
                    names[blob_id] = self._doubtful[blob_id]
            if not names:
                return
            self._check_may_write()
            read = [blob_id for blob_id in names if self._fillings.is_running(blob_id)]
            await self._remove([blob_id for blob_id in names if blob_id not in set(read)], names)
            await self._fillings.settle(read)
            await self._remove(read, names)
        finally:
            for blob_id in blob_ids:
                del self._leaving[blob_id]
            over.set_result(None)

    async def _remove(self, blob_ids: Sequence[BlobId], names: dict[BlobId, str]) -> None:
        for start in range(0, len(blob_ids), _DELETED_AT_ONCE):
            batch = blob_ids[start : start + _DELETED_AT_ONCE]
            await self._bucket.delete([self._names.key(blob_id, names[blob_id]) for blob_id in batch])
            await self._directory.forget(batch)
            for blob_id in batch:
                self._doubtful.pop(blob_id, None)

    async def aclose(self) -> None:
        """See `Tier.aclose`. What has not ended by the deadline is given up. The bucket stays open."""
        if self._closed:
            return
        self._closed = True
        if not await self._tasks.wait(self._timeouts.close_seconds):
            self._tasks.cancel()
            await self._tasks.wait(self._timeouts.close_seconds)

    async def _forget(self, blob_id: BlobId) -> None:
        with suppress(KvobjError):
            await self._directory.forget([blob_id])

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailableError("remote tier is closed")

    def _check_may_write(self) -> None:
        if not self._may_write():
            raise RemoteRefusedError("the remote is not this store's to write to", reason="fenced")
