"""What a client really sends: a relay on loopback that changes no byte and keeps every request head."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

_HEAD: Final = re.compile(rb"([A-Z]+) (/[^ \r\n]*) HTTP/1\.1\r\n((?:[A-Za-z0-9-]+:[^\r\n]*\r\n)+)\r\n")
_PIECE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class SentHead:
    """One request as it was sent; header names are lower case."""

    method: str
    target: str
    headers: dict[str, str]


class RecordingRelay:
    """Forwards connections to a port of this machine. A context manager: leaving cuts what is open.

    Keeps all that clients send, so it is for tests of some tens of megabytes.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._sent: list[bytearray] = []
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def heads(self) -> list[SentHead]:
        """The request heads so far, in order within a connection. Random bodies are taken to hold no head."""
        found = []
        for sent in self._sent:
            for method, target, lines in _HEAD.findall(bytes(sent)):
                pairs = (line.partition(":") for line in lines.decode("latin-1").split("\r\n") if line)
                headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
                found.append(SentHead(method.decode(), target.decode("latin-1"), headers))
        return found

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sent = bytearray()
            self._sent.append(sent)
            self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, sent), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, None), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                if kept is not None:
                    kept += piece
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
