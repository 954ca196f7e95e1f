"""?events over both catalogs: lines, gaps, rights, and streams that follow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from catalog_contract import EPOCH, blob
from s3_driver import ALICE, BOB, ROOT, Driver, sign

from kvobj.api.kv.events import Events, name_in, parent_in
from kvobj.api.message import BodyStream, Reply, RequestHead
from kvobj.api.object_store import ObjectStore
from kvobj.api.service import S3Service
from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, BucketRow, CommitMode, Durability, ObjectRow, UserRow
from kvobj.database import Database

BUCKET = "cache"
ID_A, ID_B, ID_C = "0a" * 32, "0b" * 32, "0c" * 32
Line = dict[str, Any]


class EventDriver(Driver):
    """A service over a catalog, whose history is told by real commits."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__()
        self.catalog = catalog
        self.events = Events(self.catalog, heartbeat_seconds=0.02, followers_max=2)
        store = cast("ObjectStore", SimpleNamespace(catalog=self.catalog))
        self.service = S3Service(
            store, self.service._settings, clock=self.clock, log=self.service._log, read_events=self.events.stream
        )
        self.blobs = 0

    async def prepare(self) -> None:
        for user in (ROOT, ALICE, BOB):
            await self.catalog.put_user(user)
        await self.catalog.open_epoch(EPOCH)
        for name, kind in ((BUCKET, BucketKind.KV), ("plain", BucketKind.ORDINARY)):
            await self.catalog.create_bucket(BucketRow(name, kind, ALICE.id, 1, Durability.MEMORY))

    async def put(  # type: ignore[override]
        self,
        key: str,
        *,
        parent: str | None = None,
        namespace: str = "llama",
        durability: Durability = Durability.MEMORY,
    ) -> ObjectRow:
        self.blobs += 1
        row = ObjectRow(
            bucket=BUCKET,
            key=key,
            blobs=(blob(self.blobs),),
            size_bytes=10,
            etag="e",
            modified_ms=1,
            owner=ALICE.id,
            durability=durability,
            parent=parent,
            namespace=namespace,
            tokens=256,
        )
        return (await self.catalog.commit(row, mode=CommitMode.FIRST_WRITER_WINS, now_ms=7)).row

    async def declare(self, name: str, **access: str) -> None:
        row = NamespaceRow(
            BUCKET, name, b"{}", b"f" * 32, b"k", b"r" * 32, "foreign", 256, None, None, 1, ALICE.id, access=access
        )
        await self.catalog.namespaces.declare(row)

    async def read(self, query: str = "", **options: Any) -> list[Line]:  # noqa: ANN401 - as `request`
        answer = await self.request("GET", f"/{BUCKET}?events{query}", **options)
        assert answer.status == 200
        return lines(answer.body)

    async def follow(self, after: int = 0, *, user: UserRow = ALICE) -> Follower:
        target = f"/{BUCKET}?events&after={after}&follow"
        fields = tuple((k.lower(), v) for k, v in sign("GET", target, b"", user=user))
        head = RequestHead("GET", target, fields, "F", "127.0.0.1")
        reply = await self.service.handle(head, cast("Any", _NoBody()))
        return Follower(reply)


class _NoBody:
    length = 0


class Follower:
    """Reads a stream as the HTTP layer does."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        if reply.status == 200:
            assert not isinstance(reply.body, bytes)
            self.stream: BodyStream = reply.body
            self._views = reply.body.views()

    async def view(self) -> bytes:
        async with asyncio.timeout(10):
            return bytes(await anext(self._views))

    async def line(self) -> Line:
        """The next view that is more than a sign of life; it has one line."""
        while not (view := await self.view()).strip():
            pass
        (line,) = lines(view)
        return line

    async def next_view(self) -> bytes | None:
        """None: the stream is over."""
        try:
            return await self.view()
        except StopAsyncIteration:
            return None

    async def is_over(self) -> bool:
        return await self.next_view() is None

    async def close(self) -> None:
        await cast("Any", self._views).aclose()
        await self.stream.aclose()


def lines(data: bytes) -> list[Line]:
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines() if line]


@asynccontextmanager
async def lmdb_catalog(directory: Path) -> AsyncIterator[Catalog]:
    database = Database.open(
        durable=directory / "durable",
        volatile=directory / "volatile",
        tables=CATALOG_TABLES,
        map_bytes=1 << 26,
        volatile_map_bytes=1 << 26,
        sync=False,
    )
    catalog = await LmdbCatalog.open(database)
    yield catalog
    await catalog.aclose()
    await database.aclose()


@pytest.fixture(params=["memory", "lmdb"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EventDriver]:
    opening = lmdb_catalog(tmp_path) if request.param == "lmdb" else nullcontext(MemoryCatalog())
    async with opening as catalog:
        driver = EventDriver(catalog)
        await driver.prepare()
        yield driver


async def test_stored_and_removed_chunks_are_lines_in_order(driver: EventDriver) -> None:
    first = await driver.put(ID_A, parent="")
    second = await driver.put(ID_B, parent=ID_A, durability=Durability.LOCAL)
    await driver.catalog.delete(BUCKET, [ID_B], now_ms=9)
    stored_a, stored_b, removed = await driver.read("&after=0")
    assert stored_a == {
        "seq": first.sequence,
        "time_ms": 7,
        "type": "stored",
        "namespace": "llama",
        "ids": [ID_A],
        "parent": "root",
        "tokens": 256,
        "tier": "dram",
    }
    assert (stored_b["seq"], stored_b["parent"], stored_b["tier"]) == (second.sequence, ID_A, "nvme")
    assert {key: removed[key] for key in ("type", "ids", "reason", "time_ms")} == {
        "type": "removed",
        "ids": [ID_B],
        "reason": RemovalReason.DELETED,
        "time_ms": 9,
    }


async def test_a_reader_goes_on_after_the_last_number_it_saw(driver: EventDriver) -> None:
    row = await driver.put(ID_A)
    await driver.put(ID_B)
    assert [line["ids"] for line in await driver.read(f"&after={row.sequence}")] == [[ID_B]]


async def test_a_number_from_a_log_that_was_lost_is_a_gap(driver: EventDriver) -> None:
    await driver.put(ID_A)
    last = driver.catalog.history.last_sequence()
    (gap,) = await driver.read(f"&after={last + (1 << 41)}")
    assert gap["type"] == "gap"
    assert gap["from"] == 1
    assert gap["to"] >= last
    follower = await driver.follow(after=last + (1 << 41))
    assert (await follower.line())["type"] == "gap"
    await driver.put(ID_B)
    assert (await follower.line())["ids"] == [ID_B]
    await follower.close()


async def test_the_reply_says_how_far_the_log_has_come(driver: EventDriver) -> None:
    row = await driver.put(ID_A)
    answer = await driver.request("GET", f"/{BUCKET}?events")
    assert answer.headers["content-type"] == "application/x-ndjson"
    last = int(answer.headers["x-kvobj-last-event"])
    assert last >= row.sequence
    await driver.put(ID_B)
    assert [line["ids"] for line in await driver.read(f"&after={last}")] == [[ID_B]]


async def test_more_than_a_page_comes_whole(driver: EventDriver) -> None:
    for number in range(600):
        await driver.put(f"{number:064x}")
    assert [line["ids"][0] for line in await driver.read()] == [f"{number:064x}" for number in range(600)]


async def test_foreign_keys_stand_without_their_namespaces_name(driver: EventDriver) -> None:
    await driver.put("lmcache/model@1", namespace="lmcache", parent=None)
    await driver.put("loose/key", namespace="", parent=None)
    foreign, loose = await driver.read()
    assert (foreign["namespace"], foreign["ids"], foreign["parent"]) == ("lmcache", ["model@1"], None)
    assert (loose["namespace"], loose["ids"]) == ("default", ["loose/key"])


async def test_a_cleared_namespace_is_a_line(driver: EventDriver) -> None:
    await driver.catalog.history.tell_cleared(BUCKET, "llama", now_ms=3)
    await driver.catalog.history.tell_cleared(BUCKET, "", now_ms=4)
    assert [(line["type"], line["namespace"]) for line in await driver.read()] == [
        ("cleared", "llama"),
        ("cleared", None),
    ]


async def test_what_was_forgotten_is_a_gap_line_and_told_once(driver: EventDriver) -> None:
    row = await driver.put(ID_A)
    await driver.catalog.history.trim(now_ms=10**9, retention_ms=1)
    for number in range(600):
        await driver.put(f"{number:064x}")
    gap, *rest = await driver.read("&after=0")
    assert gap == {"type": "gap", "from": 1, "to": row.sequence}
    assert len(rest) == 600
    assert all(line["type"] == "stored" for line in rest)
    assert (await driver.read(f"&after={row.sequence}"))[0]["type"] == "stored"


async def test_a_follower_gets_what_comes_and_signs_of_life(driver: EventDriver) -> None:
    await driver.put(ID_A)
    follower = await driver.follow()
    assert (await follower.line())["ids"] == [ID_A]
    assert await follower.view() == b"\n"
    await driver.put(ID_B)
    assert (await follower.line())["ids"] == [ID_B]
    assert follower.stream.length is None
    await follower.close()


async def test_a_follower_that_stays_behind_is_told_of_the_gap(driver: EventDriver) -> None:
    first = await driver.put(ID_A)
    follower = await driver.follow()
    assert (await follower.line())["seq"] == first.sequence
    missed = await driver.put(ID_B)
    await driver.catalog.history.trim(now_ms=10**9, retention_ms=1)
    await driver.put(ID_C)
    view = b""
    while not view.strip():
        view = await follower.view()
    gap, stored = lines(view)
    assert gap["type"] == "gap"
    assert gap["from"] <= missed.sequence == gap["to"]
    assert stored["ids"] == [ID_C]
    await follower.close()


async def test_followers_end_when_the_server_stops(driver: EventDriver) -> None:
    follower = await driver.follow()
    ending = asyncio.create_task(follower.is_over())
    await asyncio.sleep(0)
    await driver.events.aclose()
    while not await ending:
        ending = asyncio.create_task(follower.is_over())
    await follower.close()
    assert await driver.read() == []


async def test_a_follower_sees_nothing_of_the_next_owners_bucket(driver: EventDriver) -> None:
    follower = await driver.follow()
    await driver.put("of-alice", namespace="")
    seen = await follower.line()
    assert seen["ids"] == ["of-alice"]
    await driver.catalog.delete(BUCKET, ["of-alice"], now_ms=5)
    await driver.catalog.delete_bucket(BUCKET)
    await driver.catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, BOB.id, 2, Durability.MEMORY))
    await driver.put("of-bob", namespace="")
    while (view := await follower.next_view()) is not None:
        assert b"of-bob" not in view
    await follower.close()
    assert [each["ids"] for each in await driver.read(user=BOB)] == [["of-bob"]]


async def test_a_follower_who_is_no_user_any_more_sees_nothing_more(driver: EventDriver) -> None:
    await driver.declare("llama", bob="read")
    followers = [await driver.follow(user=user) for user in (ALICE, BOB)]
    await driver.put("llama/seen")
    for follower in followers:
        assert (await follower.line())["ids"] == ["seen"]
    await driver.catalog.remove_user(BOB.id)
    driver.clock.offset_ms += 2000  # who is a user is looked at again
    await driver.put("llama/after")
    while (view := await followers[1].next_view()) is not None:
        assert b"after" not in view
    assert (await followers[0].line())["ids"] == ["after"]
    for follower in followers:
        await follower.close()


async def test_more_followers_than_the_bound_are_told_to_come_later(driver: EventDriver) -> None:
    followers = [await driver.follow() for _ in range(2)]
    assert (await driver.follow()).reply.status == 503
    await followers[0].close()
    another = await driver.follow()
    assert another.reply.status == 200
    for follower in (followers[1], another):
        await follower.close()


async def test_who_is_granted_a_namespace_sees_its_events_only(driver: EventDriver) -> None:
    await driver.declare("shared", bob="read")
    await driver.declare("private")
    await driver.put("shared/a", namespace="shared")
    await driver.put("private/b", namespace="private")
    await driver.put("loose", namespace="")
    assert [line["ids"] for line in await driver.read(user=BOB)] == [["a"]]
    assert len(await driver.read(user=ROOT)) == 3


async def test_who_is_granted_nothing_is_denied(driver: EventDriver) -> None:
    answer = await driver.request("GET", f"/{BUCKET}?events", user=BOB)
    assert answer.status == 403


async def test_an_ordinary_or_absent_bucket_has_no_events(driver: EventDriver) -> None:
    assert (await driver.request("GET", "/plain?events")).status == 400
    assert (await driver.request("GET", "/absent?events")).status == 404


@pytest.mark.parametrize("after", ["x", "-1", "1.5", str(2**63), "9" * 30])
async def test_a_number_that_is_none_is_refused(driver: EventDriver, after: str) -> None:
    assert (await driver.request("GET", f"/{BUCKET}?events&after={after}")).status == 400


def test_names_and_parents_are_those_of_their_namespace() -> None:
    assert name_in("n", "n/k") == "k"
    assert name_in("n", "m/k") == "m/k"
    assert name_in("default", "default/k") == "default/k"
    assert parent_in("n", "") == "root"
    assert parent_in("n", None) is None
    assert parent_in("n", "n/p") == "p"
