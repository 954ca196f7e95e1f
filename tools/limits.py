"""Limit servers: what one machine can do with the same bytes and the same client, so that benchmarks assert ratios.

Two bare blocking-socket servers (a thread or a process for each connection; the better one is the limit), nginx with
sendfile, Redis. A third bare server keeps what it receives, in a gigabyte of shared memory used in turn: writing to memory
that no cache holds is what any store has to do, and the other two never do it. A fourth also makes the BLAKE3 digest of each
body, in a second thread as it arrives, and answers when that is known: what digests leave of the rate where two cores send,
receive and hash. They check nothing and are no servers for anything else. Each listens on 127.0.0.1 only.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blake3 import blake3
from free_ports import free_port, wait_for_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB: Final = 1024 * 1024
BARE_KINDS: Final = ("threads", "processes")
_LARGEST_BYTES: Final = 64 * MIB
_SLICE_BYTES: Final = 1 * MIB
_RING_BYTES: Final = 1024 * MIB


def prefaulted(size_bytes: int) -> memoryview:
    """Anonymous shared memory whose pages are there already."""
    memory = mmap.mmap(-1, size_bytes)
    view = memoryview(memory)
    for start in range(0, size_bytes, MIB):
        view[start : start + MIB] = bytes(min(MIB, size_bytes - start))
    return view


class _Ring:
    """Shared memory handed out in turn to all connections."""

    def __init__(self) -> None:
        self._memory = prefaulted(_RING_BYTES)
        self._next = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        with self._lock:
            start = self._next if self._next + size <= _RING_BYTES else 0
            self._next = start + size
        return self._memory[start : start + size]


def _receive_body(
    connection: socket.socket, body: memoryview, filled: int, *, step: int, hasher: Executor | None
) -> bool:
    """Fill what is left of the body, and digest it in `hasher`'s one thread as it arrives; False if the peer closes."""
    digest, hashed, last = blake3(), 0, None
    while filled < len(body):
        count = connection.recv_into(body[filled : filled + step])
        if not count:
            return False
        filled += count
        if hasher is not None and (filled - hashed >= _SLICE_BYTES or filled == len(body)):
            last = hasher.submit(digest.update, body[hashed:filled])
            hashed = filled
    if last is not None:
        last.result()
        digest.digest()
    return True


def _serve_connection(
    connection: socket.socket,
    memory: memoryview,
    *,
    is_sliced: bool,
    ring: _Ring | None = None,
    hasher: Executor | None = None,
) -> None:
    """Answer `GET /SIZE` with that many bytes and take the body of a PUT, until the peer closes. `hasher`: one thread, which
    digests each body."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        unread = b""
        while True:
            while (end := unread.find(b"\r\n\r\n")) < 0:
                received = connection.recv(65536)
                if not received:
                    return
                unread += received
            head, unread = unread[:end], unread[end + 4 :]
            if head.startswith(b"GET"):
                size = int(head.split(b" ", 2)[1].rpartition(b"/")[2])
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
                step = _SLICE_BYTES if is_sliced else size
                for start in range(0, size, step or 1):
                    connection.sendall(memory[start : min(size, start + step)])
                continue
            size = int(head.lower().rpartition(b"content-length:")[2].split(b"\r\n", 1)[0])
            if ring is not None:
                memory = ring.take(size)
            memory[: len(unread)] = unread
            step = _SLICE_BYTES if is_sliced else size
            if not _receive_body(connection, memory[:size], len(unread), step=step, hasher=hasher):
                return
            unread = b""
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def _serve_threads(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        arguments = (connection, prefaulted(_LARGEST_BYTES))
        threading.Thread(target=_serve_connection, args=arguments, kwargs={"is_sliced": True}, daemon=True).start()


def _serve_keeping(listener: socket.socket) -> None:
    ring = _Ring()
    while True:
        connection, _ = listener.accept()
        arguments = (connection, prefaulted(MIB))
        keywords = {"is_sliced": True, "ring": ring}
        threading.Thread(target=_serve_connection, args=arguments, kwargs=keywords, daemon=True).start()


def _serve_hashing(listener: socket.socket) -> None:
    ring = _Ring()
    while True:
        connection, _ = listener.accept()
        keywords = {"is_sliced": True, "ring": ring, "hasher": ThreadPoolExecutor(1)}
        threading.Thread(
            target=_serve_connection, args=(connection, prefaulted(MIB)), kwargs=keywords, daemon=True
        ).start()


def _serve_processes(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    memory = prefaulted(_LARGEST_BYTES)  # shared by all children: what they read and write has no meaning
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            try:
                _serve_connection(connection, memory, is_sliced=False)
            finally:
                os._exit(0)
        connection.close()


@contextmanager
def child_server(serve: Callable[..., None], *arguments: object) -> Iterator[int]:
    """Run `serve(listener, *arguments)` in a child process; gives its port. What it forks ends with its clients."""
    context: ForkContext = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        port = int(listener.getsockname()[1])
        process: ForkProcess = context.Process(target=serve, args=(listener, *arguments), daemon=True)
        process.start()
    try:
        yield port
    finally:
        process.kill()
        process.join()


@contextmanager
def bare_server(kind: str) -> Iterator[int]:
    """A bare blocking-socket server as a child process; gives its port."""
    serve = {
        "threads": _serve_threads,
        "processes": _serve_processes,
        "keeping": _serve_keeping,
        "hashing": _serve_hashing,
    }[kind]
    with child_server(serve) as port:
        yield port


@contextmanager
def _child(command: list[str], port: int, directory: Path) -> Iterator[int]:
    with (directory / "output.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for_port(port, process)
            yield port
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def nginx_server(directory: Path, sizes: list[int]) -> Iterator[int | None]:
    """Run nginx with sendfile and one worker, serving a file `/SIZE` of each size; None where it is not installed."""
    binary = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if binary is None:
        yield None
        return
    port = free_port()
    (directory / "www").mkdir(parents=True, exist_ok=True)
    for size in sizes:
        (directory / "www" / str(size)).write_bytes(os.urandom(min(size, MIB)) * max(1, size // MIB))
    temporary = "".join(
        f"{name}_temp_path tmp_{name}; " for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (directory / "nginx.conf").write_text(
        f"{user} daemon off; worker_processes 1; pid nginx.pid; error_log error.log;\n"
        "events { worker_connections 1024; }\n"
        "http { access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_requests 1000000;\n"
        f"{temporary}\nserver {{ listen 127.0.0.1:{port}; root www; }} }}\n"
    )
    with _child([binary, "-p", str(directory), "-c", "nginx.conf"], port, directory) as listening:
        yield listening


@contextmanager
def redis_server(directory: Path) -> Iterator[int | None]:
    """Redis without persistence; None where it is not installed."""
    binary = shutil.which("redis-server")
    if binary is None:
        yield None
        return
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    command = [binary, "--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    with _child([*command, "--dir", str(directory)], port, directory) as listening:
        yield listening


def main() -> int:
    """Run one bare server in the foreground, for use by hand."""
    kind = sys.argv[1] if len(sys.argv) > 1 else BARE_KINDS[0]
    if kind not in BARE_KINDS:
        print(f"usage: limits.py {'|'.join(BARE_KINDS)}", file=sys.stderr)
        return 2
    with bare_server(kind) as port:
        print(f"bare {kind} http://127.0.0.1:{port}/SIZE", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


if __name__ == "__main__":
    sys.exit(main())
