"""Restart with many objects and a large arena: from process start to the first GET's reply, after a kill and after a stop.

Fills a KV bucket of class `memory` with small objects, and the arena with large ones until it is about full. The target of
two seconds is judged on the restart after a kill, which adopts the arena; the start after a clean stop is shown beside it.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from bench_support import MIB, BucketSetting, ServerProcess, ServerSettings, own_server
from command_line import Parser, one_or_more, output_file, run_tool, zero_or_more
from load_client import hardware
from rich.console import Console
from rich.table import Table

TARGET_SECONDS: Final = 2.0
LARGE_BYTES: Final = 8 * MIB
_HTTP_OK: Final = 200


def fill(server: ServerProcess, objects: int, small_bytes: int, large: int, writers: int) -> None:
    """PUT the objects with several connections; RuntimeError if one is refused."""
    problems: list[str] = []
    small_body, large_body = random.Random(1).randbytes(small_bytes), random.Random(2).randbytes(LARGE_BYTES)

    def write(first: int) -> None:
        with server.raw(timeout_seconds=120) as raw:
            for index in range(first, objects + large, writers):
                is_large = index >= objects
                reply = raw.request("PUT", f"/restart/object-{index:08d}", large_body if is_large else small_body)
                if reply.status != _HTTP_OK:
                    problems.append(f"{reply.status} {reply.code}")
                    return

    threads = [threading.Thread(target=write, args=(first,)) for first in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise RuntimeError(f"the store could not be filled: {problems[0]}")


def restart(server: ServerProcess, *, is_clean: bool) -> tuple[float, str]:
    """Stop or kill, start, GET the oldest object: seconds from process start to its reply, and the tier that served it."""
    if is_clean:
        server.terminate(timeout_seconds=300)
    else:
        server.kill()
    began = time.monotonic()
    server.start(timeout_seconds=300)
    with server.raw() as raw:
        reply = raw.request("GET", "/restart/object-00000000")
    if reply.status != _HTTP_OK:
        raise RuntimeError(f"the first GET failed status={reply.status}")
    return time.monotonic() - began, reply.headers.get("x-kvobj-tier", "unnamed")


def main() -> int:
    """Measure and report."""
    parser = Parser(__doc__)
    parser.add_argument("--objects", type=one_or_more, default=100_000)
    parser.add_argument("--small-bytes", type=one_or_more, default=16 * 1024)
    parser.add_argument("--dram-mib", type=one_or_more, default=4096)
    parser.add_argument("--large", type=zero_or_more, default=200, help=f"objects of {LARGE_BYTES // MIB} MiB besides")
    parser.add_argument("--writers", type=one_or_more, default=4)
    parser.add_argument("--rounds", type=one_or_more, default=5)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-restart-")))
        settings = ServerSettings(
            dram_bytes=arguments.dram_mib * MIB,
            nvme_bytes=12288 * MIB,
            buckets=(BucketSetting("restart", "kv", "memory"),),
            # As an installed package has it: where the environment forbids bytecode, each start compiled everything (0.4 s here).
            environment={"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(directory / "bytecode")},
        )
        server = stack.enter_context(own_server(directory, settings))
        fill(server, arguments.objects, arguments.small_bytes, arguments.large, arguments.writers)
        occupancy = server.occupancy()
        killed = [restart(server, is_clean=False) for _ in range(arguments.rounds)]
        stopped = [restart(server, is_clean=True)]
    seconds = median(second for second, _ in killed)
    table = Table(
        "start after", "seconds to the first GET's reply", "served by", title=f"{arguments.objects:,} objects"
    )
    table.add_row("kill -9, median", f"{seconds:.2f}", killed[0][1])
    table.add_row("SIGTERM", f"{stopped[0][0]:.2f}", stopped[0][1])
    Console().print(table)
    record = {
        "objects": arguments.objects + arguments.large,
        "dram_bytes": arguments.dram_mib * MIB,
        "occupancy": occupancy,
        "after_kill_seconds": [second for second, _ in killed],
        "after_stop_seconds": [second for second, _ in stopped],
        "target_seconds": TARGET_SECONDS,
        "hardware": hardware(),
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if seconds <= TARGET_SECONDS else 1


if __name__ == "__main__":
    run_tool(main)
