"""The end of a server as its clients see it: no request of a client that is at work is lost to it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import Authority
from http_peers import TIMEOUT_SECONDS, echo, serving, until

from kvobj.api.http import HttpSettings
from kvobj.api.message import Reply, RequestBody, RequestHead

NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"


def settings(parting_seconds: float) -> HttpSettings:
    return HttpSettings(sweep_seconds=3600.0, parting_seconds=parting_seconds)


async def test_a_client_at_work_is_told_with_its_next_reply_and_is_not_waited_for_longer() -> None:
    async with serving(echo, settings(TIMEOUT_SECONDS)) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        assert "connection" not in (await peer.answer()).headers
        draining = asyncio.ensure_future(served.server.drain(TIMEOUT_SECONDS))
        await asyncio.sleep(0)
        await peer.send(NEXT)
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await peer.rest() == b""
        assert await asyncio.wait_for(draining, TIMEOUT_SECONDS / 2)


class Halting:
    """A body of two views, the second when it is released."""

    length = 20

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def views(self) -> AsyncIterator[memoryview]:
        yield memoryview(b"a" * 10)
        await self.release.wait()
        yield memoryview(b"b" * 10)

    async def aclose(self) -> None:
        self.release.set()


async def test_a_client_that_was_told_to_keep_its_connection_may_use_it_once_more() -> None:
    body = Halting()

    async def handle(head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200) if head.target == "/next" else Reply(200, (), body)

    async with serving(handle, settings(TIMEOUT_SECONDS)) as served:
        peer = await served.connect()
        await peer.send(b"GET /halting HTTP/1.1\r\nHost: h\r\n\r\n")
        head = await asyncio.wait_for(peer.reader.readuntil(b"a" * 10), TIMEOUT_SECONDS)
        assert b"connection: close" not in head
        draining = asyncio.ensure_future(served.server.drain(TIMEOUT_SECONDS))
        await asyncio.sleep(0)
        body.release.set()
        assert await asyncio.wait_for(peer.reader.readexactly(10), TIMEOUT_SECONDS) == b"b" * 10
        await peer.send(NEXT)
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await asyncio.wait_for(draining, TIMEOUT_SECONDS / 2)


async def test_a_connection_that_was_just_made_has_its_request_served() -> None:
    async with serving(echo, settings(TIMEOUT_SECONDS)) as served:
        peer = await served.connect()
        await until(lambda: bool(served.server._connections))
        draining = asyncio.ensure_future(served.server.drain(TIMEOUT_SECONDS))
        await asyncio.sleep(0)
        await peer.send(NEXT)
        assert (await peer.answer()).headers["connection"] == "close"
        assert await asyncio.wait_for(draining, TIMEOUT_SECONDS / 2)


async def test_connections_that_have_long_been_idle_are_closed_at_once() -> None:
    async with serving(echo, settings(TIMEOUT_SECONDS)) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        await peer.answer()
        served.turn(TIMEOUT_SECONDS + 1)
        assert await asyncio.wait_for(served.server.drain(TIMEOUT_SECONDS), TIMEOUT_SECONDS / 2)
        assert await peer.rest() == b""


async def test_a_client_that_stays_silent_is_let_go_when_its_time_is_over() -> None:
    async with serving(echo, settings(0.05)) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        await peer.answer()
        assert await asyncio.wait_for(served.server.drain(TIMEOUT_SECONDS), TIMEOUT_SECONDS / 2)
        assert await peer.rest() == b""


async def test_a_request_whose_head_is_on_its_way_is_served_whenever_it_is_whole() -> None:
    async with serving(echo, settings(0.0)) as served:
        peer = await served.connect()
        await peer.send(NEXT[:20])
        await until(lambda: any(connection._reader.is_within_head for connection in served.server._connections))
        draining = asyncio.ensure_future(served.server.drain(TIMEOUT_SECONDS))
        await until(lambda: any(connection._is_parting for connection in served.server._connections))
        await peer.send(NEXT[20:])
        assert (await peer.answer()).headers["connection"] == "close"
        assert await asyncio.wait_for(draining, TIMEOUT_SECONDS / 2)


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = Authority.make(tmp_path)
    authority.sign().write(tmp_path / "tls.pem", tmp_path / "tls.key")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.pem", tmp_path / "tls.key")
    return server, authority.client_context()


async def test_a_tls_handshake_that_has_begun_is_finished_and_its_request_served(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server_context, client_context = contexts

    def talk(plain: socket.socket) -> bytes:
        with client_context.wrap_socket(plain, server_hostname="localhost") as connection:
            connection.sendall(NEXT)
            reply = b""
            while piece := connection.recv(65536):
                reply += piece
        return reply

    async with serving(echo, settings(TIMEOUT_SECONDS), server_context=server_context) as served:
        with socket.create_connection(("127.0.0.1", served.server.ports[0]), timeout=TIMEOUT_SECONDS) as plain:
            await until_accepted(plain)
            draining = asyncio.ensure_future(served.server.drain(TIMEOUT_SECONDS))
            await asyncio.sleep(0)
            reply = await asyncio.to_thread(talk, plain)
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in reply
        assert await asyncio.wait_for(draining, TIMEOUT_SECONDS / 2)


async def test_a_client_that_never_begins_its_handshake_is_not_waited_for(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with serving(echo, settings(0.05), server_context=contexts[0]) as served:
        with socket.create_connection(("127.0.0.1", served.server.ports[0]), timeout=TIMEOUT_SECONDS) as silent:
            await until_accepted(silent)
            assert await asyncio.wait_for(served.server.drain(TIMEOUT_SECONDS), TIMEOUT_SECONDS / 2)


async def until_accepted(client: socket.socket) -> None:
    """Wait until the loop has taken the connection from the listener: its accept queue, as the kernel tells it, is empty."""
    port = f":{client.getpeername()[1]:04X}"

    def is_empty() -> bool:
        for line in Path("/proc/net/tcp").read_text().splitlines():
            fields = line.split()
            if fields[1].endswith(port) and fields[3] == "0A":
                return int(fields[4].partition(":")[2], 16) == 0
        return False

    await until(is_empty)


@pytest.mark.parametrize("begun", ["a head", "a body", "a reply"])
async def test_a_client_that_stalls_in_its_request_does_not_have_the_next_server_waited_for(begun: str) -> None:
    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        await echo(head, body)
        return Reply(200, (), bytes(32 * 1024 * 1024))  # more than all buffers on the way take

    beginnings = {
        "a head": NEXT[:-2],
        "a body": b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n1",
        "a reply": NEXT,
    }
    async with serving(handle, replace(settings(0.01), linger_seconds=0.01)) as served:
        peer = await served.connect()
        await peer.send(beginnings[begun])
        await until(lambda: bool(served.server._connections))
        (connection,) = served.server._connections
        reached = {"a head": "head", "a body": "body", "a reply": "send"}[begun]
        await until(lambda: connection._present()[0][0] == reached and connection.wire.bytes_in > 0)
        served.turn(6)
        draining = asyncio.ensure_future(served.server.drain(TIMEOUT_SECONDS))
        await until(lambda: connection._is_parting)
        assert not draining.done()
        served.server.sweep()
        served.clock.seconds += 6
        served.server.sweep()
        assert await asyncio.wait_for(draining, TIMEOUT_SECONDS / 2)
