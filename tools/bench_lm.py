"""The `lm://` listener beside `lmcache_server`: one client, the same requests, interleaved rounds, medians, ratios.

The client does what LMCache's connector does on its one socket: a request's head, then the reply's head, then its bytes into a
buffer that is there. Latencies of a GET of 2 KB and 1 MiB, of an EXIST (hit and miss), and of a PUT up to the EXIST that finds it.
The server of LMCache is the one in `.envs/engines` (`make engine-envs`), its storage `cpu`, a dictionary in memory.
Ratios are kvobj's time over LMCache's: below 1 is faster.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench_support import MIB, BucketSetting, ServerSettings, own_server, wait_until
from command_line import Parser, one_or_more, run_tool
from free_ports import free_port
from server_process import REPOSITORY

PUT, GET, EXIST = 1, 2, 3
_SUCCESS: Final = 200
_HEAD: Final = struct.Struct("<9i")
_KEY: Final = "example/Model-8B@1@0@{:016x}@bfloat16"
SIZES: Final = (2048, MIB)
START_SECONDS: Final = 120.0
LMCACHE_SERVER: Final = REPOSITORY / ".envs" / "engines" / "bin" / "lmcache_server"


class LmClient:
    """One blocking connection. Replies whose bytes are not asked for are an error."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._room = bytearray(2 * MIB)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def put(self, key: str, body: bytes) -> None:
        """Head and body in two sends, as LMCache does; there is no reply."""
        self._socket.sendall(_request(PUT, key, len(body)))
        self._socket.sendall(body)

    def exists(self, key: str) -> bool:
        """Whether the chunk is there."""
        self._socket.sendall(_request(EXIST, key))
        return self._head()[0] == _SUCCESS

    def get(self, key: str) -> memoryview | None:
        """The chunk's bytes, in a buffer that the next call overwrites."""
        self._socket.sendall(_request(GET, key))
        code, size_bytes = self._head()
        if code != _SUCCESS:
            return None
        view = memoryview(self._room)[:size_bytes]
        self._fill(view)
        return view

    def _head(self) -> tuple[int, int]:
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        code, size_bytes, *_ = _HEAD.unpack(head)
        return code, size_bytes

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            received = self._socket.recv_into(view[filled:])
            if not received:
                raise ConnectionError("the server ended the connection")
            filled += received


def _request(command: int, key: str, length: int = 0) -> bytes:
    """KV_2LTD of bfloat16, [2, 1, length / 4, 1], which is what makes it a chunk to LMCache."""
    numbers = (command, length, 1, 3, 0, 2, 1, max(1, length // 4), 1)
    return _HEAD.pack(*numbers) + key.encode().ljust(150)


@contextmanager
def kvobj_server(directory: Path) -> Iterator[int]:
    """The port of a listener on a KV bucket of class `memory`."""
    port = free_port()
    section = {"listen": f'"127.0.0.1:{port}"', "bucket": '"bench"'}
    buckets = (BucketSetting("bench", "kv", "memory"),)
    quiet = {"lm": section, "log": {"requests": "false"}}
    with own_server(directory, ServerSettings(dram_bytes=512 * MIB, buckets=buckets, sections=quiet)):
        yield port


@contextmanager
def lmcache_server(directory: Path) -> Iterator[int]:
    """The port of LMCache's own server."""
    port = free_port()
    environment = {**os.environ, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1"}
    with (directory / "lmcache_server.log").open("wb") as log:
        process = subprocess.Popen(
            [str(LMCACHE_SERVER), "127.0.0.1", str(port), "cpu"], env=environment, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _answers(port), timeout_seconds=START_SECONDS, what="lmcache_server to listen")
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def tasks(client: LmClient, bodies: dict[int, bytes], serial: Iterator[int]) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each leaves the connection in step."""

    def stored(size_bytes: int) -> None:
        key = _KEY.format((1 << 60) + next(serial))
        client.put(key, bodies[size_bytes])
        if not client.exists(key):
            raise RuntimeError("a PUT was lost")

    def got(size_bytes: int) -> None:
        if client.get(_KEY.format(size_bytes)) is None:
            raise RuntimeError("a chunk was lost")

    return {
        "GET 2 KB": lambda: got(SIZES[0]),
        "GET 1 MiB": lambda: got(SIZES[1]),
        "EXIST, a hit": lambda: client.exists(_KEY.format(SIZES[0])),
        "EXIST, a miss": lambda: client.exists(_KEY.format(7)),
        "PUT 2 KB, then EXIST": lambda: stored(SIZES[0]),
        "PUT 1 MiB, then EXIST": lambda: stored(SIZES[1]),
    }


def run(rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median microseconds of each task, by server."""
    directory = Path(tempfile.mkdtemp(prefix="kvobj-bench-"))
    bodies = {size: os.urandom(size) for size in SIZES}
    serial = iter(range(10**9))
    samples: dict[str, dict[str, list[float]]] = {}
    try:
        with ExitStack() as stack:
            ports = {
                "kvobj": stack.enter_context(kvobj_server(directory / "kvobj")),
                "lmcache_server": stack.enter_context(lmcache_server(directory)),
            }
            clients = {name: LmClient(port) for name, port in ports.items()}
            for client in clients.values():
                stack.callback(client.close)
                for size, body in bodies.items():
                    client.put(_KEY.format(size), body)
                    if bytes(client.get(_KEY.format(size)) or b"") != body:
                        raise RuntimeError("what came back is not what was put")
            work = {name: tasks(client, bodies, serial) for name, client in clients.items()}
            for number in range(rounds):
                names = list(work) if number % 2 else list(reversed(work))
                for task in work[names[0]]:
                    for name in names:
                        times = samples.setdefault(task, {}).setdefault(name, [])
                        for _ in range(repeats):
                            started = time.perf_counter()
                            work[name][task]()
                            times.append(time.perf_counter() - started)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        task: {name: statistics.median(times) * 1e6 for name, times in both.items()} for task, both in samples.items()
    }


def main() -> int:
    """Run and print; 1 where a GET of 2 KB is not faster than LMCache's own."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=one_or_more, default=8)
    parser.add_argument("--repeats", type=one_or_more, default=10, help="of each task in each round")
    arguments = parser.parse_args()
    if not LMCACHE_SERVER.exists():
        print("lmcache_server is not installed: make engine-envs", file=sys.stderr)
        return 2
    figures = run(arguments.rounds, arguments.repeats)
    print(f"{'request':24}{'kvobj':>12}{'lmcache_server':>18}{'ratio':>9}")
    for task, values in figures.items():
        ratio = values["kvobj"] / values["lmcache_server"]
        print(f"{task:24}{values['kvobj']:>9.0f} µs{values['lmcache_server']:>15.0f} µs{ratio:>9.2f}")
    print(json.dumps({"machine": platform.machine(), "cores": os.cpu_count(), "microseconds": figures}))
    small = figures["GET 2 KB"]
    return 0 if small["kvobj"] < small["lmcache_server"] else 1


if __name__ == "__main__":
    run_tool(main)
