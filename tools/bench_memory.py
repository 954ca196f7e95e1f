"""Resident memory of a server that takes 64 uploads of 32 MiB at once: no more than its arena and 250 MiB, and back after.

Sums RssAnon and RssShmem of the server process, sampled while the uploads run; the arena's populated part is in RssShmem.
Exits 1 if the bound is broken, or if memory does not come back to within 10 % of what it was before.
"""

from __future__ import annotations

import json
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench_support import MIB, BucketSetting, ServerProcess, ServerSettings, delete_keys, own_server, settle
from command_line import Parser, one_or_more, output_file, run_tool
from load_client import hardware
from rich.console import Console
from rich.table import Table

ALLOWANCE_BYTES: Final = 250 * MIB
SAMPLE_SECONDS: Final = 0.02
IDLE_TOLERANCE: Final = 0.10
_HTTP_OK: Final = 200
_HTTP_BUSY: Final = 503


class Sampler:
    """Samples a server's resident memory in a thread until stopped."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._stop = threading.Event()
        self.peak_bytes = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self._server))

    def stop(self) -> int:
        """Stop; the highest sum seen."""
        self._stop.set()
        self._thread.join()
        return self.peak_bytes


def resident_bytes(server: ServerProcess) -> int:
    """RssAnon and RssShmem."""
    resident = server.resident_bytes()
    return resident["RssAnon"] + resident["RssShmem"]


def upload(server: ServerProcess, key: str, body: memoryview, outcomes: list[int]) -> None:
    """One upload, again for as long as the server says that it is busy."""
    with server.raw(timeout_seconds=120) as raw:
        status = _HTTP_BUSY
        for _ in range(20):
            try:
                status = raw.request("PUT", f"/memory/{key}", body).status
            except OSError:
                status = 0  # refused with the body half sent: the connection is gone, the upload is not
            if status == _HTTP_OK:
                break
        outcomes.append(status)


def main() -> int:
    """Measure and report."""
    parser = Parser(__doc__)
    parser.add_argument("--uploads", type=one_or_more, default=64)
    parser.add_argument("--size-mib", type=one_or_more, default=32)
    parser.add_argument("--dram-mib", type=one_or_more, default=4096)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-memory-")))
        settings = ServerSettings(
            dram_bytes=arguments.dram_mib * MIB,
            nvme_bytes=8192 * MIB,
            buckets=(BucketSetting("memory", "kv", "memory"),),
        )
        server = stack.enter_context(own_server(directory, settings))
        idle = resident_bytes(server)
        sampler = Sampler(server)
        body = memoryview(bytes(arguments.size_mib * MIB))
        outcomes: list[int] = []
        keys = [f"upload-{index}" for index in range(arguments.uploads)]
        threads = [threading.Thread(target=upload, args=(server, key, body, outcomes)) for key in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        peak = sampler.stop()
        with server.raw() as raw:
            delete_keys(raw, "memory", keys)
        settle(server)
        after = resident_bytes(server)
    bound = arguments.dram_mib * MIB + ALLOWANCE_BYTES
    is_right = peak <= bound and after <= idle * (1 + IDLE_TOLERANCE) and outcomes.count(_HTTP_OK) == len(keys)
    record = {
        "uploads": len(keys),
        "size_bytes": len(body),
        "acknowledged": outcomes.count(_HTTP_OK),
        "idle_bytes": idle,
        "peak_bytes": peak,
        "after_bytes": after,
        "bound_bytes": bound,
        "is_right": is_right,
        "hardware": hardware(),
    }
    table = Table("measure", "MiB", title=f"{len(keys)} concurrent uploads of {arguments.size_mib} MiB")
    for name in ("idle_bytes", "peak_bytes", "after_bytes", "bound_bytes"):
        table.add_row(name.removesuffix("_bytes"), f"{int(str(record[name])) / MIB:,.0f}")
    table.add_row("acknowledged", f"{record['acknowledged']} of {len(keys)}")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if is_right else 1


if __name__ == "__main__":
    run_tool(main)
