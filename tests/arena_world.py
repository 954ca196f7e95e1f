"""Arenas of four regions in a directory of the test's own, closed and removed when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvobj.arena import Arena

MIB = 1024 * 1024
Open = Callable[..., Awaitable[Arena]]
"""Opens one, with other settings of `Arena.open` where they are named."""


@asynccontextmanager
async def arenas_at(directory: Path) -> AsyncIterator[Open]:
    """Opens the arena there, one life after the other."""
    opened: list[Arena] = []

    async def open_one(**wanted: object) -> Arena:
        settings: dict[str, object] = {
            "capacity_bytes": 4 * MIB,
            "region_bytes": MIB,
            "store_id": b"store",
            "boot_id": "boot",
        }
        arena = await Arena.open(directory, **(settings | wanted))  # type: ignore[arg-type]
        opened.append(arena)
        return arena

    yield open_one
    for arena in opened:
        await arena.aclose(remove=True)
