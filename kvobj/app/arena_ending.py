"""Whether a clean stop removes the arena: only where nothing is in it alone."""

from __future__ import annotations

import logging
from pathlib import Path

from kvobj.arena import Arena
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import Durability
from kvobj.database import remove_volatile
from kvobj.tiers.dram import DramTier


class ArenaEnding:
    """`remove_arena`: nothing is in it alone, so that it may go. False until `decide` has looked."""

    def __init__(self, arena: Arena, volatile: Path) -> None:
        self._arena = arena
        self._volatile = volatile
        self.remove_arena = False

    async def close_arena(self) -> None:
        """Close the arena, and remove it where it may go."""
        if self.remove_arena:
            remove_volatile(self._volatile)
        await self._arena.aclose(remove=self.remove_arena)


async def decide(ending: ArenaEnding, *, dram: DramTier, catalog: LmdbCatalog, log: logging.Logger) -> None:
    """Runs when every worker has stopped: decides whether the arena may go."""
    if dram.dirty_bytes:
        log.warning("the arena stays: %d bytes in it could not be written down", dram.dirty_bytes)
    elif await _has_uploads_in_memory(catalog):
        log.info("the arena stays: uploads of class memory are open")
    else:
        await catalog.history.write_down()
        ending.remove_arena = True


async def _has_uploads_in_memory(catalog: LmdbCatalog) -> bool:
    for bucket in await catalog.buckets():
        after = ("", "")
        while True:
            page = await catalog.list_uploads(bucket.name, after=after, groups=True)
            if any(upload.durability is Durability.MEMORY for upload in page.rows):
                return True
            if page.next_after is None:
                break
            after = page.next_after
    return False
