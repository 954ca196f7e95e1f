"""While descriptors are short connections are accepted by hand, before and after by the event loop; clients see no difference."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from http_peers import Served, serving, until

from kvobj.api.message import Reply, RequestBody, RequestHead
from kvobj.wire.plain_listener import SPARE_DESCRIPTORS, PlainListener

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
OF_THE_TEST = 32


async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
    return Reply(200, (), b"served")


@contextmanager
def short_of_descriptors() -> Iterator[None]:
    """Within the block this process has fewer left than are plenty, and enough for the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    assert OF_THE_TEST < SPARE_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + OF_THE_TEST, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def listener_of(served: Served) -> PlainListener:
    (listener,) = served.server._plain_listeners
    return listener


async def served_once(served: Served) -> None:
    peer = await served.connect()
    await peer.send(GET)
    assert (await peer.answer()).body == b"served"


@pytest.mark.parametrize("noticed", ["by a look", "by a connection"])
async def test_who_connects_is_served_whoever_accepts(noticed: str) -> None:
    async with serving(handle) as served:
        listener = listener_of(served)
        await served_once(served)
        assert listener._server is not None
        with short_of_descriptors():
            if noticed == "by a look":
                served.server.sweep()
            else:
                await served_once(served)
            assert listener._server is None
            for _ in range(3):
                await served_once(served)
        served.server.sweep()
        await until(lambda: listener._server is not None)
        await served_once(served)
        await until(lambda: served.metrics.value("kvobj_s3_connections") == len(served.peers))


async def test_who_is_stopped_as_descriptors_are_plenty_again_stays_so() -> None:
    faults: list[dict[str, object]] = []
    async with serving(handle) as served:
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        listener = listener_of(served)
        with short_of_descriptors():
            served.server.sweep()
        served.server.sweep()
        turning = listener._turning
        assert turning is not None
        assert await served.server.drain(20)
        await asyncio.wait([turning], timeout=20)
        assert turning.exception() is None
        assert listener._server is None
        assert not listener._by_hand._is_open
    assert not faults


async def test_a_drain_ends_connections_that_were_accepted_by_hand_too() -> None:
    async with serving(handle) as served:
        with short_of_descriptors():
            served.server.sweep()
            await served_once(served)
            (peer,) = served.peers
            assert await served.server.drain(20)
            assert await peer.rest() == b""
