"""What a tier has begun and must see the end of before it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TasksInFlight:
    """What must have ended before files are closed. Errors are for whoever awaits a task, if anybody still does."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[Any]] = set()

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
        while self._futures:
            _, left = await asyncio.wait(set(self._futures), timeout=timeout_seconds)
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
