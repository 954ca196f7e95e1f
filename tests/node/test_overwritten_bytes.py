"""What an overwrite leaves is room again at once: nothing is refused for it, and nothing that is live makes way for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_store import MIB, node_settings, running_node
from s3_driver import Driver

from kvobj.app.node import Node
from kvobj.config.settings import GcSettings

NVME_MIB = 64
SIZE = 4 * MIB
BODY = random.Random(5).randbytes(SIZE)
WRITES = 2 * NVME_MIB * MIB // SIZE


@pytest.fixture
async def node(tmp_path: Path, shm_path: Path) -> AsyncIterator[Node]:
    settings = node_settings(tmp_path / "data", shm_path, nvme_mib=NVME_MIB)
    async with running_node(replace(settings, gc=GcSettings(sweep_interval_seconds=3600))) as running:
        yield running


@pytest.fixture
async def driver(node: Node) -> Driver:
    made = Driver(store=node.store)
    await made.put("/objects", b"")
    await made.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    return made


async def left(node: Node, blobs: int) -> int:
    """How many blobs the home tier holds once no more than so many are left. No sweep looks for them within a test."""
    async with asyncio.timeout(20):
        while (await node.nvme.usage()).blobs > blobs:
            await node.on_pool(int)
    return (await node.nvme.usage()).blobs


async def test_an_object_that_is_put_again_and_again_is_never_refused(node: Node, driver: Driver) -> None:
    for _ in range(WRITES):
        answer = await driver.put("/objects/o", BODY, x_kvobj_durability="local")
        assert answer.status == 200, answer.body
    assert await left(node, 1) == 1


async def test_a_copy_that_is_made_again_and_again_is_never_refused(node: Node, driver: Driver) -> None:
    await driver.put("/objects/source", BODY, x_kvobj_durability="local")
    for _ in range(WRITES):
        answer = await driver.put("/objects/o", b"", x_amz_copy_source="/objects/source", x_kvobj_durability="local")
        assert answer.status == 200, answer.body
    assert await left(node, 2) == 2


async def test_a_part_that_is_put_again_and_again_is_never_refused(node: Node, driver: Driver) -> None:
    begun = await driver.request("POST", "/objects/o?uploads=", headers={"x-kvobj-durability": "local"})
    upload_id = begun.texts("UploadId")[0]
    for _ in range(WRITES):
        answer = await driver.put(f"/objects/o?partNumber=1&uploadId={upload_id}", BODY)
        assert answer.status == 200, answer.body
    assert await left(node, 1) == 1


async def test_what_one_overwrite_leaves_goes_without_a_sweep(node: Node, driver: Driver) -> None:
    for _ in range(2):
        await driver.put("/objects/o", BODY, x_kvobj_durability="local")
    assert await left(node, 1) == 1


async def test_chunks_do_not_make_way_for_what_nobody_wants(node: Node, driver: Driver) -> None:
    chunks = NVME_MIB * 6 // 10
    for number in range(chunks):
        parent = f"c{number - 1}" if number else "root"
        put = await driver.put(f"/chunks/c{number}", BODY[:MIB], x_kvobj_parent=parent, x_kvobj_durability="local")
        assert put.status == 200, put.body
    for _ in range(WRITES):
        answer = await driver.put("/objects/o", BODY, x_kvobj_durability="local")
        assert answer.status == 200, answer.body
    assert len((await node.catalog.list_objects("chunks")).rows) == chunks
