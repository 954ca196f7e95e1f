"""The note beside the region files that says whose they are, so that a later process knows whether to take them over.

Regions are adopted only if store, boot and sizes all agree: after a reboot their pages may be anything. The note is replaced
atomically and never synced, since it must not outlive the boot anyway.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from kvobj.arena.lane import Lane

GEOMETRY_FILE: Final = "geometry"
FORMAT: Final = 1


class Geometry(msgspec.Struct, frozen=True):
    """Identity and shape of an arena. `incarnation` counts the processes that opened it; `data_directory` is whose it is;
    `dedicated` names the bucket that a region serves alone, so that a restart does not mix others' bytes into it, and `made` says
    which bucket of the name: when it was made, and whose it was (older versions wrote nothing down); `lent` are those of them that
    somebody outside of the process was shown."""

    format: int
    store_id: bytes
    boot_id: str
    capacity_bytes: int
    region_bytes: int
    incarnation: int = 1
    data_directory: str = ""
    dedicated: dict[int, str] = {}
    made: dict[int, tuple[int, str]] = {}
    lent: list[int] = []

    @property
    def lanes(self) -> dict[int, Lane]:
        """By region, whom it serves alone."""
        return {number: Lane(name, *self.made.get(number, ())) for number, name in self.dedicated.items()}

    def same_shape(self, other: Geometry) -> bool:
        """Whether regions described by the one can be used as the other's."""
        return (self.format, self.store_id, self.boot_id, self.capacity_bytes, self.region_bytes) == (
            other.format,
            other.store_id,
            other.boot_id,
            other.capacity_bytes,
            other.region_bytes,
        )


def read_geometry(directory: Path) -> Geometry | None:
    """The note in `directory`, or None where there is none or it cannot be read (a torn or foreign file is no note)."""
    try:
        return msgspec.msgpack.decode((directory / GEOMETRY_FILE).read_bytes(), type=Geometry)
    except (OSError, msgspec.DecodeError):
        return None


def write_geometry(directory: Path, geometry: Geometry) -> None:
    """Replace the note atomically. OSError where the directory cannot be written."""
    fresh = directory / f"{GEOMETRY_FILE}.new"
    fresh.write_bytes(msgspec.msgpack.encode(geometry))
    fresh.replace(directory / GEOMETRY_FILE)


def current_boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """The id that the kernel drew at this boot."""
    return path.read_text(encoding="ascii").strip()
