"""Clients that go, at every point of a request and of its reply, and clients that hardly read: nothing hangs, leaks or fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from http_peers import Served, TurnedClock, Views, echo, pattern, receive_all, serving, until

from kvobj.api.http import HttpSettings
from kvobj.api.message import Reply, RequestBody, RequestHead

MIB = 1024 * 1024
REQUESTS = {
    "length": b"PUT /a HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n123456789",
    "chunked": b"PUT /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\nx: y\r\n\r\n",
    "two": b"GET /a HTTP/1.1\r\nHost: h\r\n\r\nPUT /b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab",
    "malformed": b"GET /a HTTP/1.1\r\nHost: h\r\nX : y\r\n\r\nabc",
}


async def is_quiet(served: Served) -> None:
    """Every connection is gone, nothing was logged but requests, and others are served."""
    await until(lambda: not served.server._connections)
    assert [line for line in served.lines if not line.startswith("{")] == []
    assert all('"error":"InternalError"' not in line for line in served.lines)
    other = await served.connect()
    await other.send(b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await other.answer()).status == 200


@pytest.mark.parametrize("way", ["abort", "end", "end and wait"])
@pytest.mark.parametrize("name", list(REQUESTS))
async def test_a_client_may_go_after_any_byte_of_a_request(name: str, way: str) -> None:
    whole = REQUESTS[name]
    async with serving(echo) as served:
        for count in range(len(whole) + 1):
            peer = await served.connect()
            await peer.send(whole[:count])
            if way == "abort":
                peer.vanish()
            elif way == "end":
                await peer.aclose()
            else:
                peer.writer.write_eof()
                await peer.rest()
        await is_quiet(served)


@pytest.mark.parametrize("taken", [0, 1, 100, 70_000, 1_500_000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_client_may_go_after_any_part_of_a_reply(taken: int, framing: str) -> None:
    streams: list[Views] = []

    async def handle(head: RequestHead, _body: RequestBody) -> Reply:
        if head.target == "/next":
            return Reply(200)
        streams.append(Views([pattern(MIB, seed) for seed in range(8)], is_measured=framing == "length"))
        return Reply(200, (), streams[-1])

    async with serving(handle) as served:
        for _ in range(3):
            peer = await served.connect()
            await peer.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
            await peer.reader.readexactly(taken)
            peer.vanish()
        await until(lambda: len(streams) == 3 and all(stream.closed == 1 for stream in streams))
        await is_quiet(served)


async def test_a_client_that_goes_while_its_request_waits_for_a_handler_leaves_the_queue() -> None:
    release = asyncio.Event()

    async def handle(head: RequestHead, _body: RequestBody) -> Reply:
        if head.target != "/next":
            await release.wait()
        return Reply(200)

    async with serving(handle, HttpSettings(sweep_seconds=3600.0, handler_requests=1, queued_requests=4)) as served:
        for count in range(1, 4):
            peer = await served.connect()
            await peer.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
            await until(lambda count=count: sum(each.is_in_flight for each in served.server._connections) == count)  # type: ignore[misc]
            peer.vanish()
        release.set()
        await is_quiet(served)


async def test_a_server_that_ends_leaves_no_task_and_no_waiter() -> None:
    started = asyncio.Event()

    async def handle(_head: RequestHead, body: RequestBody) -> Reply:
        started.set()
        await receive_all(body)
        return Reply(200)

    before = asyncio.all_tasks()
    async with serving(handle) as served:
        idle, body = await served.connect(), await served.connect()
        await idle.send(b"GET /a HTT")
        await body.send(REQUESTS["length"][:-3])
        await started.wait()
        await served.server.aclose()
        assert await idle.is_cut()
        for line in served.lines:
            assert "exception" not in line.lower()
    assert asyncio.all_tasks() == before


async def test_what_is_held_for_a_client_that_hardly_reads_is_bounded() -> None:
    asked = 0

    class Counted(Views):
        async def views(self) -> AsyncIterator[memoryview]:
            nonlocal asked
            async for view in super().views():
                asked += 1
                yield view

    stream = Counted([pattern(MIB)] * 64)

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), stream)

    async with serving(handle) as served:
        peer = await served.connect()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await peer.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
        await until(lambda: any(each.wire.is_flushing for each in served.server._connections))
        for _ in range(300):
            await asyncio.sleep(0)
        (connection,) = served.server._connections
        transport = connection.wire._transport
        assert transport is not None
        assert asked < 16  # what the kernel's buffers took, and one view more
        assert transport.get_write_buffer_size() <= MIB
        peer.vanish()
        await until(lambda: stream.closed == 1)


async def test_what_is_held_of_a_client_that_sends_ahead_is_bounded() -> None:
    release = asyncio.Event()

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        await release.wait()
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        sending = asyncio.ensure_future(peer.send(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n" * 200_000))
        await until(lambda: any(each.is_in_flight for each in served.server._connections))
        for _ in range(300):
            await asyncio.sleep(0)
        (connection,) = served.server._connections
        assert len(connection.wire.peek()[0]) <= 2 * served.server._settings.receive_buffer_bytes
        peer.vanish()
        await asyncio.gather(sending, return_exceptions=True)
        release.set()
        await until(lambda: not served.server._connections)


class FailingClock(TurnedClock):
    """Fails as often as it is told to."""

    failures = 0

    def monotonic(self) -> float:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no time")
        return super().monotonic()


async def test_a_connection_that_cannot_be_taken_in_is_closed_and_that_is_logged() -> None:
    clock = FailingClock()
    async with serving(echo, clock=clock) as served:
        clock.failures = 1
        peer = await served.connect()
        assert await peer.is_cut()
        assert served.lines == ["a connection could not be taken in"]
        assert not served.server._connections
        assert not served.server._admission._of_group
        other = await served.connect()
        await other.send(b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await other.answer()).status == 200
