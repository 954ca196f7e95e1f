"""The benchmark's client: processes with blocking sockets that send prepared requests and receive into prefaulted memory.

The same client measures kvobj, the bare servers, nginx and Redis. It does as little as a client can, so that the server is the
limit; what it takes of the CPU is measured and reported beside every figure.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.synchronize import Barrier as BarrierType
from multiprocessing.synchronize import Event as EventType
from typing import TYPE_CHECKING, Any, Final

from limits import prefaulted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BARRIER_SECONDS: Final = 60.0
_SOCKET_SECONDS: Final = 60.0
_MEANWHILE_SECONDS: Final = 300.0
_LOAD_SECONDS: Final = 600.0
_ONE_WRITE_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class Load:
    """What one connection does: each head is sent, with `body_bytes` after it; `reply_bytes` of body are received.

    `body`: what is sent in place of zeros, framing included; `body_bytes` is what it is worth. `protocol` is `http`, `head`
    (replies come without the body that they announce), or `redis` whose heads are whole commands up to the value.
    """

    port: int
    heads: tuple[bytes, ...]
    body_bytes: int = 0
    reply_bytes: int = 0
    protocol: str = "http"
    warm_up: int = 1
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All connections together; seconds from the first start to the last end."""

    operations: int
    bytes_moved: int
    started: float
    ended: float
    client_cpu_seconds: float
    connections: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started

    @property
    def bytes_per_second(self) -> float:
        """Payload bytes a second."""
        return self.bytes_moved / self.seconds

    @property
    def operations_per_second(self) -> float:
        """Operations a second."""
        return self.operations / self.seconds

    @property
    def client_cpu_share(self) -> float:
        """Of one core, how much each client process was busy."""
        return self.client_cpu_seconds / self.seconds / self.connections


class _Connection:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._socket = socket.create_connection(("127.0.0.1", load.port), timeout=_SOCKET_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A kernel timeout instead of Python's, which costs a poll before every recv.
        self._socket.settimeout(None)
        seconds = int(_SOCKET_SECONDS).to_bytes(8, "little") + bytes(8)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        self._body = memoryview(load.body) if load.body else prefaulted(max(load.body_bytes, 1))
        self._reply = prefaulted(max(load.reply_bytes, 1) + 65536)

    def close(self) -> None:
        self._socket.close()

    def once(self, head: bytes) -> None:
        load = self._load
        if 0 < load.body_bytes <= _ONE_WRITE_BYTES:
            self._socket.sendall(head + self._body)
        else:
            self._socket.sendall(head)
            if load.body_bytes:
                self._socket.sendall(self._body)
        if load.protocol == "redis":
            if load.body_bytes:
                self._socket.sendall(b"\r\n")
            self._receive_redis()
        else:
            self._receive_http()

    def _receive_http(self) -> None:
        filled, end = 0, -1
        while end < 0:
            filled += self._more(self._reply[filled:])
            end = bytes(self._reply[: min(filled, 16384)]).find(b"\r\n\r\n")
        head = bytes(self._reply[:end])
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 206")):
            raise RuntimeError(f"not a success: {bytes(self._reply[: min(filled, 2000)])!r}")
        wanted = end + 4 + self._load.reply_bytes
        has_unknown_body = not self._load.reply_bytes and self._load.protocol != "head"
        if has_unknown_body:  # a PUT's reply may have a small body of its own
            marker = head.lower().find(b"content-length:")
            wanted += int(head[marker + 15 :].split(b"\r\n", 1)[0]) if marker >= 0 else 0
        while filled < wanted:
            filled += self._more(self._reply[filled:wanted])

    def _receive_redis(self) -> None:
        filled = 0
        while b"\r\n" not in bytes(self._reply[: min(filled, 64)]):
            filled += self._more(self._reply[filled:])
        line = bytes(self._reply[:64]).split(b"\r\n", 1)[0]
        if line.startswith(b"$"):
            wanted = len(line) + 2 + int(line[1:]) + 2
            while filled < wanted:
                filled += self._more(self._reply[filled:wanted])
        elif line != b"+OK":
            raise RuntimeError(f"not a success: {line!r}")

    def _more(self, room: memoryview) -> int:
        count = self._socket.recv_into(room)
        if not count:
            raise ConnectionError("the server closed the connection")
        return count


def _work(load: Load, barrier: BarrierType, results: Any, may_end: EventType) -> None:  # noqa: ANN401 - a multiprocessing queue
    connection = _Connection(load)
    try:
        for head in load.heads[: load.warm_up]:
            connection.once(head)
        barrier.wait(_BARRIER_SECONDS)
        cpu = time.process_time()
        started = time.monotonic()
        for head in load.heads[load.warm_up :]:
            connection.once(head)
        ended = time.monotonic()
        results.put((started, ended, time.process_time() - cpu, None))
        may_end.wait(_MEANWHILE_SECONDS)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must hear of it and the others must not wait
        barrier.abort()
        results.put((0.0, 0.0, 0.0, f"{type(error).__name__}: {error}"))
    finally:
        connection.close()


def run_load(loads: Sequence[Load], *, meanwhile: Callable[[LoadResult], None] | None = None) -> LoadResult:
    """Run each load in a process of its own, all started together; RuntimeError if one of them fails.

    `meanwhile` is called with the result before the processes end: four of them take both of two cores for some 0.1 s to do so,
    which is nothing to be measured.
    """
    context: SpawnContext = multiprocessing.get_context("spawn")
    barrier, results, may_end = context.Barrier(len(loads)), context.Queue(), context.Event()
    processes = [context.Process(target=_work, args=(load, barrier, results, may_end), daemon=True) for load in loads]
    for process in processes:
        process.start()
    try:
        outcomes = [_next_outcome(results, processes) for _ in processes]
        problems = [problem for *_, problem in outcomes if problem]
        if problems:
            raise RuntimeError("; ".join(problems))
        result = _result(loads, outcomes)
        if meanwhile is not None:
            meanwhile(result)
    finally:
        may_end.set()
        for process in processes:
            process.join(10)
    return result


def _next_outcome(results: Any, processes: Sequence[SpawnProcess]) -> tuple[float, float, float, str | None]:  # noqa: ANN401 - a multiprocessing queue
    deadline = time.monotonic() + _LOAD_SECONDS
    while True:
        try:
            outcome: tuple[float, float, float, str | None] = results.get(timeout=1)
        except queue.Empty:
            # One that could not even begin tells nothing.
            if time.monotonic() > deadline or any(process.exitcode for process in processes):
                raise RuntimeError("a process of the load ended without a word") from None
        else:
            return outcome


def _result(loads: Sequence[Load], outcomes: Sequence[tuple[float, float, float, str | None]]) -> LoadResult:
    return LoadResult(
        operations=sum(len(load.heads) - load.warm_up for load in loads),
        bytes_moved=sum((len(load.heads) - load.warm_up) * (load.body_bytes + load.reply_bytes) for load in loads),
        started=min(started for started, *_ in outcomes),
        ended=max(ended for _, ended, *_ in outcomes),
        client_cpu_seconds=sum(cpu for _, _, cpu, _ in outcomes),
        connections=len(loads),
    )


def redis_get(key: str) -> bytes:
    """A GET command."""
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key.encode())


def redis_set(key: str, size_bytes: int) -> bytes:
    """A SET command up to its value, which the load's body is."""
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key.encode(), size_bytes)


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - not a file of ours
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": model, "cores": os.cpu_count(), "memory_bytes": pages, "kernel": os.uname().release}
