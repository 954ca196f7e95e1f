"""A node with small tiers and a real S3 server as its remote, behind the fault proxy: for tests of what a node does with a
remote."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from real_store import MIB, node_settings, running_node
from remote_servers import RemoteStore
from s3_driver import Answer, Driver
from s3_proxy import NOTHING, FaultProxy, Operation, Plan, Toxic

from kvobj.app.node import Node
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.config.settings import GcSettings, Settings
from kvobj.ids import BlobId

AWAY: Final = Plan((Toxic.UNAVAILABLE_BARE,), rate=1.0)
"""Every request is refused, as by a server that is being restarted."""

_WAIT_SECONDS: Final = 20.0


def content(seed: int, size_bytes: int = MIB) -> bytes:
    """Bytes that no other seed has."""
    return random.Random(seed).randbytes(size_bytes)


def remote_settings(
    data: Path, memory: Path, remote: RemoteStore, *, dram_mib: int = 64, nvme_mib: int = 96, part_bytes: int = 8 * MIB
) -> Settings:
    """A node in front of the remote, with deadlines that a test can wait for."""
    settings = node_settings(data, memory, dram_mib=dram_mib, nvme_mib=nvme_mib)
    return replace(
        settings,
        gc=GcSettings(scrub_bytes_per_second=0, grace_seconds=0.0),
        remote=replace(
            remote.settings(),
            part_bytes=part_bytes,
            request_timeout_seconds=5.0,
            operation_timeout_seconds=8.0,
            share_timeout_seconds=10.0,
            manifest_interval_seconds=0.05,
            hedge_seconds=0.0,
        ),
    )


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Wait for what the node does in the background."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        if time.monotonic() > deadline:
            raise AssertionError(what)
        await asyncio.sleep(0.01)


@dataclass
class RemoteWorld:
    """One running node, who drives it, and the proxy between it and its remote."""

    node: Node
    driver: Driver
    proxy: FaultProxy
    remote: RemoteStore

    async def put(self, target: str, body: bytes, **headers: str) -> Answer:
        """PUT in class `shared`, which is reached."""
        answer = await self.driver.put(target, body, x_kvobj_durability="shared", **headers)
        assert answer.status == 200, answer.body
        assert answer.headers["x-kvobj-durability"] == "shared"
        return answer

    async def row(self, bucket: str, key: str) -> ObjectRow:
        (row,) = await self.node.catalog.lookup(bucket, [key])
        assert row is not None
        return row

    async def blob(self, bucket: str, key: str) -> BlobId:
        """The id of an object's first blob."""
        return BlobId((await self.row(bucket, key)).blobs[0].blob_id)

    async def evict(self, bucket: str, key: str, *, from_memory: bool = True) -> BlobId:
        """Let the object lie on the remote alone, as the tiers do by themselves when they are full."""
        row = await self.row(bucket, key)
        assert row.durability is Durability.SHARED
        blob_ids = [BlobId(blob.blob_id) for blob in row.blobs]
        await self.node.read_tier.promotions_done()
        await self.node.nvme.delete(blob_ids)
        self.node.collector._chunks.left(row)
        if from_memory:
            await self.node.dram.delete(blob_ids)
        return blob_ids[0]

    async def is_in_nvme(self, bucket: str, key: str) -> bool:
        return not await self.node.nvme.missing([await self.blob(bucket, key)])

    def asked(self, *operations: Operation) -> int:
        """How many requests of these kinds the remote was sent."""
        return sum(self.proxy.requests[operation] for operation in operations)

    def go_away(self) -> None:
        self.proxy.plan = AWAY

    def come_back(self) -> None:
        self.proxy.plan = NOTHING


@asynccontextmanager
async def remote_world(settings: Settings, proxy: FaultProxy, remote: RemoteStore) -> AsyncIterator[RemoteWorld]:
    """The node, with buckets `objects` and `chunks`."""
    async with running_node(settings) as node:
        driver = Driver(store=node.store)
        await driver.put("/objects", b"")
        await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
        yield RemoteWorld(node, driver, proxy, remote)
