"""What leaves a full home tier for the remote alone: before anything is condemned, and never the only copy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from fakes import ManualClock
from gc_world import CHUNK, GcWorld, SizedRemote, open_catalog

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, NamespaceQuota, ObjectRow
from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule
from kvobj.clock import boot_ms
from kvobj.ids import BlobId
from kvobj.policy.chunk_policy import CacheTier, chunk_name

USER = "root"


@pytest.fixture(params=["memory", "lmdb"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GcWorld]:
    clock = ManualClock()
    async with open_catalog(request.param, tmp_path, clock) as catalog:
        world = GcWorld(catalog, clock, remote=SizedRemote())
        await world.open()
        yield world


def is_home(world: GcWorld, row: ObjectRow) -> bool:
    return BlobId(row.blobs[0].blob_id) in world.home.sizes


async def shared_chain(world: GcWorld, name: str, length: int) -> list[ObjectRow]:
    return [await world.share(row) for row in await world.chain(name, length)]


async def set_rule(world: GcWorld, rule: RemoteRule, bucket: str = "cache") -> None:
    await world.catalog.update_bucket(bucket, BucketUpdate(remote=rule))
    world.clock.advance(2)  # rules are looked at once a second


async def test_copies_that_the_remote_has_leave_instead_of_being_condemned(world: GcWorld) -> None:
    rows = await shared_chain(world, "a", 10)
    report = await world.collector.collect()
    assert (report.condemned, report.claimed) == (0, 0)
    assert len(await world.live()) == 10
    assert [is_home(world, row) for row in rows].count(False) == 2  # down to 95 % of the watermark, at once
    assert world.collector.evictions.objects == 2
    assert world.collector.evictions.size_bytes == 2 * CHUNK


async def test_shared_copies_go_before_local_chunks_that_policy_ranks_lower(world: GcWorld) -> None:
    cold = await world.chain("cold", 8)
    warm = await shared_chain(world, "warm", 2)
    await world.collector.collect()
    assert [is_home(world, row) for row in warm] == [False, False]
    assert all(is_home(world, row) for row in cold)
    assert (await world.collector.plan()).victims == ()


async def test_what_eviction_does_not_free_is_condemned(world: GcWorld) -> None:
    shared = await shared_chain(world, "s", 1)
    await world.chain("l", 10)
    report = await world.collector.collect()
    assert not is_home(world, shared[0])
    assert report.condemned == 2  # 245 bytes had to go, and a hundred did


async def test_a_condemned_chunk_that_the_remote_has_by_now_is_evicted_and_not_claimed(world: GcWorld) -> None:
    rows = await world.chain("a", 10)
    assert (await world.collector.collect()).condemned == 2
    for row in rows:
        await world.share(row)
    await world.after_grace()
    assert len(await world.live()) == 10
    await world.collector.collect()
    assert [is_home(world, row) for row in rows].count(False) == 2


@pytest.mark.parametrize("bucket", ["cache", "objects"])
async def test_what_was_shared_before_its_writer_told_of_it_may_leave(world: GcWorld, bucket: str) -> None:
    await world.put("before", bucket=bucket)
    row = await world.commit("o", bucket=bucket)
    await world.share(row)
    await world.collector.written(row)
    await world.collector.make_room(CHUNK)
    assert not is_home(world, row)


async def test_a_pinned_chain_is_evicted_and_stays_live(world: GcWorld) -> None:
    rows = await shared_chain(world, "a", 10)
    now_ms = boot_ms(world.clock)
    session = await world.catalog.leases.open_session(
        user=USER, bucket="cache", holder="test", ttl_ms=600_000, now_boot_ms=now_ms
    )
    await world.catalog.leases.pin_tails(session.id, ["a9"], user=USER, bucket="cache", now_boot_ms=now_ms)
    await world.collector.collect()
    assert [is_home(world, row) for row in rows].count(False) == 2
    assert len(await world.live()) == 10


async def test_who_waits_for_room_gets_that_of_shared_objects_of_ordinary_buckets_least_recently_used_first(
    world: GcWorld,
) -> None:
    rows = [await world.share(await world.put(f"o{number}", bucket="objects")) for number in range(10)]
    world.collector.touched(rows[0])
    assert await world.collector.make_room(2 * CHUNK) >= 2 * CHUNK
    assert is_home(world, rows[0])
    assert not is_home(world, rows[1])
    (row,) = await world.catalog.lookup("objects", ["o1"])
    assert row is not None


async def test_no_more_leaves_than_is_wanted_where_policy_names_nothing(
    world: GcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = await shared_chain(world, "a", 9)
    monkeypatch.setattr(world.policy, "victims", lambda *_, **__: [])
    freed = await world.collector.make_room(2 * CHUNK)
    assert freed < 4 * CHUNK
    assert [is_home(world, row) for row in rows].count(False) == freed // CHUNK


async def test_a_local_object_never_leaves_where_its_bucket_says_nothing(world: GcWorld) -> None:
    for number in range(10):
        await world.put(f"o{number}", bucket="objects")
    assert await world.collector.make_room(5 * CHUNK) == 0
    assert world.uploaded == []
    assert len(world.home.sizes) == 10


@pytest.mark.parametrize("rule", [RemoteRule.EVICTED, RemoteRule.ALWAYS])
async def test_where_the_rule_says_so_chunks_are_uploaded_and_evicted_and_not_condemned(
    world: GcWorld, rule: RemoteRule
) -> None:
    await set_rule(world, rule)
    rows = await world.chain("a", 10)
    await world.collector.collect()  # which learns the rule
    assert (await world.collector.plan()).victims == ()
    assert world.collector.counts.condemned == 0
    assert [is_home(world, row) for row in rows].count(False) == 2
    assert sum(map(len, world.uploaded)) == 2
    assert len(await world.live()) == 10
    assert world.collector.evictions.uploaded == 2


async def test_objects_of_an_ordinary_bucket_with_such_a_rule_are_uploaded_for_their_room(world: GcWorld) -> None:
    await set_rule(world, RemoteRule.EVICTED, bucket="objects")
    rows = [await world.put(f"o{number}", bucket="objects") for number in range(10)]
    assert await world.collector.make_room(CHUNK) >= CHUNK
    assert not is_home(world, rows[0])
    assert is_home(world, rows[9])


async def test_a_rule_that_is_set_later_holds_for_what_is_there_already(world: GcWorld) -> None:
    rows = [await world.put(f"o{number}", bucket="objects") for number in range(10)]
    await world.collector.load()
    assert await world.collector.make_room(CHUNK) == 0
    await set_rule(world, RemoteRule.EVICTED, bucket="objects")
    await world.collector.collect()
    await world.collector.look_again()
    assert await world.collector.make_room(CHUNK) >= CHUNK
    assert any(not is_home(world, row) for row in rows)


async def test_while_the_remote_is_away_copies_leave_only_for_a_writer(world: GcWorld) -> None:
    assert world.remote is not None
    rows = await shared_chain(world, "a", 10)
    world.remote.is_available = False
    report = await world.collector.collect()
    assert report.condemned == 0
    assert all(is_home(world, row) for row in rows)
    assert await world.collector.make_room(CHUNK) >= CHUNK
    assert not all(is_home(world, row) for row in rows)


async def test_what_waits_for_its_upload_is_not_condemned_while_the_remote_is_away(world: GcWorld) -> None:
    assert world.remote is not None
    await set_rule(world, RemoteRule.EVICTED)
    rows = await world.chain("a", 10)
    world.remote.is_available = False
    assert (await world.collector.collect()).condemned == 0
    assert await world.collector.make_room(CHUNK) == 0
    assert all(is_home(world, row) for row in rows)
    world.remote.is_available = True
    world.clock.advance(6)
    await world.collector.collect()
    assert not all(is_home(world, row) for row in rows)


async def test_a_copy_stays_if_the_remote_does_not_have_its_blob(world: GcWorld) -> None:
    assert world.remote is not None
    rows = await shared_chain(world, "a", 10)
    for row in rows[:9]:
        del world.remote.sizes[BlobId(row.blobs[0].blob_id)]
    await world.collector.collect()
    assert [row.key for row in rows if not is_home(world, row)] == ["a9"]
    assert world.collector.evictions.kept == 9


async def test_a_copy_stays_if_the_one_on_the_remote_is_known_to_be_corrupt(world: GcWorld) -> None:
    rows = await shared_chain(world, "a", 10)
    for row in rows:
        world.remote_corrupt.note(BlobId(row.blobs[0].blob_id))
    await world.collector.collect()
    assert all(is_home(world, row) for row in rows)


async def test_a_blob_that_the_directory_does_not_know_is_asked_for_before_its_copy_goes(world: GcWorld) -> None:
    assert world.remote is not None
    await shared_chain(world, "a", 10)
    world.remote.find = lambda blob_id: None  # type: ignore[method-assign] # a directory that was lost  # noqa: ARG005
    await world.collector.collect()
    assert len(world.remote.asked) == 2
    assert world.collector.evictions.objects == 2


async def test_an_object_that_was_replaced_meanwhile_keeps_its_new_copy(world: GcWorld) -> None:
    old = await world.share(await world.put("o", bucket="objects"))
    new = await world.commit("o", bucket="objects")  # of which the collector was not told yet
    await world.collector.make_room(CHUNK)
    assert is_home(world, new)
    assert not is_home(world, old)  # no row names it: what is queued goes first


async def test_chunks_that_left_run_out_of_time_as_others_do(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_catalog("memory", tmp_path, clock) as catalog:
        world = GcWorld(catalog, clock, remote=SizedRemote(), chunk_ttl_seconds=100)
        await world.open()
        await shared_chain(world, "a", 10)
        await world.collector.collect()
        assert world.collector.evictions.objects == 2
        clock.advance(200)
        await world.collector.collect()
        await world.after_grace()
        await world.after_grace()
        assert await world.live() == set()


def namespace_row(name: str, quota: NamespaceQuota) -> NamespaceRow:
    return NamespaceRow(
        bucket="cache",
        name=name,
        declaration=b"{}",
        fingerprint=name.encode().ljust(32, b"\0"),
        wrapped_key=b"",
        root=name.encode().ljust(32, b"\0"),
        ids="foreign",
        chunk_tokens=16,
        chunk_bytes=None,
        part_axis=None,
        created_ms=0,
        owner=USER,
        quota=quota,
    )


async def test_chunks_that_left_count_for_their_namespace_and_go_first_where_it_has_too_much(world: GcWorld) -> None:
    declared = namespace_row("n", NamespaceQuota(chunks=100))
    await world.catalog.namespaces.declare(declared)
    for number in range(10):
        await world.share(await world.put(f"n{number}", namespace="n"))
    await world.collector.collect()
    gone = {row.key for row in (await world.catalog.list_objects("cache")).rows if not is_home(world, row)}
    assert len(gone) == 2
    await world.catalog.namespaces.change_settings(msgspec.structs.replace(declared, quota=NamespaceQuota(chunks=9)))
    world.clock.advance(20)
    assert (await world.collector.collect()).condemned == 2
    await world.after_grace()
    assert {f"n{number}" for number in range(10)} - await world.live() == gone


async def test_a_start_learns_what_is_here_and_what_is_away(world: GcWorld) -> None:
    rows = await shared_chain(world, "a", 6)
    objects = [await world.share(await world.put(f"o{number}", bucket="objects")) for number in range(4)]
    await world.home.delete([BlobId(rows[5].blobs[0].blob_id), BlobId(objects[0].blobs[0].blob_id)])
    fresh = GcWorld(world.catalog, world.clock, remote=world.remote)
    fresh.home = world.home
    fresh.collector._home = world.home
    fresh.collector._evictions._home = world.home  # type: ignore[union-attr]
    await fresh.collector.load()
    assert not fresh.policy.holds(chunk_name("cache", "a5"), CacheTier.NVME)
    assert fresh.policy.holds(chunk_name("cache", "a4"), CacheTier.NVME)
    assert await fresh.collector.make_room(8 * CHUNK) >= 8 * CHUNK
    assert not world.home.sizes
    assert fresh.collector.evictions.objects == 8


async def test_a_copy_that_came_back_is_followed_again(world: GcWorld) -> None:
    (row,) = await shared_chain(world, "a", 1)
    await world.collector.make_room(CHUNK)
    assert not is_home(world, row)
    assert await world.collector.admits_copy(row, CHUNK)
    world.home.sizes[BlobId(row.blobs[0].blob_id)] = CHUNK
    await world.collector.copied(row)
    assert world.policy.holds(chunk_name("cache", "a0"), CacheTier.NVME)
    assert await world.collector.make_room(CHUNK) >= CHUNK
    assert not is_home(world, row)


async def test_an_ordinary_copy_comes_back_only_below_the_watermark(world: GcWorld) -> None:
    row = await world.share(await world.put("o", bucket="objects"))
    for number in range(8):
        await world.put(f"p{number}", bucket="objects")
    assert not await world.collector.admits_copy(row, CHUNK)
    assert await world.collector.admits_copy(row, 0)


async def test_in_quiet_time_copies_may_leave_and_nothing_is_condemned(
    world: GcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = await shared_chain(world, "s", 1)
    await world.chain("l", 10)
    monkeypatch.setattr(type(world.collector), "is_quiet", property(lambda _: True))
    report = await world.collector.collect()
    assert report.quiet
    assert not is_home(world, shared[0])


async def test_buckets_of_class_shared_are_uploaded_for_room_like_those_with_the_rule(world: GcWorld) -> None:
    await world.catalog.create_bucket(BucketRow("both", BucketKind.KV, USER, 0, Durability.SHARED))
    for number in range(10):
        await world.put(f"b{number}", bucket="both")
    assert (await world.collector.collect()).condemned == 0
    assert sum(map(len, world.uploaded)) == 2
