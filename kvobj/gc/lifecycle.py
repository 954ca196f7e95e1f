"""Lifecycle: ends what the rules of buckets say has had its time: objects of any bucket, and uploads that nobody completes.

A pass goes through the key prefixes that rules name, page by page, beside requests at a rate like all of gc; where it is survives a
restart. What goes is removed as by DELETE, and only as it was read: an object that was written meanwhile stays. In a KV bucket
what follows on a chunk goes with it, and pins keep what they hold. Rules that change while a pass is on its way end its work in
that bucket; the next one goes by the new ones.

Ages are told by the wall clock, since nothing else outlives a restart (`lifecycle_rules.due`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow, UploadRow, WriteCondition
from kvobj.catalog.setting_rows import LifecycleRule
from kvobj.clock import Clock
from kvobj.errors import BusyError, KvobjError, NoSuchBucketError, NoSuchUploadError
from kvobj.gc.lifecycle_rules import due, key_prefixes, upload_due
from kvobj.gc.pacing import BATCH_MAX, Pace
from kvobj.gc.plan import Reason, Victim

# Of a lifecycle day so many passes are made, but not more often than this.
PASSES_A_DAY: Final = 24
INTERVAL_SECONDS_MIN: Final = 0.1
# Beside other work so many rows are looked at in the time that the rate gives for removing one.
LOOK_FACTOR: Final = 20
# One step compares at most so many rows with rules: a thousand rules make for short pages.
COMPARISONS_MAX: Final = 20_000
# A dry run tells of no more objects, and looks at no more.
PLAN_MAX: Final = 10_000
PLAN_LOOK_MAX: Final = 100_000


class LifecyclePosition(msgspec.Struct, frozen=True, array_like=True):
    """Everything before this bucket, key prefix and key was looked at in this pass."""

    bucket: str = ""
    key_prefix: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class LifecycleReport:
    """What one pass did. `busy`: removals that were given up for now, since chunks came faster than they went."""

    objects: int = 0
    size_bytes: int = 0
    uploads: int = 0
    busy: int = 0


@dataclass(slots=True)
class LifecycleCounts:
    """Since the start of the process."""

    objects: int = 0
    size_bytes: int = 0
    uploads: int = 0
    busy: int = 0
    looked_at: int = 0
    passes: int = 0


class Lifecycle(BackgroundWorker):
    """See the module's text. `on_removed` is told of the rows that were hidden, and with none of them that blobs were queued.
    `day_seconds`: what a day of a rule is. One pass at a time. Event-loop-only."""

    worker_name = "lifecycle"

    def __init__(
        self,
        *,
        catalog: Catalog,
        clock: Clock,
        pace: Pace,
        day_seconds: float,
        on_removed: Callable[[Sequence[ObjectRow]], None],
        log: logging.Logger,
    ) -> None:
        super().__init__()
        self._catalog = catalog
        self._clock = clock
        self._pace = pace
        self._day_ms = max(1, round(day_seconds * 1000))
        self._interval_seconds = max(INTERVAL_SECONDS_MIN, day_seconds / PASSES_A_DAY)
        self._on_removed = on_removed
        self._log = log
        self._position = LifecyclePosition()
        self._passing = asyncio.Lock()
        self.counts = LifecycleCounts()

    def save(self) -> bytes:
        """Where it is, for `load` after a restart."""
        return msgspec.msgpack.encode(self._position)

    def load(self, state: bytes) -> None:
        """Go on where an earlier process was; a state that cannot be read is ignored."""
        try:
            self._position = msgspec.msgpack.decode(state, type=LifecyclePosition)
        except msgspec.DecodeError:
            self._log.warning("the position in the buckets' lifecycles cannot be read: they begin anew")

    async def _run(self) -> None:
        while True:
            try:
                await self.run_pass()
            except KvobjError as error:
                self._log.warning("lifecycle failed, will go on where it was: %s", error)
            await asyncio.sleep(self._interval_seconds)

    async def run_pass(self) -> LifecycleReport:
        """From where it is to the last bucket; the next pass begins at the first."""
        async with self._passing:
            before = replace(self.counts)
            try:
                for name in [bucket.name for bucket in await self._catalog.buckets() if bucket.lifecycle]:
                    await self._pass_bucket(name)
                self._position = LifecyclePosition()
                self.counts.passes += 1
            finally:
                report = self._since(before)
                if report != LifecycleReport():
                    self._log.info(
                        "lifecycle: %d objects (%d bytes) expired, %d uploads ended, %d removals put off",
                        report.objects,
                        report.size_bytes,
                        report.uploads,
                        report.busy,
                    )
            return report

    def _since(self, before: LifecycleCounts) -> LifecycleReport:
        counts = self.counts
        return LifecycleReport(
            objects=counts.objects - before.objects,
            size_bytes=counts.size_bytes - before.size_bytes,
            uploads=counts.uploads - before.uploads,
            busy=counts.busy - before.busy,
        )

    async def _pass_bucket(self, name: str) -> None:
        if name < self._position.bucket:
            return
        if name != self._position.bucket:
            self._position = LifecyclePosition(name)
        bucket = await self._catalog.bucket(name)
        if bucket is None:
            return
        try:
            await self._end_uploads(name, bucket.lifecycle)
            rules = self._expiring(bucket.lifecycle)
            for key_prefix in key_prefixes(rules):
                if key_prefix >= self._position.key_prefix:
                    here = [rule for rule in rules if rule.key_prefix.startswith(key_prefix)]
                    if not await self._expire(name, bucket.lifecycle, here, key_prefix):
                        return
        except NoSuchBucketError:  # deleted since it was listed
            return

    def _expiring(self, rules: Sequence[LifecycleRule]) -> list[LifecycleRule]:
        """The rules that may expire something now."""
        now_ms = self._clock.now_ms()
        return [
            rule
            for rule in rules
            if rule.enabled
            and (rule.expire_days is not None or (rule.expire_date_ms is not None and rule.expire_date_ms <= now_ms))
        ]

    # -- objects ---------------------------------------------------------------------------------------------------
    async def _expire(
        self, bucket: str, standing: tuple[LifecycleRule, ...], rules: list[LifecycleRule], key_prefix: str
    ) -> bool:
        """One key prefix, of which `rules` may expire something; False once the bucket's rules are not the `standing` ones."""
        after = self._position.key if key_prefix == self._position.key_prefix else ""
        self._position = LifecyclePosition(bucket, key_prefix, after)
        started = self._clock.monotonic()
        async for rows in self._pages(bucket, rules, key_prefix, after):
            expired = self._due(rows, rules)
            while expired:
                if not await self._stand(bucket, standing):
                    return False
                size = self._pace.batch
                batch, expired = expired[:size], expired[size:]
                await self._remove(bucket, batch)
                await self._pace.after(len(batch), seconds=self._clock.monotonic() - started)
                started = self._clock.monotonic()
            if rows:
                self._position = LifecyclePosition(bucket, key_prefix, rows[-1].key)
            await self._pace.after(len(rows) // LOOK_FACTOR, seconds=self._clock.monotonic() - started)
            started = self._clock.monotonic()
        return await self._stand(bucket, standing)

    async def _pages(
        self, bucket: str, rules: Sequence[LifecycleRule], key_prefix: str, after: str
    ) -> AsyncIterator[tuple[ObjectRow, ...]]:
        following: str | None = after
        while following is not None:
            limit = max(1, min(self._pace.batch * LOOK_FACTOR, BATCH_MAX, COMPARISONS_MAX // len(rules)))
            page = await self._catalog.list_objects(bucket, key_prefix=key_prefix, after=following, limit=limit)
            self.counts.looked_at += len(page.rows)
            yield page.rows
            following = page.next_after

    def _due(self, rows: Sequence[ObjectRow], rules: Sequence[LifecycleRule]) -> list[ObjectRow]:
        now_ms, day_ms = self._clock.now_ms(), self._day_ms
        return [row for row in rows if any(due(rule, row, now_ms=now_ms, day_ms=day_ms) for rule in rules)]

    async def _remove(self, bucket: str, rows: Sequence[ObjectRow]) -> None:
        conditions = [WriteCondition(sequence=row.sequence) for row in rows]
        keys = [row.key for row in rows]
        try:
            outcomes = await self._catalog.delete(bucket, keys, conditions=conditions, now_ms=self._clock.now_ms())
        except BusyError:  # chunks are stored below faster than they go: the next pass finds these again
            self.counts.busy += 1
            return
        removed = [outcome.removed for outcome in outcomes if outcome.removed is not None]
        removed += [row for outcome in outcomes for row in outcome.descendants]
        self._on_removed(removed)
        self.counts.objects += len(removed)
        self.counts.size_bytes += sum(row.size_bytes for row in removed)

    async def _stand(self, bucket: str, rules: tuple[LifecycleRule, ...]) -> bool:
        """Whether the bucket still has these rules: what its owner has taken back ends nothing any more."""
        row = await self._catalog.bucket(bucket)
        return row is not None and row.lifecycle == rules

    # -- uploads ---------------------------------------------------------------------------------------------------
    async def _end_uploads(self, bucket: str, standing: tuple[LifecycleRule, ...]) -> None:
        rules = [rule for rule in standing if rule.enabled and rule.abort_upload_days is not None]
        for key_prefix in key_prefixes(rules):
            after: tuple[str, str] | None = ("", "")
            while after is not None:
                limit = max(1, min(BATCH_MAX, COMPARISONS_MAX // len(rules)))
                page = await self._catalog.list_uploads(bucket, key_prefix=key_prefix, after=after, limit=limit)
                for upload in page.rows:
                    if self._upload_is_due(upload, rules):
                        if not await self._stand(bucket, standing):
                            return
                        await self._end_upload(upload)
                await self._pace.after(len(page.rows) // LOOK_FACTOR, seconds=0.0)
                after = page.next_after

    def _upload_is_due(self, upload: UploadRow, rules: Sequence[LifecycleRule]) -> bool:
        now_ms = self._clock.now_ms()
        return any(upload_due(rule, upload, now_ms=now_ms, day_ms=self._day_ms) for rule in rules)

    async def _end_upload(self, upload: UploadRow) -> None:
        try:
            await self._catalog.abort_upload(upload.bucket, upload.key, upload.upload_id, now_ms=self._clock.now_ms())
        except NoSuchUploadError:  # completed or aborted this moment
            return
        self._on_removed(())
        self.counts.uploads += 1

    # -- looking on ------------------------------------------------------------------------------------------------
    async def plan(self) -> list[Victim]:
        """The objects that a pass would remove now, in the order of buckets and keys. Changes nothing; bounded by `PLAN_MAX` and
        `PLAN_LOOK_MAX`."""
        found: list[Victim] = []
        looked_at = 0
        for bucket in await self._catalog.buckets():
            rules = self._expiring(bucket.lifecycle)
            for key_prefix in key_prefixes(rules):
                here = [rule for rule in rules if rule.key_prefix.startswith(key_prefix)]
                try:
                    async for rows in self._pages(bucket.name, here, key_prefix, ""):
                        due_rows = self._due(rows, here)
                        found += [Victim(row.bucket, row.key, Reason.LIFECYCLE, row.size_bytes) for row in due_rows]
                        looked_at += len(rows)
                        if len(found) >= PLAN_MAX or looked_at >= PLAN_LOOK_MAX:
                            return found[:PLAN_MAX]
                        await asyncio.sleep(0)
                except NoSuchBucketError:  # deleted since it was listed
                    break
        return found
