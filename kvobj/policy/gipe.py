"""GIPE, Gittins-index prefix eviction: keeps the chunks that are soonest asked for again per second that they are kept.

One instance ranks dram and nvme; `docs/policy.md` says how it decides and what that gives. The work is done by a core, in C
where the native library is there, else in Python, with the same decisions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from blake3 import blake3

from kvobj.native import library
from kvobj.policy.chunk_policy import CacheTier
from kvobj.policy.gipe_core import CoreSettings, CoreTotals, GipeCore
from kvobj.policy.gipe_native import NativeCore
from kvobj.policy.gipe_python import PythonCore
from kvobj.policy.gipe_rank import BUCKETS, CLASSES, HINTS

LOG_FACTOR: Final = 16
LOG_LEAST: Final = 65_536
LOG_MOST: Final = 4_000_000
"""Bounds the memory: 8 B a log entry, and at most as many ghosts of some 40 B."""
DUPLICATE_FACTOR: Final = 1.0
"""What an nvme copy is worth of which dram has another. Less than 1 only where dram keeps its own when nvme's goes: here the chunk
is removed, and the hottest would go first."""
WRITE_MARGIN: Final = 1.1
"""How much more than what goes for it a chunk must be worth to be written: endurance of nvme against hit ratio."""
_NAMED_AT_ONCE: Final = 256
SCAN_MAX: Final = 10_000
"""How many chunks one call of `victims` looks at."""

_MAGIC: Final = b"kvobj GIPE counts 1\0"
_SHAPE: Final = struct.Struct("<II")
_DIGEST_BYTES: Final = 32


class GipePolicy:
    """See `ChunkPolicy`. `capacities`: what each tier may hold, in bytes; a tier without one admits nothing. The other options are
    those of `CoreSettings`."""

    def __init__(
        self,
        capacities: Mapping[CacheTier, int],
        *,
        log_factor: int = LOG_FACTOR,
        log_least: int = LOG_LEAST,
        log_most: int = LOG_MOST,
        duplicate_factor: float = DUPLICATE_FACTOR,
        write_margin: float = WRITE_MARGIN,
        use_native: bool = True,
    ) -> None:
        settings = CoreSettings(
            (capacities.get(CacheTier.DRAM, 0), capacities.get(CacheTier.NVME, 0)),
            log_factor=log_factor,
            log_least=min(log_least, log_most),
            log_most=log_most,
            duplicate_factor=duplicate_factor,
            write_margin=write_margin,
        )
        native = library() if use_native else None
        self._core: GipeCore = PythonCore(settings) if native is None else NativeCore(native, settings)

    def request(self, chain: bytes, *, now_ms: int, partial_last: bool = False, hint: int = 0) -> int:
        """See `ChunkPolicy.request`."""
        return self._core.request(
            chain, now_ms, partial_last=partial_last, hint=hint if 0 <= hint < HINTS else min(max(hint, 0), HINTS - 1)
        )

    def access(self, name: bytes, *, now_ms: int) -> None:
        """See `ChunkPolicy.access`."""
        self._core.access(name, now_ms)

    def admits(
        self, name: bytes, tier: CacheTier, *, size_bytes: int, now_ms: int, parent: bytes | None = None
    ) -> bool:
        """See `ChunkPolicy.admits`."""
        return self._core.admits(name, tier, size_bytes, parent, now_ms)

    def stored(self, name: bytes, tier: CacheTier, *, parent: bytes | None, size_bytes: int, now_ms: int) -> None:
        """See `ChunkPolicy.stored`. `MemoryError` where the tables cannot grow."""
        self._core.stored(name, tier, size_bytes, parent, now_ms)

    def stored_many(self, chunks: Sequence[tuple[bytes, int]], tier: CacheTier, *, now_ms: int) -> None:
        """See `ChunkPolicy.stored_many`. `MemoryError` as `stored`."""
        self._core.stored_many(chunks, tier, now_ms)

    def dropped(self, name: bytes, tier: CacheTier) -> None:
        """See `ChunkPolicy.dropped`."""
        self._core.dropped(name, tier)

    def dropped_many(self, names: Sequence[bytes], tier: CacheTier) -> None:
        """See `ChunkPolicy.dropped_many`: a fifth of the time of one by one."""
        self._core.dropped_many(names, tier)

    def set_capacity(self, tier: CacheTier, capacity_bytes: int) -> None:
        """See `ChunkPolicy.set_capacity`."""
        self._core.set_capacity(tier, capacity_bytes)

    def victims(
        self, tier: CacheTier, bytes_needed: int, *, now_ms: int, eligible: Callable[[bytes], bool], limit: int = 1000
    ) -> list[bytes]:
        """See `ChunkPolicy.victims`. At most `SCAN_MAX` chunks are looked at."""
        return self._all_eligible(tier, bytes_needed, now_ms, eligible, min(limit, SCAN_MAX)) or self._some_eligible(
            tier, bytes_needed, now_ms, eligible, limit
        )

    def _all_eligible(
        self, tier: CacheTier, bytes_needed: int, now_ms: int, eligible: Callable[[bytes], bool], limit: int
    ) -> list[bytes]:
        """What `victims` answers where none that it comes to is refused, which is the rule; else []. A quarter of the time."""
        chosen: list[bytes] = []
        found_bytes, size_bytes = 0, 0
        walk = self._core.walk(tier, now_ms)
        try:
            while found_bytes < bytes_needed and len(chosen) < limit:
                asked = min(limit - len(chosen), _NAMED_AT_ONCE)
                names, size_bytes = walk.some(bytes_needed - found_bytes, asked, take=bool(chosen))
                if not all(map(eligible, names)):
                    return []
                chosen += names
                found_bytes += size_bytes
                if len(names) < asked:
                    break
        finally:
            walk.end()
        return chosen

    def _some_eligible(
        self, tier: CacheTier, bytes_needed: int, now_ms: int, eligible: Callable[[bytes], bool], limit: int
    ) -> list[bytes]:
        chosen: list[bytes] = []
        found_bytes, take = 0, False
        walk = self._core.walk(tier, now_ms)
        try:
            for _ in range(SCAN_MAX):
                if found_bytes >= bytes_needed or len(chosen) >= limit:
                    break
                found = walk.next(take=take)
                if found is None:
                    break
                name, size_bytes = found
                take = eligible(name)
                if take:
                    chosen.append(name)
                    found_bytes += size_bytes
        finally:
            walk.end()
        return chosen

    def offer(
        self, chain: bytes, first: int, tier: CacheTier, *, size_bytes: int, now_ms: int
    ) -> tuple[int, list[bytes]]:
        """`admits`, `victims`, `dropped` and `stored` of a chain's chunks from `first` on, all of one size, in one call, as a
        replay does them: how many were taken before the first refusal, and what went for them."""
        return self._core.offer(chain, first, tier, size_bytes, now_ms)

    def locate(self, chain: bytes) -> bytes:
        """Which tiers hold each chunk, a byte each: bit 0 dram, bit 1 nvme."""
        return self._core.locate(chain)

    def holds(self, name: bytes, tier: CacheTier) -> bool:
        """See `ChunkPolicy.holds`."""
        return bool(self._core.locate(name)[0] & 1 << tier)

    def size_bytes(self, tier: CacheTier) -> int:
        """See `ChunkPolicy.size_bytes`."""
        return self._core.used_bytes(tier)

    def count(self, tier: CacheTier) -> int:
        """How many chunks the tier holds."""
        return self._core.count(tier)

    @property
    def totals(self) -> CoreTotals:
        """How much the policy knows, and what that takes."""
        return self._core.totals()

    def save(self) -> bytes:
        """See `ChunkPolicy.save`: the counts of reuse by class and age, some 92 KiB."""
        body = _MAGIC + _SHAPE.pack(CLASSES, BUCKETS) + self._core.counts()
        return body + blake3(body).digest()

    def load(self, state: bytes) -> None:
        """See `ChunkPolicy.load`; a damaged one is ignored too."""
        head = _MAGIC + _SHAPE.pack(CLASSES, BUCKETS)
        body, digest = state[:-_DIGEST_BYTES], state[-_DIGEST_BYTES:]
        expected_bytes = len(head) + 2 * 4 * CLASSES * BUCKETS
        if len(body) == expected_bytes and body.startswith(head) and blake3(body).digest() == digest:
            self._core.set_counts(body[len(head) :])
