"""Where an arena goes and how large it is when nobody said so, and which arenas are left over.

Shared memory comes first; where it is too small (containers often give 64 MiB) the arena is a file in the data directory, and the
reason is a sentence that `status` shows. Reads the machine, changes nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvobj.arena.geometry import read_geometry

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the one place for it; names in it carry the store's id, mode 0700
MINIMUM_BYTES: Final = 128 * 1024 * 1024
_NAME: Final = "kvobj-"
_MEBIBYTE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ArenaLocation:
    """A directory and a size. `reason` says in a sentence why this is not shared memory, empty where it is."""

    directory: Path
    capacity_bytes: int
    reason: str = ""


def choose_location(
    data_directory: Path,
    store_id: bytes,
    *,
    boot_id: str,
    memory_bytes: int,
    shared_memory: Path = SHARED_MEMORY,
    capacity_bytes: int | None = None,
) -> ArenaLocation:
    """The default place and size: `kvobj-<store id>` in shared memory, the lesser of a quarter of `memory_bytes` (the
    machine's) and half of what shared memory has free; a wanted `capacity_bytes` replaces the size, not the place.

    An arena of this store and boot that is there already keeps its size: what it takes up would otherwise count as not free,
    and the restart would find another geometry and start cold.
    """
    directory = shared_memory / f"{_NAME}{store_id.hex()}"
    known = read_geometry(directory)
    if known is not None and known.store_id == store_id and known.boot_id == boot_id:
        return ArenaLocation(directory, capacity_bytes or known.capacity_bytes)
    free_bytes = _free_bytes(shared_memory)
    size_bytes = capacity_bytes or _whole_mebibytes(min(memory_bytes // 4, free_bytes // 2))
    needed_bytes = capacity_bytes or MINIMUM_BYTES
    if size_bytes >= needed_bytes and free_bytes >= needed_bytes:
        return ArenaLocation(directory, size_bytes)
    fallback = data_directory / "arena"
    reason = (
        f"{shared_memory} has {free_bytes // _MEBIBYTE} MiB free and the machine {memory_bytes // _MEBIBYTE} MiB of memory, "
        f"too little for an arena of {needed_bytes // _MEBIBYTE} MiB in shared memory"
    )
    known = read_geometry(fallback)
    if known is not None and known.store_id == store_id and known.boot_id == boot_id:
        return ArenaLocation(fallback, capacity_bytes or known.capacity_bytes, reason)
    on_disk = min(memory_bytes // 4, _free_bytes(data_directory) // 2)
    return ArenaLocation(fallback, capacity_bytes or max(MINIMUM_BYTES, _whole_mebibytes(on_disk)), reason)


def orphaned_arenas(shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Arenas whose recorded data directory is gone: nothing will ever adopt or remove them. For a report; nothing is deleted."""
    orphans = []
    for directory in sorted(shared_memory.glob(f"{_NAME}*")):
        known = read_geometry(directory)
        if known is not None and known.data_directory and not Path(known.data_directory).exists():
            orphans.append(directory)
    return orphans


def _whole_mebibytes(size_bytes: int) -> int:
    return size_bytes - size_bytes % _MEBIBYTE


def _free_bytes(place: Path) -> int:
    """Bytes that may be written there; of a directory that does not exist yet, those of the nearest parent that does."""
    for path in (place, *place.absolute().parents):
        try:
            free = os.statvfs(path)
        except OSError:
            continue
        return free.f_bavail * free.f_frsize
    return 0
