"""The replay as engines would do it: one ?match a request that pins what it finds, one ?mget for the hits, ?mput for the misses.

Workers are holders: each has a session, keeps the pins of its last requests, reads them again before it lets go, and now and
then crashes (drops its session without closing it) and goes on with another. Every byte is compared; a pinned chunk that cannot
be read is counted apart. At the end all workers crash with pins held, the namespace is removed, and the time is taken until
nothing is left.
"""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from policy_replay import Trace, best_hit_percent, make_policy, replay_one_tier
from replay_statistics import ReplayStatistics, percentile
from rich.progress import Progress
from rich.table import Table
from trace_blocks import BlockContent, TraceRequest

from kvobj.client import AdminClient, KvClient, Name, Namespace, NewChunk, Pin, Session
from kvobj.client.kv_values import ROOT, StoredChunk
from kvobj.errors import CorruptionError, KvobjError, NoSuchKeyError, StoreFullError
from kvobj.ids.chunk_ids import chunk_id

CHUNKS_A_PUT: Final = 1000
_TOKEN_BYTES: Final = 4
_POLL_SECONDS: Final = 0.1
_EXPIRY_SECONDS: Final = 1.5
"""Sessions end half a second after their TTL, and the worker that removes them looks every second."""


@dataclass(frozen=True, slots=True)
class MatchSettings:
    """How the holders behave, and the server's times: what is over must be gone within TTL, grace and two sweeps."""

    namespace: str
    ids: str
    bytes_per_token: int
    workers: int
    held_requests: int
    crash_share: float
    ttl_ms: int
    grace_seconds: float
    sweep_seconds: float
    bytes_a_put: int
    seed: int

    @property
    def garbage_seconds_max(self) -> float:
        """The bound (`gc-protocol` §2.6, L1)."""
        return self.ttl_ms / 1000 + _EXPIRY_SECONDS + self.grace_seconds + 2 * self.sweep_seconds


@dataclass(slots=True)
class MatchStatistics(ReplayStatistics):
    """What a replay through ?match counts beyond a plain one."""

    pinned_unreadable: int = 0
    pinned_reads: int = 0
    reads_too_late: int = 0
    crashes: int = 0
    refused_puts: int = 0
    reclaims: int = 0
    match_seconds: array[float] = field(default_factory=lambda: array("d"))

    def match_summary(self) -> dict[str, Any]:
        """The further totals, by name."""
        return {
            "pinned_reads": self.pinned_reads,
            "pinned_unreadable": self.pinned_unreadable,
            "reads_too_late": self.reads_too_late,
            "crashes": self.crashes,
            "refused_puts": self.refused_puts,
            "reclaims": self.reclaims,
            "match_p50_ms": percentile(self.match_seconds, 0.50) * 1e3,
            "match_p99_ms": percentile(self.match_seconds, 0.99) * 1e3,
        }


class BlockNames:
    """What the blocks of the trace are called: ids of made-up tokens, or foreign keys. Thread-safe: two threads do the same."""

    def __init__(self, namespace: Namespace, content: BlockContent, tokens: dict[int, int]) -> None:
        self._namespace = namespace
        self._content = content
        self._tokens = tokens
        self._ids: dict[tuple[Name, int], bytes] = {}

    def of(self, blocks: Sequence[int]) -> list[Name]:
        """The names of a chain's blocks."""
        if self._namespace.ids != "kvobj":
            return [self._content.key(block) for block in blocks]
        names: list[Name] = []
        parent = self._namespace.root
        for block in blocks:
            name = self._ids.get((parent, block))
            if name is None:
                tokens = (block % 2**32).to_bytes(_TOKEN_BYTES, "little") * self._tokens[block]
                name = self._ids[(parent, block)] = chunk_id(self._namespace.key, parent, tokens)
            names.append(name)
            parent = name
        return names


@dataclass(frozen=True, slots=True)
class Held:
    """A request whose chunks a holder still keeps pinned."""

    pin: Pin
    names: Sequence[Name]
    blocks: Sequence[int]


class MatchReplay:
    """One run over one namespace."""

    def __init__(
        self, client: KvClient, settings: MatchSettings, content: BlockContent, tokens: dict[int, int]
    ) -> None:
        layout = {"kind": "opaque"}
        declaration = {"model": "trace", "chunk_tokens": 512, "layout": layout, "ids": settings.ids}
        self.namespace = client.declare_namespace(settings.namespace, declaration)
        self.statistics = MatchStatistics()
        self.client = client
        self.settings = settings
        self.content = content
        self.tokens = tokens
        self.names = BlockNames(self.namespace, content, tokens)
        self.lock = threading.Lock()
        self._started = time.monotonic()
        self._failure: BaseException | None = None

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._started

    def run(self, requests: Sequence[TraceRequest], progress: Progress) -> None:
        """Replay the requests in order, several in flight. At the end every worker has crashed with what it held."""
        task = progress.add_task("replay", total=len(requests))
        queue = iter(requests)

        def work(number: int) -> None:
            try:
                worker = _Worker(self, number)
                for request in self._taken(queue):
                    worker.serve(request)
                    with self.lock:
                        self.statistics.sample(self.elapsed_seconds)
                    progress.advance(task)
                worker.crash()
            except BaseException as error:  # noqa: BLE001 - told by the thread that waits
                self._failure = error

        threads = [
            threading.Thread(target=work, args=(number,), daemon=True) for number in range(self.settings.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _taken(self, queue: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
        while self._failure is None:
            with self.lock:
                request = next(queue, None)
            if request is None:
                return
            yield request

    def size_of(self, block: int) -> int:
        """Bytes of a block."""
        return self.tokens[block] * self.settings.bytes_per_token


class _Worker:
    """One holder. Belongs to one thread; the run's statistics are shared under its lock."""

    def __init__(self, run: MatchReplay, number: int) -> None:
        self._run = run
        self._random = random.Random(run.settings.seed * 1000 + number)
        self._held: deque[Held] = deque()
        self._session = self._open()

    def _open(self) -> Session:
        session = Session(self._run.client, holder="replay", ttl_ms=self._run.settings.ttl_ms)
        session.__enter__()
        return session

    def serve(self, request: TraceRequest) -> None:
        """Match and pin, read what is there, store the rest, hold the pin for some requests more."""
        run, settings = self._run, self._run.settings
        statistics = run.statistics
        blocks = request.block_ids
        if not blocks:
            return
        names = run.names.of(blocks)
        began = time.perf_counter()
        rest = request.input_tokens - 512 * (len(blocks) - 1)
        found = self._session.match(
            namespace=run.namespace,
            ids=names,
            is_chain=True,
            output_tokens=request.output_tokens,
            partial_last=rest < 512,  # noqa: PLR2004 - tokens of a block
        )
        seconds, hits = time.perf_counter() - began, found.answer.matched
        if found.pin is not None:
            self._read(found.pin, names[:hits], blocks[:hits])
        self._store(names, blocks, hits)
        with run.lock:
            statistics.match_seconds.append(seconds)
            statistics.requests += 1
            statistics.blocks += len(blocks)
            statistics.block_hits += hits
            statistics.tokens += sum(run.tokens[block] for block in blocks)
            statistics.token_hits += sum(run.tokens[block] for block in blocks[:hits])
        if found.pin is not None:
            self._held.append(Held(found.pin, names[:hits], blocks[:hits]))
        while len(self._held) > settings.held_requests:
            self._let_go()
        if self._random.random() < settings.crash_share:
            self.crash()
            self._session = self._open()

    def crash(self) -> None:
        """Drop the session with all it pins, as a process that dies does."""
        with self._run.lock:
            self._run.statistics.crashes += 1
            self._run.statistics.reclaims += self._session.reclaims
        self._session.abandon()
        for held in self._held:
            assert not held.pin.is_valid
        self._held.clear()

    def _let_go(self) -> None:
        """Read one chunk of the oldest pin once more, then release it."""
        held = self._held.popleft()
        at = self._random.randrange(len(held.names))
        self._read(held.pin, held.names[at : at + 1], held.blocks[at : at + 1])
        held.pin.release()

    def _read(self, pin: Pin, names: Sequence[Name], blocks: Sequence[int]) -> None:
        run, statistics = self._run, self._run.statistics
        began = time.perf_counter()
        size_bytes = wrong = unreadable = late = 0
        try:
            for item in self._session.read_many(pin, names):
                block = blocks[item.index]
                if item.data is None:
                    late += 1
                    continue
                size_bytes += len(item.data)
                wrong += bytes(item.data) != run.content.make(block, run.size_of(block))
        except NoSuchKeyError:
            unreadable = 1
        except CorruptionError:
            wrong += 1
        with run.lock:
            statistics.get_seconds.append(time.perf_counter() - began)
            statistics.pinned_reads += len(names)
            statistics.blocks_read += len(names)
            statistics.bytes_read += size_bytes
            statistics.wrong_blocks += wrong
            statistics.pinned_unreadable += unreadable
            statistics.reads_too_late += late

    def _store(self, names: Sequence[Name], blocks: Sequence[int], hits: int) -> None:
        run, settings = self._run, self._run.settings
        missing = iter(range(hits, len(names)))
        pending = next(missing, None)
        while pending is not None:
            batch: list[NewChunk] = []
            size_bytes = 0
            while pending is not None and len(batch) < CHUNKS_A_PUT and size_bytes < settings.bytes_a_put:
                data = run.content.make(blocks[pending], run.size_of(blocks[pending]))
                parent = names[pending - 1] if pending else ROOT
                batch.append(NewChunk(names[pending], data, parent=parent))
                size_bytes += len(data)
                pending = next(missing, None)
            if not self._put(batch):
                return

    def _put(self, batch: list[NewChunk]) -> bool:
        """Store a piece of a chain; False where the store takes no more of it."""
        run, statistics = self._run, self._run.statistics
        began = time.perf_counter()
        errors: list[str] = []
        results: list[StoredChunk | KvobjError] = []
        refused = 0
        try:
            results = run.client.mput(batch, namespace=run.namespace)
        except StoreFullError:
            refused = len(batch)
        except KvobjError as error:
            errors.append(f"mput {type(error).__name__}")
        stored = [each for each in results if isinstance(each, StoredChunk)]
        for each in results:
            if isinstance(each, StoreFullError):
                refused += 1
            elif isinstance(each, KvobjError):
                errors.append(f"item {type(each).__name__}")
        new = [len(chunk.data) for chunk, each in zip(batch, results, strict=False) if _is_new(each)]
        with run.lock:
            statistics.put_seconds.append(time.perf_counter() - began)
            statistics.blocks_existed += len(stored) - len(new)
            statistics.blocks_written += len(new)
            statistics.bytes_written += sum(new)
            statistics.refused_puts += refused
            statistics.errors.update(errors)
        return len(stored) == len(batch)


def _is_new(result: StoredChunk | KvobjError) -> bool:
    return isinstance(result, StoredChunk) and not result.existed


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is left of a run, by the server's own account."""

    sessions: int
    objects: int
    waiting_for_pins: int
    delete_queue: int
    blobs: int

    @property
    def is_clean(self) -> bool:
        """Whether nothing at all is left."""
        return not (self.sessions or self.objects or self.waiting_for_pins or self.delete_queue or self.blobs)


def occupancy(admin: AdminClient) -> Occupancy:
    """Ask the admin port."""
    status: Any = admin.status()
    return Occupancy(
        sessions=int(status["leases"]["sessions"]),
        objects=int(status["catalog"]["objects"]),
        waiting_for_pins=int(status["gc"]["waiting_for_pins_chunks"]),
        delete_queue=int(status["queues"]["delete"]),
        blobs=sum(int(tier["blobs"]) for tier in status["tiers"]),
    )


def clear_away(run: MatchReplay, admin: AdminClient) -> dict[str, Any]:
    """Remove the namespace while crashed holders' pins still stand, and measure how long the last of it takes.

    `garbage_seconds` is None where it was not gone within twice the bound. The store must hold nothing else.
    """
    limit = run.settings.garbage_seconds_max
    at_crash = occupancy(admin)
    began = time.monotonic()
    recalled = run.client.remove_namespace(run.namespace.name)
    left = occupancy(admin)
    while not left.is_clean and time.monotonic() - began < 2 * limit:
        time.sleep(_POLL_SECONDS)
        left = occupancy(admin)
    seconds = time.monotonic() - began
    return {
        "recalled_chunks": recalled,
        "sessions_at_crash": at_crash.sessions,
        "garbage_seconds": seconds if left.is_clean else None,
        "garbage_seconds_max": limit,
        "left": None if left.is_clean else str(left),
    }


def bounds(trace: Trace, capacity_blocks: int) -> dict[str, float]:
    """Token hit ratios of other ways to keep so many blocks, for the same requests one after another."""
    lru = replay_one_tier(trace, make_policy("lru", capacity_blocks)).hit_percent
    gipe = replay_one_tier(trace, make_policy("gipe", capacity_blocks)).hit_percent
    best = best_hit_percent(trace, capacity_blocks)
    return {
        "capacity_blocks": capacity_blocks,
        "lru_token_hit_ratio": lru / 100,
        "gipe_token_hit_ratio": gipe / 100,
        "best_token_hit_ratio": best / 100,
    }


def match_table(summary: dict[str, Any]) -> Table:
    """The summary for people."""
    table = Table("measure", "value", title=f"{summary['trace']} through ?match, {summary['ids']} ids")
    seconds = summary["elapsed_seconds"]
    table.add_row("requests, block accesses", f"{summary['requests']:,}, {summary['blocks']:,} in {seconds:.1f} s")
    table.add_row("token prefix hit ratio", f"{summary['token_hit_ratio']:.4f}")
    for name, text in (
        ("lru_token_hit_ratio", "the same blocks kept by LRU, alone"),
        ("gipe_token_hit_ratio", "the same by the policy alone"),
        ("best_token_hit_ratio", "the most that is possible"),
        ("infinite_cache_token_hit_ratio", "nothing ever forgotten"),
    ):
        if name in summary:
            table.add_row(text, f"{summary[name]:.4f}")
    table.add_row(
        "blocks read / written / existed",
        " / ".join(f"{summary[name]:,}" for name in ("blocks_read", "blocks_written", "blocks_existed")),
    )
    table.add_row("blocks refused for want of room", f"{summary['refused_puts']:,}")
    table.add_row("match p50 / p99", f"{summary['match_p50_ms']:.2f} / {summary['match_p99_ms']:.2f} ms")
    table.add_row("removed by the collector", f"{summary.get('claimed_chunks', 0):,} chunks")
    table.add_row("holders' crashes, reclaims", f"{summary['crashes']:,}, {summary['reclaims']:,}")
    table.add_row("wrong blocks", str(summary["wrong_blocks"]))
    table.add_row("pinned and unreadable", f"{summary['pinned_unreadable']} of {summary['pinned_reads']:,}")
    table.add_row("read too late (a miss)", str(summary["reads_too_late"]))
    table.add_row("errors", ", ".join(f"{name} {count}" for name, count in summary["errors"].items()) or "none")
    if "garbage_seconds" in summary:
        took = summary["garbage_seconds"]
        text = "NOT GONE: " + str(summary["left"]) if took is None else f"{took:.1f} s"
        table.add_row("garbage gone after", f"{text} (bound {summary['garbage_seconds_max']:.1f} s)")
    return table


def is_right(summary: dict[str, Any]) -> bool:
    """Whether nothing was wrong: no byte, no pin, no error, and no garbage beyond its time."""
    took = summary.get("garbage_seconds", 0.0)
    is_gone = took is not None and took <= summary.get("garbage_seconds_max", 0.0) + 1.0
    return not (summary["wrong_blocks"] or summary["pinned_unreadable"] or summary["errors"]) and is_gone
