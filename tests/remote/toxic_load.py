"""Load on a remote tier behind the fault proxy, and a model beside it that says what may be found.

Many workers at once, each one operation after another on blobs of its own; what a worker did is certain, not done, or, after an
error, doubtful: then it may have happened or not. Everything that is found is compared: bytes, listings, absences. What contradicts
is kept in `violations` as sentences, so that one run tells all of it.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Final

from blake3 import blake3
from fakes_arena import NAMES, frame_of
from s3_proxy import FaultProxy
from toxics import Operation, Toxic

from kvobj.arena import Arena
from kvobj.errors import FrameCorruptError, TierUnavailableError
from kvobj.ids import BlobId, BlobIdAllocator, new_epoch
from kvobj.tiers.protocol import ByteRange, Tier

_SMALL: Final = (1, 200, 4096, 9_000, 30_000, 70_000)
_LARGE_SHARE: Final = 0.02
_WORKERS: Final = 32
_SLACK_SECONDS: Final = 3.0
_PAGE_KEYS: Final = 1000  # of a LIST
_PAUSE_SECONDS: Final = 0.02
_NOT_TRIED: Final = "too many requests failed"
_KINDS: Final = (("put", 38), ("get", 36), ("range", 8), ("delete", 10), ("absent", 3), ("missing", 3), ("scan", 2))
_ID_IN_KEY: Final = re.compile(r"blobs/([0-9a-f]{32})/")
_KEYLESS: Final = frozenset({"scan", "delete", "missing"})


def content_of(blob_id: BlobId, size_bytes: int) -> bytes:
    """The bytes that a blob of the load decodes to."""
    return blake3(blob_id).digest(length=size_bytes)


@dataclass(slots=True)
class Tally:
    """What one run did: the figures that it is judged by, as JSON takes them."""

    operations: int = 0
    hit: int = 0
    injected: int = 0
    succeeded: int = 0
    operations_under_fire: int = 0
    succeeded_under_fire: int = 0
    acknowledged_puts: int = 0
    not_tried: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    corrupt_not_served: int = 0
    slowest_seconds: float = 0.0
    seconds: float = 0.0
    recovered_seconds: float = 0.0
    removed_blobs: int = 0
    aborted_uploads: int = 0

    def as_dict(self) -> dict[str, object]:
        """For the record."""
        return asdict(self)


@dataclass(slots=True)
class _Own:
    """One worker's blobs and their sizes: there for certain, and gone for certain."""

    live: dict[BlobId, int] = field(default_factory=dict)
    gone: list[BlobId] = field(default_factory=list)
    outages: int = 0


class TierLoad:
    """The load, the model and what was found. `corrupt` are blobs whose frames did not check out: those may be missed."""

    def __init__(
        self,
        tier: Tier,
        arena: Arena,
        proxy: FaultProxy,
        *,
        seed: int,
        large_sizes: Collection[int],
        deadline_seconds: float,
        corrupt: Collection[BlobId],
    ) -> None:
        self.tally = Tally()
        self.violations: list[str] = []
        self.doubtful: set[BlobId] = set()
        self._tier = tier
        self._arena = arena
        self._proxy = proxy
        self._seed = seed
        self._large_sizes = tuple(large_sizes)
        self._deadline_seconds = deadline_seconds
        self._corrupt = corrupt
        self._ids = BlobIdAllocator(new_epoch(random.Random(seed).randbytes))
        self._failed: Counter[str] = Counter()
        self._workers = [_Own() for _ in range(_WORKERS)]
        self._rounds = 0

    @property
    def epoch(self) -> int:
        """Of the blobs' ids."""
        return self._ids.epoch

    @property
    def live(self) -> set[BlobId]:
        """What was acknowledged and not deleted: there for certain."""
        return {blob_id for own in self._workers for blob_id in own.live}

    async def named(self, blob_ids: Sequence[BlobId]) -> set[BlobId]:
        """Those of the ids that a row names, as a sweep asks it."""
        return self.live.intersection(blob_ids)

    async def run(self, operations: int, *, is_under_fire: bool = False) -> None:
        """Do so many operations, spread over the workers."""
        began = time.monotonic()
        self._rounds += 1
        each = operations // _WORKERS + 1
        before = (len(self._proxy.injections), self.tally.operations, self.tally.succeeded)
        async with asyncio.TaskGroup() as group:
            for number, own in enumerate(self._workers):
                chance = random.Random(f"{self._seed} {self._rounds} {number}")
                group.create_task(self._work(own, chance, min(each, operations - number * each)))
        self.tally.failed = dict(self._failed)
        self.tally.seconds += time.monotonic() - began
        if is_under_fire:
            self.tally.injected += len(self._proxy.injections) - before[0]
            self.tally.operations_under_fire += self.tally.operations - before[1]
            self.tally.succeeded_under_fire += self.tally.succeeded - before[2]

    async def _work(self, own: _Own, chance: random.Random, operations: int) -> None:
        done = 0
        while done < operations:
            kind = chance.choices([name for name, _ in _KINDS], [weight for _, weight in _KINDS])[0]
            if await self._measured(kind, own, chance):
                done += 1
            else:
                await asyncio.sleep(
                    _PAUSE_SECONDS
                )  # what was not even tried went through nothing, and is asked for again

    async def _measured(self, kind: str, own: _Own, chance: random.Random) -> bool:
        """One operation, its time, and whether the proxy did something to it. False: the tier did not even try."""
        if kind in {"get", "range", "delete"} and not own.live:
            kind = "put"
        if kind in {"absent", "missing"} and not own.gone:
            kind = "put"
        blob_id = (
            self._ids.allocate() if kind == "put" else chance.choice([*own.live] or own.gone or [BlobId(bytes(16))])
        )
        if kind == "absent":
            blob_id = chance.choice(own.gone)
        first, began, is_outage = len(self._proxy.injections), time.monotonic(), False
        deadline_seconds = self._deadline_seconds * (self._pages() if kind == "scan" else 1)
        try:
            async with asyncio.timeout(deadline_seconds + 4 * _SLACK_SECONDS):
                await self._operation(kind, own, blob_id, chance)
        except (TierUnavailableError, FrameCorruptError) as error:
            if error.data.get("detail") == _NOT_TRIED and own.outages == len(self._proxy.outages):
                self.tally.not_tried += 1
                return False
            # Of an outage each worker has one: whether nobody listened or the breaker knew it already is the same to it.
            own.outages = len(self._proxy.outages)
            is_outage = error.data.get("detail") == _NOT_TRIED
            self._failed[type(error).__name__] += 1
        except TimeoutError:
            self.violations.append(f"{kind} of {blob_id.hex()} hangs")
        else:
            self.tally.succeeded += 1
        seconds = time.monotonic() - began
        if seconds > deadline_seconds + _SLACK_SECONDS:
            self.violations.append(f"{kind} of {blob_id.hex()} took {seconds:.1f} s")
        self.tally.operations += 1
        self.tally.slowest_seconds = max(self.tally.slowest_seconds, round(seconds, 3))
        self.tally.hit += is_outage or self._was_hit(kind, blob_id, first, began)
        return True

    def _pages(self) -> int:
        """The most pages that a scan may need: each is a request, with a deadline of its own."""
        return len(self.live | self.doubtful) // _PAGE_KEYS + 1

    def _was_hit(self, kind: str, blob_id: BlobId, first: int, began: float) -> bool:
        """Requests that name no key cannot be told from another's: their operations count as not hit, but for outages."""
        if any(start <= time.monotonic() and began <= stop for start, stop in self._proxy.outages):
            return True
        injections = self._proxy.injections[first:]
        if kind in _KEYLESS:
            return False
        return any(
            blob_id.hex() in injection.key or injection.operation is Operation.CONNECT for injection in injections
        )

    async def _operation(self, kind: str, own: _Own, blob_id: BlobId, chance: random.Random) -> None:
        match kind:
            case "put":
                await self._put(own, blob_id, chance)
            case "get" | "range":
                await self._get(own, blob_id, chance, is_range=kind == "range")
            case "delete":
                await self._delete(own, blob_id)
            case "absent":
                await self._find_absent(blob_id)
            case "missing":
                await self._ask_missing(own)
            case _:
                await self._scan(own)

    async def _put(self, own: _Own, blob_id: BlobId, chance: random.Random) -> None:
        is_large = chance.random() < _LARGE_SHARE
        size = chance.choice(self._large_sizes if is_large else _SMALL)
        frame = await frame_of(self._arena, content_of(blob_id, size))
        self.doubtful.add(blob_id)
        try:
            await self._tier.put(blob_id, frame, NAMES)
        finally:
            frame.release()
        self.doubtful.discard(blob_id)
        own.live[blob_id] = size
        self.tally.acknowledged_puts += 1

    async def _get(self, own: _Own, blob_id: BlobId, chance: random.Random, *, is_range: bool) -> None:
        size = own.live[blob_id]
        content = content_of(blob_id, size)
        asked = None
        if is_range:
            start = chance.randrange(size)
            asked = ByteRange(start, chance.randint(start + 1, size))
        known_corrupt = blob_id in self._corrupt
        frame = await self._tier.get(blob_id, asked)
        if frame is None:
            self.tally.corrupt_not_served += 1
            if not known_corrupt and blob_id not in self._corrupt:
                self.violations.append(f"{blob_id.hex()} was acknowledged and is not found")
            return
        try:
            await frame.complete()
            got = bytes(frame.view)
        finally:
            frame.release()
        # A raw frame: a head, then the bytes as they are.
        whole = content if asked is None else None
        if whole is not None and not got.endswith(whole):
            self.violations.append(f"wrong bytes of {blob_id.hex()}, {size} bytes")
        if asked is not None and len(got) != asked.stop - asked.start:
            self.violations.append(f"a range of {blob_id.hex()} has {len(got)} bytes, not {asked.stop - asked.start}")
        if asked is not None and got not in await self._encoded(content):
            self.violations.append(f"wrong bytes in a range of {blob_id.hex()}")

    async def _encoded(self, content: bytes) -> bytes:
        frame = await frame_of(self._arena, content)
        try:
            return bytes(frame.view)
        finally:
            frame.release()

    async def _delete(self, own: _Own, blob_id: BlobId) -> None:
        del own.live[blob_id]
        self.doubtful.add(blob_id)
        await self._tier.delete([blob_id])
        self.doubtful.discard(blob_id)
        own.gone.append(blob_id)

    async def _find_absent(self, blob_id: BlobId) -> None:
        frame = await self._tier.get(blob_id)
        if frame is not None:
            frame.release()
            self.violations.append(f"{blob_id.hex()} was deleted and is found")

    async def _ask_missing(self, own: _Own) -> None:
        live = list(own.live)
        missing = set(await self._tier.missing([*live, own.gone[0]]))
        if missing != {own.gone[0]}:
            self.violations.append(
                f"missing: {sorted(each.hex() for each in missing)}, expected {own.gone[0].hex()} alone"
            )

    async def _scan(self, own: _Own) -> None:
        live, gone = set(own.live), set(own.gone)
        async with aclosing(self._tier.scan()) as scanning:  # type: ignore[type-var]
            found = [blob_id async for blob_id in scanning]
        if found != sorted(set(found)):
            self.violations.append("a scan is not ascending")
        if not live <= set(found):
            self.violations.append(f"a scan lacks {len(live - set(found))} blobs")
        if gone & set(found):
            self.violations.append(f"a scan has {len(gone & set(found))} blobs that were deleted")

    async def recover(self, *, timeout_seconds: float) -> None:
        """After the toxic is off: wait until one put passes. TimeoutError if that takes longer."""
        began = time.monotonic()
        own = self._workers[0]
        while True:
            try:
                await self._put(own, self._ids.allocate(), random.Random(0))
                break
            except TierUnavailableError:
                if time.monotonic() - began > timeout_seconds:
                    raise TimeoutError("the remote tier does not come back") from None
                await asyncio.sleep(0.02)
        self.tally.recovered_seconds = round(time.monotonic() - began, 3)

    def expect_no_failures(self) -> Callable[[], None]:
        """Call what is returned after a round that must pass without a single error."""
        before = sum(self._failed.values())

        def check() -> None:
            failed = sum(self._failed.values()) - before
            if failed:
                self.violations.append(f"{failed} operations failed after the toxic was off: {dict(self._failed)}")

        return check

    async def read_everything(self) -> None:
        """Every blob that must be there, whole and checked; each worker its own, all at once."""
        async with asyncio.TaskGroup() as group:
            for own in self._workers:
                group.create_task(self._read_all(own))

    async def _read_all(self, own: _Own) -> None:
        for blob_id in own.live:
            await self._get(own, blob_id, random.Random(0), is_range=False)


def blob_ids_of(keys: Collection[str]) -> Counter[BlobId]:
    """The blobs that a listing of the server has, and how many objects of each."""
    found = (_ID_IN_KEY.search(key) for key in keys)
    return Counter(BlobId(bytes.fromhex(match[1])) for match in found if match is not None)


# The share of requests that are hit: more where a toxic can be done to some kinds of requests only.
RATES: Final = dict.fromkeys(Toxic, 0.35) | {
    Toxic.WRONG_BYTE_DOWN: 0.6,
    Toxic.WRONG_BYTE_UP: 0.7,
    Toxic.REFUSED: 0.01,
}
