"""How close the nvme tier comes to plain O_DIRECT reads and writes of the same sizes in the same directory.

Rounds are interleaved (plain write, tier put, plain read, tier get, tier put with its own commit), so that a disk that slows down
slows all; medians of the rounds are compared. Plain is a thread per transfer in flight, each doing one pwrite and one fdatasync,
or one pread. It works on extents of the same arena, since speed depends on how scattered a buffer's physical pages are (seen:
1.3 GB/s read into memory without any two neighbouring pages, 1.8 where runs were ten pages long).
`write` is what a PUT of class `local` asks of the tier: every put returns once its bytes are flushed, and directory rows go with
the next commit, of which each round has one, synced, at its end. `write alone`: each put waits for a commit of its row, which
nothing else shares (0.3 ms here). The tier's get ends when the last byte is there.
A short run by default; `--rounds` and `--mebibytes` make it longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from command_line import Parser, one_or_more, output_file, run_tool
from rich.console import Console
from rich.table import Table as TextTable

from kvobj.arena import Arena, Pin, PinnedFrame
from kvobj.codec.frame import raw_frame_bytes
from kvobj.database import Database, WriteView
from kvobj.ids import BlobId, make_blob_id
from kvobj.record_log import RecordLog
from kvobj.tiers.nvme import NVME_TABLES, NvmeTier
from kvobj.tiers.protocol import BlobNames

MIB = 1 << 20
SIZES_MIB = (1, 4, 32)
IN_FLIGHT = (1, 4)
NAMES = BlobNames(bucket="bench", key="key")


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over the rounds, in bytes a second (10^9 to the GB); a ratio is that of the medians."""

    operation: str
    size_mib: int
    in_flight: int
    plain_gb_per_second: float
    tier_gb_per_second: float
    ratio: float


class Plain:
    """The limit: one preallocated O_DIRECT file, one thread per transfer in flight, written from the frames' memory."""

    def __init__(self, path: Path, size_bytes: int, frames: list[PinnedFrame]) -> None:
        self.size_bytes = size_bytes
        self.in_flight = len(frames)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._buffers = [frame.pin.view[:size_bytes] for frame in frames]
        self._threads = ThreadPoolExecutor(self.in_flight)

    def allocate(self, count: int) -> None:
        """Preallocate, and write once over it: the tier's segments are measured after their first pass too."""
        os.posix_fallocate(self._descriptor, 0, count * self.size_bytes)
        self.write(count)

    def write(self, count: int) -> float:
        """Seconds for `count` writes, each flushed."""

        def lane(lane: int) -> None:
            for index in range(lane, count, self.in_flight):
                os.pwrite(self._descriptor, self._buffers[lane], index * self.size_bytes)
                os.fdatasync(self._descriptor)

        return self._timed(lane)

    def read(self, count: int, into: list[Pin]) -> float:
        """Seconds for `count` reads into one extent per lane."""
        buffers = [pin.view[: self.size_bytes] for pin in into]

        def lane(lane: int) -> None:
            for index in range(lane, count, self.in_flight):
                os.preadv(self._descriptor, [buffers[lane]], index * self.size_bytes)

        return self._timed(lane)

    def _timed(self, lane: Callable[[int], None]) -> float:
        start = time.perf_counter()
        list(self._threads.map(lane, range(self.in_flight)))
        return time.perf_counter() - start

    def close(self) -> None:
        """End threads, close the file."""
        self._threads.shutdown()
        os.close(self._descriptor)


class TierUnderTest:
    """The tier, fed from frames that are already in the arena."""

    def __init__(self, tier: NvmeTier, database: Database, frames: list[PinnedFrame]) -> None:
        self.tier = tier
        self._database = database
        self._frames = frames
        self._next = 1
        self._held: list[BlobId] = []

    async def write(self, count: int, *, rides: bool = True) -> float:
        """Seconds for `count` puts of new blobs, to the commit that has all their rows."""
        ids = [make_blob_id(1, self._next + number) for number in range(count)]
        self._next += count
        self._held = ids

        async def lane(lane: int) -> None:
            for index in range(lane, count, len(self._frames)):
                with self.tier.riding(ids[index]) if rides else nullcontext():
                    await self.tier.put(ids[index], self._frames[lane], NAMES)

        start = time.perf_counter()
        await self._timed(lane)
        await self._database.write(_nothing)
        return time.perf_counter() - start

    async def read(self) -> float:
        """Seconds for reading all blobs put last, each to its last byte."""

        async def lane(lane: int) -> None:
            for blob_id in self._held[lane :: len(self._frames)]:
                frame = await self.tier.get(blob_id)
                if frame is None:
                    raise RuntimeError(f"{blob_id.hex()} is gone")
                await frame.complete()
                frame.release()

        return await self._timed(lane)

    async def forget(self) -> None:
        """Delete the blobs put last."""
        await self.tier.delete(self._held)

    async def _timed(self, lane: Callable[[int], Awaitable[None]]) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(lane(number) for number in range(len(self._frames))))
        return time.perf_counter() - start


def _nothing(_view: WriteView) -> None:
    """A change that only has the rows go with it."""


async def measure(
    directory: Path,
    arena: Arena,
    tier: NvmeTier,
    database: Database,
    *,
    size_mib: int,
    in_flight: int,
    rounds: int,
    mebibytes: int,
) -> list[Result]:
    """One size with so many in flight: the medians of interleaved rounds, writing and reading."""
    size_bytes = size_mib * MIB
    count = max(in_flight * 2, mebibytes // size_mib)
    frame_bytes = raw_frame_bytes(size_bytes)
    frames = [
        PinnedFrame(await arena.reserve(frame_bytes, timeout_seconds=10), frame_bytes=frame_bytes)
        for _ in range(in_flight)
    ]
    for frame in frames:
        frame.writable[:] = (os.urandom(4096) * (frame_bytes // 4096 + 1))[:frame_bytes]
    plain = Plain(directory / "plain", size_bytes, frames)
    tested = TierUnderTest(tier, database, frames)
    seconds: dict[str, tuple[list[float], list[float]]] = {"write": ([], []), "read": ([], []), "write alone": ([], [])}
    try:
        await asyncio.to_thread(plain.allocate, count)
        await tested.write(count)
        await tested.forget()
        for _ in range(rounds):
            seconds["write"][0].append(await asyncio.to_thread(plain.write, count))
            seconds["write"][1].append(await tested.write(count))
            # Reserved and given back: the extents that the tier will read into next.
            pins = [await arena.reserve(frame_bytes, timeout_seconds=10) for _ in range(in_flight)]
            seconds["read"][0].append(await asyncio.to_thread(plain.read, count, pins))
            for pin in pins:
                pin.release()
            seconds["read"][1].append(await tested.read())
            await tested.forget()
            seconds["write alone"][0].append(seconds["write"][0][-1])
            seconds["write alone"][1].append(await tested.write(count, rides=False))
            await tested.forget()
    finally:
        plain.close()
        (directory / "plain").unlink()
        for frame in frames:
            frame.release()
    results = []
    for operation, (plain_seconds, tier_seconds) in seconds.items():
        plain_rate = count * size_bytes / statistics.median(plain_seconds) / 1e9
        tier_rate = count * frame_bytes / statistics.median(tier_seconds) / 1e9
        results.append(Result(operation, size_mib, in_flight, plain_rate, tier_rate, tier_rate / plain_rate))
    return results


async def run(directory: Path, memory: Path, *, rounds: int, mebibytes: int) -> tuple[str, list[Result]]:
    """Make a tier in `directory`, measure every size; returns its I/O mode and the results."""
    database = Database.open(
        durable=directory / "durable",
        volatile=memory / "volatile",
        tables=NVME_TABLES,
        map_bytes=256 * MIB,
        volatile_map_bytes=8 * MIB,
        record_log=RecordLog.open(directory / "log"),
    )
    arena = await Arena.open(
        memory / "arena", capacity_bytes=512 * MIB, store_id=b"bench", boot_id="bench", region_bytes=256 * MIB
    )
    await arena.populate()
    tier = await NvmeTier.open(
        directory / "nvme",
        database=database,
        arena=arena,
        record_key=os.urandom(32),
        capacity_bytes=max(1024, 3 * mebibytes) * MIB,
    )
    try:
        results = [
            result
            for size_mib in SIZES_MIB
            for in_flight in IN_FLIGHT
            for result in await measure(
                directory,
                arena,
                tier,
                database,
                size_mib=size_mib,
                in_flight=in_flight,
                rounds=rounds,
                mebibytes=mebibytes,
            )
        ]
        return (await tier.usage()).mode, results
    finally:
        await tier.aclose()
        await arena.aclose(remove=True)
        await database.aclose()


def show(mode: str, results: list[Result]) -> None:
    """Print the table."""
    table = TextTable(title=f"nvme tier against plain O_DIRECT ({mode})")
    for column in ("operation", "MiB", "in flight", "plain GB/s", "tier GB/s", "ratio"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.operation,
            str(result.size_mib),
            str(result.in_flight),
            f"{result.plain_gb_per_second:.2f}",
            f"{result.tier_gb_per_second:.2f}",
            f"{result.ratio:.2f}",
        )
    Console().print(table)


def main() -> int:
    """Read the options, measure, print."""
    parser = Parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="where on the disk to measure (default: here)")
    parser.add_argument("--rounds", type=one_or_more, default=5)
    parser.add_argument("--mebibytes", type=one_or_more, default=128, help="bytes moved per round and operation")
    parser.add_argument("--json", type=output_file, help="write the results to this file too")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=options.directory) as directory,
        tempfile.TemporaryDirectory(prefix="kvobj-bench-", dir="/dev/shm") as memory,
    ):
        mode, results = uvloop.run(
            run(Path(directory), Path(memory), rounds=options.rounds, mebibytes=options.mebibytes)
        )
    show(mode, results)
    if options.json is not None:
        options.json.write_text(json.dumps({"mode": mode, "results": [asdict(result) for result in results]}, indent=2))
    return 0


if __name__ == "__main__":
    run_tool(main)
