"""Snapshots and merged journals: whatever order of crashes, what can be read is what is so, and there are few manifests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random

import pytest
from fakes import ManualClock
from manifest_world import (
    WRAPPER,
    DictBucket,
    OutboxCatalog,
    SetLineage,
    bucket_row,
    folder_of,
    objects_of,
    put_shared,
    shared_rows,
    told,
)

from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.lmdb_remote import LmdbOutbox
from kvobj.errors import FencedError, KvobjError
from kvobj.manifests.compaction import Compaction, MergeStep
from kvobj.manifests.format import ManifestEntry, ManifestKind
from kvobj.manifests.names import ManifestName
from kvobj.manifests.reading import find_state
from kvobj.manifests.sealing import sealed_content

STEPS = (MergeStep(span=4, count=4), MergeStep(span=64, count=4))


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[LmdbCatalog]:
    async with OutboxCatalog(tmp_path, ManualClock()) as catalog:
        await catalog.create_bucket(bucket_row("one"))
        yield catalog


def names_of(bucket: DictBucket) -> list[ManifestName]:
    parsed = [ManifestName.parse(key.removeprefix("store/")) for key in bucket.objects]
    return [name for name in parsed if name is not None]


def kinds_of(bucket: DictBucket) -> dict[str, int]:
    found = [name.kind for name in names_of(bucket)]
    return {kind.name.lower(): found.count(kind) for kind in ManifestKind}


class Writer:
    """A journal without a task: what is in the outbox goes into one manifest when it is told to."""

    def __init__(self, catalog: LmdbCatalog, bucket: DictBucket, *, epoch: int = 7) -> None:
        self.catalog = catalog
        self.bucket = bucket
        self.identity = SetLineage()
        self.folder = folder_of(bucket, lineage=self.identity, epoch=epoch)
        self.after = 0

    def compaction(self, *, snapshot_entries_min: int = 10_000) -> Compaction:
        return Compaction(
            self.folder,
            self.catalog.outbox,
            WRAPPER,
            merge_steps=STEPS,
            snapshot_entries_min=snapshot_entries_min,
        )

    async def write(self) -> None:
        waiting = self.catalog.outbox.entries(self.after)
        if not waiting:
            return
        entries = [
            ManifestEntry(each.position, content)
            for each in waiting
            if (content := sealed_content(each.content, WRAPPER)) is not None
        ]
        last = waiting[-1].position
        await self.folder.write(*await self.folder.encode(ManifestKind.JOURNAL, entries, after=self.after, last=last))
        self.after = last
        await self.catalog.outbox.discard(last)


async def test_small_journals_are_put_together_and_say_the_same(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    writer = Writer(catalog, bucket)
    compaction = writer.compaction()
    await compaction.take_snapshot()
    writer.after = catalog.outbox.position
    for number in range(30):
        await put_shared(catalog, "one", f"key-{number % 20}", number)
        await writer.write()
        if number % 6 == 5:
            await catalog.delete("one", [f"key-{number - 1}"], now_ms=2)
            await writer.write()
    before = kinds_of(bucket)["journal"]
    gets = bucket.gets
    report = await compaction.run()
    assert report.merged_manifests >= before
    assert kinds_of(bucket)["journal"] < before / 4
    assert bucket.gets - gets <= 2, "what was written a moment ago is not read back"
    assert objects_of(await told(bucket)) == await shared_rows(catalog)
    assert (await compaction.run()).merged_manifests == 0


async def test_a_snapshot_replaces_all_that_it_covers(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    writer = Writer(catalog, bucket)
    compaction = writer.compaction(snapshot_entries_min=8)
    first = await compaction.take_snapshot()
    writer.after = catalog.outbox.position
    for number in range(20):
        await put_shared(catalog, "one", f"key-{number % 3}", number)
        await writer.write()
    report = await compaction.run()
    assert report.snapshot_entries is not None
    assert report.removed_manifests > 20
    assert kinds_of(bucket) == {"journal": 0, "part": 1, "head": 1}
    assert (await find_state(writer.folder, newest=1)).snapshot.position > first.position
    assert objects_of(await told(bucket)) == await shared_rows(catalog)
    # Next time there is too little behind it.
    await put_shared(catalog, "one", "key-0", 99)
    await writer.write()
    assert (await compaction.run()).snapshot_entries is None


async def test_a_late_manifest_of_what_a_snapshot_covers_brings_nothing_back(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    writer = Writer(catalog, bucket)
    await writer.compaction().take_snapshot()
    writer.after = catalog.outbox.position
    await put_shared(catalog, "one", "gone", 1)
    late = Writer(catalog, DictBucket(), epoch=8)
    late.after = writer.after
    entries = catalog.outbox.entries(late.after)
    name, body = await late.folder.encode(
        ManifestKind.JOURNAL,
        [ManifestEntry(each.position, each.content) for each in entries],
        after=late.after,
        last=entries[-1].position,
    )
    await catalog.delete("one", ["gone"], now_ms=2)
    await writer.write()
    await writer.compaction(snapshot_entries_min=1).run()
    await folder_of(bucket, epoch=8).write(name, body)
    assert objects_of(await told(bucket)) == {}
    await writer.compaction().run()
    assert name not in names_of(bucket)


@pytest.mark.parametrize("seed", range(12))
async def test_no_crash_of_a_compaction_changes_what_is_read(catalog: LmdbCatalog, seed: int) -> None:
    random = Random(seed)
    bucket = DictBucket()
    writer = Writer(catalog, bucket)
    await writer.compaction().take_snapshot()
    writer.after = catalog.outbox.position
    blobs = iter(range(1, 10_000))
    for _ in range(25):
        for _ in range(random.randrange(1, 4)):
            key = f"key-{random.randrange(12)}"
            if random.random() < 0.3:
                await catalog.delete("one", [key], now_ms=2)
            else:
                await put_shared(catalog, "one", key, next(blobs))
        await writer.write()
        if random.random() < 0.5:
            # A new process each time: it knows nothing of what another was at.
            fails = random.choice(["puts", "deletes", "nothing"])
            skipped = random.randrange(3)
            if fails == "puts":
                bucket = _FailingAfter(bucket.objects, puts=skipped)
            elif fails == "deletes":
                bucket = _FailingAfter(bucket.objects, deletes=skipped)
            writer.folder = folder_of(bucket, epoch=random.getrandbits(60))
            try:
                await writer.compaction(snapshot_entries_min=random.choice([8, 10_000])).run()
            except KvobjError:
                assert fails != "nothing"
            bucket = DictBucket(bucket.objects)
            writer.folder = folder_of(bucket, epoch=random.getrandbits(60))
        assert objects_of(await told(bucket)) == await shared_rows(catalog)
    last = writer.compaction()
    await last.take_snapshot()
    await last.run()
    assert kinds_of(bucket) == {"journal": 0, "part": 1, "head": 1}
    assert objects_of(await told(bucket)) == await shared_rows(catalog)


class _FailingAfter(DictBucket):
    """Takes so many writes or deletes, then none."""

    def __init__(self, objects: dict[str, bytes], *, puts: int = 10**9, deletes: int = 10**9) -> None:
        super().__init__(objects)
        self._left = [puts, deletes]

    async def put_small(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        self._left[0] -= 1
        self.fail_puts = int(self._left[0] < 0)
        return await super().put_small(key, body, if_absent=if_absent, if_match=if_match)

    async def delete(self, keys: Sequence[str]) -> None:
        self._left[1] -= 1
        self.fail_deletes = int(self._left[1] < 0)
        # Half of a batch may have gone before the answer was lost.
        for key in keys[: len(keys) // 2]:
            self.objects.pop(key, None)
        await super().delete(keys)


async def test_changes_made_while_a_snapshot_is_written_are_read_all_the_same(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    writer = Writer(catalog, bucket)
    await writer.compaction().take_snapshot()
    writer.after = catalog.outbox.position
    for number in range(2500):
        await put_shared(catalog, "one", f"key-{number:05d}", number + 1)
    await writer.write()
    writer.after = 0
    changed = _ChangingOutbox(catalog)
    snapshot = await Compaction(writer.folder, changed, WRAPPER).take_snapshot()
    writer.after = snapshot.position
    await writer.write()
    assert changed.changes > 2
    assert objects_of(await told(bucket)) == await shared_rows(catalog)


class _ChangingOutbox(LmdbOutbox):
    """The catalog's outbox; its snapshot deletes what it told of and what it has not reached, and adds behind itself."""

    def __init__(self, catalog: LmdbCatalog) -> None:
        inner = catalog.outbox
        assert isinstance(inner, LmdbOutbox)
        super().__init__(inner._database, inner._objects, executor=inner._executor)
        self._catalog = catalog
        self.changes = 0

    async def snapshot(self) -> AsyncIterator[bytes]:
        told_of = 0
        async for content in super().snapshot():
            yield content
            told_of += 1
            if told_of % 700 == 0:
                self.changes += 1
                keys = [f"key-{self.changes * 10:05d}", f"key-{2490 - self.changes:05d}"]
                await self._catalog.delete("one", keys, now_ms=3)
                await put_shared(self._catalog, "one", f"key-{self.changes * 10 + 1:05d}", 90_000 + self.changes)
                await put_shared(self._catalog, "one", f"zzz-{self.changes}", 91_000 + self.changes)


async def test_a_fenced_node_writes_no_snapshot(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    writer = Writer(catalog, bucket)
    writer.identity.is_fenced = True
    with pytest.raises(FencedError):
        await writer.compaction().take_snapshot()
    assert kinds_of(bucket)["head"] == 0


async def test_manifests_of_lineages_that_are_over_go_but_for_the_last_one(catalog: LmdbCatalog) -> None:
    bucket = DictBucket()
    for lineage in (1, 2, 3):
        before = Compaction(folder_of(bucket, lineage=lineage, epoch=lineage), catalog.outbox, WRAPPER)
        await before.take_snapshot()
    now = Compaction(folder_of(bucket, lineage=4), catalog.outbox, WRAPPER)
    assert (await now.run()).removed_manifests == 0, "there is no snapshot of the new lineage yet"
    await now.take_snapshot()
    await now.run()
    assert {name.lineage for name in names_of(bucket)} == {3, 4}
