"""Gc in a whole node: refused chunks, holds, scrub and repair, lost chunks, kept tables, what an operator sees."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_store import MIB, node_settings, running_node
from s3_driver import Driver

from kvobj.app.admin_state import NodeView
from kvobj.app.node import Node, flush, open_node
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.clock import SystemClock, boot_ms
from kvobj.config.settings import GcSettings, Settings
from kvobj.data_directory import DataDirectory
from kvobj.gc.recall import RecallQuery
from kvobj.gc.scrub import Scrub
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.policy.chunk_policy import CacheTier, chunk_name


def content(seed: int, size_bytes: int = MIB) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path) -> Settings:
    made = node_settings(tmp_path / "data", shm_path)
    return replace(made, gc=GcSettings(scrub_bytes_per_second=0))


@pytest.fixture
async def node(settings: Settings) -> AsyncIterator[Node]:
    async with running_node(settings) as running:
        yield running


async def with_buckets(node: Node) -> Driver:
    driver = Driver(store=node.store)
    await driver.put("/objects", b"")
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    return driver


async def put_chain(driver: Driver, length: int, *, durability: str = "memory") -> None:
    for number in range(length):
        parent = f"c{number - 1}" if number else "root"
        put = await driver.put(
            f"/chunks/c{number}", content(number), x_kvobj_parent=parent, x_kvobj_durability=durability
        )
        assert put.status == 200, put.body


async def row_of(node: Node, key: str, bucket: str = "chunks") -> ObjectRow:
    (row,) = await node.catalog.lookup(bucket, [key])
    assert row is not None
    return row


async def live(node: Node) -> list[str]:
    return [row.key for row in (await node.catalog.list_objects("chunks")).rows]


def refuse_everything(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.policy, "admits", lambda *_, **__: False)


# -- chunks that policy keeps from the home tier --------------------------------------------------------------------------


async def settled_refusals(node: Node, count: int) -> None:
    """Wait until write-behind has asked about everything."""
    node.write_behind._delay_seconds = 0.0
    node.write_behind._arrived.set()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if node.write_behind.backlog.refused_objects == count and not node.write_behind.backlog.objects:
            return
        await node.on_pool(os.sched_yield)
    raise AssertionError(node.write_behind.backlog)


async def test_a_refused_chunk_stays_in_memory_and_is_never_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await with_buckets(node)
    refuse_everything(node, monkeypatch)
    await put_chain(driver, 3)
    await driver.put("/objects/o", content(9), x_kvobj_durability="memory")
    await node.sealing.drain()
    await settled_refusals(node, 3)
    assert (await driver.get("/chunks/c2")).body == content(2)
    assert (await row_of(node, "c2")).durability is Durability.MEMORY
    assert node.dram.dirty_bytes > 3 * MIB
    assert (await row_of(node, "o", "objects")).durability is Durability.LOCAL
    plan = await node.collector.plan()
    assert [(victim.key, victim.reason) for victim in plan.victims] == [
        (f"c{number}", "refused") for number in range(3)
    ]


async def test_a_flush_removes_what_policy_refuses_but_for_what_is_asked_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await with_buckets(node)
    refuse_everything(node, monkeypatch)
    await put_chain(driver, 4)
    await node.sealing.drain()
    await settled_refusals(node, 4)
    assert (await driver.request("HEAD", "/chunks/c1")).status == 200
    assert await flush(node, timeout_seconds=30)
    # c1 is held, so its parent stays too: both are written down after all.
    assert await live(node) == ["c0", "c1"]
    assert node.dram.dirty_bytes == 0
    assert (await driver.get("/chunks/c1")).body == content(1)
    assert (await row_of(node, "c1")).durability is Durability.LOCAL
    assert await node.nvme.missing([BlobId((await row_of(node, "c0")).blobs[0].blob_id)]) == []


async def test_a_flush_writes_a_refused_chunk_that_is_pinned(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = await with_buckets(node)
    refuse_everything(node, monkeypatch)
    await put_chain(driver, 2)
    await node.sealing.drain()
    await settled_refusals(node, 2)
    now_ms = boot_ms(SystemClock())
    leases = node.catalog.leases
    session = await leases.open_session(user="root", bucket="chunks", holder="h", ttl_ms=60_000, now_boot_ms=now_ms)
    await leases.pin_tails(session.id, ["c1"], user="root", bucket="chunks", now_boot_ms=now_ms)
    assert await flush(node, timeout_seconds=30)
    assert await live(node) == ["c0", "c1"]
    await leases.close_session(session.id, user="root", bucket="chunks")


async def test_when_dirty_bytes_press_refused_chunks_give_way_to_new_ones(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await with_buckets(node)
    refuse_everything(node, monkeypatch)
    for number in range(60):  # 60 MiB through 32 MiB that may be dirty
        assert (await driver.put(f"/chunks/k{number:02}", content(number))).status == 200
    assert node.dram.dirty_bytes <= 32 * MIB
    assert node.write_behind.written_objects == 0
    assert "k59" in await live(node)
    assert len(await live(node)) < 40


# -- holds ---------------------------------------------------------------------------------------------------------------


async def test_a_head_is_not_followed_by_a_404_however_short_room_is(node: Node) -> None:
    driver = await with_buckets(node)
    await put_chain(driver, 4, durability="local")
    assert (await driver.request("HEAD", "/chunks/c2")).status == 200
    assert await node.collector.make_room(512 * MIB) == MIB
    assert await live(node) == ["c0", "c1", "c2"]
    assert (await driver.get("/chunks/c2")).body == content(2)


# -- scrub, repair, loss -------------------------------------------------------------------------------------------------


def flip_at_home(node: Node, data: bytes) -> None:
    """Flip a bit of the chunk in the nvme tier's segments."""
    needle = data[1000:1064]
    places = 0
    for file in node.nvme_directory.rglob("*"):
        if not file.is_file():
            continue
        at = file.read_bytes().find(needle)
        if at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at)
                opened.write(bytes([needle[0] ^ 1]))
                opened.flush()
                os.fsync(opened.fileno())
            places += 1
    assert places == 1


async def forget_in_memory(node: Node, *keys: str) -> None:
    for key in keys:
        await node.dram.delete([BlobId((await row_of(node, key)).blobs[0].blob_id)])


async def test_a_scrub_repairs_a_bad_copy_from_a_good_one(node: Node) -> None:
    driver = await with_buckets(node)
    await put_chain(driver, 2, durability="local")
    flip_at_home(node, content(1))
    scrub = node.upkeep.scrub
    await scrub.run_pass()
    assert (scrub.counts.objects, scrub.counts.mismatches, scrub.counts.repaired, scrub.counts.lost) == (2, 1, 1, 0)
    await forget_in_memory(node, "c0", "c1")
    assert (await driver.get("/chunks/c1")).body == content(1)
    await scrub.run_pass()
    assert (scrub.counts.mismatches, scrub.counts.passes) == (1, 2)


async def test_a_scrub_drops_a_chunk_without_a_good_copy_and_what_descends_from_it(node: Node) -> None:
    driver = await with_buckets(node)
    await put_chain(driver, 4, durability="local")
    await driver.put("/objects/o", content(7))
    await forget_in_memory(node, "c1")
    await node.dram.delete([BlobId((await row_of(node, "o", "objects")).blobs[0].blob_id)])
    flip_at_home(node, content(1))
    flip_at_home(node, content(7))
    await node.upkeep.scrub.run_pass()
    assert await live(node) == ["c0"]
    assert node.upkeep.scrub.counts.lost == 2
    assert len(node.upkeep.lost) == 1  # the object, which stays to be seen
    assert (await driver.get("/objects/o")).status == 500
    figures = node.upkeep.parts.figures()
    assert (figures["lost_objects"], figures["dropped_lost_chunks"]) == (1, 1)


async def test_a_scrub_goes_on_where_it_was_before_the_stop(settings: Settings) -> None:
    async with running_node(settings) as node:
        driver = await with_buckets(node)
        await put_chain(driver, 3, durability="local")
        scrub = node.upkeep.scrub
        scrub._position = scrub._position.__class__("chunks", "c0", 5)
    async with running_node(settings) as node:
        await node.upkeep.scrub.run_pass()
        assert node.upkeep.scrub.counts.objects == 2


def test_a_damaged_position_begins_the_scrub_anew(node: Node) -> None:
    scrub: Scrub = node.upkeep.scrub
    before = scrub.save()
    scrub.load(b"\xff\xff")
    assert scrub.save() == before


async def test_rows_whose_bytes_are_gone_are_found_by_the_sweep(node: Node) -> None:
    driver = await with_buckets(node)
    await put_chain(driver, 3, durability="local")
    blob_id = BlobId((await row_of(node, "c1")).blobs[0].blob_id)
    for tier in (node.dram, node.nvme):
        await tier.delete([blob_id])
    assert (await node.upkeep.sweep.sweep()).lost_rows == 1
    assert await live(node) == ["c0"]


# -- what is kept over a stop, and what is shown -------------------------------------------------------------------------


async def test_the_policys_tables_are_kept_over_a_restart(settings: Settings) -> None:
    async with running_node(settings) as node:
        await with_buckets(node)
        chain = b"".join(chunk_name("chunks", f"k{number}") for number in range(50))
        for second in range(100):
            node.policy.request(chain, now_ms=1_000_000 + 5_000 * second)
        tables = node.policy.save()
    async with running_node(settings) as node:
        assert node.policy.save() == tables
        fresh = type(node.policy)({CacheTier.NVME: 1})  # type: ignore[call-arg]
        assert fresh.save() != tables


async def test_an_operator_sees_gc_and_leases_and_can_recall(node: Node) -> None:
    driver = await with_buckets(node)
    await put_chain(driver, 3)
    view = NodeView(node, clock=SystemClock(), metrics=Metrics(), receive_mode=lambda: "direct")
    status = await view.status()
    assert status.leases["sessions"] == 0
    assert status.gc["marked_chunks"] == 0
    assert (await view.gc_plan(10)).victims == ()
    assert (await view.collect()).condemned == 0
    assert (await view.start_recall(RecallQuery("chunks", writer="nobody"), dry_run=False)).state == "running"
    assert (await node.upkeep.recall.finished()).chunks == 0
    await view.start_recall(RecallQuery("chunks", namespace="default"), dry_run=False)
    assert (await node.upkeep.recall.finished()).chunks == 3
    assert view.recall_report().state == "done"
    assert await live(node) == []


async def test_gc_has_metrics(settings: Settings) -> None:
    metrics = Metrics()
    with DataDirectory.open(settings.server.data) as data:
        async with open_node(settings, data, clock=SystemClock(), metrics=metrics, log=logging.getLogger("test")):
            text = metrics.render().decode()
    for name in ("kvobj_gc_marked_chunks", "kvobj_gc_reclaim_lag_seconds", "kvobj_lease_pins", "kvobj_lease_quiet"):
        assert f"\n{name} 0.0" in text


async def test_after_the_loss_of_lease_state_policy_removes_nothing_and_delete_still_hides(settings: Settings) -> None:
    async with running_node(settings) as node:
        driver = await with_buckets(node)
        await put_chain(driver, 3, durability="local")
        await node.catalog.leases.open_session(
            user="root", bucket="chunks", holder="h", ttl_ms=60_000, now_boot_ms=boot_ms(SystemClock())
        )
    async with running_node(settings) as node:  # the clean stop took the sessions with it
        driver = Driver(store=node.store)
        await node.collector.load()
        assert node.upkeep.parts.leases()["quiet"] == 1
        assert (await node.collector.plan()).quiet
        assert await node.collector.make_room(512 * MIB) == 0
        assert (await node.collector.collect()).quiet
        assert (await driver.request("DELETE", "/chunks/c1")).status == 204
        assert await live(node) == ["c0"]
