"""Which system calls move the bytes of one PUT and one GET: counts and bytes by call, as `strace` saw them.

Shows how often a payload byte crosses the kernel's border between socket, arena and disk. Needs strace and the right to
trace one's own child processes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench_support import MIB, BucketSetting, ServerProcess, ServerSettings, own_server, wait_until
from command_line import Parser, one_or_more, output_file, run_tool
from rich.console import Console
from rich.table import Table

CALLS: Final = (
    "read,readv,recvfrom,recvmsg,write,writev,sendto,sendmsg,sendfile,pread64,preadv,preadv2,pwrite64,pwritev,pwritev2,"
    "fdatasync,fsync,msync,copy_file_range,splice,io_uring_enter,mmap,madvise"
)
_LINE: Final = re.compile(r"^\s*(?:\d+\s+)?(?:[\d.]+\s+)?(\w+)\(.*\)\s+= (-?\d+)")
_RESUMED: Final = re.compile(r"<\.\.\. (\w+) resumed>.*\)\s+= (-?\d+)")
_BYTE_CALLS: Final = ("read", "recv", "write", "send", "pread", "pwrite", "copy_file_range", "splice")
_HTTP_OK: Final = 200


def parse(text: str) -> dict[str, list[int]]:
    """Return values of the successful calls, by name."""
    calls: dict[str, list[int]] = defaultdict(list)
    for line in text.splitlines():
        found = _RESUMED.search(line) or _LINE.match(line)
        if found and int(found.group(2)) >= 0:
            calls[found.group(1)].append(int(found.group(2)))
    return calls


def traced(server: ServerProcess, output: Path, method: str, path: str, body: bytes) -> dict[str, list[int]]:
    """One request while strace is attached to all of the server's threads."""
    strace = shutil.which("strace")
    if strace is None:
        raise SystemExit("strace is not installed: apt-get install strace")
    command = [strace, "-f", "-q", "-e", f"trace={CALLS}", "-o", str(output), "-p", str(server.pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: _is_traced(server.pid), timeout_seconds=10, what="strace to attach")
        with server.raw() as raw:
            reply = raw.request(method, path, body)
        if reply.status != _HTTP_OK:
            raise RuntimeError(f"refused status={reply.status} body={reply.body[:300]!r}")
    finally:
        tracer.terminate()
        tracer.communicate(timeout=10)
    return parse(output.read_text(errors="replace"))


def _is_traced(pid: int) -> bool:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            states.append((task / "status").read_text())
        except OSError:  # a thread that has just ended
            continue
    return all("TracerPid:\t0" not in state for state in states)


def show(title: str, calls: dict[str, list[int]], size_bytes: int) -> dict[str, object]:
    """Print a table; return it as a record."""
    table = Table("call", "count", "bytes", "largest", "bytes / payload", title=title)
    record: dict[str, object] = {}
    for name, values in sorted(calls.items()):
        moves_bytes = name.startswith(_BYTE_CALLS)
        total = sum(values) if moves_bytes else 0
        largest = max(values) if moves_bytes else 0
        ratio = f"{total / size_bytes:.2f}" if moves_bytes else ""
        table.add_row(name, str(len(values)), f"{total:,}" if moves_bytes else "", f"{largest:,}", ratio)
        record[name] = {"count": len(values), "bytes": total, "largest": largest}
    Console().print(table)
    return record


def main() -> int:
    """Trace one PUT of each class, one warm GET and one cold GET."""
    parser = Parser(__doc__)
    parser.add_argument("--size-mib", type=one_or_more, default=8)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    size = arguments.size_mib * MIB
    body = bytes(range(256)) * (size // 256)
    buckets = (BucketSetting("memory", "kv", "memory"), BucketSetting("local", "kv", "local"))
    record: dict[str, object] = {"size_bytes": size}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvobj-strace-")))
        settings = ServerSettings(dram_bytes=512 * MIB, buckets=buckets)
        server = stack.enter_context(own_server(directory / "server", settings))
        output = directory / "strace.txt"
        for title, method, path in (
            (f"PUT {arguments.size_mib} MiB, class memory", "PUT", "/memory/one"),
            (f"PUT {arguments.size_mib} MiB, class local", "PUT", "/local/one"),
            (f"GET {arguments.size_mib} MiB from dram", "GET", "/local/one"),
        ):
            record[title] = show(title, traced(server, output, method, path, body if method == "PUT" else b""), size)
        server.terminate()
        server.start()
        title = f"GET {arguments.size_mib} MiB from nvme"
        record[title] = show(title, traced(server, output, "GET", "/local/one", b""), size)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    run_tool(main)
