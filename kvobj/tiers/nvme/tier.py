"""The nvme tier: frames in O_DIRECT segment files, their directory and small frames in LMDB.

Guarantees the order that crashes cannot break: a frame is flushed before its directory row is written, and room is handed
out again only after the commit that removed the row is synced and the last reader is gone. The directory row of a put is
committed but not synced: it becomes durable no later than the next synced commit in the same environment, such as the
catalog's that names the blob and without which nobody asks for it. Whose next word about the blob is that commit may leave the
row to it altogether (`riding`). Frames are not verified here beyond their record page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice
from pathlib import Path
from typing import Final, Self

from kvobj.arena import Arena, Pin, PinnedFrame, Progress
from kvobj.database import Database, WriteView
from kvobj.errors import InvalidRangeError, KvobjError, StoreFullError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.nvme.blob_io import BlobIo
from kvobj.tiers.nvme.directory import BLOBS, INLINE, Place, padded
from kvobj.tiers.nvme.early_write import EarlyWrite
from kvobj.tiers.nvme.io import Disk, SystemDisk
from kvobj.tiers.nvme.log_entries import InlinePut, decode_entry, encode_removed
from kvobj.tiers.nvme.placing import BlobPlacing
from kvobj.tiers.nvme.record import RECORD_BYTES
from kvobj.tiers.nvme.segment_file import SegmentFile, segment_paths
from kvobj.tiers.nvme.space import SegmentSpace, SegmentStatus, default_segment_bytes, unavailable
from kvobj.tiers.protocol import BlobNames, ByteRange, TierUsage
from kvobj.tiers.tasks_in_flight import TasksInFlight

KERNEL: Final = "kernel"
"""`NvmeTier.transfers` where threads are not needed."""

_DELETED_AT_ONCE: Final = 4000
_SCANNED_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True)
class NvmeTimeouts:
    """How long the tier waits: for room in the arena to read into, and for the medium."""

    reserve_seconds: float = 2.0
    io_seconds: float = 30.0


class NvmeTier:
    """See `Tier`. Made by `open`. The database and the arena are the caller's and outlive the tier."""

    def __init__(
        self, *, database: Database, arena: Arena, space: SegmentSpace, io: BlobIo, timeouts: NvmeTimeouts
    ) -> None:
        self._database = database
        self._arena = arena
        self._space = space
        self._io = io
        self._timeouts = timeouts
        self._tasks = TasksInFlight()
        self._placing = BlobPlacing(
            database=database, space=space, io=io, tasks=self._tasks, io_timeout_seconds=timeouts.io_seconds
        )
        self._closed = False

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        database: Database,
        arena: Arena,
        record_key: bytes,
        capacity_bytes: int,
        segment_bytes: int | None = None,
        timeouts: NvmeTimeouts | None = None,
        disk: Disk | None = None,
    ) -> Self:
        """Open or make the tier in `directory` (mode 0700). The database has `NVME_TABLES`.

        `record_key` is 32 secret bytes of this store. `segment_bytes` is for segments yet to be made, each of which bounds
        the largest blob. `TierUnavailableError` or `StoreFullError` where files cannot be opened or made, `CorruptionError`
        where directory rows overlap.
        """
        disk = disk or SystemDisk()
        io = BlobIo(record_key, disk.transfer_queue())
        space = SegmentSpace(
            disk,
            directory,
            executor=io.writers,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes or default_segment_bytes(capacity_bytes),
        )

        def load() -> tuple[list[SegmentFile], list[Place]]:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            files: list[SegmentFile] = []
            try:
                files.extend(SegmentFile.open(disk, path) for path in segment_paths(directory))
                with database.read() as view:
                    return files, Place.decode_many([row for _, row in view.range(BLOBS)])
            except BaseException:
                for file in files:
                    file.close()
                raise

        try:
            files, places = await asyncio.get_running_loop().run_in_executor(io.writers, load)
            try:
                space.adopt(files, places)
            except KvobjError:
                for file in files:
                    file.close()
                raise
            await space.start()
        except OSError as error:
            io.shut_down(wait=True)
            raise unavailable(error, "segments cannot be opened") from error
        except BaseException:
            io.shut_down(wait=True)
            raise
        return cls(database=database, arena=arena, space=space, io=io, timeouts=timeouts or NvmeTimeouts())

    @property
    def name(self) -> str:
        """`nvme`."""
        return "nvme"

    @property
    def segments(self) -> list[SegmentStatus]:
        """The segment files, for status."""
        return self._space.statuses()

    @property
    def transfers(self) -> str:
        """What moves short frames: `kernel`, or `threads` and why."""
        if not self._space.is_direct:
            return "threads: buffered I/O"
        if self._io.queue_refusal:
            return f"threads: {self._io.queue_refusal}"
        return KERNEL if self._space.is_queued else "threads: this file system makes no transfer without waiting"

    @property
    def capacity_bytes(self) -> int:
        """What the tier may hold, in segments and in the database."""
        return self._space.capacity_bytes

    @property
    def lost_segments(self) -> tuple[int, ...]:
        """Numbers of segments that blobs lie in and whose files were not there at open: what lies there fails to be read."""
        return self._space.lost_segments

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`. Returns as soon as room is reserved; the frame fills from its start while it is read.

        The reading goes on when the caller lets go early. `BusyError` when the arena gives no room in time. The progress
        fails with `TierUnavailableError` (medium) or `FrameCorruptError` (another blob's record lies there; whole frames only).
        """
        self._check_open()
        place, entry = self._find(blob_id)
        if place is None:
            return None
        start, stop = (0, place.frame_bytes) if byte_range is None else (byte_range.start, byte_range.stop)
        if stop > place.frame_bytes:
            raise InvalidRangeError("range past the end of the frame", blob_id=blob_id, stop=stop)
        if place.inline:
            return await self._get_inline(place, entry, start, stop)
        if start == stop:
            pin = await self._reserve(RECORD_BYTES)
            return PinnedFrame(pin, frame_bytes=place.frame_bytes, start=start, size=0, tier=self.name, origin=start)
        segment = self._space.file_of(place)
        self._space.hold(place)
        origin = start // RECORD_BYTES * RECORD_BYTES
        length = padded(stop) - origin
        try:
            pin = self._arena.try_reserve(length) or await self._reserve(length)
        except BaseException:
            self._space.release(place)
            raise
        return self._start_reading(segment, blob_id, place, pin, start=start, stop=stop, origin=origin, length=length)

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`; durable as the module says. A frame up to 64 KiB goes into LMDB and the record log.

        A caller that is cancelled once the directory is being written leaves the blob held: delete it by its id.
        The bytes of the frame's extent behind the frame, up to the next 4096, are zeroed.
        """
        if frame.progress is not None:
            await frame.complete()
        self._check_open()
        if not frame.is_whole:
            raise ValueError(f"only a whole frame can be put, not [{frame.start}, {frame.start + frame.size})")
        await self._placing.put(blob_id, frame, names)

    def begin_put(self, blob_id: BlobId, frame: PinnedFrame, *, head_bytes: int) -> EarlyWrite | None:
        """Begin to write a whole frame that is still arriving; its first `head_bytes` are written by the put, which is then given
        the same frame. None where nothing is gained or nothing can be begun: the put does it all. Never waits."""
        return None if self._closed else self._placing.begin(blob_id, frame, head_bytes=head_bytes)

    def riding(self, blob_id: BlobId) -> AbstractContextManager[None]:
        """Within it, a put of a blob that goes to a segment may return once the bytes are durable, and leave the directory row to
        the database's next group of changes. For who names the blob in a durable change of the same database after that, or not at
        all: no such change is committed without the row. One that wrote a volatile row instead would lose the blob with the
        process."""
        return self._placing.riding.allowed(blob_id)

    def frame_bytes(self, blob_id: BlobId) -> int | None:
        """How long the blob's frame is here; None if it is not held."""
        place = self._placing.place_of(blob_id)
        return None if place is None else place.frame_bytes

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """See `Tier.missing`."""
        riding = self._placing.riding
        with self._database.read() as view:
            rows = view.get_many(BLOBS, blob_ids)
        return [blob_id for blob_id, row in zip(blob_ids, rows, strict=True) if row is None and blob_id not in riding]

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`. Synced, and noted in the record log. Waits for puts of these ids that are in flight."""
        self._check_open()
        await self._placing.settle(blob_ids)
        blob_ids = list(dict.fromkeys(blob_ids))
        if len(self._placing.riding):
            blob_ids = [blob_id for blob_id in blob_ids if not self._withdrawn(blob_id)]
        if not blob_ids:
            return
        # Shielded: the room must come back even if the caller is gone when the commit is through.
        await asyncio.shield(self._tasks.run(self._remove(blob_ids)))

    async def scan(self) -> AsyncIterator[BlobId]:
        """See `Tier.scan`. Takes a snapshot per thousand ids, so that a slow caller keeps no old pages alive; others run in
        between."""
        await self._placing.riding.land()
        start = b""
        while True:
            await asyncio.sleep(0)
            with self._database.read() as view:
                page = [key for key, _ in islice(view.range(BLOBS, start), _SCANNED_AT_ONCE)]
            for key in page:
                yield BlobId(key)
            if len(page) < _SCANNED_AT_ONCE:
                return
            start = page[-1] + b"\0"

    async def usage(self) -> TierUsage:
        """See `Tier.usage`. `mode` is `O_DIRECT` or `buffered`; record pages and padding count as used."""
        with self._database.read() as view:
            blobs = view.count(BLOBS) + len(self._placing.riding)
        space = self._space
        return TierUsage(space.capacity_bytes, space.used_bytes, blobs, space.mode)

    async def aclose(self) -> None:
        """See `Tier.aclose`. What a stuck medium still holds up after the I/O deadline is left behind."""
        if self._closed:
            return
        self._closed = True
        self._placing.abandon()
        await self._space.settle()
        ended = await self._tasks.wait(self._timeouts.io_seconds)
        self._io.shut_down(wait=ended)
        if ended:
            self._space.close_files()

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailableError("nvme tier is closed")

    def _find(self, blob_id: BlobId) -> tuple[Place | None, bytes | None]:
        """Where the blob lies, and the entry of a small one."""
        place = self._placing.place_of(blob_id)
        if place is None or not place.inline:
            return place, None
        entry = self._database.read().get_alone(INLINE, blob_id)
        # Removed since the look before, or lost: who finds no row either knows.
        return (place, entry) if entry is not None else (self._placing.place_of(blob_id), None)

    def _withdrawn(self, blob_id: BlobId) -> bool:
        """Whether the blob was held by a row that had not been committed yet, and is gone with it."""
        place = self._placing.riding.withdraw(blob_id)
        if place is not None:
            self._space.free(place)
        return place is not None

    async def _remove(self, blob_ids: Sequence[BlobId]) -> None:
        start, at_once = 0, _DELETED_AT_ONCE
        while start < len(blob_ids):
            batch = blob_ids[start : start + at_once]
            try:
                places = await self._database.write(partial(_removed, blob_ids=batch), synced=True)
            except StoreFullError:
                # Each page that loses a row is written anew, and the old ones are free only after the commit: of scattered blobs
                # a nearly full database has no room for so many at once.
                if len(batch) == 1:
                    raise
                at_once = len(batch) // 2
                continue
            self._space.free_many(places)
            start += len(batch)

    async def _reserve(self, length: int) -> Pin:
        pin = await self._arena.reserve(length, timeout_seconds=self._timeouts.reserve_seconds)
        if self._closed:
            pin.release()
            raise TierUnavailableError("nvme tier is closed")
        return pin

    async def _get_inline(self, place: Place, entry: bytes | None, start: int, stop: int) -> PinnedFrame:
        put = decode_entry(entry) if entry is not None else None
        if not isinstance(put, InlinePut):
            raise TierUnavailableError("inline frame is missing from the database")
        pin = await self._reserve(max(place.frame_bytes, 1))
        # A copy, of at most 64 KiB: LMDB's pages cannot be pinned beyond a read transaction.
        pin.view[: place.frame_bytes] = put.frame
        return PinnedFrame(pin, frame_bytes=place.frame_bytes, start=start, size=stop - start, tier=self.name)

    def _start_reading(
        self,
        segment: SegmentFile,
        blob_id: BlobId,
        place: Place,
        pin: Pin,
        *,
        start: int,
        stop: int,
        origin: int,
        length: int,
    ) -> PinnedFrame:
        self._tasks.begin()
        filler = pin.share()

        def on_ended() -> None:
            filler.release()
            self._space.release(place)
            self._tasks.end()

        progress = Progress(stop - origin)
        self._io.read(
            segment,
            blob_id,
            place,
            pin.view[:length],
            origin=origin,
            progress=progress,
            timeout_seconds=self._timeouts.io_seconds,
            on_ended=on_ended,
        )
        return PinnedFrame(
            pin,
            frame_bytes=place.frame_bytes,
            start=start,
            size=stop - start,
            progress=progress,
            tier=self.name,
            origin=origin,
        )


def _removed(view: WriteView, blob_ids: Sequence[BlobId]) -> list[Place]:
    """Take the rows away, note it in the log, and say what room that frees. No id comes twice."""
    rows = view.get_many(BLOBS, blob_ids)
    held = list(compress(blob_ids, rows))
    places = Place.decode_many([row for row in rows if row is not None])
    if held:
        view.delete_many(BLOBS, held)
        view.delete_many(INLINE, [blob_id for blob_id, place in zip(held, places, strict=True) if place.inline])
        view.log(encode_removed(held))
    return places
