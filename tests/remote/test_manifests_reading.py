"""Reading manifests: which of them are the store, in which order their records count, and what is said where some are missing."""

from __future__ import annotations

import tracemalloc
from random import Random

import msgspec
import pytest
from manifest_world import STORE, DictBucket, folder_of

from kvobj.errors import ConfigurationError, CorruptionError, NotFoundError
from kvobj.manifests.folder import ManifestFolder
from kvobj.manifests.format import ManifestEntry, ManifestHead, ManifestKind, encode_manifest
from kvobj.manifests.names import ManifestName
from kvobj.manifests.reading import find_state, first_gap, journals_above, merge, read_state
from kvobj.manifests.snapshot import SnapshotPart


async def add_snapshot(folder: ManifestFolder, position: int, parts: list[list[bytes]]) -> ManifestName:
    described = []
    for contents in parts:
        entries = [ManifestEntry(position, content) for content in contents]
        name, body = await folder.encode(ManifestKind.PART, entries, after=0, last=position)
        await folder.write(name, body)
        described.append(ManifestEntry(position, msgspec.msgpack.encode(SnapshotPart(name.number, len(contents)))))
    name, body = await folder.encode(ManifestKind.HEAD, described, after=0, last=position)
    await folder.write(name, body)
    return name


async def add_journal(
    folder: ManifestFolder, after: int, last: int, positions: list[int] | None = None
) -> ManifestName:
    positions = list(range(after + 1, last + 1)) if positions is None else positions
    entries = [ManifestEntry(position, b"at %d" % position) for position in positions]
    name, body = await folder.encode(ManifestKind.JOURNAL, entries, after=after, last=last)
    await folder.write(name, body)
    return name


async def contents(bucket: DictBucket, *, newest: int = 9) -> list[bytes]:
    folder = folder_of(bucket, epoch=0)
    state = await find_state(folder, newest=newest)
    return [content async for batch in read_state(folder, state) for _, content in batch]


async def test_a_store_is_its_newest_snapshot_and_what_is_above_it() -> None:
    bucket = DictBucket()
    folder = folder_of(bucket)
    await add_snapshot(folder, 3, [[b"old"]])
    await add_journal(folder, 0, 8)
    await add_journal(folder, 8, 12)
    await add_snapshot(folder, 10, [[b"a", b"b"], [b"c"]])
    assert await contents(bucket) == [b"a", b"b", b"c", b"at 11", b"at 12"]


@pytest.mark.parametrize("seed", range(60))
async def test_journals_of_several_writers_are_one_ascending_stream(seed: int) -> None:
    random = Random(seed)
    bucket = DictBucket()
    last = 400
    folders = [folder_of(bucket, epoch=epoch) for epoch in (1, 2, 3)]
    at = 0
    while at < last:  # one writer after another, whole
        end = min(last, at + random.randrange(1, 40))
        await add_journal(random.choice(folders), at, end)
        at = end
    for _ in range(random.randrange(20)):  # and again, over any span, by anybody, with only some of what it covers
        start = random.randrange(last - 1)
        end = random.randrange(start + 1, last + 1)
        some = [position for position in range(start + 1, end + 1) if random.random() < 0.5]
        await add_journal(random.choice(folders), start, end, some)
    folder = folder_of(bucket, epoch=0)
    above = random.randrange(last)
    wanted = journals_above(await folder.names(), above)
    assert first_gap(wanted, above) is None
    found = [entry async for batch in merge(folder, wanted, above=above) for entry in batch]
    assert found == [ManifestEntry(position, b"at %d" % position) for position in range(above + 1, last + 1)]


async def test_older_lineages_count_until_the_newest_has_a_snapshot() -> None:
    bucket = DictBucket()
    await add_snapshot(folder_of(bucket, lineage=1), 5, [[b"first"]])
    await add_journal(folder_of(bucket, lineage=1), 5, 6)
    half = folder_of(bucket, lineage=2)
    await half.write(*await half.encode(ManifestKind.PART, [ManifestEntry(6, b"half")], after=0, last=6))
    assert await contents(bucket, newest=2) == [b"first", b"at 6"]
    await add_snapshot(half, 6, [[b"second"]])
    assert await contents(bucket, newest=2) == [b"second"]
    assert await contents(bucket, newest=1) == [b"first", b"at 6"]
    assert await half.lineages() == [2, 1]


async def test_a_snapshot_without_one_of_its_parts_is_passed_over_for_an_older_one() -> None:
    bucket = DictBucket()
    folder = folder_of(bucket)
    await add_snapshot(folder, 3, [[b"old"]])
    await add_journal(folder, 3, 9)
    await add_snapshot(folder, 8, [[b"a"], [b"b"]])
    lost = max(key for key in bucket.objects if key.endswith(".part"))
    kept = bucket.objects.pop(lost)
    state = await find_state(folder_of(bucket, epoch=0), newest=1)
    assert state.snapshot.position == 3
    assert "a part of the snapshot is gone" in state.passed_over[0]
    assert await contents(bucket) == [b"old", *(b"at %d" % position for position in range(4, 10))]
    bucket.objects[lost] = kept
    assert await contents(bucket) == [b"a", b"b", b"at 9"]


async def test_a_part_that_turns_out_to_be_damaged_is_told_and_its_snapshot_can_be_left_out() -> None:
    bucket = DictBucket()
    folder = folder_of(bucket)
    await add_snapshot(folder, 3, [[b"old"]])
    await add_journal(folder, 3, 9)
    newest = await add_snapshot(folder, 8, [[b"a"], [b"b"]])
    damaged = max(key for key in bucket.objects if key.endswith(".part"))
    bucket.objects[damaged] = bucket.objects[damaged][:-1] + b"!"
    with pytest.raises(CorruptionError, match="not what was written"):
        await contents(bucket)
    reader = folder_of(bucket, epoch=0)
    state = await find_state(reader, newest=1, without={newest})
    found = [content async for batch in read_state(reader, state) for _, content in batch]
    assert found == [b"old", *(b"at %d" % position for position in range(4, 10))]


async def test_a_journal_that_is_missing_is_told_with_its_span() -> None:
    bucket = DictBucket()
    folder = folder_of(bucket)
    await add_snapshot(folder, 3, [[b"a"]])
    await add_journal(folder, 3, 5)
    lost = await add_journal(folder, 5, 9)
    await add_journal(folder, 9, 12)
    del bucket.objects["store/" + lost.key]
    with pytest.raises(CorruptionError, match=r"journals are missing after=5 last=9"):
        await contents(bucket)


async def test_nothing_there_is_told_as_nothing() -> None:
    bucket = DictBucket()
    bucket.objects["store/manifests/readme"] = b"a stranger"
    bucket.objects["other/manifests/00000001/x"] = b"not ours"
    with pytest.raises(NotFoundError):
        await contents(bucket)
    with pytest.raises(NotFoundError):
        await find_state(folder_of(bucket, epoch=0), newest=0)


async def test_a_manifest_under_another_ones_name_and_one_of_another_store_are_refused() -> None:
    bucket = DictBucket()
    folder = folder_of(bucket)
    await add_snapshot(folder, 0, [[b"a"]])
    one = await add_journal(folder, 0, 2)
    two = await add_journal(folder, 2, 4)
    bucket.objects["store/" + two.key] = bucket.objects["store/" + one.key]
    with pytest.raises(CorruptionError, match="not the one that its name says"):
        await contents(bucket)
    foreign = encode_manifest(
        ManifestHead(ManifestKind.JOURNAL, STORE[::-1], 1, two.epoch, 2, 4),
        [ManifestEntry(3, b""), ManifestEntry(4, b"")],
    )
    bucket.objects["store/" + two.key] = foreign
    with pytest.raises(ConfigurationError, match="of store 0f0e"):
        await contents(bucket)


async def test_memory_is_bounded_by_what_is_read_ahead_and_not_by_what_there_is() -> None:
    bucket = DictBucket()
    folder = folder_of(bucket)
    await add_snapshot(folder, 0, [[b"%0200d" % number for number in range(5000)] for _ in range(24)])
    reader = folder_of(bucket, epoch=0)
    state = await find_state(reader, newest=1)
    tracemalloc.start()
    try:
        count = 0
        async for batch in read_state(reader, state):
            count += len(batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 120_000
    assert peak < 8 * 2**20, "24 MB of records in parts of 1 MB"
