"""The client over TLS: the same answers, the same endings, and only with who has a certificate that it trusts."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from certificates import Authority
from module_paths import ModulePaths
from scripted_server import CREDENTIALS, ScriptedServer, answering, ok, read_request

from kvobj.client import AdminClient, SignedConnection
from kvobj.client.call_scope import CallScope
from kvobj.errors import UnavailableError

BODY = bytes(range(256)) * 8_000


@pytest.fixture(scope="module")
def contexts(module_paths: ModulePaths) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and that of a client that trusts it."""
    directory = module_paths.mktemp("tls")
    authority = Authority.make(directory)
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    authority.sign().write(certificate, key)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, authority.client_context()


def test_bodies_of_both_directions_arrive_whole_on_one_connection(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    came: list[bytes] = []

    def serve(connection: socket.socket, _: int) -> None:
        while True:
            came.append(read_request(connection)[1])
            connection.sendall(ok(BODY))

    with ScriptedServer(serve, tls=contexts[0]) as server, server.connection(tls=contexts[1]) as connection:
        for _ in range(3):
            with connection.open("PUT", "/", body=[BODY[:5], BODY[5:]]) as incoming:
                room = bytearray(len(BODY))
                incoming.readinto(memoryview(room))
                assert room == BODY
        assert came == [BODY] * 3
        assert server.connections == 1


@pytest.mark.parametrize("size_bytes", [0, 3_000_000])
def test_a_kept_connection_that_the_server_has_closed_is_replaced_without_a_word(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], size_bytes: int
) -> None:
    with ScriptedServer(answering(ok(b"a")), tls=contexts[0]) as server:
        with server.connection(tls=contexts[1]) as connection:
            for _ in range(3):
                with connection.open("PUT", "/", body=[bytes(size_bytes)] if size_bytes else b"") as incoming:
                    assert incoming.read() == b"a"
        assert server.connections == 3


def test_a_server_whose_certificate_nobody_vouches_for_is_not_spoken_to(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    with (
        ScriptedServer(answering(ok(b"a")), tls=contexts[0]) as server,
        SignedConnection(server.endpoint, CREDENTIALS) as connection,
        pytest.raises(UnavailableError, match="certificate"),
    ):
        connection.request("GET", "/")


def answering_nothing(connection: socket.socket, _: int) -> None:
    """Reads a request, and ends the connection."""
    read_request(connection)


def test_the_wrong_scheme_is_told_from_a_server_that_is_away(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    def refuse(connection: socket.socket, _: int) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with ScriptedServer(refuse) as server:
        endpoint = replace(server.endpoint, is_tls=True)
        with (
            SignedConnection(endpoint, CREDENTIALS, tls=contexts[1]) as connection,
            pytest.raises(UnavailableError, match="does it speak http, not https"),
        ):
            connection.request("GET", "/")
    # What a port of https makes of a plain request.
    with (
        ScriptedServer(answering_nothing) as server,
        server.connection() as connection,
        pytest.raises(UnavailableError, match="closed without an answer: it may have ended, or speak https, not http"),
    ):
        connection.request("GET", "/")


@pytest.mark.parametrize(
    ("status", "code", "ask"),
    [
        ("404 Not Found", "NoSuchBucket", AdminClient.status),
        ("405 Method Not Allowed", "MethodNotAllowed", AdminClient.collect),
    ],
)
def test_an_s3_port_is_told_from_an_admin_port(status: str, code: str, ask: Callable[[AdminClient], object]) -> None:
    document = f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/xml\r\ncontent-length: {len(document)}\r\n\r\n"
    with (
        ScriptedServer(answering(head.encode() + document)) as server,
        server.connection() as connection,
        pytest.raises(UnavailableError, match="an S3 port answers: name the admin port"),
    ):
        ask(AdminClient(connection))


def test_a_call_over_tls_is_ended_by_its_scope_and_its_deadline(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    came = threading.Event()

    def half(connection: socket.socket, _: int) -> None:
        read_request(connection)
        connection.sendall(ok(BODY)[: len(BODY) // 2])
        came.set()
        read_request(connection)

    def read(connection: SignedConnection, scope: CallScope, timeout_seconds: float) -> None:
        room = memoryview(bytearray(len(BODY)))
        with (
            scope.entered(),
            pytest.raises(UnavailableError),
            connection.open("GET", "/", timeout_seconds=timeout_seconds) as incoming,
        ):
            incoming.readinto(room)

    with ScriptedServer(half, tls=contexts[0]) as server, server.connection(tls=contexts[1]) as connection:
        scope = CallScope()
        thread = threading.Thread(target=read, args=(connection, scope, 20))
        thread.start()
        assert came.wait(10)
        scope.cancel()
        thread.join(2)
        assert not thread.is_alive()
        read(connection, CallScope(), 0.3)
