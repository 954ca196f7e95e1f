"""Copies between memory on one host: kvobj's beside the C library's, and both ways to read ahead.

Pieces of 8 MiB, of memory whose pages are there and which is more than the caches hold, by one thread and by one a core: through
the caches by memcpy, and written past them, with what is read ahead kept out of them or read into them. kvobj takes the one or the
other by the processor's maker (native/copies.c). Rounds are interleaved, medians compared. Exits 1 where kvobj's copy has less than
0.9 of the fastest by as many threads.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import threading
import time
from array import array
from typing import Final

from bench_support import MIB
from command_line import Parser, one_or_more, output_file, run_tool
from limits import prefaulted
from load_client import hardware
from rich.console import Console
from rich.table import Table

from kvobj.buffers import address_of
from kvobj.native import library, status

OURS: Final = "kvobj"
WAYS: Final = {
    "memcpy": 0,
    "past the caches, reads past them too": 2,
    "past the caches, reads into them": 3,
    OURS: 1,
}
"""`way` of `kvobj_copy_steps`."""
PIECE_BYTES: Final = 8 * MIB
SHARE_WANTED: Final = 0.9


class Copy:
    """The same pieces, copied again and again. RuntimeError without the native library."""

    def __init__(self, size_bytes: int) -> None:
        native = library()
        if native is None:
            raise RuntimeError(f"only the native library has these ways: {status().detail}")
        self._call = native.kvobj_copy_steps
        self._target, self._source = prefaulted(size_bytes), prefaulted(size_bytes)
        target, source = address_of(self._target), address_of(self._source)
        starts = range(0, size_bytes, PIECE_BYTES)
        self._triples = array("Q", [number for at in starts for number in (target + at, source + at, PIECE_BYTES)])

    def seconds(self, way: int, threads: int) -> float:
        """How long all pieces take by so many threads, their start included."""
        taken, done = ctypes.c_uint64(0), ctypes.c_uint64(0)
        pieces = ctypes.c_void_p(self._triples.buffer_info()[0])
        count = ctypes.c_uint64(len(self._triples) // 3)

        def work() -> None:
            self._call(pieces, count, ctypes.byref(taken), ctypes.byref(done), way, 0)

        others = [threading.Thread(target=work) for _ in range(threads - 1)]
        began = time.perf_counter()
        for other in others:
            other.start()
        work()
        for other in others:
            other.join()
        return time.perf_counter() - began


def main() -> int:
    """Measure and report."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=one_or_more, default=9)
    parser.add_argument(
        "--size-mib", type=one_or_more, default=512, help="of either side, a multiple of 8; default: 512"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    size_bytes = max(1, arguments.size_mib * MIB // PIECE_BYTES) * PIECE_BYTES
    copy = Copy(size_bytes)
    counts = sorted({1, os.cpu_count() or 1})
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for threads in counts:
            for name, way in WAYS.items():
                rates.setdefault((name, threads), []).append(size_bytes / copy.seconds(way, threads) / 1e9)
    medians = {key: statistics.median(each) for key, each in rates.items()}
    table = Table(
        "copy", "threads", "GB/s", "of the fastest", title=f"{size_bytes // MIB} MiB, medians of {arguments.rounds}"
    )
    shares: dict[int, float] = {}
    for threads in counts:
        fastest = max(rate for (_, count), rate in medians.items() if count == threads)
        shares[threads] = medians[OURS, threads] / fastest
        for name in WAYS:
            rate = medians[name, threads]
            table.add_row(name, str(threads), f"{rate:.2f}", f"{rate / fastest:.2f}")
        table.add_section()
    Console().print(table)
    is_right = min(shares.values()) >= SHARE_WANTED
    if arguments.json is not None:
        record = {
            "size_bytes": size_bytes,
            "rounds": arguments.rounds,
            "gigabytes_a_second": {f"{name}, threads: {count}": rate for (name, count), rate in medians.items()},
            "is_right": is_right,
            "hardware": hardware(),
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if is_right else 1


if __name__ == "__main__":
    run_tool(main)
