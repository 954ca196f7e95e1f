"""What every driver of sessions, pins and match must do. A driver's tests subclass `LeaseContract` and give the `world` fixture.

A world is the leases of one catalog, with a door to its rows: what commits, deletes and gc do there is not the subject here.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain as all_of
from itertools import count

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvobj.catalog.chain_rows import placed
from kvobj.catalog.chunk_list import ChunkList, IdList, KeyList
from kvobj.catalog.lease_protocol import LeaseLimits, Leases, MatchResult
from kvobj.catalog.lease_rows import SessionRow
from kvobj.catalog.rows import BlobRef, Durability, ObjectRow
from kvobj.errors import (
    BatchTooLargeError,
    NoSuchBucketError,
    NoSuchSessionError,
    PinLimitExceededError,
    SessionExpiredError,
)
from kvobj.ids import make_blob_id

BUCKET = "cache"
OTHER_BUCKET = "other"
LIMITS = LeaseLimits(ttl_ms_min=1000, ttl_ms_max=60_000, sessions_per_user=8, pins_per_session=100)
NOW = 5_000_000
_sequences = count(1)


def name(label: object) -> str:
    """A chunk id's key for a label."""
    return hashlib.sha256(str(label).encode()).hexdigest()


def chunk(key: str, parent: ObjectRow | str | None, *, size_bytes: int = 100, memory: bool = False) -> ObjectRow:
    """A row in its place: below a row, a first chunk (""), or loose (None)."""
    number = next(_sequences)
    row = ObjectRow(
        bucket=BUCKET,
        key=key,
        blobs=(BlobRef(make_blob_id(7, number), size_bytes, size_bytes + 512, b"d" * 32),),
        size_bytes=size_bytes,
        etag=f"e{number}",
        modified_ms=1,
        owner="main",
        durability=Durability.MEMORY if memory else Durability.LOCAL,
        digest=number.to_bytes(32, "big"),
        sequence=number,
        parent=parent.key if isinstance(parent, ObjectRow) else parent,
        tokens=16,
    )
    return placed(row, parent if isinstance(parent, ObjectRow) else None, sequence=number)


def chain(label: str, length: int, *, below: ObjectRow | str = "", memory: bool = False) -> list[ObjectRow]:
    """Rows of a chain, the first one first."""
    rows: list[ObjectRow] = []
    for depth in range(length):
        rows.append(chunk(name(f"{label}-{depth}"), rows[-1] if rows else below, memory=memory))
    return rows


def keys_of(rows: Sequence[ObjectRow]) -> list[str]:
    return [row.key for row in rows]


def as_ids(keys: Sequence[str]) -> IdList:
    return IdList(b"".join(bytes.fromhex(key) for key in keys))


def digest_of(*pins: bytes) -> bytes:
    return blake3(b"".join(sorted(pins))).digest()


class World(ABC):
    """The leases under test and the rows that they see. `marked`: (bucket, key) that policy has condemned."""

    def __init__(self) -> None:
        self.marked: set[tuple[str, str]] = set()
        self.claiming: set[tuple[str, str]] = set()

    @property
    @abstractmethod
    def leases(self) -> Leases: ...

    @abstractmethod
    async def put(self, rows: Sequence[ObjectRow]) -> None: ...

    @abstractmethod
    async def remove(self, keys: Sequence[str]) -> None: ...

    @abstractmethod
    def holds_row(self, key: str) -> bool: ...

    @abstractmethod
    def holds_blob(self, blob_id: bytes) -> bool: ...

    def forget_marks(self, names: Sequence[tuple[str, str]]) -> None:
        self.marked.difference_update(names)

    async def session(
        self, *, user: str = "main", bucket: str = BUCKET, ttl_ms: int = 30_000, now_boot_ms: int = NOW
    ) -> SessionRow:
        return await self.leases.open_session(
            user=user, bucket=bucket, holder="h", ttl_ms=ttl_ms, now_boot_ms=now_boot_ms
        )

    async def match(
        self, chunks: ChunkList, session: SessionRow | None = None, *, rows: bool = False, now_boot_ms: int = NOW
    ) -> MatchResult:
        pin_for = None if session is None else session.id
        return await self.leases.match(BUCKET, chunks, rows=rows, pin_for=pin_for, user="main", now_boot_ms=now_boot_ms)

    async def reclaims(
        self,
        session: SessionRow,
        *pins: bytes,
        as_of: int,
        release: Sequence[bytes] = (),
        now_boot_ms: int = NOW,
    ) -> bool:
        renewal = await self.leases.renew(
            session.id,
            user="main",
            bucket=BUCKET,
            as_of=as_of,
            pins=len(pins),
            pins_digest=digest_of(*pins),
            release=release,
            now_boot_ms=now_boot_ms,
        )
        assert renewal.ttl_ms == session.ttl_ms
        return renewal.reclaim


class Searching:
    """Match, without pins."""

    async def test_a_whole_chain_is_found_with_its_totals(self, world: World) -> None:
        rows = chain("a", 20)
        await world.put(rows)
        found = await world.match(as_ids(keys_of(rows)), rows=True)
        assert (found.matched, found.tokens, found.size_bytes) == (20, 320, 2000)
        assert found.tail == rows[-1]
        assert [(row.key, row.size_bytes, row.digest, row.blob_id, row.codec) for row in found.rows] == [
            (row.key, row.size_bytes, row.digest, row.blobs[0].blob_id, row.blobs[0].codec) for row in rows
        ]
        assert found.pin is None

    @pytest.mark.parametrize("stored", [0, 1, 2, 7, 8, 9, 99, 100])
    async def test_the_run_ends_where_the_chain_does(self, world: World, stored: int) -> None:
        rows = chain("a", 100)
        await world.put(rows[:stored])
        found = await world.match(as_ids(keys_of(rows)))
        assert found.matched == stored
        assert found.tail == (rows[stored - 1] if stored else None)

    async def test_a_stranger_in_the_list_ends_the_run(self, world: World) -> None:
        rows, strangers = chain("a", 30), chain("b", 30)
        await world.put([*rows, *strangers])
        keys = keys_of(rows)
        for at in range(30):
            mixed = [*keys[:at], strangers[(at + 1) % 30].key, *keys[at + 1 :]]
            assert (await world.match(as_ids(mixed))).matched == at
            absent = [*keys[:at], name("absent"), *keys[at + 1 :]]
            assert (await world.match(as_ids(absent))).matched == at

    async def test_a_list_that_starts_inside_a_chain_matches_nothing(self, world: World) -> None:
        rows = chain("a", 5)
        await world.put(rows)
        assert (await world.match(as_ids(keys_of(rows)[1:]))).matched == 0

    async def test_keys_of_any_kind_make_chains(self, world: World) -> None:
        rows = [chunk("llama/first", "")]
        rows += [chunk("llama/" + "x" * 900, rows[-1])]
        rows += [chunk("llama/third", rows[-1], memory=True)]
        await world.put(rows)
        found = await world.match(KeyList([*keys_of(rows), "llama/fourth"]), rows=True)
        assert found.matched == 3
        assert [row.key for row in found.rows] == keys_of(rows)

    async def test_loose_chunks_match_one_by_one(self, world: World) -> None:
        rows = [chunk(f"k{index}", None) for index in range(5)]
        await world.put(rows)
        found = await world.match(KeyList(["k3", "k0", "k0", "k4", "absent", "k1"]), rows=True)
        assert (found.matched, found.tokens, found.size_bytes) == (4, 64, 400)
        assert [row.key for row in found.rows] == ["k3", "k0", "k0", "k4"]
        assert found.tail == rows[4]

    async def test_loose_chunks_go_on_behind_a_chain(self, world: World) -> None:
        rows, loose = chain("a", 3), [chunk(f"k{index}", None) for index in range(2)]
        tree = [chunk("r", None)]
        tree += [chunk("s", tree[-1])]
        tree += [chunk("t", tree[-1])]
        await world.put([*rows, *loose, *tree])
        keys = [*keys_of(rows), "k0", "k1", "r", "s", "t", rows[0].key]
        found = await world.match(KeyList(keys))
        assert (found.matched, found.size_bytes, found.tokens) == (8, 800, 128)
        assert (await world.match(KeyList(["r", "s", "t", "k0"]))).matched == 4

    async def test_long_lists_of_loose_chunks_match_whole(self, world: World) -> None:
        rows = [chunk(name(f"loose{index}"), None, memory=index % 2 == 0) for index in range(2100)]
        await world.put(rows)
        found = await world.match(as_ids([*keys_of(rows), name("absent")]), rows=True)
        assert (found.matched, found.size_bytes) == (2100, 210_000)
        assert len(found.rows) == 2100
        assert found.tail == rows[-1]
        await world.remove([rows[1500].key])
        assert (await world.match(KeyList(keys_of(rows)))).matched == 1500

    async def test_chains_of_both_environments_match(self, world: World) -> None:
        rows = chain("a", 4)
        rows += chain("b", 4, below=rows[-1], memory=True)
        await world.put(rows)
        found = await world.match(as_ids(keys_of(rows)), rows=True)
        assert found.matched == 8
        assert len(found.rows) == 8

    async def test_an_empty_list_matches_nothing(self, world: World) -> None:
        session = await world.session()
        assert await world.match(KeyList([]), session) == MatchResult(0, 0, 0, None)

    async def test_match_rescues_what_protects_the_run(self, world: World) -> None:
        rows, beyond = chain("a", 4), chain("b", 2)
        loose = [chunk("k0", None), chunk("k1", None)]
        await world.put([*rows[:3], *beyond, *loose])
        world.marked = {(BUCKET, rows[2].key), (BUCKET, "k0"), (BUCKET, "k1"), (BUCKET, beyond[1].key)}
        await world.match(as_ids([*keys_of(rows), *keys_of(beyond)]))
        assert world.marked == {(BUCKET, "k0"), (BUCKET, "k1"), (BUCKET, beyond[1].key)}
        await world.match(KeyList([*keys_of(rows[:3]), "k0", "k1"]))
        assert world.marked == {(BUCKET, beyond[1].key)}

    async def test_an_unknown_bucket_is_an_error(self, world: World) -> None:
        with pytest.raises(NoSuchBucketError):
            await world.leases.match("absent", KeyList(["k"]), now_boot_ms=NOW)

    async def test_any_list_matches_as_far_as_a_plain_reading_says(self, world: World) -> None:
        """Chains that branch, a chain that hangs on a loose chunk, loose chunks and absent ones, in every order."""
        trunk = chain("t", 9)
        branch = chain("b", 6, below=trunk[4], memory=True)
        root = chunk(name("root"), None)
        hanging = [root, *chain("h", 5, below=root)]
        loose = [chunk(name(f"l{index}"), None) for index in range(3)]
        stored = {row.key: row for row in [*trunk, *branch, *hanging, *loose]}
        await world.put(list(stored.values()))
        whole = [keys_of(trunk), [*keys_of(trunk[:5]), *keys_of(branch)], keys_of(hanging), keys_of(loose)]
        piece = st.builds(
            lambda keys, start, stop: keys[start:stop],
            st.sampled_from(whole),
            st.sampled_from([0, 0, 0, 1, 3]),
            st.sampled_from([None, None, 1, 4, -1]),
        )
        element = st.sampled_from([[key] for key in [*stored, name("absent"), name("also absent")]])
        lists = st.lists(st.one_of(piece, piece, element), max_size=5).map(
            lambda parts: list(all_of.from_iterable(parts))
        )
        session = await world.session()

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.tuples(lists, st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4))
        def drawn(cases: list[tuple[list[str], bool, bool, bool]]) -> None:
            examples.append(cases)

        examples: list[list[tuple[list[str], bool, bool, bool]]] = []
        drawn()
        assert len(examples) >= 200
        for keys, ids, rows, pins in [case for cases in examples for case in cases]:
            chunks = as_ids(keys) if ids else KeyList(keys)
            found = await world.match(chunks, session if pins else None, rows=rows)
            expected = plain_reading(keys, stored)
            assert found.matched == len(expected), keys
            assert found.size_bytes == 100 * len(expected)
            assert found.tokens == 16 * len(expected)
            assert found.tail == (expected[-1] if expected else None)
            assert [row.key for row in found.rows] == (keys_of(expected) if rows else [])
            assert (found.pin is not None) == (pins and bool(expected))
            if found.pin is not None:
                pin = await world.leases.pin(found.pin, user="main", bucket=BUCKET)
                assert pin is not None
                assert all([await world.leases.covers(pin, row.key) for row in expected])
                assert not await world.leases.covers(pin, name("absent"))
                await world.reclaims(session, as_of=0, release=[found.pin])


def plain_reading(keys: Sequence[str], stored: dict[str, ObjectRow]) -> list[ObjectRow]:
    """The protocol's sentence, as a loop."""
    run: list[ObjectRow] = []
    for index, key in enumerate(keys):
        row = stored.get(key)
        if row is None:
            return run
        if row.parent == "" and index > 0:
            return run
        if row.parent and (index == 0 or row.parent != keys[index - 1]):
            return run
        run.append(row)
    return run


class Pinning:
    """Pins and what they protect."""

    async def test_a_match_pins_its_tail(self, world: World) -> None:
        rows = chain("a", 6)
        await world.put(rows)
        session = await world.session(ttl_ms=20_000)
        found = await world.match(as_ids(keys_of(rows)), session, now_boot_ms=NOW + 500)
        assert found.pin is not None
        assert (found.grant, found.deadline_ms) == (1, 19_500)
        assert [world.holds_row(row.key) for row in rows] == [False] * 5 + [True]
        assert world.holds_blob(rows[-1].blobs[0].blob_id)
        assert world.leases.usage().pins == 1
        again = await world.match(as_ids(keys_of(rows)), session)
        assert again.pin != found.pin
        assert again.grant == 2

    async def test_a_miss_pins_nothing(self, world: World) -> None:
        session = await world.session()
        found = await world.match(as_ids([name("absent")]), session)
        assert (found.matched, found.pin, found.grant) == (0, None, 0)
        assert world.leases.usage().pins == 0

    async def test_every_loose_chunk_of_a_match_is_pinned(self, world: World) -> None:
        rows = [chunk(f"k{index}", None, memory=index % 2 == 0) for index in range(90)]
        await world.put([*rows, *chain("a", 3)])
        session = await world.session()
        found = await world.match(KeyList(keys_of(rows)), session)
        assert found.pin is not None
        assert all(world.holds_row(row.key) for row in rows)
        assert not await world.reclaims(session, as_of=1, release=[found.pin])
        assert not any(world.holds_row(row.key) for row in rows)

    async def test_a_pin_covers_ancestors_also_removed_ones_up_to_the_gap(self, world: World) -> None:
        rows, others = chain("a", 6), chain("b", 2)
        await world.put([*rows, *others])
        session = await world.session()
        found = await world.match(as_ids(keys_of(rows)[:5]), session)
        assert found.pin is not None
        pin = await world.leases.pin(found.pin, user="main", bucket=BUCKET)
        assert pin is not None
        covered = [await world.leases.covers(pin, row.key) for row in rows]
        assert covered == [True] * 5 + [False]
        assert not await world.leases.covers(pin, others[0].key)

    async def test_tails_get_pins_of_their_own(self, world: World) -> None:
        rows = chain("a", 3)
        await world.put([*rows, chunk("k", None)])
        session = await world.session()
        first = await world.leases.pin_tails(
            session.id,
            [rows[2].key, "absent", "k", "k"],
            user="main",
            bucket=BUCKET,
            now_boot_ms=NOW + 1000,
        )
        assert [answer.tail for answer in first.pins] == [rows[2].key, "absent", "k", "k"]
        assert [answer.pin is None for answer in first.pins] == [False, True, False, False]
        assert (first.grant, first.deadline_ms) == (1, 29_000)
        pins = [answer.pin for answer in first.pins if answer.pin is not None]
        assert len(set(pins)) == 3
        second = await world.leases.pin_tails(
            session.id, [rows[1].key], release=[pins[0], pins[1]], user="main", bucket=BUCKET, now_boot_ms=NOW
        )
        assert second.grant == 2
        assert not world.holds_row(rows[2].key)
        assert world.holds_row("k")
        assert world.holds_row(rows[1].key)
        assert world.leases.usage().pins == 2

    async def test_pinning_rescues(self, world: World) -> None:
        await world.put([chunk("k", None), chunk("l", None)])
        session = await world.session()
        world.marked = {(BUCKET, "k"), (BUCKET, "l")}
        await world.leases.pin_tails(session.id, ["k"], user="main", bucket=BUCKET, now_boot_ms=NOW)
        assert world.marked == {(BUCKET, "l")}

    async def test_pins_are_their_users_in_their_bucket(self, world: World) -> None:
        await world.put([chunk("k", None)])
        session = await world.session()
        found = await world.match(KeyList(["k"]), session)
        assert found.pin is not None
        assert await world.leases.pin(found.pin, user="main", bucket=BUCKET) is not None
        assert await world.leases.pin(found.pin, user="mallory", bucket=BUCKET) is None
        assert await world.leases.pin(found.pin, user="main", bucket=OTHER_BUCKET) is None
        for pin_id in (b"", b"x" * 16, b"y" * 600):
            assert await world.leases.pin(pin_id, user="main", bucket=BUCKET) is None
        other = await world.session()
        assert not await world.reclaims(other, as_of=0, release=[found.pin])
        assert world.holds_row("k")

    async def test_a_pin_outlives_its_row(self, world: World) -> None:
        row = chunk("k", None)
        await world.put([row])
        session = await world.session()
        await world.match(KeyList(["k"]), session)
        await world.remove(["k"])
        assert world.holds_blob(row.blobs[0].blob_id)
        assert world.holds_row("k")

    async def test_too_many_pins_are_refused_and_change_nothing(self, world: World) -> None:
        rows = [chunk(f"k{index}", None) for index in range(LIMITS.pins_per_session + 1)]
        await world.put(rows)
        session = await world.session()
        with pytest.raises(PinLimitExceededError):
            await world.match(KeyList(keys_of(rows)), session)
        assert world.leases.usage().pins == 0
        found = await world.match(KeyList(keys_of(rows)[:-1]), session)
        assert found.pin is not None
        with pytest.raises(PinLimitExceededError):
            await world.leases.pin_tails(session.id, ["k0"], user="main", bucket=BUCKET, now_boot_ms=NOW)
        swapped = await world.leases.pin_tails(
            session.id, ["k0"], release=[found.pin], user="main", bucket=BUCKET, now_boot_ms=NOW
        )
        assert swapped.pins[0].pin is not None
        with pytest.raises(BatchTooLargeError):
            await world.leases.pin_tails(session.id, ["k0"] * 101, user="main", bucket=BUCKET, now_boot_ms=NOW)

    async def test_pinned_bytes_of_a_user_are_bounded(self, bounded: World) -> None:
        rows = chain("a", 10)
        await bounded.put(rows)
        first, second = await bounded.session(), await bounded.session()
        found = await bounded.match(as_ids(keys_of(rows)[:6]), first)
        with pytest.raises(PinLimitExceededError):
            await bounded.match(as_ids(keys_of(rows)[:5]), second)
        assert bounded.leases.usage().pins == 1
        assert (await bounded.match(as_ids(keys_of(rows)[:4]), second)).pin is not None
        assert found.pin is not None
        await bounded.leases.close_session(second.id, user="main", bucket=BUCKET)
        assert not await bounded.reclaims(first, as_of=1, release=[found.pin])
        assert (await bounded.match(as_ids(keys_of(rows)), first)).pin is not None


class Sessions:
    """Their life."""

    async def test_a_ttl_is_cut_to_its_bounds(self, world: World) -> None:
        short = await world.session(ttl_ms=1)
        long = await world.session(ttl_ms=10**9)
        assert (short.ttl_ms, long.ttl_ms) == (1000, 60_000)
        assert long.expires_boot_ms == NOW + 60_000
        assert long.epoch > short.epoch
        assert len({short.id, long.id}) == 2
        assert world.leases.usage().sessions == 2

    async def test_a_session_needs_its_bucket(self, world: World) -> None:
        with pytest.raises(NoSuchBucketError):
            await world.session(bucket="absent")
        assert world.leases.usage().sessions == 0

    async def test_sessions_of_a_user_are_bounded(self, world: World) -> None:
        sessions = [await world.session() for _ in range(LIMITS.sessions_per_user)]
        with pytest.raises(PinLimitExceededError):
            await world.session()
        await world.session(user="another")
        await world.leases.close_session(sessions[0].id, user="main", bucket=BUCKET)
        await world.session()

    async def test_to_others_a_session_does_not_exist(self, world: World) -> None:
        await world.put([chunk("k", None)])
        session = await world.session()
        for user, bucket in (("mallory", BUCKET), ("main", OTHER_BUCKET)):
            with pytest.raises(NoSuchSessionError):
                await world.leases.close_session(session.id, user=user, bucket=bucket)
            with pytest.raises(NoSuchSessionError):
                await world.leases.pin_tails(session.id, ["k"], user=user, bucket=bucket, now_boot_ms=NOW)
            with pytest.raises(NoSuchSessionError):
                await world.leases.match(bucket, KeyList(["k"]), pin_for=session.id, user=user, now_boot_ms=NOW)
            with pytest.raises(NoSuchSessionError):
                await world.leases.renew(
                    session.id, user=user, bucket=bucket, as_of=0, pins=0, pins_digest=digest_of(), now_boot_ms=NOW
                )
        for session_id in (b"", b"x" * 16, b"y" * 600):
            with pytest.raises(NoSuchSessionError):
                await world.leases.close_session(session_id, user="main", bucket=BUCKET)
        assert world.leases.usage().pins == 0

    async def test_renewal_extends_and_compares(self, world: World) -> None:
        rows = chain("a", 3)
        await world.put(rows)
        session = await world.session()
        first = await world.match(as_ids(keys_of(rows)), session)
        second = await world.match(as_ids(keys_of(rows)), session)
        assert first.pin is not None
        assert second.pin is not None
        assert not await world.reclaims(session, as_of=0)
        assert not await world.reclaims(session, first.pin, as_of=1)
        assert not await world.reclaims(session, first.pin, second.pin, as_of=2, now_boot_ms=NOW + 25_000)
        assert await world.reclaims(session, first.pin, as_of=2, now_boot_ms=NOW + 50_000)
        assert await world.reclaims(session, first.pin, b"x" * 16, as_of=2, now_boot_ms=NOW + 75_000)
        assert world.leases.usage().pins == 2
        third = await world.match(as_ids(keys_of(rows)), session, now_boot_ms=NOW + 100_000)
        assert third.deadline_ms == 5_000
        assert not await world.reclaims(
            session, second.pin, as_of=2, release=[first.pin, b"unknown", b"", b"z" * 600], now_boot_ms=NOW + 100_000
        )
        assert world.leases.usage().pins == 2

    async def test_a_renewal_at_once_is_as_any_other(self, world: World) -> None:
        rows = chain("a", 3)
        await world.put(rows)
        session = await world.session(ttl_ms=30_000)
        found = await world.match(as_ids(keys_of(rows)), session)
        assert found.pin is not None

        def renew(*pins: bytes, now_boot_ms: int, user: str = "main") -> tuple[int, bool]:
            renewal = world.leases.renew_at_once(
                session.id,
                user=user,
                bucket=BUCKET,
                as_of=1,
                pins=len(pins),
                pins_digest=digest_of(*pins),
                now_boot_ms=now_boot_ms,
            )
            assert renewal is not None
            return renewal.ttl_ms, renewal.reclaim

        assert renew(found.pin, now_boot_ms=NOW + 29_000) == (30_000, False)
        assert renew(now_boot_ms=NOW + 58_000) == (30_000, True)
        assert renew(found.pin, now_boot_ms=NOW + 87_000) == (30_000, False)
        assert await world.leases.expire(now_boot_ms=NOW + 117_000) == 0
        with pytest.raises(NoSuchSessionError):
            renew(now_boot_ms=NOW + 100_000, user="mallory")
        with pytest.raises(SessionExpiredError):
            renew(found.pin, now_boot_ms=NOW + 117_001)

    async def test_a_renewal_that_arrived_before_another_and_comes_behind_it_takes_nothing_from_it(
        self, world: World
    ) -> None:
        session = await world.session(ttl_ms=30_000)
        for now_boot_ms in (NOW + 20_050, NOW + 20_000):
            world.leases.renew_at_once(
                session.id,
                user="main",
                bucket=BUCKET,
                as_of=0,
                pins=0,
                pins_digest=digest_of(),
                now_boot_ms=now_boot_ms,
            )
        assert not await world.reclaims(session, as_of=0, now_boot_ms=NOW + 50_050)

    async def test_a_session_lasts_as_long_as_its_holder_says_the_same_again(self, world: World) -> None:
        rows = chain("a", 3)
        await world.put(rows)
        session = await world.session(ttl_ms=30_000)
        found = await world.match(as_ids(keys_of(rows)), session)
        assert found.pin is not None
        for now in range(NOW + 10_000, NOW + 100_000, 10_000):
            assert not await world.reclaims(session, found.pin, as_of=1, now_boot_ms=now)
            assert await world.leases.expire(now_boot_ms=now + 9_000) == 0
        with pytest.raises(NoSuchSessionError):
            await world.leases.renew(
                session.id,
                user="mallory",
                bucket=BUCKET,
                as_of=1,
                pins=1,
                pins_digest=digest_of(found.pin),
                now_boot_ms=NOW + 100_000,
            )
        assert world.holds_row(rows[2].key)
        with pytest.raises(SessionExpiredError):
            await world.reclaims(session, found.pin, as_of=1, now_boot_ms=NOW + 120_001)
        assert await world.leases.expire(now_boot_ms=NOW + 120_500) == 1
        with pytest.raises(NoSuchSessionError):
            await world.reclaims(session, found.pin, as_of=1, now_boot_ms=NOW + 120_500)
        assert not world.holds_row(rows[2].key)

    async def test_what_was_agreed_on_is_compared_anew_when_pins_have_changed(self, world: World) -> None:
        rows = chain("a", 3)
        await world.put(rows)
        session = await world.session()
        pins = [(await world.match(as_ids(keys_of(rows)), session)).pin or b"" for _ in range(2)]
        for _ in range(2):
            assert not await world.reclaims(session, *pins, as_of=2)
        await world.leases.pin_tails(session.id, [], release=[pins[0]], user="main", bucket=BUCKET, now_boot_ms=NOW)
        assert await world.reclaims(session, *pins, as_of=2)
        assert not await world.reclaims(session, pins[1], as_of=2)
        assert not await world.reclaims(session, pins[1], as_of=2, release=[pins[0]])
        await world.leases.close_session(session.id, user="main", bucket=BUCKET)
        with pytest.raises(NoSuchSessionError):
            await world.reclaims(session, pins[1], as_of=2)

    async def test_a_closed_session_takes_its_pins_along(self, world: World) -> None:
        rows = [chunk(f"k{index}", None) for index in range(100)]
        await world.put(rows)
        session, other = await world.session(), await world.session()
        found = await world.match(KeyList(keys_of(rows)), session)
        await world.match(KeyList(["k3"]), other)
        await world.leases.close_session(session.id, user="main", bucket=BUCKET)
        assert found.pin is not None
        assert await world.leases.pin(found.pin, user="main", bucket=BUCKET) is None
        assert [row.key for row in rows if world.holds_row(row.key)] == ["k3"]
        assert (world.leases.usage().sessions, world.leases.usage().pins) == (1, 1)
        with pytest.raises(NoSuchSessionError):
            await world.leases.close_session(session.id, user="main", bucket=BUCKET)

    async def test_a_session_expires_half_a_second_late(self, world: World) -> None:
        rows = chain("a", 2)
        await world.put(rows)
        session, longer = await world.session(ttl_ms=10_000), await world.session(ttl_ms=20_000)
        await world.match(as_ids(keys_of(rows)), session)
        assert not await world.reclaims(session, as_of=0, now_boot_ms=NOW + 10_000)
        end = NOW + 20_000
        for late_ms in (1, 499):
            with pytest.raises(SessionExpiredError):
                await world.reclaims(session, as_of=0, now_boot_ms=end + late_ms)
            with pytest.raises(SessionExpiredError):
                await world.match(as_ids(keys_of(rows)), session, now_boot_ms=end + late_ms)
            assert await world.leases.expire(now_boot_ms=end + late_ms) == 0
            assert world.holds_row(rows[1].key)
        assert not await world.reclaims(longer, as_of=0, now_boot_ms=end)
        assert await world.leases.expire(now_boot_ms=end + 500) == 1
        assert not world.holds_row(rows[1].key)
        with pytest.raises(NoSuchSessionError):
            await world.reclaims(session, as_of=0, now_boot_ms=end)
        assert (world.leases.usage().sessions, world.leases.usage().pins) == (1, 0)

    async def test_expiry_is_bounded(self, world: World) -> None:
        for _ in range(5):
            await world.session(ttl_ms=1000)
        late = NOW + 60_000
        assert await world.leases.expire(now_boot_ms=late, limit=3) == 3
        assert world.leases.usage().sessions == 2
        assert await world.leases.expire(now_boot_ms=late) == 2
        assert await world.leases.expire(now_boot_ms=late) == 0

    async def test_a_new_store_is_not_quiet(self, world: World) -> None:
        assert not world.leases.usage().quiet
        assert world.leases.end_quiet(now_boot_ms=NOW)


class LeaseContract(Searching, Pinning, Sessions):
    """All of it."""
