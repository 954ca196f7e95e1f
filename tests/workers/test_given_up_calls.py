"""Calls that a worker gives up in the very moment in which they are answered: nothing of them stays in the store process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import AsyncGeneratorType
from typing import cast

import pytest
from following_world import OpenBody, turns, turns_until
from kv_driver import KvDriver, kv_node
from worker_pair import WorkerPair, worker_pair

from kvobj.workers.calls import StoreCalls
from kvobj.workers.chunks import _RemoteGate
from kvobj.workers.following import RemoteFollowing


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as node:
        yield node


@pytest.fixture
async def pair(kv: KvDriver) -> AsyncIterator[WorkerPair]:
    async with worker_pair(kv) as both:
        yield both


def gate_of(pair: WorkerPair, entry: int) -> _RemoteGate:
    """One batch's way in."""
    return _RemoteGate(pair.channel, pair.channel.proxy(StoreCalls), entry)


async def all_may_enter(pair: WorkerPair) -> None:
    """Whoever comes now finds the gate empty."""
    last, size_bytes = gate_of(pair, 100), pair.kv.node.kv.gate.limit_bytes
    await last.enter(size_bytes)
    last.leave(size_bytes)
    await turns_until(lambda: not pair.desk._gates)


async def test_who_is_let_into_the_gate_and_gives_up_in_one_turn_keeps_nobody_out(pair: WorkerPair) -> None:
    size_bytes = pair.kv.node.kv.gate.limit_bytes
    inside, waiting = gate_of(pair, 1), gate_of(pair, 2)
    await inside.enter(size_bytes)
    entering = asyncio.create_task(waiting.enter(size_bytes))
    await turns_until(lambda: pair.kv.node.kv.gate._waiting)
    entering.cancel()  # with the other's way out, as when the client of both goes
    inside.leave(size_bytes)
    await asyncio.wait([entering])
    await all_may_enter(pair)


async def test_who_gives_up_at_any_point_of_the_way_into_the_gate_keeps_nobody_out(pair: WorkerPair) -> None:
    size_bytes = pair.kv.node.kv.gate.limit_bytes
    for passed in range(12):
        entering = asyncio.create_task(gate_of(pair, passed).enter(size_bytes))
        await turns(passed)
        if entering.done():
            gate_of(pair, passed).leave(size_bytes)
        entering.cancel()
        await asyncio.wait([entering])
        await all_may_enter(pair)


async def test_a_follower_that_goes_while_it_waits_for_bytes_is_ended_without_an_error(
    pair: WorkerPair, caplog: pytest.LogCaptureFixture
) -> None:
    body = OpenBody(2_000_000)
    request = pair.driver.request("PUT", "/cache/k", body=body, payload="UNSIGNED-PAYLOAD")
    putting = asyncio.create_task(request)
    body.send(bytes(1_000_000))
    following, received = RemoteFollowing(pair.channel, pair.channel.proxy(StoreCalls)), bytearray()
    bucket = await pair.kv.node.catalog.bucket("cache")
    assert bucket is not None
    await turns_until(lambda: len(pair.kv.node.store.arriving.of("cache", "k")))
    found = await following.find(bucket, "k")
    assert found is not None

    async def read() -> None:
        async with aclosing(found.views(None)) as views:
            async for view in views:
                received.extend(view)

    reading = asyncio.create_task(read())
    await turns_until(lambda: len(received) == 1_000_000)
    (stream,) = pair.desk._followed._streams.values()
    views = cast("AsyncGeneratorType[memoryview, None]", stream.views)
    await turns_until(lambda: views.ag_running)
    reading.cancel()
    await asyncio.wait([reading])
    await turns_until(lambda: not pair.desk._followed._streams)
    body.vanish()
    await asyncio.wait([putting])
    await turns_until(lambda: not len(pair.desk))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
