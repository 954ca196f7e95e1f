"""What the tools that show a node with a remote tier share: a radosgw with buckets, the tests' fault proxy as a process of its own,
nodes in front of either, and a client that notes when the first byte came.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bench_support import MIB, BucketSetting, RawS3, RemoteTarget, ServerProcess, ServerSettings, own_server
from limits import prefaulted
from radosgw_server import radosgw_server

from kvobj.config import RemoteSettings

GATEWAY_OPTIONS: Final = {"rgw_gc_obj_min_wait": "2", "rgw_gc_processor_period": "2", "rgw_gc_processor_max_time": "2"}
"""Removed objects give their room back soon: two hours later by default."""
_TOOLS: Final = Path(__file__).resolve().parent
_PROXY_PATHS: Final = [str(path) for path in (_TOOLS.parent / "tests" / "faults", _TOOLS)]
"""Where the proxy's modules lie, and those of the tools that it imports."""
_SEGMENT_BYTES: Final = 64 * MIB
_HTTP_OK: Final = 200
_SOCKET_SECONDS: Final = 120
_HEAD_MAX_BYTES: Final = 65536
_PROXY_SCRIPT: Final = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from s3_proxy import FaultProxy, Operation, Plan, Toxic
import uvloop

class Counting(FaultProxy):
    blob_requests = 0
    def decide(self, asked):
        self.blob_requests += "/blobs/" in f"/{asked.key}"
        return super().decide(asked)

async def main():
    loop, commands = asyncio.get_running_loop(), asyncio.StreamReader()
    loop.set_exception_handler(lambda *_: None)  # uvloop's complaints of clients that have hung up
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async with Counting(sys.argv[2], int(sys.argv[3])) as proxy:
        print(proxy.port, flush=True)
        while line := await commands.readline():
            asked = json.loads(line)
            if "toxics" in asked:
                asked["toxics"] = [Toxic[name] for name in asked["toxics"]]
                asked["operations"] = frozenset(Operation[name] for name in asked.pop("operations", ()))
                proxy.plan = Plan(**asked)
            print(json.dumps({**proxy.record(), "blob_requests": proxy.blob_requests}), flush=True)

uvloop.run(main())
"""


def end_in_order() -> None:
    """From here on SIGTERM ends this process as an exception does: what it has started ends with it, and its folders go."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@dataclass(frozen=True, slots=True)
class Gateway:
    """An S3 server, and a bucket of it for kvobj nodes and one for direct requests."""

    server: RemoteTarget | ServerProcess
    nodes: str = "nodes"
    direct: str = "direct"

    def tier(self, prefix: str, *, port: int | None = None, **more: str) -> dict[str, str]:
        """The lines of a node's remote tier under a prefix of its own; `port`: through a proxy. Values are TOML."""
        pair = self.server.credentials()
        return {
            "endpoint": f'"http://{self.server.host}:{port or self.server.port}"',
            "bucket": f'"{self.nodes}"',
            "prefix": f'"{prefix}/"',
            "access_key": f'"{pair.access_key}"',
            "secret_key": f'"{pair.secret_key}"',
            **more,
        }

    def settings(self) -> RemoteSettings:
        """The nodes' bucket as code asks for it, without a server's process."""
        pair = self.server.credentials()
        endpoint = f"http://{self.server.host}:{self.server.port}"
        return RemoteSettings(endpoint, self.nodes, pair.access_key, pair.secret_key)


@contextmanager
def gateway(directory: Path, *, store_bytes: int) -> Iterator[Gateway]:
    """A radosgw of our own, which keeps its objects in memory. RuntimeError, TimeoutError as `radosgw_server`."""
    with radosgw_server(directory, store_bytes=store_bytes, options=GATEWAY_OPTIONS) as server:
        made = Gateway(server)
        with RawS3(server.host, server.port, server.credentials()) as raw:
            for bucket in (made.nodes, made.direct):
                if raw.request("PUT", f"/{bucket}", payload=None).status != _HTTP_OK:
                    raise RuntimeError(f"the bucket {bucket} was refused")
        yield made


class ProxyProcess:
    """The fault proxy of the tests (`tests/faults/s3_proxy.py`) in a process of its own: it takes the client no time."""

    def __init__(self, host: str, port: int) -> None:
        command = [sys.executable, "-c", _PROXY_SCRIPT, json.dumps(_PROXY_PATHS), host, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            with self._process:  # a process nobody waits for would be a complaint of its own, in a later test
                self._process.kill()
            raise RuntimeError("the proxy did not start")
        self.port = int(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:  # closes the pipes and waits
            self._process.terminate()

    def plan(self, *toxics: str, rate: float = 0.0, operations: Sequence[str] = (), **more: float) -> None:
        """What it does from now on: names of `Toxic` and `Operation`, the rest as in `Plan`; nothing: all is well."""
        self._ask({"toxics": list(toxics), "rate": rate, "operations": list(operations), **more})

    def record(self) -> dict[str, Any]:
        """Requests by operation, what was done to them, and `blob_requests`: those that were about blobs."""
        return self._ask({})

    def _ask(self, asked: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def node_settings(tier: Mapping[str, str], buckets: Sequence[BucketSetting], **more: Any) -> ServerSettings:  # noqa: ANN401 - fields of the settings
    """A small node in front of the remote: what it is given beyond its tiers' sizes is the same in every tool."""
    settings = ServerSettings(
        buckets=tuple(buckets),
        remote=dict(tier),
        nvme_segment_bytes=_SEGMENT_BYTES,
        sections={"log": {"requests": "false"}},
        workers=1,
    )
    return replace(settings, **more)


@contextmanager
def running_node(directory: Path, settings: ServerSettings) -> Iterator[ServerProcess]:
    """The node, once its arena is populated and it has claimed its prefix."""
    with own_server(directory, settings) as server:
        deadline = time.monotonic() + 30
        while remote_of(server)["claim"] != "claimed":
            if time.monotonic() > deadline:
                raise TimeoutError("the node did not claim its prefix")
            time.sleep(0.1)
        yield server


def remote_of(server: ServerProcess) -> dict[str, Any]:
    """What `status` says of the remote."""
    found: dict[str, Any] = server.status()["remote"]
    return found


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole exchange: when the first byte of the body was there and when the last, in seconds from the request's first byte."""

    status: int
    headers: Mapping[str, str]
    body_bytes: int
    first_seconds: float
    seconds: float

    @property
    def tier(self) -> str:
        """Where kvobj had the object from."""
        return self.headers.get("x-kvobj-tier", "")


class TimedConnection:
    """One blocking connection that receives into memory that is there already. For one thread. RuntimeError for what is no 200."""

    def __init__(self, port: int, largest_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_SOCKET_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)
        seconds = _SOCKET_SECONDS.to_bytes(8, "little") + bytes(8)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        self._room = prefaulted(largest_bytes + _HEAD_MAX_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def exchange(self, head: bytes, body: memoryview | bytes = b"") -> Reply:
        """Send a prepared request, receive the whole reply."""
        started = time.perf_counter()
        self._socket.sendall(head)
        if body:
            self._socket.sendall(body)
        filled, end, first = 0, -1, 0.0
        while end < 0:
            filled += self._more(filled, len(self._room))
            end = bytes(self._room[: min(filled, _HEAD_MAX_BYTES)]).find(b"\r\n\r\n")
        status, headers = _parsed(bytes(self._room[:end]))
        length = int(headers.get("content-length", "0"))
        if filled > end + 4:
            first = time.perf_counter() - started
        while filled < end + 4 + length:
            filled += self._more(filled, end + 4 + length)
            first = first or time.perf_counter() - started
        seconds = time.perf_counter() - started
        if status != _HTTP_OK:
            raise RuntimeError(f"refused status={status} {bytes(self._room[end : end + 4 + min(length, 400)])!r}")
        return Reply(status, headers, length, first or seconds, seconds)

    def _more(self, filled: int, until: int) -> int:
        count = self._socket.recv_into(self._room[filled:until])
        if not count:
            raise ConnectionError("the server closed the connection")
        return count


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split(" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs}


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
