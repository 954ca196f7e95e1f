"""A remote that takes requests and never answers: a node starts, serves what is here, and ends in its time all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from remote_servers import RemoteStore
from s3_proxy import NOTHING, FaultProxy, Plan, proxy_thread
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until
from toxics import Toxic

BODY = bytes(range(256)) * 3000
SILENT = Plan((Toxic.STALL_HEAD,), rate=1.0, seed=1, stall_seconds=600.0)
DRAIN_SECONDS = 12.0
"""The drain's: who waits for the remote has a quarter of it."""


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


def put(server: ServerProcess, key: str, durability: str, *, timeout_seconds: float = 60.0) -> int:
    with server.raw(timeout_seconds=timeout_seconds) as raw:
        return raw.request("PUT", f"/plain/{key}", BODY, headers={"x-kvobj-durability": durability}).status


def get(server: ServerProcess, key: str) -> bytes:
    with server.raw() as raw:
        return raw.request("GET", f"/plain/{key}", payload=None).body


def test_a_node_starts_and_ends_beside_a_remote_that_never_answers(
    kvobj_remote: RemoteStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=64 * MIB,
        buckets=(BucketSetting("plain", "ordinary", "local", remote="always"),),
        remote=kvobj_remote.behind(proxy.port).tier(),
        sections={
            "log": {"requests": "false"},
            "limits": {"drain_timeout": '"12 s"'},
            "gc": {"sweep_interval": '"200 ms"', "reconcile_interval": '"200 ms"'},
        },
        workers=1,
    )
    with ServerProcess(tmp_path / "node", settings) as server:
        assert put(server, "before", "shared") == 200
        proxy.plan = SILENT
        assert put(server, "queued", "local") == 200  # its upload is on its way for ever
        replies: list[int] = []

        def wait() -> None:
            with suppress(OSError, EOFError):
                replies.append(put(server, "waits", "shared"))

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: len(proxy.injections) > 2, timeout_seconds=10, what="requests to be stalled")
        assert get(server, "queued") == BODY
        began = time.monotonic()
        assert server.terminate() == 0
        waiting.join(10)
        assert replies == [503]  # stored, queued, and told so
        assert time.monotonic() - began < DRAIN_SECONDS
        server.start()
        assert get(server, "before") == BODY
        assert get(server, "queued") == BODY
        assert get(server, "waits") == BODY
        assert put(server, "refused", "shared") == 503
        began = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - began < DRAIN_SECONDS
        proxy.plan = NOTHING
        server.start()
        wait_until(
            lambda: server.status()["remote"]["queue"]["queued_objects"] == 0,
            timeout_seconds=30,
            what="what was queued to go up",
        )
