"""Parts of `bench_shared.py` that write: what a bucket's rule `always` brings to the remote behind the acknowledgement, what warm
reads feel of it, and PUTs of class `shared` from end to end.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import uvloop
from bench_support import MIB, BucketSetting, RawS3, ServerProcess, delete_keys, presigned, settle, signed
from goals import Figure, Goal, compared
from limits import prefaulted
from remote_clients import KvobjMover
from remote_nodes import Gateway, TimedConnection, node_settings, remote_of, running_node
from rich.console import Console

from kvobj.client import AdminClient, Credentials, Endpoint, SignedConnection
from kvobj.config import RemoteSettings
from kvobj.store.remote_uploads import OBJECTS_AT_ONCE

OBJECT_BYTES: Final = 8 * MIB
SMALL_BYTES: Final = 65536
SHARED_SIZES: Final = (8 * MIB, 32 * MIB)
DRAIN_GOAL: Final = Goal(0.9, at_most=False)
FOREGROUND_GOAL: Final = Goal(1.10)
_GIB: Final = 1024 * MIB
_WRITERS: Final = 4
_FLUSH_SECONDS: Final = 120.0
_NOTICED_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.005
_DRAINED, _BEHIND, _KEPT = "drained", "behind", "kept"


@dataclass(slots=True)
class WriteBehind:
    """What each round gave: rates in MB/s, medians in ms."""

    remote: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)
    under_load: list[float] = field(default_factory=list)
    idle: dict[int, list[float]] = field(default_factory=lambda: {OBJECT_BYTES: [], SMALL_BYTES: []})
    busy: dict[int, list[float]] = field(default_factory=lambda: {OBJECT_BYTES: [], SMALL_BYTES: []})
    times: dict[str, list[float]] = field(default_factory=dict)


class Load:
    """PUTs of so many new objects of 8 MiB, and what brings them to the remote and waits until they are there."""

    def __init__(self, server: ServerProcess, admin: AdminClient, count: int) -> None:
        self._server = server
        self._admin = admin
        self._serials = itertools.count()
        self._body = prefaulted(OBJECT_BYTES)
        self.count = count

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return self.count * OBJECT_BYTES

    def put(self, bucket: str) -> list[str]:
        """All of them, some at once; their keys."""
        keys = [f"o{next(self._serials)}" for _ in range(self.count)]
        problems: list[BaseException] = []

        def write(own: Sequence[str]) -> None:
            try:
                with TimedConnection(self._server.port, 0) as connection:
                    for key in own:
                        head = signed(self._server, "PUT", f"/{bucket}/{key}", content_length=str(OBJECT_BYTES))
                        connection.exchange(head, self._body)
            except BaseException as error:  # noqa: BLE001 - told by the thread that waits
                problems.append(error)

        threads = [threading.Thread(target=write, args=(keys[first::_WRITERS],)) for first in range(_WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return keys

    def queue(self) -> None:
        """Have everything of the bucket `drained` queued at once, by giving the bucket the rule `always`."""
        before = self._found()
        self._admin.set_remote_rule(_DRAINED, "always")
        deadline = time.perf_counter() + _NOTICED_SECONDS
        while self._found() == before:
            if time.perf_counter() > deadline:
                raise TimeoutError("the rule was not noticed")
            time.sleep(_POLL_SECONDS)

    def _found(self) -> float:
        return float(remote_of(self._server)["queue"]["found_by_rule_objects"])

    def drain(self) -> None:
        """Until all is on the remote, and the remote was told. One request: nothing is polled."""
        done = self._admin.flush(timeout_seconds=_FLUSH_SECONDS)
        if not done["is_done"]:
            raise RuntimeError(f"the queue did not drain: {done}")

    def remove(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete them, and wait until the node is idle."""
        if bucket == _DRAINED:
            self._admin.set_remote_rule(bucket, "never")
        with self._server.raw() as raw:
            delete_keys(raw, bucket, keys)
        settle(self._server)


class ForegroundReads:
    """Warm GETs of both sizes in turn, as one client makes them."""

    def __init__(self, server: ServerProcess, connection: TimedConnection) -> None:
        self._connection = connection
        self._heads = {size: presigned(server, "GET", f"/{_KEPT}/g{size}") for size in (OBJECT_BYTES, SMALL_BYTES)}
        for size in self._heads:
            head = signed(server, "PUT", f"/{_KEPT}/g{size}", content_length=str(size))
            connection.exchange(head, bytes(range(256)) * (size // 256))

    def run(self, *, seconds: float = 0.0, until: threading.Event | None = None) -> dict[int, list[float]]:
        """For so long, or until the event: times in ms by size. RuntimeError for a read that does not come from dram."""
        times: dict[int, list[float]] = {size: [] for size in self._heads}
        stop = time.perf_counter() + seconds
        while not until.is_set() if until is not None else time.perf_counter() < stop:
            for size, head in self._heads.items():
                reply = self._connection.exchange(head)
                if reply.tier != "dram":
                    raise RuntimeError(f"not warm: {reply.tier}")
                times[size].append(reply.seconds * 1000)
        return times


def write_behind(
    gateway: Gateway, directory: Path, *, rounds: int, objects: int, console: Console
) -> tuple[list[Figure], dict[str, list[float]]]:
    """How fast the queue drains beside the remote's own rate, and what warm GETs feel of it. Figures, and times of the GETs in
    seconds."""
    seen = WriteBehind()
    with ExitStack() as stack:
        buckets = [
            BucketSetting(_DRAINED, "kv", "local"),
            BucketSetting(_BEHIND, "kv", "local", remote="always"),
            BucketSetting(_KEPT, "kv", "memory"),
        ]
        settings = node_settings(gateway.tier("behind"), buckets, dram_bytes=2 * _GIB, nvme_bytes=4 * _GIB)
        server = stack.enter_context(running_node(directory / "behind", settings))
        load = Load(server, stack.enter_context(_admin(server)), objects)
        reads = ForegroundReads(server, stack.enter_context(TimedConnection(server.port, OBJECT_BYTES)))
        settle(server)
        for number in range(rounds):
            _round(gateway, server, load, reads, seen)
            console.print(
                f"write-behind, round {number + 1}: drains {seen.drain[-1]:.0f} MB/s, the remote takes "
                f"{seen.remote[-1]:.0f} MB/s; GET 8 MiB {seen.idle[OBJECT_BYTES][-1]:.2f} -> "
                f"{seen.busy[OBJECT_BYTES][-1]:.2f} ms, 64 KiB {seen.idle[SMALL_BYTES][-1]:.2f} -> "
                f"{seen.busy[SMALL_BYTES][-1]:.2f} ms"
            )
    own = f"RemoteBucket alone, {OBJECTS_AT_ONCE} at once"
    name = f"write-behind, {objects} queued objects of 8 MiB"
    figures = [
        compared(name, seen.drain, seen.remote, own, "MB/s", goal=DRAIN_GOAL),
        compared("the same beside the PUTs that bring them", seen.under_load, seen.remote, own, "MB/s"),
    ]
    for size, name in ((OBJECT_BYTES, "8 MiB"), (SMALL_BYTES, "64 KiB")):
        what = f"warm GET of {name} while it drains, p50"
        figures.append(compared(what, seen.busy[size], seen.idle[size], "idle", "ms", goal=FOREGROUND_GOAL))
    return figures, seen.times


@contextmanager
def _admin(server: ServerProcess) -> Iterator[AdminClient]:
    pair, endpoint = server.credentials(), Endpoint.parse(f"http://127.0.0.1:{server.admin_port}")
    credentials = Credentials(pair.access_key, pair.secret_key)
    with SignedConnection(endpoint, credentials, timeout_seconds=_FLUSH_SECONDS + 10) as connection:
        yield AdminClient(connection)


def _round(gateway: Gateway, server: ServerProcess, load: Load, reads: ForegroundReads, seen: WriteBehind) -> None:
    seen.remote.append(uvloop.run(_own_rate(gateway, load.count)) / 1e6)
    keys = load.put(_DRAINED)
    settle(server)
    started = time.perf_counter()
    load.queue()
    load.drain()
    seen.drain.append(load.total_bytes / (time.perf_counter() - started) / 1e6)
    load.remove(_DRAINED, keys)

    started = time.perf_counter()
    keys = load.put(_BEHIND)
    load.drain()
    seen.under_load.append(load.total_bytes / (time.perf_counter() - started) / 1e6)
    load.remove(_BEHIND, keys)

    keys = load.put(_DRAINED)
    settle(server)
    idle = reads.run(seconds=1.0)
    load.queue()
    busy = _reads_meanwhile(load, reads)
    load.remove(_DRAINED, keys)
    for size, name in ((OBJECT_BYTES, "8 MiB"), (SMALL_BYTES, "64 KiB")):
        seen.idle[size].append(median(idle[size]))
        seen.busy[size].append(median(busy[size]))
        for way, times in (("idle", idle[size]), ("draining", busy[size])):
            seen.times.setdefault(f"{name}, {way}", []).extend(value / 1000 for value in times)


def _reads_meanwhile(load: Load, reads: ForegroundReads) -> dict[int, list[float]]:
    """Times of warm GETs until the queue is empty."""
    is_drained, problems = threading.Event(), list[BaseException]()

    def wait() -> None:
        try:
            load.drain()
        except BaseException as error:  # noqa: BLE001 - told below
            problems.append(error)
        finally:
            is_drained.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    busy = reads.run(until=is_drained)
    waiting.join()
    if problems:
        raise problems[0]
    return busy


async def _own_rate(gateway: Gateway, objects: int) -> float:
    """Bytes a second that the remote takes of so many objects from kvobj's own client, as many at once as a node uploads."""
    pair = gateway.server.credentials()
    mover = await KvobjMover.open(
        RemoteSettings(
            f"http://{gateway.server.host}:{gateway.server.port}", gateway.direct, pair.access_key, pair.secret_key
        )
    )
    try:
        body, numbers = prefaulted(OBJECT_BYTES), iter(range(objects))

        async def put() -> None:
            for number in numbers:
                await mover.put(f"own-{number}", body)

        started = time.perf_counter()
        await asyncio.gather(*[put() for _ in range(OBJECTS_AT_ONCE)])
        return objects * OBJECT_BYTES / (time.perf_counter() - started)
    finally:
        await mover.aclose()


# -- class shared ------------------------------------------------------------------------------------------------------
class Rivals:
    """The same bytes put in turn: to the node with class `shared`, and to the remote itself."""

    def __init__(
        self, gateway: Gateway, server: ServerProcess, ours: TimedConnection, straight: TimedConnection
    ) -> None:
        self._gateway = gateway
        self._server = server
        self._ours = ours
        self._straight = straight
        self._serials = itertools.count()

    def put(self, body: memoryview, puts: int) -> tuple[list[float], list[float]]:
        """So many each, after one that is not counted: seconds with the node, seconds with the remote. All are deleted again."""
        length, names = str(len(body)), [f"s{next(self._serials)}" for _ in range(puts + 1)]
        shared: list[float] = []
        direct: list[float] = []
        for name in names:
            path = f"/{_BEHIND}/{name}"
            head = signed(self._server, "PUT", path, content_length=length, x_kvobj_durability="shared")
            reply = self._ours.exchange(head, body)
            if reply.headers.get("x-kvobj-durability") != "shared":
                raise RuntimeError(f"not shared: {reply}")
            shared.append(reply.seconds)
            head = presigned(self._gateway.server, "PUT", f"/{self._gateway.direct}/{name}", content_length=length)
            direct.append(self._straight.exchange(head, body).seconds)
        with self._server.raw() as raw:
            delete_keys(raw, _BEHIND, names)
        with RawS3(self._gateway.server.host, self._gateway.server.port, self._gateway.server.credentials()) as raw:
            for name in names:
                raw.request("DELETE", f"/{self._gateway.direct}/{name}", payload=None)
        settle(self._server)
        return shared[1:], direct[1:]


def shared_puts(gateway: Gateway, directory: Path, *, rounds: int, puts: int, console: Console) -> list[Figure]:
    """PUT of class `shared`, from the request's first byte to its reply, beside a PUT of the same bytes to the remote itself."""
    times: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in SHARED_SIZES}
    with ExitStack() as stack:
        buckets = [BucketSetting(_BEHIND, "kv", "local")]
        settings = node_settings(gateway.tier("shared"), buckets, dram_bytes=_GIB, nvme_bytes=4 * _GIB)
        server = stack.enter_context(running_node(directory / "shared", settings))
        ours = stack.enter_context(TimedConnection(server.port, 0))
        straight = stack.enter_context(TimedConnection(gateway.server.port, 0))
        rivals, body = Rivals(gateway, server, ours, straight), prefaulted(max(SHARED_SIZES))
        for _ in range(rounds):
            for size, (shared, direct) in times.items():
                taken = rivals.put(body[:size], puts)
                shared.append(median(taken[0]) * 1000)
                direct.append(median(taken[1]) * 1000)
    figures = []
    for size, (shared, direct) in times.items():
        name = f"PUT {size // MIB} MiB, class shared"
        console.print(f"{name}: {median(shared):.1f} ms, to the remote itself {median(direct):.1f} ms")
        figures.append(compared(name, shared, direct, "radosgw directly", "ms"))
    return figures
