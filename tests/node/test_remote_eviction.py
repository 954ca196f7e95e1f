"""Data that is more than nvme holds, with a remote below it: what leaves, what stays, and what becomes of deletes and scrubs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from real_store import MIB, running_node
from remote_servers import RemoteStore
from remote_world import RemoteWorld, content, remote_settings, remote_world, until
from s3_proxy import FaultProxy, Operation, proxy_thread

from kvobj.app import offline
from kvobj.catalog.chunk_list import KeyList
from kvobj.catalog.rows import Durability
from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule
from kvobj.clock import SystemClock, boot_ms
from kvobj.config.settings import Settings
from kvobj.gc.scrub import Scrub
from kvobj.ids import BlobId, epoch_of, make_blob_id, sequence_of

NVME_MIB = 64


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path, kvobj_remote: RemoteStore, proxy: FaultProxy) -> Settings:
    return remote_settings(tmp_path / "data", shm_path, kvobj_remote.behind(proxy.port), dram_mib=64, nvme_mib=NVME_MIB)


@pytest.fixture
async def world(settings: Settings, proxy: FaultProxy, kvobj_remote: RemoteStore) -> AsyncIterator[RemoteWorld]:
    async with remote_world(settings, proxy, kvobj_remote) as running:
        yield running


async def used_share(world: RemoteWorld) -> float:
    usage = await world.node.nvme.usage()
    return usage.used_bytes / usage.capacity_bytes


async def test_shared_objects_beyond_what_nvme_holds_are_taken_without_a_507_and_all_readable(
    world: RemoteWorld,
) -> None:
    bodies = {f"o{number}": content(number, 4 * MIB) for number in range(32)}  # twice of nvme

    async def put_some(names: list[str]) -> None:
        for name in names:
            await world.put(f"/objects/{name}", bodies[name])

    names = list(bodies)
    await asyncio.gather(*(put_some(names[start::4]) for start in range(4)))
    assert world.node.collector.evictions.objects > 0
    for name, body in bodies.items():
        answer = await world.driver.get(f"/objects/{name}")
        assert (answer.status, answer.body) == (200, body), name
    figures = world.node.upkeep.parts.figures()
    assert figures["evicted_to_remote_bytes"] >= 50 * MIB
    assert figures["claimed_chunks"] == 0


async def test_chunks_of_a_bucket_with_the_rule_are_uploaded_for_their_room_and_stay_matched(
    world: RemoteWorld,
) -> None:
    await world.node.catalog.update_bucket("chunks", BucketUpdate(remote=RemoteRule.EVICTED))
    for number in range(40):  # 80 MiB
        parent = f"c{number - 1}" if number else "root"
        put = await world.driver.put(
            f"/chunks/c{number}", content(number, 2 * MIB), x_kvobj_parent=parent, x_kvobj_durability="local"
        )
        assert put.status == 200, put.body
    evictions = world.node.collector.evictions
    assert evictions.uploaded > 0
    assert evictions.objects > 0
    chain = KeyList([f"c{number}" for number in range(40)])
    found = await world.node.catalog.leases.match("chunks", chain, now_boot_ms=boot_ms(SystemClock()))
    assert found.matched == 40
    for number in range(40):
        assert (await world.driver.get(f"/chunks/c{number}")).body == content(number, 2 * MIB)


async def test_without_a_rule_local_chunks_are_condemned_as_ever_and_shared_ones_are_not(world: RemoteWorld) -> None:
    for number in range(6):
        await world.put(f"/chunks/s{number}", content(number, 2 * MIB))
    for number in range(40):
        put = await world.driver.put(f"/chunks/l{number}", content(100 + number, 2 * MIB), x_kvobj_durability="local")
        assert put.status == 200, put.body
    live = {row.key for row in (await world.node.catalog.list_objects("chunks")).rows}
    assert {f"s{number}" for number in range(6)} <= live
    assert len(live) < 46
    assert (await world.driver.get("/chunks/s0")).body == content(0, 2 * MIB)


async def test_pins_hold_over_chunks_that_lie_on_the_remote(world: RemoteWorld) -> None:
    for number in range(3):
        parent = f"c{number - 1}" if number else "root"
        await world.put(f"/chunks/c{number}", content(number), x_kvobj_parent=parent)
        await world.evict("chunks", f"c{number}")
    leases = world.node.catalog.leases
    now_ms = boot_ms(SystemClock())
    session = await leases.open_session(user="alice", bucket="chunks", holder="t", ttl_ms=60_000, now_boot_ms=now_ms)
    pinned = await leases.pin_tails(session.id, ["c2"], user="alice", bucket="chunks", now_boot_ms=now_ms)
    pin = pinned.pins[0].pin
    assert pin is not None
    assert (await world.driver.request("DELETE", "/chunks/c0")).status == 204
    read = await world.driver.get("/chunks/c2", x_kvobj_pin=pin.hex())
    assert read.body == content(2)
    assert (await world.driver.get("/chunks/c2")).status == 404


async def test_while_the_remote_is_away_a_store_full_of_shared_objects_takes_local_ones(world: RemoteWorld) -> None:
    for number in range(14):
        await world.put(f"/objects/s{number}", content(number, 4 * MIB))
    world.go_away()
    for number in range(6):
        put = await world.driver.put(f"/objects/l{number}", content(50 + number, 4 * MIB), x_kvobj_durability="local")
        assert put.status == 200, put.body
    assert world.node.collector.evictions.objects > 0
    refused = await world.driver.put("/objects/x", content(99), x_kvobj_durability="shared")
    assert refused.status == 503
    for number in range(6):
        assert (await world.driver.get(f"/objects/l{number}")).body == content(50 + number, 4 * MIB)
    world.come_back()
    await until(lambda: reads(world, "/objects/s0", content(0, 4 * MIB)), "an evicted object did not come back")


async def test_deletes_go_on_while_the_remote_is_away_and_reach_it_when_it_is_back(world: RemoteWorld) -> None:
    for number in range(4):
        await world.put(f"/objects/s{number}", content(number))
        await world.driver.put(f"/objects/l{number}", content(number), x_kvobj_durability="local")
    blobs = [await world.blob("objects", f"{kind}{number}") for kind in "sl" for number in range(4)]
    world.go_away()
    for kind in "sl":
        for number in range(4):
            assert (await world.driver.request("DELETE", f"/objects/{kind}{number}")).status == 204
    await until(lambda: gone_here(world, blobs), "copies on this node stayed")
    await until(lambda: entries(world, 4), "blobs that are not on the remote were not reaped")
    assert len([key for key in world.remote.keys("store/") if "/blobs/" in key]) == 4
    world.come_back()
    await until(lambda: entries(world, 0), "the remote's blobs were not deleted")
    assert not [key for key in world.remote.keys("store/") if "/blobs/" in key]


async def test_a_restart_finds_what_left_nvme_and_holds_none_of_it_dirty(
    settings: Settings, proxy: FaultProxy, kvobj_remote: RemoteStore
) -> None:
    async with remote_world(settings, proxy, kvobj_remote) as world:
        await world.driver.put("/chunks/c", content(1), x_kvobj_durability="memory")
        await world.node.sealing.drain()
        await world.node.write_behind.flush(timeout_seconds=10)
        await world.put("/chunks/c", content(1))
        await world.evict("chunks", "c", from_memory=False)
    async with running_node(settings) as node:
        assert node.dram.dirty_bytes == 0
        assert (node.recovery.dropped_rows, node.recovery.dropped_orphans) == (0, 0)
        report = await node.upkeep.sweep.sweep()
        assert (report.leftover_blobs, report.lost_rows) == (0, 0)
        (row,) = await node.catalog.lookup("chunks", ["c"])
        assert row is not None
        assert row.durability is Durability.SHARED


async def test_a_scrub_asks_the_remote_for_nothing_where_all_is_well(world: RemoteWorld) -> None:
    await world.put("/objects/here", content(1))
    await world.put("/objects/there", content(2))
    await world.evict("objects", "there")
    gets = world.asked(Operation.GET, Operation.LIST, Operation.HEAD)
    scrub = world.node.upkeep.scrub
    assert isinstance(scrub, Scrub)
    await scrub.run_pass()
    assert scrub.counts.objects == 2
    assert (scrub.counts.mismatches, scrub.counts.lost) == (0, 0)
    assert world.asked(Operation.GET, Operation.LIST, Operation.HEAD) == gets


async def test_a_scrub_replaces_a_bad_copy_here_from_the_remote(world: RemoteWorld) -> None:
    await world.put("/objects/o", content(1, 2 * MIB))
    blob_id = await world.blob("objects", "o")
    await world.node.dram.delete([blob_id])
    spoil(world, content(1, 2 * MIB)[:4096])
    check = await world.node.upkeep.copies.check(await world.row("objects", "o"))
    assert (check.mismatches, check.repaired, check.problem) == (1, 1, None)
    assert (await world.node.upkeep.copies.check(await world.row("objects", "o"))).mismatches == 0


async def test_a_scrub_replaces_a_bad_copy_on_the_remote_from_a_good_one_here(world: RemoteWorld) -> None:
    await world.put("/objects/o", content(1))
    blob_id = await world.blob("objects", "o")
    (key,) = [key for key in world.remote.keys("store/") if blob_id.hex() in key]
    stored = world.remote.read(key)
    assert stored is not None
    world.remote.write(key, bytes([stored[0] ^ 1]) + stored[1:])
    assert await world.node.checked_tiers[-1].get(blob_id) is None  # a reader finds it bad
    check = await world.node.upkeep.copies.check(await world.row("objects", "o"))
    assert (check.replaced, check.problem) == (1, None)
    assert world.remote.read(key) == stored


async def test_what_a_start_finds_on_the_remote_that_nothing_names_is_removed(
    settings: Settings, proxy: FaultProxy, kvobj_remote: RemoteStore
) -> None:
    async with remote_world(settings, proxy, kvobj_remote) as world:
        await world.put("/objects/kept", content(1))
        kept = await world.blob("objects", "kept")
        orphan = make_blob_id(epoch_of(kept), sequence_of(kept) + 1000)
        (key,) = [key for key in kvobj_remote.keys("store/") if kept.hex() in key]
        kvobj_remote.write(key.replace(kept.hex(), orphan.hex()), b"left behind")
    async with remote_world(settings, proxy, kvobj_remote) as world:
        await world.node.upkeep.sweep.sweep()
        held = [key for key in kvobj_remote.keys("store/") if "/blobs/" in key]
        assert held == [key]
        assert (await world.driver.get("/objects/kept")).body == content(1)


async def test_fsck_and_rebuild_of_the_local_store_take_what_left_it_for_no_loss(
    settings: Settings, proxy: FaultProxy, kvobj_remote: RemoteStore
) -> None:
    async with remote_world(settings, proxy, kvobj_remote) as world:
        await world.put("/objects/here", content(1))
        await world.put("/objects/there", content(2))
        await world.evict("objects", "there")
    found = await asyncio.to_thread(offline.fsck, settings, lambda *_: None)
    assert (found.problems, found.remote_blobs, found.objects) == (0, 1, 2)
    rebuilt = await asyncio.to_thread(offline.rebuild, settings, lambda *_: None)
    assert (rebuilt.problems, rebuilt.remote_blobs) == (0, 1)
    async with remote_world(settings, proxy, kvobj_remote) as world:
        for key, seed in (("here", 1), ("there", 2)):
            assert (await world.driver.get(f"/objects/{key}")).body == content(seed)


async def reads(world: RemoteWorld, target: str, body: bytes) -> bool:
    answer = await world.driver.get(target)
    return answer.status == 200 and answer.body == body


async def gone_here(world: RemoteWorld, blobs: list[BlobId]) -> bool:
    return await world.node.nvme.missing(blobs) == blobs and await world.node.dram.missing(blobs) == blobs


async def entries(world: RemoteWorld, count: int) -> bool:
    world.node.reaper.kick()
    return len(await world.node.catalog.due(now_ms=1 << 62)) == count


def spoil(world: RemoteWorld, beginning: bytes) -> None:
    """Turn one byte of a blob in its segment file."""
    for path in world.node.nvme_directory.iterdir():
        data = path.read_bytes()
        at = data.find(beginning)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 10)
                file.write(bytes([data[at + 10] ^ 1]))
            return
    raise AssertionError("the blob is in no segment")
