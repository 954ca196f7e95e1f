"""A disk that is full before the nvme tier is: what is only in memory stays there, and sends away nothing that is at home."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from real_store import MIB, node_settings, running_node
from s3_driver import Driver

from kvobj.app.node import Node
from kvobj.catalog.history_protocol import EventType

ROOM_MIB = 11
SMALL_MIB, LARGE_MIB = 3, 7
SMALL = {f"small{number}": SMALL_MIB for number in range(2)}
SECONDS = 30.0


def content(key: str, size_mib: int) -> bytes:
    return random.Random(key).randbytes(size_mib * MIB)


class Disk:
    """What the kernel says is free on the disk under the nvme tier."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._directory = directory
        self._statvfs = os.statvfs
        monkeypatch.setattr(os, "statvfs", self._look)

    def _look(self, path: str | Path) -> os.statvfs_result:
        found = self._statvfs(path)
        if not self.is_full or self._directory not in (Path(path), *Path(path).parents):
            return found
        return os.statvfs_result([*found[:4], 0, *found[5:]])


@pytest.fixture
async def node(tmp_path: Path, shm_path: Path) -> AsyncIterator[Node]:
    settings = node_settings(tmp_path / "data", shm_path)
    segments = replace(settings.nvme, path=tmp_path / "segments", segment_bytes=64 * MIB)
    async with running_node(replace(settings, nvme=segments)) as running:
        yield running


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "segments", monkeypatch)


async def reached(condition: Callable[[], bool], node: Node) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, node.write_behind.backlog
        await node.on_pool(os.sched_yield)


async def with_little_room(node: Node, disk: Disk) -> Driver:
    """All small chunks are written down, in one batch with a large one that finds no room: the disk has none for a segment more."""
    driver = Driver(store=node.store)
    await driver.put("/objects", b"")
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    assert (await driver.put("/objects/first", content("first", 1))).status == 200  # there is a segment
    disk.is_full = True  # before another is made ahead of need
    assert (await driver.put("/objects/o", content("o", 64 - ROOM_MIB - 2))).status == 200
    node.write_behind._delay_seconds = 3600.0
    for key, size_mib in SMALL.items():
        assert (await driver.put(f"/chunks/{key}", content(key, size_mib))).status == 200
    put = await driver.put("/chunks/large", content("large", LARGE_MIB))
    assert put.headers["x-kvobj-durability"] == "memory"
    node.write_behind._delay_seconds = 0.0
    node.write_behind._arrived.set()
    await reached(lambda: node.write_behind.failures >= 3 and node.write_behind.written_objects == len(SMALL), node)
    return driver


async def removed(node: Node) -> list[str]:
    page = await node.catalog.history.read("chunks", after=0)
    return sorted(key for event in page.events if event.type is EventType.REMOVED for key in event.keys)


async def test_what_the_disk_has_no_room_for_stays_readable_and_so_does_all_that_was_written_with_it(
    node: Node, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        driver = await with_little_room(node, disk)
    assert "write-behind failed, will retry" in caplog.text
    for key, size_mib in {**SMALL, "large": LARGE_MIB}.items():
        assert (await driver.get(f"/chunks/{key}")).body == content(key, size_mib)
    disk.is_full = False
    await reached(lambda: not node.write_behind.backlog.objects, node)
    assert (await driver.get("/chunks/large")).body == content("large", LARGE_MIB)
    assert await removed(node) == []


async def test_chunks_at_home_give_way_once_a_writer_waits_for_room_in_memory(node: Node, disk: Disk) -> None:
    driver = await with_little_room(node, disk)
    more = [f"more{number}" for number in range(3)]
    for key in more:  # half of memory may be dirty
        assert (await driver.put(f"/chunks/{key}", content(key, LARGE_MIB))).status == 200
        assert await removed(node) == []
    put = await asyncio.wait_for(driver.put("/chunks/last", content("last", LARGE_MIB)), SECONDS)
    assert put.status == 200
    assert await removed(node) == sorted(SMALL)
    for key in ("large", *more, "last"):
        assert (await driver.get(f"/chunks/{key}")).body == content(key, LARGE_MIB)


async def test_policy_is_counted_once_for_a_chunk_however_often_it_is_tried(node: Node, disk: Disk) -> None:
    await with_little_room(node, disk)
    failures = node.write_behind.failures
    await reached(lambda: node.write_behind.failures >= failures + 2, node)
    assert (node.collector.counts.admitted, node.collector.counts.refused) == (len(SMALL) + 1, 0)
