"""Which keys are being written at this moment, and how far each write has come. Event-loop-only.

For who asks why a chunk is not there yet, and for who reads one while it arrives (`following`). A write pays nothing for being
looked at: who looks takes a pin of its own on the bytes, and is woken when more of them are there.
"""

from __future__ import annotations

import asyncio
from enum import Enum

from kvobj.arena import Pin
from kvobj.catalog.rows import BlobRef, CommitOutcome, PartRow, is_same_namespace
from kvobj.store.requests import PutRequest
from kvobj.tiers.protocol import BlobNames


class ArrivalState(Enum):
    """What has become of a write. Only `STORED` says that the bytes which were seen are those of a chunk."""

    ARRIVING = "arriving"
    STORED = "stored"
    GIVEN_UP = "given up"


class Wakeup:
    """Something that others wait for a change of. Costs one comparison while nobody waits."""

    __slots__ = ("_changed",)

    def __init__(self) -> None:
        self._changed: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake all who wait now."""
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def changed(self, timeout_seconds: float) -> bool:
        """Return at the next change; False if none came in time."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._changed], timeout=timeout_seconds)
        return bool(done)


class Arrival(Wakeup):
    """One write. `sizes` are the plain sizes of its blobs, `refs` those of them that lie in a tier already, `filled` how many
    leading bytes of a body of one blob are there."""

    __slots__ = ("_bytes", "filled", "refs", "request", "sizes", "state")

    def __init__(self, request: PutRequest, sizes: list[int], refs: list[BlobRef]) -> None:
        self._changed = None  # not by a call of the parent's: every write pays for this
        self.request = request
        self.sizes = sizes
        self.refs = refs
        self.filled = 0
        self.state = ArrivalState.ARRIVING
        self._bytes: tuple[Pin, memoryview] | None = None

    @property
    def is_whole_chunk(self) -> bool:
        """Whether it brings a chunk by itself: neither a part of one, nor what joins the parts of an upload."""
        return self.request.part is None and self.request.ends is None

    @property
    def is_alive(self) -> bool:
        """Whether it may still become a chunk."""
        return self.state is ArrivalState.ARRIVING

    @property
    def is_seen(self) -> bool:
        """Whether there is anything to read of it, now or soon: memory that fills, or blobs that are written down one by one."""
        return self._bytes is not None or len(self.sizes) > 1 or bool(self.refs)

    def begin_bytes(self, pin: Pin, payload: memoryview) -> None:
        """The body, one blob, goes into this memory from here on."""
        self._bytes = pin, payload
        if self._changed is not None:
            self.wake()

    def end_bytes(self) -> None:
        """The memory goes to others soon: who shares the pin keeps it."""
        self._bytes = None

    def advance(self, filled: int) -> None:
        """The first `filled` bytes are there."""
        self.filled = filled
        if self._changed is not None:
            self.wake()

    def share(self) -> tuple[Pin, memoryview] | None:
        """A pin of one's own, to be released, and the memory that the body goes into; None where it is not in one piece, or has
        been let go."""
        if self._bytes is None:
            return None
        pin, payload = self._bytes
        return pin.share(), payload.toreadonly()

    def settle(self, outcome: CommitOutcome, digest: bytes | None) -> None:
        """The commit's word: where an earlier writer's chunk stands, only the same digest makes these bytes its own."""
        row = outcome.row
        self._bytes = None
        is_stored = not outcome.existed or (digest is not None and digest == row.digest)
        self.state = ArrivalState.STORED if is_stored else ArrivalState.GIVEN_UP
        if self._changed is not None:
            self.wake()

    def end(self) -> None:
        """The write is over: it was given up unless it was settled before."""
        self._bytes = None
        if self.state is ArrivalState.ARRIVING:
            self.state = ArrivalState.GIVEN_UP
        if self._changed is not None:
            self.wake()


class KeyWatch(Wakeup):
    """Woken when anything happens to the uploads of one key in this process; `turn` counts how often it was. `made_of`: the parts
    that the latest chunk under the key was made of, once that was told."""

    __slots__ = ("made_of", "name", "turn")

    def __init__(self, name: tuple[str, str]) -> None:
        super().__init__()
        self.name = name
        self.made_of: tuple[PartRow, ...] = ()
        self.turn = 0

    def wake(self) -> None:
        """See `Wakeup`."""
        self.turn += 1
        super().wake()

    async def changed_since(self, turn: int, timeout_seconds: float) -> bool:
        """As `changed`, of all changes since `turn` was read: none is missed by who looked around in between."""
        return self.turn != turn or await self.changed(timeout_seconds)


class ArrivingKeys:
    """Writes under way by bucket and key: several writers may bring one chunk."""

    __slots__ = ("_watches", "_writes")

    def __init__(self) -> None:
        self._writes: dict[tuple[str, str], list[Arrival]] = {}
        self._watches: dict[tuple[str, str], list[KeyWatch]] = {}

    def __len__(self) -> int:
        """How many keys are being written."""
        return len(self._writes)

    @property
    def filled_bytes(self) -> int:
        """How much of the bodies under way is there, in all."""
        return sum(arrival.filled for writes in self._writes.values() for arrival in writes)

    def begin(self, names: BlobNames, arrival: Arrival) -> None:
        """A write has room and waits for its bytes; matched by one `end`."""
        name = (names.bucket, names.key)
        writes = self._writes.get(name)
        if writes is None:
            self._writes[name] = [arrival]
        else:
            writes.append(arrival)

    def end(self, names: BlobNames, arrival: Arrival) -> None:
        """The write was committed, or has left nothing."""
        name = (names.bucket, names.key)
        writes = self._writes[name]
        if len(writes) == 1:
            del self._writes[name]
        else:
            writes.remove(arrival)
        arrival.end()
        if self._watches:
            self.tell(names.bucket, names.key)

    def is_arriving(self, bucket: str, key: str, namespace: str) -> bool:
        """Whether somebody is writing the key in the namespace."""
        places = [each.request.place for each in self._writes.get((bucket, key), ())]
        return any(place is not None and is_same_namespace(place.namespace.name, namespace) for place in places)

    def of(self, bucket: str, key: str) -> list[Arrival]:
        """The writes of the key."""
        return list(self._writes.get((bucket, key), ()))

    def watch(self, bucket: str, key: str) -> KeyWatch:
        """Begin to watch a key; matched by one `unwatch`."""
        watch = KeyWatch((bucket, key))
        self._watches.setdefault(watch.name, []).append(watch)
        return watch

    def unwatch(self, watch: KeyWatch) -> None:
        """Watch it no longer."""
        watches = self._watches[watch.name]
        watches.remove(watch)
        if not watches:
            del self._watches[watch.name]

    def tell(self, bucket: str, key: str, made_of: tuple[PartRow, ...] = ()) -> None:
        """Something happened to the uploads of the key; `made_of`: they became a chunk of these parts."""
        for watch in self._watches.get((bucket, key), ()):
            if made_of:
                watch.made_of = made_of
            watch.wake()

    def tell_all(self) -> None:
        """Wake everybody who watches a key."""
        for watches in self._watches.values():
            for watch in watches:
                watch.wake()

    @property
    def is_watched(self) -> bool:
        """Whether anybody watches any key."""
        return bool(self._watches)
