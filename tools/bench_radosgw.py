"""kvobj beside Ceph's radosgw on one machine: the same client, the same presigned URLs, alternating, medians of rounds.

PUT and GET of 4 MiB (throughput) and 4 KiB (requests a second) with 1 and 4 connections. radosgw keeps its objects in memory and
does without replicas; kvobj acknowledges from memory too, into a KV bucket, and for comparison into an ordinary one, where it
makes an MD5 as radosgw does. Both run all the time, one of them works. Exits 1 if a target is missed, 2 where radosgw is not
installed.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench_support import (
    MIB,
    BucketSetting,
    RawS3,
    RemoteTarget,
    Row,
    ServerProcess,
    ServerSettings,
    medians,
    own_server,
    presigned,
    report,
    settle,
)
from command_line import Parser, one_or_more, output_file, run_tool
from load_client import Load, run_load
from radosgw_server import radosgw_server, require_radosgw
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LARGE_BYTES: Final = 4 * MIB
SMALL_BYTES: Final = 4096
CONNECTIONS: Final = (1, 4)
BUCKETS: Final = ("bench-kv", "bench-ordinary")
TARGETS: Final = {
    ("put", LARGE_BYTES): 3.0,
    ("get", LARGE_BYTES): 2.0,
    ("put", SMALL_BYTES): 5.0,
    ("get", SMALL_BYTES): 5.0,
}
_GIB: Final = 1024 * MIB
_HTTP_OK: Final = 200
_HTTP_NO_CONTENT: Final = 204


@dataclass(slots=True)
class Bench:
    """Both servers, how much to do, and the figures so far: one dictionary a round."""

    kvobj: ServerProcess
    radosgw: RemoteTarget
    counts: dict[int, int]
    rounds: list[dict[str, float]] = field(default_factory=list)
    serials: Iterator[int] = field(default_factory=count)

    def name(self, operation: str, size: int, connections: int) -> str:
        """What a measurement is called."""
        return f"{operation} {'4 MiB' if size == LARGE_BYTES else '4 KiB'} x{connections}"

    def note(self, server: str, name: str, loads: Sequence[Load]) -> None:
        """Run the loads and remember rate and the client's share of the CPU."""
        result = run_load(loads)
        figures = self.rounds[-1]
        figures[f"{server} {name} bytes"] = result.bytes_per_second
        figures[f"{server} {name} requests"] = result.operations_per_second
        figures[f"{server} {name} client"] = result.client_cpu_share


@dataclass(frozen=True, slots=True)
class Side:
    """A server, by the name that its figures have, and a bucket of it."""

    name: str
    target: ServerProcess | RemoteTarget
    bucket: str


def bench_put(bench: Bench, side: Side, size: int, width: int) -> None:
    """PUT of new objects, which are deleted afterwards."""
    own = [
        [f"/{side.bucket}/put-{next(bench.serials)}" for _ in range(bench.counts[size] // width + 2)]
        for _ in range(width)
    ]
    loads = [
        Load(
            side.target.port,
            tuple(presigned(side.target, "PUT", path, content_length=str(size)) for path in paths),
            body_bytes=size,
            warm_up=2,
        )
        for paths in own
    ]
    bench.note(side.name, bench.name("put", size, width), loads)
    with RawS3("127.0.0.1", side.target.port, side.target.credentials()) as raw:
        for paths in own:
            for path in paths:
                if raw.request("DELETE", path).status != _HTTP_NO_CONTENT:
                    raise RuntimeError(f"delete refused server={side.name} path={path}")


def bench_get(bench: Bench, side: Side, size: int, width: int) -> None:
    """GET of one object that is in memory."""
    head = presigned(side.target, "GET", f"/{side.bucket}/get-{size}")
    loads = [Load(side.target.port, (head,) * (bench.counts[size] // width + 2), reply_bytes=size, warm_up=2)] * width
    bench.note(side.name, bench.name("get", size, width), loads)


def run_round(bench: Bench) -> None:
    """Everything once, each measurement with one server after the other."""
    bench.rounds.append({})
    for size, width in product((LARGE_BYTES, SMALL_BYTES), CONNECTIONS):
        for measure in (bench_put, bench_get):
            measure(bench, Side("radosgw", bench.radosgw, BUCKETS[1]), size, width)
            for bucket in BUCKETS:
                measure(bench, Side(f"kvobj {bucket}", bench.kvobj, bucket), size, width)
                settle(bench.kvobj)


def prepare(bench: Bench) -> None:
    """The buckets, and the objects that the GETs read."""
    for target, buckets in ((bench.kvobj, BUCKETS), (bench.radosgw, BUCKETS[1:])):
        with RawS3("127.0.0.1", target.port, target.credentials()) as raw:
            raw.request("PUT", f"/{BUCKETS[1]}")  # kvobj has it already
            for bucket, size in product(buckets, (LARGE_BYTES, SMALL_BYTES)):
                reply = raw.request("PUT", f"/{bucket}/get-{size}", bytes(range(256)) * (size // 256))
                if reply.status != _HTTP_OK:
                    raise RuntimeError(f"put refused status={reply.status} body={reply.body[:300]!r}")


def rows_of(bench: Bench) -> list[Row]:
    """Medians as rows. The targets are for KV buckets: what an ordinary one makes of it is bound by MD5, and shown."""
    figures = medians(bench.rounds)
    rows: list[Row] = []
    for size, operation, width, bucket in product((LARGE_BYTES, SMALL_BYTES), ("put", "get"), CONNECTIONS, BUCKETS):
        what, scale, unit = ("bytes", 1e9, "GB/s") if size == LARGE_BYTES else ("requests", 1.0, "/s")
        name = bench.name(operation, size, width)
        rows.append(
            Row(
                name=f"{name} {bucket.removeprefix('bench-')}",
                value=figures[f"kvobj {bucket} {name} {what}"] / scale,
                limit=figures[f"radosgw {name} {what}"] / scale,
                limit_name="radosgw",
                unit=unit,
                target=TARGETS[operation, size] if bucket == BUCKETS[0] else None,
                client_cpu_share=figures[f"kvobj {bucket} {name} client"],
            )
        )
    return rows


def main() -> int:
    """Start both, measure, report."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=one_or_more, default=5)
    parser.add_argument("--large-count", type=one_or_more, default=96, help="4 MiB requests of one measurement")
    parser.add_argument("--small-count", type=one_or_more, default=2000, help="4 KiB requests of one measurement")
    parser.add_argument("--dram-gib", type=one_or_more, default=2)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--plot", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    require_radosgw()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-bench-")))
        settings = ServerSettings(
            dram_bytes=arguments.dram_gib * _GIB,
            nvme_bytes=8 * _GIB,
            buckets=tuple(BucketSetting(name, name.removeprefix("bench-"), "memory") for name in BUCKETS),
        )
        bench = Bench(
            kvobj=stack.enter_context(own_server(directory / "kvobj", settings)),
            radosgw=stack.enter_context(radosgw_server(directory / "radosgw")),
            counts={LARGE_BYTES: arguments.large_count, SMALL_BYTES: arguments.small_count},
        )
        prepare(bench)
        for index in range(arguments.rounds):
            console.print(f"round {index + 1} of {arguments.rounds}")
            run_round(bench)
        rows = rows_of(bench)
    title = f"kvobj beside radosgw in memory, medians of {arguments.rounds} alternating rounds, presigned URLs"
    return report(title, rows, json_path=arguments.json, plot_path=arguments.plot)


if __name__ == "__main__":
    run_tool(main)
