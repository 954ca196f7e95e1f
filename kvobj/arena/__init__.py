"""The arena: preallocated shared memory, carved into extents that bytes are received into, hashed in, written from and sent from.

It exists so that no payload memory is allocated per request and no payload is copied without a reason. Everything here
belongs to one event loop. It guarantees that an extent's memory is not given to anybody else while a pin on it lives; it knows
nothing of blobs, and keeps no record of what lies in an extent (the dram tier's directory does).
"""

from __future__ import annotations

from kvobj.arena.allocator import ExtentAllocator
from kvobj.arena.arena import Arena, ArenaUsage, Reclaimer
from kvobj.arena.extent import ALIGNMENT, Extent, Pin
from kvobj.arena.frame import PinnedFrame, Progress
from kvobj.arena.lane import Lane, NamedBucket
from kvobj.arena.location import ArenaLocation, choose_location, orphaned_arenas

__all__ = [
    "ALIGNMENT",
    "Arena",
    "ArenaLocation",
    "ArenaUsage",
    "Extent",
    "ExtentAllocator",
    "Lane",
    "NamedBucket",
    "Pin",
    "PinnedFrame",
    "Progress",
    "Reclaimer",
    "choose_location",
    "orphaned_arenas",
]
