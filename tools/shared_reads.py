"""Parts of `bench_shared.py` that read: cold and warm GETs through a node beside GETs of the same bytes from the remote itself, and
the tail of cold reads while some of the remote's answers stall.

Cold is what the node itself says it had from the remote (`x-kvobj-tier`): its dram and nvme hold a part of the objects, which are
read in turn, so that the next one has always left both. A read that was not cold is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from bench_support import MIB, BucketSetting, ServerProcess, presigned, signed
from goals import Figure, Goal, compared, shown
from remote_nodes import Gateway, ProxyProcess, Reply, TimedConnection, node_settings, quantile, remote_of, running_node
from rich.console import Console

LARGE_BYTES: Final = 32 * MIB
TAIL_SIZES: Final = (MIB, 2 * MIB, 4 * MIB)
COLD_GOAL: Final = Goal(1.35)
TAIL_GOAL: Final = Goal(2.0)
STALL_SHARE: Final = 0.02
STALL_SECONDS: Final = 2.0
HELD_SECONDS: Final = 0.5
"""How long the second half of each part is held back, to show that the first bytes go out before."""
WARM_GETS: Final = 20
_BUCKET: Final = "objects"
_REMOTE: Final = "remote"
_HELD_GETS: Final = 3


@dataclass(slots=True)
class ColdObjects:
    """Objects of class `shared` on a node that has room for few of them."""

    server: ServerProcess
    connection: TimedConnection
    heads: Sequence[bytes]
    turn: Iterator[bytes]

    def read(self) -> tuple[bytes, Reply]:
        """One GET that the node had to ask the remote for, and the head it was asked with. RuntimeError where nothing is cold."""
        for head in itertools.islice(self.turn, len(self.heads)):
            reply = self.connection.exchange(head)
            if reply.tier == _REMOTE:
                return head, reply
        raise RuntimeError("the node has everything in dram or nvme: nothing is cold")


def write_objects(server: ServerProcess, connection: TimedConnection, sizes: Sequence[int], count: int) -> ColdObjects:
    """So many objects, of these sizes in turn, each `shared` and with bytes of its own."""
    body = memoryview(bytearray(bytes(range(256)) * (max(sizes) // 256)))
    for number, size in zip(range(count), itertools.cycle(sizes), strict=False):
        body[:8] = number.to_bytes(8, "little")
        path = f"/{_BUCKET}/o{number}"
        head = signed(server, "PUT", path, content_length=str(size), x_kvobj_durability="shared")
        reply = connection.exchange(head, body[:size])
        if reply.headers.get("x-kvobj-durability") != "shared":
            raise RuntimeError(f"not shared: {reply}")
    heads = [presigned(server, "GET", f"/{_BUCKET}/o{number}") for number in range(count)]
    return ColdObjects(server, connection, heads, itertools.cycle(heads))


# -- large objects -----------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class LargeReads:
    """What each round gave: medians in seconds, and all first and whole times."""

    cold: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)
    cold_first: list[float] = field(default_factory=list)
    direct_first: list[float] = field(default_factory=list)


def large_reads(gateway: Gateway, directory: Path, *, rounds: int, reads: int, console: Console) -> list[Figure]:
    """32 MiB: cold beside direct, when the first byte comes, and what a warm GET asks of the remote."""
    with ExitStack() as stack:
        server = gateway.server
        proxy = stack.enter_context(ProxyProcess(server.host, server.port))
        sizes = {"dram_bytes": 256 * MIB, "nvme_bytes": 512 * MIB, "nvme_segment_bytes": 128 * MIB}
        buckets = [BucketSetting(_BUCKET)]
        plain = stack.enter_context(
            running_node(directory / "plain", node_settings(gateway.tier("plain"), buckets, **sizes))
        )
        held = stack.enter_context(
            running_node(
                directory / "held",
                node_settings(gateway.tier("held", port=proxy.port, hedge='"off"'), buckets, **sizes),
            )
        )
        straight = stack.enter_context(TimedConnection(server.port, LARGE_BYTES))
        objects = write_objects(plain, stack.enter_context(TimedConnection(plain.port, LARGE_BYTES)), [LARGE_BYTES], 32)
        direct = direct_objects(gateway, straight, LARGE_BYTES, 4)
        figures = _beside_direct(objects, straight, direct, rounds=rounds, reads=reads, console=console)
        through = write_objects(held, stack.enter_context(TimedConnection(held.port, LARGE_BYTES)), [LARGE_BYTES], 24)
        return [*figures, *_held_back(through, proxy), *_warm(through, proxy)]


def direct_objects(gateway: Gateway, connection: TimedConnection, size: int, count: int) -> list[bytes]:
    """The same bytes on the remote under names of their own; the heads of their GETs."""
    body = bytes(range(256)) * (size // 256)
    for number in range(count):
        path = f"/{gateway.direct}/d{size}-{number}"
        connection.exchange(presigned(gateway.server, "PUT", path, content_length=str(size)), body)
    return [presigned(gateway.server, "GET", f"/{gateway.direct}/d{size}-{number}") for number in range(count)]


def _beside_direct(
    objects: ColdObjects,
    straight: TimedConnection,
    direct: Sequence[bytes],
    *,
    rounds: int,
    reads: int,
    console: Console,
) -> list[Figure]:
    turn, seen = itertools.cycle(direct), LargeReads()
    for number in range(rounds):
        cold: list[Reply] = []
        plain: list[Reply] = []
        for _ in range(reads):
            cold.append(objects.read()[1])
            plain.append(straight.exchange(next(turn)))
        seen.cold.append(median(reply.seconds for reply in cold) * 1000)
        seen.direct.append(median(reply.seconds for reply in plain) * 1000)
        seen.cold_first.append(median(reply.first_seconds for reply in cold) * 1000)
        seen.direct_first.append(median(reply.first_seconds for reply in plain) * 1000)
        console.print(
            f"cold 32 MiB, round {number + 1}: {seen.cold[-1]:.1f} ms, direct {seen.direct[-1]:.1f} ms, "
            f"first byte {seen.cold_first[-1]:.1f} ms"
        )
    return [
        compared("cold GET 32 MiB, whole time", seen.cold, seen.direct, "radosgw directly", "ms", goal=COLD_GOAL),
        compared("cold GET 32 MiB, first byte", seen.cold_first, seen.direct_first, "radosgw directly", "ms"),
        compared("cold GET 32 MiB, first byte", seen.cold_first, seen.cold, "its whole time", "ms", goal=Goal(0.99)),
    ]


def _held_back(objects: ColdObjects, proxy: ProxyProcess) -> list[Figure]:
    """Of every part, the proxy holds the second half back: what comes before has not waited for any part's end."""
    proxy.plan("STALL_BODY", rate=1.0, operations=["GET"], stall_seconds=HELD_SECONDS)
    replies = [objects.read()[1] for _ in range(_HELD_GETS)]
    proxy.plan()
    name = f"cold GET 32 MiB, first byte while the second half of each part is held back {HELD_SECONDS * 1000:.0f} ms"
    first = [reply.first_seconds * 1000 for reply in replies]
    return [
        compared(
            name, first, [reply.seconds * 1000 for reply in replies], "its whole time", "ms", note="through the proxy"
        ),
        shown(
            "first bytes that came before any part was whole",
            [float(sum(value < HELD_SECONDS * 1000 for value in first)) / len(first)],
            "of all",
            goal=Goal(1.0, at_most=False),
        ),
    ]


def _warm(objects: ColdObjects, proxy: ProxyProcess) -> list[Figure]:
    """A GET again and again of what a cold one has brought: what the remote sees of it, by the proxy's count and the node's own."""
    head, _ = objects.read()
    while objects.connection.exchange(head).tier == _REMOTE:
        pass
    received, asked = remote_of(objects.server)["received_bytes"], proxy.record()["blob_requests"]
    replies = [objects.connection.exchange(head) for _ in range(WARM_GETS)]
    by_proxy = float(proxy.record()["blob_requests"] - asked)
    by_node = float(remote_of(objects.server)["received_bytes"] - received)
    cold_before = proxy.record()["blob_requests"]
    objects.read()
    cold = float(proxy.record()["blob_requests"] - cold_before)
    tiers = ", ".join(sorted({reply.tier for reply in replies}))
    none = Goal(0.0)
    return [
        shown(f"requests for blobs at the remote by {WARM_GETS} warm GETs", [by_proxy], "", goal=none, note=tiers),
        shown(f"bytes that the node had from the remote for {WARM_GETS} warm GETs", [by_node], "B", goal=none),
        shown("requests for blobs at the remote by one cold GET of 32 MiB", [cold], ""),
    ]


# -- the tail ----------------------------------------------------------------------------------------------------------
def tail(
    gateway: Gateway, directory: Path, *, rounds: int, reads: int, console: Console
) -> tuple[list[Figure], dict[str, list[float]]]:
    """p99 of cold reads of 1 to 4 MiB through a proxy: healthy; with stalls, hedged and not. Figures and times."""
    times: dict[str, list[float]] = {"healthy": [], "stalls, hedged": [], "stalls, not hedged": []}
    ways = (("healthy", 0.0, True), ("stalls, hedged", STALL_SHARE, True), ("stalls, not hedged", STALL_SHARE, False))
    rounds_p99: dict[str, list[float]] = {name: [] for name in times}
    with ExitStack() as stack:
        proxy = stack.enter_context(ProxyProcess(gateway.server.host, gateway.server.port))
        objects: dict[bool, ColdObjects] = {}
        for is_hedged in (True, False):
            name = "hedged" if is_hedged else "unhedged"
            tier = gateway.tier(name, port=proxy.port, hedge='"adaptive"' if is_hedged else '"off"')
            settings = node_settings(tier, [BucketSetting(_BUCKET)], dram_bytes=64 * MIB, nvme_bytes=192 * MIB)
            node = stack.enter_context(running_node(directory / name, settings))
            connection = stack.enter_context(TimedConnection(node.port, max(TAIL_SIZES)))
            objects[is_hedged] = write_objects(node, connection, TAIL_SIZES, 240)
            for _ in range(40):  # the node learns how long answers take
                objects[is_hedged].read()
        for number in range(rounds):
            for name, rate, is_hedged in ways:
                proxy.plan(
                    *(["STALL_HEAD"] if rate else []),
                    rate=rate,
                    operations=["GET"],
                    stall_seconds=STALL_SECONDS,
                    seed=number,
                )
                taken = [objects[is_hedged].read()[1].seconds for _ in range(reads)]
                proxy.plan()
                times[name] += taken
                rounds_p99[name].append(quantile(taken, 0.99) * 1000)
                console.print(
                    f"tail, round {number + 1}, {name}: p99 {rounds_p99[name][-1]:.1f} ms of {len(taken)} reads"
                )
        stalls = proxy.record()["injected"].get("stall before the head", {}).get("GetObject", 0)
    pooled = {name: quantile(taken, 0.99) * 1000 for name, taken in times.items()}
    figures = []
    for name, goal in (("stalls, hedged", TAIL_GOAL), ("stalls, not hedged", None)):
        ratios = [ours / healthy for ours, healthy in zip(rounds_p99[name], rounds_p99["healthy"], strict=True)]
        figures.append(
            Figure(
                f"p99 of cold GETs of 1 to 4 MiB, {STALL_SHARE:.0%} of the remote's answers {STALL_SECONDS:g} s late, "
                + name.removeprefix("stalls, "),
                pooled[name],
                "ms",
                pooled["healthy"],
                "healthy",
                pooled[name] / pooled["healthy"],
                min(ratios),
                max(ratios),
                goal,
                f"{len(times[name])} reads, all rounds together",
            )
        )
    return [*figures, shown("answers that were held back in all rounds", [float(stalls)], "")], times
