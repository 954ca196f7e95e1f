"""Requests are begun where their bytes arrive and go on in their connection's task: what waits, fails or is cancelled there."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, copy_context

import pytest

from kvobj.api.http.early_start import Begun, begin
from kvobj.api.http.limits import RequestGate


class Parked:
    """A task that sleeps until it is given what was begun for it."""

    def __init__(self) -> None:
        self._given: asyncio.Future[Begun[str]] = asyncio.get_running_loop().create_future()
        self.context = copy_context()
        self.task = asyncio.create_task(self._run(), context=self.context)

    async def _run(self) -> str:
        return await (await self._given)

    def give(self, begun: str | Begun[str]) -> None:
        assert isinstance(begun, Begun)
        self._given.set_result(begun)


async def within(parked: Parked, coroutine: object) -> str | Begun[str]:
    """Begin it from a callback of the loop, where no task runs."""
    done: asyncio.Future[str | Begun[str]] = asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            done.set_result(begin(coroutine, parked.task, parked.context))  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - whatever it raised
            done.set_exception(error)

    asyncio.get_running_loop().call_soon(run)
    return await done


async def test_what_never_waits_is_over_at_once() -> None:
    parked = Parked()

    async def answer() -> str:
        assert asyncio.current_task() is parked.task
        return "answered"

    assert await within(parked, answer()) == "answered"
    parked.task.cancel()


async def test_what_is_set_before_the_first_wait_is_set_after_it_and_can_be_taken_back() -> None:
    parked, event = Parked(), asyncio.Event()
    variable: ContextVar[str] = ContextVar("variable", default="outside")

    async def answer() -> str:
        token = variable.set("within")
        await event.wait()
        seen = variable.get()
        variable.reset(token)
        return f"{seen}, then {variable.get()}"

    parked.give(await within(parked, answer()))
    assert variable.get() == "outside"
    event.set()
    assert await parked.task == "within, then outside"


async def test_what_waits_goes_on_in_its_task() -> None:
    parked, event = Parked(), asyncio.Event()

    async def answer() -> str:
        async with asyncio.timeout(30):  # binds itself to the task
            await event.wait()
            await asyncio.sleep(0)
        assert asyncio.current_task() is parked.task
        return "answered"

    parked.give(await within(parked, answer()))
    event.set()
    assert await parked.task == "answered"


async def test_a_deadline_that_was_set_before_the_hand_over_ends_it_after() -> None:
    parked = Parked()
    deadlines: list[asyncio.Timeout] = []

    async def answer() -> str:
        try:
            async with asyncio.timeout(None) as deadline:
                deadlines.append(deadline)
                await asyncio.Event().wait()
        except TimeoutError:
            return "too late"
        return "answered"

    parked.give(await within(parked, answer()))
    deadlines[0].reschedule(asyncio.get_running_loop().time())
    assert await parked.task == "too late"


async def test_what_waited_may_go_on_before_its_task_and_be_over() -> None:
    parked, loop = Parked(), asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()

    async def answer() -> str:
        assert await first == 1
        assert asyncio.current_task() is parked.task
        await second
        return "answered"

    begun = await within(parked, answer())
    assert isinstance(begun, Begun)
    assert begun.waits_for is first
    gone_on: list[str | Begun[str]] = []
    for future in (first, second):
        assert isinstance(begun, Begun)
        future.set_result(1)

        def go_on(waiting: Begun[str] = begun) -> None:
            gone_on.append(waiting.go_on(parked.task, parked.context))

        loop.call_soon(go_on)
        await asyncio.sleep(0)
        begun = gone_on[-1]
    assert begun == "answered"
    parked.task.cancel()


async def test_cancelling_the_task_cancels_what_was_begun_for_it() -> None:
    parked, ended = Parked(), asyncio.Event()

    async def answer() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "answered"

    parked.give(await within(parked, answer()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    parked.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await parked.task
    assert ended.is_set()


async def test_an_error_takes_the_place_of_what_is_waited_for() -> None:
    parked = Parked()

    async def answer() -> str:
        try:
            await asyncio.Event().wait()
        except ConnectionError:
            await asyncio.sleep(0)
            return "lost"
        return "answered"

    begun = await within(parked, answer())
    assert isinstance(begun, Begun)
    assert await begun.fail(ConnectionResetError()) == "lost"
    parked.task.cancel()


async def test_a_cancellation_that_takes_its_place_ends_what_is_waited_for() -> None:
    parked = Parked()
    children: list[asyncio.Task[bool]] = []

    async def answer() -> str:
        children.extend(asyncio.create_task(asyncio.Event().wait()) for _ in range(2))
        await asyncio.gather(*children)
        return "answered"

    begun = await within(parked, answer())
    assert isinstance(begun, Begun)
    with pytest.raises(asyncio.CancelledError):
        await begun.fail(asyncio.CancelledError())
    assert [child.cancelled() for child in children] == [True, True]
    parked.task.cancel()


async def test_what_fails_at_once_is_told_at_once() -> None:
    parked = Parked()

    async def answer() -> str:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await within(parked, answer())
    parked.task.cancel()


async def test_a_slot_of_the_gate_goes_to_who_waits_longest_and_is_never_lost() -> None:
    gate = RequestGate(running=1, queued=2, seconds=30)
    assert gate.enter_now()
    first, second = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
    await asyncio.sleep(0)
    assert not gate.enter_now()
    assert not await gate.enter()  # the queue is full
    gate.leave()
    assert not gate.enter_now()
    assert await first
    gate.leave()
    second.cancel()  # in the moment in which it is given the slot
    with pytest.raises(asyncio.CancelledError):
        await second
    assert gate.enter_now()


async def test_the_gate_turns_away_who_has_waited_too_long() -> None:
    gate = RequestGate(running=1, queued=1, seconds=0.001)
    assert await gate.enter()
    assert not await gate.enter()
    gate.leave()
    assert gate.enter_now()
