"""What the commands that compare or rebuild a stopped store with its remote tier open: the bucket, and the catalog's database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

from kvobj.app.remote import remote_tables
from kvobj.arena.geometry import current_boot_id
from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.clock import SystemClock
from kvobj.config.settings import RemoteSettings, Settings
from kvobj.data_directory import DataDirectory
from kvobj.database import Database
from kvobj.metrics import Metrics
from kvobj.record_log import RecordLog
from kvobj.tiers.coded_blobs import CODED_BLOBS
from kvobj.tiers.dram import DRAM_BLOBS
from kvobj.tiers.nvme import NVME_TABLES
from kvobj.tiers.remote.bucket import RemoteBucket
from kvobj.tiers.verified import RunOnPool

T = TypeVar("T")
A = TypeVarTuple("A")

Report = Callable[[str, dict[str, object]], None]
"""Told of each finding as it is found: its kind, and its fields."""

_LOG: Final = logging.getLogger("kvobj.offline")


@asynccontextmanager
async def open_bucket(settings: RemoteSettings, executor: ThreadPoolExecutor) -> AsyncIterator[RemoteBucket]:
    """The remote's bucket for a command; `TierUnavailableError` where it does not answer."""
    bucket = await RemoteBucket.open(
        settings,
        clock=SystemClock(),
        metrics=Metrics(),
        run=on_pool(executor),
        log=_LOG,
    )
    try:
        await bucket.probe()
        yield bucket
    finally:
        await bucket.aclose()


def on_pool(executor: ThreadPoolExecutor) -> RunOnPool:
    """Runs blocking work on the executor."""

    def run(work: Callable[[*A], T], /, *arguments: *A) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(executor, work, *arguments)

    return run


def open_database(
    settings: Settings, data: DataDirectory, *, record_log: RecordLog | None, volatile: Path, rebuild: bool = False
) -> Database:
    """The catalog's database of a stopped store with a remote, as its node opens it, but for the volatile environment."""
    return Database.open(
        durable=data.catalog_path,
        volatile=volatile,
        tables=[*CATALOG_TABLES, DRAM_BLOBS, CODED_BLOBS, *NVME_TABLES, *remote_tables(settings)],
        map_bytes=settings.catalog.map_bytes,
        volatile_map_bytes=settings.catalog.volatile_map_bytes,
        record_log=record_log,
        store_id=data.store_id,
        boot_id=current_boot_id(),
        rebuild=rebuild,
        outbox=SystemClock(),
    )
