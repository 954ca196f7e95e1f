"""The arena as a worker process sees it: its region files, mapped when first named, and pins whose last release is told.

What is mapped is populated in the background, so that requests do not take the page faults. Nothing is reserved here: rooms and
frames come from the store process, and whoever is given one keeps to it. Event-loop-only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvobj.arena import Extent, Pin
from kvobj.arena.extent import Hold
from kvobj.arena.region import Region
from kvobj.errors import UnavailableError
from kvobj.workers.calls import Room


class MappedArena:
    """See the module's text. `directory` is the arena's; its files have their full sizes from the first room in them on."""

    def __init__(self, directory: Path, *, huge_pages: bool) -> None:
        self._directory = directory
        self._huge_pages = huge_pages
        self._memory: dict[int, memoryview] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arena")

    def pin(self, room: Room, on_released: Callable[[], None]) -> Pin:
        """A pin on the room; `on_released` is called when the last of its shares is let go."""

        def released(hold: Hold) -> None:
            if not hold.pins:
                on_released()

        extent = Extent(room.region, room.offset, room.length, room.generation)
        memory = self._memory.get(room.region)
        if memory is None:
            memory = self._map(room.region)
        return Pin(Hold(extent, memory, room.length, released))

    def _map(self, number: int) -> memoryview:
        path = self._directory / f"region-{number:04}"
        try:
            region = Region(path, path.stat().st_size)
            region.map(huge_pages=self._huge_pages)
        except OSError as error:
            raise UnavailableError("a region of the arena cannot be mapped", path=path) from error
        assert region.room is not None
        self._memory[number] = region.room
        self._thread.submit(region.populate, 0, region.size_bytes, fresh=False)
        return region.room

    def close(self) -> None:
        """Wait for no more than the populating that has begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
