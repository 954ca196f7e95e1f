"""Bodies on their way up that stand still: given up and begun anew long before the request's own time is over, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from odd_server import Asked, Line, noise, odd_world
from remote_servers import RemoteStore
from s3_proxy import NOTHING, FaultProxy, Plan
from toxics import Operation, Toxic

from kvobj.clock import SystemClock
from kvobj.errors import TierUnavailableError
from kvobj.metrics import Metrics
from kvobj.tiers.remote.bucket import RemoteBucket

MIB = 2**20
REQUEST_SECONDS = 20.0
STALLED = Plan((Toxic.STALL_BODY,), rate=1.0, operations=frozenset({Operation.PUT}), stall_seconds=600.0)
# More than the buffers of two kernels take of it while nobody reads.
BODY = bytes(range(256)) * (24 * MIB // 256)


@asynccontextmanager
async def stalling(
    store: RemoteStore, metrics: Metrics, operation_seconds: float = 60.0
) -> AsyncIterator[tuple[RemoteBucket, FaultProxy]]:
    """A bucket behind a proxy that stalls uploads in the middle of their bodies, once it is told to."""
    async with FaultProxy(store.host, store.port) as proxy:
        settings = replace(
            store.behind(proxy.port).settings(),
            part_bytes=32 * MIB,
            request_timeout_seconds=REQUEST_SECONDS,
            stall_timeout_seconds=0.05,
            operation_timeout_seconds=operation_seconds,
        )
        bucket = await RemoteBucket.open(
            settings, clock=SystemClock(), metrics=metrics, run=asyncio.to_thread, log=logging.getLogger("test")
        )
        try:
            await bucket.probe()
            yield bucket, proxy
        finally:
            proxy.plan = NOTHING
            await bucket.aclose()


async def test_an_upload_that_stalls_is_begun_anew_before_its_time_is_over(kvobj_remote: RemoteStore) -> None:
    metrics, loop = Metrics(), asyncio.get_running_loop()
    async with stalling(kvobj_remote, metrics) as (bucket, proxy):
        proxy.plan = STALLED
        began = loop.time()
        putting = asyncio.create_task(bucket.put(f"{kvobj_remote.prefix}a", memoryview(BODY)))
        while not proxy.injections:
            assert loop.time() - began < REQUEST_SECONDS
            await asyncio.sleep(0.01)
        proxy.plan = NOTHING
        await putting
        assert loop.time() - began < REQUEST_SECONDS / 2
        assert [each.toxic for each in proxy.injections] == [Toxic.STALL_BODY]
        read = metrics.registry.get_sample_value
        assert read("kvobj_remote_requests_total", {"operation": "PutObject", "outcome": "timeout"}) == 1.0
    assert kvobj_remote.read(f"{kvobj_remote.prefix}a") == BODY


async def test_uploads_that_stall_again_and_again_fail_within_the_operations_time(kvobj_remote: RemoteStore) -> None:
    metrics, loop = Metrics(), asyncio.get_running_loop()
    async with stalling(kvobj_remote, metrics, operation_seconds=1.5) as (bucket, proxy):
        proxy.plan = STALLED
        began = loop.time()
        with pytest.raises(TierUnavailableError):
            await bucket.put(f"{kvobj_remote.prefix}b", memoryview(BODY))
        assert loop.time() - began < REQUEST_SECONDS / 2
        assert len(proxy.injections) > 1


async def test_a_server_that_has_the_body_may_think_about_it() -> None:
    async with odd_world(stall_timeout_seconds=0.01, request_timeout_seconds=REQUEST_SECONDS) as world:
        thought = asyncio.Event()

        async def think(asked: Asked, line: Line) -> None:
            asyncio.get_running_loop().call_later(0.3, thought.set)
            await thought.wait()
            await line.send(line.server.answer(asked).whole())

        world.server.always = think
        await world.bucket.put("t/a", memoryview(noise(40_000)))
        assert thought.is_set()
        assert world.count("requests_total", operation="PutObject", outcome="timeout") == 0
        assert world.server.objects["t/a"] == noise(40_000)
