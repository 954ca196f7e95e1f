"""Bytes under one bound: no more inside than fit, in turn, and nobody's place is lost when somebody gives up."""

from __future__ import annotations

import asyncio

import pytest

from kvobj.errors import BusyError, EntityTooLargeError
from kvobj.store.byte_gate import ByteGate


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_fits_goes_in_at_once_and_who_never_fits_is_refused() -> None:
    gate = ByteGate(limit_bytes=10, wait_seconds=60)
    await gate.enter(4)
    await gate.enter(6)
    with pytest.raises(EntityTooLargeError):
        await gate.enter(11)
    gate.leave(6)
    await gate.enter(6)


async def test_who_waits_goes_in_in_turn() -> None:
    gate = ByteGate(limit_bytes=10, wait_seconds=60)
    await gate.enter(10)
    order: list[int] = []

    async def enter(size_bytes: int) -> None:
        await gate.enter(size_bytes)
        order.append(size_bytes)

    tasks = [asyncio.create_task(enter(size_bytes)) for size_bytes in (8, 1, 2)]
    await settle()
    assert order == []
    gate.leave(5)
    await settle()
    assert order == []  # the first in turn does not fit yet, and nobody passes it
    gate.leave(5)
    await settle()
    assert order == [8, 1]
    gate.leave(8)
    await asyncio.gather(*tasks)
    assert order == [8, 1, 2]


async def test_a_wait_without_end_is_busy_and_leaves_the_gate_as_it_was() -> None:
    gate = ByteGate(limit_bytes=10, wait_seconds=0)
    await gate.enter(8)
    with pytest.raises(BusyError):
        await gate.enter(3)
    await gate.enter(2)
    gate.leave(8)
    gate.leave(2)
    await gate.enter(10)


async def test_who_is_cancelled_lets_those_behind_in() -> None:
    gate = ByteGate(limit_bytes=10, wait_seconds=60)
    await gate.enter(8)
    large = asyncio.create_task(gate.enter(9))
    small = asyncio.create_task(gate.enter(2))
    await settle()
    assert not small.done()
    large.cancel()
    await settle()
    assert small.done()
    gate.leave(8)
    gate.leave(2)
    await gate.enter(10)


async def test_who_is_set_aside_keeps_nobody_out_up_to_a_bound() -> None:
    gate = ByteGate(limit_bytes=10, wait_seconds=60)
    await gate.enter(4)
    await gate.enter(6)
    waiting = asyncio.create_task(gate.enter(5))
    await settle()
    assert not waiting.done()
    gate.set_aside(4)
    await settle()
    assert not waiting.done()  # four are free
    gate.set_aside(6)
    await settle()
    assert waiting.done()  # ten are aside, five of which count
    behind = asyncio.create_task(gate.enter(4))
    await settle()
    assert not behind.done()
    gate.leave_aside(6)
    await settle()
    assert behind.done()
    gate.leave_aside(4)
    gate.leave(5)
    gate.leave(4)
    await gate.enter(10)
