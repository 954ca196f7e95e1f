"""A bucket whose rule makes room by uploading, while there is nobody to upload to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from real_store import MIB
from remote_servers import RemoteStore
from remote_world import RemoteWorld, content, remote_settings, remote_world, until
from s3_proxy import FaultProxy, proxy_thread

from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule

NVME_MIB = 64


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


@pytest.fixture
async def world(
    tmp_path: Path, shm_path: Path, kvobj_remote: RemoteStore, proxy: FaultProxy
) -> AsyncIterator[RemoteWorld]:
    remote = kvobj_remote.behind(proxy.port)
    settings = remote_settings(tmp_path / "data", shm_path, remote, dram_mib=64, nvme_mib=NVME_MIB)
    async with remote_world(settings, proxy, kvobj_remote) as running:
        yield running


@pytest.mark.parametrize("bucket", ["objects", "chunks"])
async def test_what_makes_room_by_going_up_has_none_while_the_remote_is_away(world: RemoteWorld, bucket: str) -> None:
    await world.node.catalog.update_bucket(bucket, BucketUpdate(remote=RemoteRule.EVICTED))

    async def put(number: int) -> int:
        answer = await world.driver.put(f"/{bucket}/{number}", content(number, 2 * MIB), x_kvobj_durability="local")
        return answer.status

    world.go_away()
    kept = 0
    while (status := await put(kept)) == 200:
        kept += 1
    assert status == 507
    assert NVME_MIB // 4 <= kept <= NVME_MIB // 2
    for number in range(kept):
        assert (await world.driver.get(f"/{bucket}/{number}")).body == content(number, 2 * MIB)
    world.come_back()

    async def is_taken() -> bool:
        return await put(NVME_MIB) == 200

    await until(is_taken, "there was no room though the remote is back")
    for number in range(kept):
        assert (await world.driver.get(f"/{bucket}/{number}")).body == content(number, 2 * MIB)
