"""Speed of the LMDB catalog: commits of both classes, then lookup and LIST at ten thousand objects and at N.

Puts N objects through the catalog's own durable commits (concurrent ones share groups), prints a table and JSON, and
exits 1 when lookup or a 1,000-key LIST page at N costs more than twice what it costs at ten thousand. Figures depend
on the machine; ratios do not.
"""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from command_line import Parser, one_or_more, run_tool

from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, CommitMode, Durability, ObjectRow
from kvobj.database import Database
from kvobj.ids import make_blob_id
from kvobj.record_log import RecordLog

EPOCH = 7
SMALL = 10_000
PAGE = 1000
RATIO_LIMIT = 2.0
Figures = dict[str, float]


def key_of(number: int) -> str:
    """Spread like content hashes, so that neighbours in time are not neighbours in the tree."""
    return f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}{number:016x}"


def row_of(number: int, durability: Durability, key: str | None = None) -> ObjectRow:
    """An object row as a PUT of one blob makes it."""
    blob = BlobRef(make_blob_id(EPOCH, number + 1), 1 << 20, (1 << 20) + 512, b"d" * 32)
    return ObjectRow(
        bucket="bench",
        key=key or key_of(number),
        blobs=(blob,),
        size_bytes=1 << 20,
        etag=f"{number:032x}",
        modified_ms=1_700_000_000_000 + number,
        owner="main",
        durability=durability,
        headers={"content-type": "application/octet-stream"},
        digest=b"d" * 32,
    )


async def timed(rounds: int, call: Callable[[int], Awaitable[object]]) -> float:
    """Median microseconds of a call."""
    samples = []
    for number in range(rounds):
        start = time.perf_counter()
        await call(number)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e6


async def reads(catalog: LmdbCatalog, objects: int) -> Figures:
    """Lookup and LIST at the present size, from places all over the key space."""

    async def lookup(number: int) -> None:
        found = await catalog.lookup("bench", [key_of(number * 7919 % objects)])
        assert found[0] is not None

    async def page(number: int) -> None:
        after = f"{number * 0x9E3779B97F4A7C15 % (1 << 63):016x}"
        listed = await catalog.list_objects("bench", after=after, limit=PAGE)
        assert len(listed.rows) == PAGE

    await timed(200, page)
    return {"lookup_us": await timed(20_000, lookup), "list_page_us": await timed(200, page)}


async def commits(catalog: LmdbCatalog, durability: Durability, *, writers: int, total: int, first: int) -> float:
    """Microseconds a commit takes of the wall clock with so many writers at once."""

    async def write(start: int) -> None:
        for number in range(start, first + total, writers):
            await catalog.commit(row_of(number, durability), mode=CommitMode.REPLACE, now_ms=0)

    start = time.perf_counter()
    await asyncio.gather(*(write(first + writer) for writer in range(writers)))
    return (time.perf_counter() - start) / total * 1e6


async def run(directory: Path, volatile: Path, objects: int, *, sync: bool) -> dict[str, Figures]:
    """All measurements, by name."""
    database = Database.open(
        durable=directory / "catalog",
        volatile=volatile,
        tables=CATALOG_TABLES,
        map_bytes=max(1 << 30, objects * 1500),
        volatile_map_bytes=1 << 30,
        record_log=RecordLog.open(directory / "log"),
        sync=sync,
    )
    catalog = await LmdbCatalog.open(database)
    await catalog.open_epoch(EPOCH)
    await catalog.create_bucket(BucketRow("bench", BucketKind.ORDINARY, "main", 0, Durability.LOCAL))
    await catalog.create_bucket(BucketRow("other", BucketKind.ORDINARY, "main", 0, Durability.LOCAL))
    figures: dict[str, Figures] = {}
    await commits(catalog, Durability.LOCAL, writers=256, total=SMALL, first=0)
    figures[f"{SMALL:,} objects"] = await reads(catalog, SMALL)
    start = time.perf_counter()
    done = SMALL
    while done < objects:
        total = min(500_000, objects - done)
        await commits(catalog, Durability.LOCAL, writers=1000, total=total, first=done)
        done += total
        print(f"  {done:>12,} objects, {time.perf_counter() - start:8.1f} s", file=sys.stderr)
    figures["fill"] = {"seconds": time.perf_counter() - start, "us_each": (time.perf_counter() - start) / objects * 1e6}
    gc.collect()
    figures[f"{objects:,} objects"] = await reads(catalog, objects)
    for writers, total in ((1, 300), (4, 1200), (16, 4800)):
        cost = await commits(catalog, Durability.LOCAL, writers=writers, total=total, first=done)
        figures[f"commit local, {writers} at once"] = {"us_each": cost, "latency_us": cost * writers}
        done += total
    cost = await commits(catalog, Durability.MEMORY, writers=1, total=20_000, first=done)
    figures["commit memory, inline"] = {"us_each": cost}
    await catalog.aclose()
    await database.aclose()
    return figures


def main() -> int:
    """Run, print, judge."""
    parser = Parser(__doc__)
    parser.add_argument("--objects", type=one_or_more, default=10_000_000)
    parser.add_argument("--directory", type=Path, help="where the durable files go (default: a temporary directory)")
    parser.add_argument("--no-sync", action="store_true", help="flush nothing (the ratios do not depend on it)")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvobj-bench-", dir=arguments.directory))
    volatile = Path(tempfile.mkdtemp(prefix="kvobj-bench-", dir="/dev/shm"))
    try:
        figures = asyncio.run(run(directory, volatile, arguments.objects, sync=not arguments.no_sync))
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(volatile)
    for name, values in figures.items():
        print(f"{name:28}" + "  ".join(f"{unit} {value:,.1f}" for unit, value in values.items()))
    small, large = figures[f"{SMALL:,} objects"], figures[f"{arguments.objects:,} objects"]
    ratios = {unit: large[unit] / small[unit] for unit in small}
    print(json.dumps({"objects": arguments.objects, "figures": figures, "ratios": ratios}))
    return 0 if all(ratio <= RATIO_LIMIT for ratio in ratios.values()) else 1


if __name__ == "__main__":
    run_tool(main)
