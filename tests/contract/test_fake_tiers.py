"""The fakes pass the contract that they stand in for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes import DictTier, FaultyTier, RecordingTier
from tier_contract import RawRead, TierContract

from kvobj.arena import Arena
from kvobj.tiers.protocol import Tier


class TestDictTier(TierContract):
    @pytest.fixture
    async def medium(self, arena: Arena) -> AsyncIterator[DictTier]:
        medium = DictTier(arena)
        yield medium
        await medium.aclose()

    @pytest.fixture
    def tier(self, medium: DictTier) -> Tier:
        return medium

    @pytest.fixture
    def raw_read(self, medium: DictTier) -> RawRead:
        return medium.raw_read


class TestDictTierThatIsFilling(TestDictTier):
    @pytest.fixture
    def tier(self, medium: DictTier) -> Tier:
        open_gate = asyncio.Event()
        open_gate.set()
        medium.fill_gates = [open_gate] * 5
        return medium


class TestFaultyTier(TestDictTier):
    @pytest.fixture
    def tier(self, medium: DictTier, arena: Arena) -> Tier:
        return FaultyTier(medium, arena)


class TestRecordingTier(TestDictTier):
    @pytest.fixture
    def tier(self, medium: DictTier) -> Tier:
        return RecordingTier(medium)
