"""When a reader of a long body sleeps until much of it is there: once full segments came, never after small ones alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from http_peers import TIMEOUT_SECONDS, echo, pattern, serving, until

from kvobj.wire.body_handover import ReceiveMode, Wire

LOW_WATER_BYTES = 512 * 1024
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
        wire.tune(send_bytes=None, low_water_bytes=LOW_WATER_BYTES)
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
        filling = asyncio.ensure_future(wire.fill(memoryview(bytearray(BODY_BYTES)), lambda _: None))
        await asyncio.sleep(0)
        assert low_water(own) == 1
        await asyncio.wait_for(loop.sock_sendall(client, bytes(BODY_BYTES)), TIMEOUT_SECONDS)
        await asyncio.wait_for(filling, TIMEOUT_SECONDS)


async def test_once_full_segments_were_seen_a_long_body_is_awaited_in_large_pieces_and_a_short_one_is_not() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (wire, own, client):
        for _ in range(3):  # the kernel learns from a few of them
            filling = asyncio.ensure_future(wire.fill(memoryview(bytearray(BODY_BYTES)), lambda _: None))
            await asyncio.wait_for(loop.sock_sendall(client, bytes(BODY_BYTES)), TIMEOUT_SECONDS)
            await asyncio.wait_for(filling, TIMEOUT_SECONDS)
            assert low_water(own) == 1
        for size, expected in ((BODY_BYTES, LOW_WATER_BYTES), (LOW_WATER_BYTES, 1)):
            filling = asyncio.ensure_future(wire.fill(memoryview(bytearray(size)), lambda _: None))
            await asyncio.sleep(0)
            assert low_water(own) == expected
            await asyncio.wait_for(loop.sock_sendall(client, bytes(size)), TIMEOUT_SECONDS)
            await asyncio.wait_for(filling, TIMEOUT_SECONDS)
            assert low_water(own) == 1


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
