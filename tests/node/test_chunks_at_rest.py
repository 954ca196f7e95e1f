"""What chunks cost that only lie there: nothing at each of the interpreter's searches for cycles, which holds every thread up."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from real_store import node_settings, running_node
from s3_driver import Driver
from tier_codecs import wait_for

from kvobj.app.node import Node

CHUNKS = 200
ALLOWED = CHUNKS // 4
"""Objects more that are followed: a chunk that has one of its own is noticed, the odd one of a request is not."""


def followed() -> int:
    gc.collect()
    return len(gc.get_objects())


async def put_chain(node: Node, prefix: str, durability: str) -> None:
    driver = Driver(store=node.store)
    for number in range(CHUNKS):
        parent = f"{prefix}{number - 1}" if number else "root"
        put = await driver.put(
            f"/chunks/{prefix}{number}", bytes([number]) * 4096, x_kvobj_parent=parent, x_kvobj_durability=durability
        )
        assert put.status == 200, put.body
    assert await node.write_behind.flush(timeout_seconds=60)


@pytest.mark.parametrize("durability", ["memory", "local"])
async def test_the_search_for_cycles_follows_no_chunk_that_lies_at_rest(
    tmp_path: Path, shm_path: Path, durability: str
) -> None:
    settings = node_settings(tmp_path / "data", shm_path)
    async with running_node(settings) as node:
        await Driver(store=node.store).put("/chunks", b"", x_kvobj_bucket_kind="kv")
        await put_chain(node, "first", durability)
        before = followed()
        await put_chain(node, "second", durability)
        # What is still under way on a busy machine passes; what a chunk has of its own stays.
        await wait_for(lambda: followed() - before < ALLOWED)
