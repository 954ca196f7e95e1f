"""Two real processes, one the other's remote: more data than nvme holds, and each of them killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_servers import RemoteStore, make_bucket
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

SIZE = 3 * MIB
OBJECTS = 44  # 132 MiB in front of 64 in memory and 64 on disk, which may hold different ones


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "remote", ServerSettings(dram_bytes=64 * MIB, nvme_bytes=512 * MIB, workers=1)) as it:
        yield it


@pytest.fixture
def node(tmp_path: Path, remote: ServerProcess) -> Iterator[ServerProcess]:
    """With worker processes, which ask the store process for what is not in memory."""
    store = RemoteStore("kvobj", remote.host, remote.port, remote.credentials(), "tier")
    make_bucket(store)
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=64 * MIB,
        nvme_segment_bytes=64 * MIB,
        buckets=(BucketSetting("objects"),),
        remote=store.tier(operation_timeout='"6 s"', request_timeout='"3 s"', manifest_interval='"100 ms"'),
        workers=2,
    )
    with ServerProcess(tmp_path / "node", settings) as it:
        yield it


def test_more_than_nvme_holds_outlives_both_processes(node: ServerProcess, remote: ServerProcess) -> None:
    with node.raw() as raw:
        for number in range(OBJECTS):
            body = content(number)
            put = raw.request("PUT", f"/objects/{number}", body, headers={"x-kvobj-durability": "shared"}, payload=body)
            assert (put.status, put.headers["x-kvobj-durability"]) == (200, "shared"), put.body
        served = {}
        for number in range(OBJECTS):
            got = raw.request("GET", f"/objects/{number}", payload=None)
            assert (got.status, got.body) == (200, content(number))
            served[got.headers["x-kvobj-tier"]] = number
        assert "remote" in served
        remote.kill()
        statuses = [raw.request("GET", f"/objects/{number}", payload=None).status for number in range(OBJECTS)]
        assert set(statuses) == {200, 503}
        remote.start()
        away = statuses.index(503)
        wait_until(
            lambda: raw.request("GET", f"/objects/{away}", payload=None).status == 200,
            timeout_seconds=30,
            what="the remote's objects came back",
        )
    node.kill()
    node.start()
    with node.raw() as raw:
        for number in range(OBJECTS):
            assert raw.request("GET", f"/objects/{number}", payload=None).body == content(number)
