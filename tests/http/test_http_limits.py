"""What a client cannot do: say too much, too slowly, too oddly or too often."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
from http_peers import Peer, Served, Views, echo, pattern, serving, until

from kvobj.api.http import HttpSettings
from kvobj.api.http.limits import address_group
from kvobj.api.message import Reply, RequestBody, RequestHead

MIB = 1024 * 1024
GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


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


@pytest.mark.parametrize("sent", [b"GET / HTT", b"GET / HTTP/1.1\r\nHost: h\r\n"])
async def test_a_head_that_is_not_complete_in_time_is_told_so_and_the_connection_closed(sent: bytes) -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(sent)
        await until(partial(_has_received, served, len(sent) - 1))
        served.turn(9)
        served.turn(2)
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert b"<Code>RequestTimeout</Code><Message>Your socket connection to the server was not read" in answer.body
        peer.writer.write_eof()
        assert await peer.rest() == b""
        (line,) = map(json.loads, served.lines)
        assert line["request_id"] == answer.headers["x-amz-request-id"]
        assert line["method"] == "GET"
        await until(lambda: not served.server._connections)


async def test_a_connection_on_which_nothing_was_ever_said_is_closed_without_an_answer() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await until(lambda: bool(served.server._connections))
        served.turn(9)
        served.turn(2)
        assert await peer.rest() == b""
        assert served.lines == []


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


PUTS = {
    "length": b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nabc",
    "chunked": b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\nabc",
    "never sent": b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n",
}


@pytest.mark.parametrize("begun", list(PUTS))
async def test_a_body_that_stalls_is_given_up_and_its_client_told(begun: str) -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(PUTS[begun])
        await until(partial(_awaits_a_body, served))
        served.turn(31)
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert b"<Code>RequestTimeout</Code>" in answer.body
        peer.writer.write_eof()
        assert await peer.rest() == b""
        await until(lambda: not served.server._connections)
        (line,) = map(json.loads, served.lines)
        assert (line["error"], line["request_id"]) == ("RequestTimeout", "REQUEST1")
        assert b"kvobj_s3_stalled_connections_total 1.0" in served.metrics.render()


async def test_a_body_that_trickles_is_given_up() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(PUTS["length"])
        await until(partial(_awaits_a_body, served))
        for count in range(1, 5):
            served.turn(7)
            await peer.send(b"x" * 100)
            await until(partial(_has_received, served, len(PUTS["length"]) + 100 * count - 1))
        served.turn(7)
        assert (await peer.answer()).status == 400


async def test_an_unread_body_that_never_comes_ends_the_connection() -> None:
    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(403)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(PUTS["never sent"])
        assert (await peer.answer()).status == 403
        await until(lambda: any(each.wire.is_awaiting_bytes for each in served.server._connections))
        served.turn(31)
        assert await peer.rest() == b""
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
        assert (answer.status, answer.headers["connection"], answer.headers["retry-after"]) == (503, "close", "1")
        assert b"<Code>SlowDown</Code>" in answer.body
        assert json.loads(served.lines[-1])["request_id"] == answer.headers["x-amz-request-id"]
        third = await served.connect()
        assert await third.is_cut()
        await second.aclose()
        await first.send(GET)
        assert (await first.answer()).status == 200


async def test_one_address_cannot_take_all_connections_and_this_machine_can() -> None:
    settings = HttpSettings(sweep_seconds=3600.0, connections=20, address_connections=2)
    async with serving(echo, settings) as served:

        async def status(peer: Peer) -> int:
            await peer.send(GET)
            return (await peer.answer()).status

        greedy = [await served.connect("127.0.0.2") for _ in range(2)]
        assert [await status(peer) for peer in greedy] == [200, 200]
        refused = await served.connect("127.0.0.2")
        assert (await refused.answer()).status == 503
        assert "one address" in json.loads(served.lines[-1])["cause"]
        assert [await status(await served.connect("127.0.0.3")) for _ in range(2)] == [200, 200]
        assert [await status(await served.connect()) for _ in range(5)] == [200] * 5
        await greedy[0].aclose()
        await until(lambda: served.server._admission._of_group["127.0.0.2"] == 1)
        assert await status(await served.connect("127.0.0.2")) == 200
        for peer in served.peers:
            await peer.aclose()
        await until(lambda: not served.server._connections)
        assert served.server._admission._of_group == {}


@pytest.mark.parametrize(
    ("remote", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_an_ipv6_client_is_counted_by_its_network(remote: str, group: str) -> None:
    assert address_group(remote) == group


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


def _awaits_a_body(served: Served) -> bool:
    return any(each.wire.is_awaiting_bytes and each.is_in_flight for each in served.server._connections)


def _serves(served: Served, count: int) -> bool:
    return sum(each.is_in_flight for each in served.server._connections) == count
