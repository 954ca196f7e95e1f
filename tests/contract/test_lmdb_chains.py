"""Chains in the LMDB driver where two writers meet, where the process or the machine dies, and where the catalog is made anew."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from catalog_consistency import assert_consistent
from catalog_contract import CLASSES, prepared
from chain_contract import (
    FIRST,
    KV,
    USER,
    chunk,
    claim,
    condemn,
    hidden_keys,
    live_keys,
    name,
    named,
    pin,
    put,
    put_chain,
    queued,
    unpin,
    with_chunks,
)
from remote_contract import namespace
from test_lmdb_catalog import Place

from kvobj.catalog.encoding import EXPOSED
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.removal_changes import Descent
from kvobj.catalog.rows import ChunkName, CommitOutcome, Durability, ObjectRow, WriteCondition
from kvobj.database import WriteView
from kvobj.errors import BusyError, KvobjError, NoSuchBucketError, NoSuchNamespaceError, ParentNotFoundError


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
async def catalog(place: Place) -> AsyncIterator[LmdbCatalog]:
    catalog = await place.open()
    await with_chunks(await prepared(catalog))
    yield catalog
    assert place.database is not None
    assert_consistent(place.database)
    await place.close(catalog)


async def raised(catalog: LmdbCatalog, *keys: str) -> list[bool]:
    rows = await catalog.lookup(KV, keys)
    return await catalog.raise_durability(
        [msgspec.structs.replace(row, durability=Durability.LOCAL) for row in rows if row is not None]
    )


async def until_claiming(catalog: LmdbCatalog, key: str) -> None:
    for _ in range(100_000):
        if catalog._marks.is_claiming(KV, key):
            return
        await asyncio.sleep(0)
    raise AssertionError("no claim began")


# -- two writers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", CLASSES)
@pytest.mark.parametrize("child", CLASSES)
async def test_a_child_that_comes_behind_a_delete_of_its_parent_is_refused(
    catalog: LmdbCatalog, parent: Durability, child: Durability
) -> None:
    await put(catalog, chunk("a", 1, durability=parent))
    deleted, stored = await asyncio.gather(
        catalog.delete(KV, ["a"], now_ms=5),
        catalog.commit(chunk("b", 2, "a", durability=child), mode=FIRST, now_ms=5),
        return_exceptions=True,
    )
    assert not isinstance(deleted, BaseException)
    assert isinstance(stored, ParentNotFoundError)
    assert await live_keys(catalog, "ab") == ""
    assert await queued(catalog) == [1, 2]


@pytest.mark.parametrize("parent", CLASSES)
@pytest.mark.parametrize("child", CLASSES)
async def test_a_delete_that_comes_behind_a_childs_commit_takes_it_along(
    catalog: LmdbCatalog, parent: Durability, child: Durability
) -> None:
    """The walk may not have seen the child; then the first step leaves the parent, and the second round takes both."""
    await put(catalog, chunk("a", 1, durability=parent))
    stored, deleted = await asyncio.gather(
        catalog.commit(chunk("b", 2, "a", durability=child), mode=FIRST, now_ms=5),
        catalog.delete(KV, ["a"], now_ms=5),
    )
    assert not stored.existed
    assert [row.key for row in deleted[0].descendants] == ["b"]
    assert await live_keys(catalog, "ab") == ""


@pytest.mark.parametrize("durability", CLASSES)
async def test_a_claim_on_its_way_is_as_good_as_done(catalog: LmdbCatalog, durability: Durability) -> None:
    await put_chain(catalog, "ab", [durability])
    assert await condemn(catalog, name("b", 2)) == [True]
    claiming = asyncio.ensure_future(claim(catalog))
    await until_claiming(catalog, "b")
    assert await catalog.lookup(KV, ["a", "b"], rescue=True) == [(await catalog.lookup(KV, ["a"]))[0], None]
    again = asyncio.ensure_future(catalog.commit(chunk("b", 3, "a"), mode=FIRST, now_ms=5))
    child = asyncio.ensure_future(catalog.commit(chunk("c", 4, "b"), mode=FIRST, now_ms=5))
    assert await claiming == ["b"]
    outcome = await again
    assert not outcome.existed
    assert not (await child).existed
    assert await live_keys(catalog, "abc") == "abc"


async def test_a_child_or_a_pin_before_the_claim_saves_the_chunk(catalog: LmdbCatalog) -> None:
    await put_chain(catalog, "ab", [Durability.LOCAL])
    await condemn(catalog, name("b", 2), name("a", 1))
    stored, claimed = await asyncio.gather(
        catalog.commit(chunk("c", 3, "b", durability=Durability.LOCAL), mode=FIRST, now_ms=5), claim(catalog)
    )
    assert (stored.existed, claimed) == (False, [])
    session = await catalog.leases.open_session(user=USER, bucket=KV, holder="h", ttl_ms=60_000, now_boot_ms=0)
    await condemn(catalog, name("c", 3))
    pinned, claimed = await asyncio.gather(
        catalog.leases.pin_tails(session.id, ["c"], user=USER, bucket=KV, now_boot_ms=0), claim(catalog)
    )
    assert pinned.pins[0].pin is not None
    assert claimed == []


async def test_a_parent_whose_child_was_rescued_is_absent_at_no_moment_of_the_claim(catalog: LmdbCatalog) -> None:
    await put_chain(catalog, "abc", [Durability.LOCAL])
    assert await condemn(catalog, name("c", 3), name("b", 2), name("a", 1)) == [True] * 3
    await catalog.lookup(KV, ["b"], rescue=True)
    claiming = asyncio.ensure_future(claim(catalog))
    while not claiming.done():
        assert await live_keys(catalog, "ab") == "ab"
        await asyncio.sleep(0)
    assert await claiming == ["c"]
    assert catalog.condemned() == (0, 0)
    assert await condemn(catalog, name("b", 2), name("a", 1)) == [True] * 2
    assert await claim(catalog) == ["b", "a"]


async def test_a_mark_decided_on_too_early_is_found_out_by_the_claim(catalog: LmdbCatalog) -> None:
    """Long lists are looked at beside the event loop: what happens meanwhile comes before the mark."""
    await put_chain(catalog, "ab")
    await put(catalog, chunk("c", 3))
    await pin(catalog, "b")
    await catalog.delete(KV, ["c"], now_ms=5)
    await put(catalog, chunk("c", 4))
    for late in (name("b", 2), name("a", 1), name("c", 3)):
        assert catalog._marks.add([late], not_before_boot_ms=0) == [True]
    assert await claim(catalog) == []
    assert await live_keys(catalog, "abc") == "abc"
    assert catalog.condemned() == (0, 0)


class StalledWriter:
    """Holds the durable writer inside a group: what is enqueued at once belongs to the group, and sees what was there before."""

    def __init__(self, catalog: LmdbCatalog) -> None:
        self._gate = threading.Event()
        self._entered = threading.Event()
        self._stall = catalog._database.submit(self._wait)

    def _wait(self, view: WriteView) -> None:
        view.get(EXPOSED, b"k")
        self._entered.set()
        assert self._gate.wait(10)

    async def entered(self) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, self._entered.wait, 10)

    async def release(self) -> None:
        self._gate.set()
        await self._stall


async def test_a_replacement_on_its_way_holds_up_a_pin(catalog: LmdbCatalog) -> None:
    own = chunk("a", 1, None, namespace="default")
    await put(catalog, own)
    session = await catalog.leases.open_session(user=USER, bucket=KV, holder="h", ttl_ms=60_000, now_boot_ms=0)
    stalled = StalledWriter(catalog)
    newer = chunk("a", 2, None, namespace="default", durability=Durability.LOCAL)
    replacing = asyncio.ensure_future(put(catalog, newer, WriteCondition(if_match="*")))
    await stalled.entered()
    pinning = asyncio.ensure_future(catalog.leases.pin_tails(session.id, ["a"], user=USER, bucket=KV, now_boot_ms=0))
    await asyncio.sleep(0)
    await stalled.release()
    await replacing
    assert (await pinning).pins[0].pin is not None
    assert await queued(catalog) == [1]
    await catalog.delete(KV, ["a"], now_ms=5)
    assert await hidden_keys(catalog, "a") == "a"


async def test_a_delete_on_its_way_holds_up_pins_and_children(catalog: LmdbCatalog) -> None:
    await put(catalog, chunk("a", 1, durability=Durability.LOCAL))
    session = await catalog.leases.open_session(user=USER, bucket=KV, holder="h", ttl_ms=60_000, now_boot_ms=0)
    stalled = StalledWriter(catalog)
    deleting = asyncio.ensure_future(catalog.delete(KV, ["a"], now_ms=5))
    await stalled.entered()
    pinning = asyncio.ensure_future(catalog.leases.pin_tails(session.id, ["a"], user=USER, bucket=KV, now_boot_ms=0))
    child = asyncio.ensure_future(catalog.commit(chunk("b", 2, "a"), mode=FIRST, now_ms=5))
    await asyncio.sleep(0)
    await stalled.release()
    assert (await deleting)[0].removed is not None
    assert (await pinning).pins[0].pin is None
    with pytest.raises(ParentNotFoundError):
        await child


async def test_a_caller_that_gives_up_does_not_end_its_claim(catalog: LmdbCatalog) -> None:
    await put_chain(catalog, "a")
    await condemn(catalog, name("a", 1))
    claiming = asyncio.ensure_future(claim(catalog))
    await until_claiming(catalog, "a")
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    assert catalog._marks.is_claiming(KV, "a")
    with pytest.raises(ParentNotFoundError):
        await put(catalog, chunk("b", 2, "a"))
    assert not catalog._marks.is_claiming(KV, "a")


async def test_a_parent_that_is_written_down_keeps_nobody_waiting(catalog: LmdbCatalog) -> None:
    await put_chain(catalog, "a")
    raising = asyncio.ensure_future(raised(catalog, "a"))
    await asyncio.sleep(0)
    assert not catalog._database.is_idle
    stored = catalog.commit(chunk("b", 2, "a"), mode=FIRST, now_ms=5)
    with pytest.raises(StopIteration) as done:
        stored.send(None)
    assert not done.value.value.existed
    assert await raising == [True]


async def test_a_delete_gives_up_where_children_come_faster(catalog: LmdbCatalog) -> None:
    await put_chain(catalog, "a")
    step = catalog.hide_step
    numbers = iter(range(2, 100))

    async def hide_step(*arguments: object, **options: object) -> object:
        await put(catalog, chunk(f"child{(number := next(numbers))}", number, "a"))
        return await step(*arguments, **options)  # type: ignore[arg-type]

    catalog.hide_step = hide_step  # type: ignore[method-assign, assignment]
    with pytest.raises(BusyError):
        await catalog.delete(KV, ["a"], now_ms=5)
    assert await live_keys(catalog, "a") == "a"
    catalog.hide_step = step  # type: ignore[method-assign]
    (outcome,) = await catalog.delete(KV, ["a"], now_ms=5)
    assert outcome.removed is not None


@pytest.mark.parametrize("anew", ["bucket", "namespace"])
async def test_what_a_page_of_a_recall_hid_before_it_was_refused_is_told(
    catalog: LmdbCatalog, monkeypatch: pytest.MonkeyPatch, anew: str
) -> None:
    monkeypatch.setattr("kvobj.catalog.lmdb_removals._STEP_ROWS", 2)
    declared = namespace(KV, "ns")
    await catalog.namespaces.declare(declared)
    for at, key in enumerate("abcdef"):
        await put(catalog, chunk(key, at + 1))
    bucket = await catalog.bucket(KV)
    assert bucket is not None
    step = catalog.hide_step
    rows: list[ObjectRow] = []

    async def hide_step(*arguments: object, **options: object) -> object:
        if rows:
            catalog.hide_step = step  # type: ignore[method-assign]
            await catalog.delete(KV, list("abcdef"), now_ms=5)
            if anew == "bucket":
                await catalog.delete_bucket(KV)
                await catalog.create_bucket(bucket)
            else:
                await catalog.namespaces.remove(KV, "ns")
                await catalog.namespaces.declare(msgspec.structs.replace(declared, root=b"f" * 32))
            await put(catalog, chunk("d", 9))
        hidden = await step(*arguments, **options)  # type: ignore[arg-type]
        rows.extend(row for each in hidden for row in each.rows())
        return hidden

    catalog.hide_step = hide_step  # type: ignore[method-assign, assignment]
    is_of = {"namespace": "ns", "namespace_root": declared.root} if anew == "namespace" else {}
    page = await catalog.recall(KV, made_ms=bucket.created_ms, limit=6, now_ms=5, **is_of)  # type: ignore[arg-type]
    assert [row.key for row in page.recalled] == ["a", "b"]
    assert page.recalled == tuple(rows)
    assert page.next_after == "b"
    with pytest.raises(NoSuchNamespaceError if anew == "namespace" else NoSuchBucketError):
        await catalog.recall(KV, after="b", made_ms=bucket.created_ms, now_ms=5, **is_of)  # type: ignore[arg-type]
    assert await live_keys(catalog, "abcdef") == "d"


@pytest.mark.parametrize("seed", range(6))
async def test_all_at_once_leaves_no_hole_and_no_blob_unnamed(  # noqa: C901 - a list of what may happen
    catalog: LmdbCatalog, seed: int
) -> None:
    dice = random.Random(seed)
    keys = [f"k{at}" for at in range(12)]
    given: list[int] = []
    sessions = [
        await catalog.leases.open_session(user=USER, bucket=KV, holder="h", ttl_ms=60_000, now_boot_ms=0)
        for _ in range(3)
    ]

    async def act() -> None:
        key = dice.choice(keys)
        parents = ["", *keys[: keys.index(key)]]
        durability = dice.choice(CLASSES)
        session = dice.choice(sessions)
        match dice.randrange(10):
            case 0 | 1 | 2 | 3:
                given.append(len(given) + 1)
                await put(catalog, chunk(key, given[-1], dice.choice(parents), durability=durability))
            case 4:
                await catalog.delete(KV, dice.sample(keys, 2), now_ms=5)
            case 5:
                await raised(catalog, *dice.sample(keys, 3))
            case 6:
                pins = await catalog.leases.pin_tails(session.id, [key], user=USER, bucket=KV, now_boot_ms=0)
                await asyncio.sleep(0)
                release = [each.pin for each in pins.pins if each.pin is not None and dice.random() < 0.7]
                await catalog.leases.pin_tails(session.id, [], release=release, user=USER, bucket=KV, now_boot_ms=0)
            case 7 | 8:
                rows = [row for row in await catalog.lookup(KV, keys) if row is not None]
                rows.sort(key=lambda row: -row.depth)
                chunks = [ChunkName(KV, row.key, row.blobs[0].blob_id) for row in rows]
                await catalog.condemn(chunks, not_before_boot_ms=0)
            case _:
                await catalog.claim(now_boot_ms=1, limit=dice.randrange(1, 9), now_ms=6)

    async def attempt() -> None:
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)
        try:
            await act()
        except KvobjError as error:
            assert isinstance(error, ParentNotFoundError), error  # noqa: PT017 - others are raised as they are

    for _ in range(12):
        await asyncio.gather(*(attempt() for _ in range(30)))
        assert_consistent(catalog._database)
    for session in sessions:
        await catalog.leases.close_session(session.id, user=USER, bucket=KV)
    while await catalog.claim(now_boot_ms=0, now_ms=7):
        pass
    assert catalog.condemned() == (0, 0)
    kept = [row.blobs[0].blob_id async for row in catalog.scan_objects()]
    entries = [entry.blob_id for entry in await catalog.due(now_ms=1_000_000, limit=10_000)]
    numbers = [int.from_bytes(blob_id[8:], "big") for blob_id in [*entries, *kept]]
    assert Counter(numbers) == Counter(given)


# -- kill, power loss, rebuild -------------------------------------------------------------------------------------------


async def opened(place: Place) -> LmdbCatalog:
    catalog = await place.open()
    await with_chunks(await prepared(catalog))
    return catalog


async def test_a_restart_neither_loses_nor_brings_back_what_is_hidden(place: Place) -> None:
    catalog = await opened(place)
    await put_chain(catalog, "abcd", CLASSES)
    session, _ = await pin(catalog, "c")
    await catalog.delete(KV, ["a"], now_ms=5)
    await condemn(catalog, name("d", 4))
    catalog = await place.reopen(catalog)
    assert await live_keys(catalog, "abcd") == ""
    assert await hidden_keys(catalog, "abcd") == "abc"
    assert catalog.condemned() == (0, 3)
    assert await claim(catalog) == []
    assert await queued(catalog) == [4]
    assert await named(catalog) == [1, 2, 3, 4]
    await unpin(catalog, session)
    assert await claim(catalog) == ["c", "b", "a"]
    await place.close(catalog)


async def test_a_crash_forgets_marks_and_nothing_else(place: Place) -> None:
    catalog = await opened(place)
    await put_chain(catalog, "ab", CLASSES)
    await condemn(catalog, name("b", 2), name("a", 1))
    catalog = await place.reopen(catalog)
    assert catalog.condemned() == (0, 0)
    assert await claim(catalog) == []
    assert await live_keys(catalog, "ab") == "ab"
    assert await condemn(catalog, name("b", 2), name("a", 1)) == [True, True]
    assert await claim(catalog) == ["b", "a"]
    await place.close(catalog)


async def test_power_loss_takes_what_hangs_on_what_was_in_memory(place: Place) -> None:
    catalog = await opened(place)
    local, memory = Durability.LOCAL, Durability.MEMORY
    # a - b(memory) - c - d, and a - e: c and d hang on nothing after power loss.
    for number, (key, parent, durability) in enumerate(
        [("a", "", local), ("b", "a", memory), ("c", "b", local), ("d", "c", local), ("e", "a", local)], 1
    ):
        await put(catalog, chunk(key, number, parent, durability=durability))
    catalog = await place.reopen(catalog)
    assert await catalog.drop_orphans(now_ms=8) == 0
    catalog = await place.reopen(catalog, boot_id="another")
    assert await catalog.drop_orphans(now_ms=8) == 2
    assert await live_keys(catalog, "abcde") == "ae"
    assert await queued(catalog) == [3, 4]
    assert place.database is not None
    assert_consistent(place.database)
    with place.database.read() as view:
        assert view.count(EXPOSED) == 0
    assert await catalog.drop_orphans(now_ms=8) == 0
    await place.close(catalog)


async def test_a_parent_that_was_written_down_in_time_keeps_its_children(place: Place) -> None:
    catalog = await opened(place)
    await put_chain(catalog, "abc")
    assert await raised(catalog, "b") == [True]
    assert await raised(catalog, "a") == [True]
    assert place.database is not None
    with place.database.read() as view:
        assert view.count(EXPOSED) == 0
    catalog = await place.reopen(catalog, boot_id="another")
    assert await catalog.drop_orphans(now_ms=8) == 0
    assert await live_keys(catalog, "abc") == "ab"
    assert place.database is not None
    assert_consistent(place.database)
    await place.close(catalog)


async def test_in_quiet_time_nothing_is_claimed_and_deletes_only_hide(place: Place) -> None:
    catalog = await opened(place)
    await put_chain(catalog, "abc", [Durability.LOCAL])
    await pin(catalog, "c")
    await catalog.delete(KV, ["c"], now_ms=5)
    catalog = await place.reopen(catalog, boot_id="another")
    assert catalog.leases.usage().quiet
    assert await claim(catalog) == []
    assert await condemn(catalog, name("b", 2)) == [False]
    await catalog.open_epoch(0xA1B2C3D4E5F60718)
    await put(catalog, chunk("c", 4, "b", durability=Durability.LOCAL))
    assert await queued(catalog) == []
    await catalog.delete(KV, ["a"], now_ms=5)
    assert await hidden_keys(catalog, "abc") == "abc"
    assert await queued(catalog) == []
    assert catalog.leases.end_quiet(now_boot_ms=1 << 60)
    assert await queued(catalog) == [3]
    assert await claim(catalog) == ["c", "b", "a"]
    assert await queued(catalog) == [1, 2, 3, 4]
    await place.close(catalog)


@pytest.mark.parametrize("compactions", [0, 1])
async def test_a_rebuild_knows_the_chains(place: Place, compactions: int) -> None:
    catalog = await opened(place)
    await put_chain(catalog, "abcd", [Durability.LOCAL])
    await put(catalog, chunk("x", 8))
    await put(catalog, chunk("y", 9, "x", durability=Durability.LOCAL))
    await pin(catalog, "c")
    await catalog.delete(KV, ["b"], now_ms=5)
    for _ in range(compactions):
        assert await catalog.compact_log()
    await place.close(catalog)
    (place.directory / "durable" / "data.mdb").unlink()
    catalog = await place.open(rebuild=True, boot_id="another")
    assert await live_keys(catalog, "abcdxy") == "ay"
    assert await hidden_keys(catalog, "abcdxy") == "bc"
    assert await catalog.drop_orphans(now_ms=8) == 1
    assert await live_keys(catalog, "abcdxy") == "a"
    assert place.database is not None
    assert_consistent(place.database)
    catalog.leases.end_quiet(now_boot_ms=1 << 60)
    assert await claim(catalog) == ["c", "b"]
    await place.close(catalog)


async def test_an_older_row_below_a_replaced_one_is_kept_for_its_pin(catalog: LmdbCatalog) -> None:
    own = chunk("a", 1, None, namespace="default", durability=Durability.LOCAL)
    await put(catalog, own)
    session, _ = await pin(catalog, "a")
    newer = chunk("a", 2, None, namespace="default", durability=Durability.MEMORY)
    outcome = await catalog.commit(newer, mode=FIRST, condition=WriteCondition(if_match="*"), now_ms=5)
    assert isinstance(outcome, CommitOutcome)
    assert await queued(catalog) == []
    assert await raised(catalog, "a") == [True]
    assert await queued(catalog) == []
    await unpin(catalog, session)
    assert await queued(catalog) == [1]


async def test_walks_of_one_round_share_what_they_have_covered(catalog: LmdbCatalog) -> None:
    """Targets below one another, as a page of a recall has them: else each chain is walked once for each of its chunks."""
    await put_chain(catalog, "abcd")
    covered: set[bytes] = set()
    root = catalog.root_of(KV)
    with catalog._database.read() as view:
        given = [Descent(root, key, covered).take(view, 10, steps=10) for key in (b"c", b"a", b"d", b"b")]
    assert given == [[b"d", b"c"], [b"b", b"a"], [], []]


async def test_a_child_that_came_between_mark_and_claim_keeps_its_parent(catalog: LmdbCatalog) -> None:
    await put_chain(catalog, "ab", (Durability.LOCAL,))
    assert await condemn(catalog, name("b", 2), name("a", 1)) == [True, True]
    await put(catalog, chunk("c", 3, "b", durability=Durability.LOCAL))
    assert await claim(catalog) == []
    assert await live_keys(catalog, "abc") == "abc"
