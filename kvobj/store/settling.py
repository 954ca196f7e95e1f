"""Waits that a cancellation does not cut short: what is given back next must not be in use any more."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


async def all_ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Return once all have ended. A cancellation of the caller meanwhile is raised then, not before.

    The tasks have a deadline of their own, or were cancelled by the caller. What they failed with is not raised here.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
