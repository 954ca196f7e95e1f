"""The cascade: falls through, promotes without copying, passes failing tiers over, and brings nothing deleted back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import DictTier, Fault, FaultyTier
from fakes_arena import NAMES, frame_of, plain_of, put_plain, read_whole, small_arena

from kvobj.arena import Arena, PinnedFrame
from kvobj.errors import BusyError, FrameCorruptError, KvobjError, StoreFullError, TierUnavailableError
from kvobj.ids import BlobId, make_blob_id, sequence_of
from kvobj.metrics import Metrics
from kvobj.tiers.cascade import Cascade
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import BlobNames, ByteRange

BLOB = make_blob_id(1, 1)
PLAIN = plain_of(1, 300_000)


@dataclass
class Stack:
    """A cascade over two dicts, each behind faults to be set."""

    arena: Arena
    fast: DictTier
    slow: DictTier
    fast_faults: FaultyTier
    slow_faults: FaultyTier
    tier: Cascade
    metrics: Metrics

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"{name}_total", labels) or 0.0


@pytest.fixture
async def stack(shm_path: Path) -> AsyncIterator[Stack]:
    async with small_arena(shm_path) as arena:
        fast, slow, metrics = DictTier(arena, name="fast"), DictTier(arena, name="slow"), Metrics()
        fast_faults, slow_faults = FaultyTier(fast, arena), FaultyTier(slow, arena)
        tier = Cascade(fast_faults, slow_faults, instruments=TierInstruments(metrics), promotions_max=2)
        yield Stack(arena, fast, slow, fast_faults, slow_faults, tier, metrics)
        await tier.aclose()
        assert arena.usage().reserved_bytes == 0


async def test_a_slow_hit_is_promoted_as_the_same_extent(stack: Stack) -> None:
    encoded = await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    frame = await stack.tier.get(BLOB)
    assert frame is not None
    assert frame.tier == "slow"
    await stack.tier.promotions_done()
    assert stack.fast.frames[BLOB].pin.extent == frame.pin.extent
    frame.release()
    again = await stack.tier.get(BLOB)
    assert again is not None
    assert again.tier == "fast"
    assert bytes(again.view) == encoded
    again.release()
    assert stack.counted("kvobj_tier_promotions", outcome="done") == 1


async def test_a_frame_is_promoted_only_once_it_is_filled(stack: Stack) -> None:
    encoded = await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    stack.slow.fill_gates = gates = [asyncio.Event(), asyncio.Event()]
    gates[0].set()
    frame = await stack.tier.get(BLOB)
    assert frame is not None
    await frame.ready(1)
    assert await stack.fast.missing([BLOB]) == [BLOB]
    gates[1].set()
    await stack.tier.promotions_done()
    frame.release()
    assert await read_whole(stack.fast, BLOB) == encoded


async def test_a_frame_that_fails_to_fill_is_not_promoted(stack: Stack) -> None:
    await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    gate = asyncio.Event()
    gate.set()
    stack.slow.fill_gates, stack.slow.fill_error = [gate, gate], FrameCorruptError("wrong")
    with pytest.raises(FrameCorruptError):
        await read_whole(stack.tier, BLOB)
    await stack.tier.promotions_done()
    assert not stack.fast.frames
    assert stack.counted("kvobj_tier_promotions", outcome="failed") == 1


async def test_ranges_are_not_promoted(stack: Stack) -> None:
    encoded = await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    frame = await stack.tier.get(BLOB, ByteRange(5, 9))
    assert frame is not None
    assert bytes(frame.view) == encoded[5:9]
    frame.release()
    await stack.tier.promotions_done()
    assert not stack.fast.frames


async def test_what_admission_refuses_is_read_and_not_promoted(stack: Stack) -> None:
    encoded = await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    instruments = TierInstruments(Metrics())
    tier = Cascade(stack.fast, stack.slow, instruments=instruments, admit=lambda _, frame_bytes: frame_bytes < 1000)
    assert await read_whole(tier, BLOB) == encoded
    await tier.promotions_done()
    assert not stack.fast.frames


async def test_promotions_are_bounded(stack: Stack) -> None:
    stack.fast_faults.faults["put", 0] = Fault(delay=(gate := asyncio.Event()))
    for sequence in range(1, 5):
        blob_id = make_blob_id(1, sequence)
        encoded = await put_plain(stack.slow, stack.arena, blob_id, plain_of(sequence, 1000))
        assert await read_whole(stack.tier, blob_id) == encoded
    gate.set()
    await stack.tier.promotions_done()
    assert len(stack.fast.frames) == 2
    assert stack.counted("kvobj_tier_promotions", outcome="skipped") == 2


@pytest.mark.parametrize("error", [TierUnavailableError("down"), FrameCorruptError("wrong")])
async def test_a_failing_fast_tier_makes_a_slower_hit(stack: Stack, error: KvobjError) -> None:
    encoded = await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    stack.fast_faults.faults["get", 0] = Fault(error=error)
    assert await read_whole(stack.tier, BLOB) == encoded
    assert stack.counted("kvobj_tier_passed_over", tier="fast") == 1


@pytest.mark.parametrize("error", [TierUnavailableError("down"), FrameCorruptError("wrong")])
async def test_a_failing_slow_tier_makes_a_miss(stack: Stack, error: KvobjError) -> None:
    await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    stack.slow_faults.faults["get", 0] = Fault(error=error)
    assert await stack.tier.get(BLOB) is None
    assert stack.counted("kvobj_tier_passed_over", tier="slow") == 1


async def test_no_room_to_read_into_is_no_miss(stack: Stack) -> None:
    await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    stack.slow_faults.faults["get", 1] = Fault(error=BusyError("arena full"))
    with pytest.raises(BusyError):
        await stack.tier.get(BLOB)


async def test_a_blob_deleted_while_it_rises_stays_deleted(stack: Stack) -> None:
    await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    stack.fast_faults.faults["put", 1] = Fault(delay=asyncio.Event())
    frame = await stack.tier.get(BLOB)
    assert frame is not None
    await asyncio.sleep(0)
    await stack.tier.delete([BLOB])
    await stack.tier.promotions_done()
    assert not stack.fast.frames
    assert not stack.slow.frames
    frame.release()


async def test_a_blob_deleted_right_after_the_hit_stays_deleted(stack: Stack) -> None:
    await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    frame = await stack.tier.get(BLOB)
    assert frame is not None
    await stack.tier.delete([BLOB])
    await stack.tier.promotions_done()
    assert not stack.fast.frames
    frame.release()


async def test_a_blob_deleted_while_it_is_read_is_not_promoted(stack: Stack) -> None:
    encoded = await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    stack.slow_faults.faults["get", 1] = Fault(answer_delay=(answer := asyncio.Event()))
    getting = asyncio.create_task(read_whole(stack.tier, BLOB))
    await stack.slow_faults.answer_held.wait()
    await stack.tier.delete([BLOB])
    answer.set()
    assert await getting == encoded
    await stack.tier.promotions_done()
    assert not stack.fast.frames


async def test_a_put_is_in_both_and_a_full_cache_is_no_reason_to_fail(stack: Stack) -> None:
    await put_plain(stack.tier, stack.arena, BLOB, PLAIN)
    assert BLOB in stack.fast.frames
    assert BLOB in stack.slow.frames
    stack.fast_faults.faults["put", 0] = Fault(error=StoreFullError("full"))
    other = make_blob_id(1, 2)
    await put_plain(stack.tier, stack.arena, other, PLAIN)
    assert other not in stack.fast.frames
    assert other in stack.slow.frames


async def test_a_put_that_its_home_refuses_is_in_neither(stack: Stack) -> None:
    stack.slow_faults.faults["put", 1] = Fault(error=StoreFullError("full"))
    frame = await frame_of(stack.arena, PLAIN)
    with pytest.raises(StoreFullError):
        await stack.tier.put(BLOB, frame, NAMES)
    frame.release()
    assert await stack.tier.get(BLOB) is None
    assert await stack.tier.missing([BLOB]) == [BLOB]


async def test_missing_and_scan_are_over_both(stack: Stack) -> None:
    for sequence, tiers in {1: [stack.fast], 2: [stack.slow], 3: [stack.fast, stack.slow], 5: [stack.fast]}.items():
        for tier in tiers:
            await put_plain(tier, stack.arena, make_blob_id(1, sequence), PLAIN)
    assert [sequence_of(each) async for each in stack.tier.scan()] == [1, 2, 3, 5]
    missing = await stack.tier.missing([make_blob_id(1, sequence) for sequence in range(1, 7)])
    assert [sequence_of(each) for each in missing] == [4, 6]


async def test_a_silent_tier_makes_missing_an_error(stack: Stack) -> None:
    stack.slow_faults.faults["missing", 1] = Fault(error=TierUnavailableError("down"))
    with pytest.raises(TierUnavailableError):
        await stack.tier.missing([BLOB])


class Names:
    """Admits under names of its own, or nothing."""

    def __init__(self, *, admits: bool = True) -> None:
        self.admits = admits
        self.asked: list[tuple[BlobId, int]] = []
        self.told: list[BlobId] = []

    async def admit(self, blob_id: BlobId, frame_bytes: int) -> BlobNames | None:
        self.asked.append((blob_id, frame_bytes))
        return BlobNames("own", "name") if self.admits else None

    async def promoted(self, blob_id: BlobId) -> None:
        self.told.append(blob_id)


class NamedTier(DictTier):
    """Remembers under which names it was given blobs."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, name="fast")
        self.named: dict[BlobId, BlobNames] = {}

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        await super().put(blob_id, frame, names)
        self.named[blob_id] = names


async def test_what_rises_into_a_tier_that_is_somebodys_rises_under_the_names_that_it_is_admitted_with(
    stack: Stack,
) -> None:
    encoded = await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    fast, admission = NamedTier(stack.arena), Names()
    tier = Cascade(fast, stack.slow, instruments=TierInstruments(Metrics()), admission=admission)
    assert await read_whole(tier, BLOB) == encoded
    await tier.promotions_done()
    assert fast.named == {BLOB: BlobNames("own", "name")}
    assert admission.asked == [(BLOB, len(encoded))]
    assert admission.told == [BLOB]
    await fast.aclose()


async def test_what_is_not_admitted_does_not_rise(stack: Stack) -> None:
    await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    fast, admission, metrics = NamedTier(stack.arena), Names(admits=False), Metrics()
    tier = Cascade(fast, stack.slow, instruments=TierInstruments(metrics), admission=admission)
    await read_whole(tier, BLOB)
    await tier.promotions_done()
    assert not fast.frames
    assert not admission.told
    assert metrics.registry.get_sample_value("kvobj_tier_promotions_total", {"outcome": "refused"}) == 1


async def test_nobody_is_asked_before_the_frame_is_whole(stack: Stack) -> None:
    await put_plain(stack.slow, stack.arena, BLOB, PLAIN)
    stack.slow.fill_gates = gates = [asyncio.Event(), asyncio.Event()]
    gates[0].set()
    fast, admission = NamedTier(stack.arena), Names()
    tier = Cascade(fast, stack.slow, instruments=TierInstruments(Metrics()), admission=admission)
    frame = await tier.get(BLOB)
    assert frame is not None
    await frame.ready(1)
    assert not admission.asked
    gates[1].set()
    await tier.promotions_done()
    assert admission.told == [BLOB]
    frame.release()
    await fast.aclose()
