"""The reference driver passes the contract of a node with a remote."""

from __future__ import annotations

import pytest
from catalog_contract import prepared, put, row
from chain_contract import with_chunks
from remote_contract import RemoteContract

from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.protocol import Catalog


class TestMemoryRemote(RemoteContract):
    @pytest.fixture
    async def catalog(self) -> Catalog:
        return await with_chunks(await prepared(MemoryCatalog(has_remote=True)))


async def test_without_a_remote_nothing_is_queued_or_told() -> None:
    catalog = await prepared(MemoryCatalog())
    await put(catalog, row("k", 1))
    assert (catalog.outbox.position, catalog.outbox.snapshot_due, catalog.remote_queue.entries()) == (0, False, [])
