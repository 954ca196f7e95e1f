"""What worker processes cost, in CPU seconds: the store process's share of a hot GET, and all processes' beside one process's.

CPU accounting and not throughput: on a machine of few cores, which the clients share, N workers cannot be N times as fast. What
they could be follows from the store process's share: with S microseconds of it a request, one store process is enough for 1/S
requests a second, whatever the number of workers. Rounds are interleaved, medians are shown. Exits 1 if a target is missed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from bench_support import MIB, BucketSetting, RawS3, ServerProcess, ServerSettings, own_server, settle, signed
from command_line import Parser, one_or_more, run_tool
from load_client import Load, run_load
from rich.console import Console
from rich.table import Table

STORE_TARGET_MICROSECONDS: Final = 25.0
CPU_TARGET_RATIO: Final = 1.1
_GIB: Final = 1024 * MIB
_HTTP_OK: Final = 200


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request. `is_put`: of new keys, class `memory`, into a KV bucket."""

    name: str
    size_bytes: int
    count: int
    connections: int
    is_put: bool = False


CASES: Final = (
    Case("GET 4 KiB", 4096, 2000, 16),
    Case("GET 64 KiB", 65536, 1500, 16),
    Case("GET 1 MiB", MIB, 200, 8),
    Case("GET 8 MiB", 8 * MIB, 150, 4),
    Case("PUT 1 MiB", MIB, 40, 4, is_put=True),
    Case("PUT 8 MiB", 8 * MIB, 10, 4, is_put=True),
)


@dataclass(slots=True)
class Figures:
    """Of one case and one number of workers, a value a round."""

    store_microseconds: list[float] = field(default_factory=list)
    all_microseconds: list[float] = field(default_factory=list)
    cpu_seconds_per_gib: list[float] = field(default_factory=list)
    operations_per_second: list[float] = field(default_factory=list)


def processes_of(server: ServerProcess) -> list[int]:
    """The store process, then its workers."""
    return [server.pid, *(int(worker["pid"]) for worker in server.status()["workers"])]


def cpu_seconds(processes: list[int]) -> tuple[float, float]:
    """CPU seconds of the store process, and of all processes: of all their threads, to the nanosecond (proc(5), schedstat)."""
    seconds = [
        sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
        for pid in processes
    ]
    return seconds[0], sum(seconds)


def run_case(server: ServerProcess, case: Case, figures: Figures, serial: int) -> None:
    """One round."""
    if case.is_put:
        loads = put_loads(server, case, str(serial))
    else:
        head = signed(server, "GET", f"/bench-kv/get-{case.size_bytes}")
        loads = [Load(server.port, (head,) * (case.count + 20), reply_bytes=case.size_bytes, warm_up=20)]
        loads *= case.connections
    run_load(loads)  # connections, page tables and caches are warm; of PUTs, the keys are stored then
    if case.is_put:
        delete_all(server, loads)
    processes = processes_of(server)
    store_before, all_before = cpu_seconds(processes)
    result = run_load(loads)
    if case.is_put:
        # What is done behind the replies is part of their work. Asked for, and not waited for: `status` asks every worker, too.
        server.admin("POST", "/api/v1/flush")
    store_after, all_after = cpu_seconds(processes)
    # The warm-up's requests are part of the CPU, too.
    operations = sum(len(load.heads) for load in loads)
    figures.store_microseconds.append((store_after - store_before) / operations * 1e6)
    figures.all_microseconds.append((all_after - all_before) / operations * 1e6)
    figures.cpu_seconds_per_gib.append((all_after - all_before) / (operations * case.size_bytes / _GIB))
    figures.operations_per_second.append(result.operations_per_second)
    if case.is_put:
        delete_all(server, loads)


def put_loads(server: ServerProcess, case: Case, name: str) -> list[Load]:
    """PUTs of keys that begin with a name."""
    length = {"content-length": str(case.size_bytes)}
    return [
        Load(
            server.port,
            tuple(
                signed(server, "PUT", f"/bench-kv/{name}-{number}-{turn}", **length) for turn in range(case.count + 1)
            ),
            body_bytes=case.size_bytes,
        )
        for number in range(case.connections)
    ]


def delete_all(server: ServerProcess, loads: list[Load]) -> None:
    """Make the keys of PUTs new again."""
    with server.raw() as raw:
        for load in loads:
            for head in load.heads:
                raw.request("DELETE", head.split(b" ", 2)[1].decode())
    settle(server)


def touch_arena(server: ServerProcess, workers: int) -> None:
    """Have every worker map what PUTs will use: its page tables are made once, and not by each request."""
    connections = min(8 * workers, 128)
    case = Case("touch", 128 * MIB // connections, 1, connections, is_put=True)  # two each, with the one that warms up
    stored: list[Load] = []
    for turn in range(2):  # not all at once: half of memory may wait to be written down
        stored += (loads := put_loads(server, case, f"touch-{turn}"))
        run_load(loads)
        server.admin("POST", "/api/v1/flush")
    delete_all(server, stored)


def prepare(server: ServerProcess) -> None:
    """Store what is read."""
    with RawS3(server.host, server.port, server.credentials()) as raw:
        for case in CASES:
            if not case.is_put:
                reply = raw.request("PUT", f"/bench-kv/get-{case.size_bytes}", bytes(case.size_bytes))
                if reply.status != _HTTP_OK:
                    raise RuntimeError(f"put refused status={reply.status} body={reply.body[:300]!r}")
    settle(server)


def show(cases: Sequence[Case], found: dict[tuple[str, int], Figures], workers: int, console: Console) -> bool:
    """Print the medians; whether all targets are met."""
    table = Table(title=f"CPU of {workers} workers and their store process, beside one process (medians)")
    for column in (
        "case", "store µs/op", "all µs/op", "one process µs/op", "CPU-s/GiB", "one process", "ratio", "ops/s", "one process",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "case" else "right")
    is_met = True
    for case in cases:
        many, one = found[case.name, workers], found[case.name, 1]
        store = median(many.store_microseconds)
        ratio = median(many.cpu_seconds_per_gib) / median(one.cpu_seconds_per_gib)
        if not case.is_put:
            is_met &= store <= STORE_TARGET_MICROSECONDS
            is_met &= ratio <= CPU_TARGET_RATIO or case.size_bytes < MIB
        table.add_row(
            case.name,
            f"{store:.1f}",
            f"{median(many.all_microseconds):.0f}",
            f"{median(one.all_microseconds):.0f}",
            f"{median(many.cpu_seconds_per_gib):.2f}",
            f"{median(one.cpu_seconds_per_gib):.2f}",
            f"{ratio:.2f}",
            f"{median(many.operations_per_second):.0f}",
            f"{median(one.operations_per_second):.0f}",
        )
    console.print(table)
    gets = found.get(("GET 1 MiB", workers))
    if gets is None:
        return is_met
    share = median(gets.store_microseconds)
    console.print(
        f"The store process takes {share:.1f} µs of a GET of 1 MiB, {share / median(gets.all_microseconds):.1%} of its CPU: it is "
        f"as busy as one of {median(gets.all_microseconds) / share:.0f} workers. "
        f"Targets: at most {STORE_TARGET_MICROSECONDS:.0f} µs a hot GET; "
        f"CPU a GiB at most {CPU_TARGET_RATIO} of one process's from 1 MiB on."
    )
    return is_met


def main() -> int:
    """Run the rounds."""
    parser = Parser(__doc__)
    parser.add_argument("--workers", type=one_or_more, default=2)
    parser.add_argument("--rounds", type=one_or_more, default=3)
    parser.add_argument("--only", choices=("get", "put"), default=None, help="requests of one kind alone")
    parser.add_argument("--directory", type=Path, default=None, help="for the stores' data (default: a temporary one)")
    arguments = parser.parse_args()
    console = Console(width=150)
    cases = [case for case in CASES if arguments.only in (None, "put" if case.is_put else "get")]
    found: dict[tuple[str, int], Figures] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for serial in range(arguments.rounds):
            for workers in (1, arguments.workers):
                settings = ServerSettings(
                    dram_bytes=1024 * MIB,
                    nvme_bytes=4096 * MIB,
                    buckets=(BucketSetting("bench-kv", "kv", "memory"),),
                    sections={"log": {"requests": "false"}},
                    workers=workers,
                )
                with own_server(Path(directory) / f"{serial}-{workers}", settings) as server:
                    prepare(server)
                    touch_arena(server, workers)
                    for case in cases:
                        run_case(server, case, found.setdefault((case.name, workers), Figures()), serial)
    return 0 if show(cases, found, arguments.workers, console) else 1


if __name__ == "__main__":
    run_tool(main)
