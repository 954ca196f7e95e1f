"""A server that says byte for byte what a test has it say: what a client must bear and a real server seldom does."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from kvobj.client import Credentials, Endpoint, SignedConnection

CREDENTIALS: Final = Credentials("a", "s")
REQUEST_ID: Final = "x-amz-request-id: 1A2B"
"""What every answer of a kvobj server has, and a page of another does not."""

Serving = Callable[[socket.socket, int], None]


class ScriptedServer:
    """A context manager: `serve` is given each connection and its number, from 1 on, in a thread of its own."""

    def __init__(self, serve: Serving, *, tls: ssl.SSLContext | None = None, backlog: int = 128) -> None:
        self._serve = serve
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self.connections = 0
        port = self._listener.getsockname()[1]
        self.endpoint = Endpoint(is_tls=tls is not None, host="127.0.0.1", port=port)

    def connection(self, *, timeout_seconds: float = 10.0, tls: ssl.SSLContext | None = None) -> SignedConnection:
        """A client's connection to it."""
        return SignedConnection(self.endpoint, CREDENTIALS, timeout_seconds=timeout_seconds, tls=tls)

    def __enter__(self) -> Self:
        thread = threading.Thread(target=self._accept, daemon=True)
        self._threads.append(thread)
        thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self.connections += 1
                thread = threading.Thread(target=self._run, args=(accepted, self.connections), daemon=True)
                self._sockets.append(accepted)
                self._threads.append(thread)
                thread.start()

    def _run(self, accepted: socket.socket, number: int) -> None:
        with suppress(OSError), accepted:
            if self._tls is None:
                self._serve(accepted, number)
            else:
                with self._tls.wrap_socket(accepted, server_side=True) as secured:
                    self._serve(secured, number)


def read_request(connection: socket.socket) -> tuple[bytes, bytes]:
    """One request: its head and its body. `ConnectionError` where the client has gone."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += _received(connection)
    head, _, body = raw.partition(b"\r\n\r\n")
    length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
    while len(body) < int(length.partition(b":")[2]):
        body += _received(connection)
    return head, body


def answering(*answers: bytes) -> Serving:
    """Answers each request of a connection with the next of these, then closes it."""

    def serve(connection: socket.socket, _: int) -> None:
        for answer in answers:
            read_request(connection)
            connection.sendall(answer)

    return serve


def ok(body: bytes, *fields: str) -> bytes:
    """A whole answer of status 200 of a kvobj server."""
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body)}", REQUEST_ID, *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("the client has gone")
    return data
