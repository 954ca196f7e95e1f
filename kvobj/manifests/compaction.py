"""Keeps the manifests few: a new snapshot when there is as much behind the last one as in it, small journals put together.

What a new snapshot covers is removed once its head is durable, heads before parts, so that a crash leaves at most leftovers that
the next pass removes, and never a head without its parts. Only what the newest snapshot covers is removed: a late manifest of
another writer, or a half-made older snapshot, says nothing that is not said.

Work per record is bounded: snapshots come at doublings, or after as many changes as there are rows; a journal is put together with
others at most twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvobj.background import BackgroundWorker
from kvobj.catalog.remote_protocol import Outbox
from kvobj.errors import CorruptionError, KvobjError
from kvobj.manifests.folder import ManifestFolder
from kvobj.manifests.format import (
    MAX_ENTRIES,
    MAX_PLAIN_BYTES,
    ManifestEntry,
    ManifestKind,
    cut,
    entry_bytes,
)
from kvobj.manifests.names import ManifestName
from kvobj.manifests.reading import first_gap, journals_above
from kvobj.manifests.sealing import Sealer
from kvobj.manifests.snapshot import Snapshot, read_snapshot_head, write_snapshot

SNAPSHOT_ENTRIES_MIN: Final = 10_000
"""Fewer records behind a snapshot are not worth another."""


@dataclass(frozen=True, slots=True)
class MergeStep:
    """Journals over spans of up to `span` positions are put together when there are `count` of them."""

    span: int
    count: int


MERGE_STEPS: Final = (MergeStep(span=1024, count=256), MergeStep(span=16_384, count=64))


@dataclass(slots=True)
class CompactionReport:
    """What one pass did."""

    snapshot_entries: int | None = None
    merged_manifests: int = 0
    removed_manifests: int = 0


class Compaction:
    """One pass at a time over the manifests of one lineage. Event-loop-only."""

    def __init__(
        self,
        folder: ManifestFolder,
        outbox: Outbox,
        sealer: Sealer,
        *,
        merge_steps: Sequence[MergeStep] = MERGE_STEPS,
        snapshot_entries_min: int = SNAPSHOT_ENTRIES_MIN,
    ) -> None:
        self._folder = folder
        self._outbox = outbox
        self._sealer = sealer
        self._identity = folder.identity
        self._merge_steps = merge_steps
        self._snapshot_entries_min = snapshot_entries_min
        self._turn = asyncio.Lock()
        self._has_looked_back = False
        self.snapshots = 0
        self.last_snapshot: Snapshot | None = None

    async def has_snapshot(self) -> bool:
        """Whether this lineage has a complete snapshot that this node signed, or would not have; remembers it."""
        if self.last_snapshot is None:
            self.last_snapshot = await self._newest(await self._folder.names())
        return self.last_snapshot is not None

    async def take_snapshot(self) -> Snapshot:
        """Write a snapshot now, whatever there is."""
        async with self._turn:
            return await self._take()

    async def run(self) -> CompactionReport:
        """Look what there is, and do what is worth it. Errors are the bucket's; what was done stays done."""
        report = CompactionReport()
        async with self._turn:
            if self._identity.is_fenced:
                return report
            names = await self._folder.names()
            newest = await self._newest(names)
            if newest is None:
                return report
            journals = journals_above(names, newest.position)
            behind = sum(name.last - name.after for name in journals)
            if behind >= max(newest.entries, self._snapshot_entries_min):
                newest = await self._take()
                report.snapshot_entries = newest.entries
                names = await self._folder.names()
            else:
                self.last_snapshot = newest
                for step in self._merge_steps:
                    merged = await self._merge(journals, step)
                    report.merged_manifests += merged
                    if merged:
                        names = await self._folder.names()
                        journals = journals_above(names, newest.position)
            report.removed_manifests = await self._remove_covered(names, newest)
            if not self._has_looked_back:
                report.removed_manifests += await self._remove_older_lineages()
                self._has_looked_back = True
        return report

    async def _take(self) -> Snapshot:
        was_due = self._outbox.snapshot_due
        snapshot = await write_snapshot(
            self._folder, self._outbox, self._sealer, is_fenced=lambda: self._identity.is_fenced
        )
        if was_due:
            # Changes were made that have no position: an earlier snapshot at this very position lacks them.
            await self._folder.remove(
                [
                    name
                    for name in await self._folder.names()
                    if name.kind is ManifestKind.HEAD and name.last <= snapshot.position and name != snapshot.name
                ]
            )
            await self._outbox.snapshot_told()
        self.snapshots += 1
        self.last_snapshot = snapshot
        return snapshot

    async def _newest(self, names: Sequence[ManifestName]) -> Snapshot | None:
        there = set(names)
        for head in reversed([name for name in names if name.kind is ManifestKind.HEAD]):
            try:
                snapshot = await read_snapshot_head(self._folder, head)
            except CorruptionError:
                continue
            if there.issuperset(snapshot.part_names):
                return snapshot
        return None

    async def _remove_covered(self, names: Sequence[ManifestName], newest: Snapshot) -> int:
        kept = {newest.name, *newest.part_names}
        covered = [name for name in names if name.last <= newest.position and name not in kept]
        heads = [name for name in covered if name.kind is ManifestKind.HEAD]
        await self._folder.remove(heads)
        await self._folder.remove([name for name in covered if name.kind is not ManifestKind.HEAD])
        return len(covered)

    async def _remove_older_lineages(self) -> int:
        """Of lineages that are over; but the one before this is kept: a rebuild that went wrong is done again from it."""
        removed = 0
        for lineage in await self._folder.lineages():
            if lineage < self._folder.lineage - 1:
                names = await self._folder.names(lineage)
                await self._folder.remove(names)
                removed += len(names)
        return removed

    async def _merge(self, journals: Sequence[ManifestName], step: MergeStep) -> int:
        small = [name for name in journals if name.last - name.after <= step.span]
        if len(small) < step.count:
            return 0
        merged = 0
        for run in _runs(journals, step.span):
            if len(run) > 1:
                await self._put_together(run)
                merged += len(run)
        return merged

    async def _put_together(self, run: Sequence[ManifestName]) -> None:
        """Replace journals, which cover one span without a gap, by as few as hold their records. Reads about one manifest's worth
        of records at a time."""
        group: list[ManifestName] = []
        found: dict[int, ManifestEntry] = {}
        size = 0
        for name in run:
            _, entries = await self._folder.read(name)
            for entry in entries:
                if found.setdefault(entry.position, entry) is entry:
                    size += entry_bytes(entry.content)
            group.append(name)
            if size >= MAX_PLAIN_BYTES:
                await self._replace(group, found)
                group, found, size = [], {}, 0
        await self._replace(group, found)

    async def _replace(self, group: Sequence[ManifestName], found: Mapping[int, ManifestEntry]) -> None:
        if len(group) <= 1:
            return
        after, last = group[0].after, max(name.last for name in group)
        batches = list(cut(found[position] for position in sorted(found))) or [[]]
        for number, batch in enumerate(batches, start=1):
            end = last if number == len(batches) else batch[-1].position
            name, content = await self._folder.encode(ManifestKind.JOURNAL, batch, after=after, last=end)
            await self._folder.write(name, content)
            after = end
        await self._folder.remove(group)


def _runs(journals: Sequence[ManifestName], span: int) -> list[list[ManifestName]]:
    """Small journals that follow one another without a gap, of as many positions together as a manifest may have entries."""
    runs: list[list[ManifestName]] = []
    run: list[ManifestName] = []
    for name in journals:
        is_small = name.last - name.after <= span
        if run and (
            not is_small or first_gap([name], max(each.last for each in run)) or name.last - run[0].after > MAX_ENTRIES
        ):
            runs.append(run)
            run = []
        if is_small:
            run.append(name)
    return [*runs, run] if run else runs


class ManifestUpkeep(BackgroundWorker):
    """Runs the compaction when the journal has written enough since it last did, and once after a start. Event-loop-only."""

    worker_name = "manifest-upkeep"

    def __init__(
        self,
        compaction: Compaction,
        *,
        log: logging.Logger,
        manifests_between: int = 64,
        entries_between: int = 4096,
        retry_seconds: float = 60.0,
    ) -> None:
        super().__init__()
        self._compaction = compaction
        self._log = log
        self._manifests_between = manifests_between
        self._entries_between = entries_between
        self._retry_seconds = retry_seconds
        self._manifests = self._entries = 0
        self._due = asyncio.Event()
        self._due.set()
        self.on_run: Callable[[CompactionReport], None] = lambda _: None

    def note_written(self, entries: int) -> None:
        """The journal wrote a manifest of so many entries."""
        self._manifests += 1
        self._entries += entries
        if self._manifests >= self._manifests_between or self._entries >= self._entries_between:
            self._due.set()

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            self._manifests = self._entries = 0
            try:
                self.on_run(await self._compaction.run())
            except KvobjError as error:
                self._log.warning("manifests are not tidied up, which is tried again: %s", error)
                await asyncio.sleep(self._retry_seconds)
                self._due.set()
