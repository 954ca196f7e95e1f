"""A coroutine that is begun outside of its task, and goes on in the task from where it first has to wait.

Most requests for what lies in memory never wait. To wake their connection's task for each would cost a future, two turns of the
event loop and a look at all sockets; begun where its bytes arrive, such a request is answered there and then. One that
waits for the rest of its body goes on where that arrives, while its task still sleeps.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task  # documented for who writes tasks: "Extending asyncio"
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """A coroutine that waits for something: to be awaited once by the task that it was begun for, or ended by `fail`."""

    __slots__ = ("_coroutine", "waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:  # noqa: ANN401 - what a task is given
        self._coroutine = coroutine
        self.waits_for = waits_for
        """The future, or None for the event loop's next turn."""

    def __await__(self) -> Generator[Any, Any, T]:
        waits_for = self.waits_for
        while True:
            try:
                try:
                    value = yield waits_for
                except BaseException as error:  # noqa: BLE001 - the task's cancellation, or what it waited for failed
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(value)
            except StopIteration as end:
                result: T = end.value
                return result

    async def fail(self, error: BaseException) -> T:
        """Go on with `error` in place of what it waits for. A cancellation ends that first, as a task's own does: its children must
        not go on without it."""
        waits_for = self.waits_for
        if isinstance(error, asyncio.CancelledError) and waits_for is not None and waits_for.cancel():
            return await self
        try:
            self.waits_for = self._coroutine.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        return await self

    def go_on(self, task: asyncio.Task[Any], context: Context) -> T | Begun[T]:
        """As `begin`, from where it waits, once what it waits for is done; in place of awaiting it."""
        return begin(self._coroutine, task, context)


def begin(coroutine: Coroutine[Any, Any, T], task: asyncio.Task[Any], context: Context) -> T | Begun[T]:
    """Run it, as if within the task, up to its end or to where it next waits. No task may be running. Raises what it raises.

    `context` is the one that the task was made with: a variable that the coroutine sets now is set where it goes on.
    """
    loop = task.get_loop()
    _enter_task(loop, task)
    try:
        return Begun(coroutine, context.run(coroutine.send, None))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        _leave_task(loop, task)
