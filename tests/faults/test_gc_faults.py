"""Chains, pins and gc on a real server that is killed, stopped, or whose disk says no, while a holder keeps to its clock's rule.

Whatever happens: what a valid lease protects is read, with the right bytes (S1); what is found of a chain is a run from its first
chunk on (S2); and when everybody has gone, nothing is left. `KVOBJ_FAULT_CYCLES` sets how often (3; `make faults`: 50).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from blake3 import blake3
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

from kvobj.client import Credentials, KvClient, Namespace, Pin, Session
from kvobj.client.kv_values import ROOT
from kvobj.client.lease import boot_seconds
from kvobj.errors import KvobjError

CYCLES = int(os.environ.get("KVOBJ_FAULT_CYCLES", "3"))
SEED = int(os.environ.get("KVOBJ_CRASH_SEED", "20240229"))
DECLARATION = {
    "model": "m",
    "chunk_tokens": 16,
    "layout": {"kind": "kv", "dtype": "bf16", "layers": 8, "kv_heads": 8, "head_dim": 64},
    "ids": "kvobj",
}
CHUNK_BYTES = 2 * 8 * 8 * 64 * 16 * 2
LENGTH = 5
PINS_KEPT = 6


def payload(name: bytes) -> bytes:
    return blake3(name).digest(length=CHUNK_BYTES)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=96 * MIB,
        nvme_bytes=64 * MIB,
        buckets=(BucketSetting("cache", "kv", "local"),),
        sections={"log": {"requests": "false"}, "gc": {"lease_ttl": '"1 s"', "grace": '"1 s"'}},
    )
    with ServerProcess(tmp_path, settings) as running:
        yield running


def client_of(server: ServerProcess, *, timeout_seconds: float = 10.0) -> KvClient:
    keys = server.credentials()
    return KvClient(
        server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache", timeout_seconds=timeout_seconds
    )


def read_held(session: Session, pin: Pin, name: bytes) -> memoryview | None:
    """A chunk that the pin holds; None where the lease did not hold. `LookupError` where the server does not have it."""
    data = session.read(pin, name)
    if data is None and pin.is_valid:  # renewed in between, or the server does not have it
        data = session.read(pin, name)
        if data is None and pin.is_valid:
            raise LookupError(f"a leased chunk is gone: {name.hex()}")
    return data


@dataclass
class Traffic:
    """A writer of chains, more than the home tier holds, and a holder that pins some of them and reads what it pinned."""

    server: ServerProcess
    namespace: Namespace
    chance: random.Random
    chains: list[list[bytes]] = field(default_factory=list)
    held: list[tuple[Pin, list[bytes]]] = field(default_factory=list)
    reads: int = 0
    misses: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._number = 0

    def start(self, session: Session) -> None:
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._write, daemon=True),
            threading.Thread(target=self._hold, args=(session,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _write(self) -> None:
        with client_of(self.server) as client:
            while not self._stop.is_set():
                self._number += 1
                ids = [blake3(f"{self._number} {depth}".encode()).digest() for depth in range(LENGTH)]
                self.chains.append(ids)
                with contextlib.suppress(KvobjError):
                    self.write_chain(client, ids)

    def write_chain(self, client: KvClient, ids: list[bytes]) -> None:
        parent: bytes | str = ROOT
        for chunk_id in ids:
            client.put_chunk(chunk_id, payload(chunk_id), namespace=self.namespace, parent=parent)
            parent = chunk_id

    def _hold(self, session: Session) -> None:
        while not self._stop.is_set():
            if not self.chains:
                self._stop.wait(0.01)
                continue
            ids = self.chance.choice(self.chains[-20:])
            with contextlib.suppress(KvobjError):
                found = session.match(namespace=self.namespace, ids=ids)
                if found.pin is not None:
                    self.held.append((found.pin, ids[: found.answer.matched]))
                if len(self.held) > PINS_KEPT:
                    session.release(self.held.pop(0)[0])
            if self.held:
                self.read(session, *self.chance.choice(self.held))

    def read(self, session: Session, pin: Pin, ids: list[bytes]) -> None:
        """Read a chunk under a pin: the right bytes, or a miss because the lease is over."""
        name = self.chance.choice(ids)
        try:
            data = read_held(session, pin, name)
        except LookupError as error:
            self.wrong.append(str(error))
            return
        except KvobjError:
            return  # the server is away: nothing was said
        self.reads += 1
        if data is None:
            self.misses += 1
        elif bytes(data) != payload(name):
            self.wrong.append(f"wrong bytes: {name.hex()}")

    def check_chains(self) -> None:
        """What is there of each chain is a run from its first chunk on, with the right bytes."""
        with client_of(self.server) as client:
            for ids in self.chains[-40:]:
                bodies = [client.get_chunk(name, namespace=self.namespace) for name in reversed(ids)]
                there = [body is not None for body in reversed(bodies)]
                assert there == sorted(there, reverse=True), f"a hole: {there}"
                for name, body in zip(reversed(ids), bodies, strict=True):
                    assert body is None or bytes(body) == payload(name)


@pytest.fixture
def traffic(server: ServerProcess) -> Traffic:
    with client_of(server) as client:
        namespace = client.declare_namespace("n", DECLARATION)
    return Traffic(server, namespace, random.Random(SEED))


def assert_nothing_is_left(server: ServerProcess, traffic: Traffic) -> None:
    """F16: when all chunks are deleted and all sessions over, tiers hold nothing."""
    with client_of(server, timeout_seconds=60) as client:
        client.remove_namespace(traffic.namespace.name)
    server.wait_for_occupancy(dict.fromkeys(server.occupancy(), 0), timeout_seconds=80)


def test_what_is_pinned_when_the_server_is_killed_is_readable_when_it_is_back(
    server: ServerProcess, traffic: Traffic
) -> None:
    chance = random.Random(SEED)
    readable = 0
    for _ in range(CYCLES):
        with client_of(server) as client, Session(client, ttl_ms=20_000) as session:
            traffic.start(session)
            threading.Event().wait(chance.uniform(0.3, 1.2))  # not for anything: the kill comes at a random instant
            server.kill()
            traffic.stop()
            server.start()
            for pin, ids in traffic.held:
                for name in ids:
                    data = read_held(session, pin, name)
                    assert data is None or bytes(data) == payload(name)
                    readable += data is not None
            traffic.held.clear()
        traffic.check_chains()
        assert traffic.wrong == []
    assert readable > 0
    assert server.status()["gc"] is not None
    assert_nothing_is_left(server, traffic)


def test_a_server_that_stands_still_longer_than_a_lease_breaks_none(server: ServerProcess, traffic: Traffic) -> None:
    for _ in range(CYCLES):
        with client_of(server, timeout_seconds=3) as client, Session(client, ttl_ms=1000) as session:
            traffic.start(session)
            threading.Event().wait(0.4)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                threading.Event().wait(
                    1.5
                )  # the fault itself: collectors, reapers and renewals pause for more than a TTL
            finally:
                os.kill(server.pid, signal.SIGCONT)
            threading.Event().wait(0.3)
            traffic.stop()
            traffic.held.clear()
        assert traffic.wrong == []
    traffic.check_chains()
    assert traffic.reads > traffic.misses
    assert_nothing_is_left(server, traffic)


def test_a_holder_that_stood_still_reads_the_right_bytes_or_takes_it_for_a_miss(
    server: ServerProcess, traffic: Traffic
) -> None:
    paused_seconds = 0.0

    def now() -> float:
        return boot_seconds() + paused_seconds

    with client_of(server) as client, Session(client, ttl_ms=1000, is_automatic=False, now=now) as session:
        ids = [blake3(f"held {depth}".encode()).digest() for depth in range(LENGTH)]
        traffic.write_chain(client, ids)
        pin = session.match(namespace=traffic.namespace, ids=ids).pin
        assert pin is not None
        assert session.read(pin, ids[-1]) is not None

        paused_seconds = 1.2

        assert not pin.is_valid
        assert session.read(pin, ids[-1]) is None
    assert_nothing_is_left(server, traffic)


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("number", [1, 7])
def test_a_flush_that_fails_acknowledges_nothing_that_a_restart_does_not_find(
    server: ServerProcess, traffic: Traffic, error: str, number: int
) -> None:
    stored: list[bytes] = []
    with client_of(server) as client:
        tracer = subprocess.Popen(
            [
                "strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync,fsync",
                "-e", f"inject=fdatasync,fsync:error={error}:when={number}+", "-p", str(server.pid),
            ],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until(lambda: is_traced(server.pid), timeout_seconds=10, what="strace to be attached")
            for depth in range(20):
                name = blake3(f"flush {depth}".encode()).digest()
                try:
                    client.put_chunk(name, payload(name), namespace=traffic.namespace, parent=ROOT)
                except KvobjError:
                    break
                stored.append(name)
            else:
                pytest.fail("no flush failed: nothing was tested")
            for name in stored:
                assert client.get_chunk(name, namespace=traffic.namespace) is not None
        finally:
            server.kill()
            tracer.wait(10)
    server.start()
    with client_of(server) as client:
        for name in stored:
            data = client.get_chunk(name, namespace=traffic.namespace)
            assert data is not None
            assert bytes(data) == payload(name)
        traffic.write_chain(client, [blake3(b"after").digest()])
    assert_nothing_is_left(server, traffic)


def is_traced(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return "TracerPid:\t0" not in status
