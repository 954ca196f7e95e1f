"""Which sums are made together, and when a body is let go of."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import pytest

from kvobj.codec.md5_lanes import md5_lanes
from kvobj.tiers.remote.body_sums import BodySums

MIB = 2**20
T = TypeVar("T")
A = TypeVarTuple("A")


class HeldPool:
    """Does work when it is told to, in the order in which it came."""

    def __init__(self) -> None:
        self.jobs: list[tuple[asyncio.Future[Any], Callable[[], object], int]] = []

    def run(self, work: Callable[[*A], T], /, *arguments: *A) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        bodies = [*arguments, None][0]
        count = len(bodies) if isinstance(bodies, list) else 1
        self.jobs.append((done, lambda: work(*arguments), count))
        return done

    @property
    def bodies(self) -> list[int]:
        """How many bodies each job that waits has."""
        return [count for _, _, count in self.jobs]

    async def do_one(self) -> None:
        done, work, _ = self.jobs.pop(0)
        done.set_result(work())
        await settle()


def body(number: int, size: int = MIB) -> memoryview:
    return memoryview(bytes([number]) * size)


def md5(view: memoryview) -> bytes:
    return hashlib.md5(view, usedforsecurity=False).digest()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def wanted(sums: BodySums, views: list[memoryview]) -> list[asyncio.Task[bytes]]:
    return [asyncio.create_task(sums.md5(view)) for view in views]


async def test_what_is_wanted_together_is_made_together_and_what_comes_meanwhile_goes_next() -> None:
    pool = HeldPool()
    sums, views = BodySums(pool.run), [body(number) for number in range(15)]
    first = wanted(sums, views[:4])
    await settle()
    assert pool.bodies == [4]
    later = wanted(sums, views[4:])
    await settle()
    assert pool.bodies == [4], "one job at a time"
    await pool.do_one()
    assert pool.bodies == [md5_lanes()]
    assert all(task.done() for task in first)
    await pool.do_one()
    assert pool.bodies == [11 - md5_lanes()]
    await pool.do_one()
    assert [await task for task in first + later] == [md5(view) for view in views]
    assert pool.bodies == []


async def test_short_ones_wait_for_no_long_ones() -> None:
    pool = HeldPool()
    sums = BodySums(pool.run)
    (long,) = wanted(sums, [body(1)])
    await settle()
    short, shortest = wanted(sums, [body(2, MIB // 2), body(3, 1_000)])
    await settle()
    assert await shortest == md5(body(3, 1_000)), "no job at all"
    assert pool.bodies == [1, 1]
    pool.jobs.reverse()
    await pool.do_one()
    assert await short == md5(body(2, MIB // 2))
    assert not long.done()
    await pool.do_one()
    assert await long == md5(body(1))


@pytest.mark.parametrize("size", [MIB // 2, MIB], ids=["alone", "in company"])
async def test_who_is_cancelled_lets_go_of_the_body_only_when_nobody_reads_it(size: int) -> None:
    pool = HeldPool()
    sums = BodySums(pool.run)
    (task,) = wanted(sums, [body(1, size)])
    await settle()
    for _ in range(3):
        task.cancel()
        await settle()
    assert not task.done(), "its job may be reading"
    await pool.do_one()
    assert task.cancelled()


async def test_who_is_cancelled_before_its_turn_is_not_waited_for_and_not_read() -> None:
    pool = HeldPool()
    sums = BodySums(pool.run)
    (going,) = wanted(sums, [body(1)])
    await settle()
    given_up, kept = wanted(sums, [body(2), body(3)])
    await settle()
    given_up.cancel()
    await settle()
    assert given_up.cancelled()
    await pool.do_one()
    assert pool.bodies == [1]
    await pool.do_one()
    assert [await going, await kept] == [md5(body(1)), md5(body(3))]


async def test_a_job_that_fails_fails_all_of_it_and_nothing_after_it() -> None:
    pool = HeldPool()
    sums = BodySums(pool.run)
    failing = wanted(sums, [body(1), body(2)])
    await settle()
    pool.jobs.pop()[0].set_exception(RuntimeError("no thread"))
    assert [str(each) for each in await asyncio.gather(*failing, return_exceptions=True)] == ["no thread"] * 2
    (after,) = wanted(sums, [body(3)])
    await settle()
    await pool.do_one()
    assert await after == md5(body(3))
