"""Both catalogs count unfinished uploads and what they hold, and give it back in every way that an upload ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from catalog_contract import BUCKET, CLASSES, part, prepared, row, upload
from test_lmdb_catalog import Place

from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, BucketRow, CommitMode, Durability, UploadRow, WriteCondition
from kvobj.catalog.unfinished import UnfinishedBytes
from kvobj.errors import (
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchUploadError,
    QuotaExceededError,
    TooManyUploadsError,
)


@pytest.fixture(params=["memory", "lmdb"])
async def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Catalog]:
    if request.param == "memory":
        yield await prepared(MemoryCatalog())
        return
    place = Place(tmp_path)
    opened = await place.open()
    yield await prepared(opened)
    await place.close(opened)


def held(catalog: Catalog) -> dict[str, int]:
    return dict(catalog.unfinished.of_users)


@pytest.mark.parametrize("durability", CLASSES)
async def test_parts_count_for_who_began_the_upload_until_it_ends(catalog: Catalog, durability: Durability) -> None:
    await catalog.create_upload(upload("u1", durability=durability))
    assert held(catalog) == {}
    for number in (1, 2, 3):
        await catalog.put_part(BUCKET, "k", part("u1", number, number, size_bytes=100), now_ms=5)
    assert held(catalog) == {"main": 300}
    await catalog.put_part(BUCKET, "k", part("u1", 2, 4, size_bytes=10), now_ms=5)
    assert held(catalog) == {"main": 210}
    await catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)
    assert held(catalog) == {}
    with pytest.raises(NoSuchUploadError):
        await catalog.put_part(BUCKET, "k", part("u1", 1, 5), now_ms=5)
    assert held(catalog) == {}


@pytest.mark.parametrize("durability", CLASSES)
async def test_a_commit_gives_back_what_it_left_out_too_and_a_refused_one_nothing(
    catalog: Catalog, durability: Durability
) -> None:
    await catalog.create_upload(upload("u1", durability=durability))
    for number in (1, 2):
        await catalog.put_part(BUCKET, "k", part("u1", number, number), now_ms=5)
    given = row("k", 1, durability=durability)
    another = WriteCondition(if_match="another")
    with pytest.raises(NoSuchKeyError):
        await catalog.commit(given, mode=CommitMode.REPLACE, condition=another, upload_id="u1", now_ms=5)
    assert held(catalog) == {"main": 20}
    await catalog.commit(given, mode=CommitMode.REPLACE, upload_id="u1", now_ms=5)
    assert held(catalog) == {}


@pytest.mark.parametrize("durability", CLASSES)
async def test_a_part_that_an_earlier_writer_has_put_counts_once_and_goes_with_its_bucket(
    catalog: Catalog, durability: Durability
) -> None:
    await catalog.create_bucket(BucketRow("chunks", BucketKind.KV, "main", 1, Durability.MEMORY))
    await catalog.create_upload(UploadRow("chunks", "k", "u1", 1, "first", durability, group_parts=3))
    await catalog.create_upload(UploadRow("chunks", "k", "u1", 1, "second", durability, group_parts=3))
    for sequence in (1, 2):
        await catalog.put_part("chunks", "k", part("u1", 1, sequence), now_ms=5)
    assert held(catalog) == {"first": 10}
    await catalog.delete_bucket("chunks")
    assert held(catalog) == {}


async def test_parts_that_end_while_they_are_put_leave_nothing(catalog: Catalog) -> None:
    for turn in range(20):
        name = f"u{turn}"
        await catalog.create_upload(upload(name))
        puts = [catalog.put_part(BUCKET, "k", part(name, n, 100 * turn + n), now_ms=5) for n in range(1, 6)]
        await asyncio.gather(*puts, catalog.abort_upload(BUCKET, "k", name, now_ms=5), return_exceptions=True)
        assert await catalog.upload(BUCKET, "k", name) is None
    assert held(catalog) == {}


async def test_who_is_full_begins_no_upload_and_who_is_exempt_does(catalog: Catalog) -> None:
    catalog.unfinished.bound(10, exempt=["other"])
    await catalog.create_upload(upload("u1"))
    await catalog.put_part(BUCKET, "k", part("u1", 1, 1), now_ms=5)
    with pytest.raises(QuotaExceededError):
        await catalog.create_upload(upload("u2"))
    assert await catalog.upload(BUCKET, "k", "u2") is None
    await catalog.create_upload(msgspec.structs.replace(upload("u3"), owner="other"))
    assert catalog.unfinished.refusals == 1


@pytest.mark.parametrize("durability", CLASSES)
async def test_the_rows_are_counted_when_the_catalog_is_opened(tmp_path: Path, durability: Durability) -> None:
    place = Place(tmp_path)
    catalog = await place.open()
    await prepared(catalog)
    for name, owner in (("u1", "ann"), ("u2", "ann"), ("u3", "bob"), ("u4", "idle")):
        await catalog.create_upload(msgspec.structs.replace(upload(name, durability=durability), owner=owner))
    for number, name in enumerate(("u1", "u1", "u2", "u3"), 1):
        await catalog.put_part(BUCKET, "k", part(name, number, number, size_bytes=number), now_ms=5)
    catalog = await place.reopen(catalog)
    assert held(catalog) == {"ann": 6, "bob": 4}
    await catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)
    assert held(catalog) == {"ann": 3, "bob": 4}
    await place.close(catalog)


def test_reservations_are_exact_and_given_back_once() -> None:
    unfinished = UnfinishedBytes()
    unfinished.bound(100)
    first, second = unfinished.reserve("ann", 60), unfinished.reserve("ann", 40)
    with pytest.raises(QuotaExceededError) as refused:
        unfinished.reserve("ann", 1)
    assert (refused.value.data["held_bytes"], refused.value.data["limit_bytes"]) == (100, 100)
    unfinished.reserve("ann", 0)  # an empty part holds nothing
    unfinished.reserve("bob", 100).release()
    for _ in range(2):
        first.release()
    assert dict(unfinished.of_users) == {"ann": 40}
    second.release()
    assert dict(unfinished.of_users) == {}


async def tried(catalog: Catalog, *names: str, limit: int, durability: Durability = Durability.LOCAL) -> int:
    """Begin these uploads at once; how many were begun."""
    begun = await asyncio.gather(
        *(catalog.create_upload(upload(name, durability=durability), limit=limit) for name in names),
        return_exceptions=True,
    )
    refused = [each for each in begun if each is not None]
    assert all(isinstance(each, TooManyUploadsError) and each.data["limit"] == limit for each in refused)
    return len(begun) - len(refused)


@pytest.mark.parametrize("durability", CLASSES)
async def test_uploads_that_are_begun_at_once_are_as_many_as_the_bucket_may_have(
    catalog: Catalog, durability: Durability
) -> None:
    names = [f"u{number}" for number in range(24)]
    assert await tried(catalog, *names, limit=5, durability=durability) == 5
    page = await catalog.list_uploads(BUCKET)
    assert len(page.rows) == 5
    assert await tried(catalog, "more", limit=5) == 0
    assert await tried(catalog, "more", limit=6) == 1


@pytest.mark.parametrize("durability", CLASSES)
async def test_an_upload_that_ends_makes_room_for_another_at_once(catalog: Catalog, durability: Durability) -> None:
    assert await tried(catalog, "u1", "u2", limit=2, durability=durability) == 2
    await catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)
    assert await tried(catalog, "u3", "u4", limit=2, durability=durability) == 1
    await catalog.put_part(BUCKET, "k", part("u2", 1, 1), now_ms=5)
    await catalog.commit(row("k", 1, durability=durability), mode=CommitMode.REPLACE, upload_id="u2", now_ms=5)
    assert await tried(catalog, "u5", "u6", limit=2, durability=durability) == 1


@pytest.mark.parametrize("durability", CLASSES)
async def test_uploads_that_could_not_be_begun_and_chunks_in_parts_are_none_of_those(
    catalog: Catalog, durability: Durability
) -> None:
    for name in ("u1", "u2"):
        with pytest.raises(NoSuchBucketError):
            await catalog.create_upload(upload(name, durability=durability), made_ms=7, limit=1)
    await catalog.create_upload(UploadRow(BUCKET, "k", "parts", 1, "main", durability, group_parts=3))
    assert await tried(catalog, "u1", "u2", limit=1, durability=durability) == 1


async def test_an_upload_counts_whose_beginner_did_not_wait_for_it(catalog: Catalog) -> None:
    begin = asyncio.create_task(catalog.create_upload(upload("u1"), limit=1))
    await asyncio.sleep(0)
    begin.cancel()
    await asyncio.wait([begin])
    assert await tried(catalog, "u2", limit=1) == 0
    await catalog.abort_upload(BUCKET, "k", "u1", now_ms=5)
    assert await tried(catalog, "u2", limit=1) == 1


async def test_a_bucket_of_the_same_name_begins_without_uploads(catalog: Catalog) -> None:
    assert await tried(catalog, "u1", "u2", limit=2) == 2
    await catalog.delete_bucket(BUCKET)
    await catalog.create_bucket(BucketRow(BUCKET, BucketKind.ORDINARY, "main", 2, Durability.LOCAL))
    assert await tried(catalog, "u3", "u4", "u5", limit=2) == 2


@pytest.mark.parametrize("durability", CLASSES)
async def test_uploads_of_an_earlier_run_count(tmp_path: Path, durability: Durability) -> None:
    place = Place(tmp_path)
    catalog = await place.open()
    await prepared(catalog)
    assert await tried(catalog, "u1", "u2", limit=3, durability=durability) == 2
    catalog = await place.reopen(catalog)
    assert await tried(catalog, "u3", "u4", limit=3, durability=durability) == 1
    await place.close(catalog)
