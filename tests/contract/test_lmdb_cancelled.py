"""A caller that goes while its change is being written: what the catalog counts and remembers follows the write all the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from catalog_contract import BUCKET, part, prepared, row, upload
from test_lmdb_catalog import Place

from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import BucketKind, BucketRow, CommitMode, Durability, UploadRow
from kvobj.catalog.setting_rows import BucketUpdate
from kvobj.database import Database, WriteView


class World:
    """A catalog over a real database, whose writer can be held up."""

    def __init__(self, place: Place, catalog: LmdbCatalog) -> None:
        self.place = place
        self.catalog = catalog

    @property
    def database(self) -> Database:
        assert self.place.database is not None
        return self.place.database

    @property
    def held(self) -> dict[str, int]:
        return dict(self.catalog.unfinished.of_users)

    @asynccontextmanager
    async def leaving(self, call: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
        """Within: the caller has gone, and its change still waits for the writer. After: the change has been made."""
        is_writing, may_write = threading.Event(), threading.Event()

        def hold(_: WriteView) -> None:
            is_writing.set()
            assert may_write.wait(20)

        holding = self.database.submit(hold)
        try:
            await asyncio.to_thread(is_writing.wait, 20)
            calling = asyncio.ensure_future(call)
            await asyncio.sleep(0)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            yield
        finally:
            may_write.set()
            await holding
        await self.database.land()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    place = Place(tmp_path)
    made = World(place, await place.open())
    await prepared(made.catalog)
    yield made
    await place.close(made.catalog)


async def test_an_upload_whose_completer_is_gone_counts_no_more(world: World) -> None:
    await world.catalog.create_upload(upload("u1"))
    await world.catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
    given = row("k", 1, durability=Durability.LOCAL)
    async with world.leaving(world.catalog.commit(given, mode=CommitMode.REPLACE, upload_id="u1", now_ms=5)):
        assert world.held == {"main": 10}
    assert await world.catalog.lookup(BUCKET, ["k"]) != [None]
    assert world.held == {}


async def test_an_upload_whose_completer_is_gone_counts_on_where_the_commit_was_refused(world: World) -> None:
    await world.catalog.create_upload(upload("u1"))
    await world.catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
    given = row("k", 2, epoch=99, durability=Durability.LOCAL)
    async with world.leaving(world.catalog.commit(given, mode=CommitMode.REPLACE, upload_id="u1", now_ms=5)):
        pass
    assert await world.catalog.lookup(BUCKET, ["k"]) == [None]
    assert world.held == {"main": 10}


async def test_an_upload_whose_aborter_is_gone_counts_no_more(world: World) -> None:
    await world.catalog.create_upload(upload("u1"))
    await world.catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
    async with world.leaving(world.catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)):
        assert world.held == {"main": 10}
    assert world.held == {}


async def test_a_part_whose_writer_is_gone_counts(world: World) -> None:
    await world.catalog.create_upload(upload("u1"))
    async with world.leaving(world.catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)):
        assert world.held == {}
    assert world.held == {"main": 10}
    await world.catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)
    assert world.held == {}


async def test_parts_of_a_bucket_whose_remover_is_gone_count_no_more(world: World) -> None:
    await world.catalog.create_bucket(BucketRow("chunks", BucketKind.KV, "main", 1, Durability.LOCAL))
    await world.catalog.create_upload(UploadRow("chunks", "k", "u1", 1, "main", Durability.LOCAL, group_parts=2))
    await world.catalog.put_part("chunks", "k", part("u1", 1, 1), now_ms=5)
    told: list[dict[str, int]] = []
    world.catalog.on_settings_changed = lambda: told.append(world.held)
    async with world.leaving(world.catalog.delete_bucket("chunks")):
        assert await world.catalog.bucket("chunks") is not None  # remembered, while the writer has not got to it
        assert told == []
    assert await world.catalog.bucket("chunks") is None
    assert world.held == {}
    assert told == [{}]


async def test_a_bucket_whose_changer_is_gone_is_remembered_as_it_is(world: World) -> None:
    told: list[None] = []
    world.catalog.on_settings_changed = lambda: told.append(None)
    update = BucketUpdate(tags={"a": "b"})
    async with world.leaving(world.catalog.update_bucket(BUCKET, update)):
        before = await world.catalog.bucket(BUCKET)
        assert before is not None
        assert before.tags == {}
        assert told == []
    after = await world.catalog.bucket(BUCKET)
    assert after is not None
    assert after.tags == {"a": "b"}
    assert told == [None]


async def test_a_stop_without_sessions_is_clean_though_who_opened_the_first_is_gone(world: World) -> None:
    opening = world.catalog.leases.open_session(user="main", bucket=BUCKET, holder="h", ttl_ms=60_000, now_boot_ms=1)
    async with world.leaving(opening):
        pass
    await world.catalog.leases.stopped_cleanly()
    world.catalog = await world.place.reopen(world.catalog, boot_id="another")
    assert not world.catalog.leases.usage().quiet
