"""A disk that fails, lies, stops short or waits when told to, around the real one; and a whole nvme tier in one directory."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from blake3 import blake3

from kvobj.arena import Arena, PinnedFrame
from kvobj.codec.codec import codec_named
from kvobj.codec.frame import raw_frame_bytes
from kvobj.database import Database
from kvobj.ids import BlobId, make_blob_id
from kvobj.record_log import RecordLog
from kvobj.tiers.nvme import NVME_TABLES, NvmeTier, NvmeTimeouts
from kvobj.tiers.nvme.directory import BLOBS, Place
from kvobj.tiers.nvme.io import SystemDisk
from kvobj.tiers.nvme.kernel_queue import KernelQueue, Kind, Slot, TransferQueue
from kvobj.tiers.nvme.record import RECORD_BYTES
from kvobj.tiers.protocol import BlobNames, ByteRange

KIB = 1024
MIB = 1024 * KIB
RECORD_KEY = bytes(range(32))
NAMES = BlobNames(bucket="bucket", key="a/key")


class FaultyDisk(SystemDisk):
    """`fail[call]` is asked before each call of that name and may raise; `limit_bytes` cuts transfers short."""

    def __init__(self) -> None:
        self.fail: dict[str, Callable[[], None]] = {}
        self.refuse_direct_at_open = False
        self.refuse_direct_at_transfer = False
        self.refuse_direct_at_allocation = False
        self.limit_bytes: int | None = None
        self.available: int | None = None
        self.queue: FaultyQueue | None = None
        self.has_queue = False
        self.moves_itself = False
        self.calls: list[str] = []
        self._direct: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        self._called("open")
        if flags & os.O_DIRECT and self.refuse_direct_at_open:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        descriptor = super().open(path, flags)
        self._direct.discard(descriptor)
        if flags & os.O_DIRECT:
            self._direct.add(descriptor)
        return descriptor

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        self._called("allocate")
        if self.refuse_direct_at_allocation and descriptor in self._direct:
            raise OSError(errno.EINVAL, "no fallocate here, and no transfer of a byte by O_DIRECT")
        super().allocate(descriptor, size_bytes)

    def available_bytes(self, directory: Path) -> int:
        return super().available_bytes(directory) if self.available is None else self.available

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._called("write")
        self._transfer(descriptor)
        return super().write(descriptor, self._cut(buffers), offset)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._called("read")
        self._transfer(descriptor)
        return super().read(descriptor, self._cut(buffers), offset)

    def flush(self, descriptor: int) -> None:
        self._called("flush")
        super().flush(descriptor)

    def transfer_queue(self) -> TransferQueue | None:
        """None unless `has_queue`: what waits or fails at a call does so on a thread."""
        self.queue = FaultyQueue.open() if self.has_queue else None
        if self.queue is not None:
            self.queue.moves_itself = self.moves_itself
        return self.queue

    def _called(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fail:
            self.fail[call]()

    def _transfer(self, descriptor: int) -> None:
        if self.refuse_direct_at_transfer and descriptor in self._direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")

    def _cut(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        return buffers if self.limit_bytes is None else [buffers[0][: self.limit_bytes]]


class FaultyQueue(KernelQueue):
    """The kernel's queue: `refuse` is asked whether to refuse a transfer, which it does with `refusal`, and `result` for what is
    told of it instead of its outcome. While `holds`, outcomes are kept back until `let_go`, with all that the kernel still does.
    With `moves_itself` transfers are made at once by system calls that wait: for file systems that know no others.
    """

    moves_itself = False
    refuse: Callable[[Kind], bool] | None = None
    refusal = errno.EAGAIN
    result: Callable[[Kind, int], int] | None = None

    def __init__(self, native: ctypes.CDLL, context: int, event: int) -> None:
        super().__init__(native, context, event)
        self.asked: list[Kind] = []
        self.begun: list[Kind] = []
        self.holds = False
        self.is_ended = False
        self._kinds: dict[Slot, Kind] = {}
        self._held: list[tuple[Slot, int]] = []
        self._awaited = 0
        self._reached = asyncio.Event()

    def begin(
        self,
        slot: Slot,
        kind: Kind,
        descriptor: int,
        on_done: Callable[[int], None],
        *,
        view: memoryview | None = None,
        offset: int = 0,
        with_page: bool = False,
    ) -> int:
        self.asked.append(kind)
        if self.refuse is not None and self.refuse(kind):
            self.give_back(slot)
            return self.refusal
        self.begun.append(kind)
        self._kinds[slot] = kind
        if self.moves_itself:
            slot.view, slot.on_done = view, on_done
            parts = [part for part in (slot.page if with_page else None, view) if part is not None]
            self._loop.call_soon(self._end, slot, _moved(kind, descriptor, parts, offset))
            return 0
        return super().begin(slot, kind, descriptor, on_done, view=view, offset=offset, with_page=with_page)

    async def reached(self, count: int) -> None:
        """Return once so many outcomes are kept back."""
        self._awaited = count
        self._tell_reached()
        await self._reached.wait()

    def let_go(self) -> None:
        """Tell of what was kept back, and of all else at once from now on."""
        self.holds = False
        held, self._held = self._held, []
        for slot, result in held:
            self._end(slot, result)

    def _end(self, slot: Slot, result: int) -> None:
        if self.holds:
            self._held.append((slot, result))
            self._tell_reached()
        else:
            super()._end(slot, result if self.result is None else self.result(self._kinds[slot], result))

    def _tell_reached(self) -> None:
        if len(self._held) >= self._awaited:
            self._reached.set()
        else:
            self._reached.clear()

    def close(self) -> None:
        self.is_ended = True
        super().close()


def _moved(kind: Kind, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
    """Make a transfer; what the kernel's queue would tell of it."""
    try:
        if kind is Kind.READ:
            return os.preadv(descriptor, parts, offset)
        count = 0 if kind is Kind.FLUSH else os.pwritev(descriptor, parts, offset)
        if kind is not Kind.WRITE:
            os.fdatasync(descriptor)
    except OSError as error:
        return -(error.errno or errno.EIO)
    return count


def failing(error_number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(error_number, os.strerror(error_number))

    return fail


class Gate:
    """Lets threads pass that called it once it is open; `reached` tells that one is there. Gives up after 10 s."""

    def __init__(self, *, pass_first: int = 0) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._pass_first = pass_first

    def __call__(self) -> None:
        if self._pass_first:
            self._pass_first -= 1
            return
        self.reached.set()
        if not self._open.wait(10):
            raise OSError(errno.ETIMEDOUT, "the gate was never opened")

    def open(self) -> None:
        self._open.set()


def plain_of(seed: int, size_bytes: int) -> bytes:
    """Bytes without repeats, other ones for each seed."""
    return blake3(seed.to_bytes(8, "big")).digest(length=size_bytes)


def blob(sequence: int) -> BlobId:
    return make_blob_id(7, sequence)


class NvmeNode:
    """Arena, database with record log, and nvme tier in one directory, which can be left as a kill leaves it and reopened."""

    def __init__(self, path: Path, memory_path: Path, disk: FaultyDisk | None = None) -> None:
        self.path = path
        self.disk = disk or FaultyDisk()
        self._memory_path = memory_path
        self._stack = AsyncExitStack()

    @property
    def directory(self) -> Path:
        return self.path / "nvme"

    async def start(
        self,
        *,
        capacity_bytes: int = 64 * MIB,
        segment_bytes: int = 32 * MIB,
        timeouts: NvmeTimeouts | None = None,
        map_bytes: int = 64 * MIB,
        rebuild: bool = False,
        open_tier: bool = True,
    ) -> None:
        self._stack = AsyncExitStack()
        self.database = Database.open(
            durable=self.path / "durable",
            volatile=self._memory_path / "volatile",
            tables=NVME_TABLES,
            map_bytes=map_bytes,
            volatile_map_bytes=8 * MIB,
            record_log=self.open_log(),
            boot_id="boot",
            rebuild=rebuild,
        )
        self._stack.push_async_callback(self.database.aclose)
        self.arena = await Arena.open(
            self._memory_path / "arena",
            capacity_bytes=64 * MIB,
            region_bytes=32 * MIB,
            store_id=b"store",
            boot_id="boot",
            huge_pages=False,
        )
        self._stack.push_async_callback(self.arena.aclose, remove=True)
        await self.arena.populate()
        if open_tier:
            await self.open_tier(capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, timeouts=timeouts)

    async def open_tier(
        self,
        *,
        capacity_bytes: int = 64 * MIB,
        segment_bytes: int = 32 * MIB,
        timeouts: NvmeTimeouts | None = None,
    ) -> None:
        self.tier = await NvmeTier.open(
            self.directory,
            database=self.database,
            arena=self.arena,
            record_key=RECORD_KEY,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            timeouts=timeouts,
            disk=self.disk,
        )
        self._stack.push_async_callback(self.tier.aclose)

    def open_log(self) -> RecordLog:
        return RecordLog.open(self.path / "log", rotate_bytes=MIB)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def make_frame(self, plain: bytes) -> PinnedFrame:
        frame_bytes = raw_frame_bytes(len(plain))
        frame = PinnedFrame(await self.arena.reserve(frame_bytes, timeout_seconds=5), frame_bytes=frame_bytes)
        codec_named("raw").encode(memoryview(plain), frame.writable, digest=blake3(plain).digest())
        return frame

    async def put(self, sequence: int, size_bytes: int, *, names: BlobNames = NAMES) -> bytes:
        """Put a frame of `size_bytes` plain bytes and return its encoded bytes."""
        frame = await self.make_frame(plain_of(sequence, size_bytes))
        try:
            await self.tier.put(blob(sequence), frame, names)
            return bytes(frame.view)
        finally:
            frame.release()

    async def read(self, sequence: int, byte_range: ByteRange | None = None) -> bytes | None:
        frame = await self.tier.get(blob(sequence), byte_range)
        if frame is None:
            return None
        try:
            await frame.complete()
            return bytes(frame.view)
        finally:
            frame.release()

    def place(self, sequence: int) -> Place | None:
        with self.database.read() as view:
            row = view.get(BLOBS, blob(sequence))
        return None if row is None else Place.decode(row)

    def flip(self, sequence: int, frame_offset: int) -> None:
        """Flip a bit on the medium: of the frame, or of the record page in front of it (negative offsets)."""
        place = self.place(sequence)
        assert place is not None
        with (self.directory / f"segment-{place.segment:06d}").open("r+b") as file:
            file.seek(place.offset + RECORD_BYTES + frame_offset)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
