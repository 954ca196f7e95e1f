"""Extents and the pins that keep them: who may look at a piece of the arena, and until when.

An extent stays whose it is until its last pin is released; then, and not before, its memory may be given to somebody else.
Pins are counted by hand, never by the garbage collector: a forgotten release is a leak that accounting shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Self

import msgspec

ALIGNMENT: Final = 4096


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A piece of a region file: `[offset, offset + length)` of region number `region`, all multiples of `ALIGNMENT`.

    `generation` is new for every reservation, over restarts too, so a name kept too long never means another's bytes.
    """

    region: int
    offset: int
    length: int
    generation: int


class Hold(msgspec.Struct, eq=False, gc=False):
    """One reserved extent and the number of pins on it. Made by the arena, shared by the pins; not for others.

    Of holds and pins there are as many as chunks in memory, which the cyclic collector therefore does not follow: with 100,000
    chunks it held everybody up for 0.4 s, again and again. `on_released` closes no cycle that lasts: the arena forgets a hold that
    is given back.
    """

    extent: Extent
    room: memoryview
    requested_bytes: int
    on_released: Callable[[Hold], None]
    pins: int = 0


class Pin(msgspec.Struct, eq=False, gc=False):
    """One reference on an extent, made of its hold alone. The extent's memory is given back when its last pin is released.

    Event loop only. The view may be read and written by threads as long as the pin lives; after the release nobody may touch it.
    """

    _hold: Hold
    _released: bool = False

    def __post_init__(self) -> None:
        self._hold.pins += 1

    @property
    def extent(self) -> Extent:
        """The extent that is held."""
        return self._hold.extent

    @property
    def view(self) -> memoryview:
        """The whole extent, writable, at a 4096-aligned address; its contents are undefined until written.

        Made anew at each call (0.2 µs): a held tier of 100,000 blobs keeps no views.
        """
        extent = self._hold.extent
        return self._hold.room[extent.offset : extent.offset + extent.length]

    def copy(self, start: int, stop: int) -> bytes:
        """Bytes `[start, stop)` of the extent, which has them, copied: a few cost less so than a view of their own."""
        extent = self._hold.extent
        return bytes(self._hold.room[extent.offset + start : extent.offset + stop])

    @property
    def pins(self) -> int:
        """How many pins the extent has now; may still be asked after the release."""
        return self._hold.pins

    @property
    def requested_bytes(self) -> int:
        """What was asked for when the extent was reserved, before rounding."""
        return self._hold.requested_bytes

    def share(self) -> Self:
        """Another pin on the same extent, to be released on its own. RuntimeError once this one is released."""
        if self._released:
            raise RuntimeError("share of a released pin")
        return type(self)(self._hold)

    def release(self) -> None:
        """Let go. A second release raises RuntimeError, since it would free what somebody else holds."""
        if self._released:
            raise RuntimeError("pin released twice")
        self._released = True
        hold = self._hold
        hold.pins -= 1
        # At one, too: what is left may be a cache's own pin, and a waiting reservation wants to know.
        if hold.pins <= 1:
            hold.on_released(hold)


def let_go(pins: Sequence[Pin]) -> list[Hold]:
    """Release pins of one arena, which is not told: its own part. The holds that no pin is left on. RuntimeError, as of
    `Pin.release`, where one is released already or given twice: then none of them is let go."""
    # All before any count is changed: the arena would not hear of those in front.
    if len(set(pins)) < len(pins) or any(pin._released for pin in pins):  # noqa: SLF001 - this module's own
        raise RuntimeError("pin released twice")
    ended: list[Hold] = []
    for pin in pins:
        pin._released = True  # noqa: SLF001
        hold = pin._hold  # noqa: SLF001
        hold.pins -= 1
        if not hold.pins:
            ended.append(hold)
    return ended
