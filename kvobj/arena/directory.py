"""The arena's directory as files: what an earlier process left there, whether it can be adopted, and removing it.

Everything here blocks and runs on a thread. Files that are not the arena's own are left alone: the volatile catalog may live in
the same directory.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvobj.arena.geometry import GEOMETRY_FILE, Geometry, read_geometry, write_geometry
from kvobj.arena.outside_writers import NOTES_FILE
from kvobj.errors import StoreFullError, UnavailableError


def prepare_directory(directory: Path, wanted: Geometry) -> tuple[Geometry, bool]:
    """The geometry to go by and whether the region files can be adopted; stale ones are gone afterwards.

    Writes the geometry. `StoreFullError` where the file system has not that much free, `UnavailableError` where the
    directory cannot be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        previous = read_geometry(directory)
        files = _region_files(directory)
        adopted = previous is not None and bool(files) and wanted.same_shape(previous) and _sizes_agree(files, wanted)
        if not adopted:
            for file in files:
                file.unlink()
            (directory / NOTES_FILE).unlink(missing_ok=True)
            files = []
        geometry = Geometry(
            format=wanted.format,
            store_id=wanted.store_id,
            boot_id=wanted.boot_id,
            capacity_bytes=wanted.capacity_bytes,
            region_bytes=wanted.region_bytes,
            incarnation=previous.incarnation + 1 if previous is not None else 1,
            data_directory=str(Path(wanted.data_directory).absolute()) if wanted.data_directory else "",
            dedicated=previous.dedicated if previous is not None and adopted else {},
            made=previous.made if previous is not None and adopted else {},
            lent=previous.lent if previous is not None and adopted else [],
        )
        free = os.statvfs(directory)
        # What is behind the files, not how long they are: one whose making was cut short has holes.
        have_bytes = sum(file.stat().st_blocks * 512 for file in files)
        free_bytes = have_bytes + free.f_bavail * free.f_frsize
        if free_bytes < geometry.capacity_bytes:
            raise StoreFullError(
                "no room for the arena: give the dram tier less capacity, or another path",
                directory=str(directory),
                capacity_bytes=wanted.capacity_bytes,
                free_bytes=free_bytes,
            )
        write_geometry(directory, geometry)
    except OSError as error:
        raise UnavailableError("arena directory cannot be used", directory=str(directory), cause=str(error)) from error
    return geometry, adopted


def _region_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("region-*"))


def _sizes_agree(files: list[Path], wanted: Geometry) -> bool:
    names = {file.name: file.stat().st_size for file in files}
    for number in range(-(-wanted.capacity_bytes // wanted.region_bytes)):
        full = min(wanted.region_bytes, wanted.capacity_bytes - number * wanted.region_bytes)
        if names.pop(f"region-{number:04}", full) != full:
            return False
    return not names


def remove_files(directory: Path) -> None:
    """Delete the arena's files, and the directory if nothing else is in it."""
    for file in _region_files(directory):
        file.unlink(missing_ok=True)
    for name in (GEOMETRY_FILE, NOTES_FILE):
        (directory / name).unlink(missing_ok=True)
    # Somebody else's files (the volatile catalog) may be there too: they are removed by their owner.
    with contextlib.suppress(OSError):
        directory.rmdir()
