"""Whoever deletes is told of every blob that is queued, once the queue shows it, by whatever change it came there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from catalog_contract import BUCKET, CLASSES, part, prepared, put, queued, row, upload
from chain_contract import FIRST, chunk, with_chunks
from test_lmdb_catalog import Place

from kvobj.catalog.encoding import DELETE_QUEUE, DELETE_QUEUE_VOLATILE
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import ChunkName, CommitMode, Durability, WriteCondition
from kvobj.errors import KvobjError


class World:
    """A catalog, and how many entries its queue had at each time that it was told of."""

    def __init__(self, place: Place, catalog: LmdbCatalog) -> None:
        self.place = place
        self.catalog = catalog
        self.told: list[int] = []
        self._is_told = asyncio.Event()
        catalog.on_queued = self._on_queued

    def _on_queued(self) -> None:
        assert self.place.database is not None
        with self.place.database.read() as view:
            self.told.append(view.count(DELETE_QUEUE) + view.count(DELETE_QUEUE_VOLATILE))
        self._is_told.set()

    async def news(self) -> list[int]:
        """What is told next, and what was before."""
        async with asyncio.timeout(20):
            await self._is_told.wait()
        self._is_told.clear()
        told, self.told = self.told, []
        return told


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    place = Place(tmp_path)
    catalog = await place.open()
    await prepared(catalog)
    yield World(place, catalog)
    await place.close(catalog)


@pytest.mark.parametrize("durability", CLASSES)
async def test_a_replaced_object_is_told_of_and_a_new_one_is_not(world: World, durability: Durability) -> None:
    await put(world.catalog, row("k", 1, durability=durability))
    await asyncio.sleep(0)
    assert world.told == []
    await put(world.catalog, row("k", 2, durability=durability))
    assert await world.news() == [1]
    assert await queued(world.catalog) == [1]


@pytest.mark.parametrize("durability", CLASSES)
async def test_a_part_that_is_put_again_is_told_of(world: World, durability: Durability) -> None:
    await world.catalog.create_upload(upload("u1", durability=durability))
    for sequence in (1, 2):
        await world.catalog.put_part(BUCKET, "k", part("u1", 1, sequence), now_ms=5)
    assert await world.news() == [1]
    assert await queued(world.catalog) == [1]


@pytest.mark.parametrize("durability", CLASSES)
async def test_what_a_complete_leaves_out_and_replaces_is_told_of(world: World, durability: Durability) -> None:
    await put(world.catalog, row("k", 1, durability=durability))
    await world.catalog.create_upload(upload("u1", durability=durability))
    for number in (2, 3):
        await world.catalog.put_part(BUCKET, "k", part("u1", number, number), now_ms=5)
    given = row("k", 2, durability=durability)
    await world.catalog.commit(given, mode=CommitMode.REPLACE, upload_id="u1", now_ms=5)
    assert await world.news() == [2]
    assert await queued(world.catalog) == [1, 3]


@pytest.mark.parametrize("durability", CLASSES)
async def test_what_a_refused_commit_brought_is_told_of(world: World, durability: Durability) -> None:
    given = row("k", 1, durability=durability)
    with pytest.raises(KvobjError):
        await world.catalog.commit(
            given, mode=CommitMode.REPLACE, condition=WriteCondition(if_match="another"), now_ms=5
        )
    assert await world.news() == [1]


@pytest.mark.parametrize("durability", CLASSES)
async def test_what_a_claim_takes_is_told_of(world: World, durability: Durability) -> None:
    await with_chunks(world.catalog)
    stored = [await put(world.catalog, chunk(f"k{number}", number, durability=durability), FIRST) for number in (1, 2)]
    names = [ChunkName(each.bucket, each.key, each.blobs[0].blob_id) for each in stored]
    assert await world.catalog.condemn(names, not_before_boot_ms=100) == [True, True]
    assert len(await world.catalog.claim(now_boot_ms=100, now_ms=9)) == 2
    assert (await world.news())[0] > 0
    assert await queued(world.catalog) == [1, 2]


async def test_forgetting_what_was_deleted_is_nothing_to_be_told_of(world: World) -> None:
    for sequence in (1, 2):
        await put(world.catalog, row("k", sequence))
    await world.news()
    await world.catalog.reap(await world.catalog.due(now_ms=1_000_000))
    await asyncio.sleep(0)
    assert world.told == []
    assert await queued(world.catalog) == []
