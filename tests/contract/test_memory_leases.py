"""The reference driver of leases passes the contract, and is quiet after it lost what power loss takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lease_contract import BUCKET, LIMITS, NOW, OTHER_BUCKET, LeaseContract, World, chunk

from kvobj.catalog.chunk_list import KeyList
from kvobj.catalog.lease_protocol import LeaseLimits, Leases
from kvobj.catalog.memory_leases import MemoryLeases
from kvobj.catalog.rows import ObjectRow


class MemoryWorld(World):
    def __init__(self, limits: LeaseLimits = LIMITS) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str], ObjectRow] = {}
        self.driver = MemoryLeases(
            has_bucket={BUCKET, OTHER_BUCKET}.__contains__,
            live=self.row,
            stored=self.row,
            forget_marks=self.forget_marks,
            limits=limits,
        )

    def row(self, bucket: str, key: str) -> ObjectRow | None:
        return self.rows.get((bucket, key))

    @property
    def leases(self) -> Leases:
        return self.driver

    async def put(self, rows: Sequence[ObjectRow]) -> None:
        self.rows.update({(row.bucket, row.key): row for row in rows})

    async def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self.rows[BUCKET, key]

    def holds_row(self, key: str) -> bool:
        return self.driver.holds_row(BUCKET, key)

    def holds_blob(self, blob_id: bytes) -> bool:
        return self.driver.holds_blob(blob_id)


class TestMemoryLeases(LeaseContract):
    @pytest.fixture
    def world(self) -> World:
        return MemoryWorld()

    @pytest.fixture
    def bounded(self) -> World:
        return MemoryWorld(LeaseLimits(pinned_bytes_per_user=1000))


async def test_after_power_loss_everything_counts_as_pinned_for_one_ttl() -> None:
    world = MemoryWorld()
    await world.put([chunk("k", None)])
    world.driver.lose_power(now_boot_ms=NOW)
    assert not world.leases.usage().quiet
    session = await world.session(ttl_ms=20_000)
    await world.match(KeyList(["k"]), session)
    world.driver.lose_power(now_boot_ms=NOW)
    assert (world.leases.usage().sessions, world.leases.usage().pins) == (0, 0)
    assert world.holds_row("any")
    assert not world.leases.end_quiet(now_boot_ms=NOW + 20_999)
    assert world.leases.end_quiet(now_boot_ms=NOW + 21_000)
    assert not world.holds_row("any")
