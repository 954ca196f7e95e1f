"""When a reader of a long body sleeps until much of it is there, and when the kernel takes one in that nobody reads yet: once full
segments came, never after small ones alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from http_peers import TIMEOUT_SECONDS, echo, pattern, serving, until

from kvobj.api.http import HttpSettings
from kvobj.api.message import Reply, RequestBody, RequestHead
from kvobj.wire.body_handover import ReceiveMode, Wire

LOW_WATER_BYTES = 512 * 1024
WELCOME_BYTES = 1024 * 1024
BODY_BYTES = 4 * 1024 * 1024


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Wire, socket.socket, socket.socket]]:
    """A wire, its own socket, and its client's."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Wire] = loop.create_future()
    shared = memoryview(bytearray(64 * 1024))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = await loop.create_server(
            lambda: Wire(loop, made.set_result, shared=shared, mode=ReceiveMode.DIRECT), sock=listener.dup()
        )
        client = socket.create_connection(listener.getsockname())
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.settimeout(0)
        wire = await asyncio.wait_for(made, TIMEOUT_SECONDS)
        wire.tune(send_bytes=None, low_water_bytes=LOW_WATER_BYTES, welcome_bytes=WELCOME_BYTES)
        assert wire._transport is not None
        try:
            yield wire, wire._transport.get_extra_info("socket"), client
        finally:
            client.close()
            wire.reset()
            await asyncio.wait_for(wire.wait_closed(), TIMEOUT_SECONDS)
            server.close()
            await server.wait_closed()


def low_water(own: socket.socket) -> int:
    return own.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


async def test_the_first_long_body_after_small_requests_is_not_awaited_in_large_pieces() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (wire, own, client):
        for _ in range(8):
            await loop.sock_sendall(client, b"x")
            await asyncio.wait_for(wire.read_segment(), TIMEOUT_SECONDS)
        wire.welcome(BODY_BYTES)
        assert low_water(own) == 1
        filling = asyncio.ensure_future(wire.fill(memoryview(bytearray(BODY_BYTES)), lambda _: None))
        await asyncio.sleep(0)
        assert low_water(own) == 1
        await asyncio.wait_for(loop.sock_sendall(client, bytes(BODY_BYTES)), TIMEOUT_SECONDS)
        await asyncio.wait_for(filling, TIMEOUT_SECONDS)


async def test_once_full_segments_were_seen_a_long_body_is_awaited_in_large_pieces_and_a_short_one_is_not() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (wire, own, client):
        await take_long_bodies(wire, client)
        assert low_water(own) == 1
        for size, expected in ((BODY_BYTES, LOW_WATER_BYTES), (LOW_WATER_BYTES, 1)):
            filling = asyncio.ensure_future(wire.fill(memoryview(bytearray(size)), lambda _: None))
            await asyncio.sleep(0)
            assert low_water(own) == expected
            await asyncio.wait_for(loop.sock_sendall(client, bytes(size)), TIMEOUT_SECONDS)
            await asyncio.wait_for(filling, TIMEOUT_SECONDS)
            assert low_water(own) == 1


async def take_long_bodies(wire: Wire, client: socket.socket) -> None:
    """The kernel learns from a few of them."""
    loop = asyncio.get_running_loop()
    for _ in range(3):
        filling = asyncio.ensure_future(wire.fill(memoryview(bytearray(BODY_BYTES)), lambda _: None))
        await asyncio.wait_for(loop.sock_sendall(client, bytes(BODY_BYTES)), TIMEOUT_SECONDS)
        await asyncio.wait_for(filling, TIMEOUT_SECONDS)


async def test_a_long_body_is_taken_in_by_the_kernel_until_somebody_waits_for_it() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (wire, own, client):
        await take_long_bodies(wire, client)
        wire.welcome(WELCOME_BYTES - 1)
        assert low_water(own) == 1
        for size, expected in ((BODY_BYTES, LOW_WATER_BYTES), (LOW_WATER_BYTES, 1)):
            wire.welcome(BODY_BYTES)
            assert low_water(own) == WELCOME_BYTES
            filling = asyncio.ensure_future(wire.fill(memoryview(bytearray(size)), lambda _: None))
            await asyncio.sleep(0)
            assert low_water(own) == expected
            await asyncio.wait_for(loop.sock_sendall(client, bytes(size)), TIMEOUT_SECONDS)
            await asyncio.wait_for(filling, TIMEOUT_SECONDS)
            assert low_water(own) == 1


async def test_who_waits_for_any_bytes_gets_the_first_ones_of_a_body_that_was_welcome() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (wire, own, client):
        await take_long_bodies(wire, client)
        wire.welcome(BODY_BYTES)
        assert low_water(own) == WELCOME_BYTES
        reading = asyncio.ensure_future(wire.read_segment())
        await asyncio.sleep(0)
        await loop.sock_sendall(client, b"x")
        assert await asyncio.wait_for(reading, TIMEOUT_SECONDS) == b"x"


async def test_the_end_of_a_client_is_noticed_while_nobody_reads_its_body() -> None:
    async with connected() as (wire, own, client):
        await take_long_bodies(wire, client)
        wire.welcome(BODY_BYTES)
        assert low_water(own) == WELCOME_BYTES
        client.shutdown(socket.SHUT_WR)
        await until(lambda: wire.is_at_end)
        wire.welcome(BODY_BYTES)
        assert not await asyncio.wait_for(wire.arrive(), TIMEOUT_SECONDS)


async def test_a_request_whose_long_body_is_left_unread_is_followed_by_a_short_one() -> None:
    unread_bytes = 3 * LOW_WATER_BYTES // 2
    seen: list[int] = []

    async def answer(head: RequestHead, body: RequestBody) -> Reply:
        if head.target != "/unread":
            return await echo(head, body)
        (connection,) = served.server._connections
        assert connection.wire._transport is not None
        seen.append(low_water(connection.wire._transport.get_extra_info("socket")))
        return Reply(200, (), b"unread")

    async with serving(answer, HttpSettings(sweep_seconds=3600.0, local_welcome_bytes=unread_bytes)) as served:
        peer = await served.connect()
        body = pattern(BODY_BYTES)
        for _ in range(3):  # the kernel learns from a few of them
            await peer.send(b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES, body)
            assert (await peer.answer()).body == body
        for _ in range(2):
            await peer.send(b"PUT /unread HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % unread_bytes)
            assert (await peer.answer()).body == b"unread"
            for start in range(0, unread_bytes, 64 * 1024):
                await peer.send(body[start : start + 64 * 1024])
            await peer.send(b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx")
            assert (await peer.answer()).body == b"x"
        assert seen == [unread_bytes, unread_bytes]


async def test_what_a_client_sent_before_it_pauses_in_a_long_body_is_taken_at_the_next_sweep() -> None:
    put = b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES
    body = pattern(BODY_BYTES)
    piece = 64 * 1024
    async with serving(echo) as served:
        peer = await served.connect()
        for _ in range(3):  # the kernel learns from a few of them
            await peer.send(put, body)
            assert (await peer.answer()).body == body
        (connection,) = served.server._connections
        wire = connection.wire
        before = wire.bytes_in
        await peer.send(put, body[:piece])
        for sent in range(piece, 6 * piece, piece):
            await until(lambda: wire.is_awaiting_bytes)
            wire._set_low_water(LOW_WATER_BYTES)
            await peer.send(body[sent : sent + piece])
            served.turn(16)
            await until(partial(_has_come, wire, before + len(put) + sent + piece))
        await peer.send(body[6 * piece :])
        answer = await peer.answer()
        assert (answer.status, answer.body) == (200, body)


def _has_come(wire: Wire, count: int) -> bool:
    return wire.bytes_in == count
