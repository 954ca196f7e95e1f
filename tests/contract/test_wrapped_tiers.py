"""Every wrapper passes the contract of what it wraps, over a tier whose frames are complete and one whose frames still fill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest
from fakes import DictTier, Fault, FaultyTier, ManualClock
from tier_contract import RawRead, TierContract

from kvobj.arena import Arena
from kvobj.errors import StoreFullError
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.tiers.cascade import Cascade
from kvobj.tiers.coded import Coded
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.layered_home import LayeredHome
from kvobj.tiers.metered import Metered
from kvobj.tiers.protocol import Tier
from kvobj.tiers.reread import Reread
from kvobj.tiers.single_flight import SingleFlight
from kvobj.tiers.verified import Verified

T = TypeVar("T")


def on_thread(work: Callable[..., T], /, *arguments: object) -> Awaitable[T]:
    return asyncio.to_thread(work, *arguments)


class WrapperContract(TierContract):
    @pytest.fixture(params=["complete", "filling"])
    async def medium(self, arena: Arena, request: pytest.FixtureRequest) -> AsyncIterator[DictTier]:
        medium = DictTier(arena, name="medium")
        if request.param == "filling":
            gate = asyncio.Event()
            gate.set()
            medium.fill_gates = [gate] * 5
        yield medium
        await medium.aclose()

    @pytest.fixture
    def instruments(self) -> TierInstruments:
        return TierInstruments(Metrics())

    @pytest.fixture
    def raw_read(self, medium: DictTier) -> RawRead:
        return medium.raw_read


class TestSingleFlight(WrapperContract):
    @pytest.fixture
    def tier(self, medium: DictTier, instruments: TierInstruments) -> Tier:
        return SingleFlight(medium, instruments=instruments)


class NothingCoded:
    """An index of a tier whose blobs all lie as they were put."""

    def find(self, blob_id: bytes) -> CodedBlob | None:
        del blob_id
        return None


class TestCoded(WrapperContract):
    @pytest.fixture
    def tier(self, medium: DictTier, arena: Arena, instruments: TierInstruments) -> Tier:
        return Coded(medium, index=NothingCoded(), arena=arena, run=on_thread, instruments=instruments)


class TestMetered(WrapperContract):
    @pytest.fixture
    def tier(self, medium: DictTier, instruments: TierInstruments) -> Tier:
        return Metered(medium, instruments=instruments, clock=ManualClock())


def verified(inner: Tier, instruments: TierInstruments) -> Verified:
    def fail(blob_id: BlobId) -> None:
        raise AssertionError(f"nothing was spoiled: {blob_id.hex()}")

    return Verified(inner, run=on_thread, instruments=instruments, on_corrupt=fail)


class TestVerified(WrapperContract):
    @pytest.fixture
    def tier(self, medium: DictTier, instruments: TierInstruments) -> Tier:
        return verified(medium, instruments)


class TestCascade(WrapperContract):
    @pytest.fixture
    def tier(self, arena: Arena, medium: DictTier, instruments: TierInstruments) -> Tier:
        return Cascade(DictTier(arena, name="fast"), medium, instruments=instruments)


class TestCascadeWithoutRoomInFront(WrapperContract):
    """The fast tier takes nothing, so everything is read from the slow one."""

    @pytest.fixture
    def tier(self, arena: Arena, medium: DictTier, instruments: TierInstruments) -> Tier:
        full = FaultyTier(DictTier(arena, name="fast"), arena)
        full.faults["put", 0] = Fault(error=StoreFullError("full"))
        return Cascade(full, medium, instruments=instruments)


class TestReread(WrapperContract):
    @pytest.fixture
    def tier(self, medium: DictTier, instruments: TierInstruments) -> Tier:
        return Reread(verified(medium, instruments), corrupt=CorruptBlobs())


class HeldBy:
    """A directory that knows what a tier in a dict holds."""

    def __init__(self, tier: DictTier) -> None:
        self._tier = tier

    def find(self, blob_id: BlobId) -> object | None:
        return self._tier.frames.get(blob_id)


class TestLayeredHome(WrapperContract):
    @pytest.fixture
    def tier(self, arena: Arena, medium: DictTier) -> Tier:
        remote = DictTier(arena, name="remote")
        return LayeredHome(medium, remote, blobs=HeldBy(remote))


class TestAllOfThem(WrapperContract):
    @pytest.fixture
    def tier(self, arena: Arena, medium: DictTier, instruments: TierInstruments) -> Tier:
        fast = Metered(DictTier(arena, name="fast"), instruments=instruments, clock=ManualClock())
        slow = SingleFlight(verified(medium, instruments), instruments=instruments)
        slow_metered = Metered(slow, instruments=instruments, clock=ManualClock())
        return Cascade(fast, slow_metered, instruments=instruments)
