"""Reads of the remote tier: what is handed out when, what is a miss and what an error, and what goes on without its reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes_remote import down, refused
from remote_tier_world import MIB, NAMES, World, blob, remote_world, until

from kvobj.arena import PinnedFrame
from kvobj.errors import BusyError, InvalidRangeError, RemoteRefusedError, TierUnavailableError
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.health import RemoteState
from kvobj.tiers.remote.tier import UNBOUNDED_BYTES

PLAIN = bytes(range(256)) * 1024


@pytest.fixture
async def world(tmp_path: Path, shm_path: Path) -> AsyncIterator[World]:
    async with remote_world(tmp_path, shm_path) as world:
        yield world


async def test_a_frame_is_handed_out_with_its_first_bytes_and_not_before(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN)
    gate = world.bucket.gates["fill"] = asyncio.Semaphore(0)
    getting = asyncio.create_task(world.tier.get(blob(1)))
    await until(lambda: world.bucket.count("get") == 1)
    assert not getting.done()
    gate.release()
    frame = await getting
    assert frame is not None
    assert frame.progress is not None
    await frame.ready(1)
    assert 0 < frame.progress.filled < len(encoded)
    assert bytes(frame.view[: frame.progress.filled]) == encoded[: frame.progress.filled]
    for _ in range(3):
        gate.release()
    await frame.complete()
    assert bytes(frame.view) == encoded
    frame.release()


async def test_filling_goes_on_when_the_reader_lets_go(world: World) -> None:
    await world.put(blob(1), PLAIN)
    gate = world.bucket.gates["fill"] = asyncio.Semaphore(1)
    frame = await world.tier.get(blob(1))
    assert frame is not None
    other = frame.share()
    frame.release()
    assert world.arena.usage().reserved_bytes
    for _ in range(3):
        gate.release()
    await other.complete()
    assert other.progress is not None
    assert other.progress.done
    other.release()
    assert world.arena.usage().reserved_bytes == 0  # whoever has seen the end finds nobody filling


async def test_who_is_cancelled_before_the_first_byte_ends_the_read(world: World) -> None:
    await world.put(blob(1), PLAIN)
    world.bucket.gates["get"] = asyncio.Event()
    getting = asyncio.create_task(world.tier.get(blob(1)))
    await until(lambda: world.bucket.running == 1)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    await until(lambda: world.bucket.running == 0)
    await until(lambda: world.arena.usage().reserved_bytes == 0)


async def test_a_blob_of_another_process_is_found_by_one_listing_and_remembered(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN)
    await world.directory.forget([blob(1)])
    assert await world.read(blob(1)) == encoded
    assert await world.read(blob(1)) == encoded
    assert world.bucket.count("list") == 1
    place = world.directory.find(blob(1))
    assert place is not None
    assert (place.frame_bytes, place.name) == (len(encoded), world.names.name(NAMES))


async def test_what_was_never_there_is_a_miss_at_the_price_of_a_listing(world: World) -> None:
    assert await world.tier.get(blob(1)) is None
    assert [call for call, _ in world.bucket.requests] == ["list"]


async def test_objects_that_are_not_ours_are_passed_over(world: World) -> None:
    world.bucket.objects[f"{world.names.of_blob(blob(1))}README"] = b"not a blob"
    assert await world.tier.get(blob(1)) is None
    await world.put(blob(2), b"a blob")
    assert [each async for each in world.tier.scan()] == [blob(2)]


async def test_a_vanished_object_is_a_miss_and_forgotten(world: World) -> None:
    await world.put(blob(1), PLAIN)
    del world.bucket.objects[world.key(blob(1))]
    assert await world.tier.missing([blob(1)]) == []
    assert await world.tier.get(blob(1)) is None
    assert world.directory.find(blob(1)) is None
    assert await world.tier.missing([blob(1)]) == [blob(1)]
    assert (await world.tier.usage()).blobs == 0


@pytest.mark.parametrize("make", [down, refused])
async def test_a_server_that_does_not_answer_is_an_error_and_no_miss(world: World, make: type[Exception]) -> None:
    await world.put(blob(1), PLAIN)
    world.bucket.errors["get"] = world.bucket.errors["list"] = make()
    for sequence in (1, 2):
        with pytest.raises(TierUnavailableError):
            await world.tier.get(blob(sequence))
    assert world.arena.usage().reserved_bytes == 0
    world.bucket.errors.clear()
    assert await world.read(blob(1)) is not None


async def test_what_breaks_in_the_middle_ends_the_progress(world: World) -> None:
    await world.put(blob(1), PLAIN)
    world.bucket.errors["fill"] = down()
    frame = await world.tier.get(blob(1))
    assert frame is not None
    with pytest.raises(TierUnavailableError, match="does not answer"):
        await frame.complete()
    await frame.ready(100)
    frame.release()


async def test_a_body_that_ends_too_soon_is_an_error(world: World) -> None:
    await world.put(blob(1), PLAIN)
    world.bucket.stops_short = True
    frame = await world.tier.get(blob(1))
    assert frame is not None
    with pytest.raises(TierUnavailableError, match="fewer bytes"):
        await frame.complete()
    frame.release()


async def test_a_range_asks_for_no_more_than_itself(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN)
    frame = await world.tier.get(blob(1), ByteRange(100_000, 100_100))
    assert frame is not None
    await frame.complete()
    assert bytes(frame.view) == encoded[100_000:100_100]
    assert frame.pin.requested_bytes == 100
    frame.release()
    empty = await world.tier.get(blob(1), ByteRange(5, 5))
    assert empty is not None
    assert empty.size == 0
    empty.release()
    assert world.bucket.count("get") == 1
    with pytest.raises(InvalidRangeError):
        await world.tier.get(blob(1), ByteRange(0, len(encoded) + 1))


async def test_no_room_to_read_into_is_said_to_be_that(world: World) -> None:
    await world.put(blob(1), PLAIN)
    tier = world.another()
    tier._timeouts = type(tier._timeouts)(reserve_seconds=0.01)
    pin = await world.arena.reserve(16 * MIB, timeout_seconds=1)
    with pytest.raises(BusyError):
        await tier.get(blob(1))
    pin.release()


async def test_missing_asks_only_about_what_the_directory_does_not_know(world: World) -> None:
    for sequence in (1, 2, 3):
        await world.put(blob(sequence), b"x")
    await world.directory.forget([blob(2)])
    assert await world.tier.missing([blob(4), blob(3), blob(2), blob(1), blob(4)]) == [blob(4), blob(4)]
    assert [key for call, key in world.bucket.requests if call == "list"] == [
        world.names.of_blob(blob(4)),
        world.names.of_blob(blob(2)),
    ]


async def test_missing_asks_about_few_at_a_time(world: World) -> None:
    tier = world.another(lists_at_once=3)
    assert len(await tier.missing([blob(n) for n in range(40)])) == 40
    assert world.bucket.count("list") == 40
    assert world.bucket.running_max == 3


async def test_missing_never_takes_silence_for_absence(world: World) -> None:
    await world.put(blob(1), b"x")
    world.bucket.errors["list"] = down()
    assert await world.tier.missing([blob(1)]) == []
    with pytest.raises(TierUnavailableError):
        await world.tier.missing([blob(1), blob(2), blob(3)])


async def test_a_census_fills_the_directory(world: World) -> None:
    sizes = {blob(n): len(await world.put(blob(n), bytes(n))) for n in range(1, 6)}
    await world.directory.forget([blob(2), blob(4)])
    world.bucket.objects["store/blobs/README"] = b"?"
    found = await world.tier.census()
    assert (found.blobs, found.noted, found.foreign) == (5, 2, 1)
    assert found.frame_bytes == sum(sizes.values())
    assert world.directory.totals == (5, sum(sizes.values()))
    assert (await world.tier.census()).noted == 0


async def test_usage_says_that_nobody_knows_the_capacity(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN)
    usage = await world.tier.usage()
    assert (usage.capacity_bytes, usage.used_bytes, usage.blobs) == (UNBOUNDED_BYTES, len(encoded), 1)
    assert usage.mode == "unbounded"


async def test_availability_is_that_of_the_server(world: World) -> None:
    states: dict[RemoteState, bool] = {"ok": True, "probing": True, "degraded": True, "down": False, "refused": False}
    for state, is_available in states.items():
        world.bucket.set_state(state)
        assert world.tier.is_available == is_available
    world.bucket.set_state("ok")
    await world.tier.aclose()
    assert not world.tier.is_available


async def test_closing_gives_up_what_does_not_end_in_time(world: World) -> None:
    await world.put(blob(1), PLAIN)
    tier = world.another(close_seconds=0.01)
    world.bucket.gates["fill"] = asyncio.Semaphore(1)
    frame = await tier.get(blob(1))
    assert isinstance(frame, PinnedFrame)
    gate = world.bucket.gates["get"] = asyncio.Event()
    waiting = asyncio.create_task(tier.get(blob(1)))
    await until(lambda: world.bucket.running == 1)
    await tier.aclose()
    for reading in (frame.complete(), waiting):
        with pytest.raises(TierUnavailableError):
            await reading
    frame.release()
    assert world.arena.usage().reserved_bytes == 0
    with pytest.raises(TierUnavailableError):
        await tier.get(blob(1))
    gate.set()


async def test_a_refusal_says_what_the_server_said(world: World) -> None:
    await world.put(blob(1), PLAIN)
    world.bucket.errors["get"] = refused()
    with pytest.raises(RemoteRefusedError) as caught:
        await world.tier.get(blob(1))
    assert caught.value.reason == "InvalidAccessKeyId"
