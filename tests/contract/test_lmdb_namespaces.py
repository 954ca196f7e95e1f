"""The LMDB driver's namespaces pass the contract, and outlive a restart, a power loss, a rebuild and a compaction of the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import msgspec
import pytest
from namespace_contract import BUCKET, MADE_MS, OTHER, NamespaceContract, NamespacePlace, namespace

from kvobj.catalog.bucket_changes import CreateBucket
from kvobj.catalog.encoding import BUCKETS, CATALOG_TABLES, NAMESPACE_USAGE, NAMESPACE_USAGE_VOLATILE, NAMESPACES
from kvobj.catalog.lmdb_namespaces import LmdbNamespaces
from kvobj.catalog.log_entries import BucketRemoved, encode_entry
from kvobj.catalog.namespace_changes import drop_namespaces
from kvobj.catalog.namespace_protocol import Namespaces
from kvobj.catalog.rebuild import rebuild_catalog
from kvobj.catalog.rows import BucketKind, BucketRow, Durability
from kvobj.catalog.snapshot import snapshot_entries
from kvobj.database import Database, WriteView
from kvobj.record_log import RecordLog


class LmdbPlace:
    """Namespaces on a database of their own, with the buckets that the contract asks for."""

    namespaces: Namespaces

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count(1)
        self.open()

    def open(self, *, boot_id: str = "boot", rebuild: bool = False) -> None:
        self.log = RecordLog.open(self._directory / "log", rotate_bytes=64 * 1024)
        self.database = Database.open(
            durable=self._directory / "durable",
            volatile=self._directory / "volatile",
            tables=CATALOG_TABLES,
            map_bytes=1 << 26,
            volatile_map_bytes=1 << 26,
            record_log=self.log,
            sync=False,
            boot_id=boot_id,
            rebuild=rebuild,
        )
        self.namespaces = LmdbNamespaces(self.database)

    async def rebuild(self) -> None:
        await self.database.aclose()
        self.open(rebuild=True)
        await rebuild_catalog(self.log, self.database)
        await self.database.finish_rebuild(self.log)
        self.log.close()
        await self.database.aclose()
        self.open()

    async def create_bucket(self, bucket: str) -> None:
        row = BucketRow(bucket, BucketKind.KV, "main", MADE_MS, Durability.MEMORY)
        await self.database.write(CreateBucket(row, self._numbers.__next__))

    async def delete_bucket(self, bucket: str) -> None:
        def change(view: WriteView) -> None:
            drop_namespaces(view, bucket)
            view.delete(BUCKETS, bucket.encode())
            view.log(encode_entry(BucketRemoved(bucket)))

        await self.database.write(change)
        self.namespaces.forget_bucket(bucket)

    async def store(self, bucket: str, name: str, *, chunks: int, size_bytes: int) -> None:
        with self.database.read() as view:
            stored = view.get(BUCKETS, bucket.encode())
        assert stored is not None
        place = stored[:8] + name.encode()

        def change(view: WriteView) -> None:
            # Half durable, half volatile: both count.
            view.add(NAMESPACE_USAGE, place, (chunks // 2, size_bytes // 2))
            view.add(NAMESPACE_USAGE_VOLATILE, place, (chunks - chunks // 2, size_bytes - size_bytes // 2))

        await self.database.write(change)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[LmdbPlace]:
    place = LmdbPlace(tmp_path)
    await place.create_bucket(BUCKET)
    await place.create_bucket(OTHER)
    yield place
    await place.database.aclose()


class TestLmdbNamespaces(NamespaceContract):
    @pytest.fixture(name="place")
    def contract_place(self, place: LmdbPlace) -> NamespacePlace:
        return place


async def declared(place: LmdbPlace) -> None:
    """Two that stand, one with changed settings, one removed, one in a bucket that is gone."""
    await place.namespaces.declare(namespace("a"))
    await place.namespaces.declare(namespace("b"))
    await place.namespaces.declare(namespace("c"))
    await place.namespaces.change_settings(msgspec.structs.replace(namespace("b"), access={"u": "write"}))
    await place.namespaces.remove(BUCKET, "c")
    await place.namespaces.declare(namespace("d", bucket=OTHER))
    await place.delete_bucket(OTHER)
    await place.create_bucket(OTHER)


async def check(place: LmdbPlace) -> None:
    expected = (namespace("a"), msgspec.structs.replace(namespace("b"), access={"u": "write"}))
    assert await place.namespaces.page(BUCKET) == expected
    assert await place.namespaces.page(OTHER) == ()
    assert await place.namespaces.namespace(BUCKET, "b") == expected[1]


@pytest.mark.parametrize("boot_id", ["boot", "another"])
async def test_namespaces_outlive_a_restart_and_a_power_loss(place: LmdbPlace, boot_id: str) -> None:
    await declared(place)
    await place.database.aclose()
    place.open(boot_id=boot_id)
    await check(place)


async def test_a_rebuild_brings_namespaces_back(place: LmdbPlace) -> None:
    await declared(place)
    await place.rebuild()
    await check(place)


async def test_a_rebuild_from_a_compacted_log_brings_namespaces_back(place: LmdbPlace) -> None:
    await declared(place)
    assert await place.database.compact_log([snapshot_entries])
    await place.rebuild()
    await check(place)


async def test_no_row_of_a_removed_bucket_is_left(place: LmdbPlace) -> None:
    await declared(place)
    with place.database.read() as view:
        assert view.count(NAMESPACES) == 2


async def test_a_declaration_whose_caller_is_gone_is_seen_once_it_stands(place: LmdbPlace) -> None:
    declaring = asyncio.ensure_future(place.namespaces.declare(namespace()))
    await asyncio.sleep(0)
    declaring.cancel()
    seen = await place.namespaces.namespace(BUCKET, "llama")  # remembered as absent, if the writer is not done
    assert seen in (None, namespace())
    with pytest.raises(asyncio.CancelledError):
        await declaring
    await place.namespaces.declare(namespace("behind"))
    assert await place.namespaces.namespace(BUCKET, "llama") == namespace()
