"""Chunks of class `memory` that a DELETE hid while a pin holds them: read after a crash, written down, never torn from the pin."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_store import MIB, node_settings, running_node
from s3_driver import Driver, FakeBody

from kvobj.app.node import Node, flush
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.clock import SystemClock, boot_ms
from kvobj.config.settings import GcSettings, Settings
from kvobj.errors import FrameCorruptError
from kvobj.ids import BlobId
from kvobj.store import sealing


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(MIB)


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path) -> Settings:
    made = node_settings(tmp_path / "data", shm_path)
    return replace(made, gc=GcSettings(scrub_bytes_per_second=0))


@pytest.fixture
async def node(settings: Settings) -> AsyncIterator[Node]:
    async with running_node(settings) as running:
        yield running


async def put_chain(node: Node, length: int) -> Driver:
    driver = Driver(store=node.store)
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    for number in range(length):
        parent = f"c{number - 1}" if number else "root"
        put = await driver.request(
            "PUT",
            f"/chunks/c{number}",
            body=FakeBody(content(number)),
            headers={"x-kvobj-parent": parent},
            payload="UNSIGNED-PAYLOAD",  # so that it is hashed after its acknowledgement
        )
        assert put.headers["x-kvobj-durability"] == "memory"
    return driver


async def pin(node: Node, tail: str) -> tuple[bytes, str]:
    """A session, and its pin of the chain up to the tail, in hex."""
    now_ms, leases = boot_ms(SystemClock()), node.catalog.leases
    session = await leases.open_session(user="alice", bucket="chunks", holder="h", ttl_ms=60_000, now_boot_ms=now_ms)
    granted = await leases.pin_tails(session.id, [tail], user="alice", bucket="chunks", now_boot_ms=now_ms)
    pin_id = granted.pins[0].pin
    assert pin_id is not None
    return session.id, pin_id.hex()


async def let_go(node: Node, session: bytes) -> None:
    await node.catalog.leases.close_session(session, user="alice", bucket="chunks")
    await node.collector.collect()
    while await node.reaper.reap_batch():
        pass


async def hidden(node: Node, key: str) -> ObjectRow:
    row = await node.catalog.lookup_hidden("chunks", key)
    assert row is not None
    return row


def leave_unsealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame is hashed and sealed any more: so they are found by the next start, as after kill -9."""
    monkeypatch.setattr(sealing, "_hash_and_seal", lambda _: None)


async def test_what_a_pin_holds_is_read_after_a_crash_before_it_was_hashed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(settings) as node:
        with monkeypatch.context() as patched:
            leave_unsealed(patched)
            driver = await put_chain(node, 2)
            await node.sealing.drain()
        session, pin_id = await pin(node, "c1")
        assert (await driver.request("DELETE", "/chunks/c0")).status == 204
    async with running_node(settings) as node:
        assert (node.recovery.rows, node.recovery.hashed_blobs, node.recovery.dropped_rows) == (2, 2, 0)
        driver = Driver(store=node.store)
        for number in range(2):
            got = await driver.request("GET", f"/chunks/c{number}", headers={"x-kvobj-pin": pin_id})
            assert (got.status, got.body) == (200, content(number))
            assert (await driver.get(f"/chunks/c{number}")).status == 404
        assert await flush(node, timeout_seconds=30)
        assert node.dram.dirty_bytes == 0
        assert (await hidden(node, "c1")).durability is Durability.LOCAL
        await let_go(node, session)
        assert await node.catalog.lookup_hidden("chunks", "c1") is None
        assert [(await tier.usage()).blobs for tier in (node.dram, node.nvme)] == [0, 0]


async def test_what_a_pin_holds_is_written_down_like_any_other_and_evicted_by_nobody_before(node: Node) -> None:
    driver = await put_chain(node, 2)
    session, pin_id = await pin(node, "c1")
    await driver.request("DELETE", "/chunks/c0")
    await node.sealing.drain()
    assert node.dram.dirty_bytes > 2 * MIB
    assert await flush(node, timeout_seconds=30)
    assert node.dram.dirty_bytes == 0
    blob_ids = [BlobId((await hidden(node, key)).blobs[0].blob_id) for key in ("c0", "c1")]
    await node.dram.delete(blob_ids)
    got = await driver.request("GET", "/chunks/c0", headers={"x-kvobj-pin": pin_id})
    assert (got.body, got.headers["x-kvobj-tier"]) == (content(0), "nvme")
    assert len(node.collector._chunks) == 0  # what is hidden is not policy's
    await let_go(node, session)
    assert (await node.nvme.usage()).blobs == 0


async def test_a_hidden_chunk_whose_bytes_are_lost_stops_no_start(settings: Settings) -> None:
    async with running_node(settings) as node:
        driver = await put_chain(node, 1)
        session, pin_id = await pin(node, "c0")
        await driver.request("DELETE", "/chunks/c0")
        await node.sealing.drain()
        lost = BlobId((await hidden(node, "c0")).blobs[0].blob_id)
        await driver.put("/chunks/kept", content(9))
        await node.dram.delete([lost])
    async with running_node(settings) as node:
        driver = Driver(store=node.store)
        assert (await driver.request("GET", "/chunks/c0", headers={"x-kvobj-pin": pin_id})).status == 404
        assert (await driver.get("/chunks/kept")).body == content(9)
        await let_go(node, session)
        assert await node.catalog.lookup_hidden("chunks", "c0") is None
        assert await flush(node, timeout_seconds=30)


async def store_anew(node: Node, key: str) -> None:
    """A DELETE, and another writer's PUT of the same chunk: the first bytes are the pin's alone."""
    driver = Driver(store=node.store)
    assert (await driver.request("DELETE", f"/chunks/{key}")).status == 204
    put = await driver.put(f"/chunks/{key}", content(0), x_kvobj_parent="root", x_kvobj_durability="local")
    assert put.headers["x-kvobj-existed"] == "false"


@pytest.mark.parametrize("fault", ["replaced before it is recorded", "given up"])
async def test_write_behind_takes_no_bytes_from_a_pin(node: Node, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    await put_chain(node, 1)
    await node.sealing.drain()
    (row,) = await node.catalog.lookup("chunks", ["c0"])
    assert row is not None
    blob_id = BlobId(row.blobs[0].blob_id)
    session, _ = await pin(node, "c0")
    raise_durability, missing = node.catalog.raise_durability, node.nvme.missing
    steps: list[str] = []

    async def raise_later(rows: list[ObjectRow]) -> list[bool]:
        if rows[0].blobs[0].blob_id == blob_id and not steps:
            steps.append("raise")
            await store_anew(node, "c0")
        return await raise_durability(rows)

    async def damaged(blob_ids: list[BlobId]) -> list[BlobId]:
        if blob_ids == [blob_id] and not steps:
            steps.append("put")
            await store_anew(node, "c0")
            raise FrameCorruptError("damaged", blob_id=blob_id)
        return await missing(blob_ids)

    if fault == "given up":
        monkeypatch.setattr(node.nvme, "missing", damaged)
    else:
        monkeypatch.setattr(node.catalog, "raise_durability", raise_later)
    assert await flush(node, timeout_seconds=30)
    assert steps
    while await node.reaper.reap_batch():
        pass
    assert await node.read_tier.missing([blob_id]) == []
    await let_go(node, session)
    assert await node.read_tier.missing([blob_id]) == [blob_id]
    assert (await Driver(store=node.store).get("/chunks/c0")).body == content(0)


async def test_what_write_behind_finds_deleted_is_reaped_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_chain(node, 1)
    raise_durability = node.catalog.raise_durability

    async def raise_later(rows: list[ObjectRow]) -> list[bool]:
        await Driver(store=node.store).request("DELETE", "/chunks/c0")
        while await node.reaper.reap_batch():
            pass
        return await raise_durability(rows)

    monkeypatch.setattr(node.catalog, "raise_durability", raise_later)
    assert await flush(node, timeout_seconds=30)
    while await node.reaper.reap_batch():
        pass
    assert [(await tier.usage()).blobs for tier in (node.dram, node.nvme)] == [0, 0]
    assert node.dram.dirty_bytes == 0
