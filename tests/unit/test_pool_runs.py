"""Work on a pool that writes into memory which its caller gives back when it goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvobj.errors import FrameCorruptError
from kvobj.tiers.pool_runs import to_its_end


class Gate:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.ended = False

    def work(self, *, fails: bool = False) -> int:
        self.begun.set()
        assert self.may_end.wait(10)
        self.ended = True
        if fails:
            raise FrameCorruptError("not what it says")
        return 7

    def fail(self) -> int:
        return self.work(fails=True)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.begun.wait, 10)


async def test_what_the_work_returns_or_raises_is_the_callers(pool: ThreadPoolExecutor) -> None:
    run, gate = to_its_end(pool), Gate()
    gate.may_end.set()
    assert await run(gate.work) == 7
    with pytest.raises(FrameCorruptError):
        await run(gate.fail)


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_goes_on_when_the_thread_is_done(pool: ThreadPoolExecutor, *, fails: bool) -> None:
    run, gate = to_its_end(pool), Gate()
    task = asyncio.ensure_future(run(gate.fail if fails else gate.work))
    await begun(gate)
    for _ in range(3):  # cancelled again while it waits
        task.cancel()
        await asyncio.wait([task], timeout=0.02)
        assert not task.done()
    gate.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.ended


async def test_work_that_has_not_begun_is_dropped(pool: ThreadPoolExecutor) -> None:
    run, first, second = to_its_end(pool), Gate(), Gate()
    running = asyncio.ensure_future(run(first.work))
    await begun(first)
    waiting = asyncio.ensure_future(run(second.work))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    first.may_end.set()
    assert await running == 7
    assert not second.begun.is_set()
