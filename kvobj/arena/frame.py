"""A frame, or a piece of one, in a pinned extent; and how far its bytes have come when it is still being filled.

What crosses the lines between socket, store and tiers is a `PinnedFrame`: a view and the pin that keeps it true, never a copy.
Reading before the bytes are there is the reader's fault: it awaits `complete` or `ready` first.
"""

from __future__ import annotations

import asyncio
from typing import Self

from kvobj.arena.extent import Pin


class Progress:
    """How many leading bytes of something being filled are valid. Event loop only; any number of waiters."""

    __slots__ = ("_error", "_waiters", "filled", "total")

    def __init__(self, total: int) -> None:
        self.filled = 0
        self.total = total
        self._error: BaseException | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def done(self) -> bool:
        """Whether all bytes are there."""
        return self.filled >= self.total

    def advance(self, filled: int) -> None:
        """The first `filled` bytes are valid now. Never goes back."""
        if filled <= self.filled:
            return
        self.filled = filled
        if not self._waiters:
            return
        still: list[tuple[int, asyncio.Future[None]]] = []
        for upto, future in self._waiters:
            if upto > filled:
                still.append((upto, future))
            elif not future.done():
                future.set_result(None)
        self._waiters = still

    def fail(self, error: BaseException) -> None:
        """No more bytes will come: waiters, now and later, get `error`. What is filled stays valid. Once complete, ignored."""
        if self.done or self._error is not None:
            return
        self._error = error
        waiters, self._waiters = self._waiters, []
        for _, future in waiters:
            if not future.done():
                future.set_exception(error)

    async def wait(self, upto: int) -> None:
        """Return once the first `upto` bytes (at most `total`) are valid; raise what `fail` got if they never will be.

        Has no deadline of its own: whoever fills has one, and ends in `advance` or `fail`.
        """
        upto = min(upto, self.total)
        if self.filled >= upto:
            return
        if self._error is not None:
            raise self._error
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (upto, future)
        self._waiters.append(entry)
        try:
            await future
        finally:
            if entry in self._waiters:
                self._waiters.remove(entry)


class PinnedFrame:
    """Encoded bytes `[start, start + size)` of a frame of `frame_bytes`, in a pinned extent. Released exactly once.

    The extent's first byte is encoded byte `origin` of the frame (0 wherever a whole frame lies; a ranged read from a
    medium lands at the range's aligned start). Bytes of the extent past the frame's end are undefined: who writes
    the extent out with O_DIRECT zeroes them up to the next 4096 first. `progress` counts the extent's leading bytes; None
    says complete. `tier` names the tier that served it.
    """

    __slots__ = ("frame_bytes", "origin", "pin", "progress", "size", "start", "tier")

    def __init__(
        self,
        pin: Pin,
        *,
        frame_bytes: int,
        start: int = 0,
        size: int | None = None,
        progress: Progress | None = None,
        tier: str = "",
        origin: int = 0,
    ) -> None:
        self.pin = pin
        self.frame_bytes = frame_bytes
        self.start = start
        self.size = frame_bytes - start if size is None else size
        self.progress = progress
        self.tier = tier
        self.origin = origin
        inside = 0 <= origin <= start and self.size >= 0 and start + self.size <= frame_bytes
        if not inside or start + self.size - origin > pin.extent.length:
            raise ValueError(f"[{start}, {start + self.size}) is not in frame {frame_bytes} or extent {pin.extent}")

    @property
    def is_whole(self) -> bool:
        """Whether this covers the whole frame from the extent's first byte on: only such a frame can be put into a tier."""
        return self.origin == 0 and self.start == 0 and self.size == self.frame_bytes

    @property
    def view(self) -> memoryview:
        """Read-only: `[0:size]` are the encoded bytes `[start:start + size]`. Not to be used after the release."""
        return self.writable.toreadonly()

    @property
    def writable(self) -> memoryview:
        """The same for whoever fills it."""
        begin = self.start - self.origin
        return self.pin.view[begin : begin + self.size]

    async def complete(self) -> None:
        """Return once every byte is valid; raise what ended the filling otherwise."""
        if self.progress is not None:
            await self.progress.wait(self.progress.total)

    async def ready(self, upto: int) -> None:
        """Return once `view[:upto]` is valid; raise what ended the filling otherwise."""
        if self.progress is not None:
            await self.progress.wait(self.start - self.origin + upto)

    def share(self) -> Self:
        """The same bytes under a pin of their own."""
        return self.piece(self.start, self.size)

    def piece(self, start: int, size: int) -> Self:
        """Encoded bytes `[start, start + size)`, which this frame must hold, under a pin of their own."""
        if start < self.start or start + size > self.start + self.size:
            raise ValueError(f"[{start}, {start + size}) is outside [{self.start}, {self.start + self.size})")
        return type(self)(
            self.pin.share(),
            frame_bytes=self.frame_bytes,
            start=start,
            size=size,
            progress=self.progress,
            tier=self.tier,
            origin=self.origin,
        )

    def release(self) -> None:
        """Let go of the pin. A second release raises RuntimeError."""
        self.pin.release()
