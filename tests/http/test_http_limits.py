"""What a client cannot do: say too much, too slowly, too oddly or too often."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from http_peers import Served, Views, echo, pattern, serving, until

from kvobj.api.http import HttpSettings
from kvobj.api.message import Reply, RequestBody, RequestHead

MIB = 1024 * 1024
GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: +5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX : y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: y\r\n z\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: y\rz\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: \x00\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 414),
        (b"GET /" + b"a" * 20_000, 414),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 41_000 + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: a\r\n" * 100 + b"\r\n", 400),
    ],
)
async def test_what_is_not_plain_http_is_refused_and_the_connection_closed(request_bytes: bytes, status: int) -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(request_bytes)
        peer.writer.write_eof()
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert b"REQUEST1" in answer.body
        assert await peer.rest() == b""


async def test_long_but_allowed_heads_pass() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        fields = b"".join(b"X-%d: %s\r\n" % (index, b"v" * 300) for index in range(99))
        await peer.send(b"GET /" + b"k" * 8000 + b" HTTP/1.1\r\nHost: h\r\n" + fields + b"\r\n")
        assert (await peer.answer()).status == 200


async def test_a_head_sent_byte_by_byte_is_read() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        for index in range(len(GET)):
            await peer.send(GET[index : index + 1])
            await asyncio.sleep(0)
        assert (await peer.answer()).status == 200


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: h\r\n"])
async def test_a_head_that_is_not_complete_in_time_ends_the_connection(sent: bytes) -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(sent)
        await until(
            lambda: (
                sum(each.wire.bytes_in for each in served.server._connections) == len(sent)
                and bool(served.server._connections)
            )
        )
        served.turn(9)
        served.turn(2)
        assert await peer.is_cut()


async def test_an_idle_connection_is_kept_for_a_while_and_then_closed() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(GET)
        await peer.answer()
        served.turn(59)
        await peer.send(GET)
        assert (await peer.answer()).status == 200
        served.turn(61)
        assert await peer.rest() == b""


async def test_a_body_that_stalls_is_given_up() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nabc")
        await until(
            lambda: any(each.wire.is_awaiting_bytes and each.is_in_flight for each in served.server._connections)
        )
        served.turn(31)
        assert await peer.is_cut()
        await until(lambda: not served.server._connections)


async def test_a_body_that_goes_on_is_not_given_up() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 40000\r\n\r\n")
        for sent in range(10_000, 50_000, 10_000):
            served.server.sweep()
            await peer.send(b"x" * 10_000)
            await until(partial(_has_received, served, sent))
            served.clock.seconds += 31
        assert (await peer.answer()).status == 200


async def test_a_handler_may_take_its_time() -> None:
    release = asyncio.Event()

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        await release.wait()
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(GET)
        await until(lambda: any(each.is_in_flight for each in served.server._connections))
        served.turn(1000)
        release.set()
        assert (await peer.answer()).status == 200


async def test_a_reply_that_is_not_taken_is_given_up() -> None:
    stream = Views([pattern(32 * MIB)])

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), stream)

    async with serving(handle) as served:
        peer = await served.connect()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await peer.send(GET)
        await until(lambda: any(each.wire.is_flushing for each in served.server._connections))
        for _ in range(200):
            await asyncio.sleep(0)
        served.turn(1)
        served.turn(61)
        await until(lambda: stream.closed == 1)


async def test_connections_over_the_limit_are_told_so_and_those_far_over_are_reset() -> None:
    settings = HttpSettings(sweep_seconds=3600.0, connections=1, refused_connections=1)
    async with serving(echo, settings) as served:
        first = await served.connect()
        await first.send(GET)
        assert (await first.answer()).status == 200
        second = await served.connect()
        answer = await second.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        third = await served.connect()
        assert await third.is_cut()
        await second.aclose()
        await first.send(GET)
        assert (await first.answer()).status == 200


async def test_a_full_queue_of_requests_is_answered_slow_down() -> None:
    release = asyncio.Event()

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        await release.wait()
        return Reply(200)

    settings = HttpSettings(sweep_seconds=3600.0, handler_requests=1, queued_requests=1)
    async with serving(handle, settings) as served:
        peers = [await served.connect() for _ in range(3)]
        for index, peer in enumerate(peers):
            await peer.send(GET)
            if index < 2:
                await until(partial(_serves, served, index + 1))
        refused = await peers[2].answer()
        assert refused.status == 503
        assert b"SlowDown" in refused.body
        release.set()
        assert [(await peer.answer()).status for peer in peers[:2]] == [200, 200]


async def test_a_request_that_queues_too_long_is_answered_slow_down() -> None:
    release = asyncio.Event()

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        await release.wait()
        return Reply(200)

    settings = HttpSettings(sweep_seconds=3600.0, handler_requests=1, queue_seconds=0.01)
    async with serving(handle, settings) as served:
        first, second = await served.connect(), await served.connect()
        await first.send(GET)
        await until(lambda: any(each.is_in_flight for each in served.server._connections))
        await second.send(GET)
        assert (await second.answer()).status == 503
        release.set()
        assert (await first.answer()).status == 200


def _has_received(served: Served, count: int) -> bool:
    return any(each.wire.bytes_in > count for each in served.server._connections)


def _serves(served: Served, count: int) -> bool:
    return sum(each.is_in_flight for each in served.server._connections) == count
