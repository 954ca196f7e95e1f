"""What is remembered in memory follows a change's outcome, not its caller.

A change that was given to the database lands also where who asked for it has been cancelled (its connection broke, its worker
process died). So what the catalog counts or forgets after a change hangs on the change itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def followed(change: asyncio.Future[T], over: Callable[[asyncio.Future[T]], None]) -> T:
    """The outcome of a submitted change (`Database.submit`). `over` is called with it when it is over, before who waits here goes
    on, and also where they have been cancelled; never before. It must not raise."""
    change.add_done_callback(over)
    return await asyncio.shield(change)


def on_success(then: Callable[[T], None]) -> Callable[[asyncio.Future[T]], None]:
    """For `followed`: call `then` with the value of a change, and not at all where it failed."""

    def over(change: asyncio.Future[T]) -> None:
        if not change.cancelled() and change.exception() is None:
            then(change.result())

    return over
