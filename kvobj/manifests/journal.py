"""Moves the catalog's outbox into journal manifests on the remote, in the order of its positions, and empties it behind them.

One manifest is on its way at a time; what is published meanwhile goes together with the next. It goes at once where somebody waits
for it (`settled`), else when the oldest record is `interval_seconds` old. A failure is tried again for ever, with growing pauses,
under the same name with the same bytes: an answer that was lost is no second manifest. Entries leave the outbox when their manifest
is there, so a crash repeats at most one, which readers do not notice. Before the first manifest of a lineage stands a snapshot;
while one is due nothing is settled.

Who waits is answered once a look at the lineage, begun after the manifest was there, has found it still this store's: a rebuild
takes the store over before it lists the manifests, so it has read what anybody was told of. One small request for all that wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kvobj.background import BackgroundWorker
from kvobj.catalog.remote_protocol import Outbox, OutboxEntry
from kvobj.clock import Clock
from kvobj.errors import KvobjError, TierUnavailableError
from kvobj.manifests.compaction import Compaction, ManifestUpkeep
from kvobj.manifests.folder import ManifestFolder
from kvobj.manifests.format import MAX_ENTRIES, MAX_PLAIN_BYTES, ManifestEntry, ManifestKind, entry_bytes
from kvobj.manifests.sealing import Sealer, sealed_content
from kvobj.metrics import Metrics

Step = Callable[[], Awaitable[object]]

_PAGE: Final = 1000
_SEALED_EXTRA_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class JournalLag:
    """What the remote is not told yet: records, since when in seconds; failures since the last success, and the last of them."""

    entries: int
    oldest_seconds: float
    failures: int
    problem: str = ""


def outbox_age_seconds(outbox: Outbox, clock: Clock) -> float:
    """For how long the oldest entry has waited; 0 where none waits."""
    oldest_ms = outbox.oldest_ms
    return 0.0 if oldest_ms is None else max(0.0, (clock.now_ms() - oldest_ms) / 1000)


class ManifestJournal(BackgroundWorker):
    """See the module's text. Event-loop-only. Takes the outbox's `on_published` for itself."""

    worker_name = "manifest-journal"

    def __init__(
        self,
        *,
        outbox: Outbox,
        folder: ManifestFolder,
        compaction: Compaction,
        sealer: Sealer,
        clock: Clock,
        log: logging.Logger,
        metrics: Metrics,
        upkeep: ManifestUpkeep | None = None,
        interval_seconds: float = 1.0,
        retry_seconds: tuple[float, float] = (0.05, 10.0),
        fence_poll_seconds: float = 1.0,
    ) -> None:
        super().__init__()
        self._outbox = outbox
        self._folder = folder
        self._compaction = compaction
        self._sealer = sealer
        self._identity = folder.identity
        self._clock = clock
        self._log = log
        self._upkeep = upkeep
        self._interval_seconds = interval_seconds
        self._retry_seconds = retry_seconds
        self._fence_poll_seconds = fence_poll_seconds
        waiting = outbox.entries(0, limit=1)
        self._durable = waiting[0].position - 1 if waiting else outbox.position
        self._confirmed = 0
        self._has_snapshot = False
        self._waiters: dict[asyncio.Future[bool], int] = {}
        self._wanted = asyncio.Event()
        self._published = asyncio.Event()
        self._failures = 0
        self._problem = ""
        outbox.on_published = self._published.set
        self._manifests = metrics.counter("kvobj_manifests_written", "Journal manifests written to the remote")
        self._entries = metrics.counter(
            "kvobj_manifest_entries_written", "Records in journal manifests written to the remote"
        )
        self._failed = metrics.counter(
            "kvobj_manifest_failures", "Writes of manifests that failed and were tried again"
        )

    @property
    def durable_position(self) -> int:
        """Every record up to here is in a manifest."""
        return self._durable

    @property
    def lag(self) -> JournalLag:
        """How far behind it is."""
        age_seconds = outbox_age_seconds(self._outbox, self._clock)
        return JournalLag(self._outbox.pending, age_seconds, self._failures, self._problem)

    async def settled(self, position: int, *, timeout_seconds: float) -> bool:
        """Wait until every record up to `position` survives the loss of this node. False: not within the time, or a newer lineage
        has taken over. It is tried further, and nothing is forgotten."""
        if self._is_settled(position):
            return True
        if self._identity.is_fenced:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = position
        self._wanted.set()
        self._published.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                return await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(waiter, None)

    async def flush(self, *, timeout_seconds: float) -> bool:
        """`settled` for everything published so far."""
        return await self.settled(self._outbox.position, timeout_seconds=timeout_seconds)

    async def aclose(self) -> None:
        """See `BackgroundWorker.aclose`. Who waits is told that it is not settled."""
        await super().aclose()
        self._answer(final=True)

    def _is_settled(self, position: int) -> bool:
        return self._has_snapshot and self._confirmed >= position

    def _answer(self, *, final: bool = False) -> None:
        for waiter, position in list(self._waiters.items()):
            if waiter.done():
                continue
            if self._is_settled(position):
                waiter.set_result(True)
            elif final:
                waiter.set_result(False)

    async def _run(self) -> None:
        while True:
            await self._write_until_fenced()
            self._log.error("manifests are not written any more: the place on the remote is not this store's now")
            self._answer(final=True)
            while self._identity.is_fenced:  # noqa: ASYNC110 - it hardly ever ends
                await asyncio.sleep(self._fence_poll_seconds)
            # Nobody knows what became of what was there.
            self._has_snapshot = False
            self._confirmed = 0
            self._compaction.last_snapshot = None
            self._log.info("manifests are written again: the place on the remote is this store's")

    async def _write_until_fenced(self) -> None:
        while not self._identity.is_fenced:
            await self._repeated(self._settle_snapshot)
            await self._confirm()
            if not self._waits():
                await self._until_published()
                continue
            if not self._waiters:
                await self._until_due()
            if self._outbox.snapshot_due:
                self._has_snapshot = False
                continue
            await self._write_next()

    async def _settle_snapshot(self) -> None:
        """Before anything is settled there is a snapshot, which knows of what was never published."""
        if self._has_snapshot and not self._outbox.snapshot_due:
            return
        if self._outbox.snapshot_due or not await self._compaction.has_snapshot():
            snapshot = await self._compaction.take_snapshot()
            self._log.info("manifests begin with a snapshot of %d records at %d", snapshot.entries, snapshot.position)
        self._has_snapshot = True

    async def _write_next(self) -> None:
        """One manifest of what waits, until it is there; then forget it here."""
        records = await self._next_records()
        last = records[-1].position
        entries = [
            ManifestEntry(record.position, content)
            for record in records
            if (content := sealed_content(record.content, self._sealer)) is not None
        ]
        name, body = await self._folder.encode(ManifestKind.JOURNAL, entries, after=self._durable, last=last)
        if not await self._repeated(lambda: self._folder.write(name, body)):
            return
        self._durable = max(self._durable, last)
        self._manifests.inc()
        self._entries.inc(len(entries))
        await self._confirm()
        if self._upkeep is not None:
            self._upkeep.note_written(len(entries))
        await self._repeated(lambda: self._outbox.discard(last))

    def _is_confirmation_due(self) -> bool:
        return self._has_snapshot and any(self._confirmed < each <= self._durable for each in self._waiters.values())

    async def _confirm(self) -> None:
        """Answer who waits for what is there by now. See the module's text."""
        if self._is_confirmation_due():
            durable = self._durable
            if await self._repeated(self._see_that_it_is_ours) and not self._identity.is_fenced:
                self._confirmed = max(self._confirmed, durable)
        self._answer()

    async def _see_that_it_is_ours(self) -> None:
        if not await self._identity.check() and not self._identity.is_fenced:
            raise TierUnavailableError("the place on the remote is not this store's")

    async def _next_records(self) -> list[OutboxEntry]:
        """As many as one manifest holds, read in pages that do not hold up the event loop."""
        records: list[OutboxEntry] = []
        size = 0
        while len(records) < MAX_ENTRIES:
            after = records[-1].position if records else self._durable
            page = self._outbox.entries(after, limit=min(_PAGE, MAX_ENTRIES - len(records)))
            for record in page:
                size += entry_bytes(record.content) + _SEALED_EXTRA_BYTES
                if records and size > MAX_PLAIN_BYTES:
                    return records
                records.append(record)
            if len(page) < _PAGE:
                break
            await asyncio.sleep(0)
        return records

    def _waits(self) -> bool:
        """Whether there is a record to write. `pending` may count one that is not to be seen yet: `on_published` tells of it."""
        return bool(self._outbox.entries(self._durable, limit=1))

    async def _until_published(self) -> None:
        self._published.clear()
        self._wanted.clear()
        if not self._waits() and not self._is_confirmation_due():
            await self._published.wait()

    async def _until_due(self) -> None:
        """Until somebody waits, or the oldest record is old enough."""
        self._wanted.clear()
        rest = self._interval_seconds - self.lag.oldest_seconds
        if rest > 0:
            try:
                async with asyncio.timeout(min(rest, self._interval_seconds)):
                    await self._wanted.wait()
            except TimeoutError:
                return

    async def _repeated(self, step: Step) -> bool:
        """Do it until it is done. False: a newer lineage has taken over meanwhile."""
        shortest, longest = self._retry_seconds
        pause = shortest
        while not self._identity.is_fenced:
            try:
                await step()
            except KvobjError as error:
                self._failures += 1
                self._failed.inc()
                if str(error) != self._problem:
                    self._problem = str(error)
                    self._log.warning("manifests cannot be written, which is tried again: %s", error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not secrecy
                pause = min(longest, pause * 2)
                continue
            if self._problem:
                self._log.info("manifests are written again after %d failures", self._failures)
            self._failures, self._problem = 0, ""
            return True
        return False
