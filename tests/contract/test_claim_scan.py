"""What native code finds out about many chunks for condemn and claim is what is found out about them one by one."""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from catalog_consistency import assert_consistent
from catalog_contract import blob, prepared
from chain_contract import FIRST, KV, USER, chunk, with_chunks
from damaged_pages import damaged_copies, ended
from test_lmdb_catalog import Place

from kvobj import native
from kvobj.catalog import claim_scan
from kvobj.catalog.catalog_rows import root_of
from kvobj.catalog.chain_rows import exposed_parents
from kvobj.catalog.claim_scan import ClaimedFacts, scan_children, scan_claim, scan_condemned
from kvobj.catalog.encoding import OBJECTS
from kvobj.catalog.key_hash import key_hash
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.rows import ChunkName, Claimed, Durability, LossyCopy, ObjectRow
from kvobj.database import WriteView
from kvobj.errors import CorruptionError, ParentNotFoundError

pytestmark = pytest.mark.skipif(not native.status().is_loaded, reason="the native library is not built")

LOCAL, MEMORY = Durability.LOCAL, Durability.MEMORY


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


def names(rows: Sequence[ObjectRow]) -> list[ChunkName]:
    """Children before their parents, which are given first."""
    return [ChunkName(row.bucket, row.key, row.blobs[0].blob_id) for row in reversed(rows)]


async def stored(catalog: LmdbCatalog, rows: Sequence[ObjectRow]) -> Sequence[ObjectRow]:
    for row in rows:
        await catalog.commit(row, mode=FIRST, now_ms=5)
    return rows


def straight(count: int, *, length: int = 8, first: int = 1) -> list[ObjectRow]:
    """A chain of chunks whose keys have this length."""
    keys = [f"{first + at:0{length}}" for at in range(count)]
    return [chunk(key, first + at, keys[at - 1] if at else "", durability=LOCAL) for at, key in enumerate(keys)]


def scanned(catalog: LmdbCatalog, chunks: Sequence[ChunkName], held: bytes | None = None) -> ClaimedFacts | None:
    with catalog._database.read() as view:
        root = root_of(view, KV)
        assert root is not None
        return scan_claim(view, root, [each.key.encode() for each in chunks], [each.blob_id for each in chunks], held)


@pytest.mark.parametrize("length", [3, 5, 55, 56, 57, 63, 64, 65, 120, 127, 128, 129, 200, 256, 300, 479, 480])
async def test_keys_are_hashed_as_everywhere(catalog: LmdbCatalog, length: int) -> None:
    rows = await stored(catalog, straight(40, length=length))
    facts = scanned(catalog, names(rows))
    assert facts is not None
    hashes = [key_hash(row.key.encode()) for row in reversed(rows)]
    assert facts.hashes == hashes
    assert [link[8:] for link in facts.links] == [above + own for own, above in pairwise(hashes)]


async def test_what_is_known_of_those_that_go(catalog: LmdbCatalog) -> None:
    rows = [
        msgspec.structs.replace(row, namespace=f"n{chain}", size_bytes=2**40 + at, tokens=at, headers={"a": "b" * at})
        for chain in range(4)
        for at, row in enumerate(straight(15, first=1 + 15 * chain))
    ]
    await stored(catalog, rows)
    facts = scanned(catalog, names(rows))
    assert facts is not None
    assert list(facts.places) == list(range(60))
    assert list(facts.sizes) == [row.size_bytes for row in reversed(rows)]
    assert list(facts.tokens) == [row.tokens for row in reversed(rows)]
    assert [tuple(span) for span in facts.spaces] == [("n3", 0, 15), ("n2", 15, 30), ("n1", 30, 45), ("n0", 45, 60)]


async def test_what_stays_keeps_what_is_above_it_and_nothing_else(catalog: LmdbCatalog) -> None:
    rows = await stored(catalog, straight(100))
    chunks = names(rows)
    facts = scanned(catalog, chunks)
    assert facts is not None
    assert list(facts.places) == list(range(100))
    other = msgspec.structs.replace(chunks[40], blob_id=bytes(16))
    facts = scanned(catalog, [*chunks[:40], other, *chunks[41:]])
    assert facts is not None
    assert list(facts.places) == list(range(40))
    facts = scanned(catalog, chunks, bytes(30) + b"\1" + bytes(69))
    assert facts is not None
    assert list(facts.places) == list(range(30))
    facts = scanned(catalog, [*chunks[:50], *chunks[49::-1]])  # the other half not at all, and each twice
    assert facts is not None
    assert list(facts.places) == list(range(50))
    facts = scanned(catalog, chunks[::-1])  # parents first
    assert facts is not None
    assert list(facts.places) == [99]
    facts = scanned(catalog, chunks[1:])
    assert facts is not None
    assert not facts.places


async def test_a_parent_goes_with_all_of_hundreds_of_children_or_not_at_all(catalog: LmdbCatalog) -> None:
    top = chunk("top", 1, durability=LOCAL)
    rows = await stored(catalog, [top, *(chunk(f"c{at}", 2 + at, "top", durability=LOCAL) for at in range(400))])
    chunks = names(rows)
    for left_out in (None, 0, 17, 399):
        some = [each for at, each in enumerate(chunks) if at != left_out]
        facts = scanned(catalog, some)
        assert facts is not None
        assert len(facts.places) == (401 if left_out is None else 399)
        with catalog._database.read() as view:
            root = root_of(view, KV)
            assert root is not None
            keys = [each.key.encode() for each in some]
            assert scan_children(view, root, keys, None) == bytes([1] * (len(some) - 1) + [left_out is None])


@pytest.mark.parametrize(
    "change",
    [
        {"durability": Durability.SHARED},
        {"blobs": (blob(990), blob(991))},
        {"lossy": LossyCopy(bytes(16), 10, 20, bytes(32), "eq:83/1", 0.5)},
        {"durability": MEMORY},
    ],
)
async def test_chunks_of_another_form_are_left_to_who_knows_them(
    catalog: LmdbCatalog, change: dict[str, object]
) -> None:
    rows = straight(50)
    rows.append(msgspec.structs.replace(chunk("odd", 900, rows[-1].key, durability=LOCAL), **change))
    await stored(catalog, rows)
    chunks = names(rows)
    assert scanned(catalog, chunks) is None
    assert await catalog.condemn(chunks, not_before_boot_ms=0) == [True] * 51
    assert await catalog.claim(now_boot_ms=0, now_ms=9) == Claimed(tuple(chunks), (), 510)
    assert len(await catalog.due(now_ms=1 << 40)) == sum(len(row.blob_ids) for row in rows)


async def test_few_chunks_and_long_keys_are_not_scanned(catalog: LmdbCatalog) -> None:
    assert scanned(catalog, names(await stored(catalog, straight(claim_scan.MANY - 1)))) is None
    assert scanned(catalog, names(await stored(catalog, straight(40, length=481, first=100)))) is None


async def test_a_parent_stays_for_a_child_that_is_in_memory_alone(catalog: LmdbCatalog) -> None:
    rows = await stored(catalog, straight(50))
    chunks = names(rows)
    await stored(catalog, [chunk("above", 900, rows[20].key, durability=MEMORY)])
    facts = scanned(catalog, chunks)
    assert facts is not None
    assert list(facts.places) == list(range(29))
    with catalog._database.read() as view:
        root = root_of(view, KV)
        assert root is not None
        keys = [each.key.encode() for each in chunks]
        assert scan_children(view, root, keys, None) == bytes([1] * 29 + [0] * 21)
        condemned = scan_condemned(view, root, keys, [each.blob_id for each in chunks], None)
        assert condemned is not None
        assert condemned[1] == [29]
    assert await catalog.condemn(chunks, not_before_boot_ms=0) == [True] * 29 + [False] * 21
    claimed = await catalog.claim(now_boot_ms=0, now_ms=9)
    assert claimed.chunks == tuple(chunks[:29])


async def test_a_parent_in_memory_is_exposed_no_more_when_its_durable_child_goes_with_many(
    catalog: LmdbCatalog,
) -> None:
    rows = await stored(catalog, straight(50))
    await stored(catalog, [chunk("parent", 900, durability=MEMORY), chunk("child", 901, "parent", durability=LOCAL)])
    with catalog._database.read() as view:
        assert len(exposed_parents(view)) == 1
    chunks = [ChunkName(KV, "child", blob(901).blob_id), *names(rows)]
    assert await catalog.condemn(chunks, not_before_boot_ms=0) == [True] * 51
    assert (await catalog.claim(now_boot_ms=0, now_ms=9)).chunks == tuple(chunks)
    with catalog._database.read() as view:
        assert exposed_parents(view) == []


async def test_tables_that_a_group_has_written_to_are_not_scanned(catalog: LmdbCatalog) -> None:
    """Two claims of one group: the second sees what the first left."""
    rows = await stored(catalog, straight(120))
    await stored(catalog, [chunk("in memory", 900, durability=MEMORY)])  # so that its table is there to be looked into
    chunks = names(rows)
    keys, blob_ids = [each.key.encode() for each in chunks], [each.blob_id for each in chunks]
    objects = ObjectRows(lambda: 0)

    def change(view: WriteView) -> tuple[bool, bool, bool]:
        root = root_of(view, KV)
        assert root is not None
        before = scan_claim(view, root, keys, blob_ids, None) is not None
        above = objects.volatile
        above.put(view, root, b"beside", b"x")
        beside = scan_condemned(view, root, keys, blob_ids, None) is not None
        above.delete(view, root, b"beside")
        objects.durable.put(view, root, b"beside", b"x")
        after = scan_claim(view, root, keys, blob_ids, None) is not None
        objects.durable.delete(view, root, b"beside")
        return before, beside, after

    assert await catalog._database.write(change) == (True, False, False)


async def test_a_row_whose_namespace_is_no_text_fails_its_claim_and_nothing_goes(catalog: LmdbCatalog) -> None:
    rows = [msgspec.structs.replace(row, namespace="name") for row in straight(50)]
    chunks = names(await stored(catalog, rows))

    def write(name: bytes, instead: bytes) -> Callable[[WriteView], None]:
        def change(view: WriteView) -> None:
            root = root_of(view, KV)
            assert root is not None
            key = root + chunks[20].key.encode()
            value = view.get(OBJECTS, key)
            assert value is not None
            view.put(OBJECTS, key, value.replace(name, instead))

        return change

    await catalog._database.write(write(b"name", b"n\xffm\xfe"))
    assert await catalog.condemn(chunks, not_before_boot_ms=0) == [True] * 50
    with pytest.raises(CorruptionError):
        await catalog.claim(now_boot_ms=0, now_ms=9)
    await catalog._database.write(write(b"n\xffm\xfe", b"name"))
    assert await catalog.condemn(chunks, not_before_boot_ms=0) == [True] * 50
    assert (await catalog.claim(now_boot_ms=0, now_ms=9)).chunks == tuple(chunks)


class Twins:
    """A catalog that scans as few as one chunk, and one that never does, to which the same is done."""

    def __init__(self, one: LmdbCatalog, other: LmdbCatalog, dice: random.Random) -> None:
        self.catalogs = (one, other)
        self.dice = dice
        self.number = 0
        self.scans = 0
        self.spaces: dict[str | None, str] = {}
        self.sessions: list[tuple[bytes, bytes]] = []

    @property
    def keys(self) -> list[str]:
        return [key for key in self.spaces if key is not None]

    async def grow(self) -> None:
        """Trees of chunks, most of which are written down."""
        in_memory = self.dice.random() < 0.3
        for _ in range(self.dice.choice([60, 120, 200, 400])):
            self.number += 1
            some = self.dice.sample(self.keys, min(3, len(self.keys)))
            parent = self.dice.choice([*self.keys[-1:] * 6, *some, "", None])
            row = chunk(
                f"{self.number}-" + "k" * self.dice.choice([1, 60, 100]),
                self.number,
                parent,
                durability=MEMORY if in_memory and self.dice.random() < 0.03 else LOCAL,
                size_bytes=self.dice.randrange(1, 1000),
                namespace=self.spaces.get(parent) or self.dice.choice(["ns", "other", "default"]),
            )
            stands = [await self._commit(catalog, row) for catalog in self.catalogs]
            assert stands[0] == stands[1]
            if stands[0]:
                self.spaces[row.key] = row.namespace

    async def _commit(self, catalog: LmdbCatalog, row: ObjectRow) -> bool:
        try:
            await catalog.commit(row, mode=FIRST, now_ms=5)
        except ParentNotFoundError:
            return False
        return True

    async def disturb(self) -> None:
        """Pins, DELETEs that hide and DELETEs that remove."""
        for key in self.dice.sample(self.keys, self.dice.randrange(3)):
            opened = []
            for catalog in self.catalogs:
                session = await catalog.leases.open_session(
                    user=USER, bucket=KV, holder="h", ttl_ms=60_000, now_boot_ms=0
                )
                await catalog.leases.pin_tails(session.id, [key], user=USER, bucket=KV, now_boot_ms=0)
                opened.append(session.id)
            self.sessions.append((opened[0], opened[1]))
        if self.sessions and self.dice.random() < 0.4:
            for catalog, session_id in zip(self.catalogs, self.sessions.pop(), strict=True):
                await catalog.leases.close_session(session_id, user=USER, bucket=KV)
        gone = self.dice.sample(self.keys, self.dice.randrange(3))
        for catalog in self.catalogs:
            await catalog.delete(KV, gone, now_ms=6)

    async def collect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Condemn some, rescue some of these, claim in portions."""
        rows = [row for row in await self.catalogs[0].lookup(KV, self.keys) if row is not None]
        rows.sort(key=lambda row: (-row.depth, row.key))
        some = [row for row in rows if self.dice.random() < self.dice.choice([0.9, 0.99, 1.0])]
        chunks = [ChunkName(KV, row.key, row.blobs[0].blob_id) for row in some]
        rescued = self.dice.sample(self.keys, self.dice.choice([0, 0, 1]))
        limit = self.dice.choice([50, 150, 1000])
        answers: list[list[object]] = []
        native_scan = claim_scan._scan_claims
        assert native_scan is not None

        def counted(scan: object) -> int:
            answer = native_scan(scan)
            self.scans += answer == 0
            return answer

        for catalog, scan in zip(self.catalogs, (counted, None), strict=True):
            with monkeypatch.context() as patched:
                patched.setattr(claim_scan, "_scan_claims", scan)
                patched.setattr(claim_scan, "MANY", 1)
                answer: list[object] = [await catalog.condemn(chunks, not_before_boot_ms=0)]
                await catalog.lookup(KV, rescued, rescue=True)
                while claimed := await catalog.claim(now_boot_ms=0, limit=limit, now_ms=7):
                    answer.append(
                        (
                            claimed.chunks,
                            {(row.key, row.blobs[0].blob_id) for row in claimed.hidden},
                            claimed.size_bytes,
                        )
                    )
                answers.append(answer)
        assert answers[0] == answers[1]

    async def compare(self) -> None:
        """All that anybody can be told of either."""
        told = []
        for catalog in self.catalogs:
            page = await catalog.history.read(KV, after=0, limit=100_000)
            events = [msgspec.structs.replace(event, sequence=0) for event in page.events]
            due = await catalog.due(now_ms=1 << 40, limit=100_000)
            told.append(
                [
                    [row is not None and row.blobs for row in await catalog.lookup(KV, self.keys)],
                    [await catalog.lookup_hidden(KV, key) is not None for key in self.keys],
                    [await catalog.namespaces.usage(KV, each) for each in ("ns", "other", "default")],
                    await catalog.bucket_usage(KV),
                    sorted((entry.blob_id, entry.volatile) for entry in due),
                    [(event.type, event.namespace, event.keys, event.tokens, event.reason) for event in events],
                    [
                        removed and (removed.reason, removed.namespace)
                        for key in self.keys
                        for removed in [await catalog.history.why_removed(KV, key)]
                    ],
                ]
            )
            assert_consistent(catalog._database)
        assert told[0] == told[1]


@pytest.mark.parametrize("seed", range(12))
async def test_a_collection_that_scans_does_what_one_does_that_asks_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    places = [Place(tmp_path / name) for name in ("scans", "asks")]
    for place in places:
        place.directory.mkdir()
    one, other = [await place.open() for place in places]
    twins = Twins(one, other, random.Random(seed))
    for catalog in twins.catalogs:
        await with_chunks(await prepared(catalog))
    for _ in range(5):
        await twins.grow()
        await twins.disturb()
        await twins.collect(monkeypatch)
        await twins.compare()
    assert twins.scans >= 5
    for place, catalog in zip(places, twins.catalogs, strict=True):
        await place.close(catalog)


@pytest.mark.parametrize(
    ("pages_said", "ends"), [(None, 0), (1 << 28, -signal.SIGSEGV)], ids=["the map", "a longer one, which is seen"]
)
async def test_damaged_pages_are_never_read_beyond_the_map(
    catalog: LmdbCatalog, tmp_path: Path, pages_said: int | None, ends: int
) -> None:
    dice = random.Random(3)
    rows = await stored(catalog, [chunk("top", 1, durability=LOCAL), *straight(300, first=2)])
    rows = [*rows, *await stored(catalog, [chunk(f"c{at}", 400 + at, "top", durability=LOCAL) for at in range(200)])]
    chunks = names(rows)
    keys, blob_ids = [each.key.encode() for each in chunks], [each.blob_id for each in chunks]
    with catalog._database.read() as view:
        root = root_of(view, KV)
        tables = claim_scan._Tables.of(view, rows=True)
    assert root is not None
    assert tables is not None

    def read_all() -> None:
        known = 0
        for damaged in damaged_copies(tmp_path / "durable" / "data.mdb", dice, 600):
            of_copy = claim_scan._Tables(*(None if each is None else damaged(each) for each in tables))
            for each in of_copy:
                if each is not None and pages_said is not None:
                    each.pages = pages_said
            asked = claim_scan._Asked(root, keys, blob_ids, None)
            known += claim_scan._run(asked.scan(of_copy))
            assert set(asked.outcomes) <= {0, 1}
        assert 0 < known < 600

    assert ended(read_all) == ends
