"""Who passes a request that waits for room in one piece, and how it is served all the same."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from arena_world import MIB, Open, arenas_at

from kvobj.arena import Arena, Pin
from kvobj.errors import BusyError

KIB = 1024


@pytest.fixture
async def open_arena(tmp_path: Path) -> AsyncIterator[Open]:
    async with arenas_at(tmp_path / "arena") as open_one:
        yield open_one


@pytest.fixture
def alone_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """For how long a first waiter is not passed, from its next time on."""
    return lambda seconds: monkeypatch.setattr("kvobj.arena.queue.ALONE_SECONDS", seconds)


async def scattered(open_arena: Open) -> tuple[Arena, list[Pin]]:
    """An arena of 1 MiB with four gaps of 128 KiB, and the pins between them."""
    arena = await open_arena(capacity_bytes=MIB)
    await arena.populate()
    pins = [await arena.reserve(128 * KIB, timeout_seconds=0) for _ in range(8)]
    arena.release_many(pins[::2])
    return arena, pins[1::2]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def asked(arena: Arena, *lengths: int) -> asyncio.Task[list[Pin]]:
    return asyncio.create_task(arena.reserve_many(lengths, timeout_seconds=30))


async def one_waits(open_arena: Open, length: int) -> tuple[Arena, list[Pin], asyncio.Task[list[Pin]]]:
    """`scattered`, and a request for more in one piece than there is, which is the first that waits."""
    arena, between = await scattered(open_arena)
    large = asked(arena, length)
    await turns()
    return arena, between, large


async def test_requests_that_fit_pass_one_that_waits_for_a_piece_that_there_is_not(open_arena: Open) -> None:
    arena, between, large = await one_waits(open_arena, 256 * KIB)
    (pin,) = await arena.reserve_many([128 * KIB], timeout_seconds=20)
    assert not large.done()
    arena.release_many([pin, *between[:2]])
    arena.release_many([*await large, *between[2:]])
    assert arena.usage().reserved_bytes == 0


async def test_what_comes_free_is_the_first_ones_alone_at_first(
    open_arena: Open, alone_for: Callable[[float], None]
) -> None:
    alone_for(60)
    arena, between, large = await one_waits(open_arena, 256 * KIB)
    with pytest.raises(BusyError):
        await arena.reserve(4 * KIB, timeout_seconds=0.01)
    assert arena.try_reserve(4 * KIB) is None
    between.pop(0).release()
    arena.release_many([*await large, *between])


async def test_those_that_passed_hold_no_more_than_who_they_passed_asks_for(
    open_arena: Open, alone_for: Callable[[float], None]
) -> None:
    alone_for(0)
    arena, between, large = await one_waits(open_arena, 256 * KIB)
    longer = asked(arena, 264 * KIB)
    small = [asked(arena, 128 * KIB) for _ in range(3)]
    passed = [pin for each in small[:2] for pin in await each]
    await turns()
    assert [each.done() for each in (large, longer, small[2])] == [False] * 3
    assert arena.usage().reserved_bytes == 6 * 128 * KIB, "a gap is left, and is not given to more of them"
    passed.pop().release()
    passed += await small[2]
    assert not large.done()
    arena.release_many([*passed, *between])
    arena.release_many([*await large, *await longer])


async def test_who_was_passed_by_as_much_as_it_asks_for_is_alone_again(
    open_arena: Open, alone_for: Callable[[float], None]
) -> None:
    alone_for(0)
    arena, between, large = await one_waits(open_arena, 256 * KIB)
    alone_for(60)
    passed = [pin for each in (asked(arena, 128 * KIB), asked(arena, 128 * KIB)) for pin in await each]
    small = asked(arena, 128 * KIB)
    await turns()
    arena.release_many(passed)
    await turns()
    assert not small.done(), "there is room, and it is not given to those behind"
    between.pop().release()
    arena.release_many(await large)
    arena.release_many([*await small, *between])


async def test_who_passes_has_all_that_it_asked_for_or_nothing(
    open_arena: Open, alone_for: Callable[[float], None]
) -> None:
    alone_for(0)
    arena, between, large = await one_waits(open_arena, 512 * KIB)
    double = asked(arena, 128 * KIB, 132 * KIB)
    await turns()
    assert not double.done()
    assert arena.usage().reserved_bytes == 4 * 128 * KIB
    (pin,) = await asked(arena, 128 * KIB)
    arena.release_many([pin, *between])
    arena.release_many(await large)
    arena.release_many(await double)


async def test_nobody_passes_while_room_is_reclaimed_for_the_first_one(
    open_arena: Open, alone_for: Callable[[float], None]
) -> None:
    alone_for(0)
    arena, between = await scattered(open_arena)
    reclaiming, may_end = asyncio.Event(), asyncio.Event()

    async def reclaim(_size_bytes: int) -> int:
        reclaiming.set()
        await may_end.wait()
        return 0

    arena.set_reclaimer(reclaim)
    large = asked(arena, 256 * KIB)
    await reclaiming.wait()
    small = asked(arena, 128 * KIB)
    await turns()
    assert not small.done()
    may_end.set()
    passed = await small
    assert not large.done()
    arena.set_reclaimer(None)
    arena.release_many([*passed, *between])
    arena.release_many(await large)


async def test_a_request_that_is_cancelled_as_it_passes_leaks_nothing(
    open_arena: Open, alone_for: Callable[[float], None]
) -> None:
    alone_for(0)
    arena, between, large = await one_waits(open_arena, 256 * KIB)
    for count in range(6):
        small = asked(arena, 128 * KIB)
        await turns(count)
        small.cancel()
        with suppress(asyncio.CancelledError):
            arena.release_many(await small)
    assert arena.usage().reserved_bytes == 4 * 128 * KIB
    arena.release_many(between)
    arena.release_many(await large)


async def test_a_stream_of_small_requests_does_not_keep_a_large_one_waiting(open_arena: Open) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    await arena.populate()
    is_over = False

    async def read() -> None:
        while not is_over:
            pin = await arena.reserve(60 * KIB, timeout_seconds=20)
            await turns(3)
            pin.release()

    reading = [asyncio.create_task(read()) for _ in range(40)]
    await turns()
    for _ in range(3):
        (await arena.reserve(900 * KIB, timeout_seconds=20)).release()
    is_over = True
    await asyncio.gather(*reading)
    assert arena.usage().reserved_bytes == 0
