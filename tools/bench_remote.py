"""kvobj's way to a remote S3 server beside awscrt's own S3 client and plain aiobotocore: one radosgw, alternating, medians of
rounds.

GET and PUT of 8 and 32 MiB with 1 and 4 at a time, between memory and a Ceph RADOS Gateway that keeps its objects in memory, all on
one machine: the clients' copies and hashes are paid for with the server's own cores. kvobj checks each body by this server's ETag,
its MD5 sum; awscrt sends UNSIGNED-PAYLOAD and nothing is checked. `--stalls`: the same reads through a proxy that
stalls 2 % of the requests for 2 s, with hedging and without. Exits 1 if a target is missed, 2 where radosgw is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import secrets
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop
from bench_support import MIB, Row, medians, report
from command_line import Parser, above_zero, one_or_more, output_file, run_tool
from radosgw_server import require_radosgw
from remote_clients import BotoMover, CrtMover, KvobjMover, Mover
from remote_nodes import ProxyProcess, gateway
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvobj.config import RemoteSettings

SIZES: Final = (8 * MIB, 32 * MIB)
OPERATIONS: Final = ("get", "put")
WIDTHS: Final = (1, 4)
SHARE_OF_CRT: Final = 0.9
STALLED_TAIL: Final = 0.5  # p99 of the healthy over p99 with stalls and hedging: within twice
_QUANTILE: Final = 0.99


@dataclass(slots=True)
class Bench:
    """What is measured, memory for the bodies, and the figures so far: one dictionary a round."""

    movers: dict[str, Mover]
    seconds: float
    operations: Sequence[str]
    memory: list[memoryview]
    rounds: list[dict[str, float]] = field(default_factory=list)
    serials: Iterator[int] = field(default_factory=count)

    def name(self, operation: str, size: int, width: int) -> str:
        """What a measurement is called."""
        return f"{operation} {size // MIB} MiB x{width}"


async def measure(bench: Bench, who: str, operation: str, size: int, width: int) -> float:
    """Bytes a second, of as many as fit into the time."""
    mover = bench.movers[who]
    moved = 0
    until = time.perf_counter() + bench.seconds

    async def one(number: int) -> None:
        nonlocal moved
        view = bench.memory[number][:size]
        while True:
            if operation == "get":
                await mover.get(f"get-{size}", view)
            else:
                await mover.put(f"put-{who}-{number}-{next(bench.serials) % 4}", view)
            moved += size
            if time.perf_counter() > until:
                return

    started = time.perf_counter()
    await asyncio.gather(*[one(number) for number in range(width)])
    return moved / (time.perf_counter() - started)


async def run_rounds(bench: Bench, rounds: int, console: Console) -> None:
    """Everything `rounds` times, each measurement with one client after the other."""
    for index in range(rounds):
        console.print(f"round {index + 1} of {rounds}")
        bench.rounds.append({})
        for size, operation, width in product(SIZES, bench.operations, WIDTHS):
            for who in bench.movers:
                rate = await measure(bench, who, operation, size, width)
                bench.rounds[-1][f"{who} {bench.name(operation, size, width)}"] = rate


def rows_of(bench: Bench) -> list[Row]:
    """Medians as rows."""
    figures = medians(bench.rounds)
    return [
        Row(
            name=bench.name(operation, size, width),
            value=figures[f"kvobj {bench.name(operation, size, width)}"] / 1e9,
            limit=figures[f"{limit} {bench.name(operation, size, width)}"] / 1e9,
            limit_name=limit,
            unit="GB/s",
            target=SHARE_OF_CRT if limit == "awscrt" else None,
        )
        for size, operation, width in product(SIZES, bench.operations, WIDTHS)
        for limit in ("awscrt", "aiobotocore")
    ]


async def compare(settings: RemoteSettings, arguments: argparse.Namespace, console: Console) -> list[Row]:
    """The three clients."""
    ours, boto = await KvobjMover.open(settings), await BotoMover.open(settings)
    try:
        bench = Bench(
            {"kvobj": ours, "awscrt": CrtMover(settings), "aiobotocore": boto},
            arguments.seconds,
            [arguments.only] if arguments.only else OPERATIONS,
            [room(max(SIZES)) for _ in range(max(WIDTHS))],
        )
        await prepare(ours, bench.memory[0])
        await run_rounds(bench, arguments.rounds, console)
        return rows_of(bench)
    finally:
        await ours.aclose()
        await boto.aclose()


async def prepare(mover: Mover, view: memoryview) -> None:
    """The objects that the GETs read."""
    for size in SIZES:
        await mover.put(f"get-{size}", view[:size])


async def stalled(
    host: str, port: int, settings: RemoteSettings, arguments: argparse.Namespace, console: Console
) -> list[Row]:
    """Times of reads through the proxy: healthy, with stalls and hedging, with stalls and none."""
    view = room(SIZES[0])
    ways = (("healthy", 0.0, None), ("hedged", 0.02, None), ("not hedged", 0.02, 0.0))
    rounds: list[dict[str, float]] = []
    for _ in range(arguments.rounds):
        rounds.append({})
        for name, rate, hedge_seconds in ways:
            with ProxyProcess(host, port) as proxy:
                proxy.plan("STALL_HEAD", rate=rate, operations=["GET"], seed=7, stall_seconds=2.0)
                mover = await KvobjMover.open(
                    replace(settings, endpoint=f"http://127.0.0.1:{proxy.port}", hedge_seconds=hedge_seconds)
                )
                await mover.put("stalls", view)
                times: list[float] = []
                for _ in range(arguments.reads):
                    started = time.perf_counter()
                    await mover.get("stalls", view)
                    times.append(time.perf_counter() - started)
                await mover.aclose()
            rounds[-1][name] = sorted(times)[int(len(times) * _QUANTILE)]
            console.print(f"{name}: p99 {rounds[-1][name] * 1000:.1f} ms of {len(times)} reads")
    figures = medians(rounds)
    return [
        Row(
            name="p99 of GET 8 MiB without stalls",
            value=figures["healthy"] * 1000,
            limit=figures[way] * 1000,
            limit_name=f"2 % stalled, {way}",
            unit="ms",
            target=STALLED_TAIL if way == "hedged" else None,
        )
        for way in ("hedged", "not hedged")
    ]


def room(size: int) -> memoryview:
    """Shared memory that is there, with bytes that differ."""
    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    piece = secrets.token_bytes(MIB)
    for start in range(0, size, MIB):
        view[start : start + MIB] = piece
    return view


def markdown(title: str, rows: Sequence[Row]) -> str:
    """The rows as a table for docs/benchmarks.md."""
    lines = [
        f"{title}.",
        "",
        "| what | kvobj | beside it | | ratio | target |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        target = "" if row.target is None else f"{row.target:.2f} {'met' if row.is_met else 'MISSED'}"
        values = f"{row.value:.2f} {row.unit} | {row.limit:.2f} {row.unit} | {row.limit_name} | {row.ratio:.2f}"
        lines.append(f"| {row.name} | {values} | {target} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Start radosgw, measure, report."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=one_or_more, default=5)
    parser.add_argument("--seconds", type=above_zero, default=1.5, help="of one measurement")
    parser.add_argument("--only", choices=OPERATIONS, help="measure that alone")
    parser.add_argument("--stalls", action="store_true", help="measure the tail under stalls instead")
    parser.add_argument("--reads", type=one_or_more, default=500, help="of one measurement of the tail")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--markdown", type=output_file, metavar="FILE")
    parser.add_argument("--plot", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    require_radosgw()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-bench-")))
        remote = stack.enter_context(gateway(directory / "r", store_bytes=6 * 2**30))
        if arguments.stalls:
            title = f"GET of 8 MiB from radosgw through a proxy, medians of {arguments.rounds} rounds of {arguments.reads} reads"
            rows = uvloop.run(stalled(remote.server.host, remote.server.port, remote.settings(), arguments, console))
        else:
            title = f"one radosgw in memory, medians of {arguments.rounds} alternating rounds"
            rows = uvloop.run(compare(remote.settings(), arguments, console))
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(title, rows))
    return report(title, rows, json_path=arguments.json, plot_path=arguments.plot)


if __name__ == "__main__":
    run_tool(main)
