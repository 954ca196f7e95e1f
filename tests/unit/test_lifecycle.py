"""The worker of lifecycle rules, over the catalog's drivers, on a clock turned by hand."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from fakes import ManualClock
from gc_world import CHUNK, LOG, GcWorld, open_catalog

from kvobj.catalog.rows import DeleteOutcome, Durability, ObjectRow, PartRow, UploadRow, WriteCondition
from kvobj.catalog.setting_rows import BucketUpdate, LifecycleRule, ObjectUpdate
from kvobj.clock import boot_ms
from kvobj.errors import BusyError, UnavailableError
from kvobj.gc.lifecycle import Lifecycle, LifecycleReport

DAY_SECONDS = 24 * 3600.0
DEBUG_DAY_SECONDS = 10.0


@pytest.fixture(params=["memory", "lmdb"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GcWorld]:
    clock = ManualClock()
    async with open_catalog(request.param, tmp_path, clock) as catalog:
        world = GcWorld(catalog, clock)
        await world.open()
        yield world


def lifecycle_of(
    world: GcWorld, removed: list[ObjectRow] | None = None, *, day_seconds: float = DEBUG_DAY_SECONDS
) -> Lifecycle:
    def on_removed(rows: Sequence[ObjectRow]) -> None:
        if removed is not None:
            removed.extend(rows)

    return Lifecycle(
        catalog=world.catalog,
        clock=world.clock,
        pace=world.pace,
        day_seconds=day_seconds,
        on_removed=on_removed,
        log=LOG,
    )


async def set_rules(world: GcWorld, bucket: str, *rules: LifecycleRule) -> None:
    await world.catalog.update_bucket(bucket, BucketUpdate(lifecycle=rules))


def days(count: int, key_prefix: str = "", **fields: object) -> LifecycleRule:
    made = LifecycleRule(f"{count} {key_prefix}", enabled=True, key_prefix=key_prefix, expire_days=count)
    return msgspec.structs.replace(made, **fields)


async def keys(world: GcWorld, bucket: str = "objects") -> list[str]:
    return [row.key for row in (await world.catalog.list_objects(bucket)).rows]


async def test_an_object_goes_when_its_days_are_over_and_not_before(world: GcWorld) -> None:
    await set_rules(world, "objects", days(1, "one/"), days(5, "five/"))
    for key in ("five/a", "one/a", "one/b", "other"):
        await world.commit(key, bucket="objects")
    removed: list[ObjectRow] = []
    lifecycle = lifecycle_of(world, removed)
    world.clock.advance(DEBUG_DAY_SECONDS - 0.001)
    assert await lifecycle.run_pass() == LifecycleReport()
    world.clock.advance(0.001)
    assert await lifecycle.run_pass() == LifecycleReport(objects=2, size_bytes=2 * CHUNK)
    assert await keys(world) == ["five/a", "other"]
    assert [row.key for row in removed] == ["one/a", "one/b"]
    world.clock.advance(4 * DEBUG_DAY_SECONDS)
    assert (await lifecycle.run_pass()).objects == 1
    assert await keys(world) == ["other"]
    assert (lifecycle.counts.objects, lifecycle.counts.size_bytes, lifecycle.counts.passes) == (3, 3 * CHUNK, 3)


async def test_the_bytes_of_what_goes_are_queued_for_deletion(world: GcWorld) -> None:
    row = await world.commit("old", bucket="objects")
    await set_rules(world, "objects", days(1))
    world.clock.advance(DEBUG_DAY_SECONDS)
    await lifecycle_of(world).run_pass()
    queued = await world.catalog.due(now_ms=world.clock.now_ms())
    assert [entry.blob_id for entry in queued] == [blob.blob_id for blob in row.blobs]


async def test_real_days_end_at_midnight(world: GcWorld) -> None:
    await world.commit("a", bucket="objects")  # 2023-11-14 22:13:20
    await set_rules(world, "objects", days(1))
    lifecycle = lifecycle_of(world, day_seconds=DAY_SECONDS)
    world.clock.advance(DAY_SECONDS + 106 * 60)
    assert (await lifecycle.run_pass()).objects == 0
    world.clock.advance(60)
    assert (await lifecycle.run_pass()).objects == 1


async def test_tags_sizes_and_dates_choose(world: GcWorld) -> None:
    now_ms = world.clock.now_ms()
    await set_rules(
        world,
        "objects",
        days(1, "tag/", tags={"keep": "no"}),
        days(1, "size/", size_over_bytes=150),
        days(1, "past/", expire_days=None, expire_date_ms=now_ms + 1000),
        days(1, "future/", expire_days=None, expire_date_ms=now_ms + 60_000),
        days(1, "off/", enabled=False),
    )
    for key in ("tag/a", "tag/b", "size/small", "past/a", "future/a", "off/a"):
        await world.commit(key, bucket="objects")
    await world.commit("size/large", bucket="objects", size_bytes=200)
    await world.catalog.update_object("objects", "tag/a", ObjectUpdate(tags={"keep": "no", "more": "x"}))
    world.clock.advance(DEBUG_DAY_SECONDS)
    assert (await lifecycle_of(world).run_pass()).objects == 3
    assert await keys(world) == ["future/a", "off/a", "size/small", "tag/b"]


async def test_only_key_prefixes_of_rules_are_looked_at(world: GcWorld) -> None:
    for number in range(40):
        await world.commit(f"bulk/{number:02}", bucket="objects")
    for number in range(3):
        await world.commit(f"logs/{number}", bucket="objects")
    await set_rules(world, "objects", days(1, "logs/"), days(2, "logs/0"), days(1, "never/"))
    lifecycle = lifecycle_of(world)
    world.clock.advance(DEBUG_DAY_SECONDS)
    assert (await lifecycle.run_pass()).objects == 3
    assert lifecycle.counts.looked_at == 3


async def test_an_object_that_was_written_again_since_it_was_read_stays(
    world: GcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a", "b"):
        await world.commit(key, bucket="objects")
    await set_rules(world, "objects", days(1))
    world.clock.advance(DEBUG_DAY_SECONDS)
    delete = world.catalog.delete

    async def delete_after_a_write(
        bucket: str, names: Sequence[str], *, conditions: Sequence[WriteCondition | None] = (), now_ms: int
    ) -> list[DeleteOutcome]:
        await world.commit("a", bucket="objects", size_bytes=7)
        return await delete(bucket, names, conditions=conditions, now_ms=now_ms)

    monkeypatch.setattr(world.catalog, "delete", delete_after_a_write)
    assert await lifecycle_of(world).run_pass() == LifecycleReport(objects=1, size_bytes=CHUNK)
    (row,) = await world.catalog.lookup("objects", ["a"])
    assert row is not None
    assert row.size_bytes == 7


async def test_rules_that_are_taken_back_end_nothing_more(world: GcWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("a/1", "b/1"):
        await world.commit(key, bucket="objects")
    await set_rules(world, "objects", days(1, "a/"), days(1, "b/"))
    world.clock.advance(DEBUG_DAY_SECONDS)
    listed = world.catalog.list_objects
    pages: list[str] = []

    async def list_and_take_back(bucket: str, **arguments: object) -> object:
        page = await listed(bucket, **arguments)  # type: ignore[arg-type] # handed through
        pages.append(str(arguments["key_prefix"]))
        await set_rules(world, "objects")
        return page

    monkeypatch.setattr(world.catalog, "list_objects", list_and_take_back)
    assert await lifecycle_of(world).run_pass() == LifecycleReport()
    assert pages == ["a/"]
    monkeypatch.undo()
    assert await keys(world) == ["a/1", "b/1"]


async def test_on_a_clock_that_was_put_back_nothing_goes(world: GcWorld) -> None:
    await set_rules(world, "objects", days(1, "d/"), days(1, "x/", expire_days=None, expire_date_ms=0))
    for key in ("d/a", "x/a"):
        await world.commit(key, bucket="objects")
    lifecycle = lifecycle_of(world)
    world.clock.jump_wall(-3600)
    world.clock.advance(5 * DEBUG_DAY_SECONDS)
    assert await lifecycle.run_pass() == LifecycleReport()
    world.clock.jump_wall(3600)
    assert (await lifecycle.run_pass()).objects == 2


async def test_a_pass_that_failed_goes_on_where_it_was_also_after_a_restart(
    world: GcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        for key_prefix in ("a/", "b/", "c/"):
            await world.commit(f"{key_prefix}{number}", bucket="objects")
    await set_rules(world, "objects", days(1, "a/"), days(1, "b/"), days(1, "c/"))
    world.clock.advance(DEBUG_DAY_SECONDS)
    listed = world.catalog.list_objects

    async def fail_at_c(bucket: str, **arguments: object) -> object:
        if arguments["key_prefix"] == "c/":
            raise UnavailableError("the catalog does not answer")
        return await listed(bucket, **arguments)  # type: ignore[arg-type] # handed through

    monkeypatch.setattr(world.catalog, "list_objects", fail_at_c)
    first = lifecycle_of(world)
    with pytest.raises(UnavailableError):
        await first.run_pass()
    assert (first.counts.objects, first.counts.passes) == (6, 0)
    monkeypatch.undo()
    await world.commit("a/young", bucket="objects")
    second = lifecycle_of(world)
    second.load(first.save())
    assert (await second.run_pass()).objects == 3
    assert second.counts.looked_at == 3
    world.clock.advance(DEBUG_DAY_SECONDS)
    assert (await second.run_pass()).objects == 1
    second.load(b"\xff nonsense")  # a kept state of something else
    assert (await second.run_pass()).objects == 0


async def test_uploads_end_by_their_rule_and_their_parts_with_them(world: GcWorld) -> None:
    now_ms = world.clock.now_ms()
    for key in ("logs/old", "logs/new", "else/old"):
        initiated_ms = now_ms + (5000 if key == "logs/new" else 0)
        await world.catalog.create_upload(
            UploadRow("objects", key, f"id-{key}", initiated_ms, "root", Durability.LOCAL)
        )
    row = await world.commit("spare", bucket="objects")
    part = PartRow("id-logs/old", 1, row.blobs, CHUNK, "etag", now_ms)
    await world.catalog.put_part("objects", "logs/old", part, now_ms=now_ms)
    await world.catalog.create_upload(
        UploadRow("objects", "logs/group", "group", now_ms, "root", Durability.LOCAL, group_parts=2)
    )
    await set_rules(world, "objects", days(2, "logs/", expire_days=None, abort_upload_days=2))
    lifecycle = lifecycle_of(world)
    world.clock.advance(2 * DEBUG_DAY_SECONDS - 0.001)
    assert (await lifecycle.run_pass()).uploads == 0
    world.clock.advance(0.001)
    assert await lifecycle.run_pass() == LifecycleReport(uploads=1)
    page = await world.catalog.list_uploads("objects", groups=True)
    assert [upload.key for upload in page.rows] == ["else/old", "logs/group", "logs/new"]
    assert lifecycle.counts.uploads == 1


async def test_in_a_kv_bucket_what_follows_goes_too_and_pins_keep_what_they_hold(world: GcWorld) -> None:
    await world.chain("old", 3)
    await world.chain("pinned", 2)
    now_boot_ms = boot_ms(world.clock)
    session = await world.catalog.leases.open_session(
        user="root", bucket="cache", holder="h", ttl_ms=600_000, now_boot_ms=now_boot_ms
    )
    await world.catalog.leases.pin_tails(session.id, ["pinned1"], user="root", bucket="cache", now_boot_ms=now_boot_ms)
    await set_rules(world, "cache", days(1))
    # Only the first chunks have had their day.
    world.clock.advance(DEBUG_DAY_SECONDS - 1)
    await world.commit("old3", parent="old2")
    removed: list[ObjectRow] = []
    report = await lifecycle_of(world, removed).run_pass()
    assert (report.objects, len(removed)) == (6, 6)
    assert await world.live() == set()
    assert await world.catalog.lookup_hidden("cache", "pinned1") is not None
    assert await world.catalog.lookup_hidden("cache", "old1") is None


async def test_what_cannot_be_removed_now_is_left_to_the_next_pass(
    world: GcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.commit("a", bucket="objects")
    await set_rules(world, "objects", days(1))
    world.clock.advance(DEBUG_DAY_SECONDS)

    async def busy(*_: object, **__: object) -> list[DeleteOutcome]:
        raise BusyError("chunks are stored below faster than they can be deleted")

    monkeypatch.setattr(world.catalog, "delete", busy)
    lifecycle = lifecycle_of(world)
    assert await lifecycle.run_pass() == LifecycleReport(busy=1)
    monkeypatch.undo()
    assert (await lifecycle.run_pass()).objects == 1


async def test_beside_requests_it_keeps_to_the_rate(world: GcWorld) -> None:
    for number in range(120):
        await world.commit(f"{number:03}", bucket="objects")
    await set_rules(world, "objects", days(1))
    world.clock.advance(DEBUG_DAY_SECONDS)
    world.pace.note_request()
    assert (await lifecycle_of(world).run_pass()).objects == 120
    # 1,000 a second in twenty batches a second: three batches of at most 50, and a little for looking.
    assert sum(world.slept) == pytest.approx(0.126, abs=0.01)
    assert max(world.slept) <= 0.05


async def test_a_dry_run_tells_what_would_go_and_changes_nothing(world: GcWorld) -> None:
    for key in ("a", "b", "c"):
        await world.commit(key, bucket="objects")
    await set_rules(world, "objects", days(1, "a"), days(1, "c"), days(9, "b"))
    lifecycle = lifecycle_of(world)
    world.clock.advance(DEBUG_DAY_SECONDS)
    planned = await lifecycle.plan()
    assert [(each.bucket, each.key, each.reason, each.size_bytes) for each in planned] == [
        ("objects", "a", "lifecycle", CHUNK),
        ("objects", "c", "lifecycle", CHUNK),
    ]
    assert await keys(world) == ["a", "b", "c"]


async def test_what_a_pass_did_stands_in_the_log(world: GcWorld, caplog: pytest.LogCaptureFixture) -> None:
    await world.commit("a", bucket="objects")
    await set_rules(world, "objects", days(1))
    lifecycle = lifecycle_of(world)
    with caplog.at_level(logging.INFO, logger="test"):
        await lifecycle.run_pass()
        assert caplog.messages == []
        world.clock.advance(DEBUG_DAY_SECONDS)
        await lifecycle.run_pass()
    assert caplog.messages == [f"lifecycle: 1 objects ({CHUNK} bytes) expired, 0 uploads ended, 0 removals put off"]
