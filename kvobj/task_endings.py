"""Waits for tasks that a cancellation does not cut short: what is given back next must not be in use any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks, and return when all of them have ended, however often this is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    await to_their_end(tasks)


async def to_their_end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Return, or where this is cancelled raise that, when all of the tasks have ended by themselves."""
    is_cancelled = False
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            is_cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # one of them is raised elsewhere, nobody waits for the others
    if is_cancelled:
        raise asyncio.CancelledError
