"""What is on the remote and nobody's: found, and nothing else touched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ManualClock
from fakes_remote import DictBucket, down, open_database, opened_bucket
from hypothesis import given
from hypothesis import strategies as st
from module_paths import ModulePaths
from remote_servers import RemoteStore
from remote_tier_world import MIB, NAMES, World, blob, open_arena, raw_frame, remote_world, until

from kvobj.errors import RemoteRefusedError, TierUnavailableError
from kvobj.ids import BlobId, epoch_of, make_blob_id
from kvobj.tiers.remote.directory import RemoteDirectory, RemotePlace
from kvobj.tiers.remote.leftovers import PAGE_BLOBS, LeftoverCounts, Leftovers
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.tier import RemoteTier

NOW, BEFORE, LONG_AGO = 7, 6, 5


class Rows:
    """What a catalog would say, and what it was asked when."""

    def __init__(self, named: Sequence[BlobId] = ()) -> None:
        self.named = set(named)
        self.in_flight: set[BlobId] = set()
        self.asked: list[list[BlobId]] = []
        self.order: list[str] = []

    async def is_named(self, blob_ids: Sequence[BlobId]) -> set[BlobId]:
        self.order.append("named")
        self.asked.append(list(blob_ids))
        await asyncio.sleep(0)
        return self.named.intersection(blob_ids)

    def is_in_flight(self, blob_id: BlobId) -> bool:
        self.order.append("in flight")
        return blob_id in self.in_flight


@pytest.fixture
async def world(tmp_path: Path, shm_path: Path) -> AsyncIterator[World]:
    async with remote_world(tmp_path, shm_path) as world:
        yield world


class Ours:
    """Whose the store is, as `StoreIdentity.check` would say it."""

    def __init__(self) -> None:
        self.is_ours = True
        self.checks = 0

    async def check(self) -> bool:
        self.checks += 1
        return self.is_ours


@pytest.fixture
def ours() -> Ours:
    return Ours()


@pytest.fixture
def leftovers(world: World, ours: Ours) -> Leftovers:
    return make(world.bucket, world.directory, ours)


def make(bucket: DictBucket, directory: RemoteDirectory, ours: Ours, rests: list[float] | None = None) -> Leftovers:
    async def rest(seconds: float) -> None:
        if rests is not None:
            rests.append(seconds)

    return Leftovers(bucket, directory, RemoteNames("store/"), still_ours=ours.check, clock=ManualClock(), sleep=rest)


def lay(world: World, *blob_ids: BlobId, body: bytes = b"frame") -> list[str]:
    """Objects that nothing here knows of, as a crash leaves them."""
    keys = [world.key(blob_id) for blob_id in blob_ids]
    world.bucket.objects.update(dict.fromkeys(keys, body))
    return keys


async def test_blobs_that_nothing_names_go_and_named_ones_stay(world: World, leftovers: Leftovers) -> None:
    orphans = [make_blob_id(epoch, n) for epoch in (LONG_AGO, BEFORE, NOW) for n in (1, 2)]
    kept = [make_blob_id(epoch, n) for epoch in (LONG_AGO, BEFORE, NOW) for n in (3, 4)]
    lay(world, *orphans, *kept)
    counts = await leftovers.sweep(Rows(kept).is_named, lambda _: False)
    assert sorted(world.bucket.objects) == sorted(world.key(blob_id) for blob_id in kept)
    assert (counts.blobs, counts.removed_blobs, counts.removed_bytes) == (12, 6, 30)
    again = await leftovers.sweep(Rows(kept).is_named, lambda _: False)
    assert (again.blobs, again.removed_blobs) == (6, 0)
    assert (leftovers.totals.blobs, leftovers.totals.removed_blobs) == (18, 6)


async def test_what_this_process_is_bringing_there_stays(world: World, leftovers: Leftovers) -> None:
    rows = Rows()
    rows.in_flight = {blob(1)}
    (kept, _) = lay(world, blob(1), blob(2))
    await leftovers.sweep(rows.is_named, rows.is_in_flight)
    assert list(world.bucket.objects) == [kept]
    assert rows.asked == [[blob(2)]]


async def test_what_is_under_way_is_looked_at_before_what_is_named(world: World, leftovers: Leftovers) -> None:
    rows = Rows()
    lay(world, blob(1), blob(2))
    await leftovers.sweep(rows.is_named, rows.is_in_flight)
    assert rows.order == ["in flight", "in flight", "named"]


async def test_a_blob_that_is_named_between_the_looks_stays(world: World, leftovers: Leftovers) -> None:
    rows = Rows()
    rows.in_flight = {blob(1)}
    lay(world, blob(1))

    def is_in_flight(blob_id: BlobId) -> bool:
        was = rows.is_in_flight(blob_id)
        rows.named.add(blob_id)  # the commit that names it, and then it is under way no more
        rows.in_flight.discard(blob_id)
        return was

    counts = await leftovers.sweep(rows.is_named, is_in_flight)
    assert counts.removed_blobs == 0
    assert world.bucket.objects


async def test_nothing_is_removed_from_a_store_that_another_goes_on_with(
    world: World, leftovers: Leftovers, ours: Ours
) -> None:
    lay(world, blob(1))
    world.bucket.uploads["u1"] = world.key(make_blob_id(BEFORE, 9))
    ours.is_ours = False
    with pytest.raises(RemoteRefusedError) as caught:
        await leftovers.sweep(Rows().is_named, lambda _: False)
    assert caught.value.reason == "fenced"
    assert world.bucket.objects
    assert world.bucket.uploads
    world.bucket.uploads.clear()
    with pytest.raises(RemoteRefusedError):
        await leftovers.sweep(Rows().is_named, lambda _: False)
    assert world.bucket.objects


async def test_whatever_else_lies_there_is_counted_and_left_alone(world: World, leftovers: Leftovers) -> None:
    strangers = [
        "store/store.json",
        "store/manifests/00000001/0000000000000001-0000000000000007-1.journal",
        "store/blobs/README.txt",
        "store/blobs/0000",
        f"store/blobs/{blob(1).hex()}/x",
        f"store/blobs/{blob(1).hex().upper()[:-1]}F/bucket/key",
        "store/photos/cat.jpg",
        "other/blobs/" + world.key(blob(3)).removeprefix("store/blobs/"),
    ]
    world.bucket.objects.update(dict.fromkeys(strangers, b"mine"))
    world.bucket.uploads = {"u1": "store/photos/dog.jpg", "u2": "other/x"}
    lay(world, blob(2))
    counts = await leftovers.sweep(Rows().is_named, lambda _: False)
    assert sorted(world.bucket.objects) == sorted(strangers)
    assert world.bucket.uploads == {"u1": "store/photos/dog.jpg", "u2": "other/x"}
    assert (counts.removed_blobs, counts.foreign) == (1, 5)


async def test_uploads_that_nobody_goes_on_with_are_aborted(world: World, leftovers: Leftovers) -> None:
    rows = Rows([make_blob_id(BEFORE, 1)])
    rows.in_flight = {blob(1)}
    world.bucket.uploads = {
        "old": world.key(make_blob_id(BEFORE, 1)),  # the blob is named, but who sent these parts is dead
        "given up": world.key(blob(2)),
        "mine": world.key(blob(1)),
    }
    counts = await leftovers.sweep(rows.is_named, rows.is_in_flight, epochs=[])
    assert list(world.bucket.uploads) == ["mine"]
    assert (counts.aborted_uploads, counts.skipped_uploads) == (2, 1)


async def test_other_processes_at_work_are_left_alone(world: World, leftovers: Leftovers) -> None:
    lay(world, make_blob_id(BEFORE, 1))
    world.bucket.uploads["theirs"] = world.key(make_blob_id(BEFORE, 2))
    rows = Rows()
    counts = await leftovers.sweep(rows.is_named, rows.is_in_flight, live_epochs={BEFORE})
    assert world.bucket.objects
    assert world.bucket.uploads
    assert (counts.removed_blobs, counts.aborted_uploads, counts.skipped_uploads) == (0, 0, 1)


async def test_a_quick_pass_lists_some_epochs_alone(world: World, leftovers: Leftovers) -> None:
    lay(world, make_blob_id(LONG_AGO, 1), make_blob_id(BEFORE, 1), make_blob_id(NOW, 1))
    counts = await leftovers.sweep(Rows().is_named, lambda _: False, epochs=[BEFORE])
    assert sorted(world.bucket.objects) == [world.key(make_blob_id(LONG_AGO, 1)), world.key(make_blob_id(NOW, 1))]
    assert (counts.blobs, counts.removed_blobs) == (1, 1)
    assert [key for call, key in world.bucket.requests if call == "list"] == [f"store/blobs/{BEFORE:016x}"]


async def test_it_works_page_by_page_and_rests(world: World, ours: Ours) -> None:
    rests: list[float] = []
    leftovers = make(world.bucket, world.directory, ours, rests)
    lay(world, *(blob(n) for n in range(2 * PAGE_BLOBS + 5)))
    rows = Rows([blob(n) for n in range(0, 2 * PAGE_BLOBS + 5, 2)])
    counts = await leftovers.sweep(rows.is_named, lambda _: False)
    assert [len(page) for page in rows.asked] == [PAGE_BLOBS, PAGE_BLOBS, 5]
    assert (len(rests), ours.checks, world.bucket.count("delete")) == (3, 3, 3)
    assert counts.removed_blobs == PAGE_BLOBS + 2


async def test_named_blobs_that_were_not_known_are_noted(world: World, leftovers: Leftovers) -> None:
    encoded = await world.put(blob(1), b"x")
    await world.directory.forget([blob(1)])
    await world.directory.note(blob(2), RemotePlace(7, "bucket/gone"))
    lay(world, blob(2))
    counts = await leftovers.sweep(Rows([blob(1)]).is_named, lambda _: False)
    assert world.directory.find(blob(1)) == RemotePlace(len(encoded), world.names.name(NAMES))
    assert world.directory.find(blob(2)) is None
    assert (counts.noted, counts.removed_blobs) == (1, 1)


async def test_what_is_gone_is_forgotten_by_a_full_pass(world: World, leftovers: Leftovers) -> None:
    ids = [blob(n) for n in (1, 2, 3, 4)]
    for blob_id in ids:
        await world.put(blob_id, b"x")
    for gone in (blob(1), blob(3), blob(4)):
        del world.bucket.objects[world.key(gone)]
    assert await world.tier.missing(ids) == []
    assert (await leftovers.sweep(Rows(ids).is_named, lambda _: False, epochs=[NOW])).vanished == 0
    counts = await leftovers.sweep(Rows(ids).is_named, lambda _: False)
    assert counts.vanished == 3
    assert await world.tier.missing(ids) == [blob(1), blob(3), blob(4)]


async def test_what_came_behind_the_listing_is_not_forgotten(world: World, leftovers: Leftovers) -> None:
    rows = Rows([blob(1), blob(2)])
    await world.put(blob(1), b"x")

    async def is_named(blob_ids: Sequence[BlobId]) -> set[BlobId]:
        await world.put(blob(2), b"y")
        return await rows.is_named(blob_ids)

    counts = await leftovers.sweep(is_named, lambda _: False)
    assert (counts.blobs, counts.vanished) == (1, 0)
    assert await world.tier.missing([blob(1), blob(2)]) == []


async def test_a_server_that_fails_ends_the_sweep_and_the_next_goes_on(world: World, leftovers: Leftovers) -> None:
    lay(world, blob(1))
    for call in ("list", "delete", "list_uploads"):
        world.bucket.errors = {call: down()}
        with pytest.raises(TierUnavailableError):
            await leftovers.sweep(Rows().is_named, lambda _: False)
    world.bucket.errors = {}
    assert (await leftovers.sweep(Rows().is_named, lambda _: False)).removed_blobs == 1
    assert leftovers.totals.removed_blobs == 1


async def test_sweeps_take_turns(world: World, leftovers: Leftovers) -> None:
    lay(world, blob(1))
    gate = world.bucket.gates["delete"] = asyncio.Event()
    first = asyncio.create_task(leftovers.sweep(Rows().is_named, lambda _: False))
    await until(lambda: world.bucket.count("delete") == 1)
    second = asyncio.create_task(leftovers.sweep(Rows().is_named, lambda _: False))
    for _ in range(50):
        await asyncio.sleep(0)
    assert world.bucket.count("list") == 1
    gate.set()
    assert [(await each).removed_blobs for each in (first, second)] == [1, 0]


@given(
    st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)), st.sampled_from([5, 6, 7])
)
async def test_exactly_what_is_left_over_goes(
    module_paths: ModulePaths, there: set[int], named: set[int], in_flight: set[int], live: int
) -> None:
    def of(number: int) -> BlobId:
        return make_blob_id(5 + number % 3, number)

    base = module_paths.mktemp("sweep")
    database = open_database(base, base)
    try:
        bucket, names = DictBucket(), RemoteNames("store/")
        keys = {of(n): names.key(of(n), names.name(NAMES)) for n in there}
        bucket.objects = dict.fromkeys(keys.values(), b"12")
        rows = Rows([of(n) for n in named])
        rows.in_flight = {of(n) for n in in_flight}
        leftovers = make(bucket, RemoteDirectory(database), Ours())
        counts = await leftovers.sweep(rows.is_named, rows.is_in_flight, live_epochs=[live])
        left = {of(n) for n in there - named - in_flight if epoch_of(of(n)) != live}
        assert set(bucket.objects) == {key for blob_id, key in keys.items() if blob_id not in left}
        assert counts == LeftoverCounts(
            blobs=len(there),
            frame_bytes=2 * len(there),
            removed_blobs=len(left),
            removed_bytes=2 * len(left),
            noted=sum(epoch_of(of(n)) != live for n in (there & named) - in_flight),
        )
    finally:
        await database.aclose()


async def test_a_crash_in_mid_upload_leaves_nothing_behind_a_sweep(
    remote_store: RemoteStore, tmp_path: Path, shm_path: Path
) -> None:
    arena = await open_arena(shm_path, mib=32)
    database = open_database(tmp_path, shm_path)
    names = RemoteNames(remote_store.prefix)
    directory = RemoteDirectory(database)
    kept, orphan = make_blob_id(BEFORE, 1), make_blob_id(BEFORE, 2)
    unfinished = names.key(make_blob_id(BEFORE, 3), names.name(NAMES))
    async with opened_bucket(replace(remote_store.settings(), part_bytes=5 * MIB)) as bucket:
        tier = RemoteTier(bucket, directory, arena=arena, names=names)
        frame = await raw_frame(arena, b"named")
        for blob_id in (kept, orphan):
            await tier.put(blob_id, frame, NAMES)
        frame.release()
        remote_store.write("store/store.json", b"{}")
        with remote_store.raw() as raw:
            begun = raw.request("POST", f"/{remote_store.bucket}/{unfinished}", query={"uploads": ""}, payload=None)
            upload_id = begun.body.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]
            part = {"partNumber": "1", "uploadId": upload_id}
            raw.request("PUT", f"/{remote_store.bucket}/{unfinished}", b"part", query=part, payload=b"part")
        assert unfinished in [key for key, _ in remote_store.uploads()]
        leftovers = Leftovers(bucket, directory, names, still_ours=Ours().check, clock=ManualClock())
        counts = await leftovers.sweep(Rows([kept]).is_named, tier.is_in_flight, epochs=[BEFORE])
        assert (counts.removed_blobs, counts.aborted_uploads) == (1, 1)
        assert unfinished not in [key for key, _ in remote_store.uploads()]
        assert remote_store.keys("store/blobs/") == [names.key(kept, names.name(NAMES))]
        assert remote_store.keys("store/store.json")
        assert await tier.missing([kept, orphan]) == [orphan]
        assert (await leftovers.sweep(Rows([kept]).is_named, tier.is_in_flight)).removed_blobs == 0
        await tier.aclose()
    await database.aclose()
    await arena.aclose(remove=True)
