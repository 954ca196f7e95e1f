"""What one worker reads in the store process: pinned frames under handles, and blobs that must not be reaped meanwhile.

A frame that still fills is followed for the worker, which learns how far it has come. Event-loop-only; `close` gives all back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.arena import Pin, PinnedFrame, Progress
from kvobj.errors import KvobjError, UnavailableError
from kvobj.tiers.in_use import BlobsInUse
from kvobj.workers.calls import OpenFrame, Room

_TOLD_BYTES: Final = 512 * 1024
"""Of a frame that fills, what comes is told in steps of so much: a message costs as much as copying 100 KiB."""


class HeldFrames:
    """See the module's text. `filled(handle, bytes)` and `failed(handle, error)` tell the worker of frames that fill."""

    def __init__(
        self,
        in_use: BlobsInUse,
        *,
        filled: Callable[[int, int], None],
        failed: Callable[[int, KvobjError], None],
    ) -> None:
        self._in_use = in_use
        self._filled = filled
        self._failed = failed
        self._next_handle = 1
        self._held: dict[int, tuple[Pin, bytes]] = {}
        self._telling: dict[int, asyncio.Task[None]] = {}
        self._uses: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        """How many handles and uses are out."""
        return len(self._held) + len(self._uses)

    def hand_out_hot(self, pin: Pin, frame_bytes: int, blob_id: bytes) -> OpenFrame:
        """`hand_out` of a whole frame in memory, whose blob is not in use yet."""
        self._in_use.hold((blob_id,))
        handle = self._next_handle
        self._next_handle += 1
        self._held[handle] = pin, blob_id
        extent = pin.extent
        room = Room(extent.region, extent.offset, extent.length, extent.generation)
        return OpenFrame(handle, room, frame_bytes, 0, frame_bytes, 0, "dram")

    def hand_out(self, frame: PinnedFrame, blob_id: bytes) -> OpenFrame:
        """Keep the frame for the worker. The blob is in use already, once for this handle."""
        handle = self._next_handle
        self._next_handle += 1
        self._held[handle] = frame.pin, blob_id
        extent = frame.pin.extent
        progress = frame.progress
        filled = total = 0
        if progress is not None and not progress.done:
            filled, total = progress.filled, progress.total
            self._telling[handle] = asyncio.create_task(self._tell(handle, progress, filled), name="worker-frame")
        return OpenFrame(
            handle,
            Room(extent.region, extent.offset, extent.length, extent.generation),
            frame.frame_bytes,
            frame.start,
            frame.size,
            frame.origin,
            frame.tier,
            filled,
            total,
        )

    async def _tell(self, handle: int, progress: Progress, told: int) -> None:
        """Tell of what comes above what has been `told`. Whether all has come says nothing of that: the last of it may come before
        this begins."""
        try:
            while told < progress.total:
                await progress.wait(told + _TOLD_BYTES)
                told = progress.filled
                self._filled(handle, told)
        except KvobjError as error:
            self._failed(handle, error)
        except Exception as error:  # noqa: BLE001 - readers wait in another process: whatever ends it must reach them
            self._failed(handle, UnavailableError("a frame could not be filled", error=repr(error)))

    def release(self, handles: Sequence[int]) -> None:
        """Let go of frames. Unknown handles are ignored."""
        for handle in handles:
            held = self._held.pop(handle, None)
            if held is None:
                continue
            if self._telling and (telling := self._telling.pop(handle, None)) is not None:
                telling.cancel()
            pin, blob_id = held
            pin.release()
            self._in_use.release((blob_id,))

    def use(self, use: int, blob_ids: list[bytes]) -> None:
        """Keep blobs from being reaped, under the worker's own number."""
        self.unuse(use)
        self._in_use.hold(blob_ids)
        self._uses[use] = blob_ids

    def unuse(self, use: int) -> None:
        """Let go of them. An unknown number is ignored."""
        blob_ids = self._uses.pop(use, None)
        if blob_ids is not None:
            self._in_use.release(blob_ids)

    def close(self) -> None:
        """The worker is gone."""
        self.release(list(self._held))
        for use in list(self._uses):
            self.unuse(use)
