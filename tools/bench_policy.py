"""Times the eviction policy on synthetic chains: a full cache of equal blocks, whole requests, an eviction for every new block."""

from __future__ import annotations

import random
import time

from command_line import Parser, above_zero, one_or_more, run_tool, share
from rich.console import Console
from rich.table import Table

from kvobj.native import status
from kvobj.policy.chunk_policy import NAME_BYTES, CacheTier
from kvobj.policy.gipe import GipePolicy


def chains(count: int, length: int, reuse: float, recent: int, seed: int) -> list[bytes]:
    """Requests of `length` blocks: new chains, or with probability `reuse` a recent one that goes on for a quarter of that."""
    source = random.Random(seed)
    made: list[bytes] = []
    history: list[bytes] = []
    for _ in range(count):
        if history and source.random() < reuse:
            at = source.randrange(max(0, len(history) - recent), len(history))
            chain = history[at] + source.randbytes(max(1, length // 4) * NAME_BYTES)
            history[at] = chain if len(chain) < 4 * length * NAME_BYTES else source.randbytes(length * NAME_BYTES)
        else:
            chain = source.randbytes(length * NAME_BYTES)
            history.append(chain)
        made.append(chain)
    return made


def seconds_of_calls(policy: GipePolicy, requests: int, now: float) -> float:
    """What the measured loop takes for so many requests where there is nothing to decide: itself, and the way to the code and back.
    Naming what was evicted is no part of it."""
    began = time.process_time()
    chain, accesses, evicted = b"", 0, 0
    for _ in range(requests):
        blocks = len(chain) // NAME_BYTES
        now += 1000 * blocks
        policy.request(chain, now_ms=int(now))
        _, gone = policy.offer(chain, 0, CacheTier.DRAM, size_bytes=1, now_ms=int(now))
        evicted += len(gone)
        accesses += blocks
    return time.process_time() - began


def main() -> int:
    """Fill, measure, report."""
    parser = Parser(__doc__)
    parser.add_argument("--entries", type=one_or_more, default=1_000_000, help="blocks that the cache holds")
    parser.add_argument("--length", type=one_or_more, default=24, help="blocks a chain")
    parser.add_argument("--reuse", type=share, default=0.5)
    parser.add_argument("--measured", type=one_or_more, default=2_000_000, help="block accesses timed")
    parser.add_argument(
        "--per-second", type=above_zero, default=5000, help="block accesses a second of the trace's own time"
    )
    parser.add_argument("--python", action="store_true", help="the pure twin")
    arguments = parser.parse_args()
    policy = GipePolicy({CacheTier.DRAM: arguments.entries}, use_native=not arguments.python)
    now, accesses, evicted = 0.0, 0, 0
    measured_from, requests = 0, 0
    wanted = arguments.entries * 4
    seed = 0
    seconds = 0.0
    while accesses < wanted + arguments.measured:
        batch = chains(20_000, arguments.length, arguments.reuse, 20_000, seed)
        seed += 1
        if accesses >= wanted and not measured_from:
            measured_from, evicted, seconds, requests = accesses, 0, 0.0, 0
        began = time.process_time()
        for chain in batch:
            blocks = len(chain) // NAME_BYTES
            now += 1000 * blocks / arguments.per_second
            policy.request(chain, now_ms=int(now))
            _, gone = policy.offer(chain, 0, CacheTier.DRAM, size_bytes=1, now_ms=int(now))
            evicted += len(gone)
            accesses += blocks
        seconds += time.process_time() - began
        requests += len(batch)
    timed, totals = accesses - measured_from, policy.totals
    within = seconds - seconds_of_calls(policy, requests, now)
    table = Table("measure", "value", title=f"gipe, {status().detail if not arguments.python else 'pure twin'}")
    held = policy.count(CacheTier.DRAM)
    table.add_row("blocks held / known / log entries", f"{held:,} / {totals.known_chunks:,} / {totals.log_entries:,}")
    table.add_row("block accesses timed", f"{timed:,}, {evicted:,} evictions")
    table.add_row("a block access, with its share of evictions", f"{seconds / timed * 1e9:.0f} ns")
    table.add_row("the same, less that loop's calls with empty chains", f"{within / timed * 1e9:.0f} ns")
    table.add_row(
        "tables allocated", f"{totals.allocated_bytes / 1e6:.0f} MB, {totals.allocated_bytes / held:.0f} B a block held"
    )
    Console().print(table)
    return 0


if __name__ == "__main__":
    run_tool(main)
