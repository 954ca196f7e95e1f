"""Concurrent reads of one blob are one, whoever of them gives up meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes import DictTier, Fault, FaultyTier
from fakes_arena import put_plain, read_whole, small_arena

from kvobj.arena import Arena
from kvobj.errors import TierUnavailableError
from kvobj.ids import make_blob_id
from kvobj.metrics import Metrics
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.single_flight import SingleFlight

BLOB = make_blob_id(1, 1)
PLAIN = bytes(range(256)) * 40


@pytest.fixture
async def arena(shm_path: Path) -> AsyncIterator[Arena]:
    async with small_arena(shm_path) as arena:
        yield arena
        assert arena.usage().reserved_bytes == 0


@pytest.fixture
async def medium(arena: Arena) -> AsyncIterator[DictTier]:
    medium = DictTier(arena)
    yield medium
    await medium.aclose()


@pytest.fixture
def faulty(medium: DictTier, arena: Arena) -> FaultyTier:
    return FaultyTier(medium, arena)


@pytest.fixture
async def tier(faulty: FaultyTier) -> AsyncIterator[SingleFlight]:
    tier = SingleFlight(faulty, instruments=TierInstruments(Metrics()))
    yield tier
    await tier.aclose()


async def turns(count: int = 5) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_gets_that_come_together_are_one_read(tier: SingleFlight, faulty: FaultyTier, arena: Arena) -> None:
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    gate = asyncio.Event()
    faulty.faults["get", 0] = Fault(delay=gate)
    gets = [asyncio.create_task(read_whole(tier, BLOB)) for _ in range(5)]
    await turns()
    gate.set()
    assert await asyncio.gather(*gets) == [encoded] * 5
    assert faulty.calls["get"] == 1


async def test_a_late_comer_joins_a_frame_that_still_fills(
    tier: SingleFlight, faulty: FaultyTier, medium: DictTier, arena: Arena
) -> None:
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    medium.fill_gates = gates = [asyncio.Event(), asyncio.Event()]
    gates[0].set()
    first = await tier.get(BLOB)
    late = asyncio.create_task(read_whole(tier, BLOB))
    await turns()
    gates[1].set()
    assert await late == encoded
    assert first is not None
    await first.complete()
    first.release()
    assert faulty.calls["get"] == 1
    await turns()
    assert await read_whole(tier, BLOB) == encoded
    assert faulty.calls["get"] == 2


async def test_one_that_gives_up_leaves_the_others_read_alone(
    tier: SingleFlight, faulty: FaultyTier, arena: Arena
) -> None:
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    gate = asyncio.Event()
    faulty.faults["get", 0] = Fault(delay=gate)
    gets = [asyncio.create_task(read_whole(tier, BLOB)) for _ in range(3)]
    await turns()
    gets[0].cancel()
    await turns()
    gate.set()
    assert (await asyncio.gather(*gets, return_exceptions=True))[1:] == [encoded] * 2
    assert faulty.calls["get"] == 1


async def test_when_all_give_up_the_read_ends_and_the_next_starts_anew(
    tier: SingleFlight, faulty: FaultyTier, arena: Arena
) -> None:
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    faulty.faults["get", 1] = Fault(delay=asyncio.Event())
    gets = [asyncio.create_task(read_whole(tier, BLOB)) for _ in range(3)]
    await turns()
    for get in gets:
        get.cancel()
    await asyncio.gather(*gets, return_exceptions=True)
    assert await read_whole(tier, BLOB) == encoded
    assert faulty.calls["get"] == 2


async def test_an_error_is_everybodys_and_not_remembered(tier: SingleFlight, faulty: FaultyTier, arena: Arena) -> None:
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    gate = asyncio.Event()
    faulty.faults["get", 1] = Fault(delay=gate, error=TierUnavailableError("down"))
    gets = [asyncio.create_task(read_whole(tier, BLOB)) for _ in range(3)]
    await turns()
    gate.set()
    results = await asyncio.gather(*gets, return_exceptions=True)
    assert all(isinstance(result, TierUnavailableError) for result in results)
    assert await read_whole(tier, BLOB) == encoded


async def test_a_frame_that_fails_while_it_fills_is_not_joined_again(
    tier: SingleFlight, medium: DictTier, arena: Arena
) -> None:
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    gate = asyncio.Event()
    gate.set()
    medium.fill_gates, medium.fill_error = [gate, gate], TierUnavailableError("down")
    with pytest.raises(TierUnavailableError):
        await read_whole(tier, BLOB)
    await turns()
    medium.fill_gates = None
    assert await read_whole(tier, BLOB) == encoded


async def test_a_get_after_a_put_does_not_join_a_miss_from_before(
    tier: SingleFlight, faulty: FaultyTier, arena: Arena
) -> None:
    gate = asyncio.Event()
    faulty.faults["get", 1] = Fault(delay=gate)
    early = asyncio.create_task(read_whole(tier, BLOB))
    await turns()
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    assert await read_whole(tier, BLOB) == encoded
    gate.set()
    assert await early in (None, encoded)


async def test_a_get_after_a_delete_does_not_join_a_hit_from_before(
    tier: SingleFlight, medium: DictTier, arena: Arena
) -> None:
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    medium.fill_gates = gates = [asyncio.Event()]
    early = await tier.get(BLOB)
    await tier.delete([BLOB])
    assert await tier.get(BLOB) is None
    gates[0].set()
    assert early is not None
    await early.complete()
    assert bytes(early.view) == encoded
    early.release()


async def test_ranges_pass_by(tier: SingleFlight, faulty: FaultyTier, arena: Arena) -> None:
    encoded = await put_plain(tier, arena, BLOB, PLAIN)
    frames = await asyncio.gather(*(tier.get(BLOB, ByteRange(10, 20)) for _ in range(3)))
    for frame in frames:
        assert frame is not None
        assert bytes(frame.view) == encoded[10:20]
        frame.release()
    assert faulty.calls["get"] == 3
