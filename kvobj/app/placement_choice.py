"""Where a store's memory and disk go on this machine: the arena's place and size, the nvme tier's place and size."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvobj.app.tier_claim import refuse_anothers_arena
from kvobj.arena.geometry import read_geometry
from kvobj.arena.location import choose_location
from kvobj.config.settings import DramSettings, NvmeSettings
from kvobj.data_directory import DataDirectory, default_nvme_capacity_bytes


@dataclass(frozen=True, slots=True)
class ArenaChoice:
    """The arena of this start. `notes` are what an operator should know about it."""

    directory: Path
    capacity_bytes: int
    region_bytes: int
    notes: tuple[str, ...]

    @property
    def volatile_path(self) -> Path:
        """The volatile LMDB environment, which lives and dies with the arena."""
        return self.directory / "volatile"


def choose_arena(settings: DramSettings, data: DataDirectory, *, boot_id: str) -> ArenaChoice:
    """Place and size of the arena: the configuration's, else the machine's.

    `ConfigurationError` where another store's arena lies there. One that an earlier process of this boot left keeps its sizes,
    whatever the configuration says now: it may hold what was acknowledged and lies nowhere else. A clean stop removes it, and the
    next start makes one of the new size.
    """
    notes: list[str] = []
    if settings.path is not None and settings.capacity_bytes is not None:
        directory, capacity_bytes = settings.path, settings.capacity_bytes
    else:
        location = choose_location(
            data.path,
            data.store_id,
            boot_id=boot_id,
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            capacity_bytes=settings.capacity_bytes,
        )
        directory, capacity_bytes = settings.path or location.directory, location.capacity_bytes
        if location.reason and settings.path is None:
            notes.append(location.reason)
    region_bytes = min(settings.region_bytes, capacity_bytes)
    left = read_geometry(directory)
    refuse_anothers_arena(directory, left, data, boot_id=boot_id)
    if (
        left is not None
        and (left.store_id, left.boot_id) == (data.store_id, boot_id)
        and (left.capacity_bytes, left.region_bytes) != (capacity_bytes, region_bytes)
    ):
        notes.append(
            f"the arena keeps its {left.capacity_bytes} bytes from before the crash until the next clean stop; "
            f"configured are {capacity_bytes}"
        )
        capacity_bytes, region_bytes = left.capacity_bytes, left.region_bytes
    return ArenaChoice(directory, capacity_bytes, region_bytes, tuple(notes))


@dataclass(frozen=True, slots=True)
class NvmeChoice:
    """The nvme tier of this start."""

    directory: Path
    capacity_bytes: int
    segment_bytes: int


def choose_nvme(settings: NvmeSettings, data: DataDirectory) -> NvmeChoice:
    """Place and size of the nvme tier: the configuration's, else half of what the disk can give, at most 64 GiB."""
    directory = settings.path or data.nvme_path
    capacity_bytes = settings.capacity_bytes
    if capacity_bytes is None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        used_bytes = sum(file.stat().st_blocks * 512 for file in directory.iterdir() if file.is_file())
        capacity_bytes = default_nvme_capacity_bytes(
            free_bytes=shutil.disk_usage(directory).free, used_bytes=used_bytes
        )
    return NvmeChoice(directory, capacity_bytes, min(settings.segment_bytes, capacity_bytes))
