"""Reads of a node with a remote tier: dram and nvme are caches in front of it, and what is not there is read from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from real_store import MIB
from remote_servers import RemoteStore
from remote_world import RemoteWorld, content, remote_settings, remote_world, until
from s3_proxy import FaultProxy, Operation, Plan, Toxic, proxy_thread

from kvobj.config.settings import Settings
from kvobj.errors import TierUnavailableError


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path, kvobj_remote: RemoteStore, proxy: FaultProxy) -> Settings:
    return remote_settings(tmp_path / "data", shm_path, kvobj_remote.behind(proxy.port))


@pytest.fixture
async def world(settings: Settings, proxy: FaultProxy, kvobj_remote: RemoteStore) -> AsyncIterator[RemoteWorld]:
    async with remote_world(settings, proxy, kvobj_remote) as running:
        yield running


async def test_a_cold_read_comes_from_the_remote_and_a_warm_one_asks_it_nothing(world: RemoteWorld) -> None:
    await world.put("/objects/o", content(1, 3 * MIB))
    await world.evict("objects", "o")
    cold = await world.driver.get("/objects/o")
    assert (cold.status, cold.headers["x-kvobj-tier"]) == (200, "remote")
    assert cold.body == content(1, 3 * MIB)
    await world.node.read_tier.promotions_done()
    gets = world.asked(Operation.GET, Operation.LIST, Operation.HEAD)
    warm = await world.driver.get("/objects/o")
    assert (warm.body, warm.headers["x-kvobj-tier"]) == (cold.body, "dram")
    assert world.asked(Operation.GET, Operation.LIST, Operation.HEAD) == gets


async def test_what_is_read_from_the_remote_rises_into_nvme_too_under_its_own_names(world: RemoteWorld) -> None:
    await world.put("/objects/o", content(1, 3 * MIB))
    blob_id = await world.evict("objects", "o")
    await world.driver.get("/objects/o")
    await until(lambda: world.is_in_nvme("objects", "o"), "the blob did not rise")
    await world.node.read_tier.promotions_done()
    await world.node.dram.delete([blob_id])
    again = await world.driver.get("/objects/o")
    assert (again.body, again.headers["x-kvobj-tier"]) == (content(1, 3 * MIB), "nvme")


async def test_chunks_rise_into_nvme_as_policy_says(world: RemoteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("a", "b"):
        await world.put(f"/chunks/{key}", content(1))
        await world.evict("chunks", key)
    assert (await world.driver.get("/chunks/a")).body == content(1)
    await until(lambda: world.is_in_nvme("chunks", "a"), "the chunk did not rise")
    monkeypatch.setattr(world.node.policy, "admits", lambda *_, **__: False)
    assert (await world.driver.get("/chunks/b")).body == content(1)
    await world.node.read_tier.promotions_done()
    assert not await world.is_in_nvme("chunks", "b")


async def test_the_first_bytes_flow_before_the_last_part_has_arrived(
    tmp_path: Path, shm_path: Path, kvobj_remote: RemoteStore, proxy: FaultProxy
) -> None:
    settings = remote_settings(
        tmp_path / "data", shm_path, kvobj_remote.behind(proxy.port), dram_mib=128, part_bytes=5 * MIB
    )
    async with remote_world(settings, proxy, kvobj_remote) as world:
        body = content(1, 24 * MIB)
        await world.put("/objects/large", body)
        await world.evict("objects", "large")
        row = await world.row("objects", "large")
        # Every body stops half-way for a while: the first part's first half is there long before the last part is.
        proxy.plan = Plan((Toxic.STALL_BODY,), rate=1.0, operations=frozenset({Operation.GET}), stall_seconds=0.6)
        reader = await world.node.store.open(row, 0, len(body))
        assert reader is not None
        views = reader.views()
        first = bytes(await anext(views))
        frame = reader._current
        assert frame is not None
        assert frame.progress is not None
        assert not frame.progress.done
        proxy.plan = Plan()
        received = first + b"".join([bytes(view) async for view in views])
        assert received == body
        await reader.aclose()


async def test_a_cold_range_of_a_large_object_reads_its_part_alone(world: RemoteWorld) -> None:
    body = content(2, 16 * MIB)
    await world.put("/objects/large", body)
    await world.evict("objects", "large")
    gets = world.asked(Operation.GET)
    part = await world.driver.get("/objects/large", range="bytes=9000000-9000999")
    assert (part.status, part.body) == (206, body[9_000_000:9_001_000])
    assert world.asked(Operation.GET) == gets + 2  # the frame's head, and the block
    await world.node.read_tier.promotions_done()
    assert not await world.is_in_nvme("objects", "large")
    assert await world.node.dram.missing([await world.blob("objects", "large")])


async def test_readers_of_one_cold_object_share_one_read(world: RemoteWorld) -> None:
    await world.put("/objects/o", content(1, 4 * MIB))
    await world.evict("objects", "o")
    gets = world.asked(Operation.GET)
    answers = await asyncio.gather(*(world.driver.get("/objects/o") for _ in range(8)))
    assert {answer.body for answer in answers} == {content(1, 4 * MIB)}
    assert world.asked(Operation.GET) == gets + 1


async def test_while_the_remote_is_away_what_is_here_is_read_and_an_object_that_is_not_is_a_503(
    world: RemoteWorld,
) -> None:
    await world.put("/objects/here", content(1))
    await world.put("/objects/there", content(2))
    await world.evict("objects", "there")
    world.go_away()
    assert (await world.driver.get("/objects/here")).body == content(1)
    away = await world.driver.get("/objects/there")
    assert (away.status, away.code) == (503, "ServiceUnavailable")
    assert (await world.driver.request("HEAD", "/objects/there")).status == 200  # it exists
    part = await world.driver.get("/objects/there", range="bytes=0-9")
    assert part.status == 503
    world.come_back()
    await until(lambda: is_served(world, "/objects/there", content(2)), "the object did not come back")


async def test_while_the_remote_is_away_a_chunk_that_is_there_is_a_miss_and_stays(world: RemoteWorld) -> None:
    await world.put("/chunks/c", content(1))
    await world.evict("chunks", "c")
    world.go_away()
    assert (await world.driver.get("/chunks/c")).status == 404
    await world.row("chunks", "c")
    world.come_back()
    await until(lambda: is_served(world, "/chunks/c", content(1)), "the chunk did not come back")


async def test_a_chunk_whose_object_is_gone_from_the_remote_is_dropped_and_can_be_stored_again(
    world: RemoteWorld,
) -> None:
    await world.put("/chunks/c", content(1))
    blob_id = await world.evict("chunks", "c")
    world.remote.remove([key for key in world.remote.keys("store/") if blob_id.hex() in key])
    assert (await world.driver.get("/chunks/c")).status == 404
    (row,) = await world.node.catalog.lookup("chunks", ["c"])
    assert row is None
    await world.put("/chunks/c", content(1))
    assert (await world.driver.get("/chunks/c")).body == content(1)


async def test_bytes_that_were_wrong_on_their_way_are_read_again_and_never_served(world: RemoteWorld) -> None:
    await world.put("/objects/o", content(1, 200_000))
    blob_id = await world.evict("objects", "o")
    gets = world.asked(Operation.GET)
    world.proxy.plan = Plan((Toxic.WRONG_BYTE_DOWN,), rate=1.0, operations=frozenset({Operation.GET}))
    answer = await world.driver.get("/objects/o")
    assert answer.status == 503
    assert world.asked(Operation.GET) >= gets + 2
    assert await world.node.nvme.missing([blob_id])
    assert await world.node.dram.missing([blob_id])
    world.come_back()
    assert (await world.driver.get("/objects/o")).body == content(1, 200_000)


async def test_a_chunk_with_wrong_bytes_on_the_remote_is_a_miss_and_its_row_stays(world: RemoteWorld) -> None:
    await world.put("/chunks/c", content(1))
    blob_id = await world.evict("chunks", "c")
    (key,) = [key for key in world.remote.keys("store/") if blob_id.hex() in key]
    stored = world.remote.read(key)
    assert stored is not None
    world.remote.write(key, bytes([stored[0] ^ 1]) + stored[1:])
    assert (await world.driver.get("/chunks/c")).status == 404
    await world.row("chunks", "c")
    world.remote.write(key, stored)
    assert (await world.driver.get("/chunks/c")).body == content(1)


async def test_a_corrupt_copy_in_nvme_is_read_from_the_remote_and_replaced(world: RemoteWorld) -> None:
    await world.put("/objects/o", content(1, 2 * MIB))
    blob_id = await world.blob("objects", "o")
    await world.node.dram.delete([blob_id])
    spoil(world, blob_id_frame=content(1, 2 * MIB)[:4096])
    assert (await world.driver.get("/objects/o")).body == content(1, 2 * MIB)
    await world.node.read_tier.promotions_done()
    await until(lambda: is_served(world, "/objects/o", content(1, 2 * MIB)), "it is not served")
    assert blob_id not in world.node.corrupt


async def test_a_corrupt_copy_in_nvme_that_cannot_be_dropped_is_told_once_however_often_it_is_read(
    world: RemoteWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: object) -> None:
        raise TierUnavailableError("the disk takes no deletes")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "corrupt" in record.getMessage()]

    body = content(1, 2 * MIB)
    await world.put("/objects/o", body)
    blob_id = await world.blob("objects", "o")
    spoil(world, blob_id_frame=body[:4096])
    with monkeypatch.context() as refusing:
        refusing.setattr(world.node.nvme, "delete", refuse)
        for _ in range(3):
            await world.node.dram.delete([blob_id])
            assert (await world.driver.get("/objects/o")).body == body
            await world.node.read_tier.promotions_done()
            await until(lambda: asyncio.sleep(0, len(told()) >= 2), "the failure is not told")
    name = blob_id.hex()
    assert told() == [
        f"a frame in nvme is corrupt blob_id={name}",
        f"a corrupt copy stays for now blob_id={name}: the disk takes no deletes",
    ]


async def is_served(world: RemoteWorld, target: str, body: bytes) -> bool:
    answer = await world.driver.get(target)
    return answer.status == 200 and answer.body == body


def spoil(world: RemoteWorld, *, blob_id_frame: bytes) -> None:
    """Turn one byte of a blob in its segment file."""
    for path in world.node.nvme_directory.iterdir():
        data = path.read_bytes()
        at = data.find(blob_id_frame)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 10)
                file.write(bytes([data[at + 10] ^ 1]))
            return
    raise AssertionError("the blob is in no segment")
