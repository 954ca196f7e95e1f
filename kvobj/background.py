"""One task that works beside the requests until it is closed: what the workers of gc and the watch over readers share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod


class BackgroundWorker(ABC):
    """Event-loop-only. Started at most once, closed any number of times; closing cancels `_run` at the await that it is in.

    `_run` goes on for ever and survives what it expects to go wrong; `worker_name` is its task's name.
    """

    worker_name: str

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work in the background."""
        self._task = asyncio.create_task(self._run(), name=self.worker_name)

    async def aclose(self) -> None:
        """Stop, and return when it has stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    @abstractmethod
    async def _run(self) -> None: ...
