"""How close the HTTP layer alone comes to a bare blocking socket: GET and PUT of a prefaulted mapping, over loopback.

Limit servers (a thread a connection, no parsing worth the name) send and receive the same bytes, once as the kernel sizes its
buffers and once with the send buffer that the layer itself sets; the better one is the limit. Servers are processes of their own,
the client is this process with a thread a connection; rounds are interleaved and medians compared, so that a noisy machine shifts
all of them alike. The last column is server CPU-seconds per GiB, the limit's in brackets. Absolute figures are only printed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import mmap
import os
import platform
import resource
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from command_line import Parser, listed, listed_or_none, one_of, one_or_more, run_tool, zero_or_more

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collections.abc import AsyncIterator

from kvobj.api.http import HttpServer, HttpSettings
from kvobj.api.message import Reply, RequestBody, RequestHead
from kvobj.clock import SystemClock
from kvobj.ids import new_request_id
from kvobj.metrics import Metrics

MIB = 1024 * 1024
HEAD_BYTES_MAX = 64 * 1024
REPLY_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
TICKS = os.sysconf("SC_CLK_TCK")


def prefaulted(size: int) -> memoryview:
    """A private mapping of which every page is there."""
    mapping = mmap.mmap(-1, size)
    view = memoryview(mapping)
    for start in range(0, size, 4096):
        view[start] = start >> 12 & 0xFF
    return view


# The limit: sockets and nothing else.


def read_head(connection: socket.socket, scratch: memoryview) -> tuple[bytes, bytes]:
    """The head and what came with it; two empty ones at the end."""
    filled = 0
    while True:
        count = connection.recv_into(scratch[filled:])
        if not count:
            return b"", b""
        filled += count
        seen = bytes(scratch[:filled])
        end = seen.find(b"\r\n\r\n")
        if end >= 0:
            return seen[: end + 4], seen[end + 4 :]


def receive_whole(connection: socket.socket, view: memoryview) -> None:
    """One call a body."""
    filled = 0
    while filled < len(view):
        filled += connection.recv_into(view[filled:], 0, socket.MSG_WAITALL)


def serve_bare(listener: socket.socket, size_max: int, send_buffer_bytes: int | None) -> None:
    """Serve for ever, a thread a connection, each with its own mapping."""

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        body = prefaulted(size_max)
        scratch = memoryview(bytearray(HEAD_BYTES_MAX))
        while True:
            head, rest = read_head(connection, scratch)
            if not head:
                return
            size = int(head.split(b"/", 1)[1].split(b"-", 1)[0])
            if head.startswith(b"PUT"):
                body[: len(rest)] = rest
                receive_whole(connection, body[len(rest) : size])
                connection.sendall(REPLY_HEAD % 0)
            elif size <= HEAD_BYTES_MAX:
                connection.sendall(REPLY_HEAD % size + bytes(body[:size]))
            else:
                connection.send(REPLY_HEAD % size, socket.MSG_MORE)
                connection.sendall(body[:size])

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


# The HTTP layer under test.


class OneView:
    """A body stream of one view."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    @property
    def length(self) -> int:
        """See `BodyStream`."""
        return len(self._view)

    async def views(self) -> AsyncIterator[memoryview]:
        """See `BodyStream`."""
        yield self._view

    async def aclose(self) -> None:
        """See `BodyStream`."""


def serve_kvobj(listener: socket.socket, size_max: int, options: argparse.Namespace) -> None:
    """Serve for ever with a handler that moves bytes of one mapping and does nothing else."""
    body_view = prefaulted(size_max * 4)

    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        size, slot = map(int, head.target[1:].split("-"))
        start = slot * size_max
        if head.method == "PUT":
            await body.receive_into(body_view[start : start + size], lambda _: None)
            return Reply(200)
        return Reply(200, (), OneView(body_view[start : start + size]))

    async def main() -> None:
        settings = HttpSettings(
            local_send_bytes=options.send_buffer * 1024 or None,
            local_low_water_bytes=options.low_water * 1024,
            receive_buffer_bytes=options.shared_buffer * 1024,
        )
        server = HttpServer(
            handle,
            settings=settings,
            metrics=Metrics(),
            clock=SystemClock(),
            new_request_id=new_request_id,
            log=logging.getLogger("http"),
        )
        await server.start([listener])
        await asyncio.Event().wait()

    (uvloop.run if options.loop == "uvloop" else asyncio.run)(main())


# The client.


@dataclass
class Client:
    """One connection that moves bodies of one size."""

    port: int
    size: int
    slot: int
    body: memoryview = field(init=False)
    connection: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.body = prefaulted(self.size)
        self.connection = socket.create_connection(("127.0.0.1", self.port))
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._scratch = memoryview(bytearray(HEAD_BYTES_MAX))

    def get(self, count: int) -> None:
        """Fetch the body `count` times."""
        request = b"GET /%d-%d HTTP/1.1\r\nhost: bench\r\n\r\n" % (self.size, self.slot)
        for _ in range(count):
            self.connection.sendall(request)
            _, rest = read_head(self.connection, self._scratch)
            self.body[: len(rest)] = rest
            receive_whole(self.connection, self.body[len(rest) :])

    def put(self, count: int) -> None:
        """Send the body `count` times."""
        request = b"PUT /%d-%d HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n" % (
            self.size,
            self.slot,
            self.size,
        )
        for _ in range(count):
            self.connection.send(request, socket.MSG_MORE)
            self.connection.sendall(self.body)
            read_head(self.connection, self._scratch)


@dataclass
class Served:
    """A server process and what it has shown."""

    name: str
    pid: int
    port: int


def spawn(name: str, serve: Callable[[socket.socket], None]) -> Served:
    """Fork a server on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    pid = os.fork()
    if not pid:
        try:
            serve(listener)
        finally:
            os._exit(1)
    port = listener.getsockname()[1]
    listener.close()
    return Served(name, pid, port)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(servers: list[Served], verb: str, size: int, connections: int, *, rounds: int, per_round: int) -> None:
    """Print one line: rates of every server, and the last one's ratio to the best of the others."""
    clients = {served.name: [Client(served.port, size, slot) for slot in range(connections)] for served in servers}
    seconds: dict[str, list[float]] = {served.name: [] for served in servers}
    client_cpu: dict[str, float] = dict.fromkeys(seconds, 0.0)
    server_cpu: dict[str, float] = dict.fromkeys(seconds, 0.0)
    with ThreadPoolExecutor(connections) as pool:
        for turn in range(-1, rounds):
            for served in servers:
                before = resource.getrusage(resource.RUSAGE_SELF)
                cpu_before = cpu_seconds(served.pid)
                started = time.perf_counter()
                list(pool.map(lambda client: getattr(client, verb)(per_round), clients[served.name]))
                elapsed = time.perf_counter() - started
                after = resource.getrusage(resource.RUSAGE_SELF)
                if turn < 0:
                    continue
                seconds[served.name].append(elapsed)
                client_cpu[served.name] += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                server_cpu[served.name] += cpu_seconds(served.pid) - cpu_before
    moved = size * connections * per_round
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    *limits, tested = servers
    limit = min(limits, key=lambda served: medians[served.name])
    rates = "  ".join(f"{name} {moved / each / 1e9:5.2f} GB/s" for name, each in medians.items())
    if size < MIB:
        rates = "  ".join(f"{name} {connections * per_round / each:7.0f}/s" for name, each in medians.items())
    gib = moved * rounds / 2**30
    print(
        f"{verb.upper():4}{size / MIB:8.3f} MiB x{connections}  {rates}  ratio {medians[limit.name] / medians[tested.name]:.2f}"
        f"  client cpu {client_cpu[tested.name] / sum(seconds[tested.name]):.2f}"
        f"  server cpu-s/GiB {server_cpu[tested.name] / gib:.2f} ({server_cpu[limit.name] / gib:.2f})",
        flush=True,
    )
    for each in clients.values():
        for client in each:
            client.connection.close()


def main() -> None:
    """Parse options, start the servers, measure, stop them."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--sizes-mib", type=listed_or_none(one_or_more), default="1,8,32", help="empty: the small GET alone"
    )
    parser.add_argument("--connections", type=listed(one_or_more), default="1,4")
    parser.add_argument("--verbs", type=listed(one_of("get", "put")), default="get,put")
    parser.add_argument("--rounds", type=one_or_more, default=9)
    parser.add_argument("--round-mib", type=one_or_more, default=256, help="bytes a connection moves in a round")
    parser.add_argument("--small", type=zero_or_more, default=4096, help="size of the small GET; 0 leaves it out")
    parser.add_argument(
        "--send-buffer", type=zero_or_more, default=256, help="kernel buffer in KiB; 0 leaves it to the kernel"
    )
    parser.add_argument("--low-water", type=zero_or_more, default=512, help="KiB of a body to wait for; 0 for any")
    parser.add_argument("--shared-buffer", type=one_or_more, default=64, help="what heads are read into, in KiB")
    parser.add_argument("--loop", default="uvloop", choices=("uvloop", "asyncio"))
    options = parser.parse_args()
    sizes = [size * MIB for size in options.sizes_mib]
    size_max = max([*sizes, MIB])
    print(f"{platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}, {options.loop}")
    servers = [
        spawn("bare", lambda listener: serve_bare(listener, size_max, None)),
        spawn("bare-tuned", lambda listener: serve_bare(listener, size_max, options.send_buffer * 1024 or None)),
        spawn(
            "kvobj",
            lambda listener: serve_kvobj(listener, size_max, options),
        ),
    ]
    try:
        for verb in options.verbs:
            for size in sizes:
                for connections in options.connections:
                    per_round = max(1, options.round_mib * MIB // size // connections)
                    measure(servers, verb, size, connections, rounds=options.rounds, per_round=per_round)
        if options.small:
            for connections in options.connections:
                measure(
                    servers, "get", options.small, connections, rounds=options.rounds, per_round=2000 // connections
                )
    finally:
        for served in servers:
            os.kill(served.pid, signal.SIGKILL)
            os.waitpid(served.pid, 0)


if __name__ == "__main__":
    run_tool(main)
