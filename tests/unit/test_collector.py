"""The collector: what goes from a full home tier, in which order, and what stays."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec
import pytest
from fakes import ManualClock
from gc_world import CHUNK, GRACE_SECONDS, GcWorld, open_catalog

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import ChunkName, NamespaceQuota, ObjectRow, QueueEntry
from kvobj.clock import boot_ms
from kvobj.errors import StoreFullError, TierUnavailableError
from kvobj.gc.pacing import FEW
from kvobj.gc.plan import Reason
from kvobj.ids import BlobId
from kvobj.policy.chunk_policy import CacheTier, chunk_name

USER = "root"


class MakeWorld(Protocol):
    async def __call__(
        self,
        *,
        capacity_bytes: int = 10 * CHUNK,
        held_bytes_max: int = 10 * CHUNK,
        chunk_ttl_seconds: float | None = None,
    ) -> GcWorld: ...


@pytest.fixture(params=["memory", "lmdb"])
async def make_world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MakeWorld]:
    clock = ManualClock()
    async with AsyncExitStack() as stack:
        numbers = itertools.count()

        async def make(
            *,
            capacity_bytes: int = 10 * CHUNK,
            held_bytes_max: int = 10 * CHUNK,
            chunk_ttl_seconds: float | None = None,
        ) -> GcWorld:
            directory = tmp_path / str(next(numbers))
            directory.mkdir()
            catalog = await stack.enter_async_context(open_catalog(request.param, directory, clock))
            world = GcWorld(
                catalog,
                clock,
                capacity_bytes=capacity_bytes,
                held_bytes_max=held_bytes_max,
                chunk_ttl_seconds=chunk_ttl_seconds,
            )
            await world.open()
            return world

        yield make


@pytest.fixture
async def world(make_world: MakeWorld) -> GcWorld:
    return await make_world()


async def pin(world: GcWorld, key: str) -> bytes:
    now_ms = boot_ms(world.clock)
    session = await world.catalog.leases.open_session(
        user=USER, bucket="cache", holder="test", ttl_ms=600_000, now_boot_ms=now_ms
    )
    pinned = await world.catalog.leases.pin_tails(session.id, [key], user=USER, bucket="cache", now_boot_ms=now_ms)
    assert pinned.pins[0].pin is not None
    return session.id


async def test_below_the_watermark_nothing_goes(world: GcWorld) -> None:
    await world.chain("a", 9)
    report = await world.collector.collect()
    assert (report.condemned, report.claimed) == (0, 0)
    assert (await world.collector.plan()).victims == ()


async def test_above_the_watermark_the_coldest_leaves_are_condemned_and_claimed_after_the_grace_time(
    world: GcWorld,
) -> None:
    await world.chain("a", 5)
    await world.chain("b", 5)
    report = await world.collector.collect()
    assert report.condemned == 2  # ten chunks of a hundred bytes, 900 allowed, down to 95 % of that
    assert report.claimed == 0
    assert len(await world.live()) == 10  # a mark hides nothing
    world.clock.advance(GRACE_SECONDS - 1)
    assert (await world.collector.collect()).claimed == 0
    await world.after_grace()
    assert await world.live() == {"a0", "a1", "a2"} | {f"b{number}" for number in range(5)}
    assert len(world.home.sizes) == 8


async def test_a_second_cycle_does_not_condemn_more_than_is_needed(world: GcWorld) -> None:
    await world.chain("a", 10)
    assert (await world.collector.collect()).condemned == 2
    assert (await world.collector.collect()).condemned == 0


@pytest.mark.parametrize("told", ["hold", "held_and_touched"])
async def test_a_chunk_that_is_asked_for_within_the_grace_time_stays(world: GcWorld, told: str) -> None:
    rows = await world.chain("a", 10)
    await world.collector.collect()
    # What a GET does: a look-up that rescues, and the hold.
    await world.catalog.lookup("cache", ["a9"], rescue=True)
    getattr(world.collector, told)(rows[9])
    await world.after_grace()
    assert "a9" in await world.live()
    assert "a8" in await world.live()  # a parent whose child stays, stays
    assert world.collector.counts.rescued >= 1


async def test_a_pinned_tail_protects_its_chain(world: GcWorld) -> None:
    await world.chain("a", 5)
    await world.chain("b", 5)
    await pin(world, "a4")
    await world.collector.collect()
    await world.after_grace()
    live = await world.live()
    assert {f"a{number}" for number in range(5)} <= live
    assert len(live) == 8


async def test_when_pins_end_their_chain_may_go(world: GcWorld) -> None:
    await world.chain("a", 10)
    session = await pin(world, "a9")
    assert (await world.collector.collect()).condemned == 0
    await world.catalog.leases.close_session(session, user=USER, bucket="cache")
    world.clock.advance(6)  # what was refused is not asked for again at once
    assert (await world.collector.collect()).condemned == 2


async def test_ordinary_objects_are_never_removed(world: GcWorld) -> None:
    for number in range(10):
        await world.put(f"o{number}", bucket="objects")
    assert (await world.collector.collect()).condemned == 0
    assert await world.collector.make_room(5 * CHUNK) == 0
    assert len(world.home.sizes) == 10


async def test_who_waits_for_room_waits_for_no_grace_time(world: GcWorld) -> None:
    await world.chain("a", 10)
    removed = await world.collector.make_room(3 * CHUNK)
    assert removed >= 3 * CHUNK
    assert len(world.home.sizes) == 10 - removed // CHUNK
    assert "a0" in await world.live()


async def test_a_refusal_by_a_tier_with_plenty_of_room_costs_no_chunk_unless_somebody_waits(world: GcWorld) -> None:
    await world.chain("a", 5)  # of ten: the disk below is full, and not the tier
    assert await world.collector.make_room(2 * CHUNK, is_waited_for=False) == 0
    assert len(await world.live()) == 5
    assert await world.collector.make_room(2 * CHUNK) >= 2 * CHUNK


async def test_a_tier_that_is_nearly_full_is_believed_when_it_refuses(world: GcWorld) -> None:
    await world.chain("a", 8)  # what is free may lie in pieces
    assert await world.collector.make_room(CHUNK, is_waited_for=False) >= CHUNK


async def overwritten(world: GcWorld, times: int) -> None:
    """An object that leaves so many blobs behind, which nobody has reaped."""
    for _ in range(times + 1):
        await world.put("o", bucket="objects")


async def test_what_nobody_names_any_more_goes_before_any_chunk(world: GcWorld) -> None:
    await world.chain("a", 5)
    await overwritten(world, 4)
    assert await world.collector.make_room(3 * CHUNK) >= 3 * CHUNK
    assert len(await world.live()) == 5
    assert world.collector.counts.pressed_bytes == 0


async def test_room_is_made_of_what_nobody_names_where_no_chunk_is(world: GcWorld) -> None:
    await overwritten(world, 9)
    assert await world.collector.make_room(CHUNK) >= CHUNK
    assert await world.collector.make_room(CHUNK) == 0
    assert len(world.home.sizes) == 1


async def test_where_what_nobody_names_is_not_enough_chunks_make_up_for_it(world: GcWorld) -> None:
    await world.chain("a", 7)
    await overwritten(world, 2)
    assert await world.collector.make_room(4 * CHUNK) >= 4 * CHUNK
    assert len(world.home.sizes) <= 6
    assert await world.live() >= {f"a{number}" for number in range(4)}  # no more of them than were needed besides


async def test_who_waited_while_room_was_made_for_another_tries_again(
    world: GcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await overwritten(world, 2)
    reap = world.catalog.reap

    async def in_two_steps(entries: Sequence[QueueEntry]) -> None:
        await asyncio.sleep(0)  # the other writer comes
        await reap(entries)

    monkeypatch.setattr(world.catalog, "reap", in_two_steps)

    async def write(key: str) -> int:
        made = await world.collector.make_room(CHUNK)
        await world.put(key, bucket="objects")  # which takes what was made, and as much again
        await world.put(f"{key}2", bucket="objects")
        return made

    assert all(await asyncio.gather(write("p"), write("q")))


async def test_a_failure_to_reap_does_not_keep_chunks_from_making_room(
    world: GcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.chain("a", 8)
    await overwritten(world, 1)
    delete, failures = world.home.delete, [TierUnavailableError("the disk does not answer")]

    async def failing_once(blob_ids: Sequence[BlobId]) -> None:
        if failures:
            raise failures.pop()
        await delete(blob_ids)

    monkeypatch.setattr(world.home, "delete", failing_once)
    assert await world.collector.make_room(2 * CHUNK) >= 2 * CHUNK


async def test_room_is_made_of_what_is_condemned_already(world: GcWorld) -> None:
    await world.chain("a", 5)
    await world.chain("b", 5)
    await world.collector.collect()
    assert await world.collector.make_room(CHUNK) >= CHUNK
    live = await world.live()
    assert "a4" not in live
    assert {f"b{number}" for number in range(5)} <= live


async def test_room_is_never_made_of_what_a_client_was_just_told_of(world: GcWorld) -> None:
    rows = await world.chain("a", 10)
    for row in rows:
        world.collector.hold(row)
    assert await world.collector.make_room(CHUNK) == 0
    world.clock.advance(GRACE_SECONDS)
    assert await world.collector.make_room(CHUNK) >= CHUNK


async def test_a_chunk_that_is_asked_for_while_room_is_being_made_stays(
    world: GcWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = await world.chain("a", 10)
    condemn = world.catalog.condemn

    async def asked_for_meanwhile(chunks: Sequence[ChunkName], *, not_before_boot_ms: int) -> list[bool]:
        world.collector.hold(rows[9])  # its look-up came before the mark, so it rescued nothing
        return await condemn(chunks, not_before_boot_ms=not_before_boot_ms)

    monkeypatch.setattr(world.catalog, "condemn", asked_for_meanwhile)
    assert await world.collector.make_room(3 * CHUNK) == 0
    assert await world.collector.remove_now(rows) == 0
    assert len(await world.live()) == 10
    assert world.policy.holds(chunk_name("cache", "a9"), CacheTier.NVME)


async def test_a_removal_of_somebody_else_is_noticed(world: GcWorld) -> None:
    rows = await world.chain("a", 10)
    outcomes = await world.catalog.delete("cache", ["a9"], now_ms=world.clock.now_ms())
    world.collector.removed([outcome.removed for outcome in outcomes if outcome.removed is not None])
    assert not world.policy.holds(chunk_name("cache", "a9"), CacheTier.NVME)
    assert world.policy.holds(chunk_name("cache", "a8"), CacheTier.NVME)
    assert rows[9].key not in await world.live()


async def test_a_chunk_stored_anew_under_its_key_is_not_removed_for_the_old_one(world: GcWorld) -> None:
    row = await world.put("a")
    await world.catalog.delete("cache", ["a"], now_ms=world.clock.now_ms())
    again = await world.commit("a")  # the collector has heard of neither
    assert again.blobs != row.blobs
    assert await world.collector.make_room(5 * CHUNK) == CHUNK  # what the old one left
    assert await world.live() == {"a"}


async def test_in_quiet_time_nothing_is_condemned_or_claimed(world: GcWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.chain("a", 10)
    monkeypatch.setattr(type(world.collector), "is_quiet", property(lambda _: True))
    assert (await world.collector.collect()).quiet
    assert await world.collector.make_room(CHUNK) == 0
    assert (await world.collector.plan()).quiet
    assert len(await world.live()) == 10


async def test_chunks_that_nobody_uses_for_their_time_to_live_go_children_first(make_world: MakeWorld) -> None:
    world = await make_world(capacity_bytes=1000 * CHUNK, chunk_ttl_seconds=60)
    await world.chain("old", 3)
    world.clock.advance(50)
    kept = await world.chain("new", 3)
    world.clock.advance(20)
    plan = await world.collector.plan()
    assert [victim.key for victim in plan.victims] == ["old2", "old1", "old0"]
    assert {victim.reason for victim in plan.victims} == {Reason.EXPIRED}
    assert all(victim.unused_seconds is not None and victim.unused_seconds > 60 for victim in plan.victims)
    assert (await world.collector.collect()).condemned == 3
    world.collector.hold(kept[0])
    await world.after_grace()
    assert await world.live() == {"new0", "new1", "new2"}


async def test_a_chain_longer_than_a_batch_does_not_outlive_its_time(make_world: MakeWorld) -> None:
    world = await make_world(capacity_bytes=10_000 * CHUNK, chunk_ttl_seconds=60)
    await world.chain("long", 1200)  # known parents first: the first batch is all ancestors of the second
    world.clock.advance(70)
    for _ in range(5):
        await world.collector.collect()
        world.clock.advance(6)
    await world.after_grace()
    assert await world.live() == set()


async def test_a_request_for_the_chain_starts_its_time_to_live_anew(make_world: MakeWorld) -> None:
    world = await make_world(capacity_bytes=1000 * CHUNK, chunk_ttl_seconds=60)
    await world.chain("a", 3)
    world.clock.advance(50)
    chain = b"".join(chunk_name("cache", f"a{number}") for number in range(3))
    assert world.collector.request(chain, now_ms=boot_ms(world.clock)) == 3
    world.clock.advance(50)
    assert (await world.collector.collect()).condemned == 0


async def test_the_dry_run_says_what_the_cycle_then_does(world: GcWorld) -> None:
    await world.chain("a", 5)
    await world.chain("b", 5)
    world.refused = [("cache", "never-wanted", 7)]
    plan = await world.collector.plan()
    assert [(victim.key, victim.reason) for victim in plan.victims] == [
        ("never-wanted", Reason.REFUSED),
        ("a4", Reason.SPACE),
        ("a3", Reason.SPACE),
    ]
    assert (plan.chunks, plan.size_bytes, plan.marked) == (3, 2 * CHUNK + 7, 0)
    assert await world.collector.plan() == plan
    await world.collector.collect()
    await world.after_grace()
    assert {f"a{number}" for number in range(5)} - await world.live() == {"a3", "a4"}


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


async def test_a_namespace_at_its_quota_gives_up_its_own_chunks_first(make_world: MakeWorld) -> None:
    world = await make_world(capacity_bytes=1000 * CHUNK)
    await world.catalog.namespaces.declare(namespace_row("small", NamespaceQuota(chunks=20)))
    await world.catalog.namespaces.declare(namespace_row("large", NamespaceQuota(size_bytes=1000 * CHUNK)))
    for number in range(20):
        await world.put(f"large/{number}", namespace="large")
        await world.put(f"small/{number}", namespace="small")
    plan = await world.collector.plan()
    assert {victim.reason for victim in plan.victims} == {Reason.QUOTA}
    assert all(victim.key.startswith("small/") for victim in plan.victims)
    await world.collector.collect()
    await world.after_grace()
    live = await world.live()
    assert len([key for key in live if key.startswith("small/")]) == 19
    assert len([key for key in live if key.startswith("large/")]) == 20
    assert (await world.collector.collect()).condemned == 0


async def test_a_new_quota_is_looked_at_at_once(make_world: MakeWorld) -> None:
    world = await make_world(capacity_bytes=1000 * CHUNK)
    row = namespace_row("small", NamespaceQuota())
    await world.catalog.namespaces.declare(row)
    for number in range(20):
        await world.put(f"small/{number}", namespace="small")
    await world.collector.collect()
    world.collector.start()
    async with asyncio.timeout(5):  # half of the interval
        await world.catalog.namespaces.change_settings(msgspec.structs.replace(row, quota=NamespaceQuota(chunks=10)))
        world.collector.look_at_quotas()
        while not world.catalog.condemned()[0]:  # noqa: ASYNC110 - the collector says nothing of it
            await asyncio.sleep(0)
    await world.collector.aclose()
    assert world.collector.counts.condemned == 11


async def test_what_lies_at_home_already_is_learnt_at_a_start(world: GcWorld) -> None:
    for number in range(10):
        await world.commit(f"a{number}", parent=f"a{number - 1}" if number else "")
    await world.commit("o", bucket="objects")
    assert await world.collector.make_room(CHUNK) == 0
    await world.collector.load()
    assert world.policy.size_bytes(CacheTier.NVME) == 10 * CHUNK
    assert (await world.collector.collect()).condemned >= 1
    assert await world.collector.make_room(CHUNK) >= CHUNK
    assert "a0" in await world.live()


async def test_refused_chunks_are_removed_at_once_but_not_those_that_are_held(world: GcWorld) -> None:
    rows = [await world.commit("a"), await world.commit("b")]
    world.collector.hold(rows[1])
    assert await world.collector.remove_now(rows) == CHUNK
    assert await world.live() == {"b"}


@dataclass
class Load:
    """How long a cycle over many chunks waits between its batches."""

    slept_seconds: float
    batches: int


async def _load(world: GcWorld, *, busy: bool) -> Load:
    for number in range(1200):
        row = await world.commit(f"k{number:04}")
        await world.collector.written(row)
    if not busy:
        world.clock.advance(10)
    world.slept.clear()
    await world.collector.collect()
    return Load(sum(world.slept), len(world.slept))


async def test_beside_other_work_the_collector_keeps_its_rate_and_alone_it_does_not_wait(make_world: MakeWorld) -> None:
    loads = []
    for busy in (True, False):
        world = await make_world(capacity_bytes=10 * CHUNK, held_bytes_max=0)
        loads.append(await _load(world, busy=busy))
    busy_load, idle_load = loads
    assert busy_load.slept_seconds == pytest.approx(1.19, abs=0.02)  # 1,190 chunks at 1,000 a second
    assert busy_load.batches > 1
    assert idle_load.slept_seconds == 0


async def test_beside_other_work_what_is_due_is_claimed_while_others_are_condemned(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(capacity_bytes=10 * CHUNK, held_bytes_max=0)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.clock.advance(GRACE_SECONDS + 1)
        world.pace.note_request()

    monkeypatch.setattr(world.pace, "_sleep", sleep)
    monkeypatch.setattr(world.pace, "_chunks_per_second", 400)
    for number in range(500):
        await world.collector.written(await world.commit(f"k{number:03}"))
    report = await world.collector.collect()
    assert report.condemned > 480
    assert report.claimed > 350
    # The rate's time for what was condemned, and for the little that became due too late; not for everything twice.
    assert sum(slept) < 1.3 * report.condemned / 400


async def test_what_becomes_due_while_others_are_claimed_goes_with_them(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(capacity_bytes=10 * CHUNK, held_bytes_max=0)
    await world.chain("a", 12)
    first = await world.collector.collect()
    world.clock.advance(GRACE_SECONDS / 2)
    await world.chain("b", 3)
    second = await world.collector.collect()
    assert (first.claimed, second.claimed) == (0, 0)
    assert first.condemned
    assert second.condemned
    world.clock.advance(GRACE_SECONDS / 2)  # the first ones are due
    seen: list[tuple[int, int]] = []

    async def sleep(seconds: float) -> None:
        assert seconds == 0
        seen.append((world.collector.counts.condemned, world.collector.counts.claimed))
        world.clock.advance(GRACE_SECONDS)

    monkeypatch.setattr(world.pace, "_sleep", sleep)
    await world.collector.collect()
    condemned = first.condemned + second.condemned
    assert seen[:2] == [(condemned, first.condemned), (condemned, condemned)]


async def test_beside_other_work_what_becomes_due_while_others_are_claimed_does_not_keep_others_from_being_condemned(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(capacity_bytes=10 * CHUNK, held_bytes_max=0)
    await world.chain("a", 12)
    first = await world.collector.collect()
    world.clock.advance(GRACE_SECONDS / 2)
    await world.chain("b", 3)
    second = await world.collector.collect()
    await world.chain("c", 5)
    world.clock.advance(GRACE_SECONDS / 2)  # the first ones are due
    seen: list[tuple[int, int]] = []

    async def sleep(seconds: float) -> None:
        seen.append((world.collector.counts.condemned, world.collector.counts.claimed))
        world.clock.advance(seconds + GRACE_SECONDS)  # by now the second ones are
        world.pace.note_request()

    world.pace.note_request()
    monkeypatch.setattr(world.pace, "_sleep", sleep)
    await world.collector.collect()
    condemned = first.condemned + second.condemned
    assert seen[0] == (condemned, first.condemned)
    assert seen[1][0] > condemned
    assert world.collector.counts.claimed >= condemned


async def test_on_an_idle_store_a_claim_ends_though_something_is_condemned_at_every_pause(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(capacity_bytes=10 * CHUNK)
    for number in range(12):
        await world.put(f"a{number}")
    marked = (await world.collector.collect()).condemned
    pauses = 0

    async def sleep(seconds: float) -> None:
        nonlocal pauses
        assert seconds == 0
        pauses += 1
        assert pauses < 100, "the claim goes on and on"
        world.clock.advance(1)
        row = await world.commit(f"b{pauses}")
        await world.catalog.condemn(
            [ChunkName(row.bucket, row.key, row.blobs[0].blob_id)], not_before_boot_ms=boot_ms(world.clock)
        )

    world.clock.advance(GRACE_SECONDS)
    monkeypatch.setattr(world.pace, "_sleep", sleep)
    await world.collector._claims.claim(paced=True)
    assert world.collector.counts.claimed >= marked


async def fill(world: GcWorld) -> None:
    """Chunks until the database takes no more."""
    for start in itertools.count(step=200):
        keys = [sha256(b"%d" % number).hexdigest() for number in range(start, start + 200)]
        written = await asyncio.gather(*map(world.commit, keys), return_exceptions=True)
        for row in written:
            if isinstance(row, ObjectRow):
                await world.collector.written(row)
        refused = [error for error in written if isinstance(error, BaseException)]
        if refused:
            assert all(isinstance(error, StoreFullError) for error in refused)
            return


async def test_in_a_nearly_full_database_condemned_chunks_go_in_small_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with open_catalog("lmdb", tmp_path, clock, map_bytes=8 << 20) as catalog:
        world = GcWorld(catalog, clock, capacity_bytes=10 * CHUNK, held_bytes_max=0)
        await world.open()

        await fill(world)
        clock.advance(10)
        condemned = (await world.collector.collect()).condemned
        clock.advance(GRACE_SECONDS)
        claimed = [0]

        async def sleep(seconds: float) -> None:
            assert seconds == 0
            claimed.append(world.collector.counts.claimed)

        monkeypatch.setattr(world.pace, "_sleep", sleep)
        await world.collector.collect()
        portions = [after - before for before, after in itertools.pairwise(claimed)]
        assert portions[0] <= FEW
        assert max(portions) > 2 * FEW
        assert world.collector.counts.claimed == condemned > 3000
        assert world.collector.counts.rescued == 0


async def test_objects_of_ordinary_buckets_leave_less_to_chunks(make_world: MakeWorld) -> None:
    world = await make_world(capacity_bytes=10 * CHUNK)
    await world.put("a")
    await world.commit("o", bucket="objects", size_bytes=7 * CHUNK)
    name = chunk_name("cache", "b")

    def admits(size_bytes: int) -> bool:
        now_ms = boot_ms(world.clock)
        return world.policy.admits(name, CacheTier.NVME, size_bytes=size_bytes, now_ms=now_ms)

    await world.collector.collect()
    # 9 chunks' worth below the watermark, 7 of them an object, 1 a chunk that is worth as much as what comes.
    assert (admits(CHUNK), admits(CHUNK + 1)) == (True, False)
    await world.catalog.delete("objects", ["o"], now_ms=1)
    await world.collector.collect()
    assert admits(8 * CHUNK)
