"""What a tier has begun and must see the end of before it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TasksInFlight:
    """What must have ended before files are closed. Errors are for whoever awaits a task, if anybody still does."""

    __slots__ = ("_count", "_futures", "_none_counted")

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[Any]] = set()
        self._count = 0
        self._none_counted: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Count something that has no future, until its `end`."""
        self._count += 1

    def end(self) -> None:
        """What a `begin` counted is over."""
        self._count -= 1
        if not self._count and self._none_counted is not None:
            self._none_counted.set_result(None)
            self._none_counted = None

    def add(self, future: asyncio.Future[Any]) -> None:
        """Count it until it is done."""
        self._futures.add(future)
        future.add_done_callback(self._ended)

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run as a task and count it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        return task

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait until none is left; False if some are after the deadline."""
        while self._futures or self._count:
            awaited = set(self._futures)
            if self._count:
                if self._none_counted is None:
                    self._none_counted = asyncio.get_running_loop().create_future()
                awaited.add(self._none_counted)
            _, left = await asyncio.wait(awaited, timeout=timeout_seconds)
            if left:
                return False
        return True

    def cancel(self) -> None:
        """Cancel what is left."""
        for future in tuple(self._futures):
            future.cancel()

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._futures.discard(future)
        if not future.cancelled():
            future.exception()
