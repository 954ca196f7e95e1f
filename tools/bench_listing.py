"""Cost of a page of a listing: a million keys under deep common prefixes against a bucket of ten thousand.

Both buckets hold keys of one shape (`tenant/model/shard/block`), in one of them a hundred times more below each common prefix.
Pages are asked of the S3 service itself (signature, catalog, XML), in process. A page must cost a page, so the ratio of the two
buckets is the result, and the exit status is 1 where any is above 2. Absolute figures are of this machine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from bench_catalog import EPOCH, row_of
from command_line import Parser, one_or_more, run_tool

from kvobj.api.exchange import S3Settings
from kvobj.api.message import RequestHead
from kvobj.api.object_store import ObjectStore
from kvobj.api.service import S3Service
from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import BucketKind, BucketRow, CommitMode, Durability, UserRow
from kvobj.client.credentials import Credentials
from kvobj.client.sigv4 import EMPTY_SHA256, encoded_query, signed_headers
from kvobj.clock import SystemClock
from kvobj.database import Database
from kvobj.record_log import RecordLog

RATIO_LIMIT = 2.0
ROUNDS = 40
TENANTS, MODELS = 10, 10
SMALL_KEYS = 10_000
USER = UserRow("main", "main", "benchaccesskey", "benchsecretkey", is_root=True)
Pages = dict[str, list[tuple[str, str]]]


class NoBody:
    """The body of a GET."""

    length = 0


def keys_of(total: int) -> Iterator[str]:
    """Keys of four levels: ten tenants, ten models, ten shards each, the rest blocks."""
    shards = 10
    blocks = total // (TENANTS * MODELS * shards)
    for tenant in range(TENANTS):
        for model in range(MODELS):
            for shard in range(shards):
                for block in range(blocks):
                    yield f"tenant-{tenant:02}/model-{model:02}/shard-{shard:03}/{block:08x}"


def wide_keys(total: int) -> Iterator[str]:
    """Keys whose first level alone has more common prefixes than a page."""
    groups = 2000
    for number in range(total):
        yield f"wide/{number % groups:05}/{number // groups:08x}"


class Lister:
    """One service over a filled catalog."""

    def __init__(self, catalog: LmdbCatalog) -> None:
        store = cast("ObjectStore", SimpleNamespace(catalog=catalog))
        self._service = S3Service(store, S3Settings(), clock=SystemClock(), log=logging.getLogger("bench"))

    async def page(self, bucket: str, query: list[tuple[str, str]]) -> bytes:
        """The document of one page."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = f"/{bucket}"
        headers = signed_headers(
            Credentials(USER.access_key, USER.secret_key),
            method="GET",
            path=path,
            query=query,
            headers={"host": "127.0.0.1"},
            payload_sha256=EMPTY_SHA256,
            region="us-east-1",
            timestamp=stamp,
        )
        head = RequestHead("GET", f"{path}?{encoded_query(query)}", tuple(headers.items()), "bench", "127.0.0.1")
        reply = await self._service.handle(head, cast("Any", NoBody()))
        if reply.status != 200:  # noqa: PLR2004 - a status
            raise RuntimeError(f"a page was answered {reply.status}")
        return cast("bytes", reply.body)


def pages() -> Pages:
    """What is asked of both buckets."""
    listing = ("list-type", "2")
    middle = "tenant-05/model-05/shard-005/"
    return {
        "1,000 keys": [listing],
        "1,000 keys from the middle": [listing, ("start-after", middle)],
        "delimiter: 10 tenants": [listing, ("delimiter", "/"), ("prefix", "tenant-"), ("max-keys", "10")],
        "delimiter: 10 shards, deep": [listing, ("delimiter", "/"), ("prefix", "tenant-05/model-05/")],
        "delimiter: 1,000 of 2,000 groups": [listing, ("delimiter", "/"), ("prefix", "wide/")],
        "delimiter of four letters": [listing, ("delimiter", "/sha"), ("prefix", "tenant-0")],
    }


async def fill(catalog: LmdbCatalog, bucket: str, keys: Iterator[str], first: int, tell: Callable[[int], None]) -> int:
    """Commit an object under each key; returns the number after the last."""
    await catalog.create_bucket(BucketRow(bucket, BucketKind.ORDINARY, "main", 0, Durability.LOCAL))
    number = first

    async def writer() -> None:
        nonlocal number
        for key in keys:
            number += 1
            row = msgspec.structs.replace(row_of(number, Durability.LOCAL, key), bucket=bucket)
            await catalog.commit(row, mode=CommitMode.REPLACE, now_ms=0)
            if number % 50_000 == 0:
                tell(number)

    await asyncio.gather(*(writer() for _ in range(1000)))
    return number


async def run(directory: Path, volatile: Path, total: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each page, of both buckets, interleaved."""
    database = Database.open(
        durable=directory / "catalog",
        volatile=volatile,
        tables=CATALOG_TABLES,
        map_bytes=max(1 << 30, total * 1500),
        volatile_map_bytes=1 << 30,
        record_log=RecordLog.open(directory / "log"),
        sync=False,
    )
    catalog = await LmdbCatalog.open(database)
    await catalog.open_epoch(EPOCH)
    await catalog.put_user(USER)
    begun = time.perf_counter()

    def tell(number: int) -> None:
        print(f"  {number:>10,} keys, {time.perf_counter() - begun:6.1f} s", file=sys.stderr)

    last = 0
    for bucket, size in (("small", SMALL_KEYS), ("large", total)):
        both = (key for keys in (keys_of(size // 2), wide_keys(size // 2)) for key in keys)
        last = await fill(catalog, bucket, both, last, tell)
    lister = Lister(catalog)
    samples: dict[str, dict[str, list[float]]] = {name: {"small": [], "large": []} for name in pages()}
    for number in range(ROUNDS):
        for name, query in pages().items():
            # In turns, since who comes second finds warm caches.
            for bucket in ("small", "large") if number % 2 else ("large", "small"):
                start = time.perf_counter()
                await lister.page(bucket, query)
                samples[name][bucket].append((time.perf_counter() - start) * 1e3)
    await catalog.aclose()
    await database.aclose()
    return {
        name: {bucket: statistics.median(values) for bucket, values in both.items()} for name, both in samples.items()
    }


def main() -> int:
    """Run, print, judge."""
    parser = Parser(__doc__)
    parser.add_argument("--keys", type=one_or_more, default=1_000_000)
    parser.add_argument("--directory", type=Path, help="where the files go (default: a temporary directory)")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvobj-bench-", dir=arguments.directory))
    volatile = Path(tempfile.mkdtemp(prefix="kvobj-bench-", dir="/dev/shm"))
    try:
        figures = asyncio.run(run(directory, volatile, arguments.keys))
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(volatile)
    print(f"{'page':36}{f'{SMALL_KEYS:,} keys':>14}{f'{arguments.keys:,} keys':>18}{'ratio':>8}")
    worst = 0.0
    for name, values in figures.items():
        ratio = values["large"] / values["small"]
        worst = max(worst, ratio)
        print(f"{name:36}{values['small']:>11.2f} ms{values['large']:>15.2f} ms{ratio:>8.2f}")
    print(json.dumps({"keys": arguments.keys, "milliseconds": figures, "worst_ratio": worst}))
    return 0 if worst <= RATIO_LIMIT else 1


if __name__ == "__main__":
    run_tool(main)
