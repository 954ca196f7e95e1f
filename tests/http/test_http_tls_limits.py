"""TLS connections count from when they are accepted: who stalls in the handshake takes a place, and loses it at the deadline."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from certificates import Authority
from http_peers import TIMEOUT_SECONDS, Served, echo, serving, until
from module_paths import ModulePaths

from kvobj.api.http import HttpSettings

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
HELLO_BEGUN = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.fixture(scope="module")
def contexts(module_paths: ModulePaths) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    folder: Path = module_paths.mktemp("tls")
    authority = Authority.make(folder)
    authority.sign().write(folder / "tls.pem", folder / "tls.key")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "tls.pem", folder / "tls.key")
    return server, authority.client_context()


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def stall(served: Served, sockets: ExitStack, said: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    """A client that has said this much of its handshake, and says no more."""
    address = ("127.0.0.1", served.server.ports[0])
    plain = socket.create_connection(address, timeout=TIMEOUT_SECONDS, source_address=(source, 0))
    sockets.enter_context(plain)
    plain.sendall(said)
    return plain


def places(served: Served) -> int:
    return served.server._admission.places


async def status(served: Served, source: str | None = None) -> int:
    peer = await served.connect(source)
    await peer.send(GET)
    return (await peer.answer()).status


async def is_ended(plain: socket.socket) -> bool:
    """Whether the server ends the connection; a last alert may come before."""

    def read() -> bool:
        try:
            while plain.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True

    return await asyncio.to_thread(read)


def settings(**limits: float) -> HttpSettings:
    return HttpSettings(sweep_seconds=3600.0, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("said", [b"", HELLO_BEGUN], ids=["nothing", "half a hello"])
async def test_handshakes_that_stall_count_among_all_connections(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sockets: ExitStack, said: bytes
) -> None:
    limits = settings(connections=3, refused_connections=0)
    async with serving(echo, limits, server_context=contexts[0], client_context=contexts[1]) as served:
        stalled = [stall(served, sockets, said) for _ in range(3)]
        await until(lambda: places(served) == 3)
        assert await is_ended(stall(served, sockets, said))
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await served.connect()
        stalled[0].close()
        await until(lambda: places(served) == 2)
        assert await status(served) == 200
        assert served.metrics.registry.get_sample_value("kvobj_s3_refused_connections_total") == 2


async def test_handshakes_that_stall_count_for_their_address(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sockets: ExitStack
) -> None:
    limits = settings(connections=20, address_connections=2, refused_connections=0)
    async with serving(echo, limits, server_context=contexts[0], client_context=contexts[1]) as served:
        for _ in range(2):
            stall(served, sockets, source="127.0.0.2")
        await until(lambda: places(served) == 2)
        assert await is_ended(stall(served, sockets, source="127.0.0.2"))
        assert await status(served, "127.0.0.3") == 200
        assert await status(served) == 200


async def test_who_comes_when_handshakes_fill_the_limit_is_told_so_where_there_is_room_to_tell(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sockets: ExitStack
) -> None:
    limits = settings(connections=1, refused_connections=1)
    async with serving(echo, limits, server_context=contexts[0], client_context=contexts[1]) as served:
        stall(served, sockets)
        await until(lambda: places(served) == 1)
        told = await served.connect()
        answer = await told.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        await told.aclose()
        await until(lambda: places(served) == 1)
        stall(served, sockets)  # takes the place of who is told
        await until(lambda: places(served) == 2)
        assert await is_ended(stall(served, sockets))


@pytest.mark.parametrize("said", [b"", HELLO_BEGUN], ids=["nothing", "half a hello"])
async def test_a_handshake_that_stalls_ends_at_its_deadline_and_gives_its_place_back(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sockets: ExitStack, said: bytes
) -> None:
    limits = settings(connections=1, refused_connections=0, header_seconds=0.2)
    async with serving(echo, limits, server_context=contexts[0], client_context=contexts[1]) as served:
        stalled = stall(served, sockets, said)
        await until(lambda: places(served) == 1)
        assert await is_ended(stalled)
        await until(lambda: places(served) == 0)
        assert served.metrics.registry.get_sample_value("kvobj_s3_failed_tls_handshakes_total") == 1
        assert await status(served) == 200


async def test_what_is_no_tls_gives_its_place_back_at_once(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sockets: ExitStack
) -> None:
    async with serving(echo, settings(connections=1), server_context=contexts[0]) as served:
        assert await is_ended(stall(served, sockets, GET))
        await until(lambda: places(served) == 0)


async def test_the_end_of_the_server_ends_handshakes_too(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sockets: ExitStack
) -> None:
    async with serving(echo, settings(), server_context=contexts[0]) as served:
        stalled = stall(served, sockets, HELLO_BEGUN)
        await until(lambda: places(served) == 1)
        async with asyncio.timeout(TIMEOUT_SECONDS / 2):
            await served.server.aclose()
        assert await is_ended(stalled)
        assert places(served) == 0
