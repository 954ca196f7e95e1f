"""The limit of LMCache's S3 adapter: a bare server that answers its loads out of memory, and does nothing else.

What the adapter loads from it is what its S3 client (awscrt) and the copy out of its callbacks leave, whoever serves. It knows one
size: every key has so many bytes, which mean nothing. It checks no signature and no condition, takes no PUT, and listens on
127.0.0.1 alone. A process for each connection: the fastest of the bare kinds of `limits` for bodies of a megabyte.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from limits import child_server, prefaulted

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD_END: Final = b"\r\n\r\n"
_RANGE: Final = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d*)", re.IGNORECASE)
_READ_BYTES: Final = 65536


def answer_head(request: bytes, size_bytes: int) -> tuple[bytes, int, int]:
    """The head that answers a GET or HEAD of an object of this size, and which bytes follow: from, to."""
    start, stop, status = 0, size_bytes, b"200 OK"
    asked = _RANGE.search(request)
    if asked is not None:
        start = min(int(asked[1]), size_bytes)
        stop = max(start, min(int(asked[2]) + 1, size_bytes) if asked[2] else size_bytes)
        status = b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d" % (start, stop - 1, size_bytes)
    head = b'HTTP/1.1 %s\r\nETag: "bare"\r\nContent-Length: %d\r\n\r\n' % (status, stop - start)
    return head, start, start if request.startswith(b"HEAD") else stop


def _serve_connection(connection: socket.socket, memory: memoryview) -> None:
    """Answer requests without bodies, one after the other, until the peer closes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    unread = b""
    while True:
        while (end := unread.find(_HEAD_END)) < 0:
            received = connection.recv(_READ_BYTES)
            if not received:
                return
            unread += received
        request, unread = unread[:end], unread[end + len(_HEAD_END) :]
        head, start, stop = answer_head(request, len(memory))
        connection.sendall(head)
        connection.sendall(memory[start:stop])


def _serve(listener: socket.socket, size_bytes: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    memory = prefaulted(size_bytes)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            try:
                _serve_connection(connection, memory)
            except ConnectionError:
                pass  # the client has gone, as clients do
            finally:
                os._exit(0)
        connection.close()


@contextmanager
def bare_s3_server(size_bytes: int) -> Iterator[int]:
    """Run it, as a child process; gives its port. Its connections' processes end with their clients."""
    with child_server(_serve, size_bytes) as port:
        yield port
