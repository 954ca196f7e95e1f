"""What an operator should know of the disks under a store: segment files that are not there, file systems that are nearly full.

A tier's own figures do not tell: a file system that others have filled refuses writes while the tier counts as empty.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvobj.database import DISK_FLOOR_BYTES

_MIB: Final = 1 << 20
_LOW_BYTES: Final = 8 * DISK_FLOOR_BYTES
"""So much is left of the data directory's file system when it is told: the catalog and its log grow by less in a day's work."""


def lost_segment_notes(directory: Path, numbers: Sequence[int]) -> tuple[str, ...]:
    """A sentence about segments whose files a start did not find; none where all were there."""
    if not numbers:
        return ()
    told = (
        f"{len(numbers)} segment files of the nvme tier were not there at the start, the first of them "
        f"{directory}/segment-{numbers[0]:06d}: what lies in them cannot be read. Is its disk mounted? Mount it and restart"
    )
    return (told,)


def room_notes(*, data: Path, nvme: Path, growth_bytes: int) -> tuple[str, ...]:
    """Sentences about file systems with too little room, as they are now. `growth_bytes`: what the nvme tier may still take of its
    own for segment files. Asks the kernel once for each directory; one that is gone by now says nothing here."""
    notes: list[str] = []
    free_bytes = _free_bytes(data)
    if free_bytes < _LOW_BYTES:
        state = "nothing new is stored" if free_bytes < DISK_FLOOR_BYTES else "below 16 MiB nothing new is stored"
        notes.append(f"the file system of {data} has {free_bytes // _MIB} MiB free: {state}, deletes go on")
    free_bytes = _free_bytes(nvme)
    if free_bytes < growth_bytes:
        notes.append(
            f"the nvme tier may take {growth_bytes // _MIB} MiB more, and the file system of {nvme} has "
            f"{free_bytes // _MIB} MiB free: the tier is full before its capacity"
        )
    return tuple(notes)


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return sys.maxsize
