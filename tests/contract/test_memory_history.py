"""The reference history passes the contract, and loses what power loss takes."""

from __future__ import annotations

import pytest
from history_contract import BUCKET, HistoryContract, Teller, chunk, keys_told
from memory_teller import memory_teller


class TestMemoryHistory(HistoryContract):
    @pytest.fixture
    async def teller(self) -> Teller:
        return await memory_teller()


async def test_power_loss_takes_volatile_events_and_says_so() -> None:
    teller = await memory_teller()
    (row,) = await teller.stored([chunk("a")])
    await teller.made_durable(row)
    await teller.stored([chunk("b")])
    teller.history.lose_power()
    assert await keys_told(teller) == [("a",)]
    assert (await teller.history.read(BUCKET, after=0)).first_kept > row.sequence
