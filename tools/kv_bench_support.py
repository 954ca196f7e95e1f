"""What the benchmarks of the KV API share: a server with a KV bucket, chains in it, and what its process and its log tell."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench_support import BucketSetting, ServerProcess, ServerSettings, own_server

from kvobj.client import Credentials, KvClient, Name, Namespace, NewChunk
from kvobj.client.kv_values import ROOT, StoredChunk

BUCKET: Final = "bench"
CHUNK_TOKENS: Final = 16
BATCH: Final = 1000


@dataclass(frozen=True, slots=True)
class Bench:
    """A running server and a namespace of its bucket."""

    server: ServerProcess
    client: KvClient
    namespace: Namespace


@contextmanager
def bench(directory: Path, *, dram_bytes: int, nvme_bytes: int, gc: dict[str, str]) -> Iterator[Bench]:
    """A server of the benchmark's own, its arena populated."""
    settings = ServerSettings(
        dram_bytes=dram_bytes,
        nvme_bytes=nvme_bytes,
        buckets=(BucketSetting(BUCKET, kind="kv", durability="memory"),),
        sections={"gc": gc},
    )
    with own_server(directory, settings) as server, client_of(server) as client:
        yield Bench(server, client, declare(client))


def declare(client: KvClient, **settings: object) -> Namespace:
    """The namespace that benchmarks fill; again, with other settings."""
    declaration = {"model": "bench", "chunk_tokens": CHUNK_TOKENS, "layout": {"kind": "opaque"}, "ids": "kvobj"}
    return client.declare_namespace("bench", declaration | settings)


def client_of(server: ServerProcess) -> KvClient:
    """A client of the server's root user."""
    keys = server.credentials()
    credentials = Credentials(keys.access_key, keys.secret_key)
    return KvClient(server.endpoint, credentials, BUCKET, connections=16, timeout_seconds=120)


def chain(namespace: Namespace, number: int, length: int) -> list[bytes]:
    """The ids of one chain, different for each number."""
    tokens = struct.pack("<I", number) * (CHUNK_TOKENS * length)
    return namespace.chunk_ids(tokens)


def fill(
    bench: Bench,
    *,
    chains: int,
    length: int,
    chunk_bytes: int,
    writers: int = 4,
    first: int = 0,
    durability: str | None = None,
) -> float:
    """Store so many chains; seconds it took. RuntimeError if a chunk is refused."""
    numbers = iter(range(first, first + chains))
    lock = threading.Lock()
    problems: list[str] = []
    data = bytes(chunk_bytes)

    def write() -> None:
        while not problems:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            ids = chain(bench.namespace, number, length)
            parents: Sequence[Name] = [ROOT, *ids]
            chunks = [NewChunk(name, data, parent=parent) for name, parent in zip(ids, parents, strict=False)]
            for start in range(0, length, BATCH):
                batch = chunks[start : start + BATCH]
                stored = bench.client.mput(batch, namespace=bench.namespace, durability=durability)
                problems.extend(str(each) for each in stored if not isinstance(each, StoredChunk))

    began = time.perf_counter()
    threads = [threading.Thread(target=write) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise RuntimeError(f"a chunk was refused: {problems[0]}")
    return time.perf_counter() - began


def logged_milliseconds(server: ServerProcess, since: int, method: str, part: str) -> list[float]:
    """How long the server took over its requests of this method whose target has this part, by its own log; `since`: where in
    the log to begin (`log_end`)."""
    found: list[float] = []
    with server.log_path.open(encoding="utf-8", errors="replace") as log:
        log.seek(since)
        for line in log:
            start = line.find("{")
            if start < 0 or "duration_ms" not in line:
                continue
            entry = json.loads(line[start:])
            if entry.get("method") == method and part in entry.get("target", ""):
                found.append(float(entry["duration_ms"]))
    return found


def log_end(server: ServerProcess) -> int:
    """Where the server's log ends now."""
    return server.log_path.stat().st_size
