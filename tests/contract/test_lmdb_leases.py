"""The LMDB driver of leases passes the contract, keeps leases over a restart, and loses no race against removals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from lease_contract import (
    BUCKET,
    LIMITS,
    NOW,
    OTHER_BUCKET,
    LeaseContract,
    World,
    as_ids,
    chain,
    chunk,
    digest_of,
    keys_of,
    name,
)

from kvobj.catalog.bucket_changes import CreateBucket
from kvobj.catalog.catalog_rows import require_root
from kvobj.catalog.chunk_list import KeyList
from kvobj.catalog.encoding import (
    CATALOG_TABLES,
    LEASE_USAGE,
    PINS,
    PINS_BY_BLOB,
    PINS_BY_KEY,
    PINS_BY_SESSION,
    SESSIONS,
)
from kvobj.catalog.flight_keys import reliance_key, removal_key, row_key
from kvobj.catalog.lease_protocol import LeaseLimits, Leases
from kvobj.catalog.lease_rows import PinGuard
from kvobj.catalog.lmdb_leases import LmdbLeases
from kvobj.catalog.object_rows import NO_ROWS, ObjectRows, RowPair
from kvobj.catalog.rebuild import CatalogReplay
from kvobj.catalog.renewals import FILE_NAME
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, ObjectRow
from kvobj.database import Database, WriteView
from kvobj.errors import NoSuchSessionError, SessionExpiredError


class LmdbWorld(World):
    """Leases over a database, and rows written as a commit and removed as a claim would."""

    def __init__(self, directory: Path, limits: LeaseLimits = LIMITS) -> None:
        super().__init__()
        self.directory = directory
        self.limits = limits

    async def open(self, *, boot_id: str = "boot", now_boot_ms: int = NOW) -> LmdbWorld:
        self.database = Database.open(
            durable=self.directory / "durable",
            volatile=self.directory / "volatile",
            tables=CATALOG_TABLES,
            map_bytes=1 << 26,
            volatile_map_bytes=1 << 26,
            sync=False,
            boot_id=boot_id,
        )
        allocate = count(now_boot_ms << 20).__next__
        self.guard = PinGuard()
        self.objects = ObjectRows(allocate, self.guard)
        self.driver = LmdbLeases(
            self.database,
            self.objects,
            self.guard,
            allocate,
            self.forget_marks,
            lambda bucket, key: (bucket, key) in self.claiming,
            self.limits,
        )
        with self.database.read() as view:
            is_new = view.get_many(SESSIONS, [b"s"]) == [None] and not view.count(CATALOG_TABLES[2])
        if is_new:
            for bucket in (BUCKET, OTHER_BUCKET):
                row = BucketRow(bucket, BucketKind.KV, "main", 1, Durability.LOCAL)
                await self.database.write(CreateBucket(row, allocate))
        await self.driver.open(now_boot_ms=now_boot_ms)
        return self

    async def close(self) -> None:
        await self.database.aclose()

    @property
    def leases(self) -> Leases:
        return self.driver

    async def put(self, rows: Sequence[ObjectRow]) -> None:
        def change(view: WriteView) -> None:
            root = require_root(view, BUCKET)
            for row in rows:
                is_memory = row.durability is Durability.MEMORY
                after = RowPair(row, None) if is_memory else RowPair(None, row)
                self.objects.change(view, root, row.key.encode(), NO_ROWS, after)

        await self.database.write(change)

    async def remove(self, keys: Sequence[str]) -> None:
        await self.remove_unless_pinned(keys, heeds_pins=False)

    async def remove_unless_pinned(
        self, keys: Sequence[str], *, heeds_pins: bool = True, inline: bool = False
    ) -> list[bool]:
        """As a claim does it: on the writer's thread, with its keys in flight; per key whether it went. `inline`: as a DELETE of
        volatile rows does it."""

        def change(view: WriteView) -> list[bool]:
            root = require_root(view, BUCKET)
            gone: list[bool] = []
            for key in keys:
                before = self.objects.pair(view, root, key.encode())
                may = before.live is not None and not (heeds_pins and self.guard.holds_row(view, BUCKET, key))
                if may:
                    self.objects.change(view, root, key.encode(), before, NO_ROWS)
                gone.append(may)
            return gone

        held = [name_of(BUCKET, key) for key in keys for name_of in (row_key, removal_key)]
        if inline:
            relied_on = [reliance_key(BUCKET, key) for key in keys]
            return await self.database.write_fast(change, held, shared=relied_on)
        return await self.database.write(change, held)

    def holds_row(self, key: str) -> bool:
        with self.database.read() as view:
            return self.guard.holds_row(view, BUCKET, key)

    def holds_blob(self, blob_id: bytes) -> bool:
        with self.database.read() as view:
            return self.guard.holds_blob(view, blob_id)

    def entries(self) -> list[int]:
        with self.database.read() as view:
            tables = (SESSIONS, PINS, PINS_BY_BLOB, PINS_BY_KEY, PINS_BY_SESSION, LEASE_USAGE)
            return [view.count(table) for table in tables]


class TestLmdbLeases(LeaseContract):
    @pytest.fixture
    async def world(self, tmp_path: Path) -> AsyncIterator[World]:
        world = await LmdbWorld(tmp_path).open()
        yield world
        await world.close()

    @pytest.fixture
    async def bounded(self, tmp_path: Path) -> AsyncIterator[World]:
        world = await LmdbWorld(tmp_path, LeaseLimits(pinned_bytes_per_user=1000)).open()
        yield world
        await world.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LmdbWorld]:
    world = await LmdbWorld(tmp_path).open()
    yield world
    await world.close()


# -- restarts ----------------------------------------------------------------------------------------------------------


async def test_a_restart_in_the_same_boot_extends_sessions_by_the_time_away(world: LmdbWorld) -> None:
    rows = chain("a", 3)
    await world.put(rows)
    session = await world.session(ttl_ms=30_000)
    found = await world.match(as_ids(keys_of(rows)), session)
    assert found.pin is not None
    await world.leases.note_alive(now_boot_ms=NOW + 10_000)
    await world.close()
    await world.open(now_boot_ms=NOW + 22_000)
    assert not world.leases.usage().quiet
    assert world.holds_row(rows[2].key)
    again = await world.match(as_ids(keys_of(rows)), session, now_boot_ms=NOW + 22_000)
    assert again.deadline_ms == 20_000
    assert again.pin is not None
    assert not await world.reclaims(session, found.pin, again.pin, as_of=again.grant, now_boot_ms=NOW + 42_000)


@pytest.mark.parametrize("releases", [False, True], ids=["renews alone", "releases too"])
async def test_a_renewal_takes_nothing_from_a_session_that_a_restart_extended(
    world: LmdbWorld, *, releases: bool
) -> None:
    rows = chain("a", 3)
    await world.put(rows)
    session = await world.session(ttl_ms=2_000)
    await world.leases.note_alive(now_boot_ms=NOW)
    assert not await world.reclaims(session, as_of=0, now_boot_ms=NOW + 1_000)
    await world.close()
    await world.open(now_boot_ms=NOW + 1_500)
    found = await world.match(as_ids(keys_of(rows)), session, now_boot_ms=NOW + 1_500)
    assert found.pin is not None
    assert found.deadline_ms == 3_000
    release = [bytes(16)] if releases else []
    assert not await world.reclaims(session, found.pin, as_of=found.grant, release=release, now_boot_ms=NOW + 1_600)
    assert await world.leases.expire(now_boot_ms=NOW + 4_500) == 0
    assert await world.leases.expire(now_boot_ms=NOW + 5_000) == 1


async def test_a_restart_extends_by_one_ttl_at_most_and_each_time_once(world: LmdbWorld) -> None:
    session = await world.session(ttl_ms=2_000)
    await world.close()
    await world.open(now_boot_ms=NOW + 3_600_000)
    with pytest.raises(SessionExpiredError):
        await world.reclaims(session, as_of=0, now_boot_ms=NOW + 3_600_000)
    session = await world.session(ttl_ms=2_000, now_boot_ms=NOW + 3_600_000)
    for _ in range(3):
        await world.close()
        await world.open(now_boot_ms=NOW + 3_601_000)
    assert not await world.reclaims(session, as_of=0, now_boot_ms=NOW + 3_603_000)
    with pytest.raises(SessionExpiredError):
        await world.reclaims(session, as_of=0, now_boot_ms=NOW + 3_605_001)


async def test_a_renewal_outlives_the_process_also_without_a_heartbeat(world: LmdbWorld) -> None:
    session, silent = await world.session(ttl_ms=30_000), await world.session(ttl_ms=30_000)
    await world.leases.note_alive(now_boot_ms=NOW + 10_000)
    assert not await world.reclaims(session, as_of=0, now_boot_ms=NOW + 29_000)
    await world.close()
    await world.open(now_boot_ms=NOW + 29_500)
    assert await world.leases.expire(now_boot_ms=NOW + 49_999) == 0
    assert await world.leases.expire(now_boot_ms=NOW + 50_000) == 1
    with pytest.raises(NoSuchSessionError):
        await world.reclaims(silent, as_of=0, now_boot_ms=NOW + 50_000)
    assert await world.leases.expire(now_boot_ms=NOW + 78_999) == 0
    assert await world.leases.expire(now_boot_ms=NOW + 79_000) == 1


async def test_sessions_share_the_slots_of_those_that_ended(world: LmdbWorld) -> None:
    slots = world.directory / "volatile" / FILE_NAME
    kept = await world.session()
    assert not await world.reclaims(kept, as_of=0, now_boot_ms=NOW + 10_000)
    for _ in range(20):
        session = await world.session()
        assert not await world.reclaims(session, as_of=0)
        await world.leases.close_session(session.id, user="main", bucket=BUCKET)
    assert slots.stat().st_size == 2 * 32
    await world.close()
    await world.open()
    assert slots.stat().st_size == 0
    assert (await world.match(KeyList(["none"]), kept, now_boot_ms=NOW + 40_000)).matched == 0


async def test_a_slot_that_was_not_written_whole_counts_for_nothing(world: LmdbWorld) -> None:
    session = await world.session(ttl_ms=30_000)
    await world.close()
    torn = session.id + (NOW + 90_000).to_bytes(8, "little") + bytes(8)
    (world.directory / "volatile" / FILE_NAME).write_bytes(torn + session.id)
    await world.open()
    with pytest.raises(SessionExpiredError):
        await world.reclaims(session, as_of=0, now_boot_ms=NOW + 30_001)


async def test_a_renewal_for_which_there_is_no_slot_is_written_to_the_row(world: LmdbWorld) -> None:
    session = await world.session(ttl_ms=30_000)
    world.driver.close()
    assert not await world.reclaims(session, as_of=0, now_boot_ms=NOW + 20_000)
    assert not await world.reclaims(session, as_of=0, now_boot_ms=NOW + 50_000)


async def test_on_a_boot_clock_that_was_put_back_sessions_have_what_they_had_left(world: LmdbWorld) -> None:
    session = await world.session(ttl_ms=30_000)
    await world.leases.note_alive(now_boot_ms=NOW + 10_000)
    await world.close()
    await world.open(now_boot_ms=5_000)
    assert await world.leases.expire(now_boot_ms=25_000) == 0
    assert await world.leases.expire(now_boot_ms=25_500) == 1
    with pytest.raises(NoSuchSessionError):
        await world.reclaims(session, as_of=0, now_boot_ms=25_500)


async def test_on_a_boot_clock_that_was_put_back_quiet_time_begins_anew_and_is_no_longer(world: LmdbWorld) -> None:
    await world.session(ttl_ms=20_000)
    await world.close()
    await world.open(boot_id="another", now_boot_ms=3_600_000)
    await world.close()
    await world.open(boot_id="another", now_boot_ms=1_000)
    assert world.leases.usage().quiet
    assert not world.leases.end_quiet(now_boot_ms=21_999)
    assert world.leases.end_quiet(now_boot_ms=22_000)


async def test_losing_the_volatile_environment_is_followed_by_quiet_time(world: LmdbWorld) -> None:
    await world.put([chunk("k", None)])
    await world.session(ttl_ms=5_000)
    session = await world.session(ttl_ms=20_000)
    await world.match(KeyList(["k"]), session)
    await world.close()
    await world.open(boot_id="another", now_boot_ms=1_000)
    usage = world.leases.usage()
    assert (usage.sessions, usage.pins, usage.quiet) == (0, 0, True)
    assert world.holds_row("k")
    assert world.holds_blob(b"b" * 16)
    with pytest.raises(NoSuchSessionError):
        await world.reclaims(session, as_of=0, now_boot_ms=1_000)
    assert (await world.match(KeyList(["k"]), await world.session(now_boot_ms=1_000), now_boot_ms=1_000)).pin
    assert not world.leases.end_quiet(now_boot_ms=21_999)
    assert world.leases.end_quiet(now_boot_ms=22_000)
    assert not world.holds_row("other")


async def test_a_second_loss_within_quiet_time_begins_it_anew(world: LmdbWorld) -> None:
    await world.session(ttl_ms=20_000)
    for boot in ("second", "third"):
        await world.leases.stopped_cleanly()
        await world.close()
        await world.open(boot_id=boot, now_boot_ms=7_000)
        assert world.leases.usage().quiet
    assert not world.leases.end_quiet(now_boot_ms=27_999)
    assert world.leases.end_quiet(now_boot_ms=28_000)


async def test_a_clean_stop_without_sessions_spares_the_quiet_time(world: LmdbWorld) -> None:
    session = await world.session()
    await world.leases.close_session(session.id, user="main", bucket=BUCKET)
    await world.leases.stopped_cleanly()
    await world.close()
    await world.open(boot_id="another")
    assert not world.leases.usage().quiet
    await world.session()
    await world.leases.stopped_cleanly()
    await world.close()
    await world.open(boot_id="third")
    assert world.leases.usage().quiet


async def test_a_session_opened_after_a_clean_stop_is_marked_again(world: LmdbWorld) -> None:
    """The stop was called but not carried out: what is opened after it counts."""
    session = await world.session()
    await world.leases.close_session(session.id, user="main", bucket=BUCKET)
    await world.leases.stopped_cleanly()
    await world.session(ttl_ms=1_000)
    await world.close()
    await world.open(boot_id="another", now_boot_ms=0)
    assert world.leases.usage().quiet
    assert world.leases.end_quiet(now_boot_ms=2_000)


async def test_a_rebuilt_catalog_is_quiet_for_the_longest_ttl(world: LmdbWorld) -> None:
    await world.database.write(CatalogReplay().finish)
    await world.close()
    await world.open(boot_id="another", now_boot_ms=0)
    assert world.leases.usage().quiet
    await world.session(ttl_ms=5_000, now_boot_ms=0)
    assert not world.leases.end_quiet(now_boot_ms=LIMITS.ttl_ms_max + 999)
    assert world.leases.end_quiet(now_boot_ms=LIMITS.ttl_ms_max + 1_000)


# -- removals at the same time -----------------------------------------------------------------------------------------


async def test_a_pin_and_a_claim_never_both_have_their_way(world: LmdbWorld) -> None:
    session = await world.session()
    for turn in range(40):
        rows = chain(f"race{turn}", 3, memory=turn % 2 == 0)
        await world.put(rows)
        tail = rows[-1].key
        pin, claim = world.match(as_ids(keys_of(rows)), session), world.remove_unless_pinned([tail])
        if turn % 4 < 2:
            found, gone = await asyncio.gather(pin, claim)
        else:
            gone, found = await asyncio.gather(claim, pin)
        assert found.pin is not None
        assert found.tail is not None
        assert found.matched == (2 if gone == [True] else 3)
        assert world.holds_row(tail) == (gone == [False])
        assert not await world.reclaims(session, as_of=0, release=[found.pin])


async def test_tails_that_a_removal_in_flight_takes_are_told_as_gone(world: LmdbWorld) -> None:
    rows = [chunk(name(f"k{index}"), None, memory=index % 2 == 0) for index in range(6)]
    await world.put(rows)
    session = await world.session()
    removal = asyncio.create_task(world.remove_unless_pinned([row.key for row in rows[:3]]))
    await asyncio.sleep(0)
    result = await world.leases.pin_tails(session.id, keys_of(rows), user="main", bucket=BUCKET, now_boot_ms=NOW)
    assert await removal == [True] * 3
    assert [answer.pin is None for answer in result.pins] == [True] * 3 + [False] * 3
    assert [world.holds_row(row.key) for row in rows] == [False] * 3 + [True] * 3


async def test_a_pin_that_waits_in_the_writer_keeps_later_removals_off(world: LmdbWorld) -> None:
    rows = [chunk(name(f"k{index}"), None, memory=True) for index in range(80)]
    await world.put(rows)
    session = await world.session()
    pinning = asyncio.create_task(world.match(KeyList(keys_of(rows)), session))
    while world.leases.usage().pins == 0:
        await asyncio.sleep(0)
        if world.database._in_flight:
            assert await world.remove_unless_pinned([rows[5].key], inline=True) == [False]
    assert (await pinning).matched == 80
    assert world.holds_row(rows[5].key)


async def test_a_match_of_rows_beside_removals_is_a_run_that_was_there(world: LmdbWorld) -> None:
    rows = chain("a", 300)
    await world.put(rows)

    async def shorten() -> None:
        for row in reversed(rows[200:]):
            await world.remove_unless_pinned([row.key])

    async def read() -> list[int]:
        lengths: list[int] = []
        while len(lengths) < 30:
            found = await world.match(as_ids(keys_of(rows)), rows=True)
            assert [row.key for row in found.rows] == keys_of(rows[: found.matched])
            lengths.append(found.matched)
        return lengths

    lengths, _ = await asyncio.gather(read(), shorten())
    assert lengths == sorted(lengths, reverse=True)
    assert min(lengths) >= 200


async def test_what_is_being_claimed_is_absent(world: LmdbWorld) -> None:
    rows, loose = chain("a", 4), [chunk(name(f"l{index}"), None) for index in range(100)]
    await world.put([*rows, *loose])
    world.claiming = {(BUCKET, rows[3].key), (BUCKET, loose[80].key)}
    assert (await world.match(as_ids(keys_of(rows)))).matched == 3
    assert (await world.match(as_ids(keys_of(loose)))).matched == 80


async def test_long_lists_let_others_have_their_turn_and_are_rescued_as_they_are_found(world: LmdbWorld) -> None:
    rows = [chunk(name(f"k{index}"), None) for index in range(600)]
    await world.put(rows)
    world.marked = {(BUCKET, row.key) for row in rows}
    matching = asyncio.create_task(world.match(as_ids(keys_of(rows))))
    left = [len(world.marked)]
    while not matching.done():
        await asyncio.sleep(0)
        left.append(len(world.marked))
    assert matching.result().matched == 600
    assert len(set(left)) >= 5
    assert left[-1] == 0


async def test_renewals_and_pins_of_one_session_do_not_overtake_each_other(world: LmdbWorld) -> None:
    """Many loose pins go through the writer; renewals beside them must stand, and so must what they count."""
    rows = [chunk(f"k{index}", None) for index in range(70)]
    await world.put(rows)
    session = await world.session(ttl_ms=30_000)
    pinning = asyncio.create_task(world.match(KeyList(keys_of(rows)), session))
    now = NOW
    while not pinning.done():
        now += 29_999
        await world.reclaims(session, as_of=0, now_boot_ms=now)
        await asyncio.sleep(0)
    pin = pinning.result().pin
    assert pin is not None
    assert not await world.reclaims(session, pin, as_of=1, now_boot_ms=now + 30_000)
    await world.leases.close_session(session.id, user="main", bucket=BUCKET)
    assert world.entries() == [0] * 6


async def test_no_renewal_at_once_while_a_change_of_the_session_is_on_its_way(world: LmdbWorld) -> None:
    rows = [chunk(f"k{index}", None) for index in range(70)]
    await world.put(rows)
    session = await world.session(ttl_ms=30_000)

    def renew(*pins: bytes) -> bool | None:
        renewal = world.leases.renew_at_once(
            session.id,
            user="main",
            bucket=BUCKET,
            as_of=1,
            pins=len(pins),
            pins_digest=digest_of(*pins),
            now_boot_ms=NOW,
        )
        return None if renewal is None else renewal.reclaim

    pinning = asyncio.create_task(world.match(KeyList(keys_of(rows)), session))
    while not world.database._in_flight:  # noqa: ASYNC110 - what is waited for is inside the code under test
        await asyncio.sleep(0)
    assert renew() is None
    pin = (await pinning).pin
    assert pin is not None
    assert renew(pin) is False


async def test_a_list_whose_names_only_begin_alike_gives_no_rows_that_are_not_there(world: LmdbWorld) -> None:
    """Sums are of the first halves of ids: such a list is nobody's but a forger's, and gets no more than what is stored."""
    rows = chain("a", 8)
    await world.put(rows)
    keys = keys_of(rows)
    forged = [*keys[:3], keys[3][:32] + "0" * 32, *keys[4:]]
    found = await world.match(as_ids(forged), rows=True)
    assert [row.key for row in found.rows] == keys[:3]
    session = await world.session()
    found = await world.match(as_ids(forged), session, rows=True)
    assert found.matched == 3
    assert world.leases.usage().pins == 1
    assert [world.holds_row(row.key) for row in rows] == [row is rows[2] for row in rows]


async def test_a_session_of_many_pins_goes_in_steps_and_leaves_nothing(tmp_path: Path) -> None:
    world = await LmdbWorld(tmp_path, LeaseLimits(pins_per_session=4096)).open()
    rows = [chunk(name(f"k{index}"), None) for index in range(1500)]
    await world.put(rows)
    session, kept = await world.session(), await world.session()
    for start in range(0, 1500, 300):
        tails = keys_of(rows)[start : start + 300]
        await world.leases.pin_tails(session.id, tails, user="main", bucket=BUCKET, now_boot_ms=NOW)
    assert world.leases.usage().pins == 1500
    closing = asyncio.create_task(world.leases.close_session(session.id, user="main", bucket=BUCKET))
    await asyncio.sleep(0)
    with pytest.raises(NoSuchSessionError):
        await world.reclaims(session, as_of=0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert 0 < world.leases.usage().pins < 1500
    assert await world.leases.expire(now_boot_ms=NOW) == 1
    assert world.leases.usage().pins == 0
    await world.leases.close_session(kept.id, user="main", bucket=BUCKET)
    assert world.entries() == [0] * 6
    assert digest_of() == digest_of(*[])
    await world.close()
