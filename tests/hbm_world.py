"""Nodes with an hbm tier that holds something: over host memory, and on a GPU where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from s3_driver import Driver
from tier_codecs import Coded, coded_node, tensor

from kvobj.app.node import Node, flush
from kvobj.ids import BlobId
from kvobj.tiers.hbm import HbmTier


async def put_at_home(node: Node, data: bytes) -> tuple[Driver, BlobId]:
    """An object that is at home alone."""
    driver = Driver(store=node.store)
    await driver.put("/objects", b"")
    await driver.put("/objects/a", data)
    assert await flush(node, timeout_seconds=10)
    (row,) = await node.catalog.lookup("objects", ["a"])
    assert row is not None
    blob_id = BlobId(row.blobs[0].blob_id)
    await node.dram.delete([blob_id])
    return driver, blob_id


async def hbm_holds(node: Node, blob_id: BlobId) -> None:
    """Wait until promotions have reached the tier."""
    assert node.hbm is not None
    async with asyncio.timeout(10):
        while await node.hbm.missing([blob_id]):  # noqa: ASYNC110 - promotion gives no signal of its own
            await asyncio.sleep(0.01)


@asynccontextmanager
async def promoted(data: Path, memory: Path, codec: str) -> AsyncIterator[tuple[Coded, HbmTier, str]]:
    """A chunk that is in device memory and at home."""
    async with coded_node(data, memory, codecs={"hbm": codec}) as coded:
        key = await coded.put(1)
        assert await flush(coded.node, timeout_seconds=20.0)
        await coded.drop_from_memory(key)
        assert (await coded.get(key)).body == tensor(1)
        hbm, blob_id = coded.node.hbm, await coded.blob_id(key)
        assert hbm is not None
        async with asyncio.timeout(20):
            while await hbm.missing([blob_id]):  # noqa: ASYNC110 - promotion gives no signal of its own
                await asyncio.sleep(0.01)
        await coded.node.read_tier.promotions_done()
        await coded.drop_from_memory(key)
        yield coded, hbm, key
