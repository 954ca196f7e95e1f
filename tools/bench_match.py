"""?match of a long chain in a large catalog, beside one HEAD for each chunk, and what renewing many sessions costs.

Fills a store through ?mput, then measures: server time (from the server's own log) and client time of a match of 4,096 ids, without
a pin, with one, and with the details of all chunks; HEAD of the same chunks, one after the other and by several at once, which
is what engines do on S3; CPU of the server while 2,000 sessions renew every ten seconds, less what it takes when nobody asks,
and CPU of renewals one after the other. Targets are those of `docs/benchmarks.md`; figures without one are only shown.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from bench_support import MIB, ServerProcess, signed, wait_until
from command_line import Parser, above_zero, one_or_more, output_file, run_tool, zero_or_more
from kv_bench_support import BUCKET, Bench, bench, chain, client_of, fill, log_end, logged_milliseconds
from load_client import Load, hardware, run_load
from rich.console import Console
from rich.table import Table

from kvobj.client import KvClient
from kvobj.client.pin_ledger import Statement, digest_of_pins

PINS_A_SESSION: Final = 4
_RENEWERS: Final = 4
_KEEP_PINS: Final = 512


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result, with the most or the least that it should be."""

    name: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the target is reached, true where there is none."""
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def target(self) -> str:
        """The target and whether it is reached, for people."""
        if self.most is None and self.least is None:
            return ""
        bound = f"at most {self.most:,g}" if self.most is not None else f"at least {self.least:,g}"
        return f"{bound}: {'met' if self.is_met else 'MISSED'}"


def measure_matches(bench: Bench, ids: Sequence[bytes], rounds: int) -> list[Figure]:
    """Matches of the whole list in three ways, interleaved."""
    session = bench.client.open_session(holder="bench", ttl_ms=600_000).session
    ways: dict[str, Callable[[], object]] = {
        "match": lambda: bench.client.match(namespace=bench.namespace, ids=ids),
        "match with pin": lambda: bench.client.match(namespace=bench.namespace, ids=ids, session=session),
        "match with details": lambda: bench.client.match(namespace=bench.namespace, ids=ids, detail=True),
    }
    targets = {"match with pin": 1.0, "match with details": 8.0}
    client_ms: dict[str, list[float]] = {name: [] for name in ways}
    server_ms: dict[str, list[float]] = {name: [] for name in ways}
    for name, call in ways.items():
        call()
        since = log_end(bench.server)
        for _ in range(min(rounds, _KEEP_PINS)):
            began = time.perf_counter()
            call()
            client_ms[name].append((time.perf_counter() - began) * 1e3)
        wanted = len(client_ms[name])
        wait_until(
            lambda: len(logged_milliseconds(bench.server, since, "POST", "?match")) >= wanted,  # noqa: B023 - within the round
            timeout_seconds=10,
            what="the log",
        )
        server_ms[name] = logged_milliseconds(bench.server, since, "POST", "?match")
    bench.client.close_session(session)
    figures: list[Figure] = []
    for name in ways:
        figures.append(Figure(f"{name}, server p50", median(server_ms[name]), "ms", targets.get(name)))
        figures.append(Figure(f"{name}, client p50", median(client_ms[name]), "ms"))
    return figures


def measure_heads(bench: Bench, ids: Sequence[bytes], sample: int) -> list[Figure]:
    """HEAD of each chunk: what a sample costs, as if all were asked for."""
    server = bench.server
    heads = tuple(signed(server, "HEAD", f"/{BUCKET}/{each.hex()}") for each in ids[:sample])
    one = run_load([_heads(server, heads)])
    many = 4
    share = max(1, len(heads) // many)
    parallel = run_load([_heads(server, heads[at * share : (at + 1) * share]) for at in range(many)])
    scale = len(ids) * 1e3
    return [
        Figure(
            f"one HEAD for each of {len(ids):,} chunks, one after the other", scale / one.operations_per_second, "ms"
        ),
        Figure(f"the same, {many} at once", scale / parallel.operations_per_second, "ms"),
    ]


def _heads(server: ServerProcess, heads: tuple[bytes, ...]) -> Load:
    return Load(port=server.port, heads=heads, protocol="head")


def measure_renewals(bench: Bench, sessions: int, period: float, seconds: float) -> list[Figure]:
    """CPU of the server while so many sessions with pins renew once a period, spread evenly."""
    server, client = bench.server, bench.client
    tail = [chain(bench.namespace, 0, 1)[0]]
    opened: list[tuple[bytes, Statement]] = []

    def open_one(_: int) -> None:
        session = client.open_session(holder="renewer", ttl_ms=600_000).session
        answer = client.pin_tails(session, tail * PINS_A_SESSION, namespace=bench.namespace)
        pins = sorted(each.pin for each in answer.pins if each.pin is not None)
        opened.append((session, Statement(answer.grant, len(pins), digest_of_pins(pins), ())))

    with ThreadPoolExecutor(_RENEWERS) as pool:
        list(pool.map(open_one, range(sessions)))
    idle = _cpu_share(server, min(seconds, 5.0))
    mismatches: list[int] = []

    def renew_all(client: KvClient, first: int) -> None:
        began = time.monotonic()
        for number in range(first, int(seconds / period * sessions), _RENEWERS):
            due = began + number * period / sessions
            time.sleep(max(0.0, due - time.monotonic()))
            session, statement = opened[number % sessions]
            if client.renew_session(session, statement).reclaim:
                mismatches.append(number)

    clients = [client_of(server) for _ in range(_RENEWERS)]
    threads = [
        threading.Thread(target=renew_all, args=(each, number), daemon=True) for number, each in enumerate(clients)
    ]
    began, cpu = time.monotonic(), server.cpu_seconds()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, used = time.monotonic() - began, server.cpu_seconds() - cpu
    hot = 5 * sessions
    cpu = server.cpu_seconds()
    for number in range(hot):
        client.renew_session(*opened[number % sessions])
    hot_cpu = (server.cpu_seconds() - cpu) / hot
    for each in clients:
        each.close()
    if mismatches:
        raise RuntimeError(f"{len(mismatches)} renewals were answered with reclaim")
    renewals = int(seconds / period * sessions)
    share = used / took - idle
    rate = renewals / took
    return [
        Figure(f"{sessions:,} sessions renewing every {period:g} s: CPU of one core", share * 100, "%", 5.0),
        Figure("renewals a second that were reached", rate, "/s"),
        Figure("CPU of one renewal", share / rate * 1e6, "µs"),
        Figure("the same, one right after the other", hot_cpu * 1e6, "µs"),
        Figure("CPU while nobody asks", idle * 100, "%"),
    ]


def _cpu_share(server: ServerProcess, seconds: float) -> float:
    began, cpu = time.monotonic(), server.cpu_seconds()
    time.sleep(seconds)
    return (server.cpu_seconds() - cpu) / (time.monotonic() - began)


def show(title: str, figures: Sequence[Figure], json_path: Path | None) -> int:
    """Print, write, judge."""
    table = Table("what", "value", "target", title=title)
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:,.3f} {figure.unit}", figure.target)
    Console(width=120).print(table)
    if json_path is not None:
        record = {"title": title, "hardware": hardware(), "figures": [asdict(figure) for figure in figures]}
        json_path.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(figure.is_met for figure in figures) else 1


def main() -> int:
    """Fill, measure, report."""
    parser = Parser(__doc__)
    parser.add_argument("--chunks", type=one_or_more, default=1_000_000)
    parser.add_argument("--length", type=one_or_more, default=4096, help="chunks of a chain")
    parser.add_argument("--chunk-bytes", type=one_or_more, default=64)
    parser.add_argument("--rounds", type=one_or_more, default=200)
    parser.add_argument("--heads", type=zero_or_more, default=4096, help="HEADs that are measured")
    parser.add_argument("--sessions", type=zero_or_more, default=2000)
    parser.add_argument("--period", type=above_zero, default=10.0, help="seconds between two renewals of a session")
    parser.add_argument("--renew-seconds", type=above_zero, default=20.0, help="how long renewals are measured")
    parser.add_argument("--dram-mib", type=one_or_more, help="default: room for all chunks, twice")
    parser.add_argument("--directory", type=Path, help="where the store goes (default: a temporary directory)")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    chains = -(-arguments.chunks // arguments.length)
    page_bytes = -(-(arguments.chunk_bytes + 1024) // 4096) * 4096
    dram_bytes = (arguments.dram_mib or max(256, 2 * arguments.chunks * page_bytes // MIB)) * MIB
    nvme_bytes = max(1024 * MIB, 2 * arguments.chunks * page_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="kvobj-bench-", dir=arguments.directory) as directory,
        bench(Path(directory), dram_bytes=dram_bytes, nvme_bytes=nvme_bytes, gc={}) as running,
    ):
        seconds = fill(running, chains=chains, length=arguments.length, chunk_bytes=arguments.chunk_bytes)
        chunks = chains * arguments.length
        wait_until(
            lambda: not running.server.status()["queues"]["write_behind"],
            timeout_seconds=1800,
            what="everything to be written down",
            pause_seconds=0.5,
        )
        ids = chain(running.namespace, chains // 2, arguments.length)
        figures = [
            Figure(f"?mput of {chunks:,} chunks of {arguments.chunk_bytes} B", chunks / seconds, "chunks/s"),
            *measure_matches(running, ids, arguments.rounds),
            *measure_heads(running, ids, arguments.heads),
            *measure_renewals(running, arguments.sessions, arguments.period, arguments.renew_seconds),
        ]
    title = f"?match of {arguments.length:,} ids in a catalog of {chunks:,} chunks"
    return show(title, figures, arguments.json)


if __name__ == "__main__":
    run_tool(main)
