"""Both drivers give the same answers about chains, whatever is done to them in which order."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from catalog_consistency import assert_consistent
from catalog_contract import CLASSES, prepared
from chain_contract import KV, USER, chunk, name, with_chunks
from test_lmdb_catalog import Place

from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import CommitMode, Durability, NamespaceQuota, ObjectRow, WriteCondition
from kvobj.errors import KvobjError

KEYS = [f"k{at}" for at in range(10)]


def plain(value: object) -> object:
    """A value without the numbers that drivers draw as they like, and without the order of siblings."""
    if isinstance(value, ObjectRow):
        return (value.key, value.blobs[0].blob_id, value.depth, value.chain_sum, value.chain_bytes, value.state)
    if isinstance(value, msgspec.Struct):
        return [type(value).__name__, *(plain(each) for each in msgspec.structs.astuple(value))]
    if isinstance(value, list | tuple):
        each = [plain(item) for item in value]
        return sorted(each, key=repr) if value and isinstance(value[0], ObjectRow) else each
    return type(value).__name__ if isinstance(value, KvobjError) else value


class Pair:
    def __init__(self, model: MemoryCatalog, catalog: LmdbCatalog, seed: int) -> None:
        self.catalogs: tuple[Catalog, Catalog] = (model, catalog)
        self.dice = random.Random(seed)
        self.number = 0
        self.pins: list[tuple[bytes, bytes]] = []
        self.durability: dict[str, Durability] = {}

    async def same(self, ask: Callable[[Catalog], Awaitable[object]]) -> object:
        answers = []
        for catalog in self.catalogs:
            try:
                answers.append(plain(await ask(catalog)))
            except KvobjError as error:
                answers.append(type(error).__name__)
        assert answers[0] == answers[1]
        return answers[1]

    def chunk(self, key: str) -> ObjectRow:
        self.number += 1
        parent = self.dice.choice([None, "", *KEYS[: KEYS.index(key)]])
        return chunk(
            key,
            self.number,
            parent,
            durability=self.dice.choice(CLASSES),
            size_bytes=self.dice.choice([7, 7, 7, 9]),
            namespace=self.dice.choice(["ns", "default"]),
            modified_ms=self.dice.randrange(4),
        )

    async def step(self) -> None:  # noqa: C901 - a list of what may happen
        dice = self.dice
        keys = dice.sample(KEYS, 3)
        match dice.randrange(11):
            case 0 | 1 | 2:
                row = self.chunk(keys[0])
                condition = dice.choice([None, None, WriteCondition(if_match="*"), WriteCondition(if_none_match="*")])
                quota = dice.choice([None, NamespaceQuota(chunks=4)])
                await self.same(
                    lambda catalog: catalog.commit(
                        row, mode=CommitMode.FIRST_WRITER_WINS, condition=condition, quota=quota, now_ms=5
                    )
                )
            case 3:
                rows = [self.chunk(key) for key in sorted(keys)]
                await self.same(lambda catalog: catalog.commit_chain(rows, now_ms=5))
            case 4:
                await self.same(lambda catalog: catalog.delete(KV, keys[:2], now_ms=6))
            case 5:
                await self.raise_some(keys)
            case 6:
                await self.pin(keys[0])
            case 7 if self.pins:
                session = self.pins.pop(dice.randrange(len(self.pins)))
                for catalog, session_id in zip(self.catalogs, session, strict=True):
                    await catalog.leases.close_session(session_id, user=USER, bucket=KV)
            case 8:
                rows = [row for row in await self.catalogs[0].lookup(KV, KEYS) if row is not None]
                rows.sort(key=lambda row: (-row.depth, row.key))
                chunks = [
                    name(row.key, int.from_bytes(row.blobs[0].blob_id[8:], "big"))
                    for row in rows
                    if dice.random() < 0.7
                ]
                await self.same(lambda catalog: catalog.condemn(chunks, not_before_boot_ms=dice.choice([10])))
            case 9:
                now = dice.choice([9, 10])
                await self.same(lambda catalog: catalog.claim(now_boot_ms=now, now_ms=7))
            case _:
                rows = [row for row in await self.catalogs[0].lookup(KV, keys[:1]) if row is not None]
                if dice.random() < 0.5:
                    await self.same(lambda catalog: catalog.drop_rows(rows, now_ms=7))
                else:
                    await self.same(lambda catalog: catalog.recall(KV, from_ms=3, now_ms=7))

    async def raise_some(self, keys: list[str]) -> None:
        async def ask(catalog: Catalog) -> object:
            rows = [row for row in await catalog.lookup(KV, keys) if row is not None]
            raised = [msgspec.structs.replace(row, durability=Durability.LOCAL) for row in rows]
            return await catalog.raise_durability(raised)

        await self.same(ask)

    async def pin(self, key: str) -> None:
        sessions = []
        for catalog in self.catalogs:
            session = await catalog.leases.open_session(user=USER, bucket=KV, holder="h", ttl_ms=60_000, now_boot_ms=0)
            await catalog.leases.pin_tails(session.id, [key], user=USER, bucket=KV, now_boot_ms=0)
            sessions.append(session.id)
        self.pins.append((sessions[0], sessions[1]))

    async def compare(self) -> None:
        async def everything(catalog: Catalog) -> object:
            queue = [(entry.blob_id.hex(), entry.volatile) for entry in await catalog.due(now_ms=1 << 40)]
            return [
                await catalog.lookup(KV, KEYS),
                [await catalog.lookup_hidden(KV, key) for key in KEYS],
                [row.key async for row in catalog.scan_objects()],
                [row.key async for row in catalog.scan_objects(volatile_only=True)],
                await catalog.list_objects(KV),
                await catalog.bucket_usage(KV),
                [await catalog.namespaces.usage(KV, namespace) for namespace in ("ns", "default")],
                sorted(queue),
                catalog.condemned()[1],
                [reason and reason.reason for reason in [await catalog.history.why_removed(KV, key) for key in KEYS]],
            ]

        await self.same(everything)


@pytest.mark.parametrize("seed", range(5))
async def test_both_drivers_agree(tmp_path: Path, seed: int) -> None:
    place = Place(tmp_path)
    model, catalog = MemoryCatalog(), await place.open()
    for each in (model, catalog):
        await with_chunks(await prepared(each))
    pair = Pair(model, catalog, seed)
    for _ in range(120):
        await pair.step()
        await pair.compare()
    assert place.database is not None
    assert_consistent(place.database)
    await place.close(catalog)
