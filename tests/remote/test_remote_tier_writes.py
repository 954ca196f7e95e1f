"""Puts and deletes of the remote tier: what is on the server when, what a failure leaves, and what costs a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes_remote import down
from remote_tier_world import NAMES, World, blob, raw_frame, remote_world, until

from kvobj.errors import RemoteRefusedError, StoreFullError, TierUnavailableError
from kvobj.tiers.protocol import BlobNames, ByteRange

PLAIN = bytes(range(256)) * 1024


@pytest.fixture
async def world(tmp_path: Path, shm_path: Path) -> AsyncIterator[World]:
    async with remote_world(tmp_path, shm_path) as world:
        yield world


async def test_a_put_lies_under_its_names(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN, BlobNames("photos", "2024/a b.jpg"))
    assert world.bucket.objects == {f"store/blobs/{blob(1).hex()}/photos/2024/a%20b.jpg": encoded}


async def test_a_blob_that_is_there_is_not_sent_again(world: World) -> None:
    await world.put(blob(1), PLAIN)
    await world.put(blob(1), PLAIN)
    assert world.bucket.count("put") == 1


async def test_puts_of_one_blob_at_the_same_time_are_one(world: World) -> None:
    gate = world.bucket.gates["put"] = asyncio.Event()
    puts = [asyncio.create_task(world.put(blob(1), PLAIN)) for _ in range(3)]
    await until(lambda: world.tier.is_in_flight(blob(1)))
    assert world.tier.in_flight == {blob(1)}
    gate.set()
    await asyncio.gather(*puts)
    assert world.bucket.count("put") == 1
    assert not world.tier.in_flight


async def test_who_gives_up_a_put_takes_it_from_nobody_else(world: World) -> None:
    gate = world.bucket.gates["put"] = asyncio.Event()
    first, second = (asyncio.create_task(world.put(blob(1), PLAIN)) for _ in range(2))
    await until(lambda: world.bucket.running == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.set()
    encoded = await second
    assert await world.read(blob(1)) == encoded


async def test_a_put_that_nobody_wants_any_more_is_given_up(world: World) -> None:
    gate = world.bucket.gates["put"] = asyncio.Event()
    putting = asyncio.create_task(world.put(blob(1), PLAIN))
    await until(lambda: world.bucket.running == 1)
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    await until(lambda: not world.tier.in_flight)
    assert world.bucket.count("put cancelled") == 1
    assert world.arena.usage().reserved_bytes == 0
    assert world.directory.find(blob(1)) is None
    gate.set()
    encoded = await world.put(blob(1), PLAIN)
    assert await world.read(blob(1)) == encoded


async def test_a_put_behind_one_that_was_given_up_is_a_put_of_its_own(world: World) -> None:
    gate = world.bucket.gates["put"] = asyncio.Event()
    first = asyncio.create_task(world.put(blob(1), PLAIN))
    await until(lambda: world.bucket.running == 1)
    first.cancel()
    second = asyncio.create_task(world.put(blob(1), PLAIN))
    await asyncio.gather(first, return_exceptions=True)
    gate.set()
    encoded = await second
    assert world.bucket.objects == {world.key(blob(1)): encoded}


async def test_few_puts_are_under_way_at_a_time(world: World) -> None:
    world.tier = world.another(puts_at_once=2)
    await asyncio.gather(*(world.put(blob(n), b"x") for n in range(1, 12)))
    assert world.bucket.running_max == 2
    assert world.bucket.count("put") == 11


@pytest.mark.parametrize("error", [down(), StoreFullError("the remote is full")])
async def test_a_failed_put_holds_nothing_and_can_be_repeated(world: World, error: Exception) -> None:
    world.bucket.errors["put"] = error
    with pytest.raises(type(error)):
        await world.put(blob(1), PLAIN)
    assert world.directory.find(blob(1)) is None
    assert await world.tier.get(blob(1)) is None
    assert not world.tier.in_flight
    world.bucket.errors.clear()
    encoded = await world.put(blob(1), PLAIN)
    assert await world.read(blob(1)) == encoded


async def test_what_a_failed_put_left_there_is_removed_by_its_delete(world: World) -> None:
    world.bucket.errors["put"] = down()
    with pytest.raises(TierUnavailableError):
        await world.put(blob(1), PLAIN)
    world.bucket.objects[world.key(blob(1))] = b"it came to be all the same"
    assert world.tier.may_hold([blob(1), blob(2)]) == {blob(1)}
    await world.tier.delete([blob(1)])
    assert not world.bucket.objects
    await world.tier.delete([blob(1)])
    assert world.bucket.count("delete") == 1


async def test_only_whole_frames_are_put(world: World) -> None:
    frame = await raw_frame(world.arena, PLAIN)
    piece = frame.piece(0, 100)
    with pytest.raises(ValueError):
        await world.tier.put(blob(1), piece, NAMES)
    piece.release()
    frame.release()
    assert not world.bucket.requests


async def test_deleting_what_is_not_there_costs_no_request(world: World) -> None:
    await world.put(blob(1), b"x")
    await world.tier.delete([blob(n) for n in range(2, 3000)])
    world.bucket.errors["delete"] = down()
    await world.tier.delete([blob(2)])
    assert world.bucket.count("delete") == 0


async def test_deletes_go_in_batches(world: World) -> None:
    for sequence in range(5):
        await world.put(blob(sequence), b"x")
    await world.tier.delete([blob(n) for n in range(100)])
    keys = [world.key(blob(n)) for n in range(5)]
    assert [sorted(key.split(",")) for call, key in world.bucket.requests if call == "delete"] == [keys]
    assert world.directory.totals == (0, 0)


async def test_what_the_server_did_not_delete_is_held_as_before(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN)
    world.bucket.errors["delete"] = down()
    with pytest.raises(TierUnavailableError):
        await world.tier.delete([blob(1)])
    assert await world.read(blob(1)) == encoded
    world.bucket.errors.clear()
    await world.tier.delete([blob(1)])
    assert await world.tier.get(blob(1)) is None
    assert not world.bucket.objects


async def test_a_delete_hides_at_once_and_waits_for_who_is_reading(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN)
    await world.put(blob(2), b"x")
    fill = world.bucket.gates["fill"] = asyncio.Semaphore(1)
    reader = await world.tier.get(blob(1))
    assert reader is not None
    deleting = asyncio.create_task(world.tier.delete([blob(1), blob(2)]))
    await until(lambda: world.key(blob(2)) not in world.bucket.objects)
    assert await world.tier.get(blob(1)) is None
    assert await world.tier.missing([blob(1)]) == [blob(1)]
    assert not deleting.done()
    for _ in range(3):
        fill.release()
    await reader.complete()
    assert bytes(reader.view) == encoded
    reader.release()
    await deleting
    assert not world.bucket.objects


async def test_a_put_waits_for_a_delete_of_the_same_blob(world: World) -> None:
    await world.put(blob(1), PLAIN)
    gate = world.bucket.gates["delete"] = asyncio.Event()
    deleting = asyncio.create_task(world.tier.delete([blob(1)]))
    await until(lambda: world.bucket.running == 1)
    putting = asyncio.create_task(world.put(blob(1), PLAIN))
    deleting_too = asyncio.create_task(world.tier.delete([blob(1)]))
    for _ in range(100):
        await asyncio.sleep(0)
    assert world.bucket.count("put") == 1
    gate.set()
    encoded = await putting
    await asyncio.gather(deleting, deleting_too)
    assert await world.read(blob(1)) in (None, encoded)
    await world.put(blob(1), PLAIN)
    assert await world.read(blob(1)) == encoded


async def test_a_delete_waits_for_a_put_of_the_same_blob(world: World) -> None:
    gate = world.bucket.gates["put"] = asyncio.Event()
    putting = asyncio.create_task(world.put(blob(1), PLAIN))
    await until(lambda: world.bucket.running == 1)
    deleting = asyncio.create_task(world.tier.delete([blob(1)]))
    await asyncio.sleep(0)
    gate.set()
    await putting
    await deleting
    assert not world.bucket.objects
    assert world.directory.find(blob(1)) is None


async def test_a_delete_goes_on_without_its_caller(world: World) -> None:
    await world.put(blob(1), PLAIN)
    gate = world.bucket.gates["delete"] = asyncio.Event()
    deleting = asyncio.create_task(world.tier.delete([blob(1)]))
    await until(lambda: world.bucket.running == 1)
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)
    gate.set()
    await until(lambda: world.directory.find(blob(1)) is None)
    assert not world.bucket.objects


async def test_a_store_that_another_goes_on_with_changes_nothing_there(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN)
    world.may_write = False
    with pytest.raises(RemoteRefusedError) as caught:
        await world.put(blob(2), PLAIN)
    assert caught.value.reason == "fenced"
    with pytest.raises(RemoteRefusedError):
        await world.tier.delete([blob(1)])
    await world.tier.delete([blob(2)])
    assert await world.read(blob(1)) == encoded
    frame = await world.tier.get(blob(1), ByteRange(0, 10))
    assert frame is not None
    frame.release()


async def test_a_spoiled_object_is_replaced_where_it_lies(world: World) -> None:
    encoded = await world.put(blob(1), PLAIN)
    world.bucket.objects[world.key(blob(1))] = bytes(len(encoded))
    frame = await raw_frame(world.arena, PLAIN)
    gate = world.bucket.gates["put"] = asyncio.Event()
    replacing = asyncio.create_task(world.tier.replace(blob(1), frame, NAMES))
    await until(lambda: world.tier.is_in_flight(blob(1)))
    with pytest.raises(TierUnavailableError):
        await world.tier.replace(blob(1), frame, NAMES)
    gate.set()
    await replacing
    assert not world.tier.in_flight
    assert await world.read(blob(1)) == encoded
    for other in (blob(2), blob(1)):
        if other == blob(1):
            await world.tier.delete([other])
        with pytest.raises(TierUnavailableError, match="no such frame"):
            await world.tier.replace(other, frame, NAMES)
    frame.release()


async def test_a_closed_tier_takes_nothing(world: World) -> None:
    frame = await raw_frame(world.arena, PLAIN)
    await world.tier.aclose()
    with pytest.raises(TierUnavailableError):
        await world.tier.put(blob(1), frame, NAMES)
    with pytest.raises(TierUnavailableError):
        await world.tier.delete([blob(1)])
    frame.release()
