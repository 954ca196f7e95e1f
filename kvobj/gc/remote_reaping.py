"""Deletes from the remote what the delete queue names: beside the reaper, which never waits for it.

Copies on this node go at once; the entry stays until the remote has deleted its blob too. While that fails the entries wait, with
growing pauses, and everything else in the queue goes on. No blob is deleted there before the remote was told that its row is gone,
or names another one: a node that is lost in between would leave a manifest that names an object whose bytes are no more, although
what was to replace it was never acknowledged. So a node that was fenced deletes nothing either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import QueueEntry
from kvobj.clock import Clock
from kvobj.errors import KvobjError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.protocol import Tier

FIRST_PAUSE_SECONDS: Final = 1.0
LAST_PAUSE_SECONDS: Final = 60.0


class RemoteHolds(Protocol):
    """Which blobs a delete has to ask the remote about (`remote.tier.RemoteTier`)."""

    @property
    def is_available(self) -> bool:
        """Whether a request has a chance just now."""
        ...

    def may_hold(self, blob_ids: Sequence[BlobId]) -> set[BlobId]:
        """Those that are there as far as this node knows, or that it has tried to put there. No request is made."""
        ...


class RemoteReaping:
    """See the module's text. `tiers` is all of them as one, the remote included, `local` those of this node. `is_told` waits
    a while for the remote to know of every change that can be seen in the catalog when it is called; False: it does not yet.
    Event-loop-only."""

    def __init__(
        self,
        remote: RemoteHolds,
        *,
        catalog: Catalog,
        tiers: Tier,
        local: Sequence[Tier],
        is_told: Callable[[], Awaitable[bool]],
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self._remote = remote
        self._is_told = is_told
        self._catalog = catalog
        self._tiers = tiers
        self._local = tuple(local)
        self._clock = clock
        self._log = log
        self._task: asyncio.Task[None] | None = None
        self._pause_seconds = 0.0
        self._not_before = float("-inf")
        self.on_reaped: Callable[[int], None] = lambda _: None
        """Told of how many entries were forgotten; 0 where the remote did not delete."""
        self.failures = 0
        self.waiting_since_ms: int | None = None
        """When the oldest entry was queued that the remote has failed to delete; None where it did not fail."""

    def held(self, blob_ids: Sequence[BlobId]) -> set[BlobId]:
        """See `RemoteHolds.may_hold`."""
        return self._remote.may_hold(blob_ids)

    @property
    def is_ready(self) -> bool:
        """Whether entries would be taken now."""
        return self._task is None and self._clock.monotonic() >= self._not_before and self._remote.is_available

    async def take(self, entries: Sequence[QueueEntry]) -> None:
        """Delete the copies on this node, and begin with those on the remote if that is possible now."""
        blob_ids = [BlobId(entry.blob_id) for entry in entries]
        for tier in self._local:
            gone = set(await tier.missing(blob_ids))
            here = [blob_id for blob_id in blob_ids if blob_id not in gone]
            if here:
                await tier.delete(here)
        if self.is_ready:
            self._task = asyncio.create_task(self._reap(list(entries)), name="remote-reaping")
            self._task.add_done_callback(self._ended)

    async def _reap(self, entries: list[QueueEntry]) -> None:
        try:
            if not await self._is_told():
                raise TierUnavailableError("the remote tier was not told of the removals yet")
            # All tiers: a read that was under way may have brought a copy up once more.
            await self._tiers.delete([BlobId(entry.blob_id) for entry in entries])
            await self._catalog.reap(entries)
        except KvobjError as error:
            self.failures += 1
            if not self._pause_seconds:
                self._log.warning("blobs could not be deleted from the remote, will retry: %s", error)
            self._pause_seconds = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause_seconds), LAST_PAUSE_SECONDS)
            self._not_before = self._clock.monotonic() + self._pause_seconds
            queued_ms = min(entry.not_before_ms for entry in entries)
            self.waiting_since_ms = min(queued_ms, self.waiting_since_ms or queued_ms)
            return
        self._pause_seconds, self.waiting_since_ms = 0.0, None
        self._task = None  # before it is told: who hears of it may hand over the next entries
        self.on_reaped(len(entries))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if not task.cancelled() and task.exception() is not None:
            self._log.error("deleting from the remote ended", exc_info=task.exception())

    async def done(self) -> None:
        """Return when what was begun has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def aclose(self) -> None:
        """Give up what was begun: its entries are still queued."""
        if self._task is not None:
            self._task.cancel()
            await self.done()
