"""What clients on the host read of memory is told to the hashing of what was put off, whichever way it is opened."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
from kv_driver import kv_node
from same_host_world import RawPeer
from tier_codecs import wait_for

from kvobj.api.same_host.hot_opens import KEYS_AT_ONCE
from kvobj.api.same_host.rights import Rights
from kvobj.app.same_host import start_same_host
from kvobj.clock import SystemClock
from kvobj.metrics import Metrics
from kvobj.same_host.messages import KEYS_AHEAD, VERSION, Hello, Open, Opened, Release, Welcome
from kvobj.store.extents import extent_bytes

SIZE = 5000


@pytest.mark.parametrize("count", [1, KEYS_AT_ONCE + 1], ids=["where it arrives", "by a task"])
async def test_what_is_opened_of_memory_and_let_go_of_is_told_with_its_bytes(
    tmp_path: Path, shm_path: Path, count: int
) -> None:
    async with kv_node(tmp_path, shm_path) as kv:
        keys = [f"key-{number}" for number in range(count)]
        for key in keys:
            assert (await kv.driver.request("PUT", f"/cache/{key}", body=bytes(SIZE))).status == 200
        same_host = start_same_host(
            kv.node, kv.node.kv.chunks, clock=SystemClock(), metrics=Metrics(), log=logging.getLogger("test")
        )
        assert same_host is not None
        bucket = await kv.node.catalog.bucket("cache")
        assert bucket is not None
        rights = Rights(bucket, "root", is_owner=True, lane=None, may_write=True, is_trusted=True)
        granted = await same_host.grants.grant(rights)
        peer = RawPeer(str(same_host.server.path))
        try:
            assert isinstance(await asyncio.to_thread(peer.ask, Hello(VERSION, granted.token)), Welcome)
            opened = await asyncio.to_thread(peer.ask, Open([*keys, "absent"]))
            assert isinstance(opened, Opened)
            assert [extent is not None for extent in opened.extents] == [True] * count + [False]
            reads, length = kv.node.host_reads, extent_bytes(SIZE)
            assert (reads.seen_bytes, reads.ahead_bytes) == (count * length, 0)
            assert isinstance(await asyncio.to_thread(peer.ask, Open(keys)), Opened)
            assert (reads.seen_bytes, reads.ahead_bytes) == (2 * count * length, 0)
            ahead = await asyncio.to_thread(peer.ask, Open(keys[:KEYS_AHEAD], is_ahead=True))
            assert isinstance(ahead, Opened)
            handles = [extent.handle for extent in ahead.extents if extent is not None]
            assert reads.ahead_bytes == len(handles) * length > 0
            before = reads.seen_bytes
            await asyncio.to_thread(peer.say, Release(handles))
            await wait_for(lambda: reads.ahead_bytes == 0, timeout_seconds=5.0)
            assert reads.seen_bytes == before + len(handles) * length
        finally:
            peer.close()
            for descriptor in peer.descriptors:
                os.close(descriptor)
            await same_host.server.aclose()
