"""The reference driver passes the contract, and loses what power loss takes."""

from __future__ import annotations

import pytest
from catalog_contract import BUCKET, CatalogContract, found, prepared, put, row, upload
from chain_contract import ChainContract, with_chunks

from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import Durability


class TestMemoryCatalog(CatalogContract):
    @pytest.fixture
    async def catalog(self) -> Catalog:
        return await prepared(MemoryCatalog())


class TestMemoryChains(ChainContract):
    @pytest.fixture
    async def catalog(self) -> Catalog:
        return await with_chunks(await prepared(MemoryCatalog()))


async def test_power_loss_brings_the_older_row_back() -> None:
    catalog = MemoryCatalog()
    await prepared(catalog)
    older = await put(catalog, row("k", 1))
    await put(catalog, row("k", 2, durability=Durability.MEMORY))
    await catalog.create_upload(upload("u1", durability=Durability.MEMORY))
    catalog.lose_power()
    assert await found(catalog, "k") == older
    assert await catalog.upload(BUCKET, "k", "u1") is None
