"""Replays traces through the store's own policy classes, whole requests at a time, with blocks of equal size.

What is counted is the prefix token hit ratio: tokens of the longest stored prefix over all input tokens, cold start included.
A look-up comes first, then the policy is told of the request, then what was missing is offered head first, until a refusal.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from trace_blocks import BLOCK_TOKENS, read_trace

from kvobj.policy import ChunkPolicy
from kvobj.policy.chunk_policy import NAME_BYTES, CacheTier
from kvobj.policy.gipe import LOG_FACTOR, GipePolicy
from kvobj.policy.lru_chunks import LruChunks
from kvobj.policy.offline import best_prefix_hits, next_uses

BLOCK_BYTES: Final = 1
# In the replay of two tiers dram keeps a block whose nvme copy goes, so a copy of what dram has is worth little there. (The store
# removes the chunk from both, and ranks copies at their full worth.)
LAZY_DUPLICATE_FACTOR: Final = 0.1
LAZY_WRITE_MARGIN: Final = 1.8
_HINT_MOST: Final = 5
_DRAM, _NVME = CacheTier.DRAM, CacheTier.NVME


class ReplayPolicy(ChunkPolicy, Protocol):
    """What both policies offer beyond the protocol."""

    def offer(
        self, chain: bytes, first: int, tier: CacheTier, *, size_bytes: int, now_ms: int
    ) -> tuple[int, list[bytes]]:
        """See `GipePolicy.offer`."""
        ...

    def locate(self, chain: bytes) -> bytes:
        """See `GipePolicy.locate`."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One request as policies are told of it."""

    now_ms: int
    block_ids: tuple[int, ...]
    chain: bytes
    last_tokens: int
    hint: int

    def tokens(self, blocks: int) -> int:
        """Tokens of the first so many blocks."""
        if blocks < len(self.block_ids):
            return blocks * BLOCK_TOKENS
        return max(0, blocks - 1) * BLOCK_TOKENS + self.last_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace in memory."""

    name: str
    requests: list[Request]
    input_tokens: int
    unique_blocks: int

    def capacity(self, percent: float) -> int:
        """So many percent of the different blocks, rounded down."""
        return max(1, int(self.unique_blocks * percent / 100))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hit ratios in percent of all input tokens; nvme writes in blocks per different block of the trace."""

    hit_percent: float
    dram_percent: float = 0.0
    nvme_writes: float = 0.0


def load_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read and prepare a trace file."""
    requests, tokens, unique = [], 0, set[int]()
    for request in read_trace(path, limit=limit):
        ids = request.block_ids
        rest = request.input_tokens - BLOCK_TOKENS * (len(ids) - 1)
        requests.append(
            Request(
                now_ms=round(request.at_seconds * 1000),
                block_ids=ids,
                chain=b"".join([block.to_bytes(NAME_BYTES, "little") for block in ids]),
                last_tokens=min(BLOCK_TOKENS, max(0, rest)) if ids else 0,
                hint=min(_HINT_MOST, max(0, request.output_tokens.bit_length() - 1) // 2),
            )
        )
        tokens += request.input_tokens
        unique.update(ids)
    return Trace(path.name.removesuffix(".jsonl.zst"), requests, tokens, len(unique))


def make_policy(
    kind: str, dram_blocks: int, nvme_blocks: int = 0, *, log_factor: int = LOG_FACTOR, use_native: bool = True
) -> ReplayPolicy:
    """`lru` or `gipe`, for so many blocks. The log is `log_factor` times as long even where that is short, as the published numbers
    are; a store keeps `LOG_LEAST` entries at least."""
    capacities = {_DRAM: dram_blocks * BLOCK_BYTES, _NVME: nvme_blocks * BLOCK_BYTES}
    if kind == "lru":
        return LruChunks(capacities)
    return GipePolicy(
        capacities,
        log_factor=log_factor,
        log_least=4096,
        duplicate_factor=LAZY_DUPLICATE_FACTOR,
        write_margin=LAZY_WRITE_MARGIN,
        use_native=use_native,
    )


def replay_one_tier(
    trace: Trace, policy: ReplayPolicy, *, use_hints: bool = False, step: Callable[[], None] | None = None
) -> Outcome:
    """One tier: what was missing is offered to it."""
    hits = 0
    for request in trace.requests:
        blocks = _leading(policy.locate(request.chain))
        hits += request.tokens(blocks)
        _tell(policy, request, use_hints=use_hints)
        policy.offer(request.chain, blocks, _DRAM, size_bytes=BLOCK_BYTES, now_ms=request.now_ms)
        if step is not None:
            step()
    return Outcome(100 * hits / trace.input_tokens)


def replay_two_tiers(
    trace: Trace, policy: ReplayPolicy, capacities: tuple[int, int], *, step: Callable[[], None] | None = None
) -> Outcome:
    """Dram over nvme, lazy: a hit in nvme keeps its copy there, so that leaving dram later costs no write. What leaves dram
    without a copy, or is refused by it, is offered to nvme."""
    run = _TwoTiers(policy, capacities)
    for request in trace.requests:
        run.serve(request)
        if step is not None:
            step()
    scale = 100 / trace.input_tokens
    return Outcome(run.hits * scale, run.dram_hits * scale, run.writes / trace.unique_blocks)


class _TwoTiers:
    def __init__(self, policy: ReplayPolicy, capacities: tuple[int, int]) -> None:
        self._policy = policy
        self._capacities = capacities
        self._parents: dict[bytes, bytes | None] = {}
        self.hits = self.dram_hits = self.writes = 0

    def serve(self, request: Request) -> None:
        policy, now_ms = self._policy, request.now_ms
        places = policy.locate(request.chain)
        blocks = _leading(places)
        in_dram = next((at for at in range(blocks) if not places[at] & 1), blocks)
        self.hits += request.tokens(blocks)
        self.dram_hits += request.tokens(in_dram)
        _tell(policy, request, use_hints=False)
        names = [request.chain[at : at + NAME_BYTES] for at in range(0, len(request.chain), NAME_BYTES)]
        is_open = True
        for at in range(in_dram, len(names)):
            name, parent = names[at], names[at - 1] if at else None
            self._parents[name] = parent
            if policy.holds(name, _DRAM):
                continue
            is_open = is_open and self._enter(name, parent, _DRAM, now_ms)
            if not is_open and not policy.holds(name, _NVME) and not self._enter(name, parent, _NVME, now_ms):
                return

    def _enter(self, name: bytes, parent: bytes | None, tier: CacheTier, now_ms: int) -> bool:
        """Admit and store one block, and let its victims go. Those of dram without a copy are offered to nvme."""
        policy = self._policy
        if not policy.admits(name, tier, size_bytes=BLOCK_BYTES, now_ms=now_ms, parent=parent):
            return False
        excess = policy.size_bytes(tier) + BLOCK_BYTES - self._capacities[tier] * BLOCK_BYTES
        victims: Sequence[bytes] = ()
        if excess > 0:
            victims = policy.victims(tier, excess, now_ms=now_ms, eligible=lambda victim: victim != parent)
            if not victims:
                return False
        for victim in victims:
            policy.dropped(victim, tier)
        policy.stored(name, tier, parent=parent, size_bytes=BLOCK_BYTES, now_ms=now_ms)
        if tier is _NVME:
            self.writes += 1
            return True
        for victim in victims:
            if not policy.holds(victim, _NVME):
                self._enter(victim, self._parents[victim], _NVME, now_ms)
        return True


def best_hit_percent(trace: Trace, capacity: int, *, uses: Sequence[array[int]] | None = None) -> float:
    """The optimum (`kvobj.policy.offline`)."""
    chains = [request.block_ids for request in trace.requests]
    hits = best_prefix_hits(chains, capacity, uses=uses)
    tokens = sum(request.tokens(blocks) for request, blocks in zip(trace.requests, hits, strict=True))
    return 100 * tokens / trace.input_tokens


def uses_of(trace: Trace) -> list[array[int]]:
    """`next_uses` of the trace, for many calls of `best_hit_percent`."""
    return next_uses([request.block_ids for request in trace.requests])


def _leading(places: bytes) -> int:
    """How many leading blocks some tier holds."""
    first_missing = places.find(0)
    return len(places) if first_missing < 0 else first_missing


def _tell(policy: ChunkPolicy, request: Request, *, use_hints: bool) -> None:
    policy.request(
        request.chain,
        now_ms=request.now_ms,
        partial_last=request.last_tokens < BLOCK_TOKENS,
        hint=request.hint if use_hints else 0,
    )
