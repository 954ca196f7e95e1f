"""Writers of class `shared` on a real server, each on keys of its own, and a model of what every key may hold.

A reply settles what a key holds; without one, or with a refusal, the operation may have happened or not. Whatever contradicts is
kept in `violations` as a sentence. `seen_from_remote` looks at the remote alone: which bytes lie there under an object's name.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final
from urllib.parse import quote, unquote

from blake3 import blake3
from raw_http import RawReply, RawS3
from remote_servers import RemoteStore
from s3_proxy import FaultProxy
from server_process import MIB, ServerProcess
from toxics import Operation

SIZES: Final = (40, 3_000, 40_000, 65_537, 300_000)
_LARGE_BYTES: Final = 11 * MIB
_ABSENT: Final = None
_HANG_SECONDS: Final = 60.0
_AT_ONCE_SECONDS: Final = 0.02
_ServerErrors: Final = frozenset({503, 507})


@dataclass(frozen=True, slots=True)
class Version:
    """Bytes that were once sent under a key: a number that is never used twice, and their size."""

    number: int
    size_bytes: int

    def content(self, key: str) -> bytes:
        """The bytes."""
        return blake3(f"{key} {self.number}".encode()).digest(length=self.size_bytes)


@dataclass(slots=True)
class Holding:
    """What a key may hold, and whether one of these was acknowledged as shared, so that the remote has one of them."""

    possible: set[Version | None] = field(default_factory=lambda: {_ABSENT})
    is_shared: bool = False

    def settle(self, state: Version | None, *, is_shared: bool) -> None:
        """A reply came."""
        self.possible, self.is_shared = {state}, is_shared

    def doubt(self, state: Version | None) -> None:
        """It may have happened."""
        self.possible.add(state)
        if state is _ABSENT:
            self.is_shared = False


@dataclass(slots=True)
class Counts:
    """What the writers did, as JSON takes it."""

    operations: int = 0
    shared: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    not_tried: int = 0
    slowest_seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """For the record."""
        return asdict(self)


class SharedLoad:
    """The writers of one bucket and the model of it. The server may be killed under them: they end then."""

    def __init__(
        self,
        server: ServerProcess,
        bucket: str,
        *,
        seed: int,
        writers: int = 8,
        keys_each: int = 8,
        large_share: float = 0.03,
    ) -> None:
        self.holdings: dict[str, Holding] = {}
        self.counts = Counts()
        self.violations: list[str] = []
        self.windows: list[tuple[str, float, float]] = []  # of writes: (key, from, to) on the monotonic clock
        self._server = server
        self._bucket = bucket
        self._seed = seed
        self._large_share = large_share
        self._keys = [[f"w{writer}/key {number}" for number in range(keys_each)] for writer in range(writers)]
        self._version = 0
        self._round = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, operations: int | None = None) -> None:
        """Begin to write: so many operations in all, or until the end."""
        self._stop.clear()
        self._round += 1
        each = None if operations is None else -(-operations // len(self._keys))
        self._threads = [
            threading.Thread(target=self._write, args=(number, keys, each), daemon=True)
            for number, keys in enumerate(self._keys)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more operations; wait for those under way."""
        self._stop.set()
        self.join()

    def join(self) -> None:
        """Wait until all writers are done."""
        for thread in self._threads:
            thread.join(_HANG_SECONDS * 3)
            assert not thread.is_alive(), "a writer hangs"

    def run(self, operations: int) -> None:
        """Do so many operations."""
        self.start(operations)
        self.join()

    def _write(self, number: int, keys: list[str], operations: int | None) -> None:
        chance = random.Random(f"{self._seed} {self._round} {number}")
        done = 0
        with self._server.raw(timeout_seconds=_HANG_SECONDS) as raw:
            while not self._stop.is_set() and (operations is None or done < operations):
                try:
                    done += self._operation(raw, chance.choice(keys), chance)
                except TimeoutError:
                    self._complain("an operation hangs")
                    return
                except OSError:  # the server is dead, or will be asked again on another connection
                    with self._lock:
                        self.counts.broken += 1
                    if operations is None:
                        return

    def _operation(self, raw: RawS3, key: str, chance: random.Random) -> bool:
        """One operation. False: it was refused at once, the remote being known to be away, so that nothing was tried."""
        holding = self.holdings.setdefault(key, Holding())
        kind = chance.choices(("put", "get", "delete"), (60, 28, 12))[0]
        began, is_done = time.monotonic(), True
        try:
            match kind:
                case "put":
                    is_done = self._put(raw, key, holding, chance)
                case "get":
                    self.observe(key, raw.request("GET", f"/{self._bucket}/{key}", payload=None))
                case _:
                    self._delete(raw, key, holding)
        finally:
            ended = time.monotonic()
            is_tried = is_done or ended - began > _AT_ONCE_SECONDS
            with self._lock:
                self.counts.operations += is_tried
                self.counts.not_tried += not is_tried
                self.counts.slowest_seconds = max(self.counts.slowest_seconds, round(ended - began, 3))
                if kind == "put" and is_tried:
                    self.windows.append((key, began, ended))
        if not is_tried:
            self._stop.wait(_AT_ONCE_SECONDS)
        return is_tried

    def _put(self, raw: RawS3, key: str, holding: Holding, chance: random.Random) -> bool:
        with self._lock:
            self._version += 1
            number = self._version
        version = Version(number, _LARGE_BYTES if chance.random() < self._large_share else chance.choice(SIZES))
        before = holding.possible | {version}
        holding.doubt(version)
        reply = raw.request(
            "PUT", f"/{self._bucket}/{key}", version.content(key), headers={"x-kvobj-durability": "shared"}
        )
        if reply.status == 200:
            if reply.headers.get("x-kvobj-durability") != "shared":
                self._complain(
                    f"{key}: a PUT of class shared reached {reply.headers.get('x-kvobj-durability')} and says 200"
                )
            holding.settle(version, is_shared=True)
            with self._lock:
                self.counts.shared += 1
            return True
        self._refused("PUT", key, reply)
        holding.possible = before
        return False

    def lose_what_was_local(self) -> None:
        """The node is lost with its disk: what was never acknowledged as shared may be gone."""
        for holding in self.holdings.values():
            if not holding.is_shared:
                holding.possible.add(_ABSENT)

    def now_shared(self) -> None:
        """The queue is empty: whatever is there has gone to the remote."""
        for holding in self.holdings.values():
            holding.is_shared = _ABSENT not in holding.possible

    def hits(self, proxy: FaultProxy, since: int) -> int:
        """How many of the writes had something done to the upload of their bytes or to a manifest meanwhile, or met an outage;
        injections from `since`."""
        done = defaultdict(list)
        for injection in proxy.injections[since:]:
            _, _, name = injection.key.rpartition(f"/{self._bucket}/")
            done[name].append(injection.at_seconds)
        # A connection is anybody's, and a manifest is what every write waits for.
        everywhere = [
            injection.at_seconds
            for injection in proxy.injections[since:]
            if injection.operation is Operation.CONNECT or "/manifests/" in injection.key
        ]
        return sum(
            any(began <= at <= ended for at in (*done[quote(key)], *everywhere))
            or any(began <= stop and start <= ended for start, stop in proxy.outages)
            for key, began, ended in self.windows
        )

    def _delete(self, raw: RawS3, key: str, holding: Holding) -> None:
        holding.doubt(_ABSENT)
        reply = raw.request("DELETE", f"/{self._bucket}/{key}")
        if reply.status == 204:
            holding.settle(_ABSENT, is_shared=False)
        else:
            self._refused("DELETE", key, reply)

    def _refused(self, method: str, key: str, reply: RawReply) -> None:
        if reply.status not in _ServerErrors:
            self._complain(f"{method} {key}: {reply.status} {reply.code}")
        with self._lock:
            name = f"{method} {reply.status} {reply.code}"
            self.counts.refused[name] = self.counts.refused.get(name, 0) + 1

    def observe(self, key: str, reply: RawReply) -> None:
        """What a GET said is what the key holds; a complaint where it cannot."""
        holding = self.holdings.setdefault(key, Holding())
        if reply.status == 404:
            if _ABSENT not in holding.possible:
                self._complain(f"{key}: acknowledged, and not found")
            holding.settle(_ABSENT, is_shared=False)
            return
        if reply.status != 200:
            self._complain(f"GET {key}: {reply.status} {reply.code}")
            return
        found = [version for version in holding.possible if version is not None and reply.body == version.content(key)]
        if not found:
            self._complain(f"{key}: wrong bytes, {len(reply.body)} of them; possible are {holding.possible}")
            return
        holding.possible = {found[0]}

    def read_everything(self, server: ServerProcess | None = None) -> None:
        """Read every key that was ever written."""
        with (server or self._server).raw() as raw:
            for key in self.holdings:
                self.observe(key, raw.request("GET", f"/{self._bucket}/{key}", payload=None))

    def check_listing(self, server: ServerProcess | None = None) -> None:
        """After `read_everything`: a listing has what is there, each once, and nothing else."""
        with (server or self._server).raw() as raw:
            reply = raw.request("GET", f"/{self._bucket}", query={"list-type": "2"}, payload=None)
        listed = [piece.partition("</Key>")[0] for piece in reply.body.decode().split("<Key>")[1:]]
        known = sorted(key for key, holding in self.holdings.items() if _ABSENT not in holding.possible)
        if listed != known:
            self._complain(f"listed are {listed}, known {known}")

    def check_remote(self, lying: Mapping[str, Iterable[bytes]]) -> None:
        """What was acknowledged as shared lies on the remote, or what has replaced it since."""
        for key, holding in self.holdings.items():
            if not holding.is_shared:
                continue
            wanted = [version.content(key) for version in holding.possible if version is not None]
            if not any(frame.endswith(content) for frame in lying.get(key, ()) for content in wanted):
                self._complain(f"{key}: acknowledged as shared, and not on the remote")

    def compared_with(self, lying: Mapping[str, Iterable[bytes]]) -> str:
        """After `read_everything`: "" if the remote has each object once and nothing more of this bucket, else what is wrong."""
        there = Counter({key: len(list(frames)) for key, frames in lying.items()})
        known = Counter(key for key, holding in self.holdings.items() if _ABSENT not in holding.possible)
        return (
            "" if there == known else f"the remote has too many of {dict(there - known)}, lacks {dict(known - there)}"
        )

    def _complain(self, sentence: str) -> None:
        with self._lock:
            self.violations.append(sentence)


def seen_from_remote(store: RemoteStore, bucket: str, *, with_bytes: bool = True) -> dict[str, list[bytes]]:
    """The frames that lie on the remote by the object keys that their names tell; without their bytes, empty ones. A frame of bytes
    that do not compress ends with them."""
    found: defaultdict[str, list[bytes]] = defaultdict(list)
    for name in store.keys(f"{store.prefix}blobs/"):
        _, _, rest = name.removeprefix(f"{store.prefix}blobs/").partition("/")
        owner, _, key = rest.partition("/")
        if owner == bucket:
            frame = store.read(name) if with_bytes else b""
            if frame is not None:
                found[unquote(key)].append(frame)
    return dict(found)
