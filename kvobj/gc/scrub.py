"""The scrub: reads back and hashes everything, slowly, so that bit rot is found while another copy is still good.

Object by object in (bucket, key) order at a set rate; where it is survives a restart. A bad copy is replaced by a good one
(`copies`); what has no good copy any more is lost (`lost`). A copy that could not be read just now is left to the next pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.errors import KvobjError, NoSuchBucketError
from kvobj.gc.copies import Copies
from kvobj.gc.lost import LostObjects

PAGE_ROWS: Final = 64
# A pass begins at most so often: a small store is not read again and again.
PASS_SECONDS: Final = 24 * 3600.0
RETRY_SECONDS: Final = 10.0
# After each object it rests so many times as long as it worked: small objects cost time more than bytes.
REST_FACTOR: Final = 9.0


class ScrubPosition(msgspec.Struct, frozen=True, array_like=True):
    """Everything before this bucket and key was hashed in this pass, which began at this wall time."""

    bucket: str = ""
    key: str = ""
    pass_began_ms: int = 0


@dataclass(slots=True)
class ScrubCounts:
    """Since the start of the process."""

    objects: int = 0
    hashed_bytes: int = 0
    mismatches: int = 0
    repaired: int = 0
    replaced: int = 0
    lost: int = 0
    passes: int = 0


class Scrub(BackgroundWorker):
    """See the module's text. One object at a time. Event-loop-only."""

    worker_name = "scrub"

    def __init__(
        self,
        *,
        catalog: Catalog,
        copies: Copies,
        lost: LostObjects,
        clock: Clock,
        bytes_per_second: int,
        log: logging.Logger,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__()
        self._catalog = catalog
        self._copies = copies
        self._lost = lost
        self._clock = clock
        self._bytes_per_second = bytes_per_second
        self._log = log
        self._sleep = sleep
        self._position = ScrubPosition()
        self.counts = ScrubCounts()

    def save(self) -> bytes:
        """Where it is, for `load` after a restart."""
        return msgspec.msgpack.encode(self._position)

    def load(self, state: bytes) -> None:
        """Go on where an earlier process was; a state that cannot be read is ignored."""
        try:
            self._position = msgspec.msgpack.decode(state, type=ScrubPosition)
        except msgspec.DecodeError:
            self._log.warning("the scrub's position cannot be read: it begins anew")

    def start(self) -> None:
        """Begin to scrub in the background; nothing where the rate is 0."""
        if self._bytes_per_second:
            super().start()

    async def _run(self) -> None:
        while True:
            position = self._position
            if not position.bucket:
                since = (self._clock.now_ms() - position.pass_began_ms) / 1000
                if 0 <= since < PASS_SECONDS:  # a wall clock that was set back ends the wait
                    await self._sleep(min(PASS_SECONDS - since, PASS_SECONDS / 24))
                    continue
                self._position = msgspec.structs.replace(position, pass_began_ms=self._clock.now_ms())
            try:
                await self.run_pass()
            except KvobjError as error:
                self._log.warning("scrubbing failed, will retry: %s", error)
                await self._sleep(RETRY_SECONDS)

    async def run_pass(self) -> None:
        """From where it is to the end of the store; the next pass begins at its start."""
        for bucket in await self._catalog.buckets():
            if bucket.name < self._position.bucket:
                continue
            if bucket.name != self._position.bucket:
                self._move(bucket.name, "")
            try:
                await self._scrub_bucket(bucket.name)
            except NoSuchBucketError:  # deleted since it was listed
                continue
        self.counts.passes += 1
        self._move("", "")

    def _move(self, bucket: str, key: str) -> None:
        self._position = msgspec.structs.replace(self._position, bucket=bucket, key=key)

    async def _scrub_bucket(self, bucket: str) -> None:
        after: str | None = self._position.key
        while after is not None:
            page = await self._catalog.list_objects(bucket, after=after, limit=PAGE_ROWS)
            for row in page.rows:
                await self._scrub_object(row)
                self._move(bucket, row.key)
            after = page.next_after

    async def _scrub_object(self, row: ObjectRow) -> None:
        started = self._clock.monotonic()
        check = await self._copies.check(row)
        counts = self.counts
        counts.objects += 1
        counts.hashed_bytes += check.hashed_bytes
        counts.mismatches += check.mismatches
        counts.repaired += check.repaired
        counts.replaced += check.replaced
        if check.problem is None:
            self._lost.found(row)
        elif check.is_lost and await self._lost.note(row, check.problem):
            counts.lost += 1
        elif not check.is_lost:
            self._log.warning("scrub could not judge bucket=%s key=%s: %s", row.bucket, row.key, check.problem)
        if self._bytes_per_second:
            taken = self._clock.monotonic() - started
            await self._sleep(max(check.hashed_bytes / self._bytes_per_second - taken, taken * REST_FACTOR))
