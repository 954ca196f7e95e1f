"""What buckets' rules send to the remote tier beside what is uploaded as it is written: objects that are read again (`reused`), and
objects that were there before the rule was (`always`, and buckets of class `shared`).

A read costs a look into a set of bucket names, and no look-up: what has been read once is remembered by its blob, for a bounded
number of objects, and what is read again is queued some moments later, many in one step. Objects of before the rule are found by
going through their bucket, in pages and with pauses, at every start and whenever a bucket's settings change; what waits already
stays queued once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.remote_protocol import QueueReason
from kvobj.catalog.rows import BucketRow, Durability, ObjectRow
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.clock import Clock
from kvobj.errors import KvobjError, NoSuchBucketError
from kvobj.store.remote_room import QueueRoom

REMEMBERED_MAX: Final = 65_536
REUSE_AFTER_MS: Final = 1000
"""A read so soon after the write is not yet a second use: writers check what they wrote."""
QUEUED_AT_ONCE: Final = 256
_GATHER_SECONDS: Final = 0.5
_PAGE: Final = 500
_REST_FACTOR: Final = 9.0
"""Of its time the search through a bucket takes a tenth."""
_FULL_SHARE: Final = 0.5


class RemoteRules(BackgroundWorker):
    """See the module's text. Event-loop-only. Who looks for old objects leaves room in the queue for new ones."""

    worker_name = "remote-rules"

    def __init__(self, *, catalog: Catalog, room: QueueRoom, clock: Clock, log: logging.Logger) -> None:
        super().__init__()
        self._catalog = catalog
        self._room = room
        self._clock = clock
        self._log = log
        self._reused: frozenset[str] = frozenset()
        self._read_once: set[bytes] = set()
        self._read_once_before: set[bytes] = set()
        self._read_again: dict[bytes, ObjectRow] = {}
        self._must_look = True
        self._searched: set[tuple[str, int]] = set()
        self._woken = asyncio.Event()
        self.found_objects = 0
        """Objects of before their bucket's rule that were queued since the start."""
        self.reused_objects = 0
        """Objects that were queued since they were read again."""

    def look(self) -> None:
        """A bucket's settings were changed."""
        self._must_look = True
        self._woken.set()

    def note_reused(self, row: ObjectRow) -> None:
        """The object was read. Cheap, and never wrong to leave out."""
        if row.bucket not in self._reused or row.durability is not Durability.LOCAL or not row.blobs:
            return
        blob_id = row.blobs[0].blob_id
        if self._clock.now_ms() - row.modified_ms < REUSE_AFTER_MS:
            return
        if blob_id not in self._read_once and blob_id not in self._read_once_before:
            if len(self._read_once) >= REMEMBERED_MAX:
                self._read_once_before, self._read_once = self._read_once, set()
            self._read_once.add(blob_id)
        elif len(self._read_again) < REMEMBERED_MAX:
            self._read_again[blob_id] = row
            self._woken.set()

    async def _run(self) -> None:
        while True:
            if not self._must_look:
                await self._woken.wait()
            self._woken.clear()
            try:
                await self.step()
            except KvobjError as error:
                self._log.warning("buckets' rules for the remote tier could not be followed, will retry: %s", error)
                self._must_look = True
            await asyncio.sleep(_GATHER_SECONDS)  # what else is read meanwhile is queued in one step with it

    async def step(self) -> None:
        """Queue what was read again; then, if that is due, look through the buckets."""
        await self._queue_read_again()
        if not self._must_look:
            return
        self._must_look = False
        buckets = await self._catalog.buckets()
        self._reused = frozenset(bucket.name for bucket in buckets if bucket.remote is RemoteRule.REUSED)
        wanted = {(bucket.name, bucket.created_ms) for bucket in buckets if _goes_whole(bucket)}
        self._searched &= wanted  # who has another rule now, and gets this one again, is searched again
        for name in sorted(wanted - self._searched):
            await self._search(name[0])
            self._searched.add(name)

    async def _queue_read_again(self) -> None:
        while self._read_again:
            rows = list(self._read_again.values())[:QUEUED_AT_ONCE]
            self.reused_objects += await self._add(rows, QueueReason.REUSED)
            for row in rows:
                self._read_again.pop(row.blobs[0].blob_id, None)

    async def _add(self, rows: Sequence[ObjectRow], reason: QueueReason) -> int:
        """Queue those that do not wait already; how many those were."""
        queue = self._catalog.remote_queue
        fresh = [row for row in rows if queue.find(row) is None]
        return sum(await queue.add(fresh, reason)) if fresh else 0

    async def _search(self, bucket: str) -> None:
        after: str | None = ""
        while after is not None:
            await self._room.below(_FULL_SHARE)
            started = self._clock.monotonic()
            try:
                page = await self._catalog.list_objects(bucket, after=after, limit=_PAGE)
            except NoSuchBucketError:
                return
            rows = [row for row in page.rows if row.durability is Durability.LOCAL]
            for start in range(0, len(rows), QUEUED_AT_ONCE):
                self.found_objects += await self._add(rows[start : start + QUEUED_AT_ONCE], QueueReason.ALWAYS)
            after = page.next_after
            await self._queue_read_again()
            await asyncio.sleep(_REST_FACTOR * (self._clock.monotonic() - started))


def _goes_whole(bucket: BucketRow) -> bool:
    """Whether every object of the bucket is to be on the remote."""
    return bucket.remote is RemoteRule.ALWAYS or bucket.durability is Durability.SHARED
