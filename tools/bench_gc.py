"""How fast chunks are condemned, claimed and reaped, on an idle store and beside GETs, and what GETs lose by it.

The store is filled, written down and started again with a short `[gc] chunk_ttl`, so that policy wants everything gone. Idle:
chunks a second from the first mark to the last blob. Under load: the same while connections GET objects of an ordinary
bucket as fast as they can, against what these GETs reach before and after in the same process. Targets are those of issue 4.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench_match import Figure, show
from bench_support import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until
from kv_bench_support import BUCKET, Bench, client_of, declare, fill

from kvobj.client import Credentials, Endpoint, S3Client, SignedConnection

HOT_BUCKET: Final = "hot"
_POLL_SECONDS: Final = 0.1
_SETTLE_SECONDS: Final = 5.0
_HOT_OBJECTS: Final = 16


@dataclass(frozen=True, slots=True)
class Reaping:
    """When the collector worked, and how much it removed. Times are monotonic."""

    began: float
    ended: float
    chunks: int

    @property
    def chunks_per_second(self) -> float:
        """From the first mark to the last blob."""
        return self.chunks / (self.ended - self.began)


class Getters:
    """Connections that GET the hot objects until they are stopped; when each reply had come, by `time.monotonic`."""

    def __init__(self, server: ServerProcess, count: int, size_bytes: int) -> None:
        self._server = server
        self._size_bytes = size_bytes
        self._stop = threading.Event()
        self._times: list[list[float]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._get, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _get(self, number: int) -> None:
        buffer = memoryview(bytearray(self._size_bytes))
        at = number
        with _connection(self._server) as connection:
            while not self._stop.is_set():
                with connection.open("GET", f"/{HOT_BUCKET}/{at % _HOT_OBJECTS}") as answer:
                    answer.readinto(buffer)
                self._times[number].append(time.monotonic())
                at += 1

    def rate(self, began: float, ended: float) -> float:
        """GETs a second within a span."""
        done = sum(bisect_left(times, ended) - bisect_left(times, began) for times in self._times)
        return done / (ended - began)

    def stop(self) -> None:
        """End them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def figures_of(server: ServerProcess) -> dict[str, Any]:
    """What gc tells of itself."""
    figures: dict[str, Any] = server.status()["gc"]
    return figures


def watch(server: ServerProcess, *, timeout_seconds: float) -> Reaping:
    """Wait until policy has removed every chunk and the last blob is reaped."""
    deadline = time.monotonic() + timeout_seconds
    first = figures_of(server)
    began = ended = 0.0
    while time.monotonic() < deadline:
        now, figures = time.monotonic(), figures_of(server)
        if not began and figures["condemned_chunks"] > first["condemned_chunks"]:
            began = now
        status = server.status()
        usage = sum(tier["blobs"] for tier in status["tiers"] if tier["is_home"])
        if began and usage <= _HOT_OBJECTS and not status["queues"]["delete"]:
            ended = time.monotonic()
            break
        time.sleep(_POLL_SECONDS)
    else:
        raise RuntimeError(f"the collector did not end: {figures_of(server)}")
    return Reaping(began, ended, int(figures_of(server)["claimed_chunks"] - first["claimed_chunks"]))


def refill(server: ServerProcess, *, chunks: int, length: int, chunk_bytes: int, first: int) -> None:
    """Fill the store and write all of it down, while nothing expires; then stop."""
    with client_of(server) as client:
        bench = Bench(server, client, declare(client))
        fill(bench, chains=-(-chunks // length), length=length, chunk_bytes=chunk_bytes, first=first)
    server.admin("POST", "/api/v1/flush")
    wait_until(
        lambda: not server.status()["queues"]["write_behind"], timeout_seconds=600, what="everything to be written down"
    )
    server.terminate(timeout_seconds=300)


def restart(server: ServerProcess, gc: dict[str, str]) -> None:
    """Start it again with other times."""
    server.settings = replace(server.settings, sections={"gc": gc})
    server.start(timeout_seconds=300)


@contextmanager
def _connection(server: ServerProcess) -> Iterator[SignedConnection]:
    keys = server.credentials()
    with SignedConnection(Endpoint.parse(server.endpoint), Credentials(keys.access_key, keys.secret_key)) as connection:
        yield connection


def main() -> int:
    """Fill, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=1000, help="chunks of a chain")
    parser.add_argument("--chunk-bytes", type=int, default=4096)
    parser.add_argument("--get-bytes", type=int, default=MIB)
    parser.add_argument("--connections", type=int, default=2, help="that GET")
    parser.add_argument("--baseline-seconds", type=float, default=10.0, help="GETs alone, before and after")
    parser.add_argument("--rate", type=int, default=2500, help="[gc] rate")
    parser.add_argument("--directory", type=Path, help="where the store goes (default: a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    store_bytes = arguments.chunks * (arguments.chunk_bytes + 8192)
    times = {"grace": '"1 s"', "sweep_interval": '"1 s"', "rate": str(arguments.rate), "scrub_rate": '"0 B"'}
    settings = ServerSettings(
        dram_bytes=max(256 * MIB, 2 * store_bytes),
        nvme_bytes=max(1024 * MIB, 3 * store_bytes),
        buckets=(BucketSetting(BUCKET, kind="kv", durability="memory"), BucketSetting(HOT_BUCKET)),
        sections={"gc": times},
    )
    size = {"chunks": arguments.chunks, "length": arguments.length, "chunk_bytes": arguments.chunk_bytes}
    with (
        tempfile.TemporaryDirectory(prefix="kvobj-bench-", dir=arguments.directory) as directory,
        ServerProcess(Path(directory), settings) as server,
    ):
        with _connection(server) as connection:
            client = S3Client(connection)
            for number in range(_HOT_OBJECTS):
                client.put(HOT_BUCKET, str(number), bytes(arguments.get_bytes))
        refill(server, **size, first=0)
        restart(server, {**times, "chunk_ttl": '"1 s"'})
        idle = watch(server, timeout_seconds=600)
        server.terminate(timeout_seconds=300)
        restart(server, times)
        refill(server, **size, first=arguments.chunks)
        restart(server, {**times, "chunk_ttl": f'"{arguments.baseline_seconds + _SETTLE_SECONDS} s"'})
        getters = Getters(server, arguments.connections, arguments.get_bytes)
        time.sleep(_SETTLE_SECONDS)
        started = time.monotonic()
        busy = watch(server, timeout_seconds=600)
        time.sleep(arguments.baseline_seconds)
        ended = time.monotonic()
        getters.stop()
        before, after = getters.rate(started, busy.began), getters.rate(busy.ended, ended)
        meanwhile = getters.rate(busy.began, busy.ended)
    alone = (before + after) / 2
    figures = [
        Figure("condemned, claimed and reaped, idle", idle.chunks_per_second, "chunks/s", least=20_000),
        Figure("the same beside GETs", busy.chunks_per_second, "chunks/s", least=2_000),
        Figure(f"GETs of {arguments.get_bytes:,} B before and after", alone, "/s"),
        Figure("GETs while chunks are removed", meanwhile, "/s"),
        Figure("GETs lose", 100 * (1 - meanwhile / alone), "%", most=10),
        Figure("chunks removed in each run", idle.chunks, ""),
    ]
    return show(f"gc of {arguments.chunks:,} chunks of {arguments.chunk_bytes} B", figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
