"""How fast chunks are condemned, claimed and reaped, on an idle store and beside GETs, and what GETs lose by it.

The store is filled, all of it written down, and what the fill left to do waited for: until the server takes no processor time any
more and the kernel has the files on disk. Then the namespace gets a quota, so that policy wants what is above it gone. Idle: all
chunks but one, chunks a second from the quota to the last blob, the grace time included. Under load: connections GET objects of an
ordinary bucket as fast as they can, while a portion of the chunks is removed at a time (`--rounds`), with GETs alone before, in
between and after, about as long as a portion takes. What a round loses is told by the GETs right before and after it, since the
machine's pace changes from one second to the next; the loss is the median of the rounds. Many short rounds tell the same as few
long ones and differ less from run to run; a portion should last three seconds or so (`--chunks` by `--rounds` by `--rate`), since
its beginning, a grace time without claims, counts in its rate. Targets are those of `docs/benchmarks.md`.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from bench_match import Figure, show
from bench_support import MIB, ServerProcess, settle, wait_until
from command_line import Parser, amount, one_or_more, output_file, run_tool
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


@dataclass(frozen=True, slots=True)
class Round:
    """A portion removed beside GETs: how fast, and GETs a second meanwhile and without, right before and after."""

    chunks_per_second: float
    gets_meanwhile: float
    gets_alone: float

    @property
    def loss_percent(self) -> float:
        """What GETs lose."""
        return 100 * (1 - self.gets_meanwhile / self.gets_alone)


def remove(bench: Bench, *, left: int, patience_seconds: float) -> Reaping:
    """Give the namespace a quota of so many chunks, and wait until policy has removed the others and the last blob is reaped."""
    server = bench.server
    before = server.status()["gc"]["claimed_chunks"]
    began = time.monotonic()
    declare(bench.client, quota={"chunks": left})

    def is_done() -> bool:
        status = server.status()
        blobs = sum(tier["blobs"] for tier in status["tiers"] if tier["is_home"])
        return blobs <= _HOT_OBJECTS + left and not status["queues"]["delete"]

    wait_until(is_done, timeout_seconds=patience_seconds, what="the collector", pause_seconds=_POLL_SECONDS)
    ended = time.monotonic()
    declare(bench.client, quota=None)
    return Reaping(began, ended, int(server.status()["gc"]["claimed_chunks"] - before))


def watch(server: ServerProcess, seconds: float) -> None:
    """Ask for the status as often as `remove` does, which costs the server something too: what GETs lose is to gc alone."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        server.status()
        time.sleep(_POLL_SECONDS)


def refill(bench: Bench, *, chunks: int, length: int, chunk_bytes: int, first: int) -> None:
    """Fill the store, have all of it written down, and wait until it is idle: nothing of the fill is left to do."""
    chains = -(-chunks // length)
    fill(bench, chains=chains, length=length, chunk_bytes=chunk_bytes, first=first, durability="local")
    wait_until(
        lambda: not bench.server.status()["queues"]["write_behind"],
        timeout_seconds=600,
        what="everything to be written down",
        pause_seconds=_POLL_SECONDS,
    )
    os.sync()
    settle(bench.server)


def beside_gets(
    bench: Bench, getters: Getters, *, chunks: int, rounds: int, baseline_seconds: float, patience_seconds: float
) -> list[Round]:
    """Remove the chunks in so many portions, with GETs alone before, after and in between."""
    spans: list[tuple[float, float]] = []
    portions: list[Reaping] = []

    def alone() -> None:
        began = time.monotonic()
        watch(bench.server, baseline_seconds)
        spans.append((began, time.monotonic()))

    alone()
    for number in range(1, rounds + 1):
        left = max(1, chunks - chunks * number // rounds)
        portions.append(remove(bench, left=left, patience_seconds=patience_seconds))
        alone()
    without = [getters.rate(*span) for span in spans]
    return [
        Round(portion.chunks_per_second, getters.rate(portion.began, portion.ended), (before + after) / 2)
        for portion, before, after in zip(portions, without, without[1:], strict=False)
    ]


@contextmanager
def _connection(server: ServerProcess) -> Iterator[SignedConnection]:
    keys = server.credentials()
    with SignedConnection(Endpoint.parse(server.endpoint), Credentials(keys.access_key, keys.secret_key)) as connection:
        yield connection


def main() -> int:
    """Fill, measure, report."""
    parser = Parser(__doc__)
    parser.add_argument("--chunks", type=one_or_more, default=100_000)
    parser.add_argument("--length", type=one_or_more, default=1000, help="chunks of a chain")
    parser.add_argument("--chunk-bytes", type=one_or_more, default=4096)
    parser.add_argument("--get-bytes", type=one_or_more, default=MIB)
    parser.add_argument("--connections", type=one_or_more, default=2, help="that GET")
    parser.add_argument("--rounds", type=one_or_more, default=16, help="portions that are removed beside GETs")
    parser.add_argument(
        "--baseline-seconds", type=amount, default=2.5, help="GETs alone, before and after each portion"
    )
    parser.add_argument("--rate", type=one_or_more, default=2200, help="[gc] rate")
    parser.add_argument("--patience", type=amount, default=600.0, help="seconds to wait for the collector")
    parser.add_argument("--directory", type=Path, help="where the store goes (default: a temporary directory)")
    parser.add_argument("--json", type=output_file, metavar="FILE")
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
        cpu_seconds = running.server.cpu_seconds()
        idle = remove(running, left=1, patience_seconds=arguments.patience)
        cpu_seconds = running.server.cpu_seconds() - cpu_seconds
        refill(running, **size, first=arguments.chunks)
        getters = Getters(running.server, arguments.connections, arguments.get_bytes)
        time.sleep(_SETTLE_SECONDS)
        rounds = beside_gets(
            running,
            getters,
            chunks=arguments.chunks,
            rounds=arguments.rounds,
            baseline_seconds=arguments.baseline_seconds,
            patience_seconds=arguments.patience,
        )
        getters.stop()
    losses = sorted(each.loss_percent for each in rounds)
    figures = [
        Figure("condemned, claimed and reaped, idle", idle.chunks_per_second, "chunks/s", least=20_000),
        Figure("server CPU a chunk, idle", cpu_seconds / idle.chunks * 1e6, "us"),
        Figure("the same beside GETs", median(each.chunks_per_second for each in rounds), "chunks/s", least=2_000),
        Figure(f"GETs of {arguments.get_bytes:,} B alone", median(each.gets_alone for each in rounds), "/s"),
        Figure("GETs while chunks are removed", median(each.gets_meanwhile for each in rounds), "/s"),
        Figure("GETs lose, median of the rounds", median(losses), "%", most=10),
        Figure("the least and", losses[0], "%"),
        Figure("the most that a round lost", losses[-1], "%"),
        Figure("chunks removed in each run", idle.chunks, ""),
    ]
    return show(f"gc of {arguments.chunks:,} chunks of {arguments.chunk_bytes} B", figures, arguments.json)


if __name__ == "__main__":
    run_tool(main)
