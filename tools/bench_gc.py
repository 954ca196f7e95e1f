"""How fast chunks are condemned, claimed and reaped, on an idle store and beside GETs, and what GETs lose by it.

The store is filled and written down; then the namespace gets a quota of one chunk, so that policy wants all others gone. Idle:
chunks a second from the quota to the last blob. Under load: the same while connections GET objects of an ordinary bucket
as fast as they can, against what these GETs reach before and after in the same process. Targets are those of issue 4.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench_match import Figure, show
from bench_support import MIB, ServerProcess, wait_until
from kv_bench_support import Bench, bench, declare, fill

from kvobj.client import Credentials, Endpoint, S3Client, SignedConnection

HOT_BUCKET: Final = "hot"
_POLL_SECONDS: Final = 0.1
_SETTLE_SECONDS: Final = 2.0
_HOT_OBJECTS: Final = 16


@dataclass(frozen=True, slots=True)
class Reaping:
    """When the collector worked, to a poll's length, and how much it removed. Times are monotonic."""

    began: float
    ended: float
    chunks: int

    @property
    def chunks_per_second(self) -> float:
        """From the order to the last blob."""
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


def remove_all(bench: Bench, *, patience_seconds: float) -> Reaping:
    """Give the namespace a quota of one chunk, and wait until policy has removed the others and the last blob is reaped."""
    server = bench.server
    before = server.status()["gc"]["claimed_chunks"]
    began = time.monotonic()
    declare(bench.client, quota={"chunks": 1})

    def is_done() -> bool:
        status = server.status()
        blobs = sum(tier["blobs"] for tier in status["tiers"] if tier["is_home"])
        return blobs <= _HOT_OBJECTS + 1 and not status["queues"]["delete"]

    wait_until(is_done, timeout_seconds=patience_seconds, what="the collector", pause_seconds=_POLL_SECONDS)
    ended = time.monotonic()
    declare(bench.client, quota=None)
    return Reaping(began, ended, int(server.status()["gc"]["claimed_chunks"] - before))


def watch(server: ServerProcess, seconds: float) -> None:
    """Ask for the status as often as `remove_all` does, which costs the server something too: what GETs lose is to gc alone."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        server.status()
        time.sleep(_POLL_SECONDS)


def refill(bench: Bench, *, chunks: int, length: int, chunk_bytes: int, first: int) -> None:
    """Fill the store, have all of it written down, and wait until GETs and HEADs hold nothing any more."""
    chains = -(-chunks // length)
    fill(bench, chains=chains, length=length, chunk_bytes=chunk_bytes, first=first, durability="local")
    wait_until(
        lambda: not bench.server.status()["queues"]["write_behind"],
        timeout_seconds=600,
        what="everything to be written down",
        pause_seconds=_POLL_SECONDS,
    )


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
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for the collector")
    parser.add_argument("--directory", type=Path, help="where the store goes (default: a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    store_bytes = arguments.chunks * (arguments.chunk_bytes + 8192)
    times = {"grace": '"100 ms"', "sweep_interval": '"1 s"', "rate": str(arguments.rate), "scrub_rate": '"0 B"'}
    size = {"chunks": arguments.chunks, "length": arguments.length, "chunk_bytes": arguments.chunk_bytes}
    with (
        tempfile.TemporaryDirectory(prefix="kvobj-bench-", dir=arguments.directory) as directory,
        bench(
            Path(directory),
            dram_bytes=max(256 * MIB, 2 * store_bytes),
            nvme_bytes=max(1024 * MIB, 3 * store_bytes),
            gc=times,
        ) as running,
    ):
        with _connection(running.server) as connection:
            client = S3Client(connection)
            client.create_bucket(HOT_BUCKET)
            for number in range(_HOT_OBJECTS):
                client.put(HOT_BUCKET, str(number), bytes(arguments.get_bytes))
        refill(running, **size, first=0)
        idle = remove_all(running, patience_seconds=arguments.patience)
        refill(running, **size, first=arguments.chunks)
        getters = Getters(running.server, arguments.connections, arguments.get_bytes)
        time.sleep(_SETTLE_SECONDS)
        started = time.monotonic()
        watch(running.server, arguments.baseline_seconds)
        busy = remove_all(running, patience_seconds=arguments.patience)
        watch(running.server, arguments.baseline_seconds)
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
