"""kvobj's data path against its limits: the same client, the same bytes, interleaved rounds, medians, ratios.

GET and PUT of 1, 8 and 32 MiB with 1 and 4 connections against a bare blocking-socket server (the better of two), nginx
with sendfile and Redis; 4 KiB signed GETs a second against nginx's unsigned ones; PUT acknowledged `local` against plain
O_DIRECT writes; PUT of 8 MiB in each form that clients send a body in (aws-chunked, checksums, digests, presigned), into a KV
and an ordinary bucket. Requests are signed beforehand, payloads unsigned but where it says so. Exits 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench_support import (
    MIB,
    BucketSetting,
    Credentials,
    RawS3,
    RemoteTarget,
    Row,
    ServerProcess,
    ServerSettings,
    delete_keys,
    medians,
    own_server,
    presigned,
    report,
    settle,
    sign_head,
    signed,
    wait_until,
)
from command_line import Parser, http_address, one_or_more, output_file, run_tool
from limits import BARE_KINDS, bare_server, nginx_server, redis_server
from load_client import Load, LoadResult, redis_get, redis_set, run_load
from payload_forms import FORMS, PayloadForm, digest_speeds
from plain_disk import plain_disk_bytes_per_second
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES: Final = (MIB, 8 * MIB, 32 * MIB)
CONNECTIONS: Final = (1, 4)
SMALL_BYTES: Final = 4096
LOCAL_BYTES: Final = 4 * MIB
FORM_BYTES: Final = 8 * MIB
FORM_BUCKETS: Final = {"KV": "bench-kv", "ordinary": "bench-ordinary"}
JUDGED_FORM_BUCKET: Final = "KV"  # against the bare servers; ordinary buckets are bound by MD5
_GIB: Final = 1024 * MIB
_HTTP_OK: Final = 200

# Targets of the ratio to the bare server, by (operation, size in MiB, connections).
TARGETS: Final = {
    ("get", 1, 1): 0.85,
    ("get", 8, 1): 0.95,
    ("get", 8, 4): 0.95,
    ("get", 32, 1): 0.95,
    ("get", 32, 4): 0.95,
    ("put", 1, 1): 0.5,
    ("put", 8, 1): 0.85,
    ("put", 32, 1): 0.85,
    ("put", 8, 4): 0.6,
    ("put", 32, 4): 0.6,
}
DIGESTED_TARGETS: Final = {1: 0.70, 4: 0.60}
LOCAL_TARGETS: Final = {1: 0.40, 4: 0.60}
SMALL_TARGET: Final = 0.30
# Into a KV bucket. Ordinary ones are bound by MD5, signed payloads by SHA-256: those are shown beside the digest's own speed.
CHUNKED_TARGET: Final = 0.50


@dataclass(slots=True)
class Bench:
    """The servers that are running, and the figures so far: one dictionary a round."""

    server: ServerProcess
    bare_ports: dict[str, int]
    keeping_port: int
    hashing_port: int
    nginx_port: int | None
    redis_port: int | None
    radosgw: RemoteTarget | None
    budget_bytes: int
    rounds: list[dict[str, float]] = field(default_factory=list)
    serial: int = 0

    def note(self, name: str, value: float) -> None:
        """Remember a figure of the present round."""
        self.rounds[-1][name] = value

    def count(self, size: int, connections: int) -> int:
        """Operations of one connection, so that a measurement moves about the budget."""
        return max(2, self.budget_bytes // size // connections)

    def new_keys(self, count: int) -> list[str]:
        """Keys never used before."""
        first, self.serial = self.serial, self.serial + count
        return [f"bench-{first + index:012d}" for index in range(count)]


def measure(
    bench: Bench,
    name: str,
    loads: Sequence[Load],
    *,
    is_kvobj: bool = False,
    meanwhile: Callable[[LoadResult], None] | None = None,
) -> None:
    """Run the loads; note the rate, the client's share and, for kvobj, its CPU seconds a GiB, with those of `meanwhile`, which is
    called with the result as soon as all have ended."""
    cpu = bench.server.cpu_seconds() if is_kvobj else 0.0
    result = run_load(loads, meanwhile=meanwhile)
    bench.note(f"{name} bytes_per_second", result.bytes_per_second)
    bench.note(f"{name} operations_per_second", result.operations_per_second)
    bench.note(f"{name} client_cpu_share", result.client_cpu_share)
    if is_kvobj:
        used = bench.server.cpu_seconds() - cpu
        bench.note(f"{name} server_cpu_seconds_per_gib", used / (result.bytes_moved / _GIB))


def bench_get(bench: Bench, size: int, connections: int) -> None:
    """GET of one DRAM-resident object, against the bare servers, nginx, Redis and radosgw."""
    count = bench.count(size, connections) + 1
    name = f"get {size // MIB} MiB x{connections}"

    def loads(port: int, head: bytes, protocol: str = "http") -> list[Load]:
        return [Load(port, (head,) * count, reply_bytes=size, protocol=protocol)] * connections

    for kind, port in bench.bare_ports.items():
        measure(bench, f"bare {kind} {name}", loads(port, f"GET /{size} HTTP/1.1\r\n\r\n".encode()))
    head = signed(bench.server, "GET", f"/bench-kv/get-{size}")
    measure(bench, f"kvobj {name}", loads(bench.server.port, head), is_kvobj=True)
    if bench.nginx_port is not None:
        plain = f"GET /{size} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        measure(bench, f"nginx {name}", loads(bench.nginx_port, plain))
    if bench.redis_port is not None:
        measure(bench, f"redis {name}", loads(bench.redis_port, redis_get(f"get-{size}"), "redis"))
    if bench.radosgw is not None:
        head = signed(bench.radosgw, "GET", f"/bench-kv/get-{size}")
        measure(bench, f"radosgw {name}", loads(bench.radosgw.port, head))


def bench_put(bench: Bench, size: int, connections: int) -> None:
    """PUT into the KV bucket, class memory, the acknowledgement alone."""
    count = bench.count(size, connections)
    name = f"put {size // MIB} MiB x{connections}"
    plain = f"PUT /x HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode()
    for kind, port in bench.bare_ports.items():
        measure(bench, f"bare {kind} {name}", [Load(port, (plain,) * (count + 1), body_bytes=size)] * connections)
    kept = [Load(bench.keeping_port, (plain,) * (count + 1), body_bytes=size)] * connections
    measure(bench, f"bare keeping {name}", kept)
    put_new_objects(bench, f"kvobj {name}", size, connections, count)
    if bench.redis_port is not None:
        heads = (redis_set("put", size),) * (count + 1)
        measure(
            bench,
            f"redis {name}",
            [Load(bench.redis_port, heads, body_bytes=size, protocol="redis")] * connections,
        )


def put_new_objects(
    bench: Bench,
    name: str,
    size: int,
    connections: int,
    count: int,
    *,
    bucket: str = "bench-kv",
    form: PayloadForm | None = None,
    meanwhile: Callable[[Sequence[str], LoadResult], None] | None = None,
) -> None:
    """PUT objects under new keys, call `meanwhile` at once with them and the result, then delete them and wait for idleness."""
    keys = [bench.new_keys(count + 1) for _ in range(connections)]
    form = form or PayloadForm("plain")
    body, head_of = form_sender(bench.server, form, bytes(size))
    loads = []
    for own in keys:
        heads = tuple(head_of(f"/{bucket}/{key}") for key in own)
        loads.append(Load(bench.server.port, heads, body_bytes=size, body=body if form.chunk_bytes else b""))
    every = [key for own in keys for key in own]
    then = None if meanwhile is None else partial(meanwhile, every)
    measure(bench, name, loads, is_kvobj=True, meanwhile=then)
    with bench.server.raw() as raw:
        delete_keys(raw, bucket, every)
    settle(bench.server)


def form_sender(server: ServerProcess, form: PayloadForm, payload: bytes) -> tuple[bytes, Callable[[str], bytes]]:
    """The body that is sent in this form, and what makes a PUT's head for a path."""
    body = form.encoded(payload)
    headers, sha256 = form.headers(payload, body), form.content_sha256(payload)

    def head_of(path: str) -> bytes:
        if form.is_presigned:
            return presigned(server, "PUT", path, **headers)
        authority = f"{server.host}:{server.port}"
        return sign_head(server.credentials(), "PUT", authority, path, headers=headers, payload=sha256).head

    return body, head_of


def bench_forms(bench: Bench, connections: int) -> None:
    """PUT of 8 MiB in each form, into both kinds of bucket; and what the digests alone could do.

    The bare servers are measured anew right before each form into a KV bucket: the machine's pace changes within the half minute
    that the forms take, so that bare figures taken once at their beginning were up to a third off.
    """
    size, count = FORM_BYTES, bench.count(FORM_BYTES, connections)
    plain = f"PUT /x HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode()
    for kind, form in product(FORM_BUCKETS, FORMS):
        name = form_name(kind, form, connections)
        if kind == JUDGED_FORM_BUCKET:
            for bare_kind, port in bench.bare_ports.items():
                loads = [Load(port, (plain,) * (count + 1), body_bytes=size)] * connections
                measure(bench, f"bare {bare_kind} {name}", loads)
        put_new_objects(bench, f"kvobj {name}", size, connections, count, bucket=FORM_BUCKETS[kind], form=form)
    for algorithm, rate in digest_speeds().items():
        bench.note(f"{algorithm} bytes_per_second", rate)


def form_name(kind: str, form: PayloadForm, connections: int) -> str:
    """What the measurement is called."""
    return f"put 8 MiB {kind} {form.name} x{connections}"


def bench_digested_put(bench: Bench, connections: int) -> None:
    """At least 1 GiB of 32 MiB PUTs; the clock stops when every digest is known, by HEAD."""
    size = 32 * MIB
    count = -(-_GIB // size // connections)
    name = f"put digested {size // MIB} MiB x{connections}"

    def until_digested(keys: Sequence[str], result: LoadResult) -> None:
        with bench.server.raw() as raw:

            def is_digested(key: str) -> bool:
                return "x-kvobj-digest" in raw.request("HEAD", f"/bench-kv/{key}").headers

            # Newest first: when the last ones have their digests, the others have had theirs for long.
            for key in reversed(keys):
                wait_until(partial(is_digested, key), timeout_seconds=60, what="a digest", pause_seconds=0.002)
        seconds = time.monotonic() - result.started
        bench.note(f"kvobj {name} bytes_per_second", result.bytes_moved / seconds)

    plain = f"PUT /x HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode()
    for kind, port in bench.bare_ports.items():
        measure(bench, f"bare {kind} {name}", [Load(port, (plain,) * (count + 1), body_bytes=size)] * connections)
    kept = [Load(bench.keeping_port, (plain,) * (count + 1), body_bytes=size)] * connections
    measure(bench, f"bare keeping {name}", kept)
    hashed = [Load(bench.hashing_port, (plain,) * (count + 1), body_bytes=size)] * connections
    measure(bench, f"bare hashing {name}", hashed)
    put_new_objects(bench, f"kvobj {name}", size, connections, count, meanwhile=until_digested)


def bench_local_put(bench: Bench, connections: int, directory: Path) -> None:
    """PUT of 4 MiB acknowledged `local`, against plain O_DIRECT writes with fdatasync to the same file system."""
    count = max(8, bench.budget_bytes // 2 // LOCAL_BYTES // connections)
    name = f"put local 4 MiB x{connections}"
    rate = plain_disk_bytes_per_second(directory / "plain", size_bytes=LOCAL_BYTES, writers=connections, count=count)
    bench.note(f"disk {name} bytes_per_second", rate)
    put_new_objects(bench, f"kvobj {name}", LOCAL_BYTES, connections, count, bucket="bench-local-kv")


def bench_small_get(bench: Bench, connections: int, count: int) -> None:
    """Signed GETs of 4 KiB a second, against nginx's unsigned ones."""
    name = f"get 4 KiB x{connections}"
    head = signed(bench.server, "GET", f"/bench-kv/get-{SMALL_BYTES}")
    loads = [Load(bench.server.port, (head,) * count, reply_bytes=SMALL_BYTES, warm_up=50)] * connections
    measure(bench, f"kvobj {name}", loads, is_kvobj=True)
    if bench.nginx_port is not None:
        plain = f"GET /{SMALL_BYTES} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        loads = [Load(bench.nginx_port, (plain,) * count, reply_bytes=SMALL_BYTES, warm_up=50)] * connections
        measure(bench, f"nginx {name}", loads)
    if bench.radosgw is not None:
        head = signed(bench.radosgw, "GET", f"/bench-kv/get-{SMALL_BYTES}")
        loads = [Load(bench.radosgw.port, (head,) * (count // 4), reply_bytes=SMALL_BYTES, warm_up=50)] * connections
        measure(bench, f"radosgw {name}", loads)


def prepare(bench: Bench) -> None:
    """Store the objects that the GETs read, in every server."""
    bodies = {size: bytes(range(256)) * (size // 256) for size in (*SIZES, SMALL_BYTES)}
    targets = [(bench.server.host, bench.server.port, bench.server.credentials())]
    if bench.radosgw is not None:
        targets.append((bench.radosgw.host, bench.radosgw.port, bench.radosgw.credentials()))
    for host, port, credentials in targets:
        with RawS3(host, port, credentials) as raw:
            raw.request("PUT", "/bench-kv")
            for size, body in bodies.items():
                reply = raw.request("PUT", f"/bench-kv/get-{size}", body)
                if reply.status != _HTTP_OK:
                    raise RuntimeError(f"put refused status={reply.status} body={reply.body[:300]!r}")
    if bench.redis_port is not None:
        for size in SIZES:
            heads = (redis_set(f"get-{size}", size),)
            run_load([Load(bench.redis_port, heads, body_bytes=size, protocol="redis", warm_up=0)])


def better_bare(figures: dict[str, float], name: str) -> str:
    """The bare server that did better at this."""
    return max(
        (f"bare {kind}" for kind in BARE_KINDS), key=lambda limit: figures.get(f"{limit} {name} bytes_per_second", 0.0)
    )


def row_of(
    figures: dict[str, float], name: str, limit: str, target: float | None, *, limit_figure: str | None = None
) -> list[Row]:
    """One row of medians, or none where one of the two was not measured. 4 KiB objects are judged by their rate.

    `limit_figure`: what the limit's figure is called where it has another name than kvobj's.
    """
    is_small = "get 4 KiB" in name
    what = "operations_per_second" if is_small else "bytes_per_second"
    value, bound = figures.get(f"kvobj {name} {what}"), figures.get(f"{limit_figure or f'{limit} {name}'} {what}")
    if value is None or bound is None:
        return []
    scale, unit = (1.0, "/s") if is_small else (1e9, "GB/s")
    return [
        Row(
            name=name,
            value=value / scale,
            limit=bound / scale,
            limit_name=limit,
            unit=unit,
            target=target,
            client_cpu_share=figures.get(f"kvobj {name} client_cpu_share"),
            server_cpu_seconds_per_gib=figures.get(f"kvobj {name} server_cpu_seconds_per_gib"),
        )
    ]


def rows_of(bench: Bench) -> list[Row]:
    """Medians as rows: kvobj against the better bare server, and against each peer that ran."""
    figures = medians(bench.rounds)
    rows: list[Row] = []
    for operation, size, connections in product(("get", "put"), SIZES, CONNECTIONS):
        name = f"{operation} {size // MIB} MiB x{connections}"
        rows += row_of(figures, name, better_bare(figures, name), TARGETS.get((operation, size // MIB, connections)))
        peer_target = 1.0 if operation == "get" and size > MIB else None
        peers = (("bare keeping", None), ("nginx", peer_target), ("redis", peer_target), ("radosgw", None))
        for peer, target in peers:
            rows += row_of(figures, name, peer, target)
    for connections in CONNECTIONS:
        name = f"put digested 32 MiB x{connections}"
        rows += row_of(figures, name, better_bare(figures, name), DIGESTED_TARGETS[connections])
        rows += row_of(figures, name, "bare keeping", None)
        rows += row_of(figures, name, "bare hashing", None)
        rows += row_of(figures, f"put local 4 MiB x{connections}", "disk", LOCAL_TARGETS[connections])
        for peer, target in (("nginx", SMALL_TARGET), ("radosgw", None)):
            rows += row_of(figures, f"get 4 KiB x{connections}", peer, target)
        rows += form_rows(figures, connections)
    return rows


def form_rows(figures: dict[str, float], connections: int) -> list[Row]:
    """Into a KV bucket against the better bare server; and against the slowest digest asked for, where that is the limit."""
    rows: list[Row] = []
    for kind, form in product(FORM_BUCKETS, FORMS):
        name = form_name(kind, form, connections)
        if kind == JUDGED_FORM_BUCKET:
            target = None
            if not form.is_hashed:
                target = CHUNKED_TARGET if form.chunk_bytes else TARGETS["put", FORM_BYTES // MIB, connections]
            rows += row_of(figures, name, better_bare(figures, name), target)
        slowest = "md5" if kind != JUDGED_FORM_BUCKET else "sha256" if form.is_hashed else None
        if slowest is not None:
            rows += row_of(figures, name, slowest, None, limit_figure=slowest)
    return rows


def run_rounds(bench: Bench, arguments: argparse.Namespace, directory: Path, console: Console) -> None:
    """All measurements, one after another, as often as there are rounds."""
    for index in range(arguments.rounds):
        bench.rounds.append({})
        for connections in CONNECTIONS:
            for size in SIZES:
                console.print(f"round {index + 1} of {arguments.rounds}: {size // MIB} MiB x{connections}")
                if "get" in arguments.only:
                    bench_get(bench, size, connections)
                if "put" in arguments.only:
                    bench_put(bench, size, connections)
            console.print(f"round {index + 1} of {arguments.rounds}: digests, local, 4 KiB x{connections}")
            if "digested" in arguments.only:
                bench_digested_put(bench, connections)
            if "local" in arguments.only:
                bench_local_put(bench, connections, directory)
            if "small" in arguments.only:
                bench_small_get(bench, connections, arguments.small_count)
            if "forms" in arguments.only:
                console.print(f"round {index + 1} of {arguments.rounds}: forms x{connections}")
                bench_forms(bench, connections)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    kinds = ("get", "put", "digested", "local", "small", "forms")
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=one_or_more, default=5)
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--budget-mib", type=one_or_more, default=768, help="payload that one measurement moves")
    parser.add_argument("--small-count", type=one_or_more, default=10_000, help="4 KiB GETs of one connection")
    parser.add_argument("--dram-gib", type=one_or_more, default=6)
    parser.add_argument("--directory", type=Path, help="where the server's data goes; default: a temporary directory")
    parser.add_argument(
        "--radosgw",
        type=http_address,
        metavar="URL",
        help="a running radosgw to measure beside, e.g. http://127.0.0.1:18871",
    )
    parser.add_argument("--radosgw-access-key", default="mainaccesskey0000001")
    parser.add_argument("--radosgw-secret-key", default="mainsecretkey00000000000000000000000001")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--plot", type=output_file, metavar="FILE")
    return parser.parse_args()


def radosgw_target(arguments: argparse.Namespace) -> RemoteTarget | None:
    """The radosgw that was named, if one was."""
    if arguments.radosgw is None:
        return None
    host, port = arguments.radosgw
    key_pair = Credentials(arguments.radosgw_access_key, arguments.radosgw_secret_key)
    return RemoteTarget(host, port, key_pair)


def main() -> int:
    """Start everything, measure, report."""
    arguments = parse_arguments()
    console = Console(stderr=True)
    with ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-bench-")))
        settings = ServerSettings(
            dram_bytes=arguments.dram_gib * _GIB,
            nvme_bytes=16 * _GIB,
            buckets=(
                BucketSetting("bench-kv", "kv", "memory"),
                BucketSetting("bench-local-kv", "kv", "local"),
                BucketSetting("bench-ordinary", "ordinary", "memory"),
            ),
        )
        bench = Bench(
            server=stack.enter_context(own_server(directory / "kvobj", settings)),
            bare_ports={kind: stack.enter_context(bare_server(kind)) for kind in BARE_KINDS},
            keeping_port=stack.enter_context(bare_server("keeping")),
            hashing_port=stack.enter_context(bare_server("hashing")),
            nginx_port=stack.enter_context(nginx_server(directory / "nginx", [*SIZES, SMALL_BYTES])),
            redis_port=stack.enter_context(redis_server(directory / "redis")),
            radosgw=radosgw_target(arguments),
            budget_bytes=arguments.budget_mib * MIB,
        )
        status = bench.server.status()
        modes = ", ".join(f"{tier['name']} {tier['mode'] or '-'}" for tier in status["tiers"])
        console.print(f"receive mode {status['receive_mode']}; I/O {modes}; huge pages {status['arena']['huge_pages']}")
        prepare(bench)
        run_rounds(bench, arguments, directory, console)
        rows = rows_of(bench)
    title = (
        f"kvobj against its limits, medians of {arguments.rounds} interleaved rounds, blocking-socket client processes"
    )
    return report(title, rows, json_path=arguments.json, plot_path=arguments.plot)


if __name__ == "__main__":
    run_tool(main)
