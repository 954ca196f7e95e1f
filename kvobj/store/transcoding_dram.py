"""Lets chunks that nobody has asked for in a while lie coded in memory, where their namespace says so: more of them fit.

One at a time, and at most half of a core's time. A chunk is a candidate once it is whole, and again when it is read and lies plain:
it may have been promoted. One that is used moves to the end of the line, and one that lies coded and is read is decoded for that
read alone. Candidates are remembered in memory only: a start finds them again in the catalog.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvobj.arena import Arena, PinnedFrame
from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.errors import CapacityError, CorruptionError, KvobjError
from kvobj.ids import BlobId
from kvobj.store.transcoding import Transcoder
from kvobj.store.transcoding_rules import CodingRules
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.coded_frames import Coding

COLD_SECONDS: Final = 5.0
"""A chunk that was used since is left alone; a tenth of it where the arena is nearly full."""
PRESSING_SHARE: Final = 0.7
CANDIDATES_MAX: Final = 200_000
REST_FACTOR: Final = 1.0
"""After each chunk it rests so many times as long as it worked."""
_LOOK_SECONDS: Final = 1.0
_NO_ROOM_SECONDS: Final = 0.25
_LOAD_STEP: Final = 100
_TIER: Final = "dram"


class CodedMemory(Protocol):
    """The dram tier, as far as this needs it (`tiers.dram.DramTier`)."""

    def find(self, blob_id: bytes) -> CodedBlob | None:
        """How the blob lies, or None where it lies plain or not at all."""
        ...

    def plain_to_code(self, blob_id: BlobId) -> tuple[PinnedFrame, int] | None:
        """A blob that could lie coded, pinned, and what `hold_coded` wants to know of where it lies."""
        ...

    def hold_coded(self, blob_id: BlobId, frame: PinnedFrame, *, codec: str, plain_bytes: int, instead_of: int) -> bool:
        """Let the blob lie in this frame from now on."""
        ...

    def mark_clean(self, blob_id: BlobId, *, remember: bool = False) -> None:
        """The blob need not be kept: there is a copy below."""
        ...


@dataclass(slots=True)
class _Candidate:
    """A chunk, and how it is to lie; None: that is found out when it is its turn."""

    bucket: str
    key: str
    coding: Coding | None
    used_at: float


class DramTranscoding(BackgroundWorker):
    """See the module's text. Event-loop-only."""

    worker_name = "dram-transcoding"

    def __init__(
        self,
        *,
        memory: CodedMemory,
        arena: Arena,
        transcoder: Transcoder,
        rules: CodingRules,
        catalog: Catalog,
        clock: Clock,
        log: logging.Logger,
        cold_seconds: float = COLD_SECONDS,
        sleep: Callable[[float], asyncio.Future[None]] | None = None,
    ) -> None:
        super().__init__()
        self._memory = memory
        self._arena = arena
        self._transcoder = transcoder
        self._rules = rules
        self._catalog = catalog
        self._clock = clock
        self._log = log
        self._cold_seconds = cold_seconds
        self._sleep = asyncio.sleep if sleep is None else sleep
        self._candidates: OrderedDict[bytes, _Candidate] = OrderedDict()
        # (bucket, namespace) of chunks that were candidates: a read of any other costs no more than this look.
        self._wanting: set[tuple[str, str]] = set()
        self._arrived = asyncio.Event()
        self.coded_blobs = 0
        self.failures = 0

    def __len__(self) -> int:
        """How many chunks wait to become cold."""
        return len(self._candidates)

    async def note(self, row: ObjectRow) -> None:
        """A chunk was stored, or found: it is a candidate where its namespace wants it coded in memory."""
        coding = await self._rules.of_row(row, _TIER)
        if coding is None:
            return
        self._wanting.add((row.bucket, row.namespace))
        self._add(row, coding)

    def _add(self, row: ObjectRow, coding: Coding | None) -> None:
        blob_id = row.blobs[0].blob_id
        self._candidates[blob_id] = _Candidate(row.bucket, row.key, coding, self._clock.monotonic())
        self._candidates.move_to_end(blob_id)
        if len(self._candidates) > CANDIDATES_MAX:
            self._candidates.popitem(last=False)
        self._arrived.set()

    def touched(self, row: ObjectRow) -> None:
        """The chunk was read just now."""
        if (row.bucket, row.namespace) not in self._wanting or not row.blobs:
            return
        blob_id = row.blobs[0].blob_id
        candidate = self._candidates.get(blob_id)
        if candidate is not None:
            candidate.used_at = self._clock.monotonic()
            self._candidates.move_to_end(blob_id)
        elif self._memory.find(blob_id) is None:
            self._add(row, None)

    def removed(self, row: ObjectRow) -> None:
        """The chunk was hidden: nobody will ask for it."""
        if self._candidates and row.blobs:
            self._candidates.pop(row.blobs[0].blob_id, None)

    async def load(self) -> None:
        """Look through the catalog for what an earlier process left undone: chunks that lie plain, and such as a lossy copy has
        made evictable. In slices between requests."""
        seen = 0
        async for row in self._catalog.scan_objects():
            seen += 1
            if seen % _LOAD_STEP == 0:
                await asyncio.sleep(0)
            if row.lossy is not None:
                # A process that died right after it had recorded the copy did not get to this.
                self._memory.mark_clean(BlobId(row.blobs[0].blob_id), remember=True)
            if row.blobs and row.blobs[0].blob_id not in self._candidates:
                await self.note(row)

    async def _run(self) -> None:
        while True:
            if not self._candidates:
                self._arrived.clear()
                await self._arrived.wait()
            began = self._clock.monotonic()
            pause_seconds = await self.step()
            worked_seconds = self._clock.monotonic() - began
            await self._sleep(pause_seconds + REST_FACTOR * worked_seconds)

    async def step(self) -> float:
        """Code one chunk if one is cold; how many seconds to wait before the next step."""
        if not self._candidates:
            return 0.0
        blob_id, candidate = next(iter(self._candidates.items()))
        presses = self._arena.reserved_bytes >= PRESSING_SHARE * self._arena.capacity_bytes
        cold_seconds = self._cold_seconds / 10 if presses else self._cold_seconds
        age_seconds = self._clock.monotonic() - candidate.used_at
        if age_seconds < cold_seconds:
            return min(_LOOK_SECONDS, cold_seconds - age_seconds)
        try:
            coding = await self._coding_of(blob_id, candidate)
            is_done = coding is None or await self.code(BlobId(blob_id), coding)
        except CorruptionError as error:
            self._log.error("a chunk in memory cannot be encoded blob_id=%s: %s", blob_id.hex(), error)
            self.failures += 1
            is_done = True
        except KvobjError as error:
            self._log.warning("a chunk in memory could not be encoded: %s", error)
            self.failures += 1
            is_done = True
        if self._candidates.get(blob_id) is candidate and is_done:
            del self._candidates[blob_id]
        return 0.0 if is_done else _NO_ROOM_SECONDS

    async def _coding_of(self, blob_id: bytes, candidate: _Candidate) -> Coding | None:
        if candidate.coding is not None:
            return candidate.coding
        (row,) = await self._catalog.lookup(candidate.bucket, [candidate.key])
        if row is None or not row.blobs or row.blobs[0].blob_id != blob_id:
            return None
        return await self._rules.of_row(row, _TIER)

    async def code(self, blob_id: BlobId, coding: Coding) -> bool:
        """Let one chunk lie coded, if it lies plain. False where there was no room for its coded frame just now."""
        if self._arena.is_waited_for:
            return False  # what room there is is theirs
        found = self._memory.plain_to_code(blob_id)
        if found is None:
            return True
        plain, generation = found
        try:
            lane = self._arena.lane_of(plain.pin.extent.region)
            coded = await self._transcoder.encode(plain, coding, tier=_TIER, bucket=lane, may_wait=False)
        except CapacityError:
            return False
        finally:
            plain.release()
        if coded is None:
            return True
        try:
            head = coded.head
            if self._memory.hold_coded(
                blob_id, coded.frame, codec=head.codec, plain_bytes=head.plain_bytes, instead_of=generation
            ):
                self.coded_blobs += 1
        finally:
            coded.frame.release()
        return True
